"""What every target promises: logits of transformers at every node, whatever was accepted, grown or put beside the tree."""

import numpy as np
import pytest
import torch
import transformers as hf

from polydraft.core import Needs, TokenTree
from polydraft.core.geometry import joined, pad
from polydraft.models.networks import COMPILED
from polydraft.models.torch.hf import HFTarget
from tests.models.small_types import small_config
from tests.models.tree_rounds import ARCHITECTURES, Play, fresh, outcome, small_model
from tests.support import tiny
from tests.support.closeness import assert_close
from tests.support.tiny import compiled

GROUPED = tiny.GROUPED | {"max_position_embeddings": 640}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILY = {
    **{name: ARCHITECTURES[name] for name in ("llama", "llama_tied", "mistral", "qwen2", "qwen3")},
    "llama3 rope": hf.LlamaConfig(**GROUPED, rope_parameters=LLAMA3),
    "heads of a width that is no multiple of 4": hf.LlamaConfig(**GROUPED, head_dim=6),
}
FAMILY |= {
    "mistral with a window": hf.MistralConfig(**GROUPED, sliding_window=7),
    "gemma": ARCHITECTURES["gemma"],
    "gemma2": hf.Gemma2Config(
        **GROUPED, head_dim=8, query_pre_attn_scalar=24, sliding_window=40, attn_logit_softcapping=3.0
    ),
    "gemma3": hf.Gemma3TextConfig(
        **GROUPED,
        head_dim=8,
        query_pre_attn_scalar=24,
        sliding_window=7,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "smollm3": hf.SmolLM3Config(**GROUPED, no_rope_layers=[1, 0], pad_token_id=0),
    "granite": hf.GraniteConfig(
        **GROUPED,
        embedding_multiplier=3.0,
        residual_multiplier=0.5,
        attention_multiplier=0.4,
        logits_scaling=2.0,
    ),
}
MIXTURE = {**GROUPED, "num_experts_per_tok": 2, "pad_token_id": 0}
FAMILY |= {
    "qwen3_moe": hf.Qwen3MoeConfig(
        **MIXTURE, head_dim=8, num_experts=6, moe_intermediate_size=24, norm_topk_prob=True
    ),
    "qwen3_moe with a dense layer": hf.Qwen3MoeConfig(
        **MIXTURE, head_dim=8, num_experts=4, moe_intermediate_size=24, mlp_only_layers=[0]
    ),
    "mixtral": hf.MixtralConfig(**MIXTURE, num_local_experts=4),
    "qwen2_moe": hf.Qwen2MoeConfig(
        **MIXTURE, num_experts=5, moe_intermediate_size=24, shared_expert_intermediate_size=40
    ),
    "glm4_moe": hf.Glm4MoeConfig(
        **MIXTURE,
        head_dim=8,
        n_routed_experts=8,
        n_group=4,
        topk_group=2,
        moe_intermediate_size=24,
        attention_bias=True,
        use_qk_norm=True,
    ),
    "glm4_moe without norms of heads": hf.Glm4MoeConfig(
        **MIXTURE,
        head_dim=8,
        n_routed_experts=4,
        first_k_dense_replace=0,
        moe_intermediate_size=24,
        attention_bias=True,
    ),
    "gpt_oss": hf.GptOssConfig(
        **MIXTURE | {"intermediate_size": 64}, head_dim=8, num_local_experts=4, sliding_window=7
    ),
}
FAMILY["lfm2"] = hf.Lfm2Config(
    **{**GROUPED, "num_hidden_layers": 3},
    layer_types=["conv", "full_attention", "conv"],
    block_auto_adjust_ff_dim=False,
)
OTHERS = sorted(COMPILED.keys() - {config.model_type for config in FAMILY.values()})
"""Of the registry, those of common sizes."""
MODELS = {HFTarget: ARCHITECTURES, compiled: FAMILY}
TARGETS = pytest.mark.parametrize("kind", MODELS)


def play(kind, name="llama"):
    model = small_model(MODELS[kind][name])
    return Play(model, kind(model, max_num_seqs=8))


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in MODELS.items() for name in names])
def test_logits_equal_a_fresh_pass_over_many_rounds_of_random_trees(kind, name):
    game = play(kind, name)
    assert game.rounds_with_joins(24) < 1e-4


@pytest.mark.parametrize("kind", OTHERS)
def test_a_compiled_architecture_of_the_registry_scores_random_trees_as_a_fresh_pass(kind):
    model = small_model(small_config(kind))
    game = Play(model, compiled(model, max_num_seqs=8))
    assert game.rounds_with_joins(6) < 1e-4 * np.abs(fresh(model, game.texts[0])).max()


@TARGETS
def test_a_wrong_path_shows_in_the_logits(kind):
    game = play(kind)
    game.join(0)
    game.target.score([0], pad([([game.texts[0][-1], 5, 9], [-1, 0, 0])]))
    game.target.commit([0], outcome([[1]], [3]))
    game.texts[0] += [9, 3]
    assert game.next_error([0]) > 1e-2


