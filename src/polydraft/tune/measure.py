"""Measure a pair of models on this machine: rounds of several sizes in turn, again and again, and how well drafts fit.

Real rounds are run in an engine of their own on the same models while nothing else runs, so that Python, sampling and
verification are charged too. Sizes alternate within a repetition: a machine that slows down slows all of them.
"""

import math
import warnings
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import count
from time import perf_counter
from typing import Any

import numpy as np
from jaxtyping import Float
from torch import Tensor

from polydraft.core import Budget, Draft, Drafter, Outcome, Request, SamplingParams, SiblingLaw, Target, Verifier
from polydraft.engine.loop import Loop
from polydraft.engine.sequence import Sequence
from polydraft.engine.stats import clock
from polydraft.errors import DrafterWarning, IncompatibleError
from polydraft.plan.acceptance import DEPTHS, Record
from polydraft.plan.costs import PHASES
from polydraft.plan.profile import Profile, identity
from polydraft.plan.sizes import NOTHING, Decided, Paths, most_paths, paths
from polydraft.tune.fit import Observation, fit

IN_VAIN = 0, 0
"""The size of rounds whose drafter was asked and had nothing to draft."""

SIZES = ((1, 0), (1, 4), (1, 1), (2, 4), (1, 8), (3, 3), (1, 12), (2, 8))
"""(width, depth) of measured rounds, the most telling first."""
RANKED = ((1, 0), (2, 4), (1, 1), (2, 2), (4, 4), (4, 2), (2, 8), (1, 4), (3, 8))
"""The same for a drafter of most probable trees of width x depth nodes, of which only those that reach the depth count."""
TOGETHER, LONGER, BOTH = ((1, 0), (1, 4), (1, 1), (2, 4)), ((1, 0), (1, 8), (2, 8)), ((1, 0), (1, 4), (1, 1))
"""Those of them that are measured for a batch, in a long context, and for a batch of long contexts, too: four contexts of 400 tokens cost more than
one of 1600 where the caches of the machine hold one and not four."""
MOST_PATHS = 4
TOGETHER_MOST = 4
"""Sequences of such a batch, at most."""
LONGEST_PROMPT = 128
LEAST, MOST = 5, 16
"""Repetitions of a size."""
STALLED = 2.0
"""Medians that a round counts for at most. Else the mean counts: dear rounds are part of the cost, of which short rounds have the larger share, and
two paths that happen to agree make a round that is cheaper than others."""
GREEDY = 16
"""Rounds at temperature 0, for the acceptance there."""
BLOCK, PLAIN_BLOCK = 6, 12
"""Rounds of one size in a row that count; of those without drafts more, as they are short and all else is compared to them."""
PLAIN, DRAFTED, SETTLING = 12, 4, 0.02
"""Rounds without and with drafts, and their seconds at most, before some count: the round of a small model is a third dearer until
the caches have forgotten the size before, and in use rounds of one kind follow each other."""


class _Script:
    """A plan that does as it is told and counts how drafts fit, as an adaptive plan does."""

    def __init__(self, drafter: Drafter, verifier: Verifier) -> None:
        self.most_paths, self._grown = most_paths(drafter.info, verifier.info, MOST_PATHS), drafter.info.ranked
        self._grid, self._record = Paths(DEPTHS, self.most_paths), Record(lasting=1.0)
        self._prior = Profile.assumed().prior(1.0)
        self.ask(1, 0)

    def ask(self, width: int, depth: int) -> None:
        """What the next rounds draft."""
        self._budget = paths(width, depth, grown=self._grown) if depth else NOTHING

    def budgets(self, sequences: Seq[Sequence]) -> list[Budget]:
        return [self._budget] * len(sequences)

    def learn(self, sequences: Seq[Sequence], draft: Draft, processed: Float[Tensor, "B N V"], outcome: Outcome) -> None:
        for b in range(len(sequences) if self._budget.max_depth else 0):
            decided = Decided.of(self._budget, draft, outcome, b)
            if decided.had:
                self._grid.count(self._record, decided, self._prior)

    def rates(self, *, greedy: bool) -> dict[str, Any]:
        """Fields of a profile: what was seen, drawn to what is assumed where there was little."""
        return {"greedy" if greedy else "acceptance": self._record.learnt(self._prior)}


