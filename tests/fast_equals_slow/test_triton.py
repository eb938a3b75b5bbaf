"""The Triton kernels through Triton's interpreter, against the readable rule; and compiled for GPUs that need not be here."""

import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton", reason="Triton cannot be imported here")

from polydraft.core import Draft, NoiseKey, SiblingLaw, TokenTree, TreeShape
from polydraft.verifiers.block import _rule_for, block
from polydraft.verifiers.fast import device, triton
from tests.fast_equals_slow.walk_rounds import B, first_nodes, rounds, same

CHAIN = (TreeShape.CHAIN, SiblingLaw.IID)


def some(draft: Draft, logits: torch.Tensor, key: NoiseKey, count: int) -> tuple[Draft, torch.Tensor, NoiseKey]:
    """The first rows of a batch: the interpreter is slow."""
    tree = TokenTree(draft.tree.tokens[:count], draft.tree.parents[:count])
    few = Draft(tree, draft.law, draft.shape, draft.probs[:count], draft.rows[:count])
    return few, logits[:count], NoiseKey(key.seed[:count], key.sample[:count], key.position[:count])


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "ragged"])
def test_the_kernels_find_what_the_readable_rule_samples(whole):
    draft, logits, key = rounds(*CHAIN, 0)
    if not whole:
        draft = first_nodes(draft, [1 + b % draft.tree.num_nodes for b in range(B)])
    few, x, keys = some(draft, logits, key, 40)
    found = device.walk(triton.block, few, x, keys)
    assert same(found, block(few, x.softmax(-1)).sample(keys))
    assert set(found.num_accepted.tolist()) >= {0, 1, 2, 3}


def test_a_vocabulary_of_several_spans_and_a_rest():
    g = torch.Generator().manual_seed(1)
    V, count = 2 * triton.SPAN + 37, 5
    target = torch.randn(count, 4, V, generator=g) * 2
    q = (target[:, :3] + 0.5 * torch.randn(count, 3, V, generator=g)).softmax(-1)
    tokens = torch.cat(
        [torch.zeros(count, 1, dtype=torch.int64), torch.multinomial(q.flatten(0, 1), 1, generator=g).view(count, 3)], 1
    )
    draft = Draft(TokenTree.chain(tokens), SiblingLaw.IID, TreeShape.CHAIN, q, torch.tensor([[-1, 0, 1, 2]] * count))
    key = NoiseKey.of(range(count), [0] * count, [5] * count)
    found = device.walk(triton.block, draft, target, key)
    assert same(found, block(draft, target.softmax(-1)).sample(key))
    assert found.num_accepted.max() > 0 and found.token.max() > triton.SPAN


def test_masked_tokens_are_never_emitted():
    few, x, key = some(*rounds(*CHAIN, 1), 12)
    x = x.clone()
    x[..., ::2] = -torch.inf
    emitted = [t for row in device.walk(triton.block, few, x, key).emitted(few.tree) for t in row]
    assert len(emitted) > 12 and all(token % 2 for token in emitted)


@pytest.mark.parametrize("fault", [float("nan"), float("inf"), None])
def test_faulty_logits_and_impossible_tokens_are_left_to_the_readable_path(fault):
    few, x, key = some(*rounds(*CHAIN, 0), 9)
    if fault is None:
        few.probs[7, 0, few.tree.tokens[7, 1]] = 0
    else:
        x[7, 0, 5] = fault
    assert device.walk(triton.block, few, x, key) is None


def test_a_bare_root_gives_one_token_of_the_target():
    draft, logits, key = rounds(*CHAIN, 0)
    roots = Draft.empty(draft.tree.tokens[:6, 0])
    keys = NoiseKey(key.seed[:6], key.sample[:6], key.position[:6])
    found = device.walk(triton.block, roots, logits[:6, :1], keys)
    assert same(found, device.walk(device.block, roots, logits[:6, :1], keys))


def test_block_verification_takes_the_kernels_on_a_gpu():
    assert _rule_for(torch.device("cuda")) is triton.block
    assert _rule_for(torch.device("meta")) is device.block


AHEAD = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from polydraft.verifiers.fast import triton as kernels
for capability in (80, 90):
    for name, signature in kernels.SIGNATURES.items():
        source = ASTSource(getattr(kernels, name), signature, constexprs={"SPAN": kernels.SPAN})
        made = triton.compile(source, target=GPUTarget("cuda", capability, 32))
        assert f"sm_{capability}" in made.asm["ptx"] and made.asm["cubin"], name
        print(name, capability, len(made.asm["cubin"]))
"""


def test_the_kernels_compile_for_gpus():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", AHEAD], env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(done.stdout.splitlines()) == 2 * len(triton.SIGNATURES)
