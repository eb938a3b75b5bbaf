"""Conversations through the tokenizer's own template."""

import pytest
from transformers import AutoTokenizer

from polydraft.core import SamplingParams
from polydraft.engine.api import Engine
from polydraft.errors import IncompatibleError, InvalidInputError
from polydraft.models import pair
from polydraft.models.tokens.chat_template import _compiled

TEMPLATE = (
    "{% for m in messages %}"
    "{% if m['role'] == 'judge' %}{{ raise_exception('no judges here') }}{% endif %}"
    "# {{ m['role'] }}: {{ m['content'] }}\n"
    "{% endfor %}{% if add_generation_prompt %}# assistant: {% endif %}"
)
HELLO = [{"role": "system", "content": "Answer in Python."}, {"role": "user", "content": "import what?"}]
GREEDY = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture(scope="module")
def engine():
    made = Engine.embedded(max_num_seqs=1)
    made.tokenizer.chat_template = TEMPLATE
    return made


def test_the_template_of_the_tokenizer_makes_the_prompt(engine):
    text = engine.tokenizer.decode(engine.encode_chat(HELLO))
    assert text == "# system: Answer in Python.\n# user: import what?\n# assistant: "
    assert (
        engine.encode_chat(HELLO)
        == engine.tokenizer.apply_chat_template(HELLO, add_generation_prompt=True)["input_ids"]
    )


def test_an_answer_is_the_continuation_of_the_prompt(engine):
    answer = engine.chat(HELLO, GREEDY)
    assert answer.text == engine.generate(engine.encode_chat(HELLO), GREEDY)[0].text
    assert answer.stats.generated_tokens == 12


def test_the_history_is_part_of_the_next_prompt(engine):
    first = engine.chat(HELLO, GREEDY)
    more = [*HELLO, {"role": "assistant", "content": first.text}, {"role": "user", "content": "and then?"}]
    assert first.text in engine.tokenizer.decode(engine.chat(more, GREEDY).prompt_token_ids)


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([], "at least one"),
        ("hello", "expected a list"),
        ([{"role": "user"}], "message 0"),
        ([{"role": "user", "content": 3}], "message 0"),
        ([*HELLO, {"role": "assistant", "content": "os"}], "Append the user's next message"),
    ],
)
def test_messages_that_cannot_be_answered_are_refused(engine, messages, said):
    with pytest.raises(InvalidInputError, match=said):
        engine.encode_chat(messages)


def test_a_template_is_a_program_before_a_conversation_waits_for_it(engine):
    _compiled.cache_clear()
    engine.prepare_chats()
    before = _compiled.cache_info().misses
    engine.encode_chat(HELLO)
    assert before == 1 == _compiled.cache_info().misses


def test_what_the_template_refuses_is_told_with_its_words(engine):
    with pytest.raises(IncompatibleError, match="no judges here"):
        engine.encode_chat([{"role": "judge", "content": "silence"}])


def test_a_model_without_a_template_is_refused_by_name(engine):
    plain = Engine.of(
        engine.target, drafter=None, tokenizer=AutoTokenizer.from_pretrained(str(pair.target_folder()))
    )
    with pytest.raises(IncompatibleError, match="no chat template"):
        plain.chat(HELLO)
    with pytest.raises(InvalidInputError, match="needs a tokenizer"):
        Engine.of(engine.target, drafter=None).chat(HELLO)


def test_a_chat_that_names_no_parameters_takes_those_of_chats(engine, monkeypatch):
    asked = []
    monkeypatch.setattr(
        engine, "submit", lambda prompt, params, *more: asked.append(params) or submit(prompt, params, *more)
    )
    submit = type(engine).submit.__get__(engine)
    engine.sampling_defaults = {"top_k": 5}
    try:
        engine.chat(HELLO)
        engine.generate(engine.encode_chat(HELLO))
    finally:
        engine.sampling_defaults = {}
    assert [(p.temperature, p.top_p, p.top_k) for p in asked] == [(0.7, 0.95, 5), (1.0, 1.0, 5)]


CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TRIMS = CHATML.replace("m.content", "m.content|trim")
BEGINNINGS = [
    "<",
    "e",
    "|",
    "a",
    "\n\nHi",
    "im_end",
    "user",
    " well, ",
    "Hi<|im_end|>\n",
    "assistant\n",
    "\ue000",
    "ends in blanks \n ",
]


@pytest.mark.parametrize("template", [CHATML, TRIMS], ids=["as it is", "trimmed"])
def test_the_beginning_of_an_answer_is_all_that_stands_behind_its_turn(engine, template):
    engine.tokenizer.chat_template = template
    try:
        for text in BEGINNINGS:
            ids = engine.encode_chat([*HELLO, {"role": "assistant", "content": text}], continued=True)
            before = engine.tokenizer.decode(engine.encode_chat(HELLO))
            assert engine.tokenizer.decode(ids) == before + (text.lstrip() if template is TRIMS else text), (
                text
            )
    finally:
        engine.tokenizer.chat_template = TEMPLATE


def test_a_template_that_drops_the_beginning_of_an_answer_is_refused_for_it(engine):
    engine.tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    )
    try:
        with pytest.raises(IncompatibleError, match="does not write the beginning of an answer"):
            engine.encode_chat([*HELLO, {"role": "assistant", "content": "import"}], continued=True)
    finally:
        engine.tokenizer.chat_template = TEMPLATE
