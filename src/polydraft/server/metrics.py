"""Figures for Prometheus: names are vLLM's where it has them, so that its dashboards work, and `polydraft:` beyond."""

from collections.abc import Callable, Sequence
from time import perf_counter

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from polydraft.engine.loop import Loop
from polydraft.engine.output import StepOutput

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
COUNTS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128, 255)


class Metrics:
    """What a server's engine did so far; `observe` is told of every step, in the engine's thread."""

    def __init__(self, engine: Loop, model: str) -> None:
        self.registry, self._labels = CollectorRegistry(), {"model_name": model}
        self._last: dict[tuple[str, int], float] = {}
        """When each running sample was last given tokens."""
        self._prompts = self._counter("vllm:prompt_tokens", "Prompt tokens of finished samples.")
        self._tokens = self._counter("vllm:generation_tokens", "Generated tokens.")
        self._ended = self._counter("vllm:request_success", "Samples that ended, by their reason.", "finished_reason")
        self._asked = self._counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self._cached = self._counter("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self._drafts = self._counter("vllm:spec_decode_num_drafts", "Steps with a draft.")
        self._drafted = self._counter("vllm:spec_decode_num_draft_tokens", "Tokens drafted.")
        self._accepted = self._counter("vllm:spec_decode_num_accepted_tokens", "Drafted tokens that were accepted.")
        self._by_depth = self._counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos", "Steps that accepted a token at this depth, from 0.", "position"
        )
        self._reached = self._counter(
            "polydraft:drafts_per_pos", "Steps whose draft tree reached this depth, from 0.", "position"
        )
        self._by_source = self._counter(
            "polydraft:tokens", "Generated tokens, by the drafter that proposed them, or the target.", "source"
        )
        self._first = self._histogram("vllm:time_to_first_token_seconds", "From the request, waiting included.", SECONDS)
        self._between = self._histogram("vllm:inter_token_latency_seconds", "From one step's tokens to the next's.", SECONDS)
        self._whole = self._histogram("vllm:e2e_request_latency_seconds", "Of a sample, from the request to its end.", SECONDS)
        self._waited = self._histogram("vllm:request_queue_time_seconds", "Until a sample had a slot.", SECONDS)
        self._step = self._histogram("polydraft:step_seconds", "Of one step, prefills included.", SECONDS)
        self._per_call = self._histogram("polydraft:tokens_per_step", "Tokens of one sample in one step.", COUNTS)
        self._planned = self._histogram("polydraft:planned_draft_tokens", "Drafted tokens of one sample in one step.", COUNTS)
        room = engine.target.max_model_len * engine.target.max_num_seqs
        self._gauge("vllm:num_requests_running", "Samples that have a slot.", lambda: engine.num_running)
        self._gauge("vllm:num_requests_waiting", "Samples that wait for one.", lambda: engine.num_waiting)
        self._gauge(
            "vllm:kv_cache_usage_perc",
            "Share of the KV cache in use, 1 is all.",
            lambda: sum(engine.target.lengths) / room,
        )

        self._prefix_cache = cache = engine.prefix_cache
        self._seen = 0, 0
        """Tokens of `prefix_cache` that are counted: hits and evicted ones."""
        if cache is not None:
            self._gauge(
                "polydraft:prefix_cache_bytes", "KV cache entries of finished texts, beside the slots.", lambda: cache.num_bytes
            )
            self._gauge("polydraft:prefix_cache_max_bytes", "What they may take.", lambda: cache.capacity_bytes)
        self._copied = self._counter("polydraft:prefix_cache_hit_tokens", "Prompt tokens whose entries came from there.")
        self._evicted = self._counter(
            "polydraft:prefix_cache_evicted_tokens", "Tokens whose entries were dropped, least recently used first."
        )

    def text(self) -> bytes:
        """All figures in Prometheus' format."""
        return generate_latest(self.registry)

    def observe(self, outputs: Sequence[StepOutput], seconds: float) -> None:
        """One step."""
        self._step.labels(**self._labels).observe(seconds)
        now = perf_counter()
        if (cache := self._prefix_cache) is not None:
            hits, evicted = self._seen
            self._copied.labels(**self._labels).inc(cache.hit_tokens - hits)
            self._evicted.labels(**self._labels).inc(cache.evicted_tokens - evicted)
            self._seen = cache.hit_tokens, cache.evicted_tokens
        for output in outputs:
            if output.tree is not None:
                self._round(output)
                self._times(output, now)
            if output.finished:
                self._end(output, now)

    def _round(self, output: StepOutput) -> None:
        assert output.tree is not None
        depths = [0]
        for parent in output.tree.parents[1:]:
            if parent >= 0:
                depths.append(depths[parent] + 1)
        drafted, kept = len(depths) - 1, len(output.tree.path)
        self._planned.labels(**self._labels).observe(drafted)
        self._per_call.labels(**self._labels).observe(len(output.token_ids))
        self._tokens.labels(**self._labels).inc(len(output.token_ids))
        for origin in output.origins:
            self._by_source.labels(source=origin.source, **self._labels).inc()
        if drafted:
            self._drafts.labels(**self._labels).inc()
            self._drafted.labels(**self._labels).inc(drafted)
            self._accepted.labels(**self._labels).inc(kept)
        for counter, reached in ((self._reached, max(depths)), (self._by_depth, kept)):
            for depth in range(reached):
                counter.labels(position=depth, **self._labels).inc()

    def _times(self, output: StepOutput, now: float) -> None:
        name = output.request_id, output.sample.index
        before, self._last[name] = self._last.get(name), now
        if before is not None:
            self._between.labels(**self._labels).observe(now - before)
            return
        stats = output.sample.stats
        self._first.labels(**self._labels).observe(stats.seconds_to_first_token or 0)
        self._waited.labels(**self._labels).observe(stats.seconds_waiting or 0)
        self._asked.labels(**self._labels).inc(stats.prompt_tokens)
        self._cached.labels(**self._labels).inc(stats.cached_tokens)

    def _end(self, output: StepOutput, now: float) -> None:
        self._last.pop((output.request_id, output.sample.index), None)
        self._ended.labels(finished_reason=output.sample.finish_reason, **self._labels).inc()
        self._prompts.labels(**self._labels).inc(output.sample.stats.prompt_tokens)
        self._whole.labels(**self._labels).observe(now - output.sample.stats.arrival)

    def _counter(self, name: str, about: str, *labels: str) -> Counter:
        return Counter(name, about, ("model_name", *labels), registry=self.registry)

    def _histogram(self, name: str, about: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(name, about, ("model_name",), buckets=buckets, registry=self.registry)

    def _gauge(self, name: str, about: str, value: Callable[[], float]) -> None:
        Gauge(name, about, ("model_name",), registry=self.registry).labels(**self._labels).set_function(value)
