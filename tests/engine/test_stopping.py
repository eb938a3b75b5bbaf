"""Text comes out only when it is certain, and nothing comes out behind a stop."""

import random
from dataclasses import replace

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from polydraft.core import Request, SamplingParams
from polydraft.core.thinking import Thinking
from polydraft.engine.detokenizer import Detokenizer, _Windows
from polydraft.engine.sequence import Sample, Sequence
from polydraft.engine.stopping import Ending, Stopper, _held_back

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


@pytest.fixture(scope="module")
def tokenizer():
    """One token for each byte: every character beyond ASCII is split."""
    backend = Tokenizer(models.BPE({c: i for i, c in enumerate(ALPHABET)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def stopper(tokenizer, prompt="x", **options):
    options = {"stop_ids": frozenset(), "stop_strings": (), "max_tokens": 99, **options}
    return Stopper(tokenizer, tokenizer.encode(prompt), **options)


def pieces(s, tokenizer, text):
    out = []
    for token in tokenizer.encode(text):
        s.push(token)
        out.append(s.take())
        if s.stop:
            break
    return out


def test_split_characters_wait_for_all_their_bytes(tokenizer):
    found = pieces(stopper(tokenizer), tokenizer, " naïve 🙂 end")
    assert "".join(found) == " naïve 🙂 end"
    assert not any("\ufffd" in piece for piece in found)


def test_a_leading_space_is_kept(tokenizer):
    assert pieces(stopper(tokenizer), tokenizer, " a")[0] == " "


def test_the_slow_way_gives_the_same_text(tokenizer):
    prompt = tokenizer.encode("x = ")
    text = tokenizer.encode("'ü' # 🙂\n  y")
    slow = _Windows(tokenizer, prompt).push
    fast = Detokenizer(tokenizer, prompt, skip_special_tokens=False)
    assert "".join(map(slow, text)) == "".join(map(fast.push, text)) == "'ü' # 🙂\n  y"


def test_text_ends_before_a_stop_string_and_none_of_it_is_given_out(tokenizer):
    s = stopper(tokenizer, stop_strings=("\n\n", "END"))
    found = pieces(s, tokenizer, "one\ntwo EEND three")
    assert "".join(found) == s.text == "one\ntwo E"
    assert s.stop == Ending("stop", "END")


def test_the_earliest_of_two_stop_strings_wins(tokenizer):
    s = stopper(tokenizer, stop_strings=("bc", "abcd"))
    pieces(s, tokenizer, "zabcd")
    assert (s.text, s.stop.stop_reason) == ("za", "bc")


def test_stop_ids_are_ignored_before_min_tokens(tokenizer):
    a = tokenizer.encode("a")[0]
    s = stopper(tokenizer, stop_ids=frozenset({a}), min_tokens=2)
    assert pieces(s, tokenizer, "aaaa") == ["a", "a", ""]
    assert s.stop == Ending("stop", a)


def test_length_ends_a_text(tokenizer):
    s = stopper(tokenizer, max_tokens=3)
    pieces(s, tokenizer, "abcdef")
    assert (s.text, s.stop) == ("abc", Ending("length"))


def test_a_text_that_is_ended_from_outside_has_that_reason_whatever_its_last_bytes_spell(tokenizer):
    s = stopper(tokenizer, stop_strings=("\ufffd",))
    s.push(tokenizer.encode("é")[0])
    s.end("abort")
    assert (s.text, s.stop) == ("", Ending("abort"))


def test_a_sample_says_last_of_all_that_it_has_finished(tokenizer):
    order = []

    class Watched(Sample):
        def __setattr__(self, name, value):
            order.append(name)
            super().__setattr__(name, value)

    request = Request("r", (1,), SamplingParams(), 0)
    sequence = Sequence(request, stopper(tokenizer, stop_strings=("b",)), Watched(0, 0), [1])
    order.clear()
    pieces(sequence.stopper, tokenizer, "ab")
    sequence.publish()
    assert (sequence.sample.text, sequence.sample.stop_reason, order[-1]) == ("a", "b", "finish_reason")


@pytest.mark.parametrize(("text", "held"), [("ab\n", 1), ("ab\n\n", 2), ("ab", 0), ("", 0)])
def test_only_a_possible_beginning_of_a_stop_string_is_held_back(text, held):
    assert _held_back(text, ["\n\n\n"]) == held


@pytest.fixture(scope="module")
def syllables():
    """Tokens of several characters over a, b and c, one of two bytes that are half a character each."""
    pieces = ["a", "b", "c", "ab", "ba", "bca", "\u00c3", "\u00a9"]  # bytes C3 A9 are one letter
    backend = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, pieces[0]))
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend), pieces


