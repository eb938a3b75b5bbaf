"""From a name, or a size, to a policy."""

from math import inf
from pathlib import Path

from polydraft.core import Budget, Drafter
from polydraft.core import geometry as tree
from polydraft.errors import InvalidInputError, unknown_name
from polydraft.models.slots import TREE_ROOM
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
    draft_tree: str | None = None,
) -> Policy:
    """The policy of a drafter, or None, as it was named or given, or of a fixed size; without either the adaptive one.

    profile, copying, max_step: see `AdaptivePolicy`.  draft_tree: see `tree_of`.

    Raises:
        UnknownNameError, InvalidInputError: no policy, or options that do not go together.
        CapacityError: a size that does not fit a forward pass.

    Example:
        >>> choose_policy(None, 4, 2, None, None).budget.max_nodes
        8
        >>> choose_policy(None, None, None, None, None, draft_tree="3,2").budget.max_nodes
        9
    """
    if draft_tree is not None:
        _check_alone(draft_tree, named, depth, num_paths, profile, max_step)
        return FixedPolicy(Budget.fixed(tree_of(draft_tree)))
    ahead = None if source is None else source.offers.draws.lead_cap
    if ahead is not None:
        _check_asynchronous(named, num_paths, profile)
        if named in (None, "fixed"):
            named = "fixed"
            depth = depth or ahead
    is_sized = depth is not None or num_paths is not None
    by_size = "fixed" if is_sized and profile is None else "adaptive"
    chosen = by_size if named is None else named
    sizes = f"depth={depth} and num_paths={num_paths}"
    if chosen != "fixed" and is_sized:
        raise InvalidInputError(
            f"{sizes} were given beside policy={named!r} and profile={profile!r}; "
            "a fixed size leaves nothing to decide. Drop one of them."
        )
    if chosen != "adaptive" and source is not None and max_step < inf:
        raise InvalidInputError(
            f"max_step_ms={1e3 * max_step:g} was given beside policy={named!r}, {sizes}; "
            "only the adaptive policy cuts drafts to a time. Drop one of them."
        )
    if chosen == "fixed":
        return _of_paths(num_paths or 1, depth or 5)
    if chosen == "adaptive":
        start = Profile.load(profile) if isinstance(profile, (str, Path)) else profile
        return AdaptivePolicy(start, copying=copying, max_step=max_step)
    return _given(chosen)


def _of_paths(num_paths: int, depth: int) -> FixedPolicy:
    check_room(depth * num_paths, f"depth={depth} and num_paths={num_paths}")
    return FixedPolicy(Budget.fixed(tree.paths(num_paths, depth)))


def _check_alone(
    draft_tree: str,
    named: Policy | str | None,
    depth: int | None,
    num_paths: int | None,
    profile: str | Path | Profile | None,
    max_step: float,
) -> None:
    """Raise InvalidInputError where a fixed tree is asked for beside something to decide."""
    if any(other is not None for other in (named, depth, num_paths, profile)) or max_step < inf:
        raise InvalidInputError(
            f"draft_tree={draft_tree!r} was given beside depth={depth}, num_paths={num_paths}, policy={named!r}, profile={profile!r} or a maximum time "
            "of a step; a fixed tree leaves nothing to decide. Drop one of them."
        )


def _check_asynchronous(
    named: Policy | str | None, num_paths: int | None, profile: str | Path | Profile | None
) -> None:
    """Raise InvalidInputError where asynchronous drafting is asked for more than a depth."""
    if profile is not None or named == "adaptive" or num_paths not in (None, 1):
        raise InvalidInputError(
            f"policy={named!r}, profile={profile!r} and num_paths={num_paths!r} were given beside asynchronous drafting, which takes what waits of one path; "
            "expected at most a depth. Drop them."
        )


def _given(policy: Policy | str) -> Policy:
    """A policy that is one, and no unknown name."""
    if isinstance(policy, str):
        raise unknown_name("policy", policy, ("adaptive", "fixed"))
    if not isinstance(policy, Policy):
        raise InvalidInputError(
            f"policy={policy!r} was given; expected 'adaptive', 'fixed' or a `policy.fixed.Policy`, such as `FixedPolicy(Budget.fixed(tree.chain(4)))`."
        )
    return policy


def tree_of(text: str) -> tuple[int, ...]:
    """The parents of a draft tree. text: the number of children of a token at each depth, "3,2,1".

    Raises:
        InvalidInputError: something else.
        CapacityError: a tree that does not fit a forward pass.

    Example:
        >>> tree_of("2,1")
        (-1, 0, 0, 1, 2)
    """
    counts = text.split(",")
    if not all(count.strip().isdecimal() and 0 < int(count) <= TREE_ROOM for count in counts):
        raise InvalidInputError(
            f"draft_tree={text!r} was given; expected the number of children of a token at each depth, such as '3,2,1'. Change it."
        )
    num_nodes = 0
    num_leaves = 1
    for count in counts:
        num_leaves *= int(count)
        num_nodes += num_leaves
        check_room(num_nodes, f"draft_tree={text!r}")
    return tree.product(*map(int, counts))
