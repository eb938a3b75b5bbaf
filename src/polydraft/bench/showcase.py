"""The embedded pair on held-out prompts: the contenders of the live demo, and the equalities that it claims."""

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from polydraft.bench.compare import Contender, Measurement, engine_contender, measure
from polydraft.core import SamplingParams
from polydraft.engine.api import Engine
from polydraft.models import load, pair


@dataclass(frozen=True)
class DemoComparison:
    """What one interleaved run found. near_ties: greedy tokens where two logits are equal in float32."""

    prompts: list[str]
    measurements: list[Measurement]
    equal_greedy: bool
    near_ties: int
    equal_seed_exact: bool

    def baseline(self, name: str, temperature: float) -> Measurement:
        """The measurement of a contender at a temperature."""
        return next(
            m for m in self.measurements if (m.contender.name, m.contender.temperature) == (name, temperature)
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        equal = {"equal_greedy": self.equal_greedy, "equal_seed_exact": self.equal_seed_exact}
        models = {"target": "embedded target", "draft": "embedded draft"}
        return {**models, "prompts": self.prompts, "contenders": self.rows(), **equal}

    def rows(self) -> list[dict[str, Any]]:
        """One row for each contender, as plain data."""
        names = {m.contender.name for m in self.measurements}
        baselines = {"speedup": "plain", "speedup_transformers": "transformers"}
        return [
            {
                "name": m.contender.name,
                **m.row(),
                **{
                    key: m.speedup_over(self.baseline(name, m.contender.temperature)).ratio
                    for key, name in baselines.items()
                    if name in names
                },
            }
            for m in self.measurements
        ]


class Showcase:
    """The embedded pair, loaded once and shared by all contenders; a warm-up compiles what they run.

    num_prompts: of the held-out ones, at most.  reference: the target as transformers runs it, None where that is not installed.
    Offers tokenizer, prompts (name -> token ids) and engines for those who want to watch one of them.
    """

    def __init__(self, num_prompts: int = 6) -> None:
        target = str(pair.target_folder())
        draft = str(pair.draft_folder())
        self.reference = None
        if find_spec("torch") and find_spec("transformers"):
            from polydraft.models.torch.module import load_module

            self.reference = load_module(target)
        self.tokenizer = load.load_tokenizer(target)
        self._target = load.load_model(target, device="cpu", max_num_seqs=1)
        self._draft = load.load_model(draft, device="cpu", max_num_seqs=1)
        self.prompts = {p.name: load.encode(self.tokenizer, p.text) for p in pair.prompts()[:num_prompts]}
        self.engines = {
            "plain": self._engine(drafter=None),
            "chain + block": self._engine(drafter="model:chain", verifier="block", depth=5, num_paths=1),
            "two paths + GTV": self._engine(
                drafter="model", verifier="greedy_traversal", depth=4, num_paths=2
            ),
            "n-gram + match": self._engine(drafter="ngram", verifier="match", depth=5, num_paths=1),
            "race": self._engine(drafter="model:coupled", verifier="race", depth=5, num_paths=1),
            "race without drafts": self._engine(drafter=None, verifier="race"),
        }

    def _engine(self, **options: Any) -> Engine:
        return Engine.of(self._target, tokenizer=self.tokenizer, draft_model=self._draft, **options)

    def contenders(self) -> list[Contender]:
        """Plain and transformers at both temperatures, then what drafts."""
        greedy = ("plain", "chain + block", "two paths + GTV", "n-gram + match")
        return [
            *self._peers(0.0),
            *(engine_contender(name, self.engines[name], 0.0) for name in greedy),
            *self._peers(1.0),
            *(engine_contender(name, engine, 1.0) for name, engine in self.engines.items()),
        ]

    def _peers(self, temperature: float) -> list[Contender]:
        """Transformers, where it is installed."""
        if self.reference is None:
            return []
        from polydraft.bench.peers import transformers_contender

        return [transformers_contender(self.reference, temperature)]

    def warm_up(self) -> None:
        """A few tokens by everyone: compiled code is compiled, or read from its cache, before any time is taken."""
        prompt = next(iter(self.prompts.values()))
        for contender in self.contenders():
            contender.generate(
                [prompt],
                SamplingParams(temperature=contender.temperature, max_tokens=8, ignore_eos=True, seed=0),
            )

    def compare(
        self, *, max_tokens: int = 64, repetitions: int = 3, budget_seconds: float = 45.0
    ) -> DemoComparison:
        """Measure all contenders interleaved and compare their tokens; see `measure` for the budget."""
        prompts = list(self.prompts.values())
        measurements = measure(
            self.contenders(),
            prompts,
            max_tokens=max_tokens,
            repetitions=repetitions,
            budget_seconds=budget_seconds,
            seed=20,
        )
        drafted, plain = (self._tokens(measurements, name) for name in ("race", "race without drafts"))
        equal, ties = self._compared([m for m in measurements if m.contender.temperature == 0], prompts)
        return DemoComparison(list(self.prompts), measurements, equal, ties, drafted == plain)

    def _compared(self, greedy: list[Measurement], prompts: list[list[int]]) -> tuple[bool, int]:
        """Whether all wrote what transformers writes, but for near ties, and how many there are; without it, whether all wrote the same."""
        if self.reference is None:
            first, *others = [[run.token_ids for run in m.runs] for m in greedy]
            return all(tokens == first for tokens in others), 0
        from polydraft.check.texts import check_distribution

        checks = [check_distribution(self.reference, 0.0, m.texts(prompts)) for m in greedy]
        return all(check["passed"] for check in checks), sum(check["near_ties"] for check in checks)

    @staticmethod
    def _tokens(measurements: list[Measurement], name: str) -> list[list[int]]:
        (measurement,) = (
            m for m in measurements if m.contender.name == name and m.contender.temperature == 1
        )
        return [run.token_ids for run in measurement.runs]
