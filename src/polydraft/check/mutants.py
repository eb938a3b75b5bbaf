"""Known mistakes, made in the code that ships: `polydraft check --self-test` shows that the check finds each of them.

A mutant is a verifier whose modules are read again with some of their lines changed; the modules that others use stay as they are. Mistakes
of a walk alone differ from the verdict on the same noise. Those of walk and verdict alike, of drafters and of wrong pairings show in the
statistics alone.
"""

import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from types import ModuleType
from typing import Any

from jaxtyping import Float

from polydraft.check.wrong_drafters import DropsUnlikely, OwnPositions, TopWithRow
from polydraft.core import Draft, DraftSampling, Method, Target, TreeShape, Verdict
from polydraft.core.arrays import Array
from polydraft.drafters.model.paths import ModelDrafter
from polydraft.methods import registry
from polydraft.verifiers.lift.leaf_to_root import LeafToRoot

ANYTHING = Method(
    "wrong", "A known mistake", "", 2026, "", frozenset(DraftSampling), frozenset(TreeShape), lossless=False
)
MATCH, RACE, RECURSIVE, LIFT, VISITS, TRIES = (
    f"polydraft.verifiers.{name}"
    for name in ("match", "race", "recursive", "lift.leaf_to_root", "walks.visits", "walks.traversal")
)


@dataclass(frozen=True)
class Edit:
    """A module that is read again, with one piece of its text changed; with none it is read again for what it imports."""

    module: str
    text: str = ""
    change: str = ""


@dataclass(frozen=True)
class Mutant:
    """name: what is wrong.  verifier: makes the verifier.  kind: of drafts.  depth, width: of the drafts.  drafter: class that drafts."""

    name: str
    verifier: Callable[[], Any]
    kind: str
    depth: int
    width: int
    drafter: type[ModelDrafter] = ModelDrafter

    def drafts(self, draft_model: Target, stop_ids: Sequence[int] = ()) -> ModelDrafter:
        """The drafter."""
        return self.drafter(draft_model, self.kind, stop_ids=stop_ids)


@dataclass(frozen=True)
class Misfit:
    """A verifier that claims to fit drafts for which it is not exact; the engine refuses it otherwise."""

    right: Any
    info: Method = ANYTHING

    def __call__(self, draft: Draft, target_probs: Float[Array, "B N V"]) -> Verdict:
        return self.right(draft, target_probs)


@lru_cache(maxsize=1)
def _folders() -> TemporaryDirectory[str]:
    """Where changed modules lie, and what is compiled of them, until the process ends."""
    return TemporaryDirectory(prefix="polydraft-mutants-")


def _changed(name: str, edits: Sequence[Edit]) -> str:
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.origin is not None
    source = Path(spec.origin).read_text(encoding="utf-8")
    for edit in edits:
        if edit.text and source.count(edit.text) != 1:
            raise ValueError(
                f"{edit.text!r} stands {source.count(edit.text)} times in {name}; expected once. Change the mutant with it."
            )
        source = source.replace(edit.text, edit.change) if edit.text else source
    return source


def _read(name: str, source: str, folder: Path) -> ModuleType:
    """A module of this source under a name that others import it by."""
    path = folder / f"{name.rpartition('.')[2]}.py"
    path.write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def mutant(verifier: str, *edits: Edit) -> Any:
    """The verifier of that name, made of modules that are read again in the order of these edits, its own last.

    Raises:
        ValueError: the text of an edit does not stand exactly once in its module.

    Example:
        >>> wrong = mutant("match", Edit(MATCH, "    return p\\n", "    return 1 - p\\n"))
        >>> import numpy as np
        >>> sys.modules[MATCH].emitted_probs(np.array([[0.25, 0.75]]), None, np.array([[1]])).tolist()
        [[0.25, 0.75]]
        >>> wrong.emitted_probs(np.array([[0.25, 0.75]]), None, np.array([[1]])).tolist()
        [[0.75, 0.25]]
    """
    module, _, attribute = registry.places("verifier")[verifier].partition(":")
    names = [*dict.fromkeys(edit.module for edit in edits if edit.module != module), module]
    sources = {name: _changed(name, [edit for edit in edits if edit.module == name]) for name in names}
    shipped = {name: importlib.import_module(name) for name in names}
    folder = Path(
        mkdtemp(dir=_folders().name)
    )  # a folder each: what is compiled of a module depends on the others
    try:
        read = [_read(name, source, folder) for name, source in sources.items()]
        return getattr(read[-1], attribute)
    finally:
        sys.modules.update(shipped)


