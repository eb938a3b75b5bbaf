"""The compiled Llama family equals transformers after any number of rounds."""

import os
import subprocess
import sys
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from numba.core.dispatcher import Dispatcher
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

from polydraft.core import Budget, DraftSampling, NoiseKey, Outcome, SamplingParams
from polydraft.core import geometry as trees
from polydraft.errors import CapacityError, IncompatibleError, InvalidInputError
from polydraft.models.compiled import packer
from polydraft.models.compiled import weights as compiled_weights
from polydraft.models.compiled.forward import compiled_forward
from polydraft.models.compiled.model import CompiledModel
from polydraft.models.growing.draft_vocabulary import draft_samplings
from polydraft.models.growing.rows import draft_distribution
from polydraft.models.matrices.formats import pack, panels_for, unpack
from polydraft.models.matrices.products import FORMATS
from polydraft.numerics.threads import sync
from polydraft.sampling import noise
from polydraft.sampling.softmax import softmax
from tests.support.tiny import GROUPED

SMALL: dict[str, Any] = GROUPED | {"max_position_embeddings": 256}
FAMILY = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SMALL, tie_word_embeddings=True)),
    "mistral": (MistralForCausalLM, MistralConfig(**SMALL, sliding_window=None)),
    "window": (MistralForCausalLM, MistralConfig(**SMALL, sliding_window=45)),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**SMALL)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SMALL, head_dim=16)),
}


def model(name):
    torch.manual_seed(0)
    kind, config = FAMILY[name]
    own = deepcopy(config)  # models write into theirs
    own._attn_implementation = "sdpa"
    made = kind(own).eval()
    for parameter in made.parameters():
        parameter.data.normal_(std=0.2)
    return made


def random_tree(rng, size):
    return rng.integers(0, 61, size).tolist(), [-1, *(int(rng.integers(0, n)) for n in range(1, size))]


@pytest.mark.parametrize("name", ["llama", "qwen3", "window"])
@torch.inference_mode()
def test_a_rows_bits_depend_on_its_own_path_alone(name):
    fast = CompiledModel(model(name), max_num_seqs=9, cache_dtype="float32")
    rng = np.random.default_rng(2)
    text = rng.integers(0, 61, 150).tolist()
    fast.prefill(list(range(9)), [text[:-30]] * 9)
    plain = np.stack([_step(fast, 8, token) for token in text[-30:]])
    chain = fast.score([0], trees.TokenTree.chain(np.array([text[-30:]]))).logits[0]
    assert np.array_equal(chain, plain)
    drafted = trees.pad([([text[-30], *rng.integers(0, 61, k).tolist()], [-1, *[0] * k]) for k in range(8)])
    several = fast.score(list(range(8)), drafted).logits
    assert np.array_equal(several[:, 0], np.tile(plain[:1], (8, 1)))
    last = fast.prefill([7], [text[-30:]]).logits[0, 0]
    assert np.array_equal(last, plain[-1])


@torch.inference_mode()
def test_bits_do_not_depend_on_the_number_of_threads():
    """Helpers come and go while passes run: whoever claims a unit does the same with it."""
    reference = model("llama")
    text = np.random.default_rng(3).integers(0, 61, 200).tolist()
    one, *others = models = [
        CompiledModel(reference, max_num_seqs=2, threads=n, cache_dtype="float32") for n in (1, 3, 5)
    ]
    assert [fast.num_threads for fast in models] == [1, 3, 5]
    for _ in range(8):
        read = one.prefill([0], [text]).logits
        assert all(np.array_equal(read, fast.prefill([0], [text]).logits) for fast in others)
        chain = trees.pad([(text[:9], list(range(-1, 8))), (text[:3], [-1, 0, 0])])
        scored = one.score([0, 1], chain).logits
        step = one.score([0], trees.TokenTree.roots(np.array([7]))).logits
        for fast in others:
            assert np.array_equal(scored, fast.score([0, 1], chain).logits)
            assert np.array_equal(step, fast.score([0], trees.TokenTree.roots(np.array([7]))).logits), (
                "heads of a group are shared, too"
            )
        for fast in models:
            fast.release([0])
    for number in (0, 65):
        with pytest.raises(InvalidInputError, match=f"threads={number} was given; expected 1 to 64"):
            CompiledModel(reference, threads=number, cache_dtype="float32")
    assert CompiledModel(reference, max_num_seqs=1, threads=None, cache_dtype="float32").num_threads == 1


