"""`python -m studies.policy.contexts`: what the policy, fixed chains and the rule with all that it may know make of the same contexts.

At every token of plain continuations the pair drafts a chain, whose block verification (Sun et al. 2024, arXiv 2403.10444) is integrated: the chance of each
number of accepted tokens, whatever the length that the chain is cut to. Steps are priced by costs that were measured, so that neither texts that differ nor a
busy machine count. Where a step ends its continuation goes on. The policy is the package's own; spare siblings are left out.

rule, all known    the marginal rule with the acceptance of these very contexts and the speed that it reaches
policy             from measured costs, from assumed ones, and with seconds whose logarithms vary by NOISE from step to step
a seed             requests that learn from no other: from assumed rates, and from those that the engine's short answers showed (`policy.rehearsal`)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer
from jaxtyping import Float

from polydraft import Engine, SamplingParams
from polydraft.bench.record import markdown_table
from polydraft.core import Budget, Draft, DraftSampling, NoiseKey, Outcome, Request, TokenTree, TreeShape
from polydraft.core.budget import Stop
from polydraft.core.confidence import BINS, acceptance_at, bin_of
from polydraft.core.geometry import chain
from polydraft.policy.adaptive import AdaptivePolicy
from polydraft.policy.costs import Costs
from polydraft.policy.fixed import FixedPolicy
from polydraft.policy.marginal import min_reaches
from polydraft.policy.profile import Profile
from polydraft.verifiers.block import block
from studies.policy.comparison import compare
from studies.policy.prompts import questions

NOISE = 0.3
REPEATS = 4
"""Times that each continuation is walked, with other draws."""
LOGITS = np.zeros((1, 1, 1))


class Context(NamedTuple):
    """Of a chain of D tokens drafted there. confidence: the probability that each was drawn with.  weight: w of block verification behind each.
    surplus: its S before each."""

    confidence: Float[np.ndarray, " D"]
    weight: Float[np.ndarray, " D"]
    surplus: Float[np.ndarray, " D"]


def num_accepted(context: Context, depth: int) -> Float[np.ndarray, " N"]:
    """Chances of 0 .. depth accepted tokens of the chain cut to a depth, by block verification.

    Example:
        >>> context = Context(np.array([0.5, 0.5]), np.array([1.0, 0.5]), np.array([0.3, 0.25]))
        >>> num_accepted(context, 2).round(3).tolist()
        [0.0, 0.5, 0.5]
    """
    chances = np.zeros(depth + 1)
    rest = 1.0
    for length in range(depth, 0, -1):
        weight = context.weight[length - 1]
        surplus = context.surplus[length] if length < depth else 0.0
        accepts = weight if length == depth else surplus / (surplus + 1.0 - weight) if weight < 1.0 else 1.0
        chances[length] = rest * accepts
        rest = rest * (1.0 - accepts)
    chances[0] = rest
    return chances


class _Plain:
    """A verdict that accepts nothing. p: [V], of the next token."""

    def __init__(self, p: Float[np.ndarray, " V"], rng: np.random.Generator) -> None:
        self._p = p / p.sum()
        self._rng = rng

    def sample(self, key: NoiseKey) -> Outcome:
        token = self._rng.choice(len(self._p), p=self._p)
        return Outcome.of(np.full((1, 1), -1), np.zeros(1, np.int64), np.array([token]))


class Recorder:
    """A verifier that notes what block verification would do, and accepts nothing: texts are those of plain decoding."""

    info = block.info

    def __init__(self) -> None:
        self.contexts = list[Context]()
        self._rng = np.random.default_rng(0)

    def __call__(self, draft: Draft, target_probs: np.ndarray) -> Any:
        rows = list[tuple[float, float, float]]()
        weight = 1.0
        for n in range(1, draft.tree.num_nodes if draft.probs is not None else 1):
            assert draft.probs is not None
            q = draft.probs[0, int(draft.rows[0, n])].astype(np.float64)
            p = target_probs[0, n - 1].astype(np.float64)
            token = int(draft.tree.tokens[0, n])
            surplus = float(np.maximum(weight * p - q, 0.0).sum())
            weight = min(1.0, weight * float(p[token] / q[token]))
            rows.append((float(q[token]), weight, surplus))
        if rows:
            self.contexts.append(Context(*np.array(rows).T))
        return _Plain(target_probs[0, 0].astype(np.float64), self._rng)


def recorded(
    engine: Engine, prompts: Sequence[Sequence[int]], depth: int, max_tokens: int
) -> list[list[Context]]:
    """Contexts of each prompt's continuation at temperature 1."""
    recorder = Recorder()
    policy = FixedPolicy(Budget.fixed(chain(depth)))
    parts: dict[str, Any] = {
        "drafter": engine.drafter,
        "verifier": recorder,
        "policy": policy,
        "measured": False,
    }
    plain = Engine.of(engine.target, tokenizer=engine.tokenizer, eos_token_ids=engine.eos_token_ids, **parts)
    params = SamplingParams(temperature=1.0, max_tokens=max_tokens, ignore_eos=True)
    texts = list[list[Context]]()
    for ids in prompts:
        plain.generate([list(ids)], params)
        texts.append([context for context in recorder.contexts if len(context.weight) == depth])
        recorder.contexts.clear()
    return texts


