"""What `polydraft check` sees of steps: M_j of every verdict, X_j of every outcome, and the tests of their means; see `check.check`."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float

from polydraft.check.finding import Finding, two_sided
from polydraft.core import Draft, DraftSampling, NoiseKey, Outcome, TokenTree, Verdict, Verifier
from polydraft.core import geometry as tree
from polydraft.core import geometry as trees
from polydraft.core.arrays import host, scatter
from polydraft.core.batch import select
from polydraft.methods import registry
from polydraft.sampling import noise
from polydraft.verifiers.lift.verdict import TreeVerdict

RESOLUTION = 1e-5
"""Of cumulative probabilities and, relative, of probabilities: a hundred times what float32 rounds. Mean differences of this size mean nothing."""
EXAMPLES = 3
"""Differing steps that are shown."""
CHANGES = 8
"""Changed target distributions that are tried where a draw differs: a race between two tokens goes either way in half of them."""


@dataclass
class StepComparison:
    """compared: sequences' steps.  differing: (seed, position, tokens of the engine, tokens of the verdict) of those that differ."""

    compared: int = 0
    differing: list[tuple[int, int, list[int], list[int]]] = field(
        default_factory=list[tuple[int, int, list[int], list[int]]]
    )

    def see(
        self,
        verifier: Verifier,
        verdict: Verdict,
        draft: Draft,
        target_probs: Float[np.ndarray, "B N V"],
        key: NoiseKey,
        outcome: Outcome,
    ) -> None:
        """Compare what the engine did in a step with what the verifier's verdict samples."""
        ours = outcome.emitted(draft.tree)
        theirs = verdict.sample(key).emitted(draft.tree)
        self.compared += len(ours)
        for b, (emitted, expected) in enumerate(zip(ours, theirs, strict=True)):
            if emitted != expected and not _by_rounding(verifier, draft, target_probs, key, outcome, b):
                self.differing.append((int(key.seed[b]), int(key.position[b]), emitted, expected))

    @property
    def examples(self) -> tuple[str, ...]:
        """The first steps that differ, in words."""
        return tuple(
            f"seed {seed}, position {position}: the engine accepted {ours}; the verdict samples {theirs} on the same noise"
            for seed, position, ours, theirs in self.differing[:EXAMPLES]
        )

    @property
    def findings(self) -> list[Finding]:
        """One test, whose p-value is 0 where anything differs."""
        if not self.compared:
            return []
        share = len(self.differing) / self.compared
        return [Finding("walk", self.compared, share, 0.0 if self.differing else 1.0)]


def _by_rounding(
    verifier: Verifier, draft: Draft, p: Float[np.ndarray, "B N V"], key: NoiseKey, outcome: Outcome, b: int
) -> bool:
    row_draft, at = select((draft, key), [b])
    count = int(outcome.num_accepted[b])
    node = int(outcome.path[b, count - 1]) if count else 0
    return any(
        _reaches(verifier(row_draft, row_probs), row_draft.tree, at, node, int(outcome.token[b]))
        for row_probs in _rounded(p[b : b + 1])
    )


def _rounded(p: Float[np.ndarray, "1 N V"]) -> Iterator[Float[np.ndarray, "1 N V"]]:
    """The target distribution, and some that differ from it by rounding; copies of a context have equal rows."""
    yield p
    random = np.random.default_rng(0)
    for _ in range(CHANGES):
        change = 1 + RESOLUTION * random.uniform(-1, 1, p.shape[-1])
        changed = p * change.astype(p.dtype)
        yield changed / changed.sum(-1, keepdims=True)


def _reaches(verdict: Verdict, drafted: TokenTree, key: NoiseKey, node: int, token: int) -> bool:
    """Whether the verdict stops at the node and goes on with the token, for uniforms within `RESOLUTION` of these."""
    node = int(tree.first_copies(drafted)[0, node])
    order = verdict.order if isinstance(verdict, TreeVerdict) else None
    stop = host(verdict.stop)[0].astype(np.float64)
    turns = np.arange(len(stop)) if order is None else host(order)[0]
    place = int(np.flatnonzero(turns == node)[0])
    after = host(verdict.after(np.array([node])))[0].astype(np.float64)
    return _within(stop[turns], place, key, noise.Stream.STOP) and _within(
        after, token, key, noise.Stream.EXTRA
    )


