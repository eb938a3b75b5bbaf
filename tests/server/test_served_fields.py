"""Fields of vLLM, SGLang, llama.cpp and OpenAI that are served do what they do there."""

import json
import re
import threading

import pytest
from tokenizers.processors import TemplateProcessing

from polydraft import SamplingParams
from polydraft.server import sampled
from tests.server.conftest import data_of, serving, small_engine

PROMPT = "def add(a, b):\n"
TURNS = [{"role": "user", "content": PROMPT}]
ASK = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0}
CHAT = {"messages": TURNS, "max_tokens": 12, "temperature": 0}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2]}},
    "required": ["a"],
    "additionalProperties": False,
}
GBNF = 'root ::= "yes" | "no"'
BODIES = {
    "/v1/chat/completions": {"messages": TURNS},
    "/v1/completions": {"prompt": PROMPT},
    "/v1/responses": {"input": PROMPT},
    "/v1/messages": {"messages": TURNS, "max_tokens": 40},
}


def text_of(found):
    assert found.status_code == 200, found.text
    body = found.json()
    if "choices" in body:
        choice = body["choices"][0]
        return choice["text"] if "text" in choice else choice["message"]["content"]
    return body["output"][0]["content"][0]["text"] if "output" in body else body["content"][0]["text"]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("more", "pattern"),
    [
        ({"structured_outputs": {"choice": ["red", "blue"]}}, "red|blue"),
        ({"structured_outputs": {"regex": "[0-9]{3}x"}}, "[0-9]{3}x"),
        ({"structured_outputs": {"json": SCHEMA}}, r'\{"a": [12]\}'),
        (
            {"structured_outputs": {"json": json.dumps(SCHEMA), "disable_any_whitespace": False}},
            r'\{"a": [12]\}',
        ),
        ({"structured_outputs": {"grammar": 'start: "yes" | "no"'}}, "yes|no"),
        ({"structured_outputs": {"grammar": GBNF}}, "yes|no"),
        ({"guided_grammar": GBNF}, "yes|no"),
        ({"regex": "[0-9]{3}x"}, "[0-9]{3}x"),
        ({"ebnf": GBNF}, "yes|no"),
        ({"grammar": GBNF}, "yes|no"),
        ({"json_schema": SCHEMA}, r'\{"a": [12]\}'),
        ({"json_schema": json.dumps(SCHEMA)}, r'\{"a": [12]\}'),
    ],
    ids=str,
)
def test_forms_are_kept_by_all_their_names(served, path, more, pattern):
    found = served.post(path, **{"max_tokens": 40, **BODIES[path], "temperature": 1, "seed": 3} | more)
    if path == "/v1/responses":
        found = served.post(
            path, **{**BODIES[path], "max_output_tokens": 40, "temperature": 1, "seed": 3} | more
        )
    assert re.fullmatch(pattern, text_of(found))


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"structured_outputs": {"choice": ["a"], "regex": "b"}}, "several forms"),
        ({"structured_outputs": {"regex": "b"}, "guided_json": {}}, "several forms"),
        ({"structured_outputs": {}}, "has no form"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"ebnf": "root ::= nowhere"}, "ebnf: a grammar was given"),
    ],
    ids=str,
)
def test_a_form_that_cannot_be_kept_is_refused(served, more, said):
    found = served.post("/v1/chat/completions", **CHAT, **more)
    assert found.status_code == 400 and said in found.json()["error"]["message"]


def test_what_ends_a_text_is_part_of_it_where_that_is_asked_for(served):
    plain = text_of(served.post("/v1/completions", **ASK))
    word = plain[4:7]
    for name in ("include_stop_str_in_output", "no_stop_trim"):
        found = served.post("/v1/completions", **ASK, stop=word, **{name: True})
        assert text_of(found) == plain[: plain.index(word) + len(word)]
        assert found.json()["choices"][0]["stop_reason"] == word
    assert text_of(served.post("/v1/completions", **ASK, stop=word)) == plain[: plain.index(word)]
    lines = served.post(
        "/v1/completions", **ASK, stop=word, include_stop_str_in_output=True, logprobs=0, stream=True
    ).text
    chunks = [json.loads(data)["choices"][0] for data in data_of(lines.split("\n\n")) if data != "[DONE]"]
    assert "".join(chunk["text"] for chunk in chunks) == plain[: plain.index(word) + len(word)]


@pytest.mark.parametrize("stream", [False, True])
def test_ids_of_prompts_and_answers_are_told(served, stream):
    (alone,) = served.engine.generate(PROMPT, SamplingParams(temperature=0, max_tokens=12))
    for path, ask in (("/v1/completions", ASK), ("/v1/chat/completions", CHAT)):
        found = served.post(path, **ask, ignore_eos=True, return_token_ids=True, stream=stream)
        lines = data_of(found.text.split("\n\n")) if stream else [found.text]
        parts = [json.loads(line) for line in lines if line != "[DONE]"]
        ids = [token for part in parts for choice in part["choices"] for token in choice["token_ids"]]
        told = [
            of_prompt
            for part in parts
            for place in (part, *part["choices"])
            if (of_prompt := place.get("prompt_token_ids"))
        ]
        assert len(ids) == 12 and len(told) == 1
        if path == "/v1/completions":
            assert (ids, told[0]) == (alone.token_ids, alone.prompt_token_ids)


