"""A stream has its head at once, and where nothing comes for seconds it says what its request does."""

import json
import re
from contextlib import contextmanager
from typing import Any

import pytest

from polydraft.server import service, streaming
from tests.server.test_robust import ASK, Gate, raw_request

LONG = {**ASK, "max_tokens": 12, "stream": True}
CHAT = {
    "model": "small",
    "messages": [{"role": "user", "content": "def f("}],
    "max_tokens": 12,
    "temperature": 0,
}


@contextmanager
def held(served, monkeypatch, pause=0.05):
    """An engine whose steps wait, and streams that say so soon and often."""
    monkeypatch.setattr(service, "PAUSE_SECONDS", pause)
    gate = Gate(served.engine, monkeypatch)
    gate.open.clear()
    try:
        yield gate
    finally:
        gate.open.set()


def received(raw, marks):
    """What comes until all of these are there, or the end."""
    found = b""
    while not all(mark in found for mark in marks):
        part = raw.recv(1 << 16)
        assert part, found
        found += part
    return found


def test_a_stream_has_its_head_and_comments_before_the_first_token(served, monkeypatch):
    whole = served.openai.completions.create(model="small", **{**LONG, "stream": False}).choices[0].text
    with held(served, monkeypatch) as gate, raw_request(served, LONG) as raw:
        head = received(raw, [b": waiting for a slot\n\n"])
        assert head.startswith(b"HTTP/1.1 200") and b"data: " not in head
        gate.open.set()
        rest = received(raw, [b"[DONE]"]).decode()
    chunks = [json.loads(line) for line in re.findall(r"^data: (\{.*\})", rest, re.M)]
    assert "".join(choice["text"] for chunk in chunks for choice in chunk["choices"]) == whole


def test_the_head_comes_at_once_and_no_comment_before_its_time(served, monkeypatch):
    assert service.PAUSE_SECONDS >= 5
    with held(served, monkeypatch, pause=600.0) as gate, raw_request(served, LONG) as raw:
        found = received(raw, [b"\r\n\r\n"])  # else the socket's own time runs out
        gate.open.set()
        found += received(raw, [b"[DONE]"])
    lines = [
        line
        for line in found.partition(b"\r\n\r\n")[2].split(b"\n")
        if not re.fullmatch(rb"[0-9a-f]*\r|\r?", line)
    ]
    assert lines and all(line.startswith(b"data: ") for line in lines)  # some clients take every line for one


def test_comments_tell_what_was_read_of_how_much():
    class Stats:
        seconds_waiting = 0.1
        seconds_to_first_token = None
        read_tokens = 2048
        prompt_tokens = 6414

    class Sampled:
        stats = Stats
        finish_reason = None

    class Asked:
        samples = (Sampled,)

    asked: Any = Asked
    assert streaming._doing([asked]) == "prefill 2048 / 6414"


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
def test_typed_streams_open_with_their_first_events(served, monkeypatch, path):
    body = {"model": "small", "max_tokens": 12, "messages": CHAT["messages"], "stream": True}
    if path == "/v1/responses":
        body = {"model": "small", "max_output_tokens": 12, "input": "def f(", "stream": True}
    first = {"/v1/messages": b"event: message_start", "/v1/responses": b"event: response.in_progress"}[path]
    ping = b"event: ping" if path == "/v1/messages" else b": waiting"
    with held(served, monkeypatch), served.http.stream("POST", path, json=body) as stream:
        found = b""
        for part in stream.iter_raw():
            found += part
            if first in found and ping in found:
                break
    assert found.index(first) < found.index(ping) and b"_delta" not in found


def test_official_clients_read_on_over_pauses(served, monkeypatch):
    anthropic = pytest.importorskip("anthropic", reason="pip install anthropic")
    client = anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0, timeout=30)
    told = []
    with held(served, monkeypatch) as gate:
        chat = served.openai.chat.completions.create(**CHAT, stream=True)  # both return while no step is made
        message = client.messages.create(**{k: v for k, v in CHAT.items() if k != "temperature"}, stream=True)
        gate.open.set()
        told.append("".join(chunk.choices[0].delta.content or "" for chunk in chat))
        kinds = [event.type for event in message]
    assert told == [served.openai.chat.completions.create(**CHAT).choices[0].message.content]
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")


def test_a_refusal_of_a_stream_keeps_its_status(served):
    assert served.post("/v1/completions", **{**LONG, "prompt": [10**6]}).status_code == 400
    assert served.post("/v1/completions", **{**LONG, "guided_regex": "("}).status_code == 400
    assert (
        served.post("/v1/completions", **{**LONG, "prompt": "x " * 3000}).json()["error"]["code"]
        == "context_length_exceeded"
    )
