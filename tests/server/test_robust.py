"""Malformed requests are refused and the server lives; failures stay with their request; clients that leave give back their places."""

import json
import logging
import random
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import hypothesis
import openai
import pytest

from polydraft import Engine
from polydraft.engine.grammar import CompiledGrammar
from polydraft.errors import GrammarError
from polydraft.server import starting
from polydraft.server.protocol import ChatRequest, CompletionRequest
from tests.server.conftest import serving, small_engine

ASK = {"prompt": "def f(", "max_tokens": 4, "temperature": 0}
CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
JSON = {"Content-Type": "application/json"}
ODD = [
    None,
    True,
    -1,
    0,
    10**30,
    1.5,
    -1e308,
    "",
    "x",
    "\ud800",
    [],
    {},
    [[]],
    [None],
    {"a": {}},
    [1, "x"],
    "9" * 400,
]


def lives(served) -> bool:
    return (
        served.http.get("/health").status_code == 200
        and served.post("/v1/completions", **ASK).status_code == 200
    )


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/detokenize"]
)
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"x"',
        b"\xff\xfe{}",
        b'{"prompt": "\xff"}',
        b"[" * 100_000,
        b'{"a":' * 50_000,
        b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}",
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "x", "prompt": 5}',
    ],
    ids=lambda body: ascii(body[:24]),
)
def test_a_malformed_body_is_refused_in_openais_format(served, path, body):
    found = served.http.post(path, content=body, headers=JSON)
    assert 400 <= found.status_code < 500
    assert set(found.json()["error"]) == {"message", "type", "param", "code"}
    assert "Traceback" not in found.text and "/site-packages/" not in found.text


@pytest.mark.parametrize("number", [b"NaN", b"1e999", b"-Infinity"])
def test_numbers_without_bounds_are_refused(served, number):
    found = served.http.post(
        "/v1/completions", content=b'{"prompt": "x", "temperature": ' + number + b"}", headers=JSON
    )
    assert found.status_code == 400 and found.json()["error"]["param"] == "temperature"