def _step(fast, slot, token):
    logits = fast.score([slot], trees.TokenTree.roots(np.array([token]))).logits[0, 0]
    fast.commit([slot], Outcome(torch.zeros(1, 0, dtype=torch.int64), torch.tensor([0]), torch.tensor([0])))
    return logits


def proposal(fast, sizes, distribution=(1.0, 0, 1.0, 0.0), seed=0):
    B = len(sizes)
    temperature, top_k, top_p, min_p = distribution
    params = [SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)] * B
    proposed = fast.propose_paths(
        list(range(B)),
        [[7]] * B,
        (list(range(seed, seed + B)), [0] * B, [5] * B),
        [*map(Budget.fixed, sizes)],
        params,
    )
    assert proposed is not None
    return proposed


def test_proposed_rows_are_the_models_distributions():
    reference = model("llama")
    fast = CompiledModel(reference, max_num_seqs=5, cache_dtype="float32")
    fast.prefill([0, 1, 2, 3, 4], [[1, 2, 3, 4]] * 5)
    tree, rows, probs, *_ = proposal(
        fast,
        [
            trees.paths(2, 3),
            trees.paths(3, 2),
            trees.paths(2, 4, 1),
            trees.paths(3, 3, 2),
            trees.ragged(5, 2),
        ],
    )
    assert tree.parents[2].tolist() == [-1, 0, 1, 1, 2, 3, 4, 5]
    assert tree.parents[3, :6].tolist() == [-1, 0, 1, 2, 2, 2]
    assert tree.parents[4, :8].tolist() == [-1, 0, 0, 1, 2, 3, 5, 6]
    for b in range(5):
        for n in range(1, int(tree.is_node[b].sum())):
            above = int(tree.parents[b, n])
            path, length = trees.path_to(tree, np.array([above if i == b else 0 for i in range(5)]))
            text = [1, 2, 3, 4, 7, *(int(tree.tokens[b, m]) for m in path[b, : length[b]])]
            distribution = softmax(reference(torch.tensor([text])).logits[0, -1].detach().numpy())
            assert np.allclose(probs[b, rows[b, n]], distribution, atol=1e-5)


def test_equal_prefixes_share_one_row():
    fast = CompiledModel(model("llama"), max_num_seqs=9, cache_dtype="float32")
    fast.prefill(list(range(9)), [[1, 2, 3, 4]] * 9)
    tree, rows, *_ = proposal(
        fast,
        [trees.paths(4, 3), trees.paths(4, 4, 1), trees.ragged(4, 2, 2, 2)] * 3,
        distribution=(0.2, 0, 1.0, 0.0),
    )
    first = trees.first_copies(tree)
    copies = np.argwhere(first != np.arange(tree.num_nodes))
    assert len(copies)
    for b in range(9):
        for n in range(1, int(tree.is_node[b].sum())):
            for m in range(1, n):
                if first[b, tree.parents[b, n]] == first[b, tree.parents[b, m]]:
                    assert rows[b, n] == rows[b, m]


def test_drawn_tokens_follow_the_reported_row():
    fast = CompiledModel(model("llama"), max_num_seqs=1, cache_dtype="float32")
    fast.prefill([0], [[1, 2, 3, 4]])
    seen = np.zeros(61)
    q = np.zeros(61)
    for seed in range(1500):
        tree, _, probs, *_ = proposal(fast, [trees.paths(2, 1)], distribution=(0.5, 0, 0.8, 0.0), seed=seed)
        seen = seen + np.bincount(tree.tokens[0, 1:], minlength=61)
        q = probs[0, 0]
    assert (seen[q == 0] == 0).all()
    big = q * 3000 > 5
    chi = ((seen - 3000 * q)[big] ** 2 / (3000 * q)[big]).sum()
    assert chi < big.sum() + 5 * (2 * big.sum()) ** 0.5


