"""What the policy knows of a pair of models on a machine: costs of steps and acceptance by confidence; saved as JSON.

What was measured of an idle engine, or by `polydraft tune`, stays in this process and, for models with a name, in a file of the
user's cache folder (`POLYDRAFT_CACHE`, else `XDG_CACHE_HOME`/polydraft, else ~/.cache/polydraft; `POLYDRAFT_CACHE=off` writes none), the last MOST_FILES of them: engines of
the same parts start from it, so that the texts of a seed are the same in the next process. Another machine, format or version is measured anew.
"""

import hashlib
import json
import logging
import os
import platform
import warnings
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from polydraft import __version__
from polydraft.core import Drafter, EncoderDecoder, Target, Verifier
from polydraft.errors import IncompatibleError, InvalidInputError, place
from polydraft.files.atomic import replacing
from polydraft.files.cache_folder import COSTS, enabled_cache_folder
from polydraft.files.schema import PROFILE, fault, read_json
from polydraft.models.slots import SlotModel
from polydraft.models.store.mapped import stamp
from polydraft.numerics.processor import processor
from polydraft.policy.acceptance import FIRST, NEXT, UNKNOWN, UNKNOWN_SAMPLED
from polydraft.policy.costs import KNOTS, SECONDS, Costs
from polydraft.policy.marginal import Expected, foreseen
from polydraft.policy.measuring import STEADY, Interrupted, measured
from polydraft.policy.rehearsal import Rehearsed, unrehearsed

ADVICE = "ake one with `polydraft tune --save FILE`."


def checksum(fields: dict[str, Any]) -> int:
    """Of what `Profile.to_dict` gives."""
    return zlib.crc32(json.dumps(fields, sort_keys=True).encode())


def read_profile(path: str | os.PathLike[str]) -> tuple[dict[str, Any], bool]:
    """What a file says, and whether that adds up to its checksum.

    Raises:
        InvalidInputError: a file that cannot be read, or holds no object of JSON.
    """
    try:
        fields = read_json(Path(path).read_bytes())
        if not isinstance(fields, dict):
            raise ValueError("it holds no object of JSON")
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error
    expected = fields.pop("checksum", None)
    return fields, expected == checksum(fields)


def unreadable(path: str | os.PathLike[str], error: Exception) -> InvalidInputError:
    """The error for a file that is no profile."""
    return InvalidInputError(f"profile {str(path)!r} was given and cannot be read ({error}); m{ADVICE}")


def changed(path: str | os.PathLike[str]) -> InvalidInputError:
    """The error for a file of another checksum."""
    return InvalidInputError(
        f"profile {str(path)!r} does not add up to its checksum: it was changed or damaged since it was written. M{ADVICE}"
    )


UNMEASURED = 1e9
"""How steady figures are that nothing but steps has shown: what is measured replaces them."""
MOST_FILES = 64
"""Profiles in the cache folder; those that were written longest ago go first."""
_MODES = "sampled", "greedy"


