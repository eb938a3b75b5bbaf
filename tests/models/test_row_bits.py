"""A row has the same bits in plain decoding, in chains and trees of drafts, in pieces of a prompt, beside neighbours and behind kept prefixes.

Where a matrix unit reads prompts, it reads the first tokens of each text here, however they come.
"""

import random
from contextlib import nullcontext
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

from polydraft.core.geometry import pad
from polydraft.models.compiled.model import CompiledModel
from polydraft.models.matrices.vectors import LANES
from polydraft.models.prefix_cache import PrefixCache
from tests.models.tree_rounds import outcome
from tests.support.emulated_unit import emulated

VOCAB = 512
LENGTH = 150
SHARED = 50
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}
LINEAR: dict[str, Any] = {
    "head_dim": 64,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
MAMBA: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 64, "mamba_d_state": 32, "mamba_n_groups": 2}
MODELS = {
    "gemma4": lambda: hf.Gemma4TextConfig(
        num_hidden_layers=6,
        head_dim=64,
        global_head_dim=128,
        sliding_window=24,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        num_kv_shared_layers=3,
        use_double_wide_mlp=True,
        hidden_size_per_layer_input=32,
        vocab_size_per_layer_input=VOCAB,
        **COMMON,
    ),
    "gemma4 with experts": lambda: hf.Gemma4TextConfig(
        num_hidden_layers=2,
        head_dim=64,
        global_head_dim=128,
        sliding_window=24,
        layer_types=["sliding_attention", "full_attention"],
        hidden_size_per_layer_input=0,
        attention_k_eq_v=True,
        num_global_key_value_heads=1,
        enable_moe_block=True,
        num_experts=6,
        top_k_experts=2,
        moe_intermediate_size=64,
        **COMMON,
    ),
    "deepseek_v3": lambda: hf.DeepseekV3Config(
        num_hidden_layers=2,
        q_lora_rank=64,
        kv_lora_rank=128,
        qk_nope_head_dim=64,
        qk_rope_head_dim=32,
        v_head_dim=64,
        n_routed_experts=6,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        moe_intermediate_size=64,
        **COMMON | {"num_key_value_heads": 4},
    ),
    "llama": lambda: hf.LlamaConfig(num_hidden_layers=2, **COMMON),
    "gpt_oss": lambda: hf.GptOssConfig(
        num_hidden_layers=2,
        head_dim=64,
        sliding_window=24,
        num_local_experts=4,
        num_experts_per_tok=2,
        layer_types=["sliding_attention", "full_attention"],
        **COMMON,
    ),
    "lfm2": lambda: hf.Lfm2Config(
        num_hidden_layers=3,
        layer_types=["conv", "full_attention", "conv"],
        block_auto_adjust_ff_dim=False,
        **COMMON,
    ),
    "granite": lambda: hf.GraniteMoeHybridConfig(
        num_hidden_layers=3,
        layer_types=["mamba", "attention", "mamba"],
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=64,
        position_embedding_type="nope",
        **MAMBA,
        **COMMON,
    ),
    "falcon_h1": lambda: hf.FalconH1Config(num_hidden_layers=2, mamba_d_ssm=512, **MAMBA, **COMMON),
    "qwen3_5": lambda: hf.Qwen3_5TextConfig(num_hidden_layers=3, **LINEAR, **COMMON),
    "qwen3_next": lambda: hf.Qwen3NextConfig(num_hidden_layers=3, **LINEAR, **EXPERTS, **COMMON),
}
PROMPT = 75
"""Tokens that a matrix unit reads, in the middle of trees and pieces."""
FORMATS = [(None, "float32", 0), ("int8", "bfloat16", 0), ("int4", "q8_0", 0)]
if LANES == 16:
    FORMATS.append(("int8", "bfloat16", PROMPT))


def tokens(seed, count=LENGTH):
    return random.Random(seed).choices(range(1, VOCAB), k=count)


TEXT = tokens(0)
OTHER = [*TEXT[:SHARED], *tokens(1, LENGTH - SHARED)]


