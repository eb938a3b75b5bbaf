"""Draft heads on disk, whatever their kind: a folder with a configuration, tensors by name, and what tells its target from others.

    config.json          what a Llama of these widths would say, and what the kind adds; `polydraft_head` is the kind
    model.safetensors    the kind's tensors, matrices perhaps in `eight_bits`; d2t: draft token i is the target's token i + d2t[i]
    target_probe         of heads trained here: some embeddings of the target, by which another target is refused

Where `lm_head.weight` is missing a head uses the target's own output rows, which it was trained with.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from os import PathLike
from pathlib import Path
from pickle import UnpicklingError
from types import SimpleNamespace
from typing import Any, ClassVar, TypeVar

import numpy as np
from jaxtyping import Float, Int

from polydraft.core import Target
from polydraft.errors import IncompatibleError, InvalidInputError, ModelLoadError
from polydraft.files.atomic import replacing
from polydraft.files.schema import HEAD, fault
from polydraft.heads.eight_bits import expanded
from polydraft.heads.fields import unknown_field
from polydraft.heads.fit import ModelSizes, misfit
from polydraft.heads.folder import HeadFolder
from polydraft.heads.markov import Markov, markov
from polydraft.methods import registry
from polydraft.models.compiled.model import CompiledModel
from polydraft.models.loading.checkpoint import PredictorCheckpoint
from polydraft.models.networks import LLAMA, QWEN3
from polydraft.models.networks.settings import rope_of_folder
from polydraft.models.rotary import head_width, rotary
from polydraft.models.store.places import NUMBERS
from polydraft.models.store.tensor_files import tensors_of
from polydraft.numerics.floats import as_bfloat16, as_float32

Kind = TypeVar("Kind", bound="HeadCheckpoint")
PROBED = 8
"""Tokens whose embeddings tell one target from another, at equal steps of the vocabulary."""
DEFAULTS = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "hidden_act": "silu",
    "model_type": "llama",
}
"""What a head's configuration need not say; transformers' own defaults."""
OPTIONS = {
    "target_hidden_size": None,
    "num_target_layers": None,
    "embed_requires_grad": False,
    "norm_before_residual": False,
    "norm_before_fc": False,
    "fc_norm": False,
    "norm_output": False,
    "mask_token_id": None,
    "markov_rank": 0,
    "markov_head_type": "none",
    "enable_confidence_head": False,
    "confidence_head_with_markov": False,
    "final_logit_softcapping": None,
}
"""Likewise, of what some heads add."""


def probe(target: Target) -> Float[np.ndarray, "N h"]:
    """What a head remembers of its target."""
    ids = np.arange(PROBED) * (target.vocab_size // PROBED)
    return as_float32(target.embed(ids))  # pyright: ignore[reportAttributeAccessIssue] - offered, as `Needs` says


def sizes_of_target(target: Target) -> ModelSizes:
    """As heads are compared with them."""
    return ModelSizes(probe(target).shape[1], target.vocab_size, max(target.offers.hidden, default=0))


def embeddings(target: Any) -> Float[np.ndarray, "V h"]:
    """All of a target's embeddings in bfloat16."""
    pieces = np.split(np.arange(target.vocab_size), range(4096, target.vocab_size, 4096))
    return np.concatenate([as_bfloat16(target.embed(ids)) for ids in pieces])


def output_rows(target: Any, ids: Int[np.ndarray, " D"]) -> Float[np.ndarray, "D h"]:
    """Rows of a target's output matrix."""
    if isinstance(target, CompiledModel):
        return target.output_rows(ids)
    columns = target.head(np.eye(probe(target).shape[1], dtype=np.float32))[:, ids]
    return np.ascontiguousarray(columns.T, np.float32)