@dataclass(frozen=True)
class Profile:
    """What the policy starts from.

    costs: seconds of steps.  sampled, greedy: rates of each lane of `acceptance`, and what a step with drafts is expected to bring, for
        requests above temperature 0 and at it.  about: what it was measured on.

    Raises:
        InvalidInputError: rates outside [0, 1], or not as many as there are lanes.

    Example:
        >>> profile = Profile.assumed()
        >>> Profile.from_dict(profile.to_dict()) == profile
        True
    """

    costs: Costs
    sampled: tuple[tuple[float, ...], Expected]
    greedy: tuple[tuple[float, ...], Expected]
    about: dict[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        for rates, expected in (self.sampled, self.greedy):
            if len(rates) != len(UNKNOWN) or not all(0 <= a <= 1 for a in rates) or min(expected) < 0:
                raise InvalidInputError(
                    f"acceptance {list(rates)} and {list(expected)} was given; expected {len(UNKNOWN)} numbers in [0, 1] and 3 >= 0. "
                    "Measure again with `polydraft tune`."
                )

    def known(self, greedy: bool) -> tuple[tuple[float, ...], Expected]:
        """Rates and expectation of one kind of requests."""
        return self.greedy if greedy else self.sampled

    @classmethod
    def of(
        cls, costs: Costs, about: dict[str, Any] | None = None, sampled: tuple[float, ...] = UNKNOWN_SAMPLED
    ) -> "Profile":
        """Of measured costs, where nothing was drafted for a request yet. sampled: rates above temperature 0."""
        modes = [(rates, foreseen(rates[FIRST], rates[NEXT], costs)) for rates in (sampled, UNKNOWN)]
        return cls(costs, *modes, about or {})

    @classmethod
    def assumed(cls) -> "Profile":
        """For models that were not measured."""
        return cls.of(Costs.assumed(), {"assumed": True})

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        costs = {"knots": list(self.costs.knots), **{name: getattr(self.costs, name) for name in SECONDS}}
        modes = {
            name: {"rates": list(rates), "expected": list(means)}
            for name in _MODES
            for rates, means in [getattr(self, name)]
        }
        return {"polydraft_profile": 8, "about": self.about, "costs": costs, **modes}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Profile":
        """From `to_dict`.

        Raises:
            InvalidInputError: not a profile of this version, or faulty numbers.
        """
        message = fault(data, PROFILE, {"lanes": len(UNKNOWN), "knots": len(KNOTS)}, "the profile")
        if message:
            raise InvalidInputError(f"{message}. Make it again with `polydraft tune --save FILE`.")
        costs = Costs(
            tuple(map(float, data["costs"]["knots"])), *(float(data["costs"][name]) for name in SECONDS)
        )
        modes = [
            (tuple(map(float, data[x]["rates"])), Expected(*map(float, data[x]["expected"]))) for x in _MODES
        ]
        return cls(costs, *modes, data["about"])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as JSON with a checksum, whole or not at all; see `atomic.replacing` for the errors."""
        fields = self.to_dict()
        with replacing(path) as file:
            file.write(json.dumps({"checksum": checksum(fields), **fields}, indent=1).encode() + b"\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Profile":
        """Read what `save` wrote.

        Raises:
            InvalidInputError: a file that cannot be read, is no profile, or was changed since.
        """
        fields, whole = read_profile(path)
        try:
            profile = cls.from_dict(fields)
        except InvalidInputError as error:
            raise unreadable(path, error) from error
        if not whole:
            raise changed(path)
        return profile


def _model(model: Target | None) -> dict[str, Any] | None:
    """What tells a model apart from others, or None for one without a name."""
    if model is None or not model.name:
        return None
    place = Path(model.name)
    file = place if place.is_file() else place / "config.json"
    *_, changed = stamp(file)
    fields = ("weight_format", "max_num_seqs", "vocab_size", "draft_vocabulary")
    cache = {"cache_dtype": model.cache_dtype} if isinstance(model, SlotModel) else {}
    return {
        "name": model.name,
        "changed": changed or None,
        "class": type(model).__name__,
        **{k: str(getattr(model, k)) for k in fields},
        **cache,
    }


def identity(target: Target, drafter: Drafter, verifier: Verifier) -> dict[str, Any] | None:
    """What a profile is valid for; None where a model has no name to be known by again."""
    models = [_model(target)]
    if drafter.offers.model is not None:
        models.append(_model(drafter.offers.model))
    if any(m is None for m in models):
        return None
    return {
        "models": models,
        "drafter": drafter.info.name,
        "verifier": verifier.info.name,
        "machine": [platform.node(), processor(), target.num_threads],
        "version": __version__,
    }


def begun(target: Target, drafter: Drafter, verifier: Verifier) -> tuple[Profile, bool]:
    """What was measured of these parts before, or what steps have shown, else assumed; and whether `profile_of` would measure them.

    Figures of another process that were not steady, as other work ran beside it, are measured once more; the steadier ones stay.
    """
    about = identity(target, drafter, verifier)
    stored = remembered(about)
    unsteady = stored is None or _spread(stored) > STEADY
    reads_first = isinstance(target, EncoderDecoder)  # a source, before any forward pass
    missing = about is not None and unsteady and not reads_first and _file(about)[0] not in _tried
    return stored or Profile.of(
        Costs.assumed(), {"assumed": True} | ({} if about is None else {"identity": about})
    ), missing


def profile_of(
    target: Target,
    drafter: Drafter,
    verifier: Verifier,
    rehearse: Callable[[], Rehearsed] = unrehearsed,
    slots: tuple[int, int] = (0, 0),
    stopped: Callable[[], bool] = lambda: False,
    text: Sequence[int] | None = None,
) -> Profile:
    """What was measured of these parts before, or what a handful of forward passes say now; what `begun` says for models without a name or at work.

    rehearse: runs short requests, see `rehearsal`.  slots, stopped, text, errors: see `costs.measured`.
    """
    stored, missing = begun(target, drafter, verifier)
    if not missing or target.lengths[slots[0]]:
        return stored
    about = identity(target, drafter, verifier) or {}
    try:
        costs, spread = measured(target, drafter, slots, stopped, text)
        rehearsed = rehearse()
        profile = Profile.of(rehearsed.priced(costs), {"identity": about, "spread": spread}, rehearsed.rates)
    except Interrupted:
        raise
    except Exception as error:
        _log.warning(
            "costs of drafter %r are assumed, as measuring them failed: %r, at %s",
            drafter.info.name,
            error,
            place(error),
        )
        _tried.add(_file(about)[0])
        return stored
    _tried.add(_file(about)[0])
    if _spread(stored) <= spread:
        return stored
    _log.info("costs were measured: %s", profile.costs)
    remember(about, profile)
    return profile


def remember_steps(target: Target, drafter: Drafter, verifier: Verifier, costs: Costs) -> None:
    """Store what steps have shown, for engines that start before anything is measured."""
    about = identity(target, drafter, verifier)
    stored = remembered(about)
    if stored is None or _spread(stored) == UNMEASURED:
        remember(about, Profile.of(costs, {"identity": about, "spread": UNMEASURED}))


def _spread(profile: Profile) -> float:
    """How steady its figures were, see `costs.Measured`; 1 where it does not say, as of `polydraft tune`."""
    spread = UNMEASURED if profile.about.get("assumed") else profile.about.get("spread")
    return float(spread) if isinstance(spread, (int, float)) else 1.0


_known: dict[str, Profile | None] = {}
_tried: set[str] = set()
"""What this process has measured, or could not."""
_log = logging.getLogger(__name__)


def check_identity(given: Profile, target: Target, drafter: Drafter, verifier: Verifier) -> None:
    """Refuse a profile of other models or another drafter; what has no name is taken as it is.

    Raises:
        IncompatibleError: with the names of both.
        InvalidInputError: what it was measured on cannot be read.
    """
    about = given.about.get("identity")
    here = identity(target, drafter, verifier)
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
    models = [
        [Path(m["name"]).name, *(m.get(k) for k in ("class", "weight_format", "vocab_size"))]
        for m in about["models"]
    ]
    return [*models, about["drafter"]]


def _file(about: dict[str, Any]) -> tuple[str, Path | None]:
    key = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:24]
    folder = enabled_cache_folder()
    return key, None if folder is None else folder / f"{key}.json"


def remembered(about: dict[str, Any] | None) -> Profile | None:
    """The profile that was measured of this identity, in this process or in the cache folder; None where there is none, or none that can be read."""
    if about is None:
        return None
    key, file = _file(about)
    if (
        key not in _known and file is not None and os.path.exists(file)
    ):  # False where the folder may not be looked into
        _known[key] = None  # it is told of once
        try:
            _known[key] = Profile.load(file)
        except InvalidInputError as error:
            warnings.warn(f"the cached costs are not used, and learnt anew: {error}", stacklevel=2)
    return _known.get(key)


def remember(about: dict[str, Any] | None, profile: Profile) -> None:
    """Store a profile for `remembered`; a cache that cannot be written is done without."""
    if about is None:
        return
    key, file = _file(about)
    _known[key] = profile
    if file is not None:
        with suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            profile.save(file)
            files = [path for path in file.parent.glob("*.json") if COSTS.fullmatch(path.name)]
            for path in sorted(files, key=lambda path: path.stat().st_mtime_ns)[:-MOST_FILES]:
                path.unlink(missing_ok=True)