@pytest.mark.parametrize(("kind", "name"), [(HFTarget, "llama"), (HFTarget, "gpt2"), (compiled, "llama")])
@pytest.mark.parametrize("ends", [(1, 3, 6, 7), (1, 7), (3, 7), (6, 7)])
def test_a_tree_grown_in_several_passes_equals_one_pass(kind, name, ends):
    game = play(kind, name)
    game.join(2, 0, 1)
    tokens = [[game.texts[s][-1], *(game.token() for _ in range(6))] for s in (0, 1, 2)]
    tree = pad([(row, [-1, 0, 0, 1, 2, 2, 4]) for row in tokens])
    whole = game.target.score([0, 1, 2], tree).logits
    for since, end in zip((0, *ends), ends, strict=False):
        grown = TokenTree(tree.tokens[:, :end], tree.parents[:, :end])
        scores = game.target.score([0, 1, 2], grown, since=since)
        assert scores.tree.num_nodes == end - since
        assert_close(scores.logits, whole[:, since:end])
    game.target.commit([0, 1, 2], outcome([[2, 4, 6], [1], []], [7, 7, 7]))
    for slot, path in enumerate([[2, 4, 6], [1], []]):
        game.texts[slot] += [tokens[slot][n] for n in path] + [7]
    assert game.next_error([0, 1, 2]) < 1e-4


@TARGETS
def test_nodes_behind_a_padded_tree_see_their_own_path_and_are_never_seen(kind):
    game = play(kind)
    game.join(0, 1)
    rows = [([game.texts[0][-1], 5, 9], [-1, 0, 0]), ([game.texts[1][-1], 5], [-1, 0])]
    extra = [([game.texts[b][-1], 11, 12, 13], [-1, 0, 1, 0]) for b in (0, 1)]
    tree = pad(rows)
    plain = game.target.score([0, 1], tree, hidden=(1,))
    scores = game.target.score([0, 1], joined(tree, pad(extra)), hidden=(1,))
    assert_close(scores.logits[:, :3], plain.logits)
    for b in (0, 1):
        text = [*game.texts[b], 11, 12]
        assert_close(scores.logits[b, 3:5], fresh(game.model, text)[-2:])
        assert_close(scores.logits[b, 5], fresh(game.model, [*game.texts[b], 13])[-1])
        assert_close(scores.hidden[1][b, 4], states_of(game.model, text)[1][0, -1])
        assert_close(scores.hidden[1][b, 1], states_of(game.model, [*game.texts[b], 5])[1][0, -1])
    game.target.commit([0, 1], outcome([[2], [1]], [3, 3]))
    game.texts[0] += [9, 3]
    game.texts[1] += [5, 3]
    assert game.next_error([1, 0]) < 1e-4


@TARGETS
def test_hidden_states_are_those_of_transformers_for_the_same_path(kind):
    game = play(kind)
    game.join(0, 1)
    tree = pad([([game.texts[s][-1], 5, 9], [-1, 0, 0]) for s in (1, 0)])
    hidden = game.target.score([1, 0], tree, hidden=(2, 0, 1)).hidden
    for b, slot in enumerate((1, 0)):
        with torch.no_grad():
            whole = game.model(
                torch.tensor([[*game.texts[slot], 9]]), output_hidden_states=True
            ).hidden_states
        for layer in (0, 1, 2):
            assert_close(hidden[layer][b, [0, 2]], whole[layer][0, -2:])


def states_of(model, text):
    with torch.no_grad():
        return model(torch.tensor([text]), output_hidden_states=True).hidden_states


@TARGETS
def test_a_prefill_gives_the_states_of_all_its_tokens(kind):
    game = play(kind)
    texts = [[game.token() for _ in range(size)] for size in (3, 270, 1)]
    scores = game.target.prefill([2, 0, 1], texts, hidden=(2, 0, 1))
    for b, text in enumerate(texts):
        whole = states_of(game.model, text)
        for layer in (0, 1, 2):
            assert scores.hidden[layer].shape[:2] == (3, 270)
            assert_close(scores.hidden[layer][b, : len(text)], whole[layer][0])
            assert not scores.hidden[layer][b, len(text) :].any()
        assert_close(scores.logits[b, 0], fresh(game.model, text)[-1])


@TARGETS
def test_embeddings_and_head_are_the_first_and_the_last_step_of_a_pass(kind):
    game = play(kind)
    assert game.target.offers == Needs((0, 1, 2), *[True] * 4)
    scores = game.target.prefill([0], [[3, 1, 4]], hidden=(0, 2))
    assert_close(game.target.embed(np.array([[3, 1, 4]])), scores.hidden[0])
    assert_close(game.target.head(scores.hidden[2])[0], fresh(game.model, [3, 1, 4]))


def test_a_head_that_is_more_than_a_matrix_is_not_offered():
    scaled = small_model(
        hf.CohereConfig(
            max_position_embeddings=64, pad_token_id=0, logit_scale=0.25, head_dim=8, **tiny.SIZES
        )
    )
    assert not HFTarget(scaled, max_num_seqs=1).offers.head
