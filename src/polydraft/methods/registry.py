"""Every method by name: one line here makes it known to the engine, the command line, the tests and the docs.

Other packages add theirs through the entry points of `GROUPS`, and so does the wing of papers, which nothing in this package imports: its
table, `papers/entry_points.txt`, travels with the source, so that the wing is there before anything is installed.
"""

from collections.abc import Callable, Mapping
from functools import lru_cache
from inspect import Parameter, signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import polydraft
from polydraft.errors import InvalidInputError, unknown_name

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

VERIFIERS: dict[str, str] = {
    "speculative": "polydraft.verifiers.speculative:speculative",
    "match": "polydraft.verifiers.match:match",
    "recursive": "polydraft.verifiers.recursive:recursive",
    "recursive_wor": "polydraft.verifiers.recursive:recursive_wor",
    "recursive_merged": "polydraft.verifiers.recursive:recursive_merged",
    "single_with_spares": "polydraft.verifiers.single_with_spares:single_with_spares",
    "kseq": "polydraft.verifiers.kseq:kseq",
    "greedy_plus_one": "polydraft.verifiers.greedy_plus_one:greedy_plus_one",
    "max_ratio": "polydraft.verifiers.max_ratio:max_ratio",
    "importance": "polydraft.verifiers.importance:importance",
    "transport": "polydraft.verifiers.transport:transport",
    "block": "polydraft.verifiers.block:block",
    "greedy_traversal": "polydraft.verifiers.greedy_traversal:greedy_traversal",
    "greedy_traversal_wor": "polydraft.verifiers.greedy_traversal_wor:greedy_traversal_wor",
    "flow": "polydraft.verifiers.flow:flow",
    "multipath": "polydraft.verifiers.multipath:multipath",
    "traversal": "polydraft.verifiers.traversal:traversal",
    "traversal_merged": "polydraft.verifiers.traversal:traversal_merged",
    "race": "polydraft.verifiers.race:race",
    "list_race": "polydraft.verifiers.list_race:list_race",
}
"""name -> "module:object", an instance of `core.Verifier`."""


class HeadKind(NamedTuple):
    """drafter: "module:class", which reads a folder of a head's weights.  recipe: likewise, of one that can be trained, see `RECIPES`."""

    drafter: str
    recipe: str | None = None


HEADS: dict[str, HeadKind] = {
    "eagle": HeadKind("polydraft.heads.eagle:EagleDrafter", "polydraft.heads.eagle.network:EagleRecipe"),
    "peagle": HeadKind("polydraft.heads.peagle:PeagleDrafter"),
    "block": HeadKind("polydraft.heads.block:BlockDrafter", "polydraft.heads.block.training:BlockRecipe"),
    "mtp": HeadKind("polydraft.heads.mtp:MtpDrafter", "polydraft.heads.mtp.network:MtpRecipe"),
    "assistant": HeadKind("polydraft.heads.assistant:AssistantDrafter"),
    "medusa": HeadKind("polydraft.heads.medusa:MedusaDrafter", "polydraft.heads.medusa.network:MedusaRecipe"),
}
"""Heads by kind, in the order in which they are asked whether a folder is theirs."""

DRAFTERS: dict[str, str] = {
    "model": "polydraft.drafters.model.paths:ModelDrafter",
    **{name: head.drafter for name, head in HEADS.items()},
    "ngram": "polydraft.drafters.text.ngram:NgramDrafter",
    "tli": "polydraft.drafters.model.tli:TliDrafter",
    "slem": "polydraft.drafters.model.slem:SlemDrafter",
    "suffix": "polydraft.drafters.text.suffix:SuffixDrafter",
}
"""name -> "module:object", a class whose instances are `core.Drafter` and whose `methods` attribute lists what it can make. One with kinds has
`of_kind(kind)`, what it declares then."""

OF_TEXT = ("ngram", "suffix")
"""Drafters that read texts alone, and no draft model."""

OF_MODELS = ("tli", "slem")
"""Drafters that declare what they draw once they have their models."""

RECIPES: dict[str, str] = {
    **{name: head.recipe for name, head in HEADS.items() if head.recipe is not None},
    "model": "polydraft.train.small_model:ModelRecipe",
    "dspark": "polydraft.heads.block.dspark:DSparkRecipe",
}
"""kind -> "module:object", a `heads.recipe.Recipe`: what `polydraft train` can train; its checkpoint says which drafter reads it."""

DECODINGS: dict[str, str] = {
    "contrastive": "polydraft.decoding.contrastive:Contrastive",
    "guidance": "polydraft.decoding.guidance:Guidance",
}
"""name -> "module:object", a class whose instances are `core.Decoding`, with `info`, a `core.DecodingMethod`, and `build(parts, **options)`."""

COPYING = "ngram"
"""The drafter that copies from the request's own text: for requests with a prediction, and the origin of tokens that a policy copies in place of drafts."""

