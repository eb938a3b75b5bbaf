"""Offsets of tokens are places in the text of a choice, whole and streamed alike."""

import numpy as np
import pytest

from polydraft import SamplingParams
from polydraft.server.choices import Completion
from tests.server.conftest import small_engine


class Scripted:
    """A constraint that allows one text alone, and its own source."""

    def __init__(self, prompt_length, ids, vocab_size):
        self.prompt_length = prompt_length
        self.ids = ids
        self.vocab_size = vocab_size

    def constraint(self, prompt_length):
        return self

    def allowed(self, context, tokens, parents):
        rows = np.zeros((len(tokens), self.vocab_size), bool)
        depth = [len(context) - self.prompt_length]
        for node, parent in enumerate(parents):
            depth += [depth[parent] + 1] * (node > 0)
            rows[node, self.ids[min(depth[node], len(self.ids) - 1)]] = True
        return rows


def answers(engine, prompt, ids, stop=(), echo=""):
    """A text of these ids as it is told: whole and in chunks, with the offsets of each token."""
    source = Scripted(len(prompt), ids, engine.target.vocab_size)
    params = SamplingParams(
        max_tokens=len(ids), stop=stop, logprobs=1, ignore_eos=True, structured_outputs=source
    )
    told = []
    outputs = list(engine.stream(prompt, params))
    for parts in (
        [whole(engine, prompt, params, echo, outputs)],
        chunks(engine, prompt, params, echo, outputs),
    ):
        text = "".join(part["text"] for part in parts)
        told.append((text, [at for part in parts for at in part["logprobs"]["text_offset"]]))
    return told


def whole(engine, prompt, params, echo, outputs):
    answer = Completion(engine.tokenizer, "m", [prompt], params, False, [echo] if echo else ())
    return answer.whole((0, output) for output in outputs)["choices"][0]


def chunks(engine, prompt, params, echo, outputs):
    answer = Completion(engine.tokenizer, "m", [prompt], params, False, [echo] if echo else ())
    return [chunk["choices"][0] for output in outputs for chunk in answer.chunks(0, output)]


@pytest.fixture(scope="module")
def engine():
    return small_engine()


def test_offsets_count_characters_behind_many_bytes_and_hidden_tokens(engine):
    parts = [engine.encode(part) for part in ("é", "🙂", "<|endoftext|>", "a", "b")]
    prompt = engine.encode("x")
    ids = [i for part in parts for i in part]
    expected = [1] * len(parts[0]) + [2] * len(parts[1]) + [3, 3, 4]
    assert len(expected) == len(ids) > 6
    for told in answers(engine, prompt, ids, echo="x"):
        assert told == ("xé🙂ab", expected)


def test_offsets_do_not_depend_on_text_that_waits_for_a_stop_string(engine):
    prompt = engine.encode("x")
    ids = [i for letter in "abcabd!" for i in engine.encode(letter)]
    for stop, text in (("abe", "abcabd!"), ("bd", "abca")):
        assert answers(engine, prompt, ids, stop=stop) == [(text, [*range(7)][: len(text) + 2])] * 2


def test_what_a_prompt_begins_is_told_by_the_prompt_alone(engine):
    ids = engine.encode("say 🙂 ok")
    cut = len(engine.encode("say 🙂")) - 1
    echo = engine.tokenizer.decode(ids[:cut])
    assert echo == "say \ufffd"
    for text, offsets in answers(engine, ids[:cut], ids[cut:], echo=echo):
        assert (text, offsets[:2]) == (f"{echo} ok", [len(echo)] * 2)