def _within(probs: Float[np.ndarray, " n"], index: int, key: NoiseKey, stream: noise.Stream) -> bool:
    cumulative = probs.cumsum()
    low = cumulative[index] - probs[index]
    high = cumulative[index]
    u = float(noise.uniforms(key, stream, 1)[0, 0]) * cumulative[-1]
    return probs[index] > 0 and low - RESOLUTION <= u <= high + RESOLUTION


STATISTICS = ("draft", "sharp", "best", "best of draft")
OF_TARGET = ("sharp", "best")
"""Statistics that need no draft: of tokens that came out they are a test even where all values are 0, as at temperature 0."""
CONTROLS = ("speculative", "recursive", "recursive_wor", "block", "greedy_traversal")
"""Verifiers to stand beside the one that is checked."""
FEWEST_STEPS = 30
"""Positions reached in fewer steps are not tested: the normal distribution would not hold."""


@dataclass
class Recorder:
    """M_j and X_j of every step that it is shown, by statistic and position.

    An outcome comes from the engine, in whatever way the engine came to it; the verdict is worked out beside it.

    paired: for each other lossless verifier that fits the drafts, M_j of `verifier` minus M_j of that verifier on the same draft.
    plain: X_1 of steps without a draft.  walks: outcomes beside those of the verdicts on the same noise.
    steps: sequences' steps, those without a draft among them.  spares: those whose chain had spare siblings, see `budget.Stop`.
    """

    verifier: Verifier
    paired: dict[str, list[Float[np.ndarray, "S J"]]] = field(default_factory=dict[str, list[np.ndarray]])
    values: list[Float[np.ndarray, "S J"]] = field(default_factory=list[np.ndarray])
    drawn: list[Float[np.ndarray, "S J"]] = field(default_factory=list[np.ndarray])
    plain: list[Float[np.ndarray, "S J"]] = field(default_factory=list[np.ndarray])
    again: "_Again" = field(default_factory=lambda: _Again())
    walks: StepComparison = field(default_factory=StepComparison)
    steps: int = 0
    spares: int = 0

    @property
    def findings(self) -> list[Finding]:
        """All tests of the steps so far."""
        noise = [x - m for x, m in zip(self.drawn, self.values, strict=True)]
        results = [
            *self.walks.findings,
            *findings_of(self.values, "verifier", OF_TARGET),
            *findings_of(self.drawn, "draws", OF_TARGET),
            *findings_of(noise, "noise"),
            *findings_of(self.plain, "steps without drafts", OF_TARGET),
        ]
        for name, values in self.paired.items():
            results += findings_of(values, f"verifier beside {name}")
        return [*results, *self.again.findings]

    def see(
        self,
        draft: Draft,
        target_probs: Float[np.ndarray, "B N V"],
        key: NoiseKey,
        outcome: Outcome,
        verifier: Verifier,
    ) -> None:
        """Take note of a step that is over: what was drafted, the target's distributions there, and what the engine accepted by which verifier."""
        p = target_probs
        self.steps += len(p)
        verdict = verifier(draft, p)
        now = _Statistics.of(draft, p)
        self.walks.see(verifier, verdict, draft, p, key, outcome)
        if draft.tree.num_nodes == 1:
            self.plain += now.drawn(outcome)
            return
        expected = now.expected(verdict)
        self.values += expected
        self.drawn += now.drawn(outcome)
        self.again.see(draft, key)
        for name in CONTROLS:
            info = registry.verifier(name).info
            if draft.sampling in info.draft_sampling and draft.shape in info.shapes:
                expected_of_other = now.expected(registry.verifier(name)(draft, p))
                self.paired.setdefault(name, []).extend(
                    a - b for a, b in zip(expected, expected_of_other, strict=True)
                )