def test_the_pieces_that_are_given_out_are_the_final_text_whatever_the_stops(syllables):
    tokenizer, tokens = syllables
    draw = random.Random(0)
    for _ in range(1500):
        stops = tuple("".join(draw.choices("abc", k=draw.randint(1, 5))) for _ in range(draw.randint(1, 3)))
        ids = draw.choices(range(len(tokens)), k=12)
        least, most = sorted(draw.choices(range(1, 13), k=2))
        s = stopper(tokenizer, stop_strings=stops, min_tokens=least - 1, max_tokens=most)
        found = []
        while not s.stop:  # rounds of several tokens, as the engine emits them; one may be aborted
            for _ in ids[: draw.randint(1, 4)]:
                if not s.stop:
                    s.push(ids.pop(0))
            if draw.random() < 0.05 and not s.stop:
                s.end("abort")
            found.append(s.take())
        assert "".join(found) == s.text, (stops, least, most)
        assert s.stop.stop_reason is None or s.stop.stop_reason in stops


def test_a_stop_string_that_was_complete_before_min_tokens_ends_nothing(tokenizer):
    s = stopper(tokenizer, stop_strings=("ab", "xyzxyz"), min_tokens=3)
    assert pieces(s, tokenizer, "abcdab") == ["", "ab", "c", "d", "", ""]
    assert s.text == "abcd"


@pytest.fixture(scope="module")
def turns(tokenizer):
    """Bytes and special tokens that begin and end turns; texts are given with them."""
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend)


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize(
    ("stop", "text"),
    [
        ("<|im_start|>", "abc "),
        ("start|>u", "abc "),
        ("c <|im_start|>", "ab"),
        ("<|im_start|>user", "abc "),
        ("bc <|im_start|>us", "a"),
    ],
)
def test_a_stop_string_with_a_special_token_fires_whether_it_is_shown_or_not(turns, stop, text, skip):
    s = stopper(turns, stop_strings=("zzz", stop), skip_special_tokens=skip)
    found = pieces(s, turns, "abc <|im_start|>user")
    whole = text + ("" if skip or not stop.startswith("start") else "<|im_")
    assert ("".join(found), s.text, s.stop) == (whole, whole, Ending("stop", stop))


def test_text_that_spells_a_special_token_is_shown_and_searched(turns, tokenizer):
    spelt = "a <|im_start|>"
    s = stopper(turns)
    assert "".join(pieces(s, tokenizer, spelt)) == spelt  # ids of bytes
    s = stopper(turns, stop_strings=("<|im_start|>",))
    assert ("".join(pieces(s, tokenizer, spelt)), s.stop.stop_reason) == ("a ", "<|im_start|>")


def test_a_stop_string_may_end_with_the_token_that_ends_the_text(turns):
    end = turns.convert_tokens_to_ids("<|im_end|>")
    s = stopper(turns, stop_strings=("\n<|im_end|>",), stop_ids=frozenset({end}))
    assert ("".join(pieces(s, turns, "a\n<|im_end|>b")), s.stop) == ("a", Ending("stop", "\n<|im_end|>"))
    s = stopper(turns, stop_strings=("\n\n<|im_end|>",), stop_ids=frozenset({end}))
    assert ("".join(pieces(s, turns, "a\n<|im_end|>b")), s.stop) == ("a\n", Ending("stop", end))


