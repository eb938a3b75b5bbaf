"""How sequences are drafted for: a drafter, a rule that is exact for it, and a policy; each request may name its own of those there are."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from polydraft.budget import Budget
from polydraft.config import SpeculationConfig
from polydraft.core import Drafter, Target, Verifier
from polydraft.drafters.base import Parts
from polydraft.engine import build
from polydraft.engine.needs import check_drafter
from polydraft.errors import unknown_name
from polydraft.policy.fixed import FixedPolicy, Policy, Preparing
from polydraft.verifiers import pairing
from polydraft.verifiers.match import match

__all__ = ["PLAIN", "Menu", "Speculation"]


@dataclass(frozen=True, eq=False)
class Speculation:
    """Drafter, rule and policy, checked against each other; drafter None decodes plainly."""

    drafter: Drafter | None
    verifier: Verifier
    policy: Policy

    @property
    def source(self) -> str:
        """The drafter's name, "none" where there is none."""
        return "none" if self.drafter is None else self.drafter.info.name


PLAIN = Speculation(None, match, FixedPolicy(Budget.fixed((-1,))))


class Menu:
    """What requests may name: the drafters that an engine was built with, each with any rule that is exact for it.

    default: of requests that name nothing.  others: further drafters, by name.  make_policy: for each pair that is asked for.
    overhead: measures what policies take for the seconds of a step beside its forward pass and drafts.
    """

    def __init__(
        self,
        target: Target,
        default: Speculation,
        others: Mapping[str, Drafter] | None = None,
        make_policy: Callable[[Drafter], Policy] | None = None,
        overhead: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.default, self._target, self._make_policy, self._overhead = default, target, make_policy, overhead
        self._drafters: dict[str, Drafter | None] = {"none": None, **(others or {}), default.source: default.drafter}
        self._known = {(default.source, default.verifier.info.name): default}
        self._lock = threading.Lock()
        for drafter in self._drafters.values():
            if drafter is not None:
                check_drafter(target, drafter)
        self._prepare(default)
        for name in others or {}:
            self.find(name)

    @classmethod
    def of(cls, config: SpeculationConfig, parts: Parts, overhead: Callable[[], float]) -> "Menu":
        """As configured, on these parts.

        Raises:
            UnknownNameError, InvalidInputError, IncompatibleError: as of the functions of `build`.
        """
        wanted = build.asynchronous(config.drafter, config.verifier) if config.asynchronous else config.drafter
        drafter = build.drafter(wanted, parts, config.all_drafter_options)
        verifier, others = build.verifier(config.verifier, drafter), build.others(config.offered, drafter, parts)
        name = config.policy if isinstance(config.policy, str) else None  # an object is of one drafter
        copying = config.drafter == "auto" and parts.decoding is None
        policy = build.policy(config.policy, config.depth, config.num_paths, config.profile, drafter, copying=copying)

        def make_policy(other: Drafter) -> Policy:
            return build.policy(name, config.depth, config.num_paths, None, other)

        return cls(parts.target, Speculation(drafter, verifier, policy), others, make_policy, overhead)

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

    def rules(self) -> dict[str, list[str]]:
        """By drafter, the lossless rules that are exact for it."""
        return {name: [] if drafter is None else pairing.fitting(drafter.info) for name, drafter in self._drafters.items()}

    def find(self, drafter: str | None = None, verifier: str | None = None) -> Speculation:
        """Those of a request; None and "auto" leave the choice.

        Raises:
            UnknownNameError: a drafter that the engine was not built with, or no rule.
            IncompatibleError: a rule that is not exact for the drafter, or a policy of trees for which one of them is not.
        """
        wanted = self.default.source if drafter in (None, "auto") else drafter
        rule = "auto" if verifier is None else verifier
        if wanted == self.default.source and rule in ("auto", self.default.verifier.info.name):
            return self.default
        if wanted not in self._drafters:
            raise unknown_name("drafter of this engine", wanted, self._drafters)
        source = self._drafters[wanted]
        made = build.verifier(rule, source)
        if source is None:
            return Speculation(None, made, PLAIN.policy)
        with self._lock:
            key = wanted, made.info.name
            if key not in self._known:
                policy = self._make_policy(source) if self._make_policy else self.default.policy
                self._prepare(Speculation(source, made, policy))
                self._known[key] = Speculation(source, made, policy)
            return self._known[key]

    def _prepare(self, speculation: Speculation) -> None:
        if speculation.drafter is not None and isinstance(speculation.policy, Preparing):
            speculation.policy.prepare(self._target, speculation.drafter, speculation.verifier, self._overhead)
