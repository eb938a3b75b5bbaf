"""Models in the cache that transformers makes: tokens one by one, drafts on a copy, and what says why there are none."""

import inspect

import numpy as np
import pytest
import torch
import transformers as hf
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from polydraft.core import Outcome, SamplingParams, TokenTree
from polydraft.core.geometry import pad
from polydraft.engine.api import Engine
from polydraft.errors import CapacityError, IncompatibleError, InvalidInputError
from polydraft.models.compiled.model import CompiledModel
from polydraft.models.load import load_model
from polydraft.models.torch.own_cache import PENDING, UNLIMITED, OwnCacheTarget
from tests.models.small_types import small_config
from tests.models.tree_rounds import V, fresh, outcome, small_model
from tests.support.closeness import assert_close
from tests.support.tiny import SIZES

CONFIGS = {
    "mamba": hf.MambaConfig(vocab_size=V, hidden_size=32, num_hidden_layers=2, state_size=4),
    "mistral_window": hf.MistralConfig(
        **SIZES, num_key_value_heads=2, max_position_embeddings=64, sliding_window=8
    ),
    "qwen3_next": hf.Qwen3NextConfig(
        **SIZES | {"num_hidden_layers": 4},
        head_dim=8,
        max_position_embeddings=64,
        num_key_value_heads=2,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=0,
        mlp_only_layers=[0, 1, 2, 3],
    ),
}