def test_bodies_with_fields_of_wrong_types_never_break_it(served):
    rng = random.Random(0)
    cases = []
    for kind, base, path in (
        (CompletionRequest, ASK, "/v1/completions"),
        (ChatRequest, CHAT, "/v1/chat/completions"),
    ):
        cases += [
            (path, {**base, "max_tokens": 1, field: value})
            for field in kind.model_fields
            for value in rng.sample(ODD, 3)
        ]

    def status(case):
        return served.http.post(case[0], content=json.dumps(case[1]).encode(), headers=JSON).status_code

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(status, cases))
    assert [case for case, code in zip(cases, found, strict=True) if code >= 500] == []
    assert len(cases) > 150 and 0.5 < sum(code >= 400 for code in found) / len(found) < 1
    assert lives(served)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_its_own_document_allows_and_forbids_never_breaks_it(served):
    schemathesis = pytest.importorskip("schemathesis", reason="pip install schemathesis")
    document = schemathesis.openapi.from_url(f"{served.url}/openapi.json")
    quick = hypothesis.settings(
        max_examples=3,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    seen = set()
    for operation in document.get_all_operations():
        made = operation.ok()
        seen.add(made.path)
        modes = schemathesis.GenerationMode
        for mode in (modes.POSITIVE, modes.NEGATIVE) if made.body else (modes.POSITIVE,):

            @quick
            @hypothesis.given(case=made.as_strategy(generation_mode=mode))
            def holds(case):
                if isinstance(case.body, dict) and "max_tokens" in case.body:
                    case.body["max_tokens"] = 1
                answer = case.call(base_url=served.url)
                assert answer.status_code < 500

            holds()
    assert len(seen) == len(document.raw_schema["paths"]) and lives(served)


def test_a_client_that_does_not_read_stalls_nobody_and_finds_it_all_later():
    engine = small_engine()
    with serving(engine, sent_ahead=4096) as slow:
        body = {
            **ASK,
            "max_tokens": 200,
            "n": 2,
            "ignore_eos": True,
            "stream": True,
            "logprobs": 5,
            "speculation": {"trace": True},
        }
        whole = slow.http.post("/v1/completions", json=body).content
        with raw_request(slow, body, received=4096) as raw:
            wait_for(lambda: engine.num_running == 2)
            for _ in range(3):
                assert slow.post("/v1/completions", **ASK).status_code == 200
            wait_for(lambda: engine.num_free == 4)
            found = b""
            while not found.endswith(b"0\r\n\r\n"):
                found += raw.recv(1 << 16)
        assert (
            found.count(b"data: ") == whole.count(b"data: ") > 50
            and len(whole) > 100_000
            and b"data: [DONE]" in found
        )


def test_a_head_that_does_not_end_is_not_waited_for(served, monkeypatch):
    monkeypatch.setattr(starting, "HEAD_SECONDS", 0.5)
    host, port = served.url.removeprefix("http://").split(":")
    whole = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    for before, sent in (
        (b"", b""),
        (b"", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"),
        (whole, b"GET /heal"),
    ):
        with socket.create_connection((host, int(port)), timeout=60) as raw:
            raw.sendall(before)
            found = b"" if before else b"{}"
            while not found.endswith(b"}"):
                found += raw.recv(4096)
            raw.sendall(sent)
            assert raw.recv(1000) == b""
    with raw_request(served, {**ASK, "max_tokens": 300, "ignore_eos": True}) as raw:
        assert raw.recv(1000).startswith(b"HTTP/1.1 200")  # a long answer is no long head


def test_bytes_that_are_no_http_leave_it_alive(served):
    host, port = served.url.removeprefix("http://").split(":")
    rng = random.Random(0)
    good = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 40\r\n\r\n{"
    for number in range(40):
        raw = (
            rng.randbytes(rng.randrange(1, 300))
            if number % 2
            else bytes(b ^ (rng.random() < 0.05) for b in good)
        )
        with socket.create_connection((host, int(port)), timeout=60) as raw_socket:
            raw_socket.sendall(raw)
    assert lives(served)


def test_what_is_not_json_or_too_long_or_not_there_is_told(served):
    assert served.http.post("/v1/completions", content=b"prompt=x").status_code == 400
    assert served.http.post("/v1/completions", content=b"x" * (5 << 20), headers=JSON).status_code == 413
    assert (
        served.http.get("/v1/completions")
        .json()["error"]["message"]
        .startswith("this path is not for this method")
    )
    assert served.http.get("/nothing").status_code == 404
    assert served.http.get("/../../etc/passwd").status_code == 404


def test_a_request_id_is_kept_where_it_is_sound_and_made_where_not(served):
    assert served.http.get("/health", headers={"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
    assert len(served.http.get("/health", headers={"x-request-id": "a b\tc"}).headers["x-request-id"]) == 32


def wait_for(holds):
    until = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.005)


def raw_request(served, body, received=1 << 16):
    """A socket that has asked for a completion. received: bytes that the system takes for it."""
    content = json.dumps(body).encode()
    host, port = served.url.removeprefix("http://").split(":")
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, received)
    raw.settimeout(60)
    raw.connect((host, int(port)))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    raw.sendall(head.encode() + content)
    return raw


class Gate:
    """Steps of an engine wait while it is closed."""

    def __init__(self, engine: Engine, monkeypatch) -> None:
        self.open = threading.Event()
        self.open.set()
        self.steps = 0
        step = engine.step

        def gated():
            self.open.wait()
            self.steps += 1
            return step()

        monkeypatch.setattr(engine, "step", gated)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_place_within_a_step(served, monkeypatch, stream):
    gate = Gate(served.engine, monkeypatch)
    with raw_request(served, {**ASK, "max_tokens": 400, "ignore_eos": True, "stream": stream}):
        wait_for(lambda: served.engine.num_running == 1)
        gate.open.clear()
    wait_for(lambda: any(isinstance(asked, str) for asked in served.engine._roster.asked))
    seen = gate.steps
    gate.open.set()
    wait_for(lambda: served.engine.num_free == 4)
    assert gate.steps - seen <= 2  # the one that had begun, and the one that takes in the abort


def reset(raw):
    """Close a socket so that the server's next write fails."""
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    raw.close()


def test_clients_that_leave_are_told_to_the_log_at_debug_level_alone(served, caplog):
    caplog.set_level(logging.DEBUG, "polydraft.server")
    long = {
        **ASK,
        "max_tokens": 300,
        "ignore_eos": True,
        "stream": True,
        "n": 4,
        "speculation": {"trace": True},
    }
    for number in range(12):
        raw = raw_request(served, long)
        assert raw.recv(100)
        time.sleep(0.01 * (number % 4))
        reset(raw)
    host, port = served.url.removeprefix("http://").split(":")
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 400\r\n\r\n{"
    for leave in (reset, socket.socket.close):
        raw = socket.create_connection((host, int(port)), timeout=60)
        raw.sendall(head)
        time.sleep(0.05)
        leave(raw)
    wait_for(lambda: sum("a client left after 1 bytes" in r.getMessage() for r in caplog.records) == 2)
    wait_for(lambda: served.engine.num_free == 4)
    assert lives(served) and [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING] == []


def test_a_refusal_may_be_read_by_the_pages_that_may_call():
    with serving(small_engine(), keys=("sk-one",), cors=("https://page.example",)) as locked:
        for origin, allowed in (
            ("https://page.example", "https://page.example"),
            ("https://other.example", None),
        ):
            found = locked.http.post("/v1/completions", json=ASK, headers={"Origin": origin})
            assert (found.status_code, found.headers.get("access-control-allow-origin")) == (401, allowed)
            assert found.headers["x-content-type-options"] == "nosniff"
        asked = {
            "Origin": "https://page.example",
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization",
        }
        assert locked.http.options("/v1/completions", headers=asked).status_code == 200


def test_a_full_queue_says_when_to_come_again(monkeypatch):
    engine = small_engine()
    with serving(engine, max_waiting=1, timeout=1.0) as busy:
        gate = Gate(engine, monkeypatch)
        gate.open.clear()
        long = {**ASK, "max_tokens": 300}
        threads = [
            threading.Thread(target=busy.post, args=("/v1/completions",), kwargs=long) for _ in range(5)
        ]
        for thread in threads:
            thread.start()
        wait_for(lambda: engine.num_waiting == 5)
        with pytest.raises(openai.RateLimitError) as told:
            busy.openai.completions.create(model="small", **ASK)
        assert told.value.response.headers["retry-after"] == "1"
        time.sleep(1.1)
        gate.open.set()  # the time of all five is up
        for thread in threads:
            thread.join(60)
        wait_for(
            lambda: busy.post("/v1/completions", **ASK).status_code == 200
        )  # a slow machine may need more than its second


@pytest.mark.filterwarnings("ignore::polydraft.errors.RequestWarning")
def test_an_engine_error_fails_its_request_and_no_other(served, monkeypatch, caplog):
    whole = served.openai.completions.create(model="small", **{**ASK, "max_tokens": 30}).choices[0].text
    poison = [*served.engine.encode("def f("), 1999, *served.engine.encode("self):")]
    run = served.engine.target._run
    texts = []

    def failing(slots, tree, *given):  # a pass, of rounds with what rides in them too
        if (tree.tokens == 1999).any():
            raise RuntimeError("a secret path")
        return run(slots, tree, *given)

    monkeypatch.setattr(served.engine.target, "_run", failing)

    def ask():
        texts.append(
            served.openai.completions.create(model="small", **{**ASK, "max_tokens": 30}).choices[0].text
        )

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for stream in (False, True):
        found = served.http.post(
            "/v1/completions",
            json={**ASK, "prompt": poison, "stream": stream},
            headers={"x-request-id": "bad"},
        )
        assert found.status_code == 500 or (stream and '"type":"server_error"' in found.text)
        assert "secret" not in found.text
    for thread in threads:
        thread.join()
    assert texts == [whole] * 3
    assert "a secret path" in caplog.text and "request bad failed" in caplog.text


class OneFails:
    """Follows a grammar's outputs; the second that is begun fails behind its third token."""

    def __init__(self, constraint):
        self.begin = constraint
        self.begun = 0

    def __call__(self, source, prompt_length):
        made = self.begin(source, prompt_length)
        self.begun = self.begun + 1
        if self.begun == 2:
            allowed = made.allowed
            made.allowed = lambda context, *tree: (
                _refuse() if len(context) > prompt_length + 2 else allowed(context, *tree)
            )
        return made


def _refuse():
    raise GrammarError("structured_outputs cannot be followed beyond 3 tokens.")


@pytest.mark.filterwarnings(
    "ignore::polydraft.errors.RequestWarning", "ignore::polydraft.errors.DrafterWarning"
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_choice_that_fails_is_told_beside_those_that_do_not(served, monkeypatch, stream):
    ask = {
        **ASK,
        "max_tokens": 30,
        "temperature": 1,
        "seed": 1,
        "n": 3,
        "guided_regex": "[ab]{9}",
        "stream": stream,
    }

    def choices():
        found = served.post("/v1/completions", **ask)
        lines = (
            [line[6:] for line in found.text.splitlines() if line.startswith("data: {")]
            if stream
            else [found.text]
        )
        ends = [{}, {}, {}]
        texts = ["", "", ""]
        for choice in (choice for line in lines for choice in json.loads(line)["choices"]):
            texts[choice["index"]] += choice["text"]
            ends[choice["index"]] = choice
        return (
            found.status_code,
            [end["finish_reason"] for end in ends],
            texts,
            [end.get("error") for end in ends],
        )

    good = choices()
    replaced = OneFails(CompiledGrammar.constraint)
    monkeypatch.setattr(CompiledGrammar, "constraint", lambda source, length: replaced(source, length))
    status, reasons, texts, failures = choices()
    assert (status, reasons) == (200, ["stop", "error", "stop"]) and good[1] == ["stop"] * 3
    assert [texts[0], texts[2]] == [good[2][0], good[2][2]] and good[2][1].startswith(texts[1])
    assert "beyond 3 tokens" in failures[1]["message"] and failures[::2] == [None, None]
    replaced.begun = 1
    alone = served.post("/v1/completions", **{**ask, "n": 1})
    assert "beyond 3 tokens" in alone.text and (stream or alone.status_code == 400)
