"""Questions to a model with a chat template, plainly and with drafts: the same texts, and all statistics."""

import pytest

from polydraft import Engine
from studies.questions import QUESTIONS, measured

TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"


def engine(**options):
    made = Engine.embedded(max_num_seqs=1, **options)
    made.tokenizer.chat_template = TEMPLATE
    return made


def test_every_way_is_measured_on_every_question_and_writes_the_same():
    ways = {"plain": engine(drafter=None), "ngram": engine(drafter="ngram", depth=3)}
    found = measured(ways, QUESTIONS[:2], max_tokens=12, repetitions=2)
    assert {key: len(runs) for key, runs in found.items()} == {
        (way, q): 2 for way in ways for q in QUESTIONS[:2]
    }
    assert all(
        runs[0].generated_tokens == found["plain", q][0].generated_tokens for (_, q), runs in found.items()
    )


def test_a_way_that_writes_something_else_is_no_contender():
    class Other:
        def chat(self, messages, params):
            return engine(drafter=None).chat(messages, params.with_(temperature=3.0, seed=1))

    with pytest.raises(AssertionError, match="other changed the answer"):
        measured(
            {"plain": engine(drafter=None), "other": Other()}, QUESTIONS[:1], max_tokens=12, repetitions=1
        )
