"""Figures for Prometheus: names are vLLM's where it has them, so that its dashboards work, and `polydraft:` beyond."""

from collections.abc import Iterator, Sequence
from itertools import product
from time import perf_counter
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily

from polydraft.engine.output import StepOutput
from polydraft.engine.prefixes import PrefixKeeping
from polydraft.models.slots import SlotModel
from polydraft.policy.acceptance import FIRST, NEXT
from polydraft.policy.adaptive import AdaptivePolicy

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
COUNTS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128, 255)
"""Upper bounds of the histograms' buckets: of times, and of tokens of a step."""


Family = TypeVar("Family", Counter, Histogram)


STATES = {
    "polydraft:model_loaded": ("1 while a model is loaded.",),
    "vllm:num_requests_running": ("Samples that have a slot.",),
    "vllm:num_requests_waiting": ("Samples that wait for one.",),
    "vllm:kv_cache_usage_perc": ("Share of the KV cache in use, 1 is all.",),
    "polydraft:kv_cache_token_bytes": ("Bytes of a token in the target's KV cache.", "cache_dtype"),
    "polydraft:prefix_cache_bytes": (
        "KV cache entries of finished texts, beside the slots, of target and draft model.",
    ),
    "polydraft:prefix_cache_max_bytes": ("What they may take.",),
    "polydraft:cost_model_draft_start_seconds": ("Of any draft, as the speculation policy foresees it.",),
    "polydraft:cost_model_draft_step_seconds": ("Of one draft step, as the speculation policy foresees it.",),
    "polydraft:cost_model_overhead_seconds": (
        "Of any step beside forward passes and drafts, as the speculation policy foresees it.",
    ),
    "polydraft:cost_model_pass_seconds": (
        "Of a forward pass by its rows, as the speculation policy foresees it.",
        "rows",
    ),
    "polydraft:policy_acceptance_rate": (
        "Acceptance rate of a first and of a next draft, as the speculation policy expects it.",
        "draft",
        "mode",
    ),
}
"""Gauges: what they tell, and their labels beside the model's name."""