KINDS = {
    DraftSampling.WITHOUT_REPLACEMENT: "without_replacement", DraftSampling.GREEDY_PLUS_ONE: "greedy_plus_one",
    DraftSampling.SYSTEMATIC: "systematic", DraftSampling.IID: "paths",
}  # fmt: skip
"""Kinds of a draft model's drafts, by how they are sampled."""
WALKS = {
    "block": (
        "residual without the accumulated weight", "chain", 1,
        (Edit(VISITS, "leftover(at.sync, at.weight[u]", "leftover(at.sync, 1.0"), Edit(TRIES), Edit(LIFT)),
    ),
    "match": (
        "extra token may be a drafted one", "chain", 1,
        (Edit(MATCH, "p[tokens[m]] = 0.0", "p[tokens[m]] *= 1.0"),),
    ),
    "race": ("one vector of clocks for all positions", "coupled", 2, (Edit(RACE, "batch.position[b] + depth", "batch.position[b]"),)),
    "list_race": (
        "all paths in play everywhere", "listed", 2,
        (Edit(RACE, "active = self.active(draft.tree)", "active = np.ones_like(self.active(draft.tree))"),),
    ),
    **{
        name: (
            "noise of another position", KINDS[next(sampling for sampling in KINDS if sampling in verifier.info.draft_sampling)], 3,
            (Edit(LIFT, "arrays(draft, logits, key, samplings)", "arrays(draft, logits, replace(key, position=key.position + 1), samplings)"),),
        )
        for name, verifier in ((name, registry.verifier(name)) for name in registry.names("verifier"))
        if isinstance(verifier, LeafToRoot) and name != "block"
    },
}  # fmt: skip
"""Verifiers with a compiled walk -> a mistake of the walk alone, the kind and the width of drafts that go through it, and its edits."""

VERDICTS = (
    ("block", "residual without the accumulated weight", "chain", 2, 1, (
        Edit(VISITS, "surplus(at.sync, a * at.scale[u]", "surplus(at.sync, (a > 0.0) * at.scale[u]"),
        Edit(VISITS, "leftover(at.sync, at.weight[u]", "leftover(at.sync, 1.0 * (at.weight[u] > 0.0)"),
        Edit(TRIES),
        Edit(LIFT, "positive_part(w[:, None] * p - q)", "positive_part(p - q)"),
    )),
    ("block", "clamped factors", "chain", 2, 1, (
        Edit(VISITS, "accepted_weight(at.weight[u], at.p[u, x]", "at.weight[u] * accepted_weight(1.0, at.p[u, x]"),
        Edit(TRIES),
        Edit(LIFT, "xp.clip(w * px / qx, max=1.0)", "w * xp.clip(px / qx, max=1.0)"),
    )),
    ("recursive", "equal draws skipped", "paths", 1, 3, (
        Edit(RECURSIVE, "there = draw >= 0", "there = (draw >= 0) & xp.all(draws[:, :j] != draw[:, None], axis=1)"),
    )),
    ("recursive_wor", "siblings sorted after drawing", "without_replacement", 1, 3, (
        Edit(RECURSIVE, "    r = p\n",
             "    r = p\n"
             "    likely = xp.where(draws >= 0, xp.take_along_axis(q, xp.clip(draws, min=0), axis=1), -1.0)\n"
             "    draws = xp.take_along_axis(draws, xp.argsort(likely, axis=1, descending=True), axis=1)\n"),
    )),
    ("match", "a new draw after a mismatch", "chain", 1, 1, (
        Edit(MATCH, "    return p\n", "    from polydraft.core.arrays import gather, scatter_add\n"
             "    accept = gather(p, draws[:, :1])\n    return scatter_add((1 - accept) * p, draws[:, :1], accept)\n"),
    )),
)  # fmt: skip
"""Mistakes of walk and verdict alike: the verifier, what is wrong, the kind, depth and width of drafts that show it, and the edits."""


def mistakes() -> Iterator[Mutant]:
    """Every known mistake, with the drafts that show it."""
    for name, (what, kind, width, edits) in WALKS.items():
        yield Mutant(f"walk of {name}: {what}", partial(mutant, name, *edits), kind, 2, width)
    for name, what, kind, depth, width, edits in VERDICTS:
        yield Mutant(f"{name}: {what}", partial(mutant, name, *edits), kind, depth, width)

    def misfit(name: str) -> Callable[[], Misfit]:
        return lambda: Misfit(registry.verifier(name))

    yield Mutant(
        "distinct draws verified as with replacement", misfit("recursive"), "without_replacement", 1, 3
    )
    yield Mutant("iid paths verified as systematic", misfit("flow"), "paths", 2, 3)
    wor = partial(registry.verifier, "recursive_wor")
    yield Mutant("top tokens verified as if drawn", wor, "without_replacement", 1, 3, TopWithRow)
    yield Mutant(
        "unlikely draws dropped", partial(registry.verifier, "speculative"), "chain", 1, 1, DropsUnlikely
    )
    yield Mutant(
        "noise keyed by a token's own position",
        partial(registry.verifier, "block"),
        "chain",
        3,
        1,
        OwnPositions,
    )
