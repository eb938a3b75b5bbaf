"""How sequences are drafted for: a drafter, a verifier that is exact for it, and a policy; each request may name its own of those there are.

Drafters are built by `drafters.by_name`; verifier and policy here, from the same options.
"""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

from polydraft.config import SpeculationConfig
from polydraft.core import Drafter, Offers, Target, Verifier
from polydraft.core.budget import Budget
from polydraft.drafters.base import Parts
from polydraft.engine import by_name
from polydraft.engine.parts import check_drafter
from polydraft.errors import InvalidInputError, unknown_name
from polydraft.methods import registry
from polydraft.policy.by_name import choose_policy
from polydraft.policy.fixed import FixedPolicy, Policy
from polydraft.verifiers import deciding, pairing

Compiling = Callable[[float], bool]
"""Whether the code of drafts is still being compiled by another process, for whose end it waits so many seconds at most."""


@dataclass(frozen=True, eq=False)
class Speculation:
    """Drafter, verifier and policy, checked against each other; drafter None decodes plainly."""

    drafter: Drafter | None
    verifier: Verifier
    policy: Policy

    @cached_property
    def offers(self) -> Offers:
        """What the drafter has beyond the methods of all."""
        return Offers() if self.drafter is None else self.drafter.offers

    @cached_property
    def deciders(self) -> deciding.Deciders:
        """Who decides rows, by how they were drafted."""
        return deciding.Deciders.of(self.verifier)

    @property
    def unmeasured(self) -> bool:
        """Whether costs of its steps are assumed that could be measured."""
        return self.drafter is not None and self.policy.missing

    @property
    def source(self) -> str:
        """The drafter's name, "none" where there is none."""
        return "none" if self.drafter is None else self.drafter.info.name


CompileDrafts = Callable[[Target, Speculation], Compiling | None]
"""Begins to compile what drafts call, where that was never done."""
PLAIN = Speculation(None, deciding.PLAIN, FixedPolicy(Budget.fixed((-1,))))