Choose = Callable[[Context], int]
"""How many tokens are drafted in a context."""


def _nothing(context: Context, depth: int, accepted: int) -> None:
    """Fixed chains learn nothing."""


class Simulation:
    """Steps over recorded contexts. depth: of the chains that were drafted."""

    def __init__(self, texts: Sequence[Sequence[Context]], costs: Costs, depth: int) -> None:
        self.texts = texts
        self.costs = costs
        self.depth = depth

    def run(
        self,
        choose: Choose,
        learn: Callable[[Context, int, int], None] = _nothing,
        begin: Callable[[], None] = lambda: None,
    ) -> Float[np.ndarray, "P 2"]:
        """Tokens and seconds of each text. begin: before each.  learn: context, drafted and accepted tokens of each step."""
        figures = np.zeros((len(self.texts), 2))
        rng = np.random.default_rng(0)
        for number, text in [(n, text) for _ in range(REPEATS) for n, text in enumerate(self.texts)]:
            begin()
            at = 0
            draws = rng.random(len(text))
            while at < len(text):
                depth = min(choose(text[at]), self.depth)
                accepted = int((num_accepted(text[at], depth).cumsum()[:-1] < draws[at]).sum())
                learn(text[at], depth, accepted)
                figures[number] += accepted + 1, self.costs.step(1 + depth, depth)
                at += accepted + 1
        return figures


def length_by(stop: Stop, context: Context, most: int) -> int:
    """Tokens of a chain that ends by its own path."""
    depth = 1
    reach = acceptance_at(context.confidence[0], np.array(stop.acceptance))
    while depth < most and reach >= stop.min_reach[min(depth, len(stop.min_reach)) - 1]:
        reach *= acceptance_at(context.confidence[depth], np.array(stop.acceptance))
        depth += 1
    return depth


@dataclass(eq=False)
class _Sequence:
    """As of `policy.fixed.RunningSequence`."""

    request: Request
    token_ids: list[int] = field(default_factory=lambda: [0])
    state: Any = None
    drafting: bool = True
    course: Any = None
    num_prompt_tokens: int = 1
    num_ahead: int = 0
    stopped: bool = False


def policy_run(
    simulation: Simulation, profile: Profile | None, noise: float = 0.0, seed: int | None = None
) -> Float[np.ndarray, "P 2"]:
    """The package's policy, told what its steps would have shown. seed: of the requests."""
    policy = AdaptivePolicy(profile)
    rng = np.random.default_rng(0)
    costs = simulation.costs
    running = list[_Sequence]()

    def begin() -> None:
        running[:] = [_Sequence(Request("simulated", (0,), SamplingParams(temperature=1.0, seed=seed), 0))]

    def choose(context: Context) -> int:
        (budget,) = policy.budgets(running)
        if not budget.max_depth:
            return 0
        assert budget.stop is not None
        return length_by(budget.stop, context, min(budget.max_depth, simulation.depth))

    def learn(context: Context, depth: int, accepted: int) -> None:
        tree = TokenTree.chain(np.zeros((1, depth + 1), np.int64))
        confidence = np.array([[1.0, *context.confidence[:depth]]])
        draft = Draft(
            tree,
            DraftSampling.IID,
            TreeShape.CHAIN,
            None,
            np.arange(-1, depth)[None],
            confidence=confidence,
        )
        outcome = Outcome.of(np.arange(1, depth + 1)[None], np.array([accepted]), np.array([0]))
        policy.learn(running, draft, lambda: LOGITS, outcome)
        running[0].token_ids.extend([0] * (accepted + 1))
        scoring, drafting = np.exp(noise * rng.standard_normal(2)) * (
            costs.rows(1 + depth),
            costs.drafting(depth),
        )
        policy.time(
            {
                "prefill": 0.0,
                "scoring": scoring,
                "drafting": drafting,
                "verifying": costs.overhead,
                "other": 0.0,
            }
        )

    return simulation.run(choose, learn, begin)