@pytest.mark.parametrize(
    ("distribution", "kept"), [((1.0, 5, 1.0, 0.0), 5), ((0.0, 0, 1.0, 0.0), 1), ((1.0, 0, 1.0, 1.0), 1)]
)
def test_truncated_distributions_keep_the_largest_tokens(distribution, kept):
    fast = CompiledModel(model("llama"), max_num_seqs=1, cache_dtype="float32")
    fast.prefill([0], [[1, 2, 3, 4]])
    _, _, whole, *_ = proposal(fast, [trees.chain(1)])
    _, _, probs, *_ = proposal(fast, [trees.chain(1)], distribution=distribution)
    assert set(np.flatnonzero(probs[0, 0]).tolist()) == set((-whole[0, 0]).argsort()[:kept].tolist())
    assert probs[0, 0].sum().item() == pytest.approx(1, abs=1e-6)


def test_what_is_not_covered_is_refused_with_the_reason():
    with pytest.raises(IncompatibleError, match="silu"):
        CompiledModel(LlamaForCausalLM(LlamaConfig(**SMALL, hidden_act="relu")), cache_dtype="float32")
    fast = CompiledModel(model("llama"), max_num_seqs=1, cache_dtype="float32")
    with pytest.raises(CapacityError, match=r"slots \[1\]"):
        fast.prefill([1], [[1]])
    with pytest.raises(CapacityError, match="256"):
        fast.prefill([0], [[1] * 300])


@pytest.mark.parametrize("trunk", [0, 1, 2])
def test_coupled_proposals_are_won_by_the_smallest_arrival(trunk):
    fast = CompiledModel(model("llama"), max_num_seqs=1, cache_dtype="float32")
    fast.prefill([0], [[1, 2, 3, 4]])
    key = NoiseKey.of([3], [1], [5])
    asked = [0], [[7]], ([3], [1], [5]), [Budget.fixed(trees.paths(2, 3, trunk))], [SamplingParams()]
    proposed = fast.propose_paths(*asked, draft_sampling=DraftSampling.COUPLED)
    assert proposed is not None
    tree, rows, probs, *_ = proposed
    for n in range(1, tree.num_nodes):
        depth = int(trees.depths(tree)[0, n]) - 1
        clocks = noise.clocks(NoiseKey(key.seed, key.sample, key.position + depth), 61)[0]
        ranking = (-probs[0, rows[0, n]] / clocks).argsort()
        assert tree.tokens[0, n] == ranking[n - 1 - trunk if depth == trunk else 0]


@pytest.mark.parametrize("top_k", [1, 2, 7, 39, 40])
def test_a_draft_distribution_keeps_the_largest_and_what_equals_the_least_of_them(top_k):
    logits = np.random.default_rng(top_k).integers(0, 9, 40).astype(np.float32)
    out = np.empty_like(logits)
    samplings, bias = draft_samplings([SamplingParams(top_k=top_k)], 40, np.zeros(0, np.int64))
    draft_distribution(sync, logits.copy(), bias[0], samplings[0], out, np.empty(40, np.int32))
    assert ((out > 0) == (logits >= np.sort(logits)[40 - top_k])).all()
    assert out.sum() == pytest.approx(1.0)


def test_a_proposal_reads_many_pending_tokens():
    fast = CompiledModel(model("llama"), max_num_seqs=2, cache_dtype="float32")
    text = [i % 61 for i in range(90)]
    fast.prefill([0], [text[:3]])
    fast.prefill([1], [text[:89]])
    asked = (
        [text[3:], text[89:]],
        ([1, 1], [0, 0], [90, 90]),
        [Budget.fixed(trees.chain(4))] * 2,
        [SamplingParams()] * 2,
    )
    proposed = fast.propose_paths([0, 1], *asked)
    assert proposed is not None
    tree, _, probs, *_ = proposed
    assert np.array_equal(probs[0], probs[1])
    assert np.array_equal(tree.tokens[0], tree.tokens[1])
    assert fast.lengths.tolist() == [89, 89]


@torch.inference_mode()
def test_weights_that_fit_bfloat16_are_stored_so_with_the_same_bits(monkeypatch):
    reference = model("qwen2").bfloat16().float()
    halved = CompiledModel(reference, max_num_seqs=1, cache_dtype="float32")
    monkeypatch.setattr(packer, "is_exact", lambda *_: False)
    monkeypatch.setattr(compiled_weights, "is_exact", lambda *_: False)
    whole = CompiledModel(reference, max_num_seqs=1, cache_dtype="float32")
    assert (halved.weight_format, whole.weight_format) == ("bfloat16", "float32")
    assert halved.quantization_error == 0
    texts = [list(range(40))]
    assert np.array_equal(halved.prefill([0], texts).logits, whole.prefill([0], texts).logits)


