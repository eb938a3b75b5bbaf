"""Each sample is an OpenTelemetry span, within the client's trace, and a server without a collector goes on as ever."""

import subprocess
import sys
import time

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from polydraft.cli.commands import EXIT_STATUS

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"
ASK = {"prompt": "def f(a):\n    return a\n\n\ndef f(a):\n", "max_tokens": 20, "temperature": 0}


@pytest.fixture(scope="module")
def exporter():
    memory = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(memory))
    trace.set_tracer_provider(provider)
    return memory


def requests(exporter):
    """Spans of samples; the framework has some of its own."""
    return [span for span in exporter.get_finished_spans() if span.name == "polydraft.request"]


@pytest.mark.parametrize("stream", [False, True])
def test_each_sample_is_a_span_in_the_trace_of_its_client(served, exporter, stream):
    exporter.clear()
    before = time.time_ns()
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    answer = served.http.post("/v1/completions", json={**ASK, "n": 2, "stream": stream}, headers=headers)
    spans = requests(exporter)
    assert len(spans) == 2
    for span in spans:
        assert (f"{span.context.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE, PARENT)
        first = {event.name: event.timestamp for event in span.events}["first token"]
        assert (
            before <= span.start_time + 1_000_000
            and span.start_time < first <= span.end_time <= time.time_ns()
        )
    totals = {
        name: sum(span.attributes[name] for span in spans)
        for name in spans[0].attributes
        if "tokens" in name or "steps" in name
    }
    if not stream:
        usage = answer.json()["usage"]
        assert totals["gen_ai.usage.output_tokens"] == usage["completion_tokens"] == 40
        assert totals["polydraft.drafted_tokens"] == usage["speculation"]["drafted_tokens"] > 0
        assert totals["polydraft.accepted_tokens"] == usage["speculation"]["accepted_tokens"] > 0
    assert {span.attributes["gen_ai.request.model"] for span in spans} == {"small"}
    assert {span.attributes["polydraft.drafter"] for span in spans} == {"ngram"}
    assert {span.attributes["gen_ai.response.finish_reasons"] for span in spans} == {("length",)}


def test_a_request_without_a_trace_begins_its_own(served, exporter):
    exporter.clear()
    served.post("/v1/completions", **ASK)
    (span,) = requests(exporter)
    assert span.parent is None and span.context.is_valid


def test_a_collector_without_the_extra_is_refused_with_what_to_install():
    hidden = (
        "import sys; sys.modules['opentelemetry.exporter'] = None; from polydraft.cli.main import app; app()"
    )
    command = [
        sys.executable,
        "-c",
        hidden,
        "serve",
        "--port",
        "0",
        "--otlp-endpoint",
        "http://localhost:4318/v1/traces",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == EXIT_STATUS
    assert "is not installed. Install the extra: pip install 'polydraft[tracing]'" in done.stderr
