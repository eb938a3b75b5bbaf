"""llama.cpp's own paths answer as its server does, with the texts of completions."""

import json
import re

import pytest

from polydraft import SamplingParams
from polydraft.engine.stats import RequestStats
from polydraft.server.measured import timings
from tests.server.conftest import data_of

PROMPT = "def add(a, b):\n"
ASK = {
    "prompt": PROMPT,
    "n_predict": 12,
    "temperature": 0,
    "cache_prompt": True,
    "samplers": ["temperature"],
    "id_slot": -1,
}


def events(response):
    return list(map(json.loads, data_of(response.text.split("\n\n"))))


def test_a_completion_is_what_the_engine_generates_whole_and_streamed(served):
    (alone,) = served.engine.generate(PROMPT, SamplingParams(temperature=0, max_tokens=12))
    whole = served.post("/completion", **ASK, return_tokens=True).json()
    streamed = events(served.post("/completion", **ASK, stream=True))
    assert whole["content"] == "".join(event["content"] for event in streamed) == alone.text
    assert whole["tokens"] == [token for event in streamed for token in event["tokens"]] == alone.token_ids
    assert [event["stop"] for event in streamed] == [False] * (len(streamed) - 1) + [True]
    assert (whole["stop_type"], whole["tokens_predicted"], whole["tokens_evaluated"]) == (
        "limit",
        12,
        len(alone.prompt_token_ids),
    )
    assert whole["timings"]["predicted_n"] == 12 and streamed[-1]["timings"]["predicted_ms"] > 0


def test_a_stop_word_is_told(served):
    text = served.post("/completion", **ASK).json()["content"]
    word = text[3:5]
    found = served.post("/completion", **ASK, stop=[word]).json()
    assert (found["stop_type"], found["stopping_word"], found["content"]) == (
        "word",
        word,
        text[: text.index(word)],
    )


def test_prompts_are_texts_ids_and_both_together(served):
    ids = served.post("/tokenize", prompt=PROMPT).json()["tokens"]
    text = served.post("/completion", **ASK).json()["content"]
    assert served.post("/completion", **{**ASK, "prompt": ids}).json()["content"] == text
    assert served.post("/completion", **{**ASK, "prompt": [*ids[:2], "x"]}).json()["tokens_evaluated"] > 2
    assert [
        one["content"] for one in served.post("/completion", **{**ASK, "prompt": [PROMPT, PROMPT]}).json()
    ] == [text] * 2


def test_probabilities_are_those_of_completions(served):
    found = served.post("/completion", **ASK, n_probs=2).json()["completion_probabilities"]
    expected = served.openai.completions.create(
        model="small", prompt=PROMPT, max_tokens=12, temperature=0, logprobs=2
    )
    assert [one["logprob"] for one in found] == pytest.approx(expected.choices[0].logprobs.token_logprobs)
    assert all(len(one["top_logprobs"]) >= 2 for one in found)


