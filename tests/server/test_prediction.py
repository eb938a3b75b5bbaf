"""`prediction`: a text that drafts are looked up in, which changes no token, and whose use is counted."""

import openai
import pytest

from tests.server.conftest import serving, small_engine

ASK = {
    "model": "small",
    "messages": [{"role": "user", "content": "def add(a, b):"}],
    "max_tokens": 40,
    "temperature": 0,
    "extra_body": {"repetition_penalty": 1.5},  # a text that does not repeat itself
}


@pytest.fixture(scope="module")
def answer(served):
    return served.openai.chat.completions.create(**ASK)


def details(answer):
    found = answer.usage.completion_tokens_details
    return found.accepted_prediction_tokens, found.rejected_prediction_tokens


@pytest.mark.parametrize("parts", [False, True])
def test_a_prediction_that_comes_true_saves_steps_and_changes_nothing(served, answer, parts):
    text = answer.choices[0].message.content
    content = [{"type": "text", "text": text[:20]}, {"type": "text", "text": text[20:]}] if parts else text
    predicted = served.openai.chat.completions.create(
        **ASK, prediction={"type": "content", "content": content}
    )
    accepted, rejected = details(predicted)
    assert predicted.choices[0].message.content == text
    assert accepted > 25 and accepted + rejected == len(
        served.post("/tokenize", prompt=text).json()["tokens"]
    )
    calls = [a.usage.model_extra["speculation"]["steps"] for a in (answer, predicted)]
    assert calls[1] <= 14 < 25 < calls[0], calls  # drafts of 3 tokens


def test_a_prediction_that_does_not_come_true_is_counted_and_changes_nothing(served, answer):
    wrong = "Nothing of this is ever said, whatever happens next."
    predicted = served.openai.chat.completions.create(**ASK, prediction={"type": "content", "content": wrong})
    accepted, rejected = details(predicted)
    assert predicted.choices[0].message.content == answer.choices[0].message.content
    assert accepted < 5 and accepted + rejected == len(
        served.post("/tokenize", prompt=wrong).json()["tokens"]
    )
    assert details(answer) == (0, 0)


def test_a_server_whose_drafts_come_from_a_model_looks_predictions_up(answer):
    engine = small_engine(drafter="lookahead")
    with serving(engine) as other:
        text = answer.choices[0].message.content
        found = other.openai.chat.completions.create(**ASK, prediction={"type": "content", "content": text})
        plain = other.openai.chat.completions.create(**ASK)
    assert found.choices[0].message.content == text == plain.choices[0].message.content
    assert [a.usage.model_extra["speculation"]["drafter"] for a in (found, plain)] == ["ngram", "lookahead"]
    assert details(found)[0] > 25


@pytest.mark.parametrize(
    "prediction",
    [{"type": "text", "content": "x"}, {"type": "content"}, "x", {"type": "content", "content": 3}],
)
def test_a_wrong_prediction_is_refused_with_its_place(served, prediction):
    with pytest.raises(openai.BadRequestError, match="prediction"):
        served.openai.chat.completions.create(**ASK, prediction=prediction)
