"""Which rules are exact for which drafts, and which of them to prefer."""

from dataclasses import replace

from polydraft import registry
from polydraft.core import Method, SiblingLaw, TreeShape
from polydraft.errors import IncompatibleError

__all__ = ["PREFERRED", "allows", "best_for", "check_pair", "check_request", "fitting"]

PREFERRED: dict[SiblingLaw, tuple[str, ...]] = {
    SiblingLaw.IID: ("block", "greedy_traversal", "traversal", "recursive", "match"),
    SiblingLaw.WITHOUT_REPLACEMENT: ("greedy_traversal_wor", "traversal", "recursive_wor", "match"),
    SiblingLaw.POINT_MASS: ("match",),
    SiblingLaw.COUPLED: ("race", "match"),
    SiblingLaw.GREEDY_PLUS_ONE: ("traversal", "greedy_plus_one", "match"),
    SiblingLaw.INDEPENDENT: ("traversal", "recursive", "match"),
    SiblingLaw.LISTED: ("list_race", "match"),
}
"""Best first, by measured block efficiency; the first that accepts all shapes of a drafter is taken."""


def _accepts(verifier: Method, drafter: Method) -> bool:
    return drafter.laws <= verifier.laws and drafter.shapes <= verifier.shapes


def fitting(drafter: Method) -> list[str]:
    """Names of the lossless verifiers that are exact for a drafter."""
    infos = {name: registry.verifier(name).info for name in registry.names("verifier")}
    return [name for name, info in infos.items() if info.lossless and _accepts(info, drafter)]


def best_for(drafter: Method) -> str:
    """The preferred lossless verifier for a drafter: what "auto" means.

    Example:
        >>> from polydraft.core import SiblingLaw, TreeShape
        >>> info = Method("d", "", "", 2024, "", frozenset({SiblingLaw.POINT_MASS}), frozenset({TreeShape.GROWN}))
        >>> best_for(info)
        'match'
    """
    names = fitting(drafter)
    preferred = [name for law in drafter.laws for name in PREFERRED[law] if name in names]
    return (preferred or names)[0]


def check_pair(drafter: Method, verifier: Method) -> None:
    """Raise IncompatibleError, naming both and what fits, unless the verifier is exact for the drafter's drafts."""
    if not _accepts(verifier, drafter):
        raise IncompatibleError(
            f"verifier {verifier.name!r} was joined with drafter {drafter.name!r}, which makes {_words(drafter)}; it is exact "
            f"only for {_words(verifier)}. Verifiers that fit: {', '.join(fitting(drafter))}."
        )


def allows(shape: TreeShape, drafter: Method, verifier: Method) -> bool:
    """Whether the drafter makes this shape on request and the verifier is exact for it."""
    return shape in drafter.on_request & verifier.shapes


_REQUESTS = {
    TreeShape.RAGGED: ("paths of unequal lengths", "short"),
    TreeShape.BY_POSITION: ("trees by position", "parents"),
}


def check_request(shape: TreeShape, drafter: Method, verifier: Method) -> None:
    """Raise IncompatibleError, naming both and what fits, unless it `allows` the shape."""
    if not allows(shape, drafter, verifier):
        (what, option), exact = _REQUESTS[shape], fitting(replace(drafter, shapes=frozenset({shape})))
        raise IncompatibleError(
            f"{what} ({option}=...) were asked of drafter {drafter.name!r} with verifier {verifier.name!r}; expected a drafter that "
            f"makes them, such as 'model', and a verifier that is exact for them: {', '.join(exact)}. Use these, or drop {option}."
        )


def _words(info: Method) -> str:
    laws = " or ".join(law.name for law in SiblingLaw if law in info.laws)
    return f"{laws} drafts of shape {' or '.join(shape.name for shape in TreeShape if shape in info.shapes)}"