def stored(folder: Path, *names: str) -> dict[str, np.ndarray]:
    """Tensors of the first of these files that is there; files of torch hold tensors and nothing that runs.

    Raises:
        FileNotFoundError: none of them.
        ValueError: as of `eight_bits.expanded`, or a file of torch with more than tensors in it.
    """
    file = next((folder / name for name in names if (folder / name).exists()), None)
    if file is None:
        raise FileNotFoundError(f"there is no {' and no '.join(names)}")
    if file.suffix == ".safetensors":
        return expanded(tensors_of(file))
    import torch

    from polydraft.models.torch.door import out

    try:
        tensors = torch.load(file, map_location="cpu", weights_only=True)
    except UnpicklingError as error:  # whose words advise to run it
        raise ValueError(f"{file.name} holds something beside tensors, of which nothing is run") from error
    return {name: out(tensor) for name, tensor in tensors.items()}


@dataclass(frozen=True)
class HeadCheckpoint:
    """config: with the names of transformers' `LlamaConfig`, and what the kind adds.  layers: whose states it reads, as `Needs.hidden` counts them.
    tensors: by name.  ids: [D] the draft vocabulary, rising.
    """

    kind: ClassVar[str] = "head"
    LAYERS: ClassVar[str] = "eagle_aux_hidden_state_layer_ids"
    """The name of the layers in the configuration, as published heads have it."""
    FIELDS: ClassVar[frozenset[str]] = frozenset()
    """Of the configuration that it reads beside those of all heads; others are refused."""
    UNREAD: ClassVar[frozenset[str]] = frozenset(
        {"t2d", "d2t", "target_probe", "lm_head.weight", "embed_tokens.weight"}
    )
    """Tensors that a folder may hold beside those of `shapes`; others are refused."""
    config: Any
    layers: tuple[int, ...]
    tensors: Mapping[str, np.ndarray]
    ids: np.ndarray

    @classmethod
    def load(cls: type[Kind], folder: str | PathLike[str]) -> Kind:
        """Read a folder, once for a `HeadFolder`.

        Raises:
            ModelLoadError: files that are missing or cannot be read, or tensors that are missing or misshapen, by name.
        """
        head = HeadFolder.of(folder)
        if cls not in head.checkpoints:
            head.checkpoints[cls] = cls.of_folder(head)
        return head.checkpoints[cls]

    @classmethod
    def of_folder(cls: type[Kind], folder: HeadFolder) -> Kind:
        """What `load` reads."""
        try:
            settings, tensors = cls.read(folder.settings, folder.path)
            if problem := fault(settings, HEAD, {"layers": settings.get("num_hidden_layers") or 1}):
                raise ValueError(problem)
            if field := unknown_field(settings, {*cls.FIELDS, cls.LAYERS}):
                raise ValueError(f"{field} is not understood, and may change what the head drafts")
            config = head_config(settings)
            layers = tuple(map(int, settings[cls.LAYERS]))
            rotary(config, 1)
        except Exception as error:  # whatever these files hold: they are somebody else's
            raise ModelLoadError(
                f"{str(folder)!r} was given as a head of kind {cls.kind!r}, and cannot be read as one: {error!r}. Expected a folder "
                f"with config.json ({cls.LAYERS} in it) and model.safetensors."
            ) from error
        head = cls(config, layers, tensors, _draft_ids(tensors, config.vocab_size))
        head.check_tensors(str(folder))
        return head

    def check_tensors(self, folder: str) -> None:
        """Refuse tensors that are missing, misshapen, or read by no part of the head.

        Raises:
            ModelLoadError: by name.
        """
        expected = self.shapes()
        strange = sorted(self.tensors.keys() - expected.keys() - self.UNREAD)
        if strange:
            raise ModelLoadError(
                f"the head in {folder!r} has {', '.join(strange[:4])}, which no part of a head of kind {self.kind!r} with its configuration "
                "reads: it would draft nonsense. Use a head of another format, or its authors' engine."
            )
        for name, shape in expected.items():
            if name not in self.tensors:
                raise ModelLoadError(
                    f"the head in {folder!r} has no tensor {name}; expected {shape}. Is it {self.kind}?"
                )
            actual = tuple(self.tensors[name].shape)
            if actual != shape:
                raise ModelLoadError(
                    f"the head in {folder!r} has {name} of shape {actual}; expected {shape}. Is it {self.kind}?"
                )

    @classmethod
    def reads(cls, settings: Mapping[str, Any]) -> bool:
        """Whether a configuration that names no kind of ours is of such a head; those of `polydraft train` name theirs."""
        return False

    @classmethod
    def read(cls, settings: dict[str, Any], folder: Path) -> tuple[dict[str, Any], Mapping[str, np.ndarray]]:
        """The configuration and the tensors, whatever layout they are stored in."""
        return settings, stored(folder, "model.safetensors")

    @property
    def shares_rows(self) -> bool:
        """Whether embeddings and output rows are the target's, in whatever form it has them."""
        return False

    @property
    def compiles(self) -> bool:
        """Whether its compiled form runs a head of this configuration; else it drafts in torch."""
        return True

    @property
    def state_size(self) -> int:
        """Width of a state that it reads."""
        return int(self.config.target_hidden_size or self.config.hidden_size)

    def bias(self, slots: int, depths: int, num_drafts: int) -> Markov:
        """What the drafted tokens before a node add to its logits: nothing."""
        return markov({}, "none", slots, depths, num_drafts)

    def layers_of(self, target: Target) -> tuple[int, ...]:
        """Whose states it reads of this target, where the folder does not say it: the last."""
        return self.layers or (max(target.offers.hidden, default=0),)

    def parts(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors that are trained."""
        return {}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the tensors that a head of this configuration has: those that are trained, and rows of its own where it has them."""
        h = self.config.hidden_size
        own = {"lm_head.weight": (len(self.ids), h), "embed_tokens.weight": (self.config.vocab_size, h)}
        return {**self.parts(), **{name: shape for name, shape in own.items() if name in self.tensors}}

    def check(self, target: Target) -> None:
        """Refuse another target than the head was trained for.

        Raises:
            IncompatibleError: another width, vocabulary or model.
        """
        theirs = probe(target)
        reason = misfit(vars(self.config), sizes_of_target(target), self.layers)
        if reason is None and self._has_other_embeddings(theirs, target.vocab_size):
            reason = "it was trained for another model, their embeddings differ"
        if reason:
            raise IncompatibleError(
                f"the head is not for {target.name or type(target).__name__}: {reason}. Use the head of this target, or train one: "
                f"polydraft train {self.kind}."
            )

    def _has_other_embeddings(self, theirs: Float[np.ndarray, "N h"], vocab_size: int) -> bool:
        """Whether what it remembers of its target, or brings of it, is far from a target's `probe`."""
        ours = self.tensors.get("target_probe")
        rows = self.tensors.get("embed_tokens.weight")
        if ours is None and rows is not None and not self.config.embed_requires_grad:
            ours = rows[np.arange(PROBED) * (vocab_size // PROBED)]
        if ours is None:
            return False
        ours = as_float32(ours).ravel()
        other = theirs.ravel()
        return bool(ours @ other < 0.98 * np.linalg.norm(ours) * np.linalg.norm(other))

    def output(self, target: Target) -> Float[np.ndarray, "D h"]:
        """Rows of the output matrix at the draft vocabulary: its own, or the target's."""
        rows = self.tensors.get("lm_head.weight")
        return output_rows(target, self.ids) if rows is None else as_float32(rows)


def save_head(
    folder: Path,
    kind: type[HeadCheckpoint],
    tensors: Mapping[str, np.ndarray],
    target: Target,
    layers: Sequence[int],
    ids: Int[np.ndarray, " D"],
    **config: Any,
) -> None:
    """Write a folder that `kind.load` reads, matrices in bfloat16.

    Raises:
        OSError: what was there before stays.
    """
    probed = probe(target)
    own = {"d2t": ids - np.arange(len(ids)), "target_probe": probed}
    settings = {
        "polydraft_head": kind.kind,
        kind.LAYERS: list(layers),
        "vocab_size": target.vocab_size,
        "hidden_size": probed.shape[1],
        "draft_vocab_size": len(ids),
        **config,
    }
    write_folder(folder, {**tensors, **own}, settings)


def write_folder(folder: Path, tensors: Mapping[str, np.ndarray], settings: Mapping[str, Any]) -> None:
    """Write a head's two files, numbers in bfloat16; of each what was there before stays until it is whole."""
    from safetensors.numpy import save

    stored = {
        name: np.ascontiguousarray(as_bfloat16(x) if x.dtype in NUMBERS.values() else x)
        for name, x in tensors.items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / "model.safetensors") as file:
        file.write(save(stored))
    with replacing(folder / "config.json") as file:
        file.write(json.dumps(settings, indent=2).encode())


def head_config(settings: Mapping[str, Any]) -> Any:
    """A head's settings, those that it does not say as a Llama of one layer would."""
    said = {name: value for name, value in settings.items() if value is not None}
    config = {**DEFAULTS, **OPTIONS, **said}
    if settings.get("rope_scaling") or settings.get("rope_parameters"):
        config["rope_parameters"] = rope_of_folder(config)
    config.setdefault("num_key_value_heads", config["num_attention_heads"])
    config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    return SimpleNamespace(**config)


def has_head_norms(config: Any) -> bool:
    """Whether queries and keys of its layers are normed."""
    return config.model_type == "qwen3"


def layer_shapes(
    config: Any, prefix: str, inputs: int | None = None, *, head_norms: bool | None = None
) -> dict[str, tuple[int, ...]]:
    """Of a layer's tensors. inputs: width of what its attention reads, default the head's.  head_norms: default those of the configuration."""
    normed = has_head_norms(config) if head_norms is None else head_norms
    shapes = (QWEN3 if normed else LLAMA).layer_shapes(config, inputs)
    return {prefix + name: shape for name, shape in shapes.items()}


def has_whole_widths(config: Any) -> bool:
    """Whether compiled products take the widths of its layers, as of `CompiledModel`."""
    mixed = config.num_attention_heads * head_width(config)
    return not any(width % 8 for width in (config.hidden_size, config.intermediate_size, mixed))


def _draft_ids(tensors: Mapping[str, np.ndarray], vocab_size: int) -> np.ndarray:
    """The target's tokens that a head can draft.

    Raises:
        ModelLoadError: a map beyond the vocabulary.
    """
    if "d2t" not in tensors:
        return np.arange(vocab_size)
    offsets = tensors["d2t"].astype(np.int64)
    ids = np.arange(len(offsets)) + offsets
    if len(ids) == 0 or ids[0] < 0 or ids[-1] >= vocab_size or (np.diff(ids) <= 0).any():
        raise ModelLoadError(
            f"the head's map d2t leads out of the {vocab_size} tokens or is not rising. Get the file again."
        )
    return ids


def own_predictor(target: Target) -> PredictorCheckpoint | None:
    """The layer in a target's own files that predicts a further token, where there is one that is run."""
    return getattr(getattr(target, "checkpoint", None), "predictor", None)


def shipped(target: Target) -> HeadFolder | None:
    """The head for this target that comes with the package, if there is one."""
    if not (target.offers.embeddings and target.offers.head and target.offers.hidden):
        return None
    for folder in sorted(Path(str(files("polydraft.heads") / "shipped")).glob("*/")):
        head = HeadFolder(folder)
        if misfit(head.settings, sizes_of_target(target)):
            continue
        try:
            head.checkpoint.check(target)
        except IncompatibleError:
            continue
        return head
    return None


def head_folder(kind: str, target: Target, weights: str | PathLike[str] | None) -> HeadFolder:
    """The folder that is given, or the one of this kind that comes with the package for the target.

    Raises:
        InvalidInputError: neither.
    """
    head = shipped(target) if weights is None else HeadFolder.of(weights)
    if head is None or (weights is None and head.kind != kind):
        is_trained = kind in registry.names("recipe")
        advice = f"Train them: polydraft train {kind}" if is_trained else "Name a published head: OWNER/NAME"
        raise InvalidInputError(
            f"the drafter {kind!r} was asked for without weights, and none come with the package for this target; expected "
            f"weights=FOLDER (--head FOLDER). {advice}."
        )
    return head
