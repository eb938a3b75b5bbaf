import random

import numpy as np
import pytest
import torch
import transformers as hf

from polydraft.core import TokenTree
from polydraft.core.geometry import pad
from polydraft.errors import CapacityError, IncompatibleError, InvalidInputError, ModelLoadError
from polydraft.models import memory
from polydraft.models.torch.hf import TREE_ROOM, HFTarget
from tests.models.small_types import small_config
from tests.models.tree_rounds import ARCHITECTURES, CONTEXT, Play, V, fresh, outcome, small_model
from tests.support import tiny
from tests.support.closeness import assert_close

LLAMA = ARCHITECTURES["llama"]


def play(name: str = "llama", **options) -> Play:
    model = small_model(ARCHITECTURES[name], **options)
    return Play(model, HFTarget(model, max_num_seqs=8))


def test_a_prompt_of_many_chunks_equals_a_fresh_pass():
    model = small_model(LLAMA)
    chance = random.Random(1)
    target = HFTarget(model, max_num_seqs=3)
    texts = [[chance.randrange(V) for _ in range(n)] for n in (3 * TREE_ROOM // 2, TREE_ROOM, 7)]
    logits = target.prefill([2, 0, 1], texts).logits[:, 0]
    for b, text in enumerate(texts):
        assert_close(logits[b], fresh(model, text)[-1])


def test_a_full_sequence_beside_a_long_prompt_keeps_both_right():
    model = small_model(ARCHITECTURES["gpt2"])
    chance = random.Random(2)
    target = HFTarget(model, max_num_seqs=2)
    full = [chance.randrange(V) for _ in range(CONTEXT)]
    new = [chance.randrange(V) for _ in range(TREE_ROOM)]
    target.prefill([0], [full[:-1]])
    logits = target.prefill([0, 1], [full[-1:], new]).logits[:, 0]
    assert_close(logits[0], fresh(model, full)[-1])
    assert_close(logits[1], fresh(model, new)[-1])


def test_a_release_between_score_and_commit_leaves_the_others_whole():
    game = play()
    game.join(0, 1, 2)
    tree = pad([([game.texts[s][-1], 5, 9], [-1, 0, 0]) for s in (1, 2)])
    game.target.score([1, 2], tree)
    game.leave(0)
    game.target.commit([1, 2], outcome([[2], [2]], [3, 3]))
    game.texts[1] += [9, 3]
    game.texts[2] += [9, 3]
    assert game.next_error([2, 1]) < 1e-4


def test_a_lowered_length_forgets_the_last_tokens():
    game = play()
    game.join(0)
    game.target.prefill([0], [[4, 4, 4]])
    game.target.cut(0, int(game.target.lengths[0]) - 3)
    assert game.next_error([0]) < 1e-4


def test_one_pass_serves_the_whole_batch_and_the_module_is_left_as_it_was():
    game = play()
    game.join(*range(8))
    before = game.target.passes
    game.round("some")
    assert game.target.passes == before + 1
    assert game.model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("name", ["llama", "gpt_neox"])
def test_eager_attention_gives_the_same(name):
    game = play(name, attn_implementation="eager")
    game.join(0, 1, 2)
    assert max(game.round("some") for _ in range(5)) < 1e-4


def test_half_precision_models_give_float32_logits_near_the_true_ones():
    model = small_model(LLAMA)
    exact = fresh(model, [1, 2, 3])[-1]
    target = HFTarget(model.to(torch.bfloat16))
    logits = target.prefill([0], [[1, 2, 3]]).logits[0, 0]
    assert logits.dtype == np.float32
    assert np.abs(logits - exact).max() < 0.1 * np.abs(exact).max()


def test_a_lowered_vocabulary_cuts_the_padding_off():
    target = HFTarget(small_model(LLAMA))
    target.vocab_size = 50
    assert target.prefill([0], [[1, 2, 3]]).logits.shape == (1, 1, 50)


def test_end_of_sequence_ids_come_from_the_generation_config():
    model = small_model(LLAMA)
    model.generation_config.eos_token_id = [7, 9]
    model.generation_config.bos_token_id = 5
    target = HFTarget(model)
    assert (target.eos_token_ids, target.bos_token_id) == ([7, 9], 5)


SIZES = tiny.SIZES | {"num_hidden_layers": 4}
CONTEXT_64 = SIZES | {"max_position_embeddings": 64}
GPT_NEO = {"vocab_size": V, "max_position_embeddings": 64, "hidden_size": 32, "num_heads": 4}
REFUSED = [
    (
        hf.GPTNeoConfig(**GPT_NEO, num_layers=2, window_size=8, attention_types=[[["global", "local"], 1]]),
        "GPTNeo.*windows of 8 tokens",
    ),
    (
        hf.MambaConfig(vocab_size=V, hidden_size=32, num_hidden_layers=2),
        "Mamba.*cannot be rolled back.*its own cache",
    ),
    (hf.RwkvConfig(vocab_size=V, hidden_size=32, num_hidden_layers=2), "Rwkv.*cannot be rolled back"),
    (hf.Qwen3NextConfig(**CONTEXT_64, head_dim=8), "Qwen3Next.*linear_attention.*cannot be rolled back"),
    (hf.GPT2Config(vocab_size=V, n_embd=32, n_layer=1, n_head=4, add_cross_attention=True), "GPT2.*encoder"),
]


@pytest.mark.parametrize(("config", "reason"), REFUSED, ids=lambda x: getattr(x, "model_type", ""))
def test_models_that_cannot_roll_back_are_refused_by_name(config, reason):
    with pytest.raises(ModelLoadError, match=reason):
        HFTarget(hf.AutoModelForCausalLM.from_config(config), max_num_seqs=1)


def test_an_encoder_decoder_is_refused():
    with pytest.raises(ModelLoadError, match=r"has an encoder\. Use models.seq2seq"):
        HFTarget(
            hf.T5ForConditionalGeneration(
                hf.T5Config(vocab_size=V, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
            )
        )


@pytest.mark.parametrize(
    "config",
    [
        hf.MptConfig(vocab_size=V, d_model=32, n_layers=2, n_heads=4, max_seq_len=64),
        hf.BartConfig(
            vocab_size=V,
            d_model=32,
            decoder_layers=2,
            decoder_attention_heads=4,
            decoder_ffn_dim=32,
            is_decoder=True,
        ),
    ],
    ids=lambda config: config.model_type,
)
def test_models_that_ignore_mask_or_positions_are_found_out_when_built(config):
    config.is_encoder_decoder = False
    with pytest.raises(ModelLoadError, match=r"logits for trees|does not run with"):
        HFTarget(small_model(config), max_model_len=64, max_num_seqs=1)


@pytest.mark.parametrize("window", [4, 32])
def test_a_sliding_window_is_followed_whether_texts_cross_it_or_not(window):
    model = small_model(hf.MistralConfig(**CONTEXT_64, sliding_window=window, num_key_value_heads=2))
    target = HFTarget(model, max_model_len=32, max_num_seqs=1)
    assert bool(target._windows) == (window == 4)
    game = Play(model, target)
    game.join(0)
    assert game.round("all") < 1e-4


@pytest.mark.parametrize("kind", ["gemma3_text", "llama4_text"])
def test_grown_trees_see_no_further_than_the_window(kind):
    game = Play(model := small_model(small_config(kind)), HFTarget(model, max_model_len=64, max_num_seqs=2))
    game.join(1, 0)
    tokens = [[game.texts[s][-1], *(game.token() for _ in range(8)), 11, 12] for s in (0, 1)]
    tree = pad([(row, [-1, 0, 1, 2, 3, 3, 4, 6, 7, 8, 0]) for row in tokens])
    game.target.score([0, 1], TokenTree(tree.tokens[:, :5], tree.parents[:, :5]))
    scores = game.target.score([0, 1], tree, since=5)
    for b in (0, 1):
        path = [tokens[b][n] for n in (1, 2, 3, 4, 6, 7, 8)]
        assert_close(scores.logits[b, -3], fresh(model, game.texts[b] + path)[-1])
        assert_close(scores.logits[b, -2], fresh(model, [*game.texts[b], *path, 11])[-1])
        assert_close(scores.logits[b, -1], fresh(model, [*game.texts[b], 12])[-1])


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_rotary_positions_that_depend_on_the_length_are_those_of_the_longest_text(kind):
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4} if kind == "longrope" else {"factor": 4.0}
    rope = {"rope_type": kind, "rope_theta": 10000.0, **factors}
    original = {"original_max_position_embeddings": 32} if kind == "longrope" else {}
    context = {"max_position_embeddings": 64 if kind == "longrope" else 32}
    config = (hf.Phi3Config if kind == "longrope" else hf.LlamaConfig)(
        **SIZES | context, pad_token_id=0, rope_parameters=rope, **original
    )
    model = small_model(config)
    before = fresh(model, [*range(20)])
    longest = min(48, context["max_position_embeddings"])
    with torch.no_grad():
        text = [i % V for i in range(longest)]
        whole = model(torch.tensor([text]), use_cache=False).logits[0]
    assert np.array_equal(fresh(model, [*range(20)]), before)
    target = HFTarget(model, max_model_len=longest, max_num_seqs=1)
    target.prefill([0], [text[:20]])
    logits = target.score([0], TokenTree.chain(np.array([text[20:]]))).logits[0]
    assert_close(logits, whole[20:])
    assert np.array_equal(fresh(model, [*range(20)]), before)  # the module is the caller's


def test_other_attention_kernels_are_refused():
    model = small_model(LLAMA, attn_implementation="flex_attention")
    with pytest.raises(IncompatibleError, match="sdpa"):
        HFTarget(model)


def test_overflow_of_slots_context_and_tree_is_refused_with_the_limits():
    target = HFTarget(small_model(LLAMA), max_model_len=8, max_num_seqs=2)
    with pytest.raises(CapacityError, match="0 to 1"):
        target.prefill([2], [[1]])
    with pytest.raises(CapacityError, match="room for 8"):
        target.prefill([0], [[1] * 9])
    assert target.lengths.tolist() == [0, 0]
    target.prefill([0], [[1] * 6])
    with pytest.raises(CapacityError, match=r"position 8.*holds 8"):
        target.score([0], TokenTree.chain(np.ones((1, 3), np.int64)))
    with pytest.raises(CapacityError, match=str(TREE_ROOM)):
        target.score([0], pad([([1] * (TREE_ROOM + 1), [-1] + [0] * TREE_ROOM)]))
    with pytest.raises(InvalidInputError, match="no tokens"):
        target.prefill([0], [[]])


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"max_model_len": CONTEXT + 1}, CapacityError),
        ({"max_model_len": 0}, InvalidInputError),
        ({"max_num_seqs": 0}, InvalidInputError),
    ],
)
def test_limits_outside_the_model_are_refused(options, kind):
    with pytest.raises(kind, match="was given"):
        HFTarget(small_model(LLAMA), **options)


def test_a_cache_larger_than_the_memory_is_refused_with_figures(monkeypatch):
    monkeypatch.setattr(memory, "available_bytes", lambda device: 1_000_000)
    with pytest.raises(CapacityError, match=r"0\.00 GiB are free.*Lower max_model_len"):
        HFTarget(small_model(LLAMA), max_model_len=CONTEXT, max_num_seqs=64)


def test_the_default_context_is_cut_to_half_of_the_free_memory(monkeypatch):
    monkeypatch.setattr(memory, "available_bytes", lambda device: 2 * (550 + TREE_ROOM) * 8 * 256)
    target = HFTarget(small_model(LLAMA), max_num_seqs=8)
    assert target.max_model_len == 550
    assert target.cache_bytes == (550 + TREE_ROOM) * 8 * 256