def test_a_chat_tells_what_its_template_wrote_and_echoes_the_turn_that_it_continues(served):
    turns = [*TURNS, {"role": "assistant", "content": "    return"}]
    more = {"continue_final_message": True, "add_generation_prompt": False}
    plain = served.post("/v1/chat/completions", **{**CHAT, "messages": turns}, **more)
    found = served.post(
        "/v1/chat/completions", **{**CHAT, "messages": turns}, **more, echo=True, return_prompt_text=True
    )
    assert text_of(found) == "    return" + text_of(plain)
    assert found.json()["prompt_text"].endswith("# assistant:     return")
    assert text_of(served.post("/v1/chat/completions", **CHAT, echo=True)) == text_of(
        served.post("/v1/chat/completions", **CHAT)
    )


def test_names_of_llama_cpp_mean_the_same_everywhere(served):
    expected = served.post("/v1/completions", **ASK, repetition_penalty=1.3, n=2).json()
    named = {
        "prompt": PROMPT,
        "temperature": 0,
        "n_predict": 12,
        "repeat_penalty": 1.3,
        "repeat_last_n": -1,
        "n_cmpl": 2,
    }
    found = served.post("/v1/completions", **named).json()
    assert [c["text"] for c in found["choices"]] == [c["text"] for c in expected["choices"]]
    assert [one["content"] for one in served.post("/completion", **named).json()] == [
        c["text"] for c in expected["choices"]
    ]
    probabilities = served.post("/v1/chat/completions", **CHAT, n_probs=2).json()["choices"][0]["logprobs"][
        "content"
    ]
    assert all(len(token["top_logprobs"]) == 2 for token in probabilities)


@pytest.mark.parametrize("path", ["/v1/completions", "/completion", "/api/generate"])
def test_penalties_of_a_part_of_the_context_are_refused_and_of_none_are_off(served, path):
    def ask(**more):
        named = {"temperature": 0, "repeat_penalty": 1.5, **more}
        body = (
            {"options": {"num_predict": 12, **named}, "raw": True, "stream": False}
            if path == "/api/generate"
            else {"max_tokens": 12, **named}
        )
        return served.post(path, prompt=PROMPT, **body)

    refused = ask(repeat_last_n=64)
    assert refused.status_code == 400 and "repeat_last_n=64" in refused.text
    off = ask(repeat_last_n=0).json()
    plain = ask(repeat_penalty=1.0, repeat_last_n=64).json()
    answers = [
        found.get("content") or found.get("response") or found["choices"][0]["text"] for found in (off, plain)
    ]
    assert answers[0] == answers[1] != ask(repeat_last_n=-1).text


def test_samplers_that_are_not_named_do_nothing_and_an_order_that_matters_is_refused(served):
    ask = {
        "prompt": PROMPT,
        "n_predict": 8,
        "temperature": 0.7,
        "top_k": 5,
        "seed": 4,
        "top_p": 0.6,
        "min_p": 0.0,
    }
    free = {**ask, "top_p": 1.0, "top_k": 0}
    named = served.post("/completion", **ask, samplers=["dry", "temperature"]).json()["content"]
    assert named == served.post("/completion", **free).json()["content"]
    refused = served.post("/completion", **ask, samplers=["top_k", "top_p", "temperature"])
    assert (
        refused.status_code == 400
        and "they are applied in that of penalties, temperature" in refused.json()["error"]["message"]
    )
    assert (
        served.post(
            "/completion", **{**ask, "temperature": 1.0}, samplers=["top_k", "top_p", "temperature"]
        ).status_code
        == 200
    )
    assert served.post("/completion", **ask, samplers=["infill"]).status_code == 400


def test_fields_of_an_answer_are_those_that_were_asked_for(served):
    found = served.post(
        "/completion",
        prompt=PROMPT,
        n_predict=4,
        response_fields=["content", "timings/predicted_n", "absent"],
    )
    assert found.json().keys() == {"content", "predicted_n"} and found.json()["predicted_n"] == 4


@pytest.mark.parametrize(
    "more", [{"top_logprobs": 2}, {"include": ["message.output_text.logprobs"]}], ids=str
)
def test_responses_tell_log_probabilities_and_give_metadata_back(served, more):
    ask = {
        "model": "small",
        "input": PROMPT,
        "max_output_tokens": 12,
        "temperature": 0,
        "metadata": {"a": "b"},
        **more,
    }
    whole = served.openai.responses.create(**ask)
    (part,) = whole.output[0].content
    assert whole.metadata == {"a": "b"} and "".join(token.token for token in part.logprobs) == part.text
    assert all(len(token.top_logprobs) == more.get("top_logprobs", 0) for token in part.logprobs)
    deltas = [
        event
        for event in served.openai.responses.create(**ask, stream=True)
        if event.type == "response.output_text.delta"
    ]
    assert [t.token for event in deltas for t in event.logprobs] == [token.token for token in part.logprobs]