def save_words(folder):
    words = Tokenizer(models.WordLevel({str(i): i for i in range(V)}, unk_token="0"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="0").save_pretrained(folder)


def nothing(count):
    return Outcome(
        torch.zeros(count, 0, dtype=torch.int64),
        torch.zeros(count, dtype=torch.int64),
        torch.zeros(count).long(),
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_of_plain_decoding_equal_fresh_passes_also_after_forgetting(name):
    model = small_model(CONFIGS[name])
    target = OwnCacheTarget(model, max_num_seqs=2)
    texts = {1: [5, 9, 2, 7, 7, 1, 3, 8, 4, 6], 0: [3, 1]}
    target.prefill([1, 0], [texts[1], texts[0]])
    for root in (11, 4, 17):
        logits = target.score([0, 1], TokenTree.roots(np.array([root, root + 1]))).logits
        again = target.score([0, 1], TokenTree.roots(np.array([root, root + 1]))).logits
        target.commit([0, 1], nothing(2))
        texts[0].append(root)
        texts[1].append(root + 1)
        assert np.array_equal(logits, again)
        for slot in (0, 1):
            assert_close(logits[slot, 0], fresh(model, texts[slot])[-1])
    target.cut(1, int(target.lengths[1]) - 2)
    logits = target.score([1], TokenTree.roots(np.array([9]))).logits[0, 0]
    assert_close(logits, fresh(model, [*texts[1][:-2], 9])[-1])


@pytest.mark.parametrize("name", CONFIGS)
def test_the_engine_without_drafter_gives_the_text_of_transformers(name):
    model = small_model(CONFIGS[name])
    engine = Engine.of(OwnCacheTarget(model, max_num_seqs=2), drafter=None, eos_token_ids=())
    prompts = [[5, 9, 2], [7, 7, 1, 3, 8, 4, 6, 2, 2, 9, 11]]
    for prompt, result in zip(
        prompts, engine.generate(prompts, SamplingParams(temperature=0, max_tokens=12)), strict=True
    ):
        text = list(prompt)
        for token in result.token_ids:
            logits = fresh(model, text)[-1]
            assert logits.max() - logits[token] < 1e-3
            text.append(token)
        assert len(result.token_ids) == 12


def test_a_folder_of_a_type_that_takes_no_drafts_is_decoded_plainly_unless_a_drafter_is_named(tmp_path):
    small_model(CONFIGS["mamba"]).save_pretrained(tmp_path)
    save_words(tmp_path)
    with pytest.warns(
        UserWarning,
        match=r"decoded plainly, without drafts: in transformers, Mamba.*several tokens.*others are compiled",
    ):
        engine = Engine.from_pretrained(str(tmp_path), draft_model=str(tmp_path))
    assert engine.menu.default.drafter is None
    assert engine.target.max_model_len == UNLIMITED
    with pytest.raises(
        IncompatibleError, match=r"drafter='ngram' was given.*takes no drafts.*Leave the drafter out"
    ):
        Engine.from_pretrained(str(tmp_path), drafter="ngram")


def test_a_model_with_windows_is_compiled_at_any_length(tmp_path):
    small_model(CONFIGS["mistral_window"]).save_pretrained(tmp_path)
    assert isinstance(load_model(str(tmp_path)), CompiledModel)


def test_accepted_tokens_are_read_again_until_a_whole_path_is_accepted():
    target = OwnCacheTarget(small_model(small_config("qwen3_5_text")), max_model_len=200, max_num_seqs=1)
    text = [5, 9, 2, 7]
    target.prefill([0], [text[:-1]])
    for step in range(PENDING):  # the first draft is accepted, its child is not
        scores = target.score([0], TokenTree.chain(np.array([[text[-1], 8, 3]])))
        assert_close(scores.logits[0, 1], fresh(target.model, [*text, 8])[-1])
        target.commit([0], outcome([[1]], [step]))
        text += [8, step]
    assert len(target._states[0].token_ids) == 3 + 2 * (PENDING // 2 + 1)
    target.score([0], TokenTree.chain(np.array([[text[-1], 8, 3]])))
    target.commit([0], outcome([[1, 2]], [4]))
    assert target._states[0].token_ids == [*text, 8, 3]


def test_a_model_whose_cache_gives_other_logits_reads_its_text_again():
    model = small_model(small_config("mistral"))
    own_forward = model.forward

    def forgetful(*tokens, past_key_values=None, **options):
        return own_forward(*tokens, **options)

    forgetful.__signature__ = inspect.signature(own_forward)
    model.forward = forgetful
    target = OwnCacheTarget(model, max_model_len=64, max_num_seqs=1)
    assert target.reads_again
    target.prefill([0], [[5, 9, 2]])
    scores = target.score([0], pad([([7, 1, 2, 4], [-1, 0, 0, 1])]))
    assert_close(scores.logits[0, [0, 1, 3]], fresh(model, [5, 9, 2, 7, 1, 4])[3:])


def test_trees_overflow_and_bad_slots_are_refused():
    target = OwnCacheTarget(small_model(CONFIGS["mamba"]), max_model_len=8, max_num_seqs=1)
    with pytest.raises(IncompatibleError, match="takes none"):
        target.score([0], pad([([1, 2], [-1, 0])]))
    target = OwnCacheTarget(small_model(CONFIGS["qwen3_next"]), max_model_len=4, max_num_seqs=1)
    with pytest.raises(CapacityError, match=r"a path of 5 nodes.*holds 4 tokens"):
        target.score([0], TokenTree.chain(np.ones((1, 5), np.int64)))
    with pytest.raises(CapacityError, match="room for 4"):
        target.prefill([0], [[1] * 5])
    with pytest.raises(CapacityError, match=r"slots \[1\]"):
        target.prefill([1], [[1]])
    with pytest.raises(InvalidInputError, match="no tokens"):
        target.prefill([0], [[]])


@pytest.mark.parametrize("name", ["mamba", "mistral_window"])
def test_a_prefill_and_a_score_give_the_hidden_states_of_every_token(name):
    target = OwnCacheTarget(small_model(CONFIGS[name]), max_num_seqs=1)
    text = [3, 1, 4, 1, 5]
    states = target.prefill([0], [text[:3]], hidden=(0, 2)).hidden
    root = target.score([0], TokenTree.roots(np.array(text[3:4])), hidden=(0, 2)).hidden
    with torch.no_grad():
        whole = target.model(torch.tensor([text]), output_hidden_states=True).hidden_states
    for layer in (0, 2):
        assert_close(states[layer][0], whole[layer][0, :3])
        assert_close(root[layer][0, 0], whole[layer][0, 3])
    assert target.offers.hidden == tuple(range(len(whole)))
