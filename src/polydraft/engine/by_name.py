"""From names to drafters: the engine's own, and those that requests may name."""

import warnings
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from typing import Any

from polydraft.core import Drafter, NamedDecoding, Target
from polydraft.drafters.base import Parts
from polydraft.errors import IncompatibleError, InvalidInputError
from polydraft.heads.checkpoint import own_predictor, shipped
from polydraft.heads.folder import kind_of
from polydraft.methods import registry


def drafts(named: str | Drafter | None, target: Target) -> bool:
    """Whether a target is drafted for: one that takes no drafts is decoded plainly unless a drafter is named.

    Raises:
        IncompatibleError: one is named.
    """
    if named is None or named == "none":
        return False
    if target.plain_reason is not None and named != "auto":
        raise IncompatibleError(
            f"drafter={named!r} was given for {target.name!r}, which takes no drafts: {target.plain_reason}. Leave the drafter out."
        )
    return target.plain_reason is None


def drafter(named: str | Drafter | None, parts: Parts, options: Mapping[str, Any]) -> Drafter | None:
    """By name, or as it is; None decodes plainly.

    Raises:
        InvalidInputError: neither a name nor a drafter.
        IncompatibleError: a target that takes no drafts.
    """
    if not drafts(named, parts.target):
        if named == "auto":
            warnings.warn(
                f"{parts.target.name!r} is decoded plainly, without drafts: {parts.target.plain_reason}. Models of the types llama, mistral, "
                "qwen2, qwen3, gemma3 and others are compiled, with drafts, which is faster.",
                stacklevel=2,
            )
        return None
    if not isinstance(named, str) and hasattr(named, "propose"):
        return named
    if not isinstance(named, str) or "," in named.partition(":")[0]:
        raise InvalidInputError(
            f"drafter={named!r} was given; expected a name of `polydraft methods`, a `core.Drafter`, or None. Several text drafters are one as "
            "'mixture:ngram,suffix'; beside a model 'auto' copies long repeats of the text."
        )
    return _built(named, parts, options)


def has_own_vocabulary(drafter: object) -> bool:
    """Whether the drafter of this name has a draft model with a tokenizer of its own.

    Example:
        >>> has_own_vocabulary("tli"), has_own_vocabulary("model:chain"), has_own_vocabulary(None)
        (True, False, False)
    """
    name = drafter.partition(":")[0] if isinstance(drafter, str) else ""
    return name in registry.names("drafter") and registry.drafter(name).methods[0].own_vocabulary


def others(names: Seq[str], source: Drafter | None, parts: Parts) -> dict[str, Drafter]:
    """Further drafters by name beside the first one; kinds of one model share its slots.

    Raises:
        InvalidInputError: several drafters in one, or one twice.
    """
    drafters: dict[str, Drafter] = {} if source is None else {source.info.name: source}
    for name in names:
        if "," in name or name in ("auto", "none", *drafters):
            raise InvalidInputError(
                f"offered={list(names)} was given; expected names of single drafters, each once, beside the engine's own. Leave out {name!r}."
            )
        drafters[name] = _kind_of(drafters.values(), name) or _built(name, parts, {})
    return {name: drafters[name] for name in names}


def _kind_of(drafters: Iterable[Drafter], named: str) -> Drafter | None:
    """A further kind of a model drafter that is there already: it shares the model and its slots."""
    name, _, kind = named.partition(":")
    siblings = (drafter.offers.sibling for drafter in drafters if drafter.info.name.partition(":")[0] == name)
    sibling = next((make for make in siblings if make is not None), None)
    return None if sibling is None else sibling(kind or "paths")


def _built(named: str, parts: Parts, options: Mapping[str, Any]) -> Drafter:
    if named == "auto":
        named, options = _auto(parts, options)
    return registry.build_drafter(named, parts, options)


def _auto(parts: Parts, options: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """The drafter where none is named, and its options."""
    if isinstance(parts.decoding, NamedDecoding) and parts.decoding.info.drafter:
        return parts.decoding.info.drafter, options
    weights = options.get("weights")
    if weights is None and parts.draft_model is not None:
        return "model", options
    if weights is None and own_predictor(parts.target) is not None:
        return "mtp", options
    weights = weights or shipped(parts.target)
    return ("ngram", options) if weights is None else (kind_of(weights), {**options, "weights": weights})
