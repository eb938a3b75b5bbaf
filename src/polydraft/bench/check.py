"""Is the output of this engine, with these models and settings, the target's? A test on texts that it generates itself.

Six looks at every round of real, many-round texts:

rule    the verdict gives the law of a round's block before any randomness of the rule. For every position j of the block,
            M_j = sum over nodes n of depth j - 1 of  sum_y w(n, y) f_n(y)  -  R(n) sum_y p_n(y) f_n(y)
        with w(n, y) the mass of blocks that go through n and then y, R(n) the mass that goes through n, p_n the target's law.
        If the rule is lossless and drafts are drawn as reported, M_j has mean 0 over rounds for any f that is a function of the
        context alone: tokens of later rounds add nothing. f = q/(p+q), to which every mistake with q or with the draws is
        sensitive, f = p/max p, and the indicators of the best token by p and by q. All lie in [0, 1], so |mean| is a lower bound of the total variation distance.
draws   the same with the tokens that were drawn, X_j = f_n(x_j) - sum_y p_n(y) f_n(y): it sees mistakes of the noise as well.
beside  M_j minus that of another lossless rule on the same draft: what both owe to the chance of the draft falls out, and a
        small mistake of the rule shows in few rounds.
noise   X_j - M_j: the stop and the extra token against the verdict they were drawn from.
again   positions that are drafted again after a rejection: the new draw's place in the draft's cumulative law times that of the
        draw before. Fresh noise makes the mean 0; noise keyed by a token's own position repeats the place.
text    the tokens that came out, judged by transformers: their places in the cumulative law of a pass of the plain model over
        the finished text are uniform (Kolmogorov-Smirnov), for each position of a block; at temperature 0 each is the largest.

Rounds follow each other as martingale differences, so mean / standard error is a standard normal for many rounds.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from scipy import stats
from torch import Tensor

from polydraft import registry, sampling
from polydraft import tree as trees
from polydraft.bench.law_check import NEAR_TIE, places
from polydraft.bench.wrong_rules import FEW, Reversed, mistakes
from polydraft.core import Draft, Method, NoiseKey, Outcome, SamplingParams, SiblingLaw, Target, TokenTree, Verdict, Verifier
from polydraft.engine.api import Engine
from polydraft.errors import InvalidInputError

__all__ = ["Finding", "Recorder", "Report", "check", "self_test"]

IMPLAUSIBLE = 1e-4
"""A smallest p-value below this, after correction for the number of tests, is a failure."""
RESOLUTION = 1e-5
"""Laws come from float32 logits: mean differences of this size mean nothing."""
STATISTICS = ("draft", "sharp", "best", "best of draft")
SELF_TEST = 3
"""Times as many rounds at most for a known mistake; most are found in a few hundred."""
CONTROLS = ("speculative", "recursive", "recursive_wor", "block", "greedy_traversal")
"""Rules to stand beside the one that is checked."""
LEAST_ROUNDS = 30
"""Positions reached in fewer rounds are not tested: the normal law would not hold."""


@dataclass(frozen=True)
class Finding:
    """One test: what was looked at, on how many rounds or tokens, how far off (a lower bound of the total variation distance
    for rules, the Kolmogorov-Smirnov distance for texts), and how plausible that is by chance."""

    what: str
    count: int
    effect: float
    p_value: float


@dataclass
class Recorder:
    """A verifier that behaves as `rule` and keeps M_j and X_j of every round, by statistic and position.

    paired: for each other lossless rule that fits the drafts, M_j of `rule` minus M_j of that rule on the same draft.
    """

    rule: Verifier
    paired: dict[str, list[Float[np.ndarray, "S J"]]] = field(default_factory=dict[str, list[np.ndarray]])
    values: list[Float[np.ndarray, "S J"]] = field(default_factory=list[np.ndarray])
    drawn: list[Float[np.ndarray, "S J"]] = field(default_factory=list[np.ndarray])
    again: "_Again" = field(default_factory=lambda: _Again())
    walk = None  # every round is seen

    @property
    def info(self) -> Method:
        return self.rule.info

    @property
    def findings(self) -> list[Finding]:
        """All tests of the rounds so far."""
        noise = [x - m for x, m in zip(self.drawn, self.values, strict=True)]
        found = [*rule_findings(self.values), *rule_findings(self.drawn, "draws"), *rule_findings(noise, "noise")]
        for name, values in self.paired.items():
            found += rule_findings(values, f"rule beside {name}")
        return [*found, *self.again.findings]

    def __call__(self, draft: Draft, target_probs: Float[Tensor, "B N V"]) -> Verdict:
        verdict = self.rule(draft, target_probs)
        if draft.tree.num_nodes == 1:
            return verdict  # plain decoding: no rule had a part in it
        now = _Round.of(draft, target_probs)
        own = now.expected(verdict)
        self.values += own
        for name in CONTROLS:
            info = registry.verifier(name).info
            if draft.law in info.laws and draft.shape in info.shapes:
                other = now.expected(registry.verifier(name)(draft, target_probs))
                self.paired.setdefault(name, []).extend(a - b for a, b in zip(own, other, strict=True))
        return _Watched(verdict, now, draft, self.drawn, self.again)


@dataclass(frozen=True)
class _Watched:
    """A verdict that notes which tokens are drawn from it."""

    verdict: Verdict
    now: "_Round"
    draft: Draft
    drawn: list[Float[np.ndarray, "S J"]]
    again: "_Again"

    @property
    def stop(self) -> Float[Tensor, "B N"]:
        return self.verdict.stop

    def after(self, node: Int[Tensor, "B"]) -> Float[Tensor, "B V"]:
        return self.verdict.after(node)

    def sample(self, key: NoiseKey) -> Outcome:
        outcome = self.verdict.sample(key)
        self.again.see(self.draft, key)
        self.drawn.extend(self.now.drawn(outcome))
        return outcome


@dataclass
class _Again:
    """Products of centred places of draws for one position in two rounds.

    places: (seed, sample, position) -> place of the last first-child draw there, in [0, 1].
    Shared races reuse the noise of a position on purpose, and deterministic drafts have none: neither is looked at.
    """

    places: dict[tuple[int, int, int], float] = field(default_factory=dict[tuple[int, int, int], float])
    products: list[float] = field(default_factory=list[float])

    def see(self, draft: Draft, key: NoiseKey) -> None:
        if draft.law not in (SiblingLaw.IID, SiblingLaw.WITHOUT_REPLACEMENT) or draft.probs is None:
            return
        tokens, parents, rows = draft.tree.tokens.tolist(), draft.tree.parents.tolist(), draft.rows.tolist()
        for b, (seed, sample, position) in enumerate(
            zip(key.seed.tolist(), key.sample.tolist(), key.position.tolist(), strict=True)
        ):
            node = 0
            for depth in range(len(tokens[b])):
                node = next((n for n in range(node + 1, len(tokens[b])) if parents[b][n] == node), -1)
                if node < 0 or rows[b][node] < 0:
                    break
                q, x = draft.probs[b, rows[b][node]].double(), tokens[b][node]
                place = float((q[:x].sum() + q[x] / 2) / q.sum()) - 0.5
                where = (seed, sample, position + depth)
                if where in self.places:
                    self.products.append(place * self.places[where])
                self.places[where] = place

    @property
    def findings(self) -> list[Finding]:
        return [_normal("noise, drafted again", np.array(self.products))] if len(self.products) >= LEAST_ROUNDS else []


@dataclass(frozen=True)
class _Round:
    """The functions f at every node of a draft, and all that no rule changes.

    f: [S, B, N, V].  mean: [S, B, N] of f under p.  on_draft: [S, B, N] f of a node's parent at the node's token.
    """

    tree: TokenTree
    first: np.ndarray
    above: np.ndarray
    level: np.ndarray
    f: Float[Tensor, "S B N V"]
    mean: np.ndarray
    on_draft: np.ndarray

    @classmethod
    def of(cls, draft: Draft, target_probs: Float[Tensor, "B N V"]) -> "_Round":
        tree, p = draft.tree, target_probs.double()
        p = p / p.sum(-1, keepdim=True)
        first = trees.first_copies(tree)
        above = torch.where(tree.parents >= 0, first.gather(1, tree.parents.clamp(min=0)), -1)
        f = torch.stack([torch.stack(list(_functions(draft, p, n))) for n in range(tree.num_nodes)], 2)
        rows = torch.arange(len(p))[:, None]
        on_draft = f[:, rows, above.clamp(min=0), tree.tokens]
        mean = torch.einsum("bnv,sbnv->sbn", p, f)
        return cls(tree, first.numpy(), above.numpy(), trees.depths(tree).numpy(), f, mean.numpy(), on_draft.numpy())

    def expected(self, verdict: Verdict) -> list[Float[np.ndarray, "S J"]]:
        """M_j of each row, for each statistic and each position of its block (position 1 first)."""
        B, N = self.tree.tokens.shape
        stop = verdict.stop.double().numpy()
        through = np.zeros_like(stop)
        np.add.at(through, (np.arange(B)[:, None], self.first), stop)
        for n in range(N - 1, 0, -1):
            rows = np.flatnonzero((self.above[:, n] >= 0) & (self.first[:, n] == n))
            through[rows, self.above[rows, n]] += through[rows, n]
        found = np.zeros((B, len(STATISTICS), int(self.level.max()) + 1))
        for n in range(N):
            real = np.flatnonzero((self.level[:, n] >= 0) & (self.first[:, n] == n))
            after = verdict.after(torch.full((B,), n)).double()
            end = stop[:, n] * np.nan_to_num(torch.einsum("bv,sbv->sb", after, self.f[:, :, n]).numpy())
            value = end - through[:, n] * self.mean[:, :, n]
            for b in real:
                found[b, :, self.level[b, n]] += value[:, b]
                if n:
                    found[b, :, self.level[b, n] - 1] += through[b, n] * self.on_draft[:, b, n]
        return [found[b, :, : self.level[b].max() + 1] for b in range(B)]

    def drawn(self, outcome: Outcome) -> list[Float[np.ndarray, "S J"]]:
        """X_j = f_n(x_j) - sum_y p_n(y) f_n(y) of each row's emitted tokens x_j, n being the node before."""
        found: list[np.ndarray] = []
        paths = outcome.path.tolist()
        for b, tokens in enumerate(outcome.emitted(self.tree)):
            nodes = self.first[b, [0, *(n for n in paths[b] if n >= 0)]]
            x = self.f[:, b, nodes, tokens].numpy() - self.mean[:, b, nodes]
            found.append(np.pad(x, ((0, 0), (0, int(self.level[b].max()) + 1 - len(tokens)))))  # 0 where the block ended before
        return found


