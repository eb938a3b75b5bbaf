"""What all trained heads are as drafters: a model that reads the target's states, built by name from a folder of weights."""

import warnings
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Float

from polydraft.core import DraftSampling, Method, Needs, Scores
from polydraft.core.cursor import Cursor
from polydraft.core.drafts import FIXED
from polydraft.drafters.base import Parts
from polydraft.drafters.model.paths import ModelDrafter
from polydraft.errors import InvalidInputError
from polydraft.heads.checkpoint import HeadCheckpoint, head_folder
from polydraft.methods import registry
from polydraft.methods.papers import method
from polydraft.models.compiled.model import CompiledModel
from polydraft.models.matrices.products import FORMATS


def head_methods(name: str, title: str, papers: str) -> tuple[Method, ...]:
    """What a head declares whose drafts are independent draws in fixed trees. papers: see `papers.method`."""
    return (method(name, title, papers, {DraftSampling.IID}, FIXED),)


class HeadCursor(Cursor):
    """One of a head that reads entry i of its cache from token i + 1 and the target's state at token i.

    known: entries whose states it was told, those that are read included.  states: of the last ones.
    """

    model: Any

    def __init__(self, model: Any, slot: int) -> None:
        super().__init__(model, slot)
        self.known = self.length
        self.states: Float[np.ndarray, "T F"] = np.empty((0, 0), np.float32)

    def tell(self, start: int, states: Float[np.ndarray, "T F"]) -> None:
        """The states of the entries from `start` on; what is there beyond is forgotten."""
        self.cut(start)
        before = self.pending_states[: start - self.length]
        self.states = np.concatenate([before, states]) if len(before) else states
        self.known = start + len(states)

    @property
    def pending_states(self) -> Float[np.ndarray, "T F"]:
        """Of the entries that are known and not read."""
        return self.states[len(self.states) - (self.known - self.length) :]

    def num_unread(self, text: Sequence[int]) -> int:
        """Known entries but that of the root."""
        return max(self.known - 1 - self.length, 0)

    def unread(self, text: tuple[int, ...]) -> tuple[int, ...]:
        """Those whose states are known; the root alone where it has none."""
        return text[1 + self.length : 1 + self.known] or text[-1:]

    def read(self, text: Sequence[int], count: int, hidden: Sequence[int] = ()) -> Scores:
        """See `Cursor.read`."""
        start = 1 + self.length
        self.model.give(self.slot, self.pending_states)
        return self.model.prefill([self.slot], [text[start : start + count]])


class HeadDrafter(ModelDrafter):
    """A head of the target as a drafter; kinds as for `ModelDrafter`. layers: whose states it reads, side by side."""

    methods: tuple[Method, ...]
    checkpoint: ClassVar[type[HeadCheckpoint]]
    forms: ClassVar[tuple[str, str]]
    """Where the compiled form and the torch one are, as "module:class"."""

    def __init__(
        self, model: Any, layers: Sequence[int], kind: str = "paths", *, stop_ids: Sequence[int] = ()
    ) -> None:
        super().__init__(model, kind, stop_ids=stop_ids)
        self.model: Any
        self.layers = tuple(layers)
        self.needs = Needs(hidden=tuple(sorted(layers)), embeddings=True, head=True)
        self.info = self.of_kind(kind)

    @classmethod
    def of_kind(cls, kind: str = "paths") -> Method:
        """The head by its name, and how a kind of `ModelDrafter` draws."""
        head = cls.methods[0]
        general = ModelDrafter.of_kind(kind)
        name = head.name if kind == "paths" else f"{head.name}:{kind}"
        return replace(
            head,
            name=name,
            draft_sampling=general.draft_sampling,
            shapes=general.shapes,
            ranked=general.ranked,
        )

    @classmethod
    def model_of(cls, head: Any, target: Any, quantization: str | None = None) -> Any:
        """The head as a draft model: its compiled form for a compiled target where it has one, with weights of a format, else its network.

        Raises:
            InvalidInputError: a format that there is none of.
        """
        if quantization not in (None, *FORMATS):
            raise InvalidInputError(
                f"quantization={quantization!r} was given for a draft head; expected one of {', '.join(FORMATS)}, or None: int8."
            )
        compiles = isinstance(target, CompiledModel) and head.compiles
        if isinstance(target, CompiledModel) and not compiles:
            warnings.warn(
                f"the head of kind {cls.methods[0].name!r} has layers that are not compiled: it drafts through torch, slower than a compiled one. "
                "The text is the same.",
                stacklevel=2,
            )
        module, _, name = cls.forms[0 if compiles else 1].partition(":")
        options = {"quantization": quantization} if compiles and quantization else {}
        return getattr(import_module(module), name)(head, target, **options)

    @classmethod
    def build(
        cls,
        parts: Parts,
        *,
        weights: str | None = None,
        kind: str = "paths",
        quantization: str | None = None,
        **options: Any,
    ) -> "HeadDrafter":
        """For the engine. weights: a folder as `polydraft train` writes it, or of a published head; default the one that comes with the
        package for this target.  quantization: of a compiled head's matrices, default int8.  options: see the constructor.

        Raises:
            InvalidInputError: no weights.
            ModelLoadError, IncompatibleError: a folder that is none, or of another target.
        """
        head = cls.head_of(parts, weights)
        cls.check_kind(kind, head)
        model = cls.model_of(head, parts.target, quantization)
        return cls(model, head.layers_of(parts.target), kind, stop_ids=parts.eos_token_ids, **options)

    @classmethod
    def head_of(cls, parts: Parts, weights: str | None) -> Any:
        """The head of a folder, or the one that comes with the package for the target."""
        return cls.checkpoint.load(head_folder(cls.checkpoint.kind, parts.target, weights))

    @classmethod
    def check_kind(cls, kind: str, head: Any) -> None:
        """Refuse drafts of a kind that this head cannot make."""

    @property
    def options(self) -> dict[str, Any]:
        """Of the constructor, beside those of all heads."""
        return {}

    def sibling(self, kind: str) -> "HeadDrafter":
        """See `ModelDrafter.sibling`."""
        name, _ = registry.name_and_kind(f"{self.methods[0].name.partition(':')[0]}:{kind}")
        made = registry.drafter(name)
        options = self.options if made is type(self) else {}
        drafter = made(self.model, self.layers, kind, stop_ids=self._stop_ids, **options)
        drafter.slots = self.slots
        drafter._proposed = self._proposed
        return drafter

    def _joined(self, scores: Scores) -> Float[np.ndarray, "B T F"]:
        return np.concatenate([scores.hidden[layer] for layer in self.layers], -1)

    @staticmethod
    def _accepted(states: Float[np.ndarray, "N F"], path: Sequence[int]) -> Float[np.ndarray, "A F"]:
        """States of the root and of an accepted path."""
        return states[[0, *path]]