def test_text_before_a_hidden_token_that_stops_nothing_is_given_out(turns):
    s = stopper(turns, stop_strings=("b<|im_start|>user",))
    assert pieces(s, turns, "ab<|im_start|>me") == ["a", "", "", "bm", "e"]


def test_an_incomplete_character_at_the_end_is_given_out_however_a_text_ends(tokenizer):
    broken = tokenizer.encode("a🙂")[:-1]
    end = tokenizer.encode("!")[0]
    for ids, options in (
        (broken, {"max_tokens": 4}),
        ([*broken, end], {"stop_ids": frozenset({end})}),
        (broken, {}),
    ):
        s = stopper(tokenizer, **options)
        found = ""
        for token in ids:
            s.push(token)
            found += s.take()
        if s.stop is None:
            s.end("abort")
            found += s.take()
        assert found == s.text == "a\ufffd"


THINKING = Thinking("<t>", "</t>")


@pytest.mark.parametrize("size", [1, 2, 5, 99])
@pytest.mark.parametrize(
    ("text", "opened", "stops", "shown"),
    [
        ("<t>a END b</t>\n\nc END d", False, ("END", "\n"), "<t>a END b</t>\n\nc "),
        ("a END b</t>c END d", True, ("END",), "a END b</t>c "),
        ("a END b", False, ("END",), "a "),
        ("\n<t", False, ("<",), "\n"),
        ("<x>", False, ("<",), ""),
        ("<t>a</t>b<t>", False, ("<t>",), "<t>a</t>b"),
        ("<t>a</t> \n b", False, ("\n",), "<t>a</t> \n b"),
        ("a b", True, ("b",), "a b"),
    ],
)
def test_stops_are_looked_for_behind_thoughts(tokenizer, text, opened, stops, shown, size):
    s = stopper(
        tokenizer, stop_strings=stops, thinking=replace(THINKING, opened=opened), max_tokens=len(text)
    )
    out = ""
    for number, token in enumerate(tokenizer.encode(text), 1):
        s.push(token)
        out += s.take() if number % size == 0 or s.stop else ""
        if s.stop:
            break
    assert out == s.text == shown


def test_stop_ids_of_a_request_end_its_answer_and_those_of_the_model_its_thoughts_too(tokenizer):
    (wanted,) = tokenizer.encode("!")
    (end,) = tokenizer.encode("#")
    for text, length in (("a!b</t>c!", 9), ("a#", 2), ("a</t>#", 6)):
        s = stopper(
            tokenizer,
            thinking=replace(THINKING, opened=True),
            stop_ids=frozenset([end]),
            answer_stop_ids=frozenset([wanted]),
        )
        pieces(s, tokenizer, text)
        assert s.stop is not None and s.stop.stop_reason in (wanted, end) and s._num_tokens == length


def test_what_ends_a_text_is_part_of_it_where_that_is_asked_for(tokenizer):
    end = tokenizer.encode("!")[0]
    for options, text, whole in (
        ({"stop_strings": ("cd",)}, "abcdef", "abcd"),
        ({"stop_strings": ("c", "bcd")}, "abcdef", "abc"),
        ({"stop_ids": frozenset({end})}, "ab!c", "ab!"),
        ({"stop_strings": ("b!",), "stop_ids": frozenset({end})}, "ab!c", "ab!"),
    ):
        read = stopper(tokenizer, include_stop=True, **options)
        assert "".join(pieces(read, tokenizer, text)) == read.text == whole
    hidden = stopper(tokenizer, stop_strings=("cd",))
    assert "".join(pieces(hidden, tokenizer, "abcdef")) == "ab"