@dataclass
class _Again:
    """Products of centred places of draws for one position in two steps.

    places: (seed, sample, position) -> place of the last first-child draw there, in [0, 1].
    Shared races reuse the noise of a position on purpose, and deterministic drafts have none: neither is looked at.
    """

    places: dict[tuple[int, int, int], float] = field(default_factory=dict[tuple[int, int, int], float])
    products: list[float] = field(default_factory=list[float])

    def see(self, draft: Draft, key: NoiseKey) -> None:
        if (
            draft.sampling not in (DraftSampling.IID, DraftSampling.WITHOUT_REPLACEMENT)
            or draft.probs is None
        ):
            return
        keys = zip(key.seed.tolist(), key.sample.tolist(), key.position.tolist(), strict=True)
        for b, (seed, sample, position) in enumerate(keys):
            for depth, place in enumerate(_first_places(draft, b)):
                where = (seed, sample, position + depth)
                if where in self.places:
                    self.products.append(place * self.places[where])
                self.places[where] = place

    @property
    def findings(self) -> list[Finding]:
        return [_normal("noise again", np.array(self.products))] if len(self.products) >= FEWEST_STEPS else []


def _first_places(draft: Draft, b: int) -> Iterator[float]:
    """Of the first sampled child at each depth of a row: where its draw lies in its distribution, less the middle."""
    assert draft.probs is not None
    tokens = draft.tree.tokens[b].tolist()
    parents = draft.tree.parents[b].tolist()
    rows = draft.rows[b].tolist()
    node = 0
    for _ in tokens:
        node = next((n for n in range(node + 1, len(tokens)) if parents[n] == node), -1)
        if node < 0 or rows[node] < 0:
            return
        q = draft.probs[b, rows[node]].astype(np.float64)
        x = tokens[node]
        yield float((q[:x].sum() + q[x] / 2) / q.sum()) - 0.5


@dataclass(frozen=True)
class _Statistics:
    """The functions f at every node of a draft, and all that no verifier changes.

    f: [S, B, N, V].  mean: [S, B, N] of f under p.  on_draft: [S, B, N] f of a node's parent at the node's token.
    """

    tree: TokenTree
    first: np.ndarray
    above: np.ndarray
    level: np.ndarray
    f: Float[np.ndarray, "S B N V"]
    mean: np.ndarray
    on_draft: np.ndarray

    @classmethod
    def of(cls, draft: Draft, target_probs: Float[np.ndarray, "B N V"]) -> "_Statistics":
        tree = draft.tree
        p = target_probs.astype(np.float64)
        p = p / p.sum(-1, keepdims=True)
        first = trees.first_copies(tree)
        parents = np.take_along_axis(first, np.maximum(tree.parents, 0), 1)
        above = np.where(tree.parents >= 0, parents, -1)
        f = np.stack([np.stack(list(_functions(draft, p, n))) for n in range(tree.num_nodes)], 2)
        rows = np.arange(len(p))[:, None]
        on_draft = f[:, rows, np.maximum(above, 0), tree.tokens]
        mean = np.einsum("bnv,sbnv->sbn", p, f)
        return cls(tree, first, above, trees.depths(tree), f, mean, on_draft)

    def expected(self, verdict: Verdict) -> list[Float[np.ndarray, "S _"]]:
        """M_j of each row, for each statistic and each position of its block (position 1 first)."""
        B, N = self.tree.tokens.shape
        stop = host(verdict.stop).astype(np.float64)
        through = self._through(stop)
        totals = np.zeros((B, len(STATISTICS), int(self.level.max()) + 1))
        for n in range(N):
            real = np.flatnonzero((self.level[:, n] >= 0) & (self.first[:, n] == n))
            after = host(verdict.after(np.full(B, n))).astype(np.float64)
            end = stop[:, n] * np.nan_to_num(np.einsum("bv,sbv->sb", after, self.f[:, :, n]))
            value = end - through[:, n] * self.mean[:, :, n]
            for b in real:
                totals[b, :, self.level[b, n]] += value[:, b]
                if n:
                    totals[b, :, self.level[b, n] - 1] += through[b, n] * self.on_draft[:, b, n]
        return [totals[b, :, : self.level[b].max() + 1] for b in range(B)]

    def _through(self, stop: np.ndarray) -> np.ndarray:
        """Probability that the path goes through each node or ends there, from that of ending there: [B, N]."""
        B, N = stop.shape
        through = np.zeros_like(stop)
        np.add.at(through, (np.arange(B)[:, None], self.first), stop)
        for n in range(N - 1, 0, -1):
            rows = np.flatnonzero((self.above[:, n] >= 0) & (self.first[:, n] == n))
            through[rows, self.above[rows, n]] += through[rows, n]
        return through

    def drawn(self, outcome: Outcome) -> list[Float[np.ndarray, "S _"]]:
        """X_j = f_n(x_j) - sum_y p_n(y) f_n(y) of each row's emitted tokens x_j, n being the node before."""
        values: list[np.ndarray] = []
        paths = outcome.path.tolist()
        for b, tokens in enumerate(outcome.emitted(self.tree)):
            nodes = self.first[b, [0, *(n for n in paths[b] if n >= 0)]]
            x = self.f[:, b, nodes, tokens] - self.mean[:, b, nodes]
            values.append(
                np.pad(x, ((0, 0), (0, int(self.level[b].max()) + 1 - len(tokens))))
            )  # 0 where the block ended before
        return values


