"""What `python -m studies.limits` measures at: two models, places in texts that neither was trained on, and the settings of a run."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from polydraft.core import NoiseKey
from polydraft.drafters.base import Parts
from polydraft.drafters.model.paths import ModelDrafter
from polydraft.errors import InvalidInputError, unknown_name
from polydraft.heads.folder import kind_of
from polydraft.methods import registry
from polydraft.models import load, pair
from polydraft.sampling import noise

HELD_OUT = (
    "argparse",
    "bisect",
    "graphlib",
    "heapq",
    "json.decoder",
    "json.encoder",
    "sched",
    "shutil",
    "textwrap",
)
"""Modules of the standard library that the embedded pair was not trained on."""
CONTEXT = 96
"""Tokens before each measured place."""
CHAIN_RULES = ("speculative", "block")
PATH_RULES: dict[str, tuple[str, ...]] = {
    "paths": (
        "single_with_spares",
        "recursive",
        "kseq",
        "max_ratio",
        "transport",
        "importance",
        "traversal",
        "multipath",
        "greedy_traversal",
    ),
    "without_replacement": ("recursive_wor", "traversal", "greedy_traversal_wor"),
    "greedy_plus_one": ("greedy_plus_one", "traversal"),
    "top_k": ("match",),
    "coupled": ("race",),
    "listed": ("list_race",),
    "systematic": ("flow",),
}
"""Kind of model drafter -> rules measured on its drafts."""
MEASURED = ("bound", *CHAIN_RULES, *dict.fromkeys(rule for names in PATH_RULES.values() for rule in names))
ALWAYS = ("block", "traversal")
BOUND_CONTEXTS = 200
"""Drafts of each kind from which the bound is shown: it is a mean over texts of its own, which rules exceed by chance where there are few."""


@dataclass(frozen=True)
class LimitSettings:
    """What is measured.

    contexts: places in the texts for paths.  node_contexts: for single nodes, tree_contexts: for draft trees of equal size; 0 measures none.
    temperature, top_p: of the paths.  drafts: of each kind at each context, whose mean is one value.
    rules: path rules to measure, all of them where empty; block and traversal verification are measured anyway, to compare with.
    """

    contexts: int = 240
    node_contexts: int = 60
    tree_contexts: int = 0
    temperature: float = 1.0
    temperatures: tuple[float, ...] = (0.2, 0.6, 1.0, 1.4)
    num_drafts: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 7, 8)
    drafts_by_temperature: int = 4
    num_paths: tuple[int, ...] = (2, 3, 4)
    depths: tuple[int, ...] = (4, 6, 8)
    seed: int = 0
    rules: tuple[str, ...] = ()
    drafts: int = 1
    top_p: float = 1.0

    @property
    def bounded(self) -> bool:
        """Whether there are enough drafts to compare rules with the bound."""
        return self.contexts * self.drafts >= BOUND_CONTEXTS

    def __post_init__(self) -> None:
        if (
            self.contexts < 6
            or self.node_contexts in (1, -1)
            or min(self.num_paths) < 2
            or self.drafts < 1
            or min(*self.temperatures, self.temperature) <= 0
        ):
            raise InvalidInputError(
                f"{self} was given; expected at least six contexts (two for each third), two for nodes or none, two paths, one draft and positive temperatures. "
                "One path is measured anyway; temperature 0 has nothing to measure, as only equal tokens are kept."
            )
        for name in self.rules:
            if name not in MEASURED:
                raise unknown_name("path rule", name, MEASURED)


def held_out_texts() -> list[str]:
    """Sources of the standard library's held-out modules, as installed.

    Example:
        >>> any("class ArgumentParser" in text for text in held_out_texts())
        True
    """
    origins = [spec.origin for name in HELD_OUT if (spec := find_spec(name)) is not None]
    return [Path(origin).read_text(encoding="utf-8") for origin in origins if origin is not None]


class Pair:
    """Two models and some texts. target, draft: folders, the embedded pair by default.  head: a folder of a trained head in the draft's place."""

    def __init__(
        self,
        settings: LimitSettings,
        *,
        target: str | None = None,
        draft: str | None = None,
        head: str | None = None,
        texts: Sequence[str] | None = None,
    ) -> None:
        if (target is None) != (draft is None and head is None) or (
            head and (draft or settings.node_contexts)
        ):
            raise InvalidInputError(
                "one model was given without the other; expected both a target and a draft, or neither, or a target and a head, for paths alone."
            )
        folders = [
            target or str(pair.target_folder()),
            *([] if head else [draft or str(pair.draft_folder())]),
        ]
        self.settings = settings
        self.target, *drafts = (
            load.load_model(f, max_model_len=CONTEXT + 64, max_num_seqs=2) for f in folders
        )
        self.draft: Any = drafts[0] if drafts else None
        tokenizers = [load.load_tokenizer(f) for f in folders]
        if self.draft is not None:
            load.check_same_vocabulary(*tokenizers, self.target.vocab_size, self.draft.vocab_size)
            self.drafter = ModelDrafter(self.draft)
        else:
            self.drafter = registry.build_drafter(
                kind_of(str(head)), Parts(self.target, None, tokenizers[0], ()), {"weights": head}
            )
        self.documents = [
            load.encode(tokenizers[0], text) for text in (held_out_texts() if texts is None else texts)
        ]
        if sum(max(len(ids) - CONTEXT, 0) for ids in self.documents) < 2 * max(
            settings.contexts, settings.node_contexts
        ):
            raise InvalidInputError(
                f"texts of {sum(map(len, self.documents))} tokens were given for {settings.contexts} contexts; expected at least "
                f"{CONTEXT} tokens each and two for every context. Give longer texts, or fewer contexts."
            )

    def contexts(self, count: int) -> list[tuple[int, ...]]:
        """Windows of `CONTEXT` tokens that end at places spread evenly over the texts, shifted by the seed."""
        places = [(d, e) for d, ids in enumerate(self.documents) for e in range(CONTEXT, len(ids))]
        u = noise.uniforms(NoiseKey.of([self.settings.seed], [0], [0]), noise.Stream.DRAFT, 1).item()
        chosen = [places[int((i + u) * len(places) / count) % len(places)] for i in range(count)]
        return [tuple(self.documents[d][e - CONTEXT : e]) for d, e in chosen]

    def last_distributions(
        self, context: tuple[int, ...], temperatures: Sequence[float]
    ) -> dict[float, tuple[np.ndarray, np.ndarray]]:
        """(p, q) after the context at each temperature."""
        rows: list[np.ndarray] = []
        for model in (self.target, self.draft):
            model.release([1])
            rows.append(model.prefill([1], [context]).logits[0, -1].astype(np.float64))
        return {T: (_distribution(rows[0], T), _distribution(rows[1], T)) for T in temperatures}


def _distribution(logits: np.ndarray, temperature: float) -> np.ndarray:
    x = np.exp((logits - logits.max()) / temperature)
    return x / x.sum()