def _functions(draft: Draft, p: Float[Tensor, "B N V"], n: int) -> Iterator[Float[Tensor, "B V"]]:
    """f of node n for each statistic; without a q those of the draft are 0, which tests nothing."""
    q = None
    if draft.probs is not None:
        child = (draft.tree.parents == n).int()
        row = draft.rows.gather(1, child.argmax(1, keepdim=True))[:, 0]
        known = (child.sum(1) > 0) & (row >= 0)
        q = draft.probs.double()[torch.arange(len(p)), row.clamp(min=0)]
        q = torch.where(known[:, None], q, 0.0)
    none = torch.zeros_like(p[:, n])
    yield none if q is None else q / (p[:, n] + q).clamp(min=1e-300)
    yield p[:, n] / p[:, n].amax(-1, keepdim=True)
    yield none.scatter(1, p[:, n].argmax(-1, keepdim=True), 1.0)
    yield none if q is None else none.scatter(1, q.argmax(-1, keepdim=True), (q.amax(-1, keepdim=True) > 0).double())


@dataclass(frozen=True)
class Report:
    """All tests of a check, the worst p-value after correction for their number, and whether it is plausible."""

    findings: list[Finding]
    rounds: int
    tokens: int

    @property
    def p_value(self) -> float:
        """Smallest p-value times the number of tests (Bonferroni), at most 1."""
        return min(1.0, len(self.findings) * min((f.p_value for f in self.findings), default=1.0))

    @property
    def passed(self) -> bool:
        return self.p_value > IMPLAUSIBLE

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        rows = [{"what": f.what, "count": f.count, "effect": f.effect, "p_value": f.p_value} for f in self.findings]
        return {"passed": self.passed, "p_value": self.p_value, "rounds": self.rounds, "tokens": self.tokens, "tests": rows}


