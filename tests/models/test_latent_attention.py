"""Latent attention keeps one compressed row of each token, in every type of cache, behind cuts, copies and kept prefixes."""

from typing import Any, cast

import numpy as np
import pytest
import transformers as hf
from llvmlite import ir
from numba import cfunc, types
from numba.extending import intrinsic

from polydraft.core import SamplingParams, TokenTree
from polydraft.core import geometry as tree
from polydraft.engine.api import Engine
from polydraft.models.compiled.model import CompiledModel
from polydraft.models.matrices.products import NUMBERS, call_product
from polydraft.models.matrices.vectors import PANEL, aligned
from polydraft.models.mixers import cache
from polydraft.models.mixers.cache import whole
from polydraft.models.mixers.row_tiles import rows_to_keys
from polydraft.models.prefix_cache import PrefixCache
from polydraft.numerics.compiled_code import njit
from tests.models.test_targets import FAMILY
from tests.models.tree_rounds import fresh, small_model
from tests.support.closeness import assert_close

TEXT = np.random.default_rng(0).integers(1, 61, 300).tolist()
WIDE: dict[str, Any] = {"kv_lora_rank": 32, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 32}


def wide_model():
    sizes: dict[str, Any] = {
        name: size for name, size in FAMILY["glm4_moe_lite"].to_dict().items() if name != "model_type"
    }
    return small_model(hf.Glm4MoeLiteConfig(**sizes | WIDE))


def test_a_token_takes_its_compressed_row_alone():
    config = FAMILY["deepseek_v3"]
    for dtype, size in (("float32", 4), ("bfloat16", 2)):
        target = CompiledModel(small_model(config), max_num_seqs=1, cache_dtype=dtype)
        row = config.kv_lora_rank + config.qk_rope_head_dim
        assert target.bytes_per_token == config.num_hidden_layers * size * whole(row)


@pytest.mark.parametrize("kind", ["bfloat16", "q8_0"])
def test_rounded_rows_are_near_those_that_are_not(kind):
    module = wide_model()
    exact, rounded = (CompiledModel(module, max_num_seqs=1, cache_dtype=dtype) for dtype in ("float32", kind))
    logits = [model.prefill([0], [TEXT]).logits[0, 0] for model in (exact, rounded)]
    assert_close(logits[0], fresh(module, TEXT)[-1], 1e-4)
    assert 0 < np.abs(logits[0] - logits[1]).max() < 0.2 * np.abs(logits[0]).max()


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "q8_0"])
def test_a_text_behind_a_kept_prefix_a_copy_or_a_cut_is_the_same(kind):
    target: Any = CompiledModel(wide_model(), max_num_seqs=3, cache_dtype=kind)
    expected = target.prefill([0], [TEXT]).logits[0, 0]
    prefixes = PrefixCache(target, 1 << 30)
    prefixes.store(0, TEXT)
    target.copy(0, 1, 200)
    target.cut(0, 130)
    prefixes.load(2, TEXT)
    for slot in range(3):
        length = int(target.lengths[slot])
        assert 0 < length < len(TEXT)
        assert np.array_equal(target.prefill([slot], [TEXT[length:]]).logits[0, 0], expected)


def test_greedy_texts_with_drafts_are_those_without():
    target = CompiledModel(wide_model(), max_num_seqs=2, max_model_len=200)
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    prompts = [[5, 9, 5, 9, 5, 9, 2, 7, 5, 9, 5, 9], [7, 1, 3]]
    plain, *drafted = (
        [r.token_ids for r in Engine.of(target, **cast("dict[str, Any]", options)).generate(prompts, params)]
        for options in (
            {"drafter": None},
            {"drafter": "ngram", "depth": 4},
            {"drafter": "ngram", "num_paths": 4, "depth": 3},
        )
    )
    assert all(texts == plain for texts in drafted)