@cache
def module(name):
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(MODELS[name]()).eval()
    for part, weight in model.named_parameters():
        mean = -4.0 if part.endswith("dt_bias") else 1.0  # of decays that a text is remembered behind
        torch.nn.init.normal_(weight, 0.0, 0.1) if weight.ndim > 1 else torch.nn.init.normal_(
            weight, mean, 0.1
        )
    return model


def bits(scores, layer, b=0):
    """Last states and logits of all nodes, [N, numbers]."""
    numbers = np.concatenate([scores.hidden[layer][b], scores.logits[b]], 1)
    assert np.isfinite(numbers).all()
    return numbers.view(np.int32)


def root(token):
    return [token], [-1]


def chain(text, length, choose):
    """A draft behind so many tokens of a text, right ones and then wrong ones: tokens, parents, the path that is right."""
    right = choose.randint(1, min(40, LENGTH - length))
    wrong = choose.randint(0, 5)
    return (
        [*text[length : length + right], *tokens(length, wrong)],
        list(range(-1, right + wrong - 1)),
        list(range(right)),
    )


def bushy(begin, depth, choose, *, order):
    """A tree behind so many tokens that both texts share, with both of them and others in it: tokens, parents, the nodes of both."""
    texts = [tuple(text[begin : begin + depth]) for text in (TEXT, OTHER)]
    others = [
        (*choose.choice(texts)[: choose.randint(1, depth)], *tokens(n, choose.randint(1, 5)))
        for n in range(20)
    ]
    nodes = sorted({path[:n] for path in [*texts, *others] for n in range(1, len(path) + 1)}, key=order)
    numbers = {path: number for number, path in enumerate(nodes)}
    parents = [numbers.get(path[:-1], -1) for path in nodes]
    return (
        [path[-1] for path in nodes],
        parents,
        [[numbers[text[:n]] for n in range(1, depth + 1)] for text in texts],
    )


ORDERS = {"by depth": lambda path: (len(path), path), "by branch": lambda path: path}


class Rows:
    """Rows of both texts as plain decoding has them, and a model on two threads whose rows are compared with them."""

    def __init__(self, name, quantization, cache_dtype, num_prompt):
        options = {"max_num_seqs": 4, "quantization": quantization, "cache_dtype": cache_dtype}
        with emulated() if num_prompt else nullcontext():
            plain, self.target = (
                CompiledModel(module(name), threads=threads, **options) for threads in (1, 2)
            )
        for slot in range(4):
            plain.set_prompt_length(slot, num_prompt)
            self.target.set_prompt_length(slot, num_prompt)
        self.last = plain.offers.hidden[-1]
        self.expected = [self.decode(plain, text) for text in (TEXT, OTHER)]

    def decode(self, plain, text):
        rows = []
        for token in text:
            rows.append(bits(plain.score([0], pad([root(token)]), hidden=[self.last]), self.last))
            plain.commit([0], outcome([[]], [0]))
        plain.release([0])
        return np.concatenate(rows)

    def score(self, trees, **options):
        """trees: by slot. Rows of each."""
        scores = self.target.score(
            [*trees], pad([tree[:2] for tree in trees.values()]), hidden=[self.last], **options
        )
        return [bits(scores, self.last, b) for b in range(len(trees))]

    def commit(self, *paths):
        """paths: of slots 0, 1, ..., the root first."""
        self.target.commit([*range(len(paths))], outcome([path[1:] for path in paths], [0] * len(paths)))

    def check(self, rows, first, text=0):
        """Rows that follow one another in a text, perhaps of states alone."""
        wrong = (rows != self.expected[text][first : first + len(rows), : rows.shape[1]]).any(1)
        assert not wrong.any(), f"{wrong.sum()} of {len(rows)} rows, the first at {first + wrong.argmax()}"

    def check_end(self, slot):
        """What follows a slot's text, which is the beginning of the first one."""
        length = int(self.target.lengths[slot])
        self.check(self.score({slot: (TEXT[length:], list(range(-1, LENGTH - length - 1)))})[0], length)


@pytest.fixture(
    scope="module",
    params=[(name, *kind) for name in MODELS for kind in FORMATS],
    ids=lambda param: "-".join(map(str, param)),
)
def every(request):
    return Rows(*request.param)