class Bed:
    """A test bed for rounds: `batch` copies of a prompt that start anew when their context is full.

    target, drafter, verifier: idle parts of an engine; all their slots are free again after `close`.
    script: what was counted of acceptance, to go on with; seeds: of the texts, another for each.
    `nodes`: tokens that the last round drafted, all sequences together; `depth`: those of the deepest path.
    """

    _ids = count()

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        verifier: Verifier,
        prompt: Seq[int],
        *,
        batch: int,
        params: SamplingParams,
        script: _Script | None = None,
        seeds: Iterator[int] | None = None,
    ) -> None:
        self.script = script or _Script(drafter, verifier)
        self._loop = Loop(target, drafter, verifier, self.script, clock=clock(target), teaching=False)
        self._prompt, self._params, self._batch = tuple(prompt), params, batch
        self._seeds = seeds or count()  # another text after each restart
        self._running: list[str] = []
        self._contexts: dict[str, int] = {}
        self._seconds: dict[str, dict[str, float]] = {}
        self._drafted: dict[str, tuple[int, int]] = {}
        self.nodes = self.depth = 0

    def _restart(self) -> None:
        self.close()
        self._running = [f"measured-{next(self._ids)}" for _ in range(self._batch)]
        for name in self._running:
            self._loop.add_request(Request(name, self._prompt, self._params, next(self._seeds)))
            self._contexts[name] = len(self._prompt)
        self._step()

    def _step(self) -> dict[str, float]:
        """One step; seconds of all sequences by phase."""
        spent: dict[str, float] = dict.fromkeys(map(str, PHASES), 0.0)
        drafted = self._drafted
        self._drafted = {}
        for output in self._loop.step():
            name, now = output.request_id, dict(output.sample.stats.seconds)
            if output.sample.stats.drafter_error:
                raise IncompatibleError(
                    f"the drafter failed while its costs were measured ({output.sample.stats.drafter_error}). "
                    "Mend it, or plan without measuring: depth=4, or plan='fixed'."
                )
            self._contexts[name] += len(output.token_ids)
            for phase, value in now.items():
                if phase != "prefill":
                    spent[phase if phase in spent else "other"] += value - self._seconds.get(name, {}).get(phase, 0.0)
            stats = output.sample.stats
            self._seconds[name], self._drafted[name] = now, (stats.drafted, sum(stats.drafted_by_depth))
        gained = [(n - m, d - e) for name, (n, d) in self._drafted.items() for m, e in [drafted.get(name, (0, 0))]]
        self.nodes, self.depth = sum(n for n, _ in gained), max((d for _, d in gained), default=0)
        return spent

    def round(self, width: int, depth: int) -> tuple[dict[str, float], int, int]:
        """One round of this size: its seconds by phase, the context of a sequence, and the tokens that the batch emitted."""
        room = self._loop.target.max_model_len - max(self._contexts.values(), default=10**9)
        if not self._running or room < depth + 2:
            self.script.ask(1, 0)
            self._restart()
        context = max(self._contexts.values())
        before = sum(self._contexts.values())
        self.script.ask(width, depth)
        seconds = self._step()
        return seconds, context, sum(self._contexts.values()) - before

    def close(self) -> None:
        """Abort what runs: slots are free again."""
        self._loop.discard(self._running)
        self._running, self._contexts, self._seconds, self._drafted = [], {}, {}, {}


def _settle(bed: Bed, size: tuple[int, int]) -> None:
    bed.round(*size)
    start = perf_counter()
    for _ in range((DRAFTED if size[1] else PLAIN) - 1):
        if perf_counter() - start > SETTLING:
            break
        bed.round(*size)


