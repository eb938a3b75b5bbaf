"""The Triton kernels through Triton's interpreter, against the readable rules and the CPU's noise; and compiled for GPUs that need not be here."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton cannot be imported here")

import triton as language
import triton.language as tl

from polydraft import noise, registry
from polydraft.core import Draft, NoiseKey, SiblingLaw, TokenTree, TreeShape
from polydraft.models.static import attention, table
from polydraft.models.static.triton_attention import tree_attention
from polydraft.verifiers import block as block_module
from polydraft.verifiers import race as race_module
from polydraft.verifiers.block import block
from polydraft.verifiers.fast import device, triton, triton_noise
from tests.fast_equals_slow.walk_rounds import B, first_nodes, rounds, same

CHAIN = (TreeShape.CHAIN, SiblingLaw.IID)


def walk(draft, logits, key):
    return device.outcome(triton.block(draft, logits, key))


def some(draft: Draft, logits: torch.Tensor, key: NoiseKey, count: int) -> tuple[Draft, torch.Tensor, NoiseKey]:
    """The first rows of a batch: the interpreter is slow."""
    tree = TokenTree(draft.tree.tokens[:count], draft.tree.parents[:count])
    keys = NoiseKey(key.seed[:count], key.sample[:count], key.position[:count])
    return Draft(tree, draft.law, draft.shape, draft.probs[:count], draft.rows[:count], keys), logits[:count], keys


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "ragged"])
def test_the_kernels_find_what_the_readable_rule_samples(whole):
    draft, logits, key = rounds(*CHAIN, 0)
    if not whole:
        draft = first_nodes(draft, [1 + b % draft.tree.num_nodes for b in range(B)])
    few, x, keys = some(draft, logits, key, 30)
    found = walk(few, x, keys)
    assert same(found, block(few, x.softmax(-1)).sample(keys))
    assert set(found.num_accepted.tolist()) >= {0, 1, 2, 3}


def test_a_vocabulary_of_several_parts_and_a_rest(monkeypatch):
    monkeypatch.setattr(triton, "PART", 64)
    monkeypatch.setattr(triton, "SPAN", 16)
    g = torch.Generator().manual_seed(1)
    V, count = 3 * 64 + 5, 12
    target = torch.randn(count, 4, V, generator=g) * 2
    q = (target[:, :3] + 0.5 * torch.randn(count, 3, V, generator=g)).softmax(-1)
    tokens = torch.cat(
        [torch.zeros(count, 1, dtype=torch.int64), torch.multinomial(q.flatten(0, 1), 1, generator=g).view(count, 3)], 1
    )
    draft = Draft(TokenTree.chain(tokens), SiblingLaw.IID, TreeShape.CHAIN, q, torch.tensor([[-1, 0, 1, 2]] * count))
    key = NoiseKey.of(range(count), [0] * count, [5] * count)
    found = walk(draft, target, key)
    assert same(found, block(draft, target.softmax(-1)).sample(key))
    assert found.num_accepted.max() > 0 and found.token.max() > triton.PART


def test_masked_tokens_are_never_emitted():
    few, x, key = some(*rounds(*CHAIN, 1), 12)
    x = x.clone()
    x[..., ::2] = -torch.inf
    emitted = [t for row in walk(few, x, key).emitted(few.tree) for t in row]
    assert len(emitted) > 12 and all(token % 2 for token in emitted)


@pytest.mark.parametrize("fault", [float("nan"), float("inf"), None])
def test_faulty_logits_and_impossible_tokens_are_left_to_the_readable_path(fault):
    few, x, key = some(*rounds(*CHAIN, 0), 9)
    if fault is None:
        few.probs[7, 0, few.tree.tokens[7, 1]] = 0
    else:
        x[7, 0, 5] = fault
    assert walk(few, x, key) is None


def test_a_bare_root_gives_one_token_of_the_target():
    draft, logits, key = rounds(*CHAIN, 0)
    roots = Draft.empty(draft.tree.tokens[:6, 0])
    keys = NoiseKey(key.seed[:6], key.sample[:6], key.position[:6])
    found = walk(roots, logits[:6, :1], keys)
    assert same(found, device.walk(device.block, roots, logits[:6, :1], keys))


def test_walks_take_the_kernels_where_they_run(monkeypatch):
    few, x, key = some(*rounds(*CHAIN, 0), 4)
    for module, rule in ((block_module, block), (race_module, registry.verifier("race"))):
        expected = rule.walk(few, x, key)
        with monkeypatch.context() as patch:
            patch.setattr(module, "has_kernels", lambda where: True)
            patch.setattr(device, "decide", None)
            assert same(rule.walk(few, x, key), expected)


@language.jit
def _noise(key, clocks, uniforms, START: tl.constexpr, COUNT: tl.constexpr):
    index = START + tl.arange(0, COUNT)
    high, low = triton_noise.words(key, triton_noise.RACE, index, 2)
    tl.store(clocks + index - START, triton_noise.clock(high, low))
    tl.store(uniforms + index - START, triton_noise.uniform(key, triton_noise.STOP, index))


@pytest.mark.parametrize("start", [0, 5])
@pytest.mark.parametrize(("seed", "sample", "position"), [(0, 0, 0), (-7123456789012345, 2**32 - 1, 10**9 + 7)])
def test_noise_has_the_bits_of_the_cpu(seed, sample, position, start):
    given, found = torch.tensor([seed, sample, position]), torch.zeros(2, 2048, dtype=torch.float64)
    _noise[(1,)](given, found[0], found[1], start, 2048, enable_fp_fusion=False)
    key = NoiseKey.of([seed], [sample], [position + 2])
    assert torch.equal(found[0], noise.clocks(key, start + 2048)[0, start:])
    key = NoiseKey.of([seed], [sample], [position])
    assert torch.equal(found[1], noise.uniforms(key, noise.Stream.STOP, 2048, start=start)[0])


@pytest.mark.parametrize(
    ("name", "shape", "law"),
    [
        ("race", TreeShape.CHAIN, SiblingLaw.IID),
        ("race", TreeShape.BY_POSITION, SiblingLaw.IID),
        ("list_race", TreeShape.PATHS, SiblingLaw.LISTED),
    ],
)
def test_races_find_what_the_compiled_walk_finds(name, shape, law, monkeypatch):
    monkeypatch.setattr(triton, "PART", 32)  # so that a row has several parts
    monkeypatch.setattr(triton, "SPAN", 16)
    few, x, key = some(*rounds(shape, law, 0), 8)
    x = x.clone()
    x[3, :, ::2] = -torch.inf
    rule = registry.verifier(name)
    found = device.outcome(triton.race(rule.active)(few, x, key))
    assert same(found, rule.walk(few, x, key))
    assert found.num_accepted.max() > 0


def test_faulty_logits_of_a_race_are_left_to_the_readable_path():
    few, x, key = some(*rounds(*CHAIN, 0), 9)
    x[7, 0, 5] = torch.nan
    assert device.outcome(triton.race(registry.verifier("race").active)(few, x, key)) is None


def trees(chance, lengths, rows, heads, groups, width, columns, dtype):
    """Queries of random trees, a cache of random numbers, and the table of the pass: sequences in slots that are not their rows."""
    slots = np.arange(len(lengths))[::-1].copy() + 1
    kept = np.zeros(len(lengths) + 1, np.int64)
    kept[slots] = lengths
    parents = np.array([[-1, *(chance.integers(max(0, n - 3), n) for n in range(1, rows))] for _ in lengths])
    nodes = np.broadcast_to(np.arange(rows), parents.shape)
    g = torch.Generator().manual_seed(int(chance.integers(99)))
    q = torch.randn(len(lengths), rows, heads, width, generator=g).to(dtype)
    keys, values = (torch.randn(len(kept), columns, groups, width, generator=g).to(dtype) for _ in range(2))
    return (
        q,
        keys,
        values,
        torch.from_numpy(table.filled((len(lengths), rows), slots, kept, table.Rows(nodes, nodes, nodes, parents))),
    )


@pytest.mark.parametrize(
    ("lengths", "rows", "heads", "groups", "width"),
    [([0], 1, 4, 2, 16), ([700, 3], 5, 4, 2, 16), ([130, 0, 64], 8, 6, 2, 24), ([300], 70, 2, 2, 16), ([65], 3, 8, 1, 64)],
)
def test_attention_of_trees_is_that_of_torch_operations(lengths, rows, heads, groups, width):
    q, keys, values, given = trees(np.random.default_rng(1), lengths, rows, heads, groups, width, 1024, torch.float32)
    found = tree_attention(q, keys, values, given)
    expected = attention.tree(q, keys, values, given, table.fields(given), max(lengths), rows)
    assert torch.allclose(found, expected, atol=1e-5)
    given[:, -1] -= 1  # and one column less is another number
    assert not torch.allclose(tree_attention(q, keys, values, given.clamp(min=-1)), expected, atol=1e-3)


def test_attention_in_half_precision_is_near_that_in_single():
    q, keys, values, given = trees(
        np.random.default_rng(2), [200, 90], 4, 4, 2, 32, 512, torch.float16
    )  # the interpreter has no bfloat16
    expected = attention.tree(q.float(), keys.float(), values.float(), given, table.fields(given), 200, 4)
    assert torch.allclose(tree_attention(q, keys, values, given).float(), expected, atol=0.01)


AHEAD = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from polydraft.models.static import triton_attention as attention
from polydraft.verifiers.fast import triton as verification
sizes = {"SPAN": verification.SPAN, "PARTS": 8, "D": 64, "ROWS": 16, "BLOCK": attention.BLOCK}
kernels = [(verification, name, types) for name, types in verification.SIGNATURES.items()]
kernels += [(attention, name, types) for dtype in ("bf16", "fp32") for name, types in attention.signatures(dtype).items()]
for capability in (80, 90):
    for module, name, types in kernels:
        given = {key: sizes[key] for key, kind in types.items() if kind == "constexpr"}
        options = {"enable_fp_fusion": False} if name == "arrive" else {}
        source = ASTSource(getattr(module, name), types, constexprs=given)
        made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        assert f"sm_{capability}" in made.asm["ptx"] and made.asm["cubin"], name
        if name == "arrive":
            assert "fma.rn.f64" not in made.asm["ptx"], "another number than the CPU's"
            assert "3FE5555555555555" in made.asm["ptx"].upper(), "2/3 in float64"
        print(name, capability, len(made.asm["cubin"]))
"""


@pytest.mark.slow
def test_the_kernels_compile_for_gpus():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", AHEAD], env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(done.stdout.splitlines()) == 2 * (len(triton.SIGNATURES) + 4)
