"""The ingress before replicas, without Ray: replicas here are the server's application in this process, and some of them die."""

import asyncio
import json
from contextlib import aclosing, asynccontextmanager

import httpx
import pytest

from polydraft import AsyncEngine
from polydraft.config import ServerConfig
from polydraft.integrations.ray.ingress import TRIES, Ingress, ReplicaLostError, answered, merged
from polydraft.integrations.ray.prefixes import BLOCK, SentPrefixes, digests, prompt_of
from polydraft.server.app import create_app
from polydraft.server.guard import Guard
from tests.server.conftest import small_engine

ASK = {"prompt": "import os\n", "max_tokens": 12, "temperature": 0}


class Dying:
    """The application of the server, of which the first `deaths` answers end behind so many messages."""

    def __init__(self, app, deaths=0, after=0):
        self.app = app
        self.deaths = deaths
        self.after = after
        self.asked = 0

    async def answer(self, call):
        self.asked += 1
        dies = self.asked <= self.deaths
        told = 0
        async with aclosing(answered(self.app, call)) as answer:
            async for messages in answer:
                for message in messages:
                    if dies and told == self.after:
                        raise ReplicaLostError("it died")
                    yield [message]
                    told += 1

    async def figures(self):
        return {}


@pytest.fixture(scope="module")
def engine():
    return small_engine()


@asynccontextmanager
async def behind(engine, **dying):
    app = create_app(AsyncEngine(engine), ServerConfig(served_model_name="small"))
    async with app.router.lifespan_context(app):
        replicas = Dying(app, **dying)
        transport = httpx.ASGITransport(Guard(Ingress(replicas, 4096)))
        async with httpx.AsyncClient(transport=transport, base_url="http://ingress", timeout=60) as client:
            yield replicas, client


def asked(engine, path="/v1/completions", body=ASK, **dying):
    async def main():
        async with behind(engine, **dying) as (replicas, client):
            found = await client.post(path, json=body)
            return found, replicas.asked

    return asyncio.run(main())


def text(answer):
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    return "".join(choice["text"] for event in events for choice in event.get("choices", ()))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("after", [0, 1])
def test_a_replica_that_dies_before_anything_was_sent_was_never_asked(engine, stream, after):
    sound, _ = asked(engine, body={**ASK, "stream": stream})
    found, times = asked(engine, body={**ASK, "stream": stream}, deaths=2, after=after)
    assert found.status_code == 200 and times == 3
    assert text(found) == text(sound) if stream else found.json()["choices"] == sound.json()["choices"]


def test_what_was_lost_too_often_is_refused(engine):
    found, times = asked(engine, deaths=TRIES)
    assert found.status_code == 503 and times == TRIES
    assert found.json()["error"]["type"] == "server_error" and "Ask again" in found.json()["error"]["message"]


def test_a_stream_that_breaks_off_ends_with_an_error_and_is_not_asked_for_again(engine):
    sound, _ = asked(engine, body={**ASK, "stream": True})
    found, times = asked(engine, body={**ASK, "stream": True}, deaths=1, after=3)
    lines = [line for line in found.text.splitlines() if line]
    assert times == 1 and lines[-1] == "data: [DONE]"
    assert set(json.loads(lines[-2][6:])["error"]) == {"message", "type", "param", "code"}
    assert text(found) and text(sound).startswith(text(found)) and text(found) != text(sound)


def test_a_broken_stream_of_responses_ends_as_openai_ends_it(engine):
    body = {"input": "x", "max_output_tokens": 12, "temperature": 0, "stream": True}
    found, _ = asked(engine, "/v1/responses", body, deaths=1, after=3)
    events = [json.loads(line[6:]) for line in found.text.splitlines() if line.startswith("data: {")]
    assert events[-1]["type"] == "error" and "message" in events[-1]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))


def test_what_is_too_long_is_refused_at_the_ingress(engine):
    found, times = asked(engine, body={"prompt": "x" * 5000})
    assert found.status_code == 413 and times == 0


def test_beginnings_are_shared_by_whole_blocks():
    known = SentPrefixes(prompts=2)
    long = "abc" * BLOCK
    known.learn("a", digests(long))
    assert known.shared("a", digests(long + "more" * BLOCK)) == 3
    assert known.shared("a", digests(long[: 2 * BLOCK] + "z" * BLOCK)) == 2
    assert known.shared("a", digests("z" + long)) == 0 == known.shared("b", digests(long))


def test_a_replica_remembers_its_last_prompts_and_is_forgotten_with_them():
    known = SentPrefixes(prompts=2)
    prompts = [digests(letter * BLOCK) for letter in "xyz"]
    for prompt in prompts:
        known.learn("a", prompt)
    assert [known.shared("a", prompt) for prompt in prompts] == [0, 1, 1] and known.size("a") == 2
    known.retain({"b"})
    assert known.shared("a", prompts[2]) == 0


def test_a_conversation_that_goes_on_begins_as_it_did():
    first = [{"role": "user", "content": "x" * 300}]
    more = [*first, {"role": "assistant", "content": "y"}]
    before, after = (
        digests(prompt_of(json.dumps({"model": "m", "messages": m}).encode())) for m in (first, more)
    )
    assert len(before) > 1 and after[: len(before)] == before


@pytest.mark.parametrize(
    "body", [b"", b"[1]", b"[" * 100_000, b'{"prompt": "\\ud800"}', b"\xff", b'{"messages": 7}']
)
def test_any_body_has_a_beginning(body):
    assert isinstance(digests(prompt_of(body)), tuple)


def test_figures_of_replicas_are_one_exposition():
    from prometheus_client.parser import text_string_to_metric_families

    text = '# HELP n of it\n# TYPE n gauge\nn{m="x"} 1.0\n# HELP k c\n# TYPE k gauge\nk{m="x"} 2.0\n'
    families = {f.name: f for f in text_string_to_metric_families(merged({"a": text, "b": text}))}
    assert [s.labels["replica"] for s in families["n"].samples] == ["a", "b"]
    assert families["k"].documentation == "c"
