"""Small things that clients trip over: what errors name, whose host is asked, deltas that say nothing, and calls that are broken off."""

import json
import random
import threading

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from polydraft.config import ServerConfig
from polydraft.server import model_tokens
from polydraft.server.formats.parser import AnswerParser
from tests.server.conftest import serving, small_engine
from tests.server.test_robust import ASK
from tests.server.test_tools import ASK as ASK_TOOLS
from tests.server.test_tools import BARE, FORMATS

PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, PICTURE]}]},
        ),
        (
            "/v1/responses",
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        ),
        (
            "/v1/messages",
            {"max_tokens": 4, "messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        ),
    ],
)
def test_a_picture_is_refused_as_one(served, path, body):
    found = served.post(path, **body)
    assert (
        found.status_code == 400
        and "pictures, sound and files are not read here" in found.json()["error"]["message"]
    )


def test_an_error_names_all_that_a_value_may_be(served):
    message = served.post("/v1/chat/completions", messages=[{"role": "user", "content": 5}]).json()["error"][
        "message"
    ]
    assert "valid string" in message and "valid array" in message


TURN = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        ("/v1/responses", {"input": [TURN, {"type": "function_call", "name": "f", "arguments": "{}"}]}, "input.1.call_id", "required"),
        ("/v1/responses", {"input": [{"type": "sketch"}]}, "input.0.type", "'message', 'function_call', 'function_call_output', 'reasoning'"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text", "required"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "sketch"}]}]}, "messages.0.content.0.type", "'sketch' was given"),
        ("/v1/messages", {"max_tokens": 4, "messages": [{"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "f"}]}]}, "messages.0.content.0.input", "required"),
        ("/v1/messages", {"max_tokens": 4, "messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages.0.content.0.type", "required"),
        ("/v1/completions", {"prompt": [[1], []]}, "prompt.1", "at least 1 item"),
        ("/v1/chat/completions", {"messages": [TURN], "tool_choice": {"type": "custom"}}, "tool_choice.type", "'function'"),
    ],
)  # fmt: skip
def test_an_error_names_the_field_of_the_kind_that_was_meant(served, path, body, param, message):
    error = served.post(path, **body).json()["error"]
    assert error["param"] == param and message in error["message"] and "valid string" not in error["message"]


def test_heads_are_answered_and_models_are_listed_for_both_clients(served):
    for path in ("/", "/health", "/v1/models"):
        found = served.http.head(path)
        assert (found.status_code, found.content) == (200, b"")
    anthropic = pytest.importorskip("anthropic", reason="pip install anthropic")
    client = anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0)
    (model,) = client.models.list().data
    assert (model.lifecycle, model.max_input_tokens, model.max_tokens) == ("active", 512, 512)
    assert (model.id, model.type, model.display_name, model.created_at.year >= 2026) == (
        "small",
        "model",
        "small",
        True,
    )
    assert [model.id for model in served.openai.models.list()] == ["small"]


def test_a_name_that_was_led_to_this_machine_is_refused_without_a_key(served):
    def status(server, host):
        return server.http.get("/v1/models", headers={"Host": host}).status_code

    assert [
        status(served, host) for host in ("localhost:8000", "127.0.0.1", "[::1]:80", "box", "a.localhost")
    ] == [200] * 5
    assert status(served, "evil.example") == status(served, "evil.example:80") == 403
    with serving(small_engine(), allowed_hosts=("llm.example.org",)) as named:
        assert (status(named, "llm.example.org"), status(named, "evil.example")) == (200, 403)
    with serving(small_engine(), keys=("sk-one",)) as locked:
        assert status(locked, "evil.example") == 401  # a page does not know the key
    assert ServerConfig(host="0.0.0.0").allowed_hosts == ()


def test_errors_of_anthropics_paths_have_its_type():
    with serving(small_engine(), keys=("sk-one",)) as locked:
        for found in (
            locked.post("/v1/messages", max_tokens=1),
            locked.http.get("/v1/messages", headers={"x-api-key": "sk-one"}),
        ):
            assert found.status_code in (401, 405) and found.json()["type"] == "error"


def test_a_failed_tool_is_told_as_one(served):
    def turns(**more):
        use = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
        result = {"type": "tool_result", "tool_use_id": "a", "content": "no such file", **more}
        return [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [result]},
        ]

    counts = [
        served.post("/v1/messages/count_tokens", messages=turns(is_error=e)).json()["input_tokens"]
        for e in (False, True)
    ]
    assert counts[1] > counts[0]


@pytest.mark.parametrize("name", FORMATS)
def test_a_call_that_is_broken_off_before_its_arguments_is_content(name):
    form = FORMATS[name]
    begun = (form.begin[: len(form.begin) // 2 + 1], BARE[:17], BARE[:24], f"```json\n{BARE[:20]}")
    for text in (*begun, "a <", 'like {"na', '{"name": "bob"', "```"):
        parser = AnswerParser({"add": None}, form)
        assert "".join(piece.content for piece in parser.push(f"So: {text}", last=True)) == f"So: {text}"


def test_no_delta_says_nothing(served):
    asked = {**ASK_TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    chunks = list(served.openai.chat.completions.create(**asked, stream=True))
    first, *others, last = [chunk.choices[0] for chunk in chunks]
    assert first.delta.role == "assistant" and last.finish_reason and others
    assert all(choice.delta.tool_calls or choice.delta.content for choice in others)


def test_no_token_id_of_an_answer_is_visited_in_python(served, monkeypatch):
    """550,000 ids held a neighbour's stream for half a second."""
    monkeypatch.setattr("fastapi.routing.jsonable_encoder", lambda *given, **options: pytest.fail("visited"))
    assert served.post("/tokenize", prompt="import os").json()["count"] > 0


def test_many_ids_are_the_text_that_the_tokenizer_makes_of_them(served, monkeypatch):
    rng = random.Random(0)
    ids = [rng.randrange(len(served.engine.tokenizer)) for _ in range(40_000)]
    assert served.post("/detokenize", tokens=ids).json()["prompt"] == served.engine.tokenizer.decode(ids)
    assert served.post("/detokenize", tokens=[*ids, 10**6]).status_code == 400


def test_many_ids_of_a_tokenizer_without_bytes_are_decoded_beside_others(served, monkeypatch):
    vocabulary = {word: number for number, word in enumerate(("un", "##affable", "the", "[UNK]"))}
    words = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    words.decoder = decoders.WordPiece()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    threads = set()
    monkeypatch.setattr(served.engine, "tokenizer", tokenizer)
    decoded = model_tokens._decoded_beside
    monkeypatch.setattr(
        model_tokens,
        "_decoded_beside",
        lambda *given: (threads.add(threading.current_thread().name), decoded(*given))[1],
    )
    assert served.post("/detokenize", tokens=[2, 0, 1] * 20_000).json()["prompt"] == " ".join(
        ["the unaffable"] * 20_000
    )
    assert [name.startswith("asyncio") for name in threads] == [True]


def test_more_texts_that_end_an_answer_than_can_be_looked_for_are_refused(served):
    found = served.post("/v1/completions", **ASK, stop=[str(number) for number in range(2000)])
    assert (found.status_code, found.json()["error"]["param"]) == (400, "stop")
    assert json.loads(served.post("/v1/completions", **ASK, stop=[f"#{n}" for n in range(1000)]).text)[
        "choices"
    ]
