"""Rows of a mixture of experts: who is chosen, how rows are grouped, and what comes of it, against the plain forms in torch."""

import numpy as np
import pytest
import torch
from numba import njit
from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from polydraft.models.matrices.formats import BLOCKS
from polydraft.models.matrices.products import BYTES, EXACT, MatrixFormat, packed
from polydraft.models.matrices.rounding import quantize_rows, rounded_bytes
from polydraft.models.mixers.experts.routing import (
    SIGMOID,
    Routing,
    choose,
    clamped_gate,
    combine,
    gather,
    group,
    multiply_experts,
    new_choices,
)
from tests.models.blocks import packed_blocks, random_blocks
from tests.support.closeness import assert_close

OUTPUTS = 70
NOTHING = np.zeros(0, np.float32)
ROUTINGS = [
    Routing(8, 2),
    Routing(5, 5, shares=False),
    Routing(40, 4, scale=np.float32(1.5)),
    Routing(16, 3, SIGMOID, 4, 2, True, np.float32(2.5)),
    Routing(12, 2, SIGMOID, 3, 1, False),
]


@njit
def chosen_by(logits, bias, choice, routing, choices):
    for t in range(len(logits)):
        choose(
            choices.logits[t],
            bias,
            choice,
            choice[:0],
            routing,
            choices.eligible[t],
            choices.experts[t],
            choices.weights[t],
        )


@njit
def of_all(x, w, y, out, bias, choices, scratch, gathered, items):
    """Rows through one matrix an expert, in two halves of its items; returns how many experts were active."""
    rows = np.int64(len(x))
    num_active = group(choices, rows)
    quantize_rows(x, x.shape[1], w.rounding, scratch[0], np.int64(0), rows)
    gather(x, choices, gathered, np.int64(0), rows)
    gather(scratch[0], choices, scratch[1], np.int64(0), rows)
    cut = min(np.int64(items), num_active * w.panels)
    for begin, end in ((np.int64(0), cut), (cut, num_active * w.panels)):
        multiply_experts(gathered, w, np.int64(1), scratch[1], y, choices, begin, end)
    for t in range(len(x)):
        combine(y, bias, choices, t, out[t])
    return num_active


@njit
def activated(x, n, bias, out):
    clamped_gate(x, n, bias, np.float32(7.0), np.float32(1.702), out)


def plain_choice(logits, bias, choice, routing):
    """As the routers of transformers do it."""
    logits = logits + bias if len(bias) else logits
    scores = logits.sigmoid() if routing.score == SIGMOID else logits.softmax(-1)
    wanted = scores + choice if len(choice) else scores
    groups = wanted.unflatten(-1, (routing.groups, -1))
    if routing.groups > 1:
        best = groups.topk(2, dim=-1)[0].sum(-1).topk(routing.best_groups, dim=-1)[1]
        keep = torch.zeros(groups.shape[:2]).scatter_(1, best, 1)[..., None].expand_as(groups).flatten(1)
        wanted = wanted.masked_fill(keep == 0, -torch.inf)
    experts = wanted.topk(routing.chosen, dim=-1)[1]
    weights = scores.gather(1, experts)
    return experts, (weights / weights.sum(-1, keepdim=True) if routing.shares else weights) * float(
        routing.scale
    )


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("biased", [False, True])
def test_a_row_chooses_the_experts_and_weights_of_the_plain_form(routing, biased):
    rng = torch.Generator().manual_seed(routing.experts)
    logits = 3 * torch.randn(33, routing.experts, generator=rng)
    bias, choice = (
        torch.randn(routing.experts, generator=rng).numpy() if biased else NOTHING for _ in range(2)
    )
    choices = new_choices(33, routing, routing.experts + 3)
    choices.logits[:, : routing.experts] = logits
    chosen_by(logits.numpy(), bias, choice, routing, choices)
    experts, weights = plain_choice(logits, torch.from_numpy(bias), torch.from_numpy(choice), routing)
    assert choices.experts.tolist() == experts.tolist()
    assert_close(torch.from_numpy(choices.weights), weights)


