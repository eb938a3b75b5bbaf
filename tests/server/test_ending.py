"""A server that is told to end lets requests finish for a while, and then tells each that it ends."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.server.conftest import serving, small_engine
from tests.server.test_robust import Gate, wait_for

CHAT = {
    "messages": [{"role": "user", "content": "x"}],
    "max_tokens": 400,
    "temperature": 0,
    "ignore_eos": True,
}
ASKS = {
    "/v1/completions": {"prompt": "x", "max_tokens": 400, "ignore_eos": True},
    "/v1/chat/completions": CHAT,
    "/v1/responses": {"input": "x", "max_output_tokens": 400},
    "/v1/messages": {"messages": CHAT["messages"], "max_tokens": 400},
}


@pytest.mark.filterwarnings("ignore::polydraft.errors.RequestWarning")
def test_what_a_drain_leaves_running_ends_with_an_error_that_says_so(monkeypatch):
    engine = small_engine()
    with serving(engine, drain=0.2) as served, ThreadPoolExecutor(8) as pool:
        gate = Gate(engine, monkeypatch)
        gate.open.clear()
        asked = [
            (path, stream, pool.submit(served.post, path, **body, stream=stream))
            for path, body in ASKS.items()
            for stream in (False, True)
        ]
        wait_for(lambda: engine.num_waiting == len(asked))
        served.server.should_exit = True
        wait_for(lambda: len(engine._roster.asked) > len(asked))  # the time is up
        gate.open.set()
        for path, stream, answer in asked:
            found = answer.result(20)
            assert found.status_code == (200 if stream else 503), path
            assert "the server is going down" in found.text and '"error"' in found.text, path
            assert not stream or found.text.rstrip().endswith(("}", "[DONE]"))


def test_what_ends_within_the_drain_is_answered_whole():
    engine = small_engine()
    with serving(engine, drain=25.0) as served, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(served.post, "/v1/completions", **{**ASKS["/v1/completions"], "max_tokens": 100})
        wait_for(lambda: engine.num_running == 1)
        served.server.should_exit = True
        found = answer.result(30).json()
    assert found["usage"]["completion_tokens"] == 100


def test_a_server_that_drains_lives_and_is_not_ready(monkeypatch):
    engine = small_engine()
    with serving(engine, drain=20.0) as served, ThreadPoolExecutor(1) as pool:
        gate = Gate(engine, monkeypatch)
        gate.open.clear()
        running = pool.submit(served.post, "/v1/completions", **{**ASKS["/v1/completions"], "max_tokens": 8})
        wait_for(lambda: engine.num_waiting == 1)
        served.server.should_exit = True
        wait_for(lambda: served.pool.draining)
        health, ready = (served.http.get(path) for path in ("/health", "/ready"))
        gate.open.set()
        assert (health.status_code, health.json()) == (
            200,
            {"status": "draining"},
        )  # else it would be killed, with what runs
        assert ready.status_code == 503 and running.result(20).status_code == 200


@pytest.mark.filterwarnings("ignore::polydraft.errors.RequestWarning")
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_comes_in_a_drain_is_told_that_the_server_goes_down(monkeypatch, stream):
    engine = small_engine()
    with serving(engine, drain=20.0) as served, ThreadPoolExecutor(1) as pool:
        gate = Gate(engine, monkeypatch)
        gate.open.clear()
        running = pool.submit(served.post, "/v1/completions", **{**ASKS["/v1/completions"], "max_tokens": 8})
        wait_for(lambda: engine.num_waiting == 1)
        served.server.should_exit = True
        wait_for(lambda: not served.pool.running)
        for path, body in ASKS.items():
            found = served.post(path, **body, stream=stream)
            assert (found.status_code, found.headers["Retry-After"]) == (503, "1"), path
            assert (
                "the server is going down" in found.json()["error"]["message"]
                and "another server" in found.text
            )
        gate.open.set()
        assert running.result(20).json()["usage"]["completion_tokens"] == 8