def _functions(draft: Draft, p: Float[np.ndarray, "B N V"], n: int) -> Iterator[Float[np.ndarray, "B V"]]:
    """f of node n for each statistic; without a q those of the draft are 0, which tests nothing."""
    p = p[:, n]
    q = _draft_probs(draft, n)
    none = np.zeros_like(p)
    yield none if q is None else q / np.maximum(p + q, 1e-300)
    yield p / p.max(-1, keepdims=True)
    yield scatter(none, p.argmax(-1, keepdims=True), 1.0)
    if q is None:
        yield none
    else:
        is_drafted = (q.max(-1, keepdims=True) > 0).astype(np.float64)
        yield scatter(none, q.argmax(-1, keepdims=True), is_drafted)


def _draft_probs(draft: Draft, n: int) -> Float[np.ndarray, "B V"] | None:
    """q below node n, 0 where nothing was drawn there; None of drafts without probabilities."""
    if draft.probs is None:
        return None
    is_child = draft.tree.parents == n
    batch = np.arange(len(is_child))
    row = draft.rows[batch, is_child.argmax(1)]
    is_drafted = is_child.any(1) & (row >= 0)
    q = draft.probs[batch, np.maximum(row, 0)].astype(np.float64)
    return np.where(is_drafted[:, None], q, 0.0)


def _normal(what: str, x: Float[np.ndarray, " n"]) -> Finding:
    """Whether values have mean 0, up to RESOLUTION."""
    error = np.hypot(x.std(ddof=1) / np.sqrt(len(x)), RESOLUTION)
    return Finding(what, len(x), float(abs(x.mean())), two_sided(x.mean() / error), float(error))


def findings_of(
    values: Sequence[Float[np.ndarray, "S _"]], look: str = "verifier", always: Sequence[str] = ()
) -> list[Finding]:
    """Tests of M_j or X_j for each position and for whole blocks (the sum over positions), for each statistic.

    always: statistics that are tested where all values are 0 too; the others then have nothing to look at.
    """
    findings: list[Finding] = []
    longest = max((v.shape[1] for v in values), default=0)
    for s, name in enumerate(STATISTICS):

        def test(where: str, x: Float[np.ndarray, " n"], name: str = name) -> None:
            if len(x) >= FEWEST_STEPS and (x.any() or name in always):
                findings.append(_normal(f"{look}, {where}, {name}", x))

        for j in range(longest):
            test(f"position {j + 1}", np.array([v[s, j] for v in values if v.shape[1] > j]))
        test("whole blocks", np.array([v[s].sum() for v in values]))
    return findings
