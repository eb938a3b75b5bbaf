"""Log-likelihoods over HTTP as evaluations ask for them: `echo` with `logprobs`, `max_tokens` 0, `prompt_logprobs`, and the tokenizer from afar."""

import json

import pytest
import requests

from polydraft import SamplingParams
from tests.server.conftest import data_of

PROMPT = "def add(a, b):\n    return a"
TURNS = [{"role": "user", "content": PROMPT}]
ASK = {"model": "small", "prompt": PROMPT, "temperature": 0, "logprobs": 1, "echo": True}


@pytest.fixture(scope="module")
def scored(served):
    """The engine's own figures."""
    ids = served.engine.encode(PROMPT)
    future = served.engine.likelihood(ids, 1)
    while not future.done():
        served.engine.step()
    return ids, future.result()


@pytest.mark.parametrize("max_tokens", [0, 1, 5])
def test_an_echo_has_the_log_probabilities_of_the_prompt_before_its_own(served, scored, max_tokens):
    ids, expected = scored
    (choice,) = served.post("/v1/completions", **ASK, max_tokens=max_tokens).json()["choices"]
    told = choice["logprobs"]
    assert {len(values) for values in told.values()} == {len(ids) + max_tokens}
    assert told["token_logprobs"][0] is None and told["top_logprobs"][0] is None
    assert told["token_logprobs"][1 : len(ids)] == pytest.approx(
        [entry.logprob for entry in expected[1:]], rel=1e-4
    )
    alone = served.engine.generate(PROMPT, SamplingParams(temperature=0, max_tokens=max(max_tokens, 1)))[
        0
    ].text
    assert choice["text"] == PROMPT + (alone if max_tokens else "") and choice["finish_reason"] == "length"
    assert [
        choice["text"][at:][: len(t)] for at, t in zip(told["text_offset"], told["tokens"], strict=True)
    ] == told["tokens"]


def test_the_sampled_token_is_among_its_alternatives_and_greedy_is_told_by_equality(served, scored):
    """What lm-eval reads: a token is the greedy one where nothing beside it is more likely."""
    ids, expected = scored
    told = served.post("/v1/completions", **ASK, max_tokens=1).json()["choices"][0]["logprobs"]
    pairs = list(zip(told["tokens"], told["token_logprobs"], told["top_logprobs"], strict=True))[1:]
    assert all(word in top for word, _, top in pairs)
    greedy = [logprob == max(top.values()) for _, logprob, top in pairs]
    assert greedy[: len(ids) - 1] == [entry.rank == 1 for entry in expected[1:]] and greedy[-1]
    assert not all(greedy)


def test_a_stream_begins_with_the_prompt_and_its_log_probabilities(served):
    whole = served.post("/v1/completions", **ASK, max_tokens=4).json()["choices"][0]
    lines = data_of(served.post("/v1/completions", **ASK, max_tokens=4, stream=True).text.split("\n\n"))
    chunks = [json.loads(line)["choices"][0] for line in lines if line != "[DONE]"]
    assert "".join(chunk["text"] for chunk in chunks) == whole["text"] and chunks[0]["text"].startswith(
        PROMPT
    )
    told = [value for chunk in chunks for value in chunk["logprobs"]["token_logprobs"]]
    assert told[1:] == pytest.approx(whole["logprobs"]["token_logprobs"][1:], rel=1e-4)


def test_several_prompts_are_scored_each(served, scored):
    ids, expected = scored
    found = served.post("/v1/completions", **{**ASK, "prompt": [ids, ids[:5]], "max_tokens": 1}).json()[
        "choices"
    ]
    first, second = (choice["logprobs"]["token_logprobs"] for choice in found)
    assert (len(first), len(second)) == (len(ids) + 1, 6)
    assert first[1:5] == pytest.approx(second[1:5], rel=1e-4)
    assert first[1 : len(ids)] == pytest.approx([entry.logprob for entry in expected[1:]], rel=1e-4)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_prompts_are_scored_in_vllms_form(served, path, stream):
    body = {"prompt": PROMPT} if path == "/v1/completions" else {"messages": TURNS}
    found = served.post(
        path, **body, max_tokens=2, temperature=0, prompt_logprobs=2, return_token_ids=True, stream=stream
    )
    part = json.loads(next(data_of(found.text.split("\n\n")))) if stream else found.json()
    place = part["choices"][0] if path == "/v1/completions" else part
    first, *others = place["prompt_logprobs"]
    assert first is None and len(others) == len(place["prompt_token_ids"]) - 1
    for token, entry in zip(place["prompt_token_ids"][1:], others, strict=True):
        ranks = {name: told["rank"] for name, told in entry.items()}
        assert sorted(ranks.values())[:2] == [1, 2] and len(entry) == 2 + (ranks[str(token)] > 2)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": PROMPT, "max_tokens": 0}),
        ("/v1/chat/completions", {"messages": TURNS, "max_tokens": 0}),
        ("/v1/responses", {"input": PROMPT, "max_output_tokens": 0}),
        ("/v1/messages", {"messages": TURNS, "max_tokens": 0}),
        ("/completion", {"prompt": PROMPT, "n_predict": 0}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_of_no_tokens_reads_the_prompt_and_says_nothing(served, path, body, stream):
    found = served.post(path, **body, stream=stream)
    assert found.status_code == 200
    if not stream:
        usage = found.json().get("usage") or {"completion_tokens": found.json().get("tokens_predicted")}
        assert usage.get("completion_tokens", usage.get("output_tokens")) == 0
    following = served.post("/v1/completions", prompt=PROMPT, max_tokens=1).json()["usage"][
        "prompt_tokens_details"
    ]
    assert following["cached_tokens"] > 0


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": -2}, "prompt_logprobs"),
        ({"logprobs_mode": "processed"}, "logprobs_mode"),
    ],
    ids=str,
)
def test_what_a_prompt_has_no_log_probabilities_of_is_refused(served, more, param):
    found = served.post("/v1/completions", **ASK, max_tokens=1, **more)
    assert (found.status_code, found.json()["error"]["param"]) == (400, param)
    long = served.post("/v1/completions", **{**ASK, "prompt": [5] * 600}, max_tokens=1)
    assert (long.status_code, long.json()["error"]["code"]) == (400, "context_length_exceeded")


