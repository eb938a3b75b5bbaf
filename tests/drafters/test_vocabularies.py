"""Drafts from a model with another tokenizer: what is common, what is odd, and the distribution of the output."""

import json
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chi2
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from polydraft import Draft, DraftSampling, SamplingParams, TokenTree, TreeShape, verify
from polydraft.drafters.base import Parts
from polydraft.drafters.model.slem import SlemDrafter
from polydraft.drafters.model.tli import TliDrafter, TranslatedModel
from polydraft.engine.api import Engine
from polydraft.errors import IncompatibleError, InvalidInputError
from polydraft.models.tokens.vocabulary import Translation, token_bytes
from polydraft.models.torch.hf import HFTarget
from tests.engine.tables import TableModel, distribution
from tests.models.tree_rounds import outcome, small_model
from tests.support.closeness import assert_close
from tests.support.tiny import llama_config

TEXT = [
    "def add(self, first, second): return first + second\n",
    "class Stack: a stack of values, größer als zuvor, naïve café\n",
    "for value in values: print(value, 'ß', '語', '🙂')\n",
    "import os\nimport sys\nreturn self.values[first:second]\n",
] * 4


def byte_level() -> PreTrainedTokenizerFast:
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    inner.train_from_iterator(
        TEXT,
        trainers.BpeTrainer(
            vocab_size=330,
            special_tokens=["<|end|>", "<|odd|>"],
            initial_alphabet=alphabet,
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<|end|>", additional_special_tokens=["<|odd|>"]
    )


def with_spaces() -> PreTrainedTokenizerFast:
    inner = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    inner.normalizer = normalizers.Replace(" ", "▁")
    inner.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    special = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    ascii_only = [line.encode("ascii", "ignore").decode().replace(" ", "▁") for line in TEXT]
    inner.train_from_iterator(
        ascii_only, trainers.BpeTrainer(vocab_size=380, special_tokens=special[:3], show_progress=False)
    )
    state = json.loads(inner.to_str())
    vocab = state["model"]["vocab"]
    for token in special[3:]:
        vocab[token] = len(vocab)
    made = Tokenizer.from_str(json.dumps(state))
    return PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


TARGET: Any = byte_level()
DRAFT: Any = with_spaces()


def llama(tokenizer, seed=0):
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}
    config = llama_config(
        vocab_size=len(tokenizer) + 3, num_hidden_layers=1, max_position_embeddings=512, **ends
    )
    return HFTarget(small_model(config, seed), max_num_seqs=4)


@pytest.fixture(scope="module")
def translation():
    return Translation.of(TARGET, DRAFT, len(TARGET), len(DRAFT))


# What is common


def test_common_tokens_stand_for_the_same_bytes(translation):
    ours = token_bytes(TARGET)
    theirs = token_bytes(DRAFT)
    same = [
        (a, b)
        for a, b in zip(translation.ours.tolist(), translation.theirs.tolist(), strict=True)
        if a in ours
    ]
    assert len(same) > 60
    assert all(ours[a] == theirs[b] for a, b in same)
    assert (
        len(set(translation.ours.tolist())) == len(set(translation.theirs.tolist())) == len(translation.ours)
    )


def test_tokens_with_a_leading_space_meet_in_both_spellings(translation):
    words = {key for i, key in token_bytes(TARGET).items() if i in set(translation.ours.tolist())}
    assert any(isinstance(key, bytes) and key.startswith(b" ") and len(key) > 2 for key in words)


def test_byte_fragments_and_end_of_text_are_common_and_other_special_tokens_are_not(translation):
    pairs = dict(zip(translation.ours.tolist(), translation.theirs.tolist(), strict=True))
    fragment = next(i for i, key in token_bytes(TARGET).items() if key == b"\xc3")
    assert pairs[fragment] == DRAFT.convert_tokens_to_ids("<0xC3>")
    assert pairs[TARGET.eos_token_id] == DRAFT.eos_token_id
    assert TARGET.convert_tokens_to_ids("<|odd|>") not in pairs
    assert translation.pieces[TARGET.convert_tokens_to_ids("<|odd|>")] == (DRAFT.unk_token_id,)


@pytest.mark.parametrize("text", [TEXT[1], TEXT[2], " a  b\n\n", "語🙂"])
def test_a_text_expands_to_the_same_text(translation, text):
    ids = TARGET(text)["input_ids"]
    assert DRAFT.decode(translation.expand(ids), skip_special_tokens=True) == text