def rule_run(simulation: Simulation) -> Float[np.ndarray, "P 2"]:
    """The marginal rule with the acceptance of these contexts, at the speed that it reaches."""
    hits = np.zeros(BINS)
    tries = np.full(BINS, 1e-9)
    following = np.zeros(2)
    for context in (context for text in simulation.texts for context in text):
        for confidence, before, weight in zip(
            context.confidence, (1.0, *context.weight), context.weight, strict=False
        ):
            lane = bin_of(confidence)
            hits[lane], tries[lane] = hits[lane] + min(weight, before), tries[lane] + before
        following += context.weight[1:].sum(), context.weight[:-1].sum()
    figures = simulation.run(lambda context: 1)
    rates = tuple(np.minimum(hits / tries, 1.0).tolist())
    for _ in range(4):
        tokens, seconds = figures.sum(0)
        least = min_reaches(tokens / seconds, following[0] / following[1], 1, 1, simulation.costs)
        stop = Stop(least or (1.0,), rates)
        figures = simulation.run(
            lambda context, stop=stop: length_by(stop, context, min(len(stop.min_reach), simulation.depth))
        )
    return figures


def table(simulation: Simulation, rehearsed: Profile) -> str:
    """Speeds over plain decoding and over the best chain, chosen on other texts and on the very ones. rehearsed: of an idle engine."""
    plain = simulation.run(lambda context: 0)
    chains = np.array(
        [simulation.run(lambda context, depth=depth: depth) for depth in range(1, simulation.depth + 1)]
    )
    known = Profile.of(simulation.costs)
    ways = {
        "rule, all known": rule_run(simulation),
        "policy, measured costs": policy_run(simulation, known),
        "policy, assumed costs": policy_run(simulation, None),
        f"policy, measured costs, noise of {NOISE:g}": policy_run(simulation, known, NOISE),
        "policy with a seed, assumed rates": policy_run(simulation, known, seed=0),
        "policy with a seed, rehearsed rates": policy_run(simulation, rehearsed, seed=0),
    }

    def speed(figures: Float[np.ndarray, "P 2"]) -> float:
        tokens, seconds = figures.sum(0)
        return tokens / seconds

    best = int(np.argmax([speed(figures) for figures in chains]))
    lines = [[f"best chain, of {best + 1}", f"{speed(chains[best]) / speed(plain):.3f}", "-", "1.000"]]
    for name, figures in ways.items():
        comparison = compare(figures, chains)
        low, high = comparison.interval
        over = f"{comparison.ratio:.3f} [{low:.3f}, {high:.3f}]", f"{comparison.hindsight:.3f}"
        lines.append([name, f"{speed(figures) / speed(plain):.3f}", *over])
    return markdown_table(
        ["", "over plain", "over the best chain, chosen on other texts", "on the same"], lines
    )


def main(
    model: Annotated[str, typer.Option(help="Model as of `polydraft generate`.")] = "embedded",
    prompts: Annotated[list[Path] | None, typer.Option(help=".jsonl of questions; may be repeated.")] = None,
    count: Annotated[int, typer.Option(min=2, help="Prompts.")] = 60,
    max_tokens: Annotated[int, typer.Option(min=2, help="Contexts of each.")] = 64,
    depth: Annotated[int, typer.Option(min=2, help="Tokens of the chains.")] = 8,
) -> None:
    """Print the table of one pair."""
    engine = Engine.from_pretrained(model, threads=1, max_num_seqs=1, max_model_len=1024)
    engine.measure()
    assert isinstance(engine.policy, AdaptivePolicy)
    asked = [ids for _, ids in questions(prompts or (), count, engine, model != "embedded")]
    texts = recorded(engine, asked, depth, max_tokens)
    print(f"{model}, T=1, {len(texts)} prompts, {sum(map(len, texts))} contexts")
    profile = engine.policy.profile
    print(table(Simulation(texts, profile.costs, depth), profile))


if __name__ == "__main__":
    typer.run(main)
