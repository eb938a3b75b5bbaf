"""From a name, or a size, to a policy."""

from math import inf
from pathlib import Path

from polydraft.core import Budget, Drafter
from polydraft.core import geometry as tree
from polydraft.errors import InvalidInputError, unknown_name
from polydraft.policy.adaptive import AdaptivePolicy
from polydraft.policy.fixed import FixedPolicy, Policy, check_room
from polydraft.policy.profile import Profile


def choose_policy(
    named: Policy | str | None,
    depth: int | None,
    num_paths: int | None,
    profile: str | Path | Profile | None,
    source: Drafter | None,
    *,
    copying: bool = False,
    max_step: float = inf,
) -> Policy:
    """The policy of a drafter, or None, as it was named or given, or of a fixed size; without either the adaptive one.

    profile, copying, max_step: see `AdaptivePolicy`.

    Raises:
        UnknownNameError, InvalidInputError: no policy, or options that do not go together.
        CapacityError: a size that does not fit a forward pass.

    Example:
        >>> choose_policy(None, 4, 2, None, None).budget.max_nodes
        8
    """
    fixed = depth is not None or num_paths is not None
    ahead = None if source is None else source.offers.draws.lead_cap
    if ahead is not None and (profile is not None or named == "adaptive" or num_paths not in (None, 1)):
        raise InvalidInputError(
            f"policy={named!r}, profile={profile!r} and num_paths={num_paths!r} were given beside asynchronous drafting, which takes what waits of one path; "
            "expected at most a depth. Drop them."
        )
    if ahead is not None and named in (None, "fixed"):
        named = "fixed"
        depth = depth or ahead
    chosen = named if named is not None else "fixed" if fixed and profile is None else "adaptive"
    if chosen != "fixed" and fixed:
        raise InvalidInputError(
            f"depth={depth} and num_paths={num_paths} were given beside policy={named!r} and profile={profile!r}; "
            "a fixed size leaves nothing to decide. Drop one of them."
        )
    if chosen != "adaptive" and source is not None and max_step < inf:
        raise InvalidInputError(
            f"max_step_ms={1e3 * max_step:g} was given beside policy={named!r}, depth={depth} and num_paths={num_paths}; "
            "only the adaptive policy cuts drafts to a time. Drop one of them."
        )
    if chosen == "fixed":
        depth = depth or 5
        num_paths = num_paths or 1
        check_room(depth * num_paths, f"depth={depth} and num_paths={num_paths}")
        return FixedPolicy(Budget.fixed(tree.paths(num_paths, depth)))
    if chosen == "adaptive":
        start = Profile.load(profile) if isinstance(profile, (str, Path)) else profile
        return AdaptivePolicy(start, copying=copying, max_step=max_step)
    if isinstance(chosen, str):
        raise unknown_name("policy", chosen, ("adaptive", "fixed"))
    if not isinstance(chosen, Policy):
        raise InvalidInputError(
            f"policy={chosen!r} was given; expected 'adaptive', 'fixed' or a `policy.fixed.Policy`, such as `FixedPolicy(Budget.fixed(tree.chain(4)))`."
        )
    return chosen