TABLES = {
    "verifier": VERIFIERS,
    "drafter": DRAFTERS,
    "decoding": DECODINGS,
    "recipe": RECIPES,
}
"""Kinds of methods, and those that are listed here."""
GROUPS = {
    "verifier": "polydraft.verifiers",
    "drafter": "polydraft.drafters",
    "head": "polydraft.heads",
    "decoding": "polydraft.decoding",
    "recipe": "polydraft.recipes",
    "command": "polydraft.commands",
    "index": "polydraft.indexes",
    "made verifier": "polydraft.made_verifiers",
    "option": "polydraft.options",
}
"""Kind -> entry-point group, of the wing and of other packages. A head is a drafter whose `checkpoint` says which folders it reads.
A command is a function for Typer, or a `typer.Typer` with a group of them; "group.name" stands in the group of that name. An index is a function
that `polydraft index build` calls for its kind. A made verifier is the `core.Method` of one that is made
for a model's own data, such as a codebook, and not by its name alone. An option is a function `(drafter, verifier)` of what was asked for, its name
that of a switch of `config.SpeculationConfig`; it gives the name of the drafter that drafts where the switch is on."""
WING = Path(polydraft.__file__).parent / "papers"


@lru_cache
def _plugins(kind: str) -> "dict[str, EntryPoint]":
    from importlib.metadata import Distribution, entry_points

    group = GROUPS[kind]
    points = [*Distribution.at(WING).entry_points.select(group=group), *entry_points(group=group)]
    return {point.name: point for point in points} | (_plugins("head") if kind == "drafter" else {})


def heads() -> list[str]:
    """Names of all drafters that are heads, built in and plugged in.

    Example:
        >>> "eagle" in heads()
        True
    """
    return [*_plugins("head"), *HEADS]


def places(kind: str) -> dict[str, str]:
    """Name -> "module:object" of all registered of a kind of `GROUPS`.

    Example:
        >>> places("verifier")["block"]
        'polydraft.verifiers.block:block'
    """
    return {**TABLES.get(kind, {}), **{name: point.value for name, point in _plugins(kind).items()}}


def names(kind: str) -> list[str]:
    """All registered names of a kind of `GROUPS`, built in and plugged in.

    Example:
        >>> "block" in names("verifier")
        True
    """
    return list(places(kind))


def check_name(kind: str, name: str) -> None:
    """Refuse a verifier, drafter or decoding method that there is not; none is imported.

    Raises:
        UnknownNameError: with the nearest known name.

    Example:
        >>> check_name("verifier", "block")
    """
    if name not in places(kind):
        raise _unknown(kind, name)


def name_and_kind(named: str) -> tuple[str, str]:
    """A registered drafter, and a kind of it or "": "model:chain". A kind that is registered by itself has none.

    Example:
        >>> name_and_kind("model:chain"), name_and_kind("block:random")
        (('model', 'chain'), ('block:random', ''))
    """
    if named in places("drafter"):
        return named, ""
    name, _, kind = named.partition(":")
    return name, kind


def check_drafter(named: str) -> None:
    """The same of a drafter, perhaps with its kind, "model:chain".

    Raises:
        UnknownNameError: with the nearest known name.
        InvalidInputError: a colon without a kind.
    """
    name, kind = name_and_kind(named)
    check_name("drafter", name)
    if name != named and not kind.strip(" ,"):
        raise InvalidInputError(
            f"the drafter {named!r} was given; expected a kind after the colon, or {name!r} alone. `polydraft methods` lists kinds."
        )


def load(kind: str, name: str) -> Any:
    """What is registered under that name, imported now.

    Raises:
        UnknownNameError: with the nearest known name.

    Example:
        >>> load("verifier", "match").info.lossless
        True
    """
    from importlib.metadata import EntryPoint

    check_name(kind, name)
    return EntryPoint(name, places(kind)[name], "").load()


def _unknown(kind: str, name: str) -> Exception:
    if kind == "verifier" and (place := places("made verifier").get(name)):
        return InvalidInputError(
            f"the verifier {name!r} was asked for by name alone; expected an object, as it is made for one model's data. "
            f"Make it with the module {place.partition(':')[0]}."
        )
    words = {"recipe": "kind of drafter to train", "index": "kind of index"}
    return unknown_name(words.get(kind, kind), name, names(kind))


def made_verifiers() -> list[Any]:
    """What verifiers declare that are made for a model's own data.

    Example:
        >>> made_verifiers()[0].lossless
        False
    """
    return [load("made verifier", name) for name in names("made verifier")]


def verifier(name: str) -> Any:
    """The verifier of that name, imported now.

    Raises:
        UnknownNameError: with the nearest known name.

    Example:
        >>> verifier("match").info.lossless
        True
    """
    return load("verifier", name)


def drafter(name: str) -> Any:
    """The drafter class of that name, imported now.

    Raises:
        UnknownNameError: with the nearest known name.
    """
    return load("drafter", name)