def test_every_token_has_at_least_one_piece_within_the_model(translation):
    assert all(pieces and all(0 <= p < len(DRAFT) for p in pieces) for pieces in translation.pieces)


def words(text: str) -> PreTrainedTokenizerFast:
    inner = Tokenizer(models.WordLevel({w: i for i, w in enumerate(text)}, unk_token=text[0]))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner)


def test_an_empty_intersection_is_refused():
    with pytest.raises(IncompatibleError, match=r"no token in common.*slem"):
        Translation.of(words("abc"), words("xyz"), 3, 3)


# The translated model


def test_translated_logits_after_random_trees_equal_a_fresh_pass(translation):
    inner = llama(DRAFT)
    model = TranslatedModel(inner, translation, len(TARGET))
    rng = np.random.default_rng(0)
    text = TARGET("class Stack: größer 語 <|odd|> values")["input_ids"]
    model.prefill([1], [text[:-1]])
    common = translation.ours
    for _ in range(12):
        drafted = [int(t) for t in rng.choice(common, 5)]
        tree = TokenTree(np.array([[text[-1], *drafted]]), np.array([[-1, 0, 0, 1, 2, 3]]))
        path = [[], [1], [2, 4], [1, 3, 5]][rng.integers(4)]
        model.score([1], tree)
        scores = model.score([1], tree)  # asked again: the same
        new = [drafted[n - 1] for n in path]
        with torch.no_grad():
            fresh = inner.model(torch.tensor([translation.expand([*text, *new])])).logits[0, -1].numpy()
        row = scores.logits[0, path[-1] if path else 0]
        assert_close(row[common], fresh[translation.theirs])
        assert np.isneginf(row).sum() == len(TARGET) - len(common)
        extra = int(rng.integers(len(TARGET)))  # any token of ours, common or not
        model.commit([1], outcome([path], [extra]))
        text += [*new, extra]
        assert model.lengths[1] == len(text) - 1
        assert inner.lengths[1] == len(translation.expand(text[:-1]))


# The distribution


def first_token_distribution(p, q, common, *, wrong):
    """Distribution of the first token for a draft of one token drawn from q (their ids = ours here), by enumeration."""
    found = np.zeros_like(p)
    restricted = np.where(common, q, 0.0)
    restricted /= restricted.sum()
    drawn = q if wrong else restricted
    rows = np.stack([p, p])[None]
    for x in range(len(p)):
        if not common[x]:
            found += drawn[x] * p  # wrong: the draw is dropped and nothing is drafted
            continue
        draft = Draft(
            TokenTree.chain(np.array([[0, x]])),
            DraftSampling.IID,
            TreeShape.CHAIN,
            drawn[None, None],
            np.array([[-1, 0]]),
        )
        verdict = verify("speculative", draft, rows)
        found[x] += drawn[x] * verdict.stop[0, 1]
        found += drawn[x] * verdict.stop[0, 0] * verdict.after(np.array([0]))[0]
    return found


@pytest.mark.parametrize("wrong", [False, True], ids=["restricted and renormalised", "dropped outside"])
def test_only_the_restricted_and_renormalised_row_keeps_the_distribution(wrong):
    p = np.array([0.2, 0.5, 0.3, 0.0], dtype=np.float64)
    q = np.array([0.45, 0.1, 0.2, 0.25], dtype=np.float64)
    error = (
        np.abs(first_token_distribution(p, q, np.array([True, True, True, False]), wrong=wrong) - p).sum() / 2
    )
    assert (error > 0.02) if wrong else (error < 1e-12)


OURS = words("abcdefg")
THEIRS = words("xgfedch")


