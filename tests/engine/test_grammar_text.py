"""What a grammar spells is text: ordinary tokens write it, never a control token, and it is in the output as it stands."""

import json
from functools import cache
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, normalizers

from polydraft import Engine, SamplingParams, StructuredOutputs
from polydraft.engine.grammar_tokenizer import EXACT_LENGTH, GrammarTokenizer
from polydraft.engine.structured import Grammars
from polydraft.models import load, pair

END = "<|endoftext|>"
NAMES = [END, "<|fim_prefix|>", "</tool_call>", "[NAME]"]
"""Of added tokens; the last two are none of the special ones, and the last is a text like any other."""


def forms(name):
    """Forms that have one text, which spells a name, and that text."""
    named = {"properties": {name: {"const": f"q{name}"}}, "required": [name], "additionalProperties": False}
    yield StructuredOutputs(choice=[f"a {name} b"]), f"a {name} b"
    yield StructuredOutputs(choice=[name]), name
    yield StructuredOutputs(regex="x{2}" + "".join(f"\\x{{{ord(c):x}}}" for c in name) + "y"), f"xx{name}y"
    yield StructuredOutputs(json={"type": "object"} | named), json.dumps({name: f"q{name}"})
    yield StructuredOutputs(grammar=f'start: "a" T\nT: {json.dumps(name + "!")}'), f"a{name}!"
    inline = {"const": [name], "x-guidance": {"whitespace_flexible": False}}
    yield StructuredOutputs(grammar=f"start: %json {json.dumps(inline)}"), json.dumps([name])


@cache
def engine(drafter):
    return Engine.embedded(device="cpu", drafter=drafter, depth=4, max_num_seqs=2)


@pytest.mark.parametrize("drafter", [None, "ngram", "model"])
def test_outputs_that_spell_the_end_of_text_neither_stop_nor_fail(drafter):
    for form, text in forms(END):
        params = SamplingParams(n=2, seed=1, max_tokens=60, structured_outputs=form)
        samples = engine(drafter).generate(f"{text}\n{text}\n", params)[0].samples
        assert [(s.text, s.finish_reason) for s in samples] == [(text, "stop")] * 2
        assert all(0 not in s.token_ids[:-1] for s in samples)


def tokenizer_with(normalizer=None):
    """The embedded pair's, with more added tokens."""
    made: Any = load.load_tokenizer(str(pair.target_folder()))
    made.backend_tokenizer.add_tokens([AddedToken(name, special=name.startswith("<|")) for name in NAMES])
    made.backend_tokenizer.normalizer = normalizer
    return made


def written(tokenizer, form, choose=min):
    """Ids of an output, by a choice of what may come next."""
    grammar = Grammars(tokenizer, len(tokenizer.get_vocab()), [0]).compiled(form).constraint(0)
    output = list[int]()
    while 0 not in output:
        allowed = set(np.flatnonzero(grammar.allowed(output, [0], [-1])[0]).tolist())
        output.append(choose(allowed - {0} or allowed))
    return output[:-1]


def test_ids_behind_those_that_may_be_written_are_never_written():
    tokenizer = tokenizer_with()
    for vocab_size in (2000, 2048):  # the added ones begin at 2048
        grammar = (
            Grammars(tokenizer, vocab_size, [0])
            .compiled(StructuredOutputs(choice=["a[NAME] b"]))
            .constraint(0)
        )
        output = list[int]()
        while 0 not in output:
            (rows,) = grammar.allowed(output, [0], [-1])
            assert len(rows) == vocab_size
            output.append(int(np.flatnonzero(rows)[-1]))
        assert tokenizer.decode(output[:-1]) == "a[NAME] b"


@pytest.mark.parametrize("choose", [min, max])
@pytest.mark.parametrize("name", NAMES)
def test_texts_that_spell_an_added_token_are_written_without_it(name, choose):
    tokenizer = tokenizer_with()
    added = set(tokenizer.backend_tokenizer.get_added_tokens_decoder()) - {0}
    for form, text in forms(name):
        ids = written(tokenizer, form, choose)
        assert tokenizer.decode(ids, skip_special_tokens=True) == text and (
            name == "[NAME]" or added.isdisjoint(ids)
        )


def test_texts_that_a_tokenizer_would_write_otherwise_stay_as_they_are():
    tokenizer = tokenizer_with(normalizers.NFC())
    text = "cafe\u0301 \u212b"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) != text
    assert tokenizer.decode(written(tokenizer, StructuredOutputs(choice=[text]))) == text


def test_a_grammar_that_names_a_token_gets_it():
    tokenizer = tokenizer_with()
    ids = [tokenizer.get_vocab()[name] for name in NAMES[1:3]]
    for terms in (" ".join(NAMES[1:3]), f"<[{ids[0]}]> <[{ids[1]}]>"):
        assert written(tokenizer, StructuredOutputs(grammar=f'start: {terms} "x"'))[:2] == ids


def test_a_long_text_is_written_as_the_tokenizer_does_though_little_of_it_is_read_at_each_token():
    tokenizer = tokenizer_with()
    text = json.dumps({f"name {i}": [f"value {i}", i] for i in range(120)})
    assert written(tokenizer, StructuredOutputs(choice=[text])) == tokenizer(text)["input_ids"]
    encoded = list[int]()
    spelling: Any = GrammarTokenizer(tokenizer.backend_tokenizer, len(tokenizer.get_vocab()), [0])
    whole = spelling._whole
    spelling._whole = Recorder(spelling._whole, encoded)
    assert b"".join(whole.decode_bytes([token]) for token in spelling(text * 20)).decode() == text * 20
    assert sum(encoded) == EXACT_LENGTH


class Recorder:
    """A tokenizer that records how long the texts are that it encodes."""

    def __init__(self, whole, lengths):
        self.whole = whole
        self.lengths = lengths

    def tokenize_str(self, text):
        self.lengths.append(len(text))
        return self.whole.tokenize_str(text)

    def greedy_tokenize(self, text):
        return self.whole.greedy_tokenize(text)
