"""OpenTelemetry spans: one for each sample, with its waiting, its first token and what its drafts were worth.

Spans follow the client's trace where the request has a `traceparent` header. Without the extra `tracing`, or without an exporter, nothing is traced.
"""

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from importlib import import_module
from importlib.util import find_spec
from time import perf_counter, time_ns
from typing import Any

from polydraft.engine.output import StepOutput
from polydraft.errors import InvalidInputError


def export_to(endpoint: str) -> None:
    """Send the spans of this process to a collector, in OTLP over HTTP.

    endpoint: such as http://localhost:4318/v1/traces.

    Raises:
        InvalidInputError: the extra is not installed.
    """
    try:
        sdk = import_module("opentelemetry.sdk.trace")
        export = import_module("opentelemetry.sdk.trace.export")
        exporter = import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter").OTLPSpanExporter(
            endpoint=endpoint
        )
    except ImportError as error:
        raise InvalidInputError(
            f"--otlp-endpoint {endpoint} was given, and {error.name} is not installed. Install the extra: pip install 'polydraft[tracing]'."
        ) from error
    resource = import_module("opentelemetry.sdk.resources").Resource.create({"service.name": "polydraft"})
    provider = sdk.TracerProvider(resource=resource)
    provider.add_span_processor(export.BatchSpanProcessor(exporter))
    import_module("opentelemetry.trace").set_tracer_provider(provider)


async def traced(
    outputs: AsyncGenerator[tuple[int, StepOutput], None],
    headers: Mapping[str, str],
    model: str,
    drafter: str,
) -> AsyncGenerator[tuple[int, StepOutput], None]:
    """The outputs of a request as they come, and a span of each sample that has finished."""
    async with aclosing(outputs):
        async for prompt, output in outputs:
            if output.finished and find_spec("opentelemetry") is not None:
                _record(output, headers, model, drafter)
            yield prompt, output


def _record(output: StepOutput, headers: Mapping[str, str], model: str, drafter: str) -> None:
    trace = import_module("opentelemetry.trace")
    propagate = import_module("opentelemetry.propagate")
    sample = output.sample
    stats = sample.stats
    start = time_ns() - int((perf_counter() - stats.arrival) * 1e9)
    attributes = _attributes(output, model, drafter)
    span = trace.get_tracer("polydraft").start_span(
        "polydraft.request",
        context=propagate.extract(headers, import_module("opentelemetry.context").Context()),
        kind=trace.SpanKind.SERVER,
        start_time=start,
        attributes={name: value for name, value in attributes.items() if value is not None},
    )
    for event, seconds in (("slot", stats.seconds_waiting), ("first token", stats.seconds_to_first_token)):
        if seconds is not None:
            span.add_event(event, timestamp=start + int(seconds * 1e9))
    if sample.finish_reason == "error":
        span.set_status(trace.StatusCode.ERROR, sample.error)
    span.end()


def _attributes(output: StepOutput, model: str, drafter: str) -> dict[str, Any]:
    sample = output.sample
    stats = sample.stats
    return {
        "gen_ai.request.model": model,
        "gen_ai.request.id": output.request_id,
        "gen_ai.response.finish_reasons": [sample.finish_reason or ""],
        "gen_ai.usage.input_tokens": stats.prompt_tokens,
        "gen_ai.usage.output_tokens": stats.generated_tokens,
        "gen_ai.latency.time_in_queue": stats.seconds_waiting,
        "gen_ai.latency.time_to_first_token": stats.seconds_to_first_token,
        "polydraft.drafter": drafter,
        "polydraft.cached_tokens": stats.cached_tokens,
        "polydraft.steps": stats.steps,
        "polydraft.drafted_tokens": stats.drafted_tokens,
        "polydraft.accepted_tokens": stats.accepted_tokens,
        **{f"polydraft.seconds.{phase}": seconds for phase, seconds in stats.seconds.items()},
    }