class Menu:
    """What requests may name: the drafters that an engine was built with, each with any verifier that is exact for it.

    default: of requests that name nothing.  others: further drafters, by name.  make_policy: for each pair that is asked for.
    compiling: while it says so, requests of the default begin without drafts, and those whose text depends on them wait.
    """

    def __init__(
        self,
        target: Target,
        default: Speculation,
        others: Mapping[str, Drafter] | None = None,
        make_policy: Callable[[Drafter], Policy] | None = None,
        compiling: Compiling | None = None,
    ) -> None:
        self._compiling = compiling
        self.default = default
        self._target = target
        self._make_policy = make_policy
        self._drafters: dict[str, Drafter | None] = {
            "none": None,
            **(others or {}),
            default.source: default.drafter,
        }
        self._known = {(default.source, default.verifier.info.name): default}
        self._lock = threading.Lock()
        for drafter in self._drafters.values():
            if drafter is not None:
                check_drafter(target, drafter)
        self._prepare(default)
        for name in others or {}:
            self.find(name)

    @classmethod
    def of(
        cls,
        config: SpeculationConfig,
        parts: Parts,
        compile_drafts: "CompileDrafts | None" = None,
    ) -> "Menu":
        """As configured, on these parts. compile_drafts: begins to compile what drafts call, where that was never done.

        Raises:
            UnknownNameError, InvalidInputError, IncompatibleError: as of the functions below and of `by_name`.
        """
        named = config.drafter
        if config.asynchronous:
            named = registry.load("option", "asynchronous")(named, config.verifier)
        drafter = by_name.drafter(named, parts, config.all_drafter_options)
        others = by_name.others(config.offered, drafter, parts)
        name = config.policy if isinstance(config.policy, str) else None  # an object is of one drafter
        copying = config.drafter == "auto" and parts.decoding is None
        max_step = inf if config.max_step_ms is None else 1e-3 * config.max_step_ms
        policy = choose_policy(
            config.policy,
            config.depth,
            config.num_paths,
            config.profile,
            drafter,
            copying=copying,
            max_step=max_step,
            draft_tree=config.draft_tree,
        )
        verifier = choose_verifier(config.verifier, drafter, policy)

        def make_policy(other: Drafter) -> Policy:
            size = config.depth, config.num_paths
            return choose_policy(name, *size, None, other, max_step=max_step, draft_tree=config.draft_tree)

        default = Speculation(drafter, verifier, policy)
        compiling = compile_drafts(parts.target, default) if compile_drafts is not None else None
        return cls(parts.target, default, others, make_policy, compiling)

    @property
    def is_compiling(self) -> bool:
        """Whether drafts of the default are being compiled."""
        return self.await_drafts(0.0)

    def await_drafts(self, seconds: float) -> bool:
        """The same, so many seconds later at most."""
        return self._compiling is not None and self._compiling(seconds)

    def decide_by(self, policy: Policy) -> None:
        """Give the default another policy."""
        self.default = replace(self.default, policy=policy)
        self._known[self.default.source, self.default.verifier.info.name] = self.default

    def offer(self, drafter: Drafter) -> None:
        """One more drafter that requests may name, before any runs; nothing where there is one of that name, or where nothing is drafted."""
        name = drafter.info.name
        if self.default.drafter is not None and name not in self._drafters:
            check_drafter(self._target, drafter)
            self._drafters[name] = drafter
            self.find(name)

    @property
    def names(self) -> list[str]:
        """The default's first."""
        return [self.default.source, *(name for name in self._drafters if name != self.default.source)]

    def verifiers(self) -> dict[str, list[str]]:
        """By drafter, the lossless verifiers that are exact for it."""
        return {
            name: [] if drafter is None else pairing.fitting(drafter.info)
            for name, drafter in self._drafters.items()
        }

    def find(self, drafter: str | None = None, verifier: str | None = None) -> Speculation:
        """Those of a request; None and "auto" leave the choice.

        Raises:
            UnknownNameError: a drafter that the engine was not built with, or no verifier.
            IncompatibleError: a verifier that is not exact for the drafter, or a policy of trees for which one of them is not.
        """
        name = self.default.source if drafter in (None, "auto") else drafter
        verifier = "auto" if verifier is None else verifier
        if name == self.default.source and verifier in ("auto", self.default.verifier.info.name):
            return self.default
        if name not in self._drafters:
            raise unknown_name("drafter of this engine", name, self._drafters)
        source = self._drafters[name]
        policy = (
            PLAIN.policy
            if source is None
            else self._make_policy(source)
            if self._make_policy
            else self.default.policy
        )
        chosen = choose_verifier(verifier, source, policy)
        with self._lock:
            key = name, chosen.info.name
            if key not in self._known:
                speculation = Speculation(source, chosen, policy)
                self._prepare(speculation)
                self._known[key] = speculation
            return self._known[key]

    def _prepare(self, speculation: Speculation) -> None:
        if speculation.drafter is not None:
            speculation.policy.prepare(self._target, speculation.drafter, speculation.verifier)

    @property
    def unmeasured(self) -> list[Speculation]:
        """Those that requests have named or may, whose costs are missing."""
        return [s for s in list(self._known.values()) if s.unmeasured]


def choose_verifier(named: str | Verifier, source: Drafter | None, policy: Policy | None = None) -> Verifier:
    """By name, "auto" for the best one that is exact for what the policy asks of the drafter, or as it is.

    Raises:
        IncompatibleError: one that is not exact for the drafter.
        InvalidInputError: neither a name nor a verifier.
    """
    verifier: Verifier
    if named == "auto" and source is None:
        verifier = deciding.PLAIN
    elif isinstance(named, str):
        spares = (
            policy is not None
            and policy.asks_for_spares
            and source is not None
            and source.offers.draws.branches
        )
        verifier = registry.verifier(
            named if named != "auto" or source is None else pairing.best_for(source.info, spares=spares)
        )
    elif isinstance(named, Verifier):
        verifier = named
    else:
        raise InvalidInputError(
            f"verifier={named!r} was given; expected a name, 'auto' or a `core.Verifier`. `polydraft methods` lists names."
        )
    if source is not None:
        pairing.check_pair(source.info, verifier.info)
    return verifier
