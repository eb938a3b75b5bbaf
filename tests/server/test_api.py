"""OpenAI's own client finds what it expects: completions, chats, streams, logprobs, n, stop, and errors."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import openai
import pytest
from pydantic import BaseModel, Field

from polydraft import SamplingParams
from polydraft.engine import structured
from tests.server.conftest import data_of, serving, small_engine

PROMPT = "def add(a, b):\n"
ASK = {"model": "small", "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "def f("}]},
]
CHAT = {"model": "small", "messages": MESSAGES, "max_tokens": 12, "seed": 3}


def test_the_model_is_listed(served):
    (model,) = served.openai.models.list().data
    assert model.id == "small" and served.openai.models.retrieve("small").id == "small"


def test_a_server_has_one_distribution_and_names_it(served):
    assert served.http.get("/v1/models/small").json()["speculation"]["decoding"] == "the target distribution"
    refused = served.post("/v1/completions", **ASK, decoding="guidance")
    assert refused.status_code == 400 and "serve --decoding" in refused.json()["error"]["message"]
    engine = small_engine(decoding="guidance", decoding_options={"scale": 4.0})
    alone = [r.text for r in engine.generate([PROMPT] * 3, SamplingParams(temperature=0, max_tokens=12))]
    with serving(engine) as guided, ThreadPoolExecutor(3) as clients:
        assert "guided" in guided.http.get("/v1/models/small").json()["speculation"]["decoding"]
        found = list(clients.map(lambda _: guided.openai.completions.create(**ASK).choices[0].text, range(3)))
    assert found == alone and alone[0] != served.openai.completions.create(**ASK).choices[0].text


def test_a_completion_is_what_the_engine_generates(served):
    alone = served.engine.generate(PROMPT, SamplingParams(temperature=0, max_tokens=12))[0]
    found = served.openai.completions.create(**ASK, echo=True)
    assert found.choices[0].text == PROMPT + alone.text
    assert found.choices[0].finish_reason == "length"
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (len(alone.prompt_token_ids), 12)
    assert found.usage.model_extra["speculation"]["steps"] <= 12


def test_several_prompts_and_samples_are_numbered_and_their_noise_is_their_own(served):
    ids = served.post("/tokenize", prompt=PROMPT).json()["tokens"]
    many = served.openai.completions.create(model="small", prompt=[ids, ids], n=2, seed=5, max_tokens=8)
    alone = served.engine.generate([ids, ids], SamplingParams(n=2, seed=5, max_tokens=8))
    assert [c.text for c in many.choices] == [s.text for r in alone for s in r.samples]
    assert [c.index for c in many.choices] == [0, 1, 2, 3] and len({c.text for c in many.choices}) == 4


def test_requests_without_a_seed_share_no_noise(served):
    with ThreadPoolExecutor(6) as pool:
        texts = list(
            pool.map(
                lambda _: served.openai.completions.create(**{**ASK, "temperature": 1}).choices[0].text,
                range(6),
            )
        )
    assert len(set(texts)) > 4


def test_a_stop_string_ends_the_text_and_is_not_in_it(served):
    found = served.openai.completions.create(**{**ASK, "max_tokens": 60}, stop=["return"]).choices[0]
    assert (
        found.finish_reason == "stop"
        and found.model_extra["stop_reason"] == "return"
        and "return" not in found.text
    )


def test_logprobs_of_a_completion_are_those_of_the_engine(served):
    found = served.openai.completions.create(**ASK, logprobs=2).choices[0]
    alone = served.engine.generate(PROMPT, SamplingParams(temperature=0, max_tokens=12, logprobs=2))[
        0
    ].samples[0]
    assert found.logprobs.token_logprobs == pytest.approx([t.logprob for t in alone.logprobs])
    assert "".join(found.logprobs.tokens) == found.text
    assert [
        found.text[at:][: len(t)]
        for at, t in zip(found.logprobs.text_offset, found.logprobs.tokens, strict=True)
    ] == (found.logprobs.tokens)
    assert all(
        len(top) == 2 and t in top
        for t, top in zip(found.logprobs.tokens, found.logprobs.top_logprobs, strict=True)
    )


@pytest.mark.parametrize("num_top", [0, 1])
def test_top_logprobs_of_a_completion_have_the_sampled_token_too(served, num_top):
    found = (
        served.openai.completions.create(
            **{**ASK, "temperature": 1.5, "max_tokens": 30}, seed=3, logprobs=num_top
        )
        .choices[0]
        .logprobs
    )
    told = list(zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True))
    assert all(top[token] == logprob and len(top) <= num_top + 1 for token, logprob, top in told)
    assert num_top == 0 or {len(top) for *_, top in told} == {1, 2}


def test_a_chat_is_answered_through_the_template(served):
    found = served.openai.chat.completions.create(**CHAT, logprobs=True, top_logprobs=3)
    plain = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "def f("}]
    ids = served.engine.encode_chat(plain)
    params = served.engine.default_params(chat=True).with_(seed=3, max_tokens=12, logprobs=3)
    alone = served.engine.generate([ids], params)[0]
    choice = found.choices[0]
    assert (choice.message.role, choice.message.content) == ("assistant", alone.text)
    assert [t.logprob for t in choice.logprobs.content] == pytest.approx(
        [t.logprob for t in alone.samples[0].logprobs]
    )
    assert b"".join(bytes(t.bytes) for t in choice.logprobs.content).decode() == alone.text
    assert all(len(t.top_logprobs) == 3 for t in choice.logprobs.content)


def test_fields_that_a_request_leaves_out_are_the_models_own():
    engine = small_engine(sampling_defaults={"temperature": 0.4, "top_k": 3})
    ids = engine.encode_chat([{"role": "user", "content": "def f("}])
    own = [
        engine.generate([ids], SamplingParams(temperature=0.4, top_k=3, top_p=p, seed=3, max_tokens=30))[
            0
        ].text
        for p in (0.95, 0.5)
    ]
    with serving(engine) as cool:
        chat = {
            "model": "small",
            "messages": [{"role": "user", "content": "def f("}],
            "seed": 3,
            "max_tokens": 30,
        }
        assert [
            cool.openai.chat.completions.create(**chat, **x).choices[0].message.content
            for x in ({}, {"top_p": 0.5})
        ] == own
        response = cool.openai.responses.create(model="small", input="def f(", max_output_tokens=30)
        assert (response.temperature, response.top_p) == (0.4, 0.95)


def test_special_tokens_are_text_in_messages_and_control_tokens_in_prompts_unless_it_is_said_otherwise(
    served,
):
    said = "a<|endoftext|>b"
    end = served.engine.tokenizer.eos_token_id
    for what in ({"messages": [{"role": "user", "content": said}]}, {"prompt": said}):
        ids = [
            served.post("/tokenize", **what, **choice).json()["tokens"]
            for choice in ({}, {"parse_special": True}, {"parse_special": False})
        ]
        assert [end in x for x in ids] == ["prompt" in what, True, False]
        assert all(said in served.post("/detokenize", tokens=x).json()["prompt"] for x in ids)
        path = "/v1/completions" if "prompt" in what else "/v1/chat/completions"
        for choice, x in zip(({}, {"parse_special": True}, {"parse_special": False}), ids, strict=True):
            usage = served.post(path, **what, **choice, max_tokens=1).json()["usage"]
            assert usage["prompt_tokens"] == len(x)
    usage = served.post("/v1/responses", input=said, max_output_tokens=1).json()["usage"]
    assert (
        usage["input_tokens"]
        == served.post("/tokenize", messages=[{"role": "user", "content": said}]).json()["count"]
    )


@pytest.mark.parametrize("n", [1, 3])
def test_a_streamed_chat_is_the_whole_one_in_pieces(served, n):
    whole = served.openai.chat.completions.create(**CHAT, n=n, stop=["\n\n"])
    texts = dict.fromkeys(range(n), "")
    ends = {}
    roles = []
    stream = served.openai.chat.completions.create(
        **CHAT, n=n, stop=["\n\n"], stream=True, stream_options={"include_usage": True}
    )
    for chunk in stream:
        usage = chunk.usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content
            roles += [choice.delta.role] if choice.delta.role else []
            ends |= {choice.index: choice.finish_reason} if choice.finish_reason else {}
    assert [texts[c.index] for c in whole.choices] == [c.message.content for c in whole.choices]
    assert ends == {c.index: c.finish_reason for c in whole.choices} and roles == ["assistant"] * n
    assert (usage.completion_tokens, usage.prompt_tokens) == (
        whole.usage.completion_tokens,
        whole.usage.prompt_tokens,
    )


def test_a_streamed_completion_with_logprobs_and_a_trace_adds_up(served):
    whole = served.openai.completions.create(**ASK, logprobs=1)
    body = {**ASK, "logprobs": 1, "stream": True, "speculation": {"trace": True, "depth": 4}}
    *lines, end = data_of(served.http.post("/v1/completions", json=body).text.split("\n\n"))
    assert end == "[DONE]"
    chunks = list(map(json.loads, lines))
    text = "".join(c["choices"][0]["text"] for c in chunks)
    tokens = [t for c in chunks for t in c["speculation"]["tokens"]]
    assert text == whole.choices[0].text == "".join(t["text"] for t in tokens)
    assert [t["logprob"] for t in tokens] == pytest.approx(whole.choices[0].logprobs.token_logprobs)
    assert [lp for c in chunks for lp in c["choices"][0]["logprobs"]["token_logprobs"]] == [
        t["logprob"] for t in tokens
    ]
    for chunk in chunks:
        tree = chunk["speculation"]["tree"]
        told = chunk["speculation"]["tokens"]
        assert len(tree["parents"]) <= 5 and len(told) <= len(tree["path"]) + 1
        assert [tree["texts"][n] for n in tree["path"]][: len(told)] == [
            t["text"] for t in told if t["source"] == "ngram"
        ]


def test_speculation_is_switched_off_for_one_request_alone(served):
    plain = served.openai.completions.create(**ASK, extra_body={"speculation": {"enabled": False}})
    fast = served.openai.completions.create(
        **{**ASK, "max_tokens": 40}, extra_body={"speculation": {"depth": 2}}
    )
    assert plain.usage.model_extra["speculation"]["drafted_tokens"] == 0
    told = fast.usage.model_extra["speculation"]
    assert told["drafted_tokens"] > 0 and len(told["acceptance_by_depth"]) == 2
    assert fast.choices[0].text.startswith(plain.choices[0].text)


class Call(BaseModel):
    name: Literal["add", "sub"]
    count: int = Field(ge=0, le=99)


def test_a_chat_is_parsed_into_the_class_that_was_asked_for(served):
    found = served.openai.chat.completions.parse(**{**CHAT, "max_tokens": 60}, response_format=Call)
    assert isinstance(found.choices[0].message.parsed, Call)
    streamed = served.openai.chat.completions.create(
        **{**CHAT, "max_tokens": 60}, response_format={"type": "json_object"}, stop=["}"], stream=True
    )
    assert "".join(c.choices[0].delta.content or "" for c in streamed).startswith("{")


def test_a_text_follows_a_regular_expression_or_is_one_of_those_given(served):
    found = served.openai.completions.create(
        **{**ASK, "temperature": 1, "seed": 2}, n=4, extra_body={"guided_regex": "[ab]{3,5}!"}
    )
    assert all(re.fullmatch("[ab]{3,5}!", c.text) and c.finish_reason == "stop" for c in found.choices)
    (one,) = served.openai.completions.create(**ASK, extra_body={"guided_choice": ["yes", "no"]}).choices
    assert one.text in ("yes", "no")


@pytest.mark.filterwarnings(
    "ignore::polydraft.errors.RequestWarning", "ignore::polydraft.errors.DrafterWarning"
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_that_cannot_be_followed_to_the_end_is_the_clients_own(monkeypatch, caplog, stream):
    monkeypatch.setitem(structured.LIMITS, "max_lexer_states", 40)
    with serving(small_engine()) as strict:
        body = {
            **ASK,
            "temperature": 1,
            "max_tokens": 200,
            "stream": stream,
            "guided_regex": "([ab]{30}c){30}",
        }
        found = strict.http.post("/v1/completions", json=body)
    error = (
        json.loads(found.text.strip().split("data: ")[-2])["error"]
        if stream and found.status_code == 200
        else found.json()["error"]
    )
    assert error["type"] == "invalid_request_error" and "too many states" in error["message"]
    assert found.status_code == 400 or stream
    assert not [
        record for record in caplog.records if record.levelname == "ERROR" and "polydraft" in record.name
    ]


def test_a_request_names_its_drafter_and_its_rule(served):
    texts = {}
    for drafter, verifier in ((None, None), ("suffix", None), ("ngram", "race"), ("none", None)):
        asked = {"drafter": drafter, "verifier": verifier, "seed_exact": True, "trace": True}
        found = served.openai.completions.create(
            **{**ASK, "max_tokens": 40}, extra_body={"speculation": asked}
        )
        texts[drafter] = found.choices[0].text
        told = found.usage.model_extra["speculation"]
        assert (told["drafter"], told["verifier"]) == (drafter or "ngram", verifier or "match") and told[
            "lossless"
        ]
        assert (told["drafted_tokens"] == 0) == (drafter == "none")
    assert len(set(texts.values())) == 1


def test_a_text_of_a_seed_that_follows_the_load_is_refused_where_it_must_not(served):
    body = {**ASK, "temperature": 1, "seed": 1, "max_tokens": 30}
    asked = {"drafter": "suffix", "verifier": "race", "seed_exact": True}
    alone, again = (
        served.post("/v1/completions", **body, speculation=asked).json()["choices"][0]["text"]
        for _ in range(2)
    )
    plain = served.post("/v1/completions", **body, speculation={"verifier": "race", "enabled": False}).json()[
        "choices"
    ][0]["text"]
    assert alone == again == plain
    learns = small_engine(depth=None, policy="adaptive")
    with serving(learns) as planned:
        refused = planned.post("/v1/completions", **body, speculation={"seed_exact": True})
        assert refused.status_code == 400 and "'race'" in refused.json()["error"]["message"]
        assert (
            planned.post(
                "/v1/completions", **body, speculation={"seed_exact": True, "verifier": "race"}
            ).status_code
            == 200
        )


def test_what_one_request_gets_does_not_depend_on_its_neighbours(served):
    asked = [
        {**ASK, "prompt": f"{PROMPT}{i}", "temperature": i % 2, "seed": i, "max_tokens": 20}
        for i in range(10)
    ]
    alone = [served.openai.completions.create(**a).choices[0].text for a in asked]
    with ThreadPoolExecutor(10) as pool:
        together = list(pool.map(lambda a: served.openai.completions.create(**a).choices[0].text, asked))
    assert together == alone


def test_tokens_there_and_back(served):
    ids = served.post("/tokenize", prompt="naïve = 'é'").json()
    assert ids["count"] == len(ids["tokens"])
    assert served.post("/detokenize", tokens=ids["tokens"]).json()["prompt"] == "naïve = 'é'"
    assert served.post("/tokenize", messages=MESSAGES).json()["count"] > 5


@pytest.mark.parametrize(
    ("path", "change", "param"),
    [
        ("completions", {"stop": [5]}, "stop.0"),
        ("completions", {"stop": 5}, "stop"),
        ("completions", {"prompt": [[1], ["x"]]}, "prompt.1.0"),
        ("completions", {"temprature": 1}, "temprature"),
        ("completions", {"speculation": {"nothing": 1}}, "speculation.nothing"),
        ("chat/completions", {"messages": [{"role": "user"}]}, "messages.0.content"),
        ("chat/completions", {"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
    ],
    ids=lambda x: str(x)[:40],
)
def test_a_refusal_names_the_place_in_the_body(served, path, change, param):
    whole = (
        {"model": "small", "prompt": "x"}
        if path == "completions"
        else {"model": "small", "messages": MESSAGES}
    )
    error = served.post(f"/v1/{path}", **whole | change).json()["error"]
    assert error["param"] == param and error["message"].startswith(f"{param}: ")


@pytest.mark.parametrize(
    ("path", "change", "error", "said"),
    [
        ("completions", {"model": "gpt-4"}, openai.NotFoundError, "'small' is served"),
        ("completions", {"prompt": "x " * 600}, openai.BadRequestError, "the context holds 512"),
        ("completions", {"max_tokens": -2}, openai.BadRequestError, "max_tokens=-2"),
        ("completions", {"temperature": -1}, openai.BadRequestError, "temperature=-1"),
        ("completions", {"n": 65}, openai.BadRequestError, "64 choices"),
        ("completions", {"prompt": [99999]}, openai.BadRequestError, "token id 99999"),
        ("completions", {"prompt": ""}, openai.BadRequestError, "prompt"),
        ("completions", {"logit_bias": {"x": 1}}, openai.BadRequestError, "expected token ids"),
        ("completions", {"echo": True, "logprobs": 1, "suffix": "x"}, openai.BadRequestError, "suffix"),
        (
            "completions",
            {"extra_body": {"guided_regex": "("}},
            openai.BadRequestError,
            "structured_outputs.regex",
        ),
        (
            "completions",
            {"extra_body": {"guided_regex": "x", "guided_choice": ["y"]}},
            openai.BadRequestError,
            "several forms",
        ),
        ("completions", {"extra_body": {"guided_choice": []}}, openai.BadRequestError, "guided_choice"),
        (
            "completions",
            {"extra_body": {"guided_json": {"$ref": "#"}}},
            openai.BadRequestError,
            "no text fits it",
        ),
        (
            "completions",
            {"extra_body": {"guided_grammar": "start: start"}},
            openai.BadRequestError,
            "no text fits it",
        ),
        (
            "completions",
            {"extra_body": {"guided_choice": ["a" * 200_000]}},
            openai.BadRequestError,
            "at most 131072",
        ),
        (
            "completions",
            {"extra_body": {"speculation": {"verifier": "blok"}}},
            openai.BadRequestError,
            "block",
        ),
        (
            "completions",
            {"extra_body": {"speculation": {"verifier": "list_race"}}},
            openai.BadRequestError,
            "Verifiers that fit: ",
        ),
        (
            "completions",
            {"extra_body": {"speculation": {"drafter": "eagle"}}},
            openai.BadRequestError,
            "Known: ngram, none, suffix",
        ),
        (
            "completions",
            {"extra_body": {"speculation": {"num_paths": 200, "depth": 9}}},
            openai.BadRequestError,
            "at most 255",
        ),
        ("chat", {"messages": []}, openai.BadRequestError, "messages"),
        (
            "chat",
            {"messages": [{"role": "assistant", "content": "x"}]},
            openai.BadRequestError,
            "assistant's",
        ),
        ("chat", {"top_logprobs": 2}, openai.BadRequestError, "without logprobs"),
        ("chat", {"response_format": {"type": "json_schema"}}, openai.BadRequestError, "json_schema.schema"),
        (
            "chat",
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"type": "x"}},
                }
            },
            openai.BadRequestError,
            "Invalid type",
        ),
        ("chat", {"response_format": {"type": "xml"}}, openai.BadRequestError, "response_format"),
    ],
    ids=lambda x: str(x)[:30] if isinstance(x, dict) else "",
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_are_openais(served, path, change, error, said, stream):
    create, ask = (
        (served.openai.completions.create, ASK)
        if path == "completions"
        else (served.openai.chat.completions.create, CHAT)
    )
    with pytest.raises(error, match=said) as told:
        create(**{**ask, **change}, stream=stream)
    assert set(told.value.body) == {"message", "type", "param", "code"}


def test_a_key_is_asked_for_where_there_are_keys():
    with serving(small_engine(), keys=("sk-one", "sk-two")) as locked:
        with pytest.raises(openai.AuthenticationError):
            locked.openai.completions.create(**ASK)
        opened = locked.openai.with_options(api_key="sk-two")
        assert opened.completions.create(**ASK).choices[0].text
        assert locked.http.get("/health").status_code == 200
        assert (
            locked.http.get(
                "/v1/models", headers={"Authorization": "Bearer sk-\xff".encode("latin-1")}
            ).status_code
            == 401
        )


TALK = {
    "model": "small",
    "input": "def f(",
    "instructions": "Be brief.",
    "max_output_tokens": 12,
    "temperature": 0,
}


def test_a_response_is_the_chat_of_its_instructions_and_input(served):
    found = served.openai.responses.create(**TALK)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "def f("}]
    chat = served.openai.chat.completions.create(
        model="small", messages=messages, max_tokens=12, temperature=0
    )
    assert found.output_text == chat.choices[0].message.content and found.error is None
    assert (found.status, found.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (found.usage.input_tokens, found.usage.output_tokens) == (
        chat.usage.prompt_tokens,
        chat.usage.completion_tokens,
    )
    assert found.usage.model_extra["speculation"]["drafter"] == "ngram"
    again = [{"role": "user", "content": "def f("}, *found.output, {"role": "user", "content": "x"}]
    more = served.openai.responses.create(
        **{**TALK, "input": again, "max_output_tokens": 40}, extra_body={"guided_choice": ["yes"]}
    )
    assert (more.status, more.output_text) == (
        "completed",
        "yes",
    ) and more.usage.input_tokens > found.usage.input_tokens


def test_a_streamed_response_comes_in_openais_events(served):
    whole = served.openai.responses.create(**TALK)
    with served.openai.responses.stream(**TALK) as stream:
        events = list(stream)
    final = events[-1].response
    kinds = [event.type.removeprefix("response.") for event in events]
    opening = ["created", "in_progress", "output_item.added", "content_part.added"]
    closing = ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert kinds[:4] == opening and kinds[-4:] == closing and set(kinds[4:-4]) == {"output_text.delta"}
    assert (
        "".join(e.delta for e in events if e.type == "response.output_text.delta")
        == final.output_text
        == whole.output_text
    )
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert [e.sequence_number for e in served.openai.responses.create(**TALK, stream=True)] == list(
        range(len(events))
    )


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"previous_response_id": "resp-1"}, "previous_response_id"),
        ({"background": True}, "background"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "not read here",
        ),
        ({"max_output_tokens": -2}, "max_tokens=-2"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format"),
    ],
)
def test_what_a_response_cannot_have_is_refused(served, change, said, stream):
    with pytest.raises(openai.BadRequestError, match=said) as told:
        served.openai.responses.create(**{**TALK, **change}, stream=stream)
    assert set(told.value.body) == {"message", "type", "param", "code"}


FORCED = {"model": "small", "max_tokens": 9, "temperature": 0, "ignore_eos": True}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x", "stop": "<|endoftext|>"}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x"}], "stop": ["end", "<|endoftext|>"]},
        ),
        (
            "/v1/messages",
            {"messages": [{"role": "user", "content": "x"}], "stop_sequences": ["<|endoftext|>"]},
        ),
    ],
)
def test_a_stop_string_that_is_a_special_token_ends_a_text(served, path, body):
    end = served.post("/tokenize", prompt="<|endoftext|>").json()["tokens"]
    told = served.post(path, **FORCED, **body, logit_bias={str(end[0]): 100}).json()
    answer = told["choices"][0] if "choices" in told else told
    assert answer.get("stop_sequence", answer["stop_reason"]) == "<|endoftext|>"
    assert told["usage"].get("completion_tokens", told["usage"].get("output_tokens")) == 1


def test_only_the_last_chunk_has_a_usage_and_the_others_say_null(served):
    for path, body in (("/v1/completions", ASK), ("/v1/chat/completions", CHAT)):
        for asked in (True, False):
            streamed = served.post(path, **body, stream=True, stream_options={"include_usage": asked})
            chunks = [json.loads(data) for data in data_of(streamed.text.split("\n\n")) if data != "[DONE]"]
            assert ["usage" in chunk for chunk in chunks] == [asked] * len(chunks)
            assert not asked or [chunk["usage"] is None for chunk in chunks] == [True] * (len(chunks) - 1) + [
                False
            ]
