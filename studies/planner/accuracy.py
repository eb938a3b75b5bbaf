"""The adaptive plan against every fixed size on six workloads, in one interleaved run each.

held-out Python     prompts of the package, temperature 1
repeated edits      a text with its own beginning again behind it, drafted by copying (n-grams), temperature 0
chat                questions and answers in English, which the pair was not trained on, temperature 0.7
high temperature    temperature 1.8
random target       a target of random weights, which no draft fits
mixed batch         four sequences at a time: two greedy, two sampled

The best fixed plan is the best of all sizes, plain decoding included. All run for a quarter of the rounds; those that are then more than
CLOSE behind the best are left out, so that there is time for more rounds of the others. The largest of many noisy figures is too
large, so the best is chosen on one half of the rounds and met on the other, both ways round: every prompt is in both halves, with
another seed. Rates count decoding without the prefill, in CPU seconds on one thread, so that other work on the machine counts little.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from polydraft import tree
from polydraft.core import Budget, SamplingParams, SiblingLaw
from polydraft.engine.api import Engine
from polydraft.engine.stats import clock
from polydraft.models import load, pair
from polydraft.models.compiled.llama import CompiledLlama
from polydraft.plan.plan import AdaptivePlan, FixedPlan, Plan
from polydraft.tune.measure import measured_profile

__all__ = ["WORKLOADS", "Accuracy", "accuracy", "markdown", "sizes_of"]

CHAT = (
    "User: How do I keep bread fresh for longer?\nAssistant:",
    "User: What is the difference between weather and climate?\nAssistant: Weather is what happens today, and climate",
    "User: Please write a short note to my landlord about a broken window.\nAssistant: Dear",
    "User: Explain to a child why the sky is blue.\nAssistant: When the light of the sun",
    "User: I want to learn to play chess. Where do I begin?\nAssistant: Begin with",
    "User: Which books about the sea would you recommend?\nAssistant:",
)
WORKLOADS = ("held-out Python", "repeated edits", "chat", "high temperature", "random target", "mixed batch")
DEPTHS = {1: (1, 2, 3, 4, 5, 6, 8, 10), 2: (1, 2, 3, 4, 6), 3: (1, 2, 3, 4)}
"""Fixed sizes: paths -> depths."""
CLOSE = 0.1


@dataclass(frozen=True)
class _Workload:
    engine: Callable[[Plan], Engine]
    plain: Callable[[], Engine]
    batches: list[list[list[int]]]
    params: Sequence[SamplingParams]


def sizes_of(max_width: int) -> list[tuple[int, int]]:
    """(paths, depth) of all fixed plans that are run.

    Example:
        >>> len(sizes_of(1)), len(sizes_of(3))
        (8, 17)
    """
    return [(w, d) for w, depths in DEPTHS.items() if w <= max_width for d in depths]


def _workload(name: str, count: int, max_tokens: int) -> _Workload:
    target_folder, draft_folder = str(pair.target_folder()), str(pair.draft_folder())
    tokenizer = load.load_tokenizer(target_folder)
    batch = 4 if name == "mixed batch" else 1
    target, draft = (load.load_model(f, max_num_seqs=batch) for f in (target_folder, draft_folder))
    if name == "random target":
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.manual_seed(0)
        module = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(target_folder)).float().eval()
        target = CompiledLlama(module, max_num_seqs=batch)
    vocab_size = load.num_token_ids(tokenizer, min(target.vocab_size, draft.vocab_size))
    target.vocab_size = draft.vocab_size = vocab_size
    texts = list(CHAT) if name == "chat" else [p.text for p in pair.prompts()]
    if name == "repeated edits":
        texts = [f"{t}\n\n{t[: len(t) // 4]}" for t in texts]
    ids = [load.encode(tokenizer, t) for t in texts]
    batches = [[ids[(batch * (i // 2) + j) % len(ids)] for j in range(batch)] for i in range(count)]
    temperatures = {"repeated edits": (0.0,), "chat": (0.7,), "high temperature": (1.8,), "mixed batch": (0.0, 1.0, 0.0, 1.0)}
    params = [SamplingParams(temperature=t, max_tokens=max_tokens, ignore_eos=True) for t in temperatures.get(name, (1.0,))]
    drafter = "ngram" if name == "repeated edits" else "model"

    def engine(plan: Plan) -> Engine:
        made = Engine.of(target, draft_model=draft, drafter=drafter, plan=plan)
        return Engine(target, made.drafter, made.verifier, plan, clock=clock(target))

    def plain() -> Engine:
        made = Engine.of(target, drafter=None)
        return Engine(target, None, made.verifier, FixedPlan(Budget.fixed(tree.chain(1))), clock=clock(target))

    return _Workload(engine, plain, batches, params)


@dataclass
class Accuracy:
    """One workload. rounds: setting -> (tokens, seconds) of each round, in the same order for all settings; of some sizes only the first rounds."""

    name: str
    rounds: dict[str, list[tuple[int, float]]] = field(default_factory=dict[str, list[tuple[int, float]]])
    tokens_per_call: float = 0.0

    def speed(self, name: str, rounds: Sequence[int] | None = None) -> float:
        """Tokens per second over all rounds, or over some."""
        chosen = self.rounds[name] if rounds is None else [self.rounds[name][i] for i in rounds]
        return sum(t for t, _ in chosen) / sum(s for _, s in chosen)

    @property
    def best_fixed(self) -> str:
        """The fastest fixed plan over all rounds, plain decoding included; those that were left out are not."""
        return self._fastest(range(len(self.rounds["plain"])))

    def _fastest(self, rounds: Sequence[int]) -> str:
        whole = len(self.rounds["adaptive"])
        return max(
            (n for n, r in self.rounds.items() if n != "adaptive" and len(r) == whole), key=lambda n: self.speed(n, rounds)
        )

    def _ratio(self, pairs: Sequence[int]) -> float:
        """Of the rounds 2i and 2i + 1, i in pairs: the geometric mean over both ways to choose on one half and compare on the other."""
        first, second = [2 * i for i in pairs], [2 * i + 1 for i in pairs]
        found = [self.speed("adaptive", b) / self.speed(self._fastest(a), b) for a, b in ((first, second), (second, first))]
        return math.sqrt(found[0] * found[1])

    @property
    def ratio(self) -> float:
        """Speed of the adaptive plan over that of the best fixed one, which is chosen on other rounds."""
        return self._ratio(range(len(self.rounds["plain"]) // 2))

    @property
    def interval(self) -> tuple[float, float]:
        """90% bootstrap interval of `ratio` over pairs of rounds, the best fixed plan chosen anew in each resample."""
        rng, count = np.random.default_rng(0), len(self.rounds["plain"]) // 2
        found = [self._ratio(rng.integers(count, size=count).tolist()) for _ in range(200)]
        low, high = np.percentile(found, [5, 95])
        return float(low), float(high)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "workload": self.name,
            "tokens_per_second": {n: self.speed(n) for n in self.rounds},
            "rounds": {n: len(r) for n, r in self.rounds.items()},
            "best_fixed": self.best_fixed,
            "ratio": self.ratio,
            "interval": self.interval,
            "tokens_per_call": self.tokens_per_call,
        }


def accuracy(name: str, *, count: int = 24, max_tokens: int = 96, progress: Callable[[], None] = lambda: None) -> Accuracy:
    """Run one workload: `count` rounds, an even number, of plain decoding, the adaptive plan and the fixed sizes, in a turning order.

    The profile is measured on the workload's first prompt, as an engine does before its first request.
    """
    work = _workload(name, count, max_tokens)
    probe = work.engine(FixedPlan(Budget.fixed(tree.chain(1))))
    assert probe.drafter is not None
    profile = measured_profile(probe.target, probe.drafter, probe.verifier, work.batches[0][:1])
    made = {"plain": work.plain(), "adaptive": work.engine(AdaptivePlan(profile))}
    for w, d in sizes_of(1 if probe.drafter.info.laws == {SiblingLaw.POINT_MASS} else 3):
        made[f"{w}x{d}"] = work.engine(FixedPlan(Budget.fixed(tree.paths(w, d))))
    found, names, calls = Accuracy(name, {n: [] for n in made}), list(made), [0, 0]
    for engine in made.values():
        engine.generate(work.batches[0], [replace(p, max_tokens=4, seed=0) for p in work.params])
    for number, batch in enumerate(work.batches):
        if number == max(2, count // 8 * 2):
            least = (1 - CLOSE) * max(found.speed(n) for n in names)
            names = [n for n in names if n in ("plain", "adaptive") or found.speed(n) >= least]
        turn = number % len(names)
        for setting in names[turn:] + names[:turn]:
            results = made[setting].generate(batch, [replace(p, seed=number) for p in work.params])
            stats = [r.stats for r in results]
            seconds = sum(s.total_seconds - s.seconds["prefill"] for s in stats)
            found.rounds[setting].append((sum(s.emitted for s in stats), seconds))
            if setting == "adaptive":
                calls = [calls[0] + sum(s.emitted for s in stats), calls[1] + sum(s.target_calls for s in stats)]
            progress()
    found.tokens_per_call = calls[0] / calls[1]
    return found


def markdown(found: Sequence[Accuracy]) -> str:
    """The table."""
    lines = [
        "| workload | plain | adaptive | tokens/call | best fixed | its tokens/s | adaptive / best fixed | 90% interval | adaptive / plain |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for a in found:
        low, high = a.interval
        best = a.best_fixed
        lines.append(
            f"| {a.name} | {a.speed('plain'):.0f} | {a.speed('adaptive'):.0f} | {a.tokens_per_call:.2f} | {best} | {a.speed(best):.0f} | "
            f"{a.ratio:.3f} | {low:.3f}-{high:.3f} | {a.speed('adaptive') / a.speed('plain'):.2f} |"
        )
    return "\n".join(lines)
