"""The compiled Llama family equals transformers after any number of rounds."""

import numpy as np
import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from polydraft import tree as trees
from polydraft.core import NoiseKey, Outcome
from polydraft.errors import CapacityError, IncompatibleError, InvalidInputError
from polydraft.models.llama import CompiledLlama

SMALL = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "max_position_embeddings": 256}
GROUPED = {"num_attention_heads": 4, "num_key_value_heads": 2}
FAMILY = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SMALL, **GROUPED, tie_word_embeddings=True)),
    "llama3 rope": (
        LlamaForCausalLM,
        LlamaConfig(
            **SMALL,
            **GROUPED,
            rope_parameters={
                "rope_type": "llama3",
                "rope_theta": 1000.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        ),
    ),
    "mistral": (MistralForCausalLM, MistralConfig(**SMALL, **GROUPED, sliding_window=None)),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**SMALL, **GROUPED)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SMALL, **GROUPED, head_dim=16)),
}


def model(name):
    torch.manual_seed(0)
    kind, config = FAMILY[name]
    made = kind(config).eval()
    for parameter in made.parameters():
        parameter.data.normal_(std=0.2)
    return made


def random_tree(rng, size):
    return rng.integers(0, 61, size).tolist(), [-1, *(int(rng.integers(0, n)) for n in range(1, size))]


@pytest.mark.parametrize("name", FAMILY)
@torch.inference_mode()
def test_logits_after_many_rounds_equal_a_fresh_pass(name):
    reference, rng = model(name), np.random.default_rng(0)
    fast = CompiledLlama(reference, max_num_seqs=3)
    texts = {2: rng.integers(0, 61, 9).tolist(), 0: rng.integers(0, 61, 70).tolist()}
    fast.prefill(list(texts), list(texts.values()))
    for _ in range(20):
        drafted = trees.pad([random_tree(rng, int(rng.integers(1, 10))) for _ in texts])
        logits = fast.score(list(texts), drafted).logits
        ends = torch.tensor([int(rng.integers(0, int(drafted.is_node[b].sum()))) for b in range(len(texts))])
        path, length = trees.path_to(drafted, ends)
        for b, slot in enumerate(texts):
            nodes = [0, *path[b, : length[b]].tolist()]
            text = [*texts[slot], *(int(drafted.tokens[b, n]) for n in nodes)]
            fresh = reference(torch.tensor([text])).logits[0, -len(nodes) :]
            assert torch.allclose(logits[b, nodes], fresh, atol=1e-4)
            texts[slot] = text
        fast.commit(list(texts), Outcome(path, length, torch.zeros(len(texts), dtype=torch.int64)))
    assert [int(fast.lengths[slot]) for slot in texts] == [len(text) for text in texts.values()]


@torch.inference_mode()
def test_growing_a_tree_depth_by_depth_gives_the_logits_of_one_pass():
    fast, rng = CompiledLlama(model("llama"), max_num_seqs=1), np.random.default_rng(1)
    fast.prefill([0], [[1, 2, 3]])
    tree = trees.pad([random_tree(rng, 8)])
    whole = fast.score([0], tree).logits
    first = trees.TokenTree(tree.tokens[:, :3], tree.parents[:, :3])
    parts = torch.cat([fast.score([0], first).logits, fast.score([0], tree, since=3).logits], 1)
    assert torch.allclose(whole, parts, atol=1e-5)


def proposal(fast, widths, depths, law=(1.0, 0, 1.0, 0.0), seed=0):
    B = len(widths)
    fast.lengths[:B] = 4
    key = NoiseKey.of(range(seed, seed + B), [0] * B, [5] * B)
    laws = torch.tensor([law] * B, dtype=torch.float64)
    return fast.propose_paths(list(range(B)), [[7]] * B, key, widths, depths, laws, torch.zeros(B, 0))


def test_proposed_rows_are_the_models_laws():
    reference = model("llama")
    fast = CompiledLlama(reference, max_num_seqs=2)
    fast.prefill([0, 1], [[1, 2, 3, 4]] * 2)
    tree, rows, probs = proposal(fast, [2, 3], [3, 2])
    for b in range(2):
        for n in range(1, int(tree.is_node[b].sum())):
            above = int(tree.parents[b, n])
            path, length = trees.path_to(tree, torch.tensor([above if i == b else 0 for i in range(2)]))
            text = [1, 2, 3, 4, 7, *(int(tree.tokens[b, m]) for m in path[b, : length[b]])]
            law = reference(torch.tensor([text])).logits[0, -1].softmax(-1)
            assert torch.allclose(probs[b, rows[b, n]], law, atol=1e-5)


def test_equal_prefixes_share_one_row():
    fast = CompiledLlama(model("llama"), max_num_seqs=8)
    fast.prefill(list(range(8)), [[1, 2, 3, 4]] * 8)
    tree, rows, _ = proposal(fast, [4] * 8, [3] * 8, law=(0.2, 0, 1.0, 0.0))
    first = trees.first_copies(tree)
    copies = (first != torch.arange(tree.num_nodes)).nonzero()
    assert len(copies)
    for b in range(8):
        for n in range(1, tree.num_nodes):
            for m in range(1, n):
                if first[b, tree.parents[b, n]] == first[b, tree.parents[b, m]]:
                    assert rows[b, n] == rows[b, m]


def test_drawn_tokens_follow_the_reported_row():
    fast = CompiledLlama(model("llama"), max_num_seqs=1)
    fast.prefill([0], [[1, 2, 3, 4]])
    seen = torch.zeros(61)
    for seed in range(1500):
        tree, _, probs = proposal(fast, [2], [1], law=(0.5, 0, 0.8, 0.0), seed=seed)
        seen += torch.bincount(tree.tokens[0, 1:], minlength=61)
    q = probs[0, 0]
    assert (seen[q == 0] == 0).all()
    big = q * 3000 > 5
    chi = ((seen - 3000 * q)[big] ** 2 / (3000 * q)[big]).sum()
    assert chi < big.sum() + 5 * (2 * big.sum()) ** 0.5


@pytest.mark.parametrize(("law", "kept"), [((1.0, 5, 1.0, 0.0), 5), ((0.0, 0, 1.0, 0.0), 1), ((1.0, 0, 1.0, 1.0), 1)])
def test_truncated_laws_keep_the_largest_tokens(law, kept):
    fast = CompiledLlama(model("llama"), max_num_seqs=1)
    fast.prefill([0], [[1, 2, 3, 4]])
    _, _, whole = proposal(fast, [1], [1])
    _, _, probs = proposal(fast, [1], [1], law=law)
    assert set(probs[0, 0].nonzero().flatten().tolist()) == set(whole[0, 0].topk(kept).indices.tolist())
    assert probs[0, 0].sum().item() == pytest.approx(1, abs=1e-6)


def test_what_is_not_covered_is_refused_with_the_reason():
    with pytest.raises(IncompatibleError, match="SiLU"):
        CompiledLlama(LlamaForCausalLM(LlamaConfig(**SMALL, **GROUPED, hidden_act="gelu")))
    fast = CompiledLlama(model("llama"), max_num_seqs=1)
    with pytest.raises(InvalidInputError, match="backend='transformers'"):
        fast.score([0], trees.TokenTree.roots(torch.tensor([1])), hidden=[1])
    with pytest.raises(CapacityError, match="slot 1"):
        fast.prefill([1], [[1]])
    with pytest.raises(CapacityError, match="256"):
        fast.prefill([0], [[1] * 300])