def test_of_scores_that_are_no_numbers_different_experts_are_chosen_still():
    routing = Routing(6, 3, SIGMOID, 3, 2)
    choices = new_choices(1, routing, 6)
    choices.logits[:] = np.nan
    chosen_by(choices.logits, NOTHING, NOTHING, routing, choices)
    assert len(set(choices.experts[0].tolist())) == 3
    assert set(choices.experts[0].tolist()) <= set(range(6))


def mixture(x, w, bias, choices, items=3):
    """What `of_all` makes of rows whose experts and weights are chosen."""
    places = choices.experts.size
    scratch = np.zeros((2, max(places, len(x)), rounded_bytes(x.shape[1])), np.uint8)
    gathered = np.zeros((places, x.shape[1]), np.float32)
    y = np.zeros((places, w.outputs), np.float32)
    out = np.zeros((len(x), OUTPUTS), np.float32)
    num_active = of_all(x, w, y, out, bias, choices, scratch, gathered, items)
    assert num_active == len(np.unique(choices.experts))
    return out


def random_choices(rng, rows, experts, k):
    choices = new_choices(rows, Routing(experts, k), experts)
    choices.experts[:] = np.stack([rng.permutation(experts)[:k] for _ in range(rows)])
    choices.weights[:] = rng.random((rows, k))
    return choices


@pytest.mark.parametrize(
    ("name", "rounding"), [("float32", EXACT), ("Q8_0", BYTES), ("Q4_K", BYTES), ("MXFP4", EXACT)]
)
@pytest.mark.parametrize(("rows", "experts", "k"), [(1, 4, 4), (7, 3, 1), (40, 6, 2)])
def test_rows_grouped_by_expert_have_the_sum_of_their_experts_and_bits_of_their_own(
    name, rounding, rows, experts, k
):
    rng = np.random.default_rng(rows)
    inputs = BLOCKS[name].inputs if name in BLOCKS else 24
    x = rng.standard_normal((rows, inputs)).astype(np.float32)
    if name in BLOCKS:
        w = packed_blocks(
            name, rounding, [random_blocks(name, OUTPUTS, inputs, e) for e in range(experts + 1)]
        )
    else:
        w = packed(
            list(rng.standard_normal((experts + 1, OUTPUTS, inputs)).astype(np.float32)),
            MatrixFormat(name),
        )
    bias = rng.standard_normal((experts, OUTPUTS)).astype(np.float32)
    choices = random_choices(rng, rows, experts, k)
    out = mixture(x, w, bias, choices)
    matrices = np.stack([w.matrix(1 + e, OUTPUTS, inputs) for e in range(experts)])
    each = (
        np.einsum("toi,ti->to", matrices[choices.experts.reshape(-1)], np.repeat(x, k, 0))
        + bias[choices.experts.reshape(-1)]
    )
    assert_close(
        out,
        (each.reshape(rows, k, -1) * choices.weights[..., None]).sum(1),
        0.02 if rounding == BYTES else 5e-5,
    )
    for t in range(0, rows, 6):
        alone = new_choices(1, Routing(experts, k), experts)
        alone.experts[:], alone.weights[:] = choices.experts[t], choices.weights[t]
        assert np.array_equal(mixture(x[t : t + 1], w, bias, alone)[0], out[t])


def test_the_clamped_gate_is_that_of_gpt_oss():
    layer = GptOssExperts(GptOssConfig(hidden_size=8, intermediate_size=20, num_local_experts=1))
    x = 9 * torch.randn(40, generator=torch.Generator().manual_seed(0))
    bias = torch.linspace(-1, 1, 40)
    out = np.zeros(20, np.float32)
    activated(x.numpy(), 20, bias.numpy(), out)
    both = (x + bias).unflatten(0, (2, 20))
    assert_close(out, layer._apply_gate(both.T.reshape(-1)))
