"""Texts are filled in by the model's own marks, between what is before and behind; where it has none, that is said."""

import pytest

from polydraft.server import fill_in
from polydraft.server.fill_in import fill_form

ASK = {"max_tokens": 12, "temperature": 0}
PREFIX = "def add(a, b):\n"
SUFFIX = "\n\nprint(add(1, 2))"


class Vocabulary:
    """A tokenizer of these marks."""

    def __init__(self, *marks):
        self.backend_tokenizer = self
        self._ids = {mark: number for number, mark in enumerate(marks, 100)}

    def token_to_id(self, mark):
        return self._ids.get(mark)


def test_the_form_of_each_family_is_read_from_its_vocabulary():
    qwen = Vocabulary(
        "<|endoftext|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|repo_name|>", "<|file_sep|>"
    )
    found = fill_form(qwen)
    assert found is not None and found.prompt([1], [2]) == [101, 1, 103, 2, 102]
    assert (found.repository, found.file) == (104, 105) and {100, 101, 102, 103} <= set(found.end_ids)
    codestral = fill_form(Vocabulary("[PREFIX]", "[SUFFIX]"))
    assert codestral is not None and codestral.prompt([1], [2], behind=[3]) == [101, 2, 100, 1, 3]
    assert fill_form(Vocabulary("<|fim_prefix|>", "<|fim_suffix|>")) is None


def test_a_model_without_marks_says_so(served):
    for path, body in (
        ("/v1/completions", {**ASK, "prompt": PREFIX, "suffix": SUFFIX}),
        ("/infill", {"input_prefix": PREFIX, "input_suffix": SUFFIX}),
    ):
        found = served.post(path, **body)
        assert found.status_code == 400 and "'small' was not trained to fill in" in found.text
    assert served.post("/v1/completions", **{**ASK, "prompt": PREFIX, "suffix": ""}).status_code == 200
    assert "insert" not in served.post("/api/show", model="small").json()["capabilities"]


@pytest.fixture
def marked(served, monkeypatch):
    """A server whose model is said to fill in with some tokens of its vocabulary; their ids."""
    marks = ["#", "!", "?"]
    monkeypatch.setattr(fill_in, "FORMS", ((marks[0], "prefix", marks[1], "suffix", marks[2]),))
    monkeypatch.setattr(fill_in, "ENDS", ())
    return [served.engine.tokenizer.backend_tokenizer.token_to_id(mark) for mark in marks]


def plain(served, ids, marks):
    found = served.post("/v1/completions", **ASK, prompt=ids, stop_token_ids=marks).json()
    return found["choices"][0]["text"], found["usage"]["prompt_tokens"]


def test_a_model_with_marks_says_so_to_ollamas_clients(served, marked):
    assert "insert" in served.post("/api/show", model="small").json()["capabilities"]


def test_a_suffix_and_a_fill_in_request_are_written_with_the_marks(served, marked):
    def ids(text):
        return served.engine.tokenizer(text, add_special_tokens=False)["input_ids"]

    middle = [marked[0], *ids(PREFIX), marked[1], *ids(SUFFIX), marked[2]]
    found = served.openai.completions.create(model="small", prompt=PREFIX, suffix=SUFFIX, **ASK)
    assert (found.choices[0].text, found.usage.prompt_tokens) == plain(served, middle, marked)
    asked = {"input_prefix": PREFIX, "input_suffix": SUFFIX, "n_predict": 12, "temperature": 0}
    assert served.post("/infill", **asked).json()["content"] == found.choices[0].text
    begun = served.post("/infill", **asked, prompt="    return").json()
    assert (begun["content"], begun["tokens_evaluated"]) == plain(
        served, [*middle, *ids("    return")], marked
    )
    extra = served.post("/infill", **asked, input_extra=[{"filename": "a.py", "text": "x = 1\n"}]).json()
    assert extra["tokens_evaluated"] > found.usage.prompt_tokens
    assert served.post("/infill", **{**asked, "input_prefix": "", "input_suffix": ""}).status_code == 200


def test_a_prompt_of_ids_has_no_suffix(served, marked):
    found = served.post("/v1/completions", **ASK, prompt=[5, 6], suffix="x")
    assert (found.status_code, found.json()["error"]["param"]) == (400, "prompt")


def test_a_conversation_goes_on_without_a_new_turn(served):
    engine = served.engine
    messages = [{"role": "user", "content": "x ="}]
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    before = engine.tokenizer.chat_template
    engine.tokenizer.chat_template = template
    try:
        counts = [
            served.post("/v1/chat/completions", messages=messages, max_tokens=1, **more).json()["usage"][
                "prompt_tokens"
            ]
            for more in ({}, {"add_generation_prompt": False})
        ]
        said = [*messages, {"role": "assistant", "content": "1"}]
        assert (
            served.post(
                "/v1/chat/completions", messages=said, max_tokens=1, add_generation_prompt=False
            ).status_code
            == 200
        )
    finally:
        engine.tokenizer.chat_template = before
    assert counts == [len(engine.encode(text)) for text in ("user: x =;assistant: ", "user: x =;")]