@dataclass
class _Setting:
    """Sizes that are measured on one bed, of which there is one at a time: `make` has slots taken until it is closed.

    taken: by size, the repetition, seconds by phase and context of each round whose drafter had as many tokens as asked.
    in_vain: the same of rounds whose drafter had none.
    """

    make: Callable[[], Bed]
    batch: int
    taken: dict[tuple[int, int], list[tuple[int, tuple[float, ...], int]]]
    in_vain: list[tuple[int, tuple[float, ...], int]] = field(default_factory=list[Any])

    def run(self, repetition: int) -> None:
        bed = self.make()
        try:
            for size, rounds in self.taken.items():
                _settle(bed, size)
                for _ in range(BLOCK if size[1] else PLAIN_BLOCK):
                    seconds, context, _ = bed.round(*size)
                    full = bed.nodes == self.batch * size[0] * size[1] and bed.depth == size[1]
                    if full or not bed.nodes:
                        (rounds if full else self.in_vain).append(
                            (repetition, tuple(seconds[phase] for phase in PHASES), context)
                        )
        finally:
            bed.close()


def _measure(settings: list[_Setting], budget_seconds: float) -> list[Observation]:
    """All settings in turn, again and again: LEAST times while the time lasts thrice, MOST while it lasts. One that fails is left out, but for the first."""
    start = perf_counter()
    for repetition in range(MOST):
        allowed = 3 * budget_seconds if repetition < LEAST else budget_seconds
        if repetition >= 2 and (perf_counter() - start) * (repetition + 1) / repetition > allowed:
            break
        for setting in list(settings):
            try:
                with warnings.catch_warnings():
                    if setting is not settings[0]:
                        warnings.simplefilter("ignore", DrafterWarning)
                    setting.run(repetition)
            except IncompatibleError:
                if setting is settings[0]:
                    raise
                settings.remove(setting)
    return _levelled(settings)


def _levelled(settings: Seq[_Setting]) -> list[Observation]:
    """Means of what was taken, after each repetition's common factor was taken out: for a while a shared machine is slower for all sizes.

    Without it the figure of one size may be of a fast moment and that of another of a slow one.
    """
    rounds = {
        (i, size): found
        for i, setting in enumerate(settings)
        for size, found in {**setting.taken, IN_VAIN: setting.in_vain}.items()
        if found
    }
    repetitions = sorted({r for found in rounds.values() for r, _, _ in found})
    logs = np.full((len(rounds), len(repetitions)), np.nan)
    for row, found in enumerate(rounds.values()):
        for column, repetition in enumerate(repetitions):
            totals = [sum(seconds) for r, seconds, _ in found if r == repetition]
            logs[row, column] = np.log(np.mean(totals)) if totals else np.nan
    common = np.zeros(len(repetitions))
    for _ in range(10):  # Tukey's median polish
        common = np.nanmedian(logs - np.nanmedian(logs - common, 1, keepdims=True), 0)
    factors = dict(zip(repetitions, np.exp(common - np.median(common)), strict=True))
    return [
        Observation(
            settings[i].batch,
            *size,
            round(np.mean([context for _, _, context in found])),
            *_mean(np.array([np.array(seconds) / factors[r] for r, seconds, _ in found])),
        )
        for (i, size), found in rounds.items()  # a drafter that copies may have had nothing to copy
    ]


def _mean(x: np.ndarray) -> list[float]:
    """Of each column, of rows that stand for STALLED medians at most."""
    totals = x.sum(1)
    return (x * np.minimum(1.0, STALLED * np.median(totals) / totals)[:, None]).mean(0).tolist()


def measured_profile(
    target: Target,
    drafter: Drafter,
    verifier: Verifier,
    prompts: Seq[Seq[int]],
    *,
    progress: Callable[[], None] = lambda: None,
    **options: Any,
) -> Profile:
    """Measure costs and acceptance on prompts, by depth the mean over them; see `measured`. progress: called after each."""
    each = list[tuple[list[Observation], dict[str, Any]]]()
    for prompt in prompts:
        each.append(measured(target, drafter, verifier, prompt, **options))
        progress()
    rates = np.mean([seen["acceptance"] for _, seen in each], axis=0)
    shown = each[0][1] | {"acceptance": tuple(rates.tolist()), "about": {"identity": identity(target, drafter, verifier)}}
    return Profile(fit([o for found, _ in each for o in found]), **shown)