class Metrics:
    """Figures of all models of a server, by the label `model_name`."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.prompts = self._counter("vllm:prompt_tokens", "Prompt tokens of finished samples.")
        self.tokens = self._counter("vllm:generation_tokens", "Generated tokens.")
        self.ended = self._counter(
            "vllm:request_success", "Samples that ended, by their reason.", "finished_reason"
        )
        self.queries = self._counter(
            "vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache."
        )
        self.hits = self._counter("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self.drafts = self._counter("vllm:spec_decode_num_drafts", "Steps with a draft.")
        self.drafted = self._counter("vllm:spec_decode_num_draft_tokens", "Tokens drafted.")
        self.accepted = self._counter(
            "vllm:spec_decode_num_accepted_tokens", "Drafted tokens that were accepted."
        )
        self.by_depth = self._counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Steps that accepted a token at this depth, from 0.",
            "position",
        )
        self.reached = self._counter(
            "polydraft:drafts_per_pos", "Steps whose draft tree reached this depth, from 0.", "position"
        )
        self.by_source = self._counter(
            "polydraft:tokens",
            "Generated tokens, by the drafter that proposed them, or the target.",
            "source",
        )
        self.first = self._histogram(
            "vllm:time_to_first_token_seconds", "From the request, waiting included.", SECONDS
        )
        self.between = self._histogram(
            "vllm:inter_token_latency_seconds", "From one step's tokens to the next's.", SECONDS
        )
        self.whole = self._histogram(
            "vllm:e2e_request_latency_seconds", "Of a sample, from the request to its end.", SECONDS
        )
        self.waited = self._histogram(
            "vllm:request_queue_time_seconds", "Until a sample had a slot.", SECONDS
        )
        self.step = self._histogram("polydraft:step_seconds", "Of one step, prefills included.", SECONDS)
        self.per_call = self._histogram(
            "polydraft:tokens_per_step", "Tokens of one sample in one step.", COUNTS
        )
        self.planned = self._histogram(
            "polydraft:planned_draft_tokens", "Drafted tokens of one sample in one step.", COUNTS
        )
        self.length = self._histogram(
            "polydraft:speculation_length", "Depth of one sample's drafts in one step.", COUNTS
        )
        self.copied = self._counter(
            "polydraft:prefix_cache_hit_tokens", "Prompt tokens whose entries came from the prefix cache."
        )
        self.evicted = self._counter(
            "polydraft:prefix_cache_evicted_tokens", "Tokens whose entries the prefix cache dropped."
        )
        self._models: dict[str, ModelMetrics] = {}
        self.registry.register(self)  # pyright: ignore[reportArgumentType]

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """States of the loaded models, as the registry asks for them."""
        states = {name: figures.states() for name, figures in self._models.items()}
        for family_name, (about, *labels) in STATES.items():
            family = GaugeMetricFamily(family_name, about, labels=("model_name", *labels))
            for model, families in states.items():
                for values, value in families.get(family_name, {}).items():
                    family.add_metric((model, *values), value)
            yield family

    def join(self, engine: PrefixKeeping, model: str) -> "ModelMetrics":
        """The figures of one more model, which is loaded."""
        self._models[model] = ModelMetrics(self, engine, model)
        return self._models[model]

    def leave(self, model: str) -> None:
        """A model is loaded no more: what it did stays, its state goes."""
        del self._models[model]

    def text(self) -> bytes:
        """All figures in Prometheus' format."""
        return generate_latest(self.registry)

    def _counter(self, name: str, about: str, *labels: str) -> Counter:
        return Counter(name, about, ("model_name", *labels), registry=self.registry)

    def _histogram(self, name: str, about: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(name, about, ("model_name",), buckets=buckets, registry=self.registry)


class ModelMetrics:
    """What one model's engine did so far; `observe` is told of every step, in the engine's thread."""

    def __init__(self, metrics: Metrics, engine: PrefixKeeping, model: str) -> None:
        self._metrics = metrics
        self._model = model
        self._engine = engine
        self._last: dict[tuple[str, int], float] = {}
        """When each running sample was last given tokens."""
        self._cached = 0, 0
        """Tokens of the prefix cache that are counted: hits and evicted ones."""
        self._columns = engine.target.cache_tokens or engine.target.max_model_len * engine.target.max_num_seqs

    def states(self) -> dict[str, dict[tuple[str, ...], float]]:
        """By name of the family and its labels but the model's."""
        by_label: dict[str, dict[tuple[str, ...], float]] = {
            name: {(): value} for name, value in self._load().items()
        }
        target = self._engine.target
        if isinstance(target, SlotModel):
            by_label["polydraft:kv_cache_token_bytes"] = {(target.cache_dtype,): target.bytes_per_token}
        policy = self._engine.policy
        return by_label | _of_policy(policy) if isinstance(policy, AdaptivePolicy) else by_label

    def _load(self) -> dict[str, float]:
        """Figures without a label: requests and memory."""
        engine = self._engine
        figures: dict[str, float] = {
            "polydraft:model_loaded": 1,
            "vllm:num_requests_running": engine.num_running,
            "vllm:num_requests_waiting": engine.num_waiting,
            "vllm:kv_cache_usage_perc": sum(engine.target.lengths) / self._columns,
        }
        caches = [cache for _, cache in engine.prefix_caches.values()]
        if caches:
            figures["polydraft:prefix_cache_bytes"] = sum(cache.num_bytes for cache in caches)
            figures["polydraft:prefix_cache_max_bytes"] = sum(cache.capacity_bytes for cache in caches)
        return figures

    def observe(self, outputs: Sequence[StepOutput], seconds: float) -> None:
        """One step."""
        self._of(self._metrics.step).observe(seconds)
        now = perf_counter()
        if (cache := self._engine.prefix_cache) is not None:
            hits, evicted = self._cached
            self._of(self._metrics.copied).inc(cache.hit_tokens - hits)
            self._of(self._metrics.evicted).inc(cache.evicted_tokens - evicted)
            self._cached = cache.hit_tokens, cache.evicted_tokens
        for output in outputs:
            if output.tree is not None:
                self._count_step(output)
                self._times(output, now)
            if output.finished:
                self._end(output, now)

    def _of(self, family: Family, *labels: object) -> Family:
        return family.labels(self._model, *labels)

    def _count_step(self, output: StepOutput) -> None:
        assert output.tree is not None
        metrics = self._metrics
        depths = [0]
        for parent in output.tree.parents[1:]:
            if parent >= 0:
                depths.append(depths[parent] + 1)
        drafted = len(depths) - 1
        accepted = len(output.tree.path)
        self._of(metrics.planned).observe(drafted)
        self._of(metrics.length).observe(max(depths))
        self._of(metrics.per_call).observe(len(output.token_ids))
        self._of(metrics.tokens).inc(len(output.token_ids))
        for origin in output.origins:
            self._of(metrics.by_source, origin.source).inc()
        if drafted:
            self._of(metrics.drafts).inc()
            self._of(metrics.drafted).inc(drafted)
            self._of(metrics.accepted).inc(accepted)
        for counter, reached in ((metrics.reached, max(depths)), (metrics.by_depth, accepted)):
            for depth in range(reached):
                self._of(counter, depth).inc()

    def _times(self, output: StepOutput, now: float) -> None:
        metrics = self._metrics
        sample = (output.request_id, output.sample.index)
        before = self._last.get(sample)
        self._last[sample] = now
        if before is not None:
            self._of(metrics.between).observe(now - before)
            return
        stats = output.sample.stats
        self._of(metrics.first).observe(stats.seconds_to_first_token or 0)
        self._of(metrics.waited).observe(stats.seconds_waiting or 0)
        self._of(metrics.queries).inc(stats.prompt_tokens)
        self._of(metrics.hits).inc(stats.cached_tokens)

    def _end(self, output: StepOutput, now: float) -> None:
        self._last.pop((output.request_id, output.sample.index), None)
        self._of(self._metrics.ended, output.sample.finish_reason).inc()
        self._of(self._metrics.prompts).inc(output.sample.stats.prompt_tokens)
        self._of(self._metrics.whole).observe(now - output.sample.stats.arrival)


def _of_policy(policy: AdaptivePolicy) -> dict[str, dict[tuple[str, ...], float]]:
    """What the policy knows of costs and acceptance."""
    costs = policy.live.costs
    kinds = product((("first", FIRST), ("next", NEXT)), (("sampled", False), ("greedy", True)))
    rates = {(draft, mode): policy.acceptance[greedy].rates[lane] for (draft, lane), (mode, greedy) in kinds}
    figures = {
        "polydraft:cost_model_pass_seconds": {
            (str(rows),): costs.rows(rows) for rows in (1, 4, 8, 16, 32, 64)
        },
        "polydraft:policy_acceptance_rate": rates,
    }
    for name in ("draft_start", "draft_step", "overhead"):
        figures[f"polydraft:cost_model_{name}_seconds"] = {(): getattr(costs, name)}
    return figures