def declared(named: str) -> Any:
    """What a drafter declares, "model" or with its kind "model:chain", before it is built; None where only its models tell it.

    Raises:
        UnknownNameError: with the nearest known name, or kind.

    Example:
        >>> declared("model:top_k").ranked, declared("tli")
        (True, None)
    """
    name, kind = name_and_kind(named)
    drafter_class = drafter(name)
    if name in OF_MODELS:
        return None
    if hasattr(drafter_class, "of_kind"):
        return drafter_class.of_kind(*filter(None, [kind]))
    return drafter_class.methods[0] if len(drafter_class.methods) == 1 else None


def decoding(name: str) -> Any:
    """The class of the decoding method of that name, imported now.

    Raises:
        UnknownNameError: with the nearest known name.

    Example:
        >>> decoding("contrastive").info.lossless_to
        'the contrastive distribution of target and amateur'
    """
    return load("decoding", name)


def decoding_options(name: str) -> list[str]:
    """The options of a decoding method, by name.

    Raises:
        UnknownNameError: with the nearest known name.

    Example:
        >>> "alpha" in decoding_options("contrastive")
        True
    """
    method = decoding(name)
    return sorted(_options(method.build, method) or ())


def build_decoding(name: str, parts: Any, options: Mapping[str, Any]) -> Any:
    """A decoding method for an engine of these parts, as `drafters.base.Parts`.

    Raises:
        UnknownNameError: with the nearest known name.
        InvalidInputError: an option that this decoding method does not have; others as of its `build`.
    """
    method = decoding(name)
    option_names = decoding_options(name)
    if unknown := sorted(set(options) - set(option_names)):
        raise InvalidInputError(
            f"the option {unknown[0]}={str(options[unknown[0]])!r} was given to the decoding method {name!r}, which has no such option. "
            f"Expected one of: {', '.join(option_names) or 'none'}."
        )
    return method.build(parts, **options)


def build_drafter(named: str, parts: Any, options: Mapping[str, Any]) -> Any:
    """A drafter for an engine of these parts, as `drafters.base.Parts`. named: "model" or with its kind, "model:chain".

    Raises:
        UnknownNameError: with the nearest known name.
        InvalidInputError: a colon without a kind, or an option that this drafter does not have; others as of its `build`.
    """
    check_drafter(named)
    name, kind = name_and_kind(named)
    drafter_class = drafter(name)
    drafter_options = {**({"kind": kind} if kind else {}), **options}
    option_names = _options(drafter_class.build, drafter_class)
    if option_names is not None and (unknown := sorted(set(drafter_options) - option_names)):
        raise InvalidInputError(
            f"{_said(name, unknown[0], drafter_options[unknown[0]])} {_advice(name, unknown[0], option_names)}"
        )
    return drafter_class.build(parts, **drafter_options)


def _said(name: str, option: str, value: Any) -> str:
    if option == "kind":
        return f"{name}:{value} was given; the drafter {name!r} has no kinds."
    if option == "weights":
        return f"the draft head {str(value)!r} was given to the drafter {name!r}, which reads none."
    return f"the option {option}={str(value)!r} was given to the drafter {name!r}, which has no such option."


def _advice(name: str, option: str, known: set[str]) -> str:
    if option == "kind":
        return f"Use {name!r}."
    if option == "index":
        readers = [reader for reader in names("drafter") if takes(reader, "index")]
        return f"Leave the index out, or name a drafter that reads it: {', '.join(readers)}."
    if option == "weights":
        return f"Leave the head out, or the drafter, which its folder names; or name one that reads it: {', '.join(sorted(heads()))}."
    return f"Expected one of: {', '.join(sorted(known)) or 'none'}."


def _options(build: Callable[..., Any], then: Callable[..., Any] | None = None) -> set[str] | None:
    """Keywords of `build`, and those of the constructor where it passes others on; None: any."""
    parameters = signature(build).parameters.values()
    options = (
        p
        for p in parameters
        if p.kind is Parameter.KEYWORD_ONLY
        or (p.kind is Parameter.POSITIONAL_OR_KEYWORD and p.default is not Parameter.empty)
    )
    names = {p.name for p in options} - {
        "eos_token_ids",
        "stop_ids",
        "slots",
    }  # an engine gives these, and what has no default
    if not any(p.kind is Parameter.VAR_KEYWORD for p in parameters):
        return names
    more = None if then is None else _options(then)
    return None if more is None else names | more


def takes(named: str, option: str) -> bool:
    """Whether the drafter of this name has such an option.

    Raises:
        UnknownNameError: with the nearest known name.

    Example:
        >>> takes("ngram", "index"), takes("eagle", "weights")
        (False, True)
    """
    drafter_class = drafter(name_and_kind(named)[0])
    options = _options(drafter_class.build, drafter_class)
    return option in (options or ())


def recipe(kind: str) -> Any:
    """How that kind of drafter is trained, imported now.

    Raises:
        UnknownNameError: with the nearest known kind.
    """
    return load("recipe", kind)()