@pytest.mark.parametrize("drafter", ["tli", "tli:chain", "tli:without_replacement", "tli:coupled", "slem"])
def test_texts_follow_the_target_over_rounds(drafter):
    target = TableModel(7, 0, max_num_seqs=64)
    small = TableModel(7, 1, max_num_seqs=64)
    engine = Engine.of(
        target,
        tokenizer=OURS,
        draft_model=small,
        draft_tokenizer=THEIRS,
        drafter=drafter,
        depth=2,
        num_paths=2 if drafter == "tli" else 1,
    )
    params = SamplingParams(max_tokens=3, n=1000, seed=5, ignore_eos=True)
    (result,) = engine.generate([[3, 2]], params)
    codes = np.array([np.dot(s.token_ids, [49, 7, 1]) for s in result.samples])
    expected = distribution(target, [3, 2], 3).ravel() * len(codes)
    seen = np.bincount(codes, minlength=343).astype(float)
    big = expected >= 5
    seen = np.append(seen[big], seen[~big].sum())
    expected = np.append(expected[big], expected[~big].sum())
    assert chi2.sf(((seen - expected) ** 2 / expected).sum(), len(seen) - 1) > 1e-3
    assert sum(s.stats.drafted_tokens for s in result.samples) > 0
    assert all(s.stats.drafter_error is None for s in result.samples)


@pytest.mark.parametrize("drafter", ["tli", "slem"])
def test_greedy_texts_are_those_of_plain_decoding(drafter):
    prompts = ["class Stack: größer 語", "import os\nimport ", "naïve 🙂 café", "x"]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    target = llama(TARGET)
    target.vocab_size = len(TARGET)
    small = llama(DRAFT, 1)
    small.vocab_size = len(DRAFT)
    plain = Engine.of(target, tokenizer=TARGET, drafter=None).generate(prompts, params)
    engine = Engine.of(
        target, tokenizer=TARGET, draft_model=small, draft_tokenizer=DRAFT, drafter=drafter, depth=4
    )
    for expected, found in zip(plain, engine.generate(prompts, params), strict=True):
        assert expected.token_ids == found.token_ids
        assert found.stats.drafter_error is None
        assert found.stats.drafted_tokens > 0


def test_a_draft_that_says_the_same_text_in_other_tokens_is_accepted():
    """The target copies its prompt's period; the draft is a table that knows the same text."""
    drafter = SlemDrafter(llama(DRAFT), DRAFT, TARGET)
    text = "return first + second"
    for cut in range(4, len(text) - 4):
        ids = TARGET(text[:cut])["input_ids"]
        rest = DRAFT(text[cut:], add_special_tokens=False)["input_ids"]
        drafted = drafter._translate(ids, rest)
        assert TARGET.decode([*ids, *drafted]) == text


def test_incomplete_characters_are_held_back_on_both_sides():
    drafter = SlemDrafter(llama(DRAFT), DRAFT, TARGET)
    ids = TARGET("Ж")["input_ids"]
    assert len(ids) > 1
    assert drafter._text(TARGET("a Ж")["input_ids"]) == "a Ж"
    assert drafter._text([*TARGET("a ")["input_ids"], *ids[:1]]) == "a "
    assert drafter._translate(TARGET("a")["input_ids"], [DRAFT.convert_tokens_to_ids("<0xE8>")]) == []


def test_the_drafts_end_of_text_is_the_targets():
    drafter = SlemDrafter(llama(DRAFT), DRAFT, TARGET)
    assert drafter._translate(TARGET("a")["input_ids"], [DRAFT.eos_token_id])[-1] == TARGET.eos_token_id


@pytest.mark.parametrize("drafter", [TliDrafter, SlemDrafter])
def test_parts_that_are_missing_are_named(drafter):
    with pytest.raises(InvalidInputError, match="a draft model and a draft_tokenizer"):
        drafter.build(Parts(TableModel(), None, OURS, ()))


@pytest.mark.filterwarnings("error::polydraft.errors.DrafterWarning")
def test_folders_with_two_tokenizers_are_joined_by_name(tmp_path):
    folders = []
    for name, tokenizer in (("target", TARGET), ("draft", DRAFT)):
        llama(tokenizer).model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
        folders.append(str(tmp_path / name))
    with pytest.raises(IncompatibleError, match=r"different vocabularies.*drafter='tli'"):
        Engine.from_pretrained(folders[0], draft_model=folders[1])
    texts = set()
    for drafter in (None, "tli", "slem"):
        draft = {} if drafter is None else {"draft_model": folders[1]}
        engine = Engine.from_pretrained(folders[0], drafter=drafter, **draft)
        texts.add(engine.generate("import os", SamplingParams(temperature=0, max_tokens=12))[0].text)
    assert len(texts) == 1


def test_both_are_listed_with_their_paper():
    assert [m.arxiv for m in (*TliDrafter.methods, *SlemDrafter.methods)] == ["2502.05202"] * 2