@pytest.fixture
def rows(every):
    every.target.release(range(4))
    return every


def test_chains_have_the_bits_of_plain_decoding(rows):
    choose = random.Random(1)
    length = 0
    while length < LENGTH:
        *draft, path = chain(TEXT, length, choose)
        found = rows.score({0: draft})[0]
        rows.check(found[path], length)
        rows.commit(path)
        length += len(path)


@pytest.mark.parametrize("order", ORDERS)
def test_trees_have_the_bits_of_plain_decoding_along_each_path(rows, order):
    choose = random.Random(2)
    for begin, depth in ((3, 20), (SHARED - 3, 20), (SHARED - 3, 60)):
        rows.target.release([0])
        rows.target.prefill([0], [TEXT[:begin]])
        *tree, paths = bushy(begin, depth, choose, order=ORDERS[order])
        found = rows.score({0: tree})[0]
        for text, path in enumerate(paths):
            rows.check(found[path], begin, text)
        rows.commit(paths[0])
        rows.check_end(0)


def test_trees_that_grow_in_several_passes_have_the_bits_of_plain_decoding(rows):
    begin = SHARED - 3
    nodes, parents, paths = bushy(begin, 40, random.Random(3), order=ORDERS["by depth"])
    rows.target.prefill([0], [TEXT[:begin]])
    ends = [0, 1, 3, 20, 21, 60, len(nodes)]
    found = [rows.score({0: (nodes[:end], parents[:end])}, since=since)[0] for since, end in pairwise(ends)]
    for text, path in enumerate(paths):
        rows.check(np.concatenate(found)[path], begin, text)


def test_pieces_of_a_prompt_have_the_bits_of_plain_decoding(rows):
    for seed in range(3):
        choose = random.Random(seed)
        length = 0
        rows.target.release([0])
        while length < LENGTH:
            count = choose.randint(1, min((5, 64, 140)[seed], LENGTH - length))
            scores = rows.target.prefill([0], [TEXT[length : length + count]], hidden=[rows.last])
            rows.check(scores.hidden[rows.last][0].view(np.int32), length)
            length += count
            last = np.concatenate([scores.hidden[rows.last][:, -1], scores.logits[:, 0]], 1)
            rows.check(last.view(np.int32), length - 1)


def test_neighbours_and_pieces_beside_change_no_bit(rows):
    choose = random.Random(4)
    lengths = [0, 20]
    read = 0
    rows.target.prefill([1], [OTHER[:20]])
    rows.target.prefill([2], [tokens(5, 100)])
    while max(lengths) < LENGTH:
        drafts = [chain(text, length, choose) for text, length in zip((TEXT, OTHER), lengths, strict=True)]
        trees = pad(
            [
                *(draft[:2] for draft in drafts),
                bushy(20, choose.randint(1, 9), choose, order=ORDERS["by depth"])[:2],
            ]
        )
        piece = TEXT[read : read + choose.randint(1, 70)]
        scores, last = rows.target.score_mixed([0, 1, 2], trees, {3: piece}, hidden=[rows.last])
        rows.check(last.hidden[rows.last][0, : len(piece)].view(np.int32), read)
        for text, (*_, path) in enumerate(drafts):
            rows.check(bits(scores, rows.last, text)[path], lengths[text], text)
            path = path[: choose.randint(1, len(path))]
            rows.target.commit([text], outcome([path[1:]], [0]))
            lengths[text] += len(path)
        read += len(piece)
        if read == LENGTH:
            rows.target.release([3])
            read = 0


def test_texts_behind_kept_prefixes_cuts_and_copies_have_the_bits_of_plain_decoding(rows):
    target = rows.target
    cache = PrefixCache(rows.target, 1 << 30)
    target.prefill([0], [TEXT[:70]])
    target.prefill([0], [TEXT[70:129]])
    cache.store(0, TEXT[:129])
    rows.check_end(0)
    target.cut(0, 75)
    rows.check_end(0)
    for length in (100, 60):
        target.release([1])
        target.copy(0, 1, min(length, 75))
        rows.check_end(1)
    cache.load(2, TEXT)
    assert target.lengths[2] == 128
    rows.check_end(2)
