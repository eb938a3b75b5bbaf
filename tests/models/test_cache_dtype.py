"""Keys and values in bfloat16 or in bytes: another distribution, the same one for plain and for speculative decoding, in less memory."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AttentionInterface, MistralConfig, MistralForCausalLM
from transformers.masking_utils import AttentionMaskInterface, eager_mask
from transformers.models.llama.modeling_llama import eager_attention_forward, repeat_kv

from polydraft import Engine, SamplingParams
from polydraft.core import Outcome, TokenTree
from polydraft.core import geometry as tree
from polydraft.errors import IncompatibleError, InvalidInputError
from polydraft.models import load, pair
from polydraft.models.compiled.model import CompiledModel
from polydraft.models.matrices.dot_products import DOTS_HALVES
from polydraft.models.matrices.matrix_unit import has_matrix_unit
from polydraft.sampling.softmax import log_softmax
from tests.models.test_llama import SMALL, _step, model

TEXT = np.random.default_rng(2).integers(0, 61, 170).tolist()
DTYPES = pytest.mark.parametrize("dtype", ["float32", "bfloat16", "q8_0"])


def wide(window=None):
    """A model whose heads are as wide as a block of bytes."""
    torch.manual_seed(0)
    config = MistralConfig(**SMALL, head_dim=32, sliding_window=window, attn_implementation="eager")
    reference = MistralForCausalLM(config).eval()
    for parameter in reference.parameters():
        parameter.data.normal_(std=0.2)
    return reference


def halved(reference, **options):
    return CompiledModel(reference, cache_dtype="bfloat16", **options)


def _rounded(module, query, key, value, mask, scaling, **options):
    """Of rounded keys and values; queries and weights, too, where a matrix unit or dot products take them so, which a power of two does not change."""
    halves = torch.Tensor.bfloat16 if has_matrix_unit() or DOTS_HALVES else torch.Tensor.float
    key, value = (repeat_kv(x.bfloat16().float(), module.num_key_value_groups) for x in (key, value))
    scores = halves(query * (scaling / math.log(2))).float() @ key.mT + mask
    weights = (scores - scores.amax(-1, keepdim=True).ceil()).exp2()
    mixed = halves(weights).float() @ value / weights.sum(-1, keepdim=True)
    return mixed.transpose(1, 2).contiguous(), None


@torch.inference_mode()
def test_the_distribution_is_that_of_rounded_keys_and_values():
    reference = wide()
    AttentionInterface.register("rounded", _rounded)
    AttentionMaskInterface.register("rounded", eager_mask)
    fast = halved(reference, max_num_seqs=1)
    exact = reference(torch.tensor([TEXT])).logits[0, -30:].numpy()
    reference.set_attn_implementation("rounded")
    fast.prefill([0], [TEXT[:-30]])
    found = fast.score([0], TokenTree.chain(np.array([TEXT[-30:]]))).logits[0]
    rounded = reference(torch.tensor([TEXT])).logits[0, -30:].numpy()
    assert np.abs(found - rounded).max() < 0.1 * np.abs(found - exact).max()


@torch.inference_mode()
def test_bytes_are_closer_to_keys_and_values_in_float32_than_those_in_five_bits():
    reference = wide()
    AttentionInterface.register("five_bits", _in_five_bits)
    AttentionMaskInterface.register("five_bits", eager_mask)
    fast = CompiledModel(reference, cache_dtype="q8_0", max_num_seqs=1)
    exact = log_softmax(reference(torch.tensor([TEXT])).logits[0, -30:].numpy())
    reference.set_attn_implementation("five_bits")
    coarse = log_softmax(reference(torch.tensor([TEXT])).logits[0, -30:].numpy())
    fast.prefill([0], [TEXT[:-30]])
    found = log_softmax(fast.score([0], TokenTree.chain(np.array([TEXT[-30:]]))).logits[0])
    assert 0 < np.abs(found - exact).mean() < 0.5 * np.abs(coarse - exact).mean()


def _in_five_bits(module, query, key, value, *arguments, **options):
    def rounded(x):
        top = x.abs().amax(-1, keepdim=True) / 15
        return (x / top).round() * top

    return eager_attention_forward(module, query, rounded(key), rounded(value), *arguments, **options)


@DTYPES
@pytest.mark.parametrize("window", [None, 45])
@torch.inference_mode()
def test_a_rows_bits_depend_on_its_own_path_alone(dtype, window):
    """Neither on chunks, nor on where tiles of columns and blocks of rounded weights begin, nor on siblings between."""
    fast = CompiledModel(wide(window), cache_dtype=dtype, max_num_seqs=3, threads=2)
    fast.prefill([0, 1], [TEXT[:-60]] * 2)
    plain = np.stack([_step(fast, 1, token) for token in TEXT[-60:]])
    assert np.array_equal(fast.score([0], TokenTree.chain(np.array([TEXT[-60:]]))).logits[0], plain)
    forked = [
        t for pair in zip(TEXT[-60:], [7] * 60, strict=True) for t in pair
    ]  # every other node is a sibling that nothing follows
    parents = [-1, *(p for n in range(59) for p in (2 * n, 2 * n)), 118]
    assert np.array_equal(fast.score([0], tree.pad([(forked, parents)])).logits[0, ::2], plain)
    for size in (1, 31, 60):
        fast.release([2])
        last = np.zeros(0)
        for begin in range(0, len(TEXT), size):
            last = fast.prefill([2], [TEXT[begin : begin + size]]).logits[0, 0]
        assert np.array_equal(last, plain[-1])


@DTYPES
@torch.inference_mode()
def test_columns_that_move_by_an_odd_number_keep_their_bits(dtype):
    """A column of a value shares its words with its neighbours: siblings that are dropped shift by one, and by two."""
    fast = CompiledModel(wide(), cache_dtype=dtype, max_num_seqs=3)
    for slot, length in ((0, 50), (1, 51)):
        fast.prefill([slot], [TEXT[:length]])
        follows = TEXT[length : length + 3]
        drafted = [follows[0], 7, 9, follows[1], 8, follows[2], 5]
        fast.score([slot], tree.pad([(drafted, [-1, 0, 0, 0, 1, 3, 5])]))
        fast.commit([slot], Outcome(torch.tensor([[3, 5]]), torch.tensor([2]), torch.tensor([0])))
        fast.prefill([2], [TEXT[: length + 3]])
        assert np.array_equal(_step(fast, slot, 3), _step(fast, 2, 3))
        fast.release([2])
        fast.copy(slot, 2, length + 3)
        assert np.array_equal(
            fast.score([2], TokenTree.roots(np.array([3]))).logits[0, 0], _again(fast, slot, length + 3)
        )
        fast.release([2])


@DTYPES
@torch.inference_mode()
def test_blocks_that_are_copied_out_and_back_keep_their_bits(dtype):
    fast = CompiledModel(wide(), cache_dtype=dtype, max_num_seqs=2)
    length = 3 * fast.block_tokens
    fast.prefill([0], [TEXT[:length]])
    for start in range(0, length, fast.block_tokens):
        fast.write_block(1, fast.read_block(0, start))
    assert np.array_equal(_step(fast, 0, 3), _step(fast, 1, 3))


def _again(fast, slot, length):
    fast.cut(slot, length)
    return fast.score([slot], TokenTree.roots(np.array([3]))).logits[0, 0]


@pytest.mark.parametrize(("dtype", "share"), [("bfloat16", 1 / 2), ("q8_0", 1 / 4 + 3 / 128)])
def test_it_takes_less_memory_and_drafts_change_no_token(dtype, share):
    """Of bytes, keys have a scale for 32 numbers and values one for a head."""
    options: dict[str, Any] = {"max_num_seqs": 2, "max_model_len": 256}
    plain, drafted = (Engine.embedded(drafter=d, cache_dtype=dtype, **options) for d in (None, "ngram"))
    exact = Engine.embedded(drafter=None, cache_dtype="float32", **options)
    assert plain.summary()["cache_bytes"] == pytest.approx(share * exact.summary()["cache_bytes"], rel=0.02)
    params = SamplingParams(temperature=0, max_tokens=48)
    prompt = "import os\nimport sys\nimport os\nimport"
    assert plain.generate(prompt, params)[0].token_ids == drafted.generate(prompt, params)[0].token_ids


def test_bfloat16_is_the_default_of_models_from_files():
    target: Any = load.load_model(str(pair.draft_folder()), max_num_seqs=1)
    assert (target.cache_dtype, 2 * target.bytes_per_token) == ("bfloat16", token_bytes_in_float32(target))


def token_bytes_in_float32(target):
    exact: Any = load.load_model(str(pair.draft_folder()), max_num_seqs=1, cache_dtype="float32")
    return exact.bytes_per_token


def test_what_cannot_be_is_refused():
    folder = str(pair.draft_folder())
    with pytest.raises(
        InvalidInputError, match="cache_dtype='int8' was given; expected one of 'bfloat16', 'float32', 'q8_0'"
    ):
        load.load_model(folder, cache_dtype="int8")
    with pytest.raises(
        IncompatibleError, match=r"cache_dtype='q8_0' was asked for .* only the compiled path has it"
    ):
        load.load_model(folder, cache_dtype="q8_0", backend="transformers")
    with pytest.raises(
        InvalidInputError,
        match="cache_dtype='q8_0' was given for heads of width 16; expected a multiple of 32",
    ):
        CompiledModel(model("qwen3"), cache_dtype="q8_0")


def test_the_default_type_is_one_however_a_model_is_opened():
    folder = str(pair.draft_folder())
    by_name: Any = load.load_model(folder, max_num_seqs=1)
    assert CompiledModel(by_name.checkpoint, max_num_seqs=1).cache_dtype == by_name.cache_dtype == "bfloat16"
    exact: dict[str, Any] = {"max_num_seqs": 1, "activations": "float32"}
    by_name = load.load_model(folder, **exact)
    assert CompiledModel(by_name.checkpoint, **exact).cache_dtype == by_name.cache_dtype == "float32"