@pytest.mark.parametrize(("together", "dtype"), [(1, np.uint32), (2, np.uint16)])
def test_rows_of_a_panel_of_columns_become_keys(together, dtype):
    """Numbers of columns that share a word lie side by side as values, and those of one column as keys."""
    numbers = np.random.default_rng(0).integers(1, 1 << 16, (3 * PANEL, PANEL))
    rows, keys = (
        aligned(*shape, dtype=dtype)
        for shape in ((3, PANEL // together, PANEL, together), (3 * PANEL // together, PANEL, together))
    )
    rows[:] = numbers.reshape(3, PANEL, PANEL // together, together).transpose(0, 2, 1, 3)
    turn(rows_to_keys(together), rows, keys)
    assert np.array_equal(keys, numbers.reshape(-1, together, PANEL).transpose(0, 2, 1))


@njit
def turn(address, rows, keys):
    call_product(address, 0, 0, rows.ctypes.data, rows.strides[0], len(rows), 0, keys.ctypes.data, 0, 0, 0)


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_a_rows_bits_depend_on_its_own_path_alone(kind):
    target = CompiledModel(wide_model(), max_num_seqs=2, cache_dtype=kind, threads=2)
    target.prefill([0, 1], [TEXT[:-20]] * 2)
    chain = target.score([0], TokenTree.chain(np.array([TEXT[-20:]]))).logits[0]
    forked = [token for pair in zip(TEXT[-20:], [7] * 20, strict=True) for token in pair]
    parents = [-1, *(p for n in range(19) for p in (2 * n, 2 * n)), 38]
    assert np.array_equal(target.score([1], tree.pad([(forked, parents)])).logits[0, ::2], chain)


def test_rows_reach_the_matrix_unit_with_queries_and_weights_in_bfloat16(monkeypatch):
    """On any processor: the unit's product is replaced by a plain one of the same numbers."""
    monkeypatch.setattr(cache, "DOTS_HALVES", False)
    module = wide_model()
    exact, plain = (
        CompiledModel(module, max_num_seqs=1, cache_dtype=dtype) for dtype in ("float32", "bfloat16")
    )
    monkeypatch.setattr(cache, "has_matrix_unit", lambda: True)
    monkeypatch.setattr(cache, "matrix_product", lambda adds=False: PLAIN[adds].address)
    rounded = CompiledModel(module, max_num_seqs=1, cache_dtype="bfloat16")
    logits = [model.prefill([0], [TEXT]).logits[0, 0] for model in (exact, plain, rounded)]
    coarse, difference = (np.abs(logits[1] - other).max() for other in (logits[0], logits[2]))
    assert 0 < difference < 4 * coarse


def number_at(kind, store=False):
    """Load a float32, or one in bfloat16, from an address, or store a float32."""

    @intrinsic
    def access(typingctx, address, value):
        return types.float32(types.int64, types.float32), emit

    def emit(context, builder, signature, args):
        pointer = builder.inttoptr(args[0], kind.as_pointer())
        if store:
            builder.store(args[1], pointer)
            return args[1]
        number = builder.load(pointer)
        if kind == ir.FloatType():
            return number
        word = builder.shl(builder.zext(number, ir.IntType(32)), ir.Constant(ir.IntType(32), 16))
        return builder.bitcast(word, ir.FloatType())

    return access


half_at = number_at(ir.IntType(16))
float_at = number_at(ir.FloatType())
store_at = number_at(ir.FloatType(), store=True)


def plain_product(adds):
    """As `matrix_unit.matrix_product`, a number at a time."""

    def product(x, xs, w, stride, panels, n, y, ys, width, rows):
        zero = np.float32(0)
        for t in range(rows):
            for output in range(panels * PANEL):
                panel, lane = output // PANEL, output % PANEL
                out = y + t * ys + 4 * (panel * width + lane)
                total = float_at(out, zero) if adds else zero
                for i in range(n):
                    weight = half_at(w + panel * stride + 4 * (i // 2 * PANEL + lane) + 2 * (i % 2), zero)
                    total += half_at(x + t * xs + 2 * i, zero) * weight
                store_at(out, total)
        return rows

    return cfunc(NUMBERS)(product)


PLAIN = {adds: plain_product(adds) for adds in (False, True)}