_PREFILL = f"""
import hashlib, torch
from transformers import Qwen2Config, Qwen2ForCausalLM
from polydraft.models.compiled.model import CompiledModel
from polydraft.models.compiled.forward import compiled_forward

torch.set_num_threads(1)
torch.manual_seed(0)
made = Qwen2ForCausalLM(Qwen2Config(**{GROUPED})).eval()
for parameter in made.parameters():
    parameter.data.normal_(std=0.2)
logits = CompiledModel(made, max_num_seqs=1).prefill([0], [list(range(40))]).logits
print(sum(compiled_forward.stats.cache_hits.values()), hashlib.sha256(logits.tobytes()).hexdigest())
"""


def test_no_function_of_a_pass_lets_the_compiler_reorder_sums():
    """What is compiled for a process and what it loads are linked to other copies, which such a flag lets round differently."""
    compiled_from = [m for name, m in sys.modules.items() if name.startswith("polydraft.models.")]
    functions = {
        f
        for m in compiled_from
        for f in vars(m).values()
        if isinstance(f, Dispatcher) and f.__module__ == m.__name__
    }
    assert compiled_forward in functions and len(functions) > 20
    assert not [f for f in functions if f.targetoptions.get("fastmath")]


@pytest.mark.slow
def test_code_that_was_loaded_gives_the_bits_of_code_that_was_compiled(tmp_path):
    """The two are linked to other copies of the functions they call; only unflagged arithmetic is the same in every copy."""
    environment = dict(os.environ, NUMBA_CACHE_DIR=str(tmp_path), NUMBA_NUM_THREADS="1")
    once, again = (
        subprocess.run(
            [sys.executable, "-c", _PREFILL], env=environment, capture_output=True, text=True, check=True
        ).stdout.split()
        for _ in range(2)
    )
    assert (once[0], again[0]) == ("0", "1")
    assert once[1] == again[1]


def _eighths(x):
    """Activations rounded to eight bits in blocks of 32."""
    blocks = torch.nn.functional.pad(x, (0, -x.shape[-1] % 32)).unflatten(-1, (-1, 32))
    scale = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127
    return ((blocks / scale).round() * scale).flatten(-2)[..., : x.shape[-1]]


ROUNDED = {
    "bfloat16": lambda x: x,
    "int8": _eighths,
    "int4": _eighths,
}


@pytest.mark.parametrize("quantization", ROUNDED)
@torch.inference_mode()
def test_a_quantised_model_is_the_model_of_its_format(quantization):
    """In float64: the weights that are stored, times activations that are rounded as the format says."""
    reference = model("llama")
    reference.lm_head.weight = torch.nn.Parameter(reference.model.embed_tokens.weight.clone())
    fast = CompiledModel(reference, max_num_seqs=2, quantization=quantization, cache_dtype="float32")
    lost = total = 0.0
    for linear in (m for m in reference.modules() if isinstance(m, torch.nn.Linear)):
        given = linear.weight.data
        panels = panels_for(*linear.weight.shape, FORMATS[quantization].weights)
        pack(given.numpy(), panels)
        linear.weight.data = torch.from_numpy(unpack(panels, *given.shape))
        lost = lost + float((given - linear.weight).square().sum())
        total = total + float(given.square().sum())
        linear.register_forward_pre_hook(lambda _, x: (ROUNDED[quantization](x[0]),))
    assert fast.weight_format == quantization
    assert fast.quantization_error == pytest.approx((lost / total) ** 0.5, rel=1e-4)
    text = [1, 2, 3, 4, 50, 60]
    chain = fast.score([0], trees.TokenTree.chain(np.array([text]))).logits[0]
    assert np.allclose(
        chain.astype(np.float64),
        reference.double()(torch.tensor([text])).logits[0].numpy(),
        atol=1e-4,
    )
    assert np.array_equal(np.stack([_step(fast, 1, token) for token in text]), chain)


def test_an_unknown_quantization_is_refused():
    with pytest.raises(InvalidInputError, match="'int4'"):
        CompiledModel(model("llama"), quantization="int5", cache_dtype="float32")
