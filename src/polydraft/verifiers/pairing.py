"""Which verifiers are exact for which drafts, and which of them to prefer."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import chain

from polydraft.core import Budget, DraftSampling, Method, TreeShape
from polydraft.errors import IncompatibleError
from polydraft.methods import registry

PREFERRED: dict[DraftSampling, tuple[str, ...]] = {
    DraftSampling.IID: ("block", "greedy_traversal", "traversal", "recursive", "match"),
    DraftSampling.WITHOUT_REPLACEMENT: ("greedy_traversal_wor", "traversal", "recursive_wor", "match"),
    DraftSampling.POINT_MASS: ("match",),
    DraftSampling.COUPLED: ("race", "match"),
    DraftSampling.GREEDY_PLUS_ONE: ("traversal", "greedy_plus_one", "match"),
    DraftSampling.INDEPENDENT: ("traversal", "recursive", "match"),
    DraftSampling.LISTED: ("list_race", "match"),
    DraftSampling.SYSTEMATIC: ("flow", "match"),
}
"""Best first, by measured block efficiency; the first that accepts all shapes of a drafter is taken."""


def accepts(verifier: Method, drafter: Method) -> bool:
    """Whether a verifier is exact for all that a drafter makes of its own accord, and for chains of one that draws what its budget says."""
    needed = drafter.shapes & {TreeShape.GROWN} or {TreeShape.CHAIN}
    return drafter.draft_sampling <= verifier.draft_sampling and needed <= verifier.shapes


def fitting(drafter: Method) -> list[str]:
    """Names of the lossless verifiers that are exact for a drafter."""
    infos = {name: registry.verifier(name).info for name in registry.names("verifier")}
    return [name for name, info in infos.items() if info.lossless and accepts(info, drafter)]


def best_for(drafter: Method, *, spares: bool = False) -> str:
    """The preferred lossless verifier for a drafter: what "auto" means.

    spares: whether spare siblings may be asked of it, see `budget.Stop`.

    Example:
        >>> from polydraft.core import DraftSampling, TreeShape
        >>> info = Method("d", "", "", 2024, "", frozenset({DraftSampling.POINT_MASS}), frozenset({TreeShape.GROWN}))
        >>> best_for(info)
        'match'
    """
    if spares:
        draft_sampling = drafter.draft_sampling | {DraftSampling.WITHOUT_REPLACEMENT}
        shapes = drafter.shapes | {TreeShape.GROWN}
        drafter = replace(drafter, draft_sampling=draft_sampling, shapes=shapes)

    def fits(name: str) -> bool:
        info = registry.verifier(name).info
        return info.lossless and accepts(info, drafter) and drafter.shapes <= info.shapes

    preferred = (name for draft_sampling in drafter.draft_sampling for name in PREFERRED[draft_sampling])
    return next(
        name for name in chain(preferred, registry.names("verifier")) if fits(name)
    )  # of others no module is imported


def check_pair(drafter: Method, verifier: Method) -> None:
    """Raise IncompatibleError, naming both and what fits, unless the verifier is exact for the drafter's drafts."""
    if not accepts(verifier, drafter):
        raise IncompatibleError(
            f"verifier {verifier.name!r} was joined with drafter {drafter.name!r}, which makes {_words(drafter)}; it is exact "
            f"only for {_words(verifier)}. Verifiers that fit: {', '.join(fitting(drafter))}."
        )


def allowed(budgets: Iterable[Budget], drafter: Method, verifier: Method) -> list[Budget]:
    """Those that the drafter draws and the verifier is exact for. One that grows its trees takes any as their bounds.

    Example:
        >>> drafter, verifier = registry.drafter("model").methods[0], registry.verifier("block").info
        >>> [budget.max_depth for budget in allowed([Budget.fixed((-1, 0, 1)), Budget.fixed((-1, 0, 0))], drafter, verifier)]
        [2]
    """
    if TreeShape.GROWN in drafter.shapes:
        return list(budgets)
    shapes = drafter.shapes & verifier.shapes
    return [budget for budget in budgets if budget.shape in shapes]


_WORDS = {
    TreeShape.CHAIN: "chains",
    TreeShape.PATHS: "several paths",
    TreeShape.PRODUCT: "trees with equal numbers of children at each depth",
    TreeShape.RAGGED: "paths of unequal lengths",
    TreeShape.BY_POSITION: "trees by position",
    TreeShape.GROWN: "trees that grow",
}


def check_budget(budget: Budget, drafter: Method, verifier: Method) -> None:
    """Raise IncompatibleError, naming both and what fits, unless the budget is `allowed`."""
    if not allowed([budget], drafter, verifier):
        what = _WORDS[budget.shape]
        rules = [(name, registry.verifier(name).info) for name in fitting(drafter)]
        exact = [name for name, info in rules if budget.shape in info.shapes]
        raise IncompatibleError(
            f"{what} were asked of drafter {drafter.name!r} with verifier {verifier.name!r}; expected a drafter that "
            f"makes them, such as 'model', and a verifier that is exact for them: {', '.join(exact)}. Use these, or another budget."
        )


def _words(info: Method) -> str:
    words = " or ".join(
        draft_sampling.name for draft_sampling in DraftSampling if draft_sampling in info.draft_sampling
    )
    return f"{words} drafts of shape {' or '.join(shape.name for shape in TreeShape if shape in info.shapes)}"