def _normal(what: str, x: Float[np.ndarray, "n"]) -> Finding:
    """Whether values have mean 0, up to RESOLUTION."""
    error = np.hypot(x.std(ddof=1) / np.sqrt(len(x)), RESOLUTION)
    return Finding(what, len(x), float(abs(x.mean())), float(2 * stats.norm.sf(abs(x.mean()) / error)))


def rule_findings(values: Sequence[Float[np.ndarray, "S J"]], look: str = "rule") -> list[Finding]:
    """Tests of M_j or X_j for each position and for whole blocks (the sum over positions), for each statistic."""
    found: list[Finding] = []
    longest = max((v.shape[1] for v in values), default=0)
    for s, name in enumerate(STATISTICS):
        for j in range(longest):
            x = np.array([v[s, j] for v in values if v.shape[1] > j])
            if len(x) >= LEAST_ROUNDS and x.any():
                found.append(_normal(f"{look}, position {j + 1}, {name}", x))
        x = np.array([v[s].sum() for v in values])
        if len(x) >= LEAST_ROUNDS and x.any():
            found.append(_normal(f"{look}, whole blocks, {name}", x))
    return found


@torch.inference_mode()
def _judged(judge: Any, engine: Engine, prompt: list[int], sample: Any, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """(logits, processed laws) of the plain model before each token of a finished text, [T, V] each."""
    text = torch.tensor([[*prompt, *sample.token_ids]], device=judge.device)
    V = engine.target.vocab_size
    logits = judge(text).logits[0, len(prompt) - 1 : -1, :V].float().cpu()
    chain = TokenTree.chain(torch.tensor([[prompt[-1], *sample.token_ids[:-1]]]))
    laws = sampling.laws(logits[None], chain, [prompt], [len(prompt)], [params], engine.eos_token_ids)
    return logits, laws[0]


def _offsets(origins: Sequence[Any]) -> list[int]:
    """Position of each token in its block: a block ends with the target's own token."""
    found, at = [], 0
    for origin in origins:
        found.append(at)
        at = 0 if origin.source == "target" else at + 1
    return found


def _uniform(what: str, u: list[float]) -> Finding:
    test = stats.kstest(u, "uniform")
    return Finding(what, len(u), float(test.statistic), float(test.pvalue))


def text_findings(judge: Any, engine: Engine, results: Sequence[Any], params: SamplingParams) -> list[Finding]:
    """Tests of the tokens that came out, by the judge's laws."""
    rng, by_offset, wrong, ties, count = np.random.default_rng(0), dict[int, list[float]](), 0, 0, 0
    for result in results:
        for sample in result.samples:
            if not sample.token_ids:
                continue
            logits, laws = _judged(judge, engine, result.prompt_token_ids, sample, params)
            count += len(sample.token_ids)
            if params.greedy:
                own = torch.tensor(sample.token_ids)[:, None]
                processed = torch.where(laws > 0, logits, logits)
                margin = processed.amax(-1) - processed.gather(1, own)[:, 0]
                ties += int(((margin > 0) & (margin < NEAR_TIE)).sum())
                wrong += int(((margin >= NEAR_TIE) & (laws.gather(1, own)[:, 0] == 0)).sum())
                continue
            u = places(laws.double().log(), sample.token_ids, 1.0, rng)
            for offset, value in zip(_offsets(sample.origins), u.tolist(), strict=True):
                by_offset.setdefault(offset, []).append(value)
    if params.greedy:
        return [Finding(f"text, {count} greedy tokens, {ties} near ties", count, wrong / max(count, 1), 0.0 if wrong else 1.0)]
    found = [_uniform(f"text, position {j + 1}", u) for j, u in sorted(by_offset.items()) if len(u) >= LEAST_ROUNDS]
    everything = [value for u in by_offset.values() for value in u]
    return [*found, _uniform("text, all tokens", everything)] if everything else found


def check(
    engine: Engine,
    prompts: Sequence[str | Sequence[int]],
    params: SamplingParams,
    *,
    judge: Any = None,
    rounds: int = 2000,
    progress: Callable[[int, int], None] | None = None,
    stop_early: bool = False,
) -> Report:
    """Generate from the prompts with different seeds until `rounds` rounds are over, and test them.

    judge: the target as a module of transformers; without it only the rule is tested, not the texts.
    progress: told of rounds done and rounds wanted.  stop_early: end as soon as the rule's tests fail.

    Raises:
        InvalidInputError: fewer rounds than a test needs, or no prompt.

    Example:
        >>> engine = Engine.embedded(drafter="model:chain", depth=2)
        >>> check(engine, ["import os\\n"], SamplingParams(max_tokens=16), rounds=60).passed
        True
    """
    if rounds < LEAST_ROUNDS or not prompts:
        raise InvalidInputError(
            f"rounds={rounds} and {len(prompts)} prompts were given; expected rounds >= {LEAST_ROUNDS} and at least one prompt."
        )
    recorder, rule = Recorder(engine.verifier), engine.verifier
    results: list[Any] = []
    seed = 0 if params.seed is None else params.seed
    engine.verifier = recorder
    try:
        while len(recorder.values) < rounds:
            seeds = [params.with_(seed=seed + i) for i in range(len(prompts))]
            results += engine.generate(list(prompts), seeds)
            seed += len(prompts)
            if progress is not None:
                progress(min(len(recorder.values), rounds), rounds)
            if stop_early and _early(recorder):
                break
    finally:
        engine.verifier = rule
    found = recorder.findings
    if judge is not None:
        found += text_findings(judge, engine, results, params)
    return Report(found, len(recorder.values), sum(len(s.token_ids) for r in results for s in r.samples))


def _early(recorder: Recorder) -> bool:
    """Far beyond chance, so that looking more than once does not matter."""
    return Report(recorder.findings, 0, 0).p_value < IMPLAUSIBLE / 100


def self_test(
    engine: Engine, draft_model: Target, prompts: Sequence[str | Sequence[int]], params: SamplingParams, *, rounds: int = 2000
) -> Iterator[tuple[str, Report]]:
    """Check every known mistake on the engine's own pair; a report that passed is a mistake that was not caught.

    Laws are cut to `FEW` tokens, and the draft's are swapped (`Reversed`): a draft that agrees with the target would hide most
    mistakes, as there is nothing to reject.
    """
    bad: Any = Reversed(draft_model)
    few = params.with_(top_k=FEW, temperature=params.temperature or 1.0)
    for mistake in mistakes(engine.eos_token_ids):
        wrong = Engine.of(
            engine.target,
            tokenizer=engine.tokenizer,
            draft_model=bad,
            drafter=mistake.drafter(bad),
            verifier=mistake.rule,
            depth=mistake.depth,
            num_paths=mistake.width,
            eos_token_ids=engine.eos_token_ids,
        )
        yield mistake.name, check(wrong, prompts, few, rounds=SELF_TEST * rounds, stop_early=True)