def test_tokens_are_named_by_ids_where_that_is_asked_for(served):
    told = served.post(
        "/v1/completions", **ASK, logprobs=1, return_tokens_as_token_ids=True, return_token_ids=True
    ).json()["choices"][0]
    assert told["logprobs"]["tokens"] == [f"token_id:{token}" for token in told["token_ids"]]


def test_usage_comes_with_every_chunk_where_that_is_asked_for(served):
    options = {"include_usage": True, "continuous_usage_stats": True}
    lines = data_of(
        served.post("/v1/completions", **ASK, stream=True, stream_options=options).text.split("\n\n")
    )
    counts = [json.loads(line)["usage"]["completion_tokens"] for line in lines if line != "[DONE]"]
    assert counts == sorted(counts) and counts[0] < counts[-1] == 12


def test_texts_begin_with_their_first_token_or_not():
    engine = small_engine()
    words = engine.tokenizer
    end = engine.tokenizer.eos_token
    words.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{end} $A", special_tokens=[(end, words.eos_token_id)]
    )
    with serving(engine) as begun:
        ids = begun.post("/tokenize", prompt=PROMPT).json()["tokens"]
        assert ids[0] == words.bos_token_id
        for text, expected in (
            (PROMPT, ids[1:]),
            (end + PROMPT, ids),
        ):  # a text may have that token of its own
            found = begun.post(
                "/v1/completions", **{**ASK, "prompt": text}, add_special_tokens=False, return_token_ids=True
            ).json()
            assert found["choices"][0]["prompt_token_ids"] == expected
            assert begun.post("/tokenize", prompt=text, add_special_tokens=False).json()["tokens"] == expected
        counts = [
            begun.post("/v1/chat/completions", **CHAT, **more).json()["usage"]["prompt_tokens"]
            for more in ({}, {"add_special_tokens": True})
        ]
        assert counts[1] == counts[0] + 1


def test_tokenize_tells_the_text_of_tokens_and_takes_what_chats_take(served):
    found = served.post("/tokenize", content="aé x", with_pieces=True).json()["tokens"]
    parts = [
        piece["piece"] if isinstance(piece["piece"], list) else list(piece["piece"].encode())
        for piece in found
    ]
    assert bytes(byte for part in parts for byte in part).decode() == "aé x"
    told = served.post("/tokenize", prompt="x = 1", return_token_strs=True).json()
    assert "".join(told["token_strs"]) == "x = 1" and len(told["tokens"]) == told["count"]
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    counts = [
        served.post("/tokenize", messages=TURNS, **more).json()["count"] for more in ({}, {"tools": [tool]})
    ]
    assert counts[0] < counts[1]
    end = served.engine.tokenizer.eos_token_id
    assert (
        served.post("/detokenize", tokens=[*told["tokens"], end], skip_special_tokens=True).json()["prompt"]
        == "x = 1"
    )


def test_thoughts_are_left_out_or_in_the_text():
    engine = small_engine()
    with serving(engine) as thinking:
        thought = "<think>a b</think>"
        ask = {"messages": TURNS, "max_tokens": 40, "structured_outputs": {"regex": f"{thought}[0-9]"}}
        message = thinking.post("/v1/chat/completions", **ask).json()["choices"][0]["message"]
        assert message["reasoning_content"] == "a b" and len(message["content"]) == 1
        found = thinking.post("/v1/chat/completions", **ask, include_reasoning=False).json()["choices"][0][
            "message"
        ]
        assert "reasoning_content" not in found and len(found["content"]) == 1
        for more in ({"separate_reasoning": False}, {"reasoning_format": "none"}):
            found = thinking.post("/v1/chat/completions", **ask, **more).json()["choices"][0]["message"]
            assert found["content"].startswith(thought)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_a_switch_of_thinking_reaches_the_template(path):
    engine = small_engine()
    engine.tokenizer.chat_template = (
        "{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}{{ messages[0].content }}"
    )
    with serving(engine) as switched:
        counts = [
            switched.post(path, messages=TURNS, max_tokens=1, **more).json()["usage"]
            for more in ({}, {"thinking": {"type": "disabled"}})
        ]
    first, second = (
        usage.get("prompt_tokens") or usage["input_tokens"] + usage["cache_read_input_tokens"]
        for usage in counts
    )
    assert first < second


def test_a_grammar_is_read_in_a_thread_of_its_own(served, monkeypatch):
    """One of 90,000 characters takes 0.4 s, in which others are answered."""
    threads = set()
    read = sampled.lark_of
    monkeypatch.setattr(
        sampled, "lark_of", lambda text: (threads.add(threading.current_thread().name), read(text))[1]
    )
    for path, body in (("/v1/chat/completions", CHAT), ("/completion", {"prompt": "x", "n_predict": 2})):
        assert served.post(path, **body, grammar=GBNF).status_code == 200
    assert {name.partition("_")[0] for name in threads} == {"polydraft-grammar"}
