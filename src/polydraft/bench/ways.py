"""Ways of drafting and verifying as text, and the options of an engine that follow.

[NAME][:KIND][+VERIFIER][@PATHSxDEPTH]      NAME: a drafter of `polydraft methods`, or the last part of a trained drafter's folder
several:NAME,NAME and mixture:NAME,NAME     drafters of the wing that put folders together, a head before models
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polydraft.config import SpeculationConfig
from polydraft.engine.plan import check_speculation
from polydraft.errors import InvalidInputError, PolydraftError
from polydraft.heads.folder import kind_of
from polydraft.methods import registry
from polydraft.models import load


@dataclass(frozen=True)
class Way:
    """One way of drafting and verifying. depth, num_paths: a fixed policy; both None: the engine's own policy."""

    drafter: str | None
    verifier: str = "auto"
    depth: int | None = None
    num_paths: int | None = None

    @classmethod
    def parse(cls, text: str) -> "Way":
        """From `DRAFTER[+VERIFIER][@PATHSxDEPTH]`.

        Raises:
            InvalidInputError: a size that is not two whole numbers, or no drafter.

        Example:
            >>> Way.parse("model:chain+block@1x4")
            Way(drafter='model:chain', verifier='block', depth=4, num_paths=1)
        """
        names, at, size = text.partition("@")
        drafter, _, verifier = names.partition("+")
        paths, _, depth = size.partition("x")
        if not drafter or (at and not (paths.isdecimal() and depth.isdecimal())):
            raise InvalidInputError(
                f"--way {text!r} was given; expected DRAFTER[+VERIFIER][@PATHSxDEPTH], such as model:chain+block@1x4. Correct it."
            )
        return cls(drafter, verifier or "auto", *((int(depth), int(paths)) if at else ()))


def check_way(text: str, heads: Mapping[str, Path]) -> None:
    """Refuse, before anything is loaded, a way that cannot be read, whose drafter or verifier there is not, or which do not fit. heads: folders by name.

    Raises:
        InvalidInputError, UnknownNameError, IncompatibleError: naming the way.
    """
    way = Way.parse(text)
    name, colon, kind = (way.drafter or "").partition(":")
    if _joins(name, kind, heads):
        colon = kind = ""
    drafter = (kind_of(heads[name]) if name in heads else name) + colon + kind
    try:
        check_speculation(
            SpeculationConfig(
                drafter=drafter, verifier=way.verifier, depth=way.depth, num_paths=way.num_paths
            )
        )
    except PolydraftError as error:
        raise type(error)(f"--way {text!r} was given: {error}") from error


DEFAULT_WAYS = (
    "model",
    "model:chain+block@1x4",
    "model+greedy_traversal@2x4",
    "ngram+match@1x5",
    "model:coupled+race@1x4",
)


def _joins(name: str, kind: str, heads: Mapping[str, Path]) -> bool:
    """Whether a drafter puts folders together that its kind names."""
    if heads.keys().isdisjoint(kind.split(",")) or name not in registry.names("drafter"):
        return False
    return hasattr(registry.drafter(name), "of_folders")


def engine_options(way: Way, heads: Mapping[str, Path]) -> dict[str, Any]:
    """Options of `Engine.of`. heads: folders as `polydraft train` writes them, draft models among them, by name."""
    name, colon, kind = (way.drafter or "").partition(":")
    options: dict[str, Any] = {"verifier": way.verifier, "depth": way.depth, "num_paths": way.num_paths}
    if _joins(name, kind, heads):
        together = registry.drafter(name).of_folders(heads, kind.split(","))
        return {**options, "drafter": name, "drafter_options": together}
    if (folder := heads.get(name)) is not None:
        name = kind_of(folder)
        if name == "model":
            options["draft_model"] = load.load_model(str(folder), max_num_seqs=1)
        else:
            options["drafter_options"] = {"weights": str(folder)}
    return {**options, "drafter": name + colon + kind or None}
