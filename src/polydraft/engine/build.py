"""From what an engine is asked for to its drafter, its rule and its plan."""

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from numbers import Integral
from typing import Any

from polydraft import registry, tree
from polydraft.core import Budget, Drafter, Verifier
from polydraft.drafters.base import Parts
from polydraft.drafters.model.paths import ModelDrafter
from polydraft.engine.best_first_plan import plan_for
from polydraft.engine.choice import Choice, ChoicePlan
from polydraft.engine.plan import AdaptivePlan, FixedPlan, Plan
from polydraft.engine.profile import Profile
from polydraft.errors import CapacityError, InvalidInputError, unknown_name
from polydraft.models.slots import TREE_ROOM
from polydraft.verifiers import pairing

__all__ = ["check_plan", "drafter", "plan", "verifier"]


def drafter(wanted: str | Drafter | Seq[str] | None, parts: Parts, options: Mapping[str, Any]) -> Drafter | None:
    """By name, by several names to choose from, or as it is; None decodes plainly.

    Raises:
        InvalidInputError: neither a name, names, nor a drafter.
    """
    if wanted is None or wanted == "none":
        return None
    if isinstance(wanted, str):
        names: Seq[str] = [wanted] if wanted.startswith("mixture:") else wanted.split(",")  # a mixture's sources have commas too
    elif isinstance(wanted, Seq):
        names = wanted
    elif hasattr(wanted, "propose"):
        return wanted
    else:
        names = ()
    if not names or not all(isinstance(name, str) for name in names):
        raise InvalidInputError(
            f"drafter={wanted!r} was given; expected a name, several names, a `core.Drafter`, or None. `polydraft methods` lists names."
        )
    if len(names) > 1:
        arms: dict[str, Drafter] = {}
        for name in names:
            arms[name] = _kind_of(arms.values(), name) or _made(name, parts, options.get(name, {}))
        return Choice(arms)
    return _made(names[0], parts, options)


def _kind_of(made: Iterable[Drafter], named: str) -> Drafter | None:
    """A further kind of a model drafter that is there already: it shares the model and its slots."""
    name, _, kind = named.partition(":")
    model = next((d for d in made if isinstance(d, ModelDrafter) and d.info.name.partition(":")[0] == name), None)
    return None if model is None else model.sibling(kind or "paths")


def _made(named: str, parts: Parts, options: Mapping[str, Any]) -> Drafter:
    auto = "ngram" if parts.draft_model is None else "model"
    return registry.build_drafter(auto if named == "auto" else named, parts, options)


def verifier(wanted: str | Verifier, source: Drafter | None) -> Verifier:
    """By name, "auto" for the best one that is exact for the drafter, or as it is.

    Raises:
        IncompatibleError: one that is not exact for the drafter.
        InvalidInputError: neither a name nor a rule.
    """
    rule: Verifier
    if isinstance(source, Choice) and wanted == "auto":
        rule = source.rule()
    elif isinstance(wanted, str):
        name = wanted if wanted != "auto" else "match" if source is None else pairing.best_for(source.info)
        rule = registry.verifier(name)
    elif isinstance(wanted, Verifier):
        rule = wanted
    else:
        raise InvalidInputError(
            f"verifier={wanted!r} was given; expected a name, 'auto' or a `core.Verifier`. `polydraft methods` lists names."
        )
    if source is not None:
        pairing.check_pair(source.info, rule.info)
    return rule


def plan(
    wanted: Plan | str | None, depth: int | None, num_paths: int | None, profile: str | Profile | None, source: Drafter | None
) -> Plan:
    """Its plan; a drafter that chooses among several plans for each of them."""
    if isinstance(source, Choice):
        return _choice_plan(source, wanted, depth, num_paths, profile)
    for name, value in (("depth", depth), ("num_paths", num_paths)):
        if value is not None and (not isinstance(value, Integral) or value < 1):
            raise InvalidInputError(
                f"{name}={value!r} was given; expected at least 1, a whole number. For plain decoding use drafter=None."
            )
    fixed = depth is not None or num_paths is not None
    chosen = wanted if wanted is not None else "fixed" if fixed and profile is None else "adaptive"
    if chosen != "fixed" and fixed:
        raise InvalidInputError(
            f"depth={depth} and num_paths={num_paths} were given beside plan={wanted!r} and profile={profile!r}; "
            "a fixed size leaves nothing to plan. Drop one of them."
        )
    if chosen == "fixed":
        depth, num_paths = depth or 5, num_paths or 1
        _check_room(depth * num_paths, f"depth={depth} and num_paths={num_paths}")
        return FixedPlan(Budget.fixed(tree.paths(num_paths, depth)))
    if chosen == "adaptive":
        return plan_for(source, Profile.load(profile) if isinstance(profile, str) else profile)
    if isinstance(chosen, str):
        raise unknown_name("plan", chosen, ("adaptive", "fixed"))
    if not hasattr(chosen, "budgets"):
        raise InvalidInputError(
            f"plan={chosen!r} was given; expected 'adaptive', 'fixed' or an object such as `FixedPlan(Budget.fixed(tree.chain(4)))`."
        )
    return chosen


def _choice_plan(
    choice: Choice, plan: Plan | str | None, depth: int | None, num_paths: int | None, profile: str | Profile | None
) -> Plan:
    given = {"plan": plan, "depth": depth, "num_paths": num_paths, "profile": profile}
    if isinstance(plan, ChoicePlan) or all(v in (None, "adaptive") for v in given.values()):
        return plan if isinstance(plan, ChoicePlan) else ChoicePlan(choice)
    said = ", ".join(f"{name}={value!r}" for name, value in given.items() if value is not None)
    raise InvalidInputError(
        f"{said} was given with drafters {choice.names}; expected none of these, as the plan chooses between the drafters. "
        "Drop it, or name one drafter."
    )


def check_plan(chosen: Plan, source: Drafter, rule: Verifier) -> None:
    """Refuse plans for more than a pass takes, and a fixed one whose budget the drafter does not draw or the rule is not exact for;
    keep adaptive plans from such budgets."""
    for each in chosen.plans if isinstance(chosen, ChoicePlan) else [chosen]:
        if isinstance(each, FixedPlan):
            _check_room(each.budget.max_nodes, f"depth={each.budget.max_depth} and num_paths={each.budget.width}")
            pairing.check_budget(each.budget, source.info, rule.info)
        elif isinstance(each, AdaptivePlan):
            _check_room(each.max_depth * each.max_width, f"max_depth={each.max_depth} and max_width={each.max_width}")
            given = {name: Budget.fixed(parents) for name, parents in _NEEDED.items()}
            bounds = {name for name, budget in given.items() if not pairing.allowed([budget], source.info, rule.info)}
            each.max_width = 1 if "max_width" in bounds else each.max_width
            for name in bounds - {"max_width"}:
                setattr(each, name, 0)


_NEEDED = {
    "max_width": tree.paths(2, 1),
    "max_trunk": tree.paths(2, 2, trunk=1),
    "max_short": tree.ragged(2, 1),
    "max_tree_nodes": (-1, 0, 0, 2),
}


def _check_room(num_drafted: int, given: str) -> None:
    """The last committed token takes one of a pass's rows."""
    if num_drafted >= TREE_ROOM:
        raise CapacityError(
            f"{given} were given, up to {num_drafted} drafted tokens a step; expected at most {TREE_ROOM - 1}, the rows of one pass. "
            "Lower one of the two."
        )
