"""What the planner knows of a pair of models on a machine: costs of rounds and acceptance by depth; saved as JSON.

What `polydraft tune` measured is kept in this process and, for models with a name, in a file of the user's cache folder
(`POLYDRAFT_CACHE`, else `XDG_CACHE_HOME`/polydraft, else ~/.cache/polydraft; `POLYDRAFT_CACHE=off` keeps none): engines of the same parts
plan by it, so that the texts of a seed are the same in the next process.
"""

import hashlib
import json
import os
import platform
import warnings
import zlib
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from polydraft import __version__
from polydraft.atomic import replacing
from polydraft.core import Drafter, Target, Verifier
from polydraft.errors import IncompatibleError, InvalidInputError
from polydraft.plan.acceptance import DEPTHS
from polydraft.plan.costs import RoundCosts
from polydraft.schema import PROFILE, fault, read_json

__all__ = ["Profile", "check_identity", "identity", "remember", "remembered"]

PRIOR = 0.7
"""Acceptance where nothing is known of it."""
MOST_TEMPERATURES = 64
_RATES = "acceptance", "greedy"


@dataclass(frozen=True)
class Profile:
    """What planning starts from.

    costs: seconds of rounds.  acceptance: of one draft by depth, [DEPTHS], before a sequence has shown its own.
    about: what it was measured on.
    greedy: the same at temperature 0, where drafts fit better; empty for no difference.
    drafts: False where `polydraft tune` found that no drafts pay: plans then make none.

    Raises:
        InvalidInputError: acceptances outside [0, 1], or not as many as are told apart.

    Example:
        >>> profile = Profile.assumed()
        >>> Profile.from_dict(profile.to_dict()) == profile
        True
    """

    costs: RoundCosts
    acceptance: tuple[float, ...]
    about: dict[str, Any] = field(default_factory=dict[str, Any])
    greedy: tuple[float, ...] = ()
    drafts: bool = True

    def __post_init__(self) -> None:
        rates = *self.acceptance, *(self.greedy or self.acceptance)
        if len(self.acceptance) != DEPTHS or len(rates) != 2 * DEPTHS or not all(0 <= a <= 1 for a in rates):
            raise InvalidInputError(
                f"acceptance {list(self.acceptance)} and greedy {list(self.greedy)} were given; "
                f"expected {DEPTHS} numbers in [0, 1] each. Measure again with `polydraft tune`."
            )

    def prior(self, temperature: float) -> np.ndarray:
        """Acceptance at a temperature before a text has shown its own: between that at 1 and that at 0, linearly; above 1 as at 1.

        Example:
            >>> Profile(RoundCosts.assumed(), (0.6,) * DEPTHS, greedy=(0.8,) * DEPTHS).prior(0.5)[0].item()
            0.7
        """
        if temperature not in self._priors:
            if len(self._priors) == MOST_TEMPERATURES:
                self._priors.clear()
            cold = max(0.0, 1.0 - temperature)
            self._priors[temperature] = cold * np.array(self.greedy or self.acceptance) + (1.0 - cold) * np.array(self.acceptance)
        return self._priors[temperature]

    @cached_property
    def _priors(self) -> dict[float, np.ndarray]:
        return {}

    @classmethod
    def assumed(cls) -> "Profile":
        """For a machine that was not measured."""
        return cls(RoundCosts.assumed(), (PRIOR,) * DEPTHS, {"assumed": True})

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        rates = {name: list(getattr(self, name)) for name in _RATES}
        return {"polydraft_profile": 3, "about": self.about, "drafts": int(self.drafts), **rates, "costs": self.costs.to_dict()}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Profile":
        """From `to_dict`.

        Raises:
            InvalidInputError: not a profile of this version, or faulty numbers.
        """
        found = fault(data, PROFILE, {"depths": DEPTHS}, "the profile")
        if found:
            raise InvalidInputError(f"{found}. Make it again with `polydraft tune --save FILE`.")
        rates = {name: tuple(map(float, data[name])) for name in _RATES}
        return cls(RoundCosts.from_dict(data["costs"]), about=data["about"], drafts=bool(data["drafts"]), **rates)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as JSON with a checksum, whole or not at all; see `atomic.replacing` for the errors."""
        said = self.to_dict()
        with replacing(path) as file:
            file.write(json.dumps({"checksum": _checksum(said), **said}, indent=1).encode() + b"\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Profile":
        """Read what `save` wrote.

        Raises:
            InvalidInputError: a file that cannot be read, is no profile, or was changed since.
        """
        try:
            data = read_json(Path(path).read_bytes())
            checksum = data.pop("checksum", None) if isinstance(data, dict) else None
            profile = cls.from_dict(data)
        except (OSError, ValueError) as error:  # of a profile that does not fit, too
            raise InvalidInputError(
                f"profile {str(path)!r} was given and cannot be read ({error}); make one with `polydraft tune --save FILE`."
            ) from error
        if checksum != _checksum(data):
            raise InvalidInputError(
                f"profile {str(path)!r} does not add up to its checksum: it was changed or damaged since it was written. "
                "Make one with `polydraft tune --save FILE`."
            )
        return profile


def _checksum(said: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(said, sort_keys=True).encode())


def _model(model: Any) -> dict[str, Any] | None:
    """What tells a model apart from others, or None for one without a name."""
    name = getattr(model, "name", None)
    if name is None:
        return None
    config = Path(str(name)) / "config.json"
    changed = config.stat().st_mtime_ns if config.exists() else None
    shown = ("weight_format", "cache_bytes", "max_num_seqs", "vocab_size")
    return {
        "name": str(name),
        "changed": changed,
        "class": type(model).__name__,
        **{k: str(getattr(model, k, None)) for k in shown},
    }


def identity(target: Target, drafter: Drafter, verifier: Verifier) -> dict[str, Any] | None:
    """What a profile is valid for; None where a model has no name to be known by again."""
    models = [_model(target)]
    if hasattr(drafter, "model"):
        models.append(_model(getattr(drafter, "model")))  # noqa: B009 - drafters need not have one
    if any(m is None for m in models):
        return None
    return {
        "models": models,
        "drafter": drafter.info.name,
        "verifier": verifier.info.name,
        "machine": [platform.node(), platform.machine(), torch.get_num_threads()],
        "version": __version__,
    }


def _folder() -> Path | None:
    given = os.environ.get("POLYDRAFT_CACHE")
    if given is not None:
        return None if given in ("", "off") else Path(given)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "polydraft"


_known: dict[str, Profile] = {}


def check_identity(given: Profile, target: Target, drafter: Drafter, verifier: Verifier) -> None:
    """Refuse a profile of other models or another drafter; what has no name is taken as it is.

    Raises:
        IncompatibleError: with the names of both.
        InvalidInputError: what it was measured on cannot be read.
    """
    about, here = given.about.get("identity"), identity(target, drafter, verifier)
    if not about or not here:
        return
    try:
        measured = _parts(about)
    except (KeyError, TypeError, AttributeError) as error:
        raise InvalidInputError(
            f"a profile that was measured on {about!r} was given; expected models and a drafter. Make it again with `polydraft tune --save FILE`."
        ) from error
    if measured != _parts(here):
        raise IncompatibleError(
            f"a profile of {measured} was given for {_parts(here)}; expected one of the same models and drafter. "
            "Measure these with `polydraft tune --save FILE`, or leave the profile out."
        )


def _parts(about: dict[str, Any]) -> list[Any]:
    """What an identity says of models and drafter wherever their folders lie; their options aside."""
    models = [[Path(m["name"]).name, *(m.get(k) for k in ("class", "weight_format", "vocab_size"))] for m in about["models"]]
    return [*models, about["drafter"]]


def _file(about: dict[str, Any]) -> tuple[str, Path | None]:
    key = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:24]
    folder = _folder()
    return key, None if folder is None else folder / f"{key}.json"


def remembered(about: dict[str, Any] | None) -> Profile | None:
    """The profile that was measured of this identity, in this process or in the cache folder; None where there is none, or none that can be read."""
    if about is None:
        return None
    key, file = _file(about)
    if key not in _known and file is not None and os.path.exists(file):  # False where the folder may not be looked into
        try:
            _known[key] = Profile.load(file)
        except InvalidInputError as error:
            warnings.warn(f"the cached costs are not used, and learnt anew: {error}", stacklevel=2)
    return _known.get(key)


def remember(about: dict[str, Any] | None, profile: Profile) -> None:
    """Keep a profile for `remembered`; a cache that cannot be written is done without."""
    if about is None:
        return
    key, file = _file(about)
    _known[key] = profile
    if file is not None:
        with suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            profile.save(file)
