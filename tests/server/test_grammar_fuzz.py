"""No schema, expression or grammar ends the server, or holds up others: 5,000 hostile ones, and those that once did."""

import json
import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from tests.engine.test_grammar_bounds import DEEP
from tests.support.hostile_grammars import hostile

SERVER = """
import sys, time
from polydraft.engine.loop import Loop
from tests.server.conftest import serving, small_engine
step, longest = Loop.step, [0.0]
def timed(loop):
    began = time.thread_time()
    try:
        return step(loop)
    finally:
        longest[0] = max(longest[0], time.thread_time() - began)
Loop.step = timed
with serving(small_engine()) as served:
    print(served.url, flush=True)
    sys.stdin.readline()
    longest[0] = 0.0
    sys.stdin.readline()
print(longest[0], flush=True)
"""
"""Tells the longest CPU time of a step, which others of this machine do not lengthen."""
DEEP_FORMS = [(kind, value) for kind, value, _ in DEEP]


@contextmanager
def apart():
    """A server of another process."""
    running: Any
    with subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as running:
        try:
            yield running, httpx.Client(base_url=running.stdout.readline().strip(), timeout=120)
        finally:
            running.kill()


def status(client, kind, value):
    """Of a request with a form, or with a tool of it."""
    ask = {"prompt": "def f(", "max_tokens": 8, "seed": 1}
    if kind == "gbnf":
        return posted(client, "/completion", {**ask, "grammar": value})
    if kind == "tool":
        tools = [{"type": "function", "function": {"name": "f", "parameters": value}}]
        chat = {
            "messages": [{"role": "user", "content": "x"}],
            "max_tokens": 8,
            "tools": tools,
            "tool_choice": "required",
        }
        return posted(client, "/v1/chat/completions", chat)
    field = {"lark": "guided_grammar", "grammar": "guided_grammar"}.get(kind, f"guided_{kind}")
    return posted(client, "/v1/completions", {**ask, field: value})


def posted(client, path, body):
    found = client.post(path, content=json.dumps(body).encode(), headers={"Content-Type": "application/json"})
    if found.status_code == 400:
        assert found.json()["error"]["message"] and "Traceback" not in found.text
    return found.status_code


def fuzzed(forms):
    """Statuses of forms, the longest CPU seconds of a step, and answers of a neighbour meanwhile."""
    with apart() as (running, client):
        assert status(client, "regex", "a|b") == 200
        running.stdin.write("begin\n")
        running.stdin.flush()
        neighbours = list[str]()
        over = threading.Event()

        def neighbour():
            while not over.is_set():
                body = {"prompt": "def f(", "max_tokens": 64, "temperature": 0}
                neighbours.append(client.post("/v1/completions", json=body).json()["choices"][0]["text"])

        beside = threading.Thread(target=neighbour)
        beside.start()
        with ThreadPoolExecutor(6) as pool:
            statuses = Counter(pool.map(lambda form: status(client, *form), forms))
        over.set()
        beside.join()
        assert running.poll() is None and client.get("/health").status_code == 200
        told, _ = running.communicate("end\n", timeout=120)
        return statuses, float(told), neighbours


def test_what_once_ended_a_server_is_refused_also_in_a_tool(served):
    for form in [*DEEP_FORMS, *(("tool", value) for kind, value in DEEP_FORMS if kind == "json")]:
        assert status(served.http, *form) == 400
    assert status(served.http, "regex", "a|b") == 200


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_thousands_of_hostile_forms_neither_end_the_server_nor_hold_up_others():
    forms = [
        ("tool" if kind == "json" and number % 4 == 0 else kind, form)
        for number, (kind, form) in enumerate(hostile(0, 5000))
    ]
    statuses, longest, neighbours = fuzzed(forms)
    assert set(statuses) == {200, 400} and min(statuses.values()) > 500 and sum(statuses.values()) == 5000
    assert longest < 0.2 and len(set(neighbours)) == 1