def test_a_schema_and_biases_are_followed(served):
    schema = {
        "type": "object",
        "properties": {"a": {"enum": [1, 2, 3]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    found = served.post(
        "/completion", **{**ASK, "n_predict": 60, "temperature": 1, "seed": 1}, json_schema=schema
    ).json()
    assert json.loads(found["content"])["a"] in (1, 2, 3)
    first = served.post("/completion", **{**ASK, "n_predict": 1}, return_tokens=True).json()["tokens"][0]
    banned = served.post(
        "/completion", **{**ASK, "n_predict": 1}, return_tokens=True, logit_bias=[[first, False]]
    ).json()
    assert banned["tokens"][0] != first


def test_what_clients_ask_about_the_server(served):
    props = served.http.get("/props").json()
    slots = served.http.get("/slots").json()
    assert props["total_slots"] == len(slots) == 4 and props["default_generation_settings"]["n_ctx"] == 512
    assert props["chat_template"].startswith("{% for m") and not any(slot["is_processing"] for slot in slots)
    said = [{"role": "user", "content": "hi"}]
    assert served.post("/apply-template", messages=said).json() == {"prompt": "# user: hi\n"}
    ids = served.post("/tokenize", content="x = 1").json()["tokens"]
    assert served.post("/detokenize", tokens=ids).json()["content"] == "x = 1"


@pytest.mark.parametrize(
    "path", ["/chat/completions", "/completions", "/models", "/embeddings", "/responses"]
)
def test_paths_without_a_version_are_those_with_one(served, path):
    body = {
        "messages": [{"role": "user", "content": "x"}],
        "prompt": "x",
        "input": "x",
        "temperature": 0,
        "max_tokens": 2,
    }
    ask = served.http.get if path == "/models" else lambda p: served.post(p, **body)
    bare = ask(path).json()
    versioned = ask(f"/v1{path}").json()
    volatile = {"id", "timings", "created", "created_at", "usage", "output"}
    assert {k: v for k, v in bare.items() if k not in volatile} == {
        k: v for k, v in versioned.items() if k not in volatile
    }


@pytest.mark.parametrize(
    ("more", "said"),
    [({"mirostat": 2}, "mirostat"), ({"logit_bias": [[1]]}, "expected pairs"), ({"prompt": []}, "prompt")],
)
def test_wrong_requests_are_refused(served, more, said):
    found = served.post("/completion", **{**ASK, **more})
    assert found.status_code == 400 and said in found.json()["error"]["message"]


def test_a_grammar_in_its_own_notation_is_followed_and_a_wrong_one_refused(served):
    found = served.post(
        "/completion", **{**ASK, "temperature": 1}, grammar='root ::= digit+ "!"\ndigit ::= [0-9] # one\n'
    ).json()
    assert re.fullmatch(r"[0-9]+!?", found["content"])
    for wrong in ("root ::= nowhere", 'root ::= "a', "start: A"):
        refused = served.post("/completion", **ASK, grammar=wrong)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "grammar")
        assert "Expected GBNF" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "def f"}], "max_tokens": 12}),
        ("/v1/completions", {"prompt": "def f", "max_tokens": 12}),
        ("/v1/responses", {"input": "def f", "max_output_tokens": 12}),
    ],
)
def test_answers_tell_times_and_acceptance_as_llama_cpp_and_vllm_do(served, path, body):
    whole = served.post(path, **body, temperature=0).json()
    timings = whole["timings"]
    speculation = whole["usage"]["speculation"]
    told = whole["metrics"]["speculative_decoding"]
    assert timings["draft_n"] == told["num_draft_tokens"] == speculation["drafted_tokens"] > 0
    assert timings["draft_n_accepted"] == told["num_accepted_draft_tokens"] == speculation["accepted_tokens"]
    histogram = told["acceptance_histogram"]
    assert sum(histogram) == told["num_spec_steps"] == speculation["steps"]
    assert sum(k * steps for k, steps in enumerate(histogram)) == told["num_accepted_draft_tokens"]
    assert timings["predicted_n"] > 0 < timings["predicted_ms"]


def test_times_are_those_of_the_wall_whoever_ran_beside():
    """Of a batch, a sample's share of the steps' seconds says nothing about what its client waits for."""
    stats = RequestStats(generated_tokens=9, cached_tokens=2)
    stats.first_tokens = 1
    stats.seconds_waiting = 1.0
    stats.seconds_to_first_token = 3.0
    stats.seconds_to_last_token = 7.0
    stats.seconds |= {"prefill": 0.5, "scoring": 1.0}
    found = timings(12, [stats])
    assert (found["prompt_n"], found["prompt_ms"], found["prompt_per_second"]) == (10, 2000, 5)
    assert (found["predicted_n"], found["predicted_ms"]) == (9, 4000)
    assert found["predicted_per_second"] == 2  # the first token came with the prompt
    assert found["predicted_per_token_ms"] == 500


def test_an_answer_of_one_step_has_no_rate():
    stats = RequestStats(generated_tokens=1)
    stats.emitted(1)
    found = timings(3, [stats])
    assert (found["predicted_n"], found["predicted_per_second"], found["predicted_ms"]) == (1, 0, 0)
    assert stats.seconds_to_first_token == stats.seconds_to_last_token