def measured(
    target: Target,
    drafter: Drafter,
    verifier: Verifier,
    prompt: Seq[int],
    *,
    params: SamplingParams | None = None,
    budget_seconds: float = 1.5,
) -> tuple[list[Observation], dict[str, Any]]:
    """Measure rounds and acceptance, as fields of a profile, on a prompt; nothing may be running on the models.

    prompt: token ids, of which the last LONGEST_PROMPT are used, fewer in a small context.
    params: sampling of the drafts that acceptance is taken from; default temperature 1.
    budget_seconds: about how long it may take on fast models; a slow model takes two rounds of every size in any case.

    Raises:
        IncompatibleError: the drafter fails on short texts too; where only a longer text or a batch is too much, that is left out.
        PolydraftError: what the models themselves refuse.
    """
    params = params or SamplingParams(temperature=1.0, ignore_eos=True)
    space = min(target.max_model_len, getattr(getattr(drafter, "model", target), "max_model_len", target.max_model_len))
    ids = list(prompt)[-max(1, min(LONGEST_PROMPT, space // 4)) :]
    copies = drafter.info.laws == {SiblingLaw.POINT_MASS} and not drafter.info.ranked
    if copies:  # there must be something to copy: the text begins again
        ids = (ids + ids)[-max(1, min(2 * LONGEST_PROMPT, space // 4)) :]
    script, seeds = _Script(drafter, verifier), count()
    sizes = [(w, d) for w, d in (RANKED if drafter.info.ranked else SIZES) if w <= script.most_paths and d < space // 4]

    def setting(batch: int, text: Seq[int], some: Seq[tuple[int, int]]) -> _Setting:
        def make() -> Bed:
            return Bed(target, drafter, verifier, text, batch=batch, params=params, script=script, seeds=seeds)

        return _Setting(make, batch, {size: [] for size in some if size in sizes})

    first = setting(1, ids, sizes)
    plain = _warm(first)
    settings, together = [first], min(TOGETHER_MOST, target.max_num_seqs)
    if together > 1:
        settings.append(setting(together, ids, TOGETHER))
    longer = (ids * (space // len(ids) + 1))[: min(space - 64, 768)]
    if len(longer) > 2 * len(ids) and plain * len(longer) / 4 < 0.5 * budget_seconds:
        settings.append(setting(1, longer, LONGER))
        if together > 1:
            settings.append(setting(together, longer[: 3 * LONGEST_PROMPT], BOTH))
    found = _measure(settings, budget_seconds)
    seen = script.rates(greedy=False)
    if not params.greedy:
        seen |= _at_temperature_zero(target, drafter, verifier, ids, params, max(sizes, key=math.prod))
    return found, seen


def _warm(setting: _Setting) -> float:
    """A round of each size that does not count; seconds of one without drafts."""
    bed = setting.make()
    try:
        for size in setting.taken:
            bed.round(*size)
        return sum(bed.round(1, 0)[0].values())
    finally:
        bed.close()


def _at_temperature_zero(
    target: Target, drafter: Drafter, verifier: Verifier, ids: Seq[int], params: SamplingParams, size: tuple[int, int]
) -> dict[str, Any]:
    """What GREEDY rounds of greedy drafts showed; nothing where the drafter fails."""
    bed = Bed(target, drafter, verifier, ids, batch=1, params=params.with_(temperature=0.0))
    try:
        for _ in range(GREEDY):
            bed.round(*size if drafter.info.ranked else (1, size[1]))
        return bed.script.rates(greedy=True)
    except IncompatibleError:
        return {}
    finally:
        bed.close()