def test_the_tokenizer_is_told_from_afar(served):
    info = served.http.get("/tokenizer_info").json()
    tokenizer = served.engine.tokenizer
    assert (info["eos_token"], info["tokenizer_class"]) == (tokenizer.eos_token, type(tokenizer).__name__)
    assert info["chat_template"] == tokenizer.chat_template and info["model_max_length"] == 512
    ids = served.post("/tokenize", prompt=info["eos_token"], add_special_tokens=False).json()["tokens"]
    assert ids == [tokenizer.eos_token_id]


QUESTIONS = [
    {"question": "def add(a, b):\n    return a", "choices": [" + b", " - c", " banana"], "answer": 0},
    {"question": "import os\nimport", "choices": [" zebra", " sys"], "answer": 1},
    {"question": "for i in range(10):\n    print", "choices": ["(i)", "[x]", " while"], "answer": 0},
]
TASK = """
task: choices
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
doc_to_choice: "{{{{choices}}}}"
target_delimiter: ""
metric_list: [{{metric: acc}}]
"""


def _sums(served, question):
    """Of each choice the log-likelihood, by the engine itself."""
    context = served.engine.tokenizer.encode(question["question"], add_special_tokens=False)
    sums = list[float]()
    for choice in question["choices"]:
        ids = served.engine.tokenizer.encode(question["question"] + choice, add_special_tokens=False)
        future = served.engine.likelihood(ids)
        while not future.done():
            served.engine.step()
        sums.append(sum(entry.logprob for entry in future.result()[len(context) :]))
    return sums


def test_requests_of_lm_eval_give_the_sums_that_decide_its_tasks(served):
    """Its very requests: ids of context and continuation, one token of which nothing is read."""
    for question in QUESTIONS:
        context = served.engine.tokenizer.encode(question["question"], add_special_tokens=False)
        texts = [question["question"] + choice for choice in question["choices"]]
        prompts = [served.engine.tokenizer.encode(text, add_special_tokens=False) for text in texts]
        body = {
            "model": "small",
            "prompt": prompts,
            "temperature": 0,
            "max_tokens": 1,
            "logprobs": 1,
            "seed": 1234,
            "echo": True,
        }
        answer = requests.post(f"{served.url}/v1/completions", json=body, timeout=30)
        choices = sorted(answer.json()["choices"], key=lambda choice: choice["index"])
        sums = [sum(choice["logprobs"]["token_logprobs"][len(context) : -1]) for choice in choices]
        assert sums == pytest.approx(_sums(served, question), rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["remote", "huggingface"])
def test_lm_eval_runs_a_task_of_choices(served, tmp_path, monkeypatch, backend):
    lm_eval = pytest.importorskip("lm_eval", reason="pip install lm_eval[api]")
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    (tmp_path / "choices.jsonl").write_text(
        "".join(json.dumps(question) + "\n" for question in QUESTIONS), encoding="utf-8"
    )
    (tmp_path / "choices.yaml").write_text(TASK.format(file=tmp_path / "choices.jsonl"), encoding="utf-8")
    served.engine.tokenizer.save_pretrained(tmp_path / "words")
    words = {} if backend == "remote" else {"tokenizer": str(tmp_path / "words")}
    arguments = {
        "model": "small",
        "base_url": f"{served.url}/v1/completions",
        "tokenizer_backend": backend,
        "max_length": 512,
        **words,
    }
    found = lm_eval.simple_evaluate(
        model="local-completions",
        model_args=arguments,
        tasks=["choices"],
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
        bootstrap_iters=0,
        log_samples=True,
    )
    assert found is not None
    for sample, question in zip(
        sorted(found["samples"]["choices"], key=lambda s: s["doc_id"]), QUESTIONS, strict=True
    ):
        assert [float(resp[0]) for resp in sample["filtered_resps"]] == pytest.approx(
            _sums(served, question), rel=1e-4
        )
