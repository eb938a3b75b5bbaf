"""Ollama's own client finds what it expects, and every answer is the one that OpenAI's client gets."""

import json
from typing import Any

import ollama
import pytest

from polydraft import SamplingParams
from studies.clients.scripted import scripted_engine, uses_a_shell
from tests.server.conftest import serving, small_engine

PROMPT = "def add(a, b):\n"
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "def f("}]
OPTIONS = {"num_predict": 12, "temperature": 0, "num_ctx": 4096, "repeat_last_n": 64, "mirostat": 0}
READ = {
    "type": "function",
    "function": {
        "name": "read_note",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
    },
}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2, 3]}},
    "required": ["a"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def client(served):
    return ollama.Client(host=served.url)


def test_a_chat_is_the_one_of_openai_whole_and_in_lines(served, client):
    asked = {"model": "small", "messages": MESSAGES}
    expected = served.openai.chat.completions.create(**asked, max_tokens=12, temperature=0)
    whole = client.chat(**asked, options=OPTIONS)
    lines = list(client.chat(**asked, options=OPTIONS, stream=True))
    assert (
        whole.message.content
        == "".join(line.message.content for line in lines)
        == expected.choices[0].message.content
    )
    assert (whole.done_reason, whole.eval_count, whole.prompt_eval_count) == (
        "length",
        12,
        expected.usage.prompt_tokens,
    )
    assert [line.done for line in lines] == [False] * (len(lines) - 1) + [True] and lines[
        -1
    ].message.content == ""
    assert 0 < lines[-1].eval_duration <= lines[-1].total_duration


def test_a_text_is_continued_as_it_is_or_in_the_template(served, client):
    raw = client.generate("small:latest", PROMPT, raw=True, options=OPTIONS)
    assert (
        raw.response == served.engine.generate(PROMPT, SamplingParams(temperature=0, max_tokens=12))[0].text
    )
    said = client.generate("small", "def f(", system="Be brief.", options=OPTIONS)
    assert said.response == client.chat("small", MESSAGES, options=OPTIONS).message.content
    streamed = list(client.generate("small", PROMPT, raw=True, options=OPTIONS, stream=True))
    assert "".join(line.response for line in streamed) == raw.response and streamed[-1].context == raw.context
    again = client.generate("small", "x", raw=True, context=raw.context, options=OPTIONS)
    assert list(again.context)[: len(raw.context)] == list(raw.context)


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_is_called_and_its_result_answered(stream):
    with serving(scripted_engine(uses_a_shell())) as scripted:
        client = ollama.Client(host=scripted.url)
        talk: list[Any] = [{"role": "user", "content": "What does the note say?"}]
        found = client.chat("small", talk, tools=[READ], stream=stream)
        messages = [line.message for line in found] if stream else [found.message]
        (call,) = [call for message in messages for call in message.tool_calls or ()]
        assert (call.function.name, dict(call.function.arguments)) == ("read_note", {"path": "note.txt"})
        talk += [
            {"role": "assistant", "tool_calls": [call.model_dump()]},
            {"role": "tool", "tool_name": "read_note", "content": "plum-4"},
        ]
        assert client.chat("small", talk, tools=[READ]).message.content == "The note says plum-4."


def test_a_call_that_is_broken_off_is_text():
    with serving(scripted_engine(uses_a_shell())) as scripted:
        client = ollama.Client(host=scripted.url)
        talk = [{"role": "user", "content": "What does the note say?"}]
        cut = 0
        for most in range(1, 60, 4):
            options = {"num_predict": most}
            whole = client.chat("small", talk, tools=[READ], options=options)
            lines = list(client.chat("small", talk, tools=[READ], options=options, stream=True))
            assert "".join(line.message.content for line in lines) == whole.message.content
            if whole.message.tool_calls:
                break
            assert whole.done_reason == "length"
            cut += whole.message.content.startswith("read_note {")
        assert cut > 0 and whole.message.tool_calls


@pytest.mark.parametrize("stream", [False, True])
def test_a_format_is_followed(client, stream):
    found = client.chat(
        "small", MESSAGES, format=SCHEMA, options={"num_predict": 80, "seed": 2}, stream=stream
    )
    text = "".join(line.message.content for line in found) if stream else found.message.content
    assert json.loads(text)["a"] in (1, 2, 3)
    assert json.loads(client.generate("small", "x", format=SCHEMA, options={"num_predict": 80}).response)[
        "a"
    ] in (1, 2, 3)


def test_logprobs_are_those_of_the_chat(served, client):
    (first, *_) = client.chat("small", MESSAGES, options=OPTIONS, logprobs=True, top_logprobs=2).logprobs
    asked = {
        "model": "small",
        "messages": MESSAGES,
        "max_tokens": 1,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 2,
    }
    (expected,) = served.openai.chat.completions.create(**asked).choices[0].logprobs.content
    assert first.logprob == pytest.approx(expected.logprob) and len(first.top_logprobs) == 2


def test_models_are_listed_shown_and_loaded(served, client):
    (listed,) = client.list().models
    (running,) = client.ps().models
    assert listed.model == running.model == "small" and running.context_length == 512
    shown = client.show("small")
    assert shown.template.startswith("{% for m") and {"completion", "tools", "embedding"} <= set(
        shown.capabilities
    )
    assert served.http.get("/api/version").json()["version"].count(".") == 2
    assert (
        client.generate("small", "").done_reason == "load"
        and client.chat("small", keep_alive=0).done_reason == "unload"
    )


def test_embeddings_are_those_of_openai(served, client):
    found = client.embed("small", ["def f(", PROMPT])
    expected = served.openai.embeddings.create(model="small", input=["def f(", PROMPT])
    for ours, theirs in zip(found.embeddings, expected.data, strict=True):
        assert list(ours) == pytest.approx(theirs.embedding, abs=1e-6)
    assert found.prompt_eval_count == expected.usage.prompt_tokens
    assert len(client.embed("small", PROMPT, dimensions=8).embeddings[0]) == 8
    assert list(client.embeddings("small", PROMPT).embedding) == pytest.approx(
        list(found.embeddings[1]), abs=1e-6
    )
    assert len(client.embed("small", PROMPT * 600).embeddings) == 1  # cut to the context


@pytest.mark.parametrize("nothing", ["", []])
def test_no_text_has_no_embedding(served, client, nothing):
    assert client.embed("small", nothing).embeddings == [] and client.embed("small").embeddings == []
    assert served.post("/api/embeddings", model="small", prompt="").json() == {"embedding": []}


def test_a_context_is_continued_without_another_first_token():
    engine = small_engine()
    tokenizer = engine.tokenizer
    first = tokenizer.bos_token_id = tokenizer.eos_token_id
    encode = engine.encode
    engine.encode = lambda text, **options: (
        [first, *encode(text, **options)] if isinstance(text, str) else encode(text, **options)
    )
    with serving(engine) as beginning:
        client = ollama.Client(host=beginning.url)
        before = client.generate("small", "def f(", raw=True, options={"num_predict": 2}).context
        again = client.generate("small", "x", raw=True, context=before, options={"num_predict": 2})
    assert before[0] == first and again.context.count(first) == 1
    assert list(again.context)[: len(before) + 1] == [*before, *encode("x")[:1]]


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("/api/chat", {"model": "other", "messages": MESSAGES}, 404, "model 'other' is not here"),
        ("/api/chat", {"messages": [{"role": "owner", "content": "x"}]}, 400, "messages.0.role"),
        (
            "/api/chat",
            {"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]},
            400,
            "messages.0.images",
        ),
        ("/api/chat", {"messages": MESSAGES, "options": {"mirostat": 2}}, 400, "options.mirostat"),
        ("/api/chat", {"messages": MESSAGES, "format": "xml"}, 400, "expected 'json'"),
        ("/api/chat", {"messages": MESSAGES, "tools": [{"function": {}}]}, 400, "function.name"),
        ("/api/generate", {"prompt": "x", "options": {"temperature": -1}}, 400, "temperature=-1"),
        ("/api/embed", {"input": "x", "dimensions": 9999}, 400, "the model has"),
        ("/api/embed", {"input": [{}]}, 400, "input"),
        ("/api/pull", {"model": "small"}, 404, "nothing at this path"),
    ],
)
def test_wrong_requests_are_refused_as_ollama_does(served, path, body, status, said):
    found = served.post(path, **body)
    assert found.status_code == status and said in found.json()["error"], found.text
