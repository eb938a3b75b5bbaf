"""Models that cannot be rolled back are decoded plainly, and say so when they are asked for more."""

import pytest
import torch
import transformers as hf

from polydraft.core import Outcome, SamplingParams, TokenTree
from polydraft.engine.api import Engine
from polydraft.errors import CapacityError, IncompatibleError, InvalidInputError, ModelLoadError
from polydraft.models.load import load_model
from polydraft.models.plain import UNLIMITED, PlainTarget
from polydraft.tree import pad
from tests.models.tree_rounds import V, fresh, small_model
from tests.support.closeness import assert_close

SIZES = {"vocab_size": V, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
CONFIGS = {
    "mamba": hf.MambaConfig(vocab_size=V, hidden_size=32, num_hidden_layers=2, state_size=4),
    "mistral_window": hf.MistralConfig(**SIZES, num_key_value_heads=2, max_position_embeddings=64, sliding_window=8),
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


def nothing(count):
    return Outcome(torch.zeros(count, 0, dtype=torch.int64), torch.zeros(count, dtype=torch.int64), torch.zeros(count).long())


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_of_plain_decoding_equal_fresh_passes_also_after_forgetting(name):
    model = small_model(CONFIGS[name])
    target = PlainTarget(model, max_num_seqs=2)
    texts = {1: [5, 9, 2, 7, 7, 1, 3, 8, 4, 6], 0: [3, 1]}
    target.prefill([1, 0], [texts[1], texts[0]])
    for root in (11, 4, 17):
        logits = target.score([0, 1], TokenTree.roots(torch.tensor([root, root + 1]))).logits
        again = target.score([0, 1], TokenTree.roots(torch.tensor([root, root + 1]))).logits
        target.commit([0, 1], nothing(2))
        texts[0].append(root)
        texts[1].append(root + 1)
        assert torch.equal(logits, again)
        for slot in (0, 1):
            assert_close(logits[slot, 0], fresh(model, texts[slot])[-1])
    target.cut(1, int(target.lengths[1]) - 2)
    logits = target.score([1], TokenTree.roots(torch.tensor([9]))).logits[0, 0]
    assert_close(logits, fresh(model, [*texts[1][:-2], 9])[-1])


@pytest.mark.parametrize("name", CONFIGS)
def test_the_engine_without_drafter_gives_the_text_of_transformers(name):
    model = small_model(CONFIGS[name])
    engine = Engine.of(PlainTarget(model, max_num_seqs=2), drafter=None, eos_token_ids=())
    prompts = [[5, 9, 2], [7, 7, 1, 3, 8, 4, 6, 2, 2, 9, 11]]
    for prompt, result in zip(prompts, engine.generate(prompts, SamplingParams(temperature=0, max_tokens=12)), strict=True):
        text = list(prompt)
        for token in result.token_ids:
            logits = fresh(model, text)[-1]
            assert logits.max() - logits[token] < 1e-3
            text.append(token)
        assert len(result.token_ids) == 12


def test_a_folder_is_refused_with_drafts_and_taken_without(tmp_path):
    small_model(CONFIGS["mamba"]).save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match=r"Mamba.*cannot be rolled back\. Decode it plainly.*--drafter none"):
        load_model(str(tmp_path))
    target = load_model(str(tmp_path), plain=True)
    assert isinstance(target, PlainTarget)
    assert target.max_model_len == UNLIMITED


def test_a_window_shorter_than_the_context_is_taken_plainly_by_the_same_door(tmp_path):
    small_model(CONFIGS["mistral_window"]).save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match="sliding window of 8"):
        load_model(str(tmp_path))
    assert isinstance(load_model(str(tmp_path), plain=True), PlainTarget)
    assert not isinstance(load_model(str(tmp_path), plain=True, max_model_len=8), PlainTarget)


def test_trees_overflow_and_bad_slots_are_refused():
    target = PlainTarget(small_model(CONFIGS["mamba"]), max_model_len=4, max_num_seqs=1)
    with pytest.raises(IncompatibleError, match="decodes without drafts"):
        target.score([0], pad([([1, 2], [-1, 0])]))
    with pytest.raises(CapacityError, match="room for 4"):
        target.prefill([0], [[1] * 5])
    with pytest.raises(CapacityError, match=r"slots \[1\]"):
        target.prefill([1], [[1]])
    with pytest.raises(InvalidInputError, match="no tokens"):
        target.prefill([0], [[]])


@pytest.mark.parametrize("name", ["mamba", "mistral_window"])
def test_a_prefill_and_a_score_give_the_hidden_states_of_every_token(name):
    target = PlainTarget(small_model(CONFIGS[name]), max_num_seqs=1)
    text = [3, 1, 4, 1, 5]
    states = target.prefill([0], [text[:3]], hidden=(0, 2)).hidden
    root = target.score([0], TokenTree.roots(torch.tensor(text[3:4])), hidden=(0, 2)).hidden
    with torch.no_grad():
        whole = target.model(torch.tensor([text]), output_hidden_states=True).hidden_states
    for layer in (0, 2):
        assert_close(states[layer][0], whole[layer][0, :3])
        assert_close(root[layer][0, 0], whole[layer][0, 3])
    assert target.offers.hidden == tuple(range(len(whole)))
