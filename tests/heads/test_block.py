"""Block diffusion: the distribution of a draft is fixed by its order, passes are counted, columns are the target's states in every layer."""

import json
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from polydraft import Engine
from polydraft.core import Budget, Draft, DraftSampling, Outcome, TreeShape
from polydraft.core import geometry as tree
from polydraft.drafters.base import as_one_step
from polydraft.errors import CapacityError, IncompatibleError, InvalidInputError, ModelLoadError
from polydraft.heads.block import ORDERS, BlockDrafter, revealed
from polydraft.heads.block.checkpoint import BlockCheckpoint
from polydraft.heads.block.compiled import CompiledBlock
from polydraft.heads.block.network import BlockModel
from polydraft.heads.block.training import BlockRecipe
from polydraft.heads.checkpoint import embeddings, output_rows
from polydraft.heads.recipe import Material
from polydraft.methods import registry
from polydraft.models import load, pair
from polydraft.verifiers import pairing
from tests.drafters.sessions import proposed, requests

LAYERS = (1, 2, 6)
BLOCK = 4
CHAIN = [Budget.fixed(tree.chain(BLOCK))]


@pytest.fixture(scope="module")
def target():
    return load.load_model(
        str(pair.target_folder()), max_num_seqs=2, max_model_len=256, cache_dtype="float32"
    )


@pytest.fixture(scope="module")
def net(target):
    """A drafter with random weights over every third token."""
    ids = np.arange(0, target.vocab_size, 3)
    recipe = BlockRecipe()
    torch.manual_seed(0)
    made = recipe.fresh(
        Material(
            target, LAYERS, ids, embeddings(target), output_rows(target, ids), {"layers": 2, "block": BLOCK}
        )
    )
    for parameter in made.parameters():
        parameter.data.normal_(std=0.1) if parameter.ndim == 2 else parameter
    made.norm.weight.data.mul_(3)
    for parameter in made.parameters():
        parameter.data = parameter.data.bfloat16().float()
    return made


@pytest.fixture(scope="module")
def folder(net, target, tmp_path_factory):
    where = tmp_path_factory.mktemp("diffusion")
    ids = np.arange(0, target.vocab_size, 3)
    BlockRecipe().export(net, Material(target, LAYERS, ids, net.embeddings, net.output, {}), where)
    return where


def text(target, length):
    return torch.randint(0, target.vocab_size, (length,), generator=torch.Generator().manual_seed(1)).tolist()


def drafter_of(folder, target, kind="chain", form="compiled", **options):
    checkpoint = BlockCheckpoint.load(folder)
    compiled = form == "compiled"
    model = (
        CompiledBlock(checkpoint, target, quantization="float32")
        if compiled
        else BlockModel(checkpoint, target)
    )
    return BlockDrafter(model, checkpoint.layers, kind, **options)


both_forms = pytest.mark.parametrize("form", ["compiled", "torch"])


def begun(drafter, target, ids):
    (state,) = drafter.start(requests(ids))
    scores = target.prefill([0], [ids[:-1]], hidden=drafter.needs.hidden)
    target.release([0])
    return drafter.read([state], scores)[0], torch.cat([scores.hidden[layer] for layer in LAYERS], -1)


def distributions_of(net, states, root, block, n):
    """Those of the net in torch. block: token or None where there is a mask."""
    tokens = torch.tensor([[[root, *[0 if t is None else t for t in block]]]])
    masked = torch.tensor([[[False, *[t is None for t in block]]]])
    with torch.no_grad():
        return net.logits(states, tokens, masked, torch.tensor([n]))[0, 0].softmax(-1)


@both_forms
@pytest.mark.parametrize("length", [2, 3, 40, 100])
def test_one_pass_has_the_distributions_of_the_trained_drafter(net, folder, target, length, form):
    ids = text(target, length)
    drafter = drafter_of(folder, target, form=form)
    state, states = begun(drafter, target, ids)
    before = drafter.model.passes
    draft = drafter.propose([state], CHAIN)
    assert drafter.info.draft_sampling == {DraftSampling.IID}
    expected = distributions_of(net, states, ids[-1], [None] * BLOCK, length - 2)
    torch.testing.assert_close(draft.probs[0][:, ::3], expected, atol=2e-5, rtol=1e-3)
    assert not draft.probs[0][:, 1::3].any() and not draft.probs[0][:, 2::3].any()
    assert drafter.model.passes - before == 1 + BLOCK  # one over the block; the others copy its rows by depth
    assert (expected[0] - expected[1]).abs().sum() > 0.05, "distributions that differ"


@both_forms
@pytest.mark.parametrize("steps", [1, 2, 3, 4, 9])
def test_from_the_left_rows_are_those_of_the_step_that_revealed_and_passes_are_steps(
    net, folder, target, steps, form
):
    ids = text(target, 20)
    drafter = drafter_of(folder, target, "left_to_right", form, steps=steps)
    state, states = begun(drafter, target, ids)
    before = drafter.model.passes
    draft = drafter.propose([state], CHAIN)
    steps = min(steps, BLOCK)
    assert drafter.model.passes - before == steps
    drafted = draft.tree.tokens[0, 1:].tolist()
    block = [None] * BLOCK
    for step in range(steps):
        distribution = distributions_of(net, states, ids[-1], block, len(ids) - 2)
        for j in revealed(
            "left_to_right", step, steps, [j for j in range(BLOCK) if block[j] is None], [], []
        ):
            torch.testing.assert_close(
                draft.probs[0, int(draft.rows[0, j + 1]), ::3], distribution[j], atol=2e-5, rtol=1e-3
            )
            block[j] = drafted[j]
    assert block == drafted


@pytest.mark.parametrize("order", ORDERS)
def test_the_distribution_of_a_draft_is_known_before_it_is_drawn_and_the_mask_is_never_proposed(
    order, folder, target
):
    drafter = drafter_of(folder, target, order, steps=3)
    ids = text(target, 20)
    state, _ = begun(drafter, target, ids)
    for length in range(20):
        again = replace(state, context=(*state.context[:-1], length))
        draft = drafter.propose([again], CHAIN)
        assert {draft.sampling} == drafter.info.draft_sampling == ORDERS[order].draft_sampling
        assert draft.tree.tokens.max() < target.vocab_size and draft.tree.num_nodes == 1 + BLOCK
        assert (draft.probs is None) == (order != "left_to_right")


def test_random_places_are_revealed_at_the_chance_of_the_schedule_and_all_at_last():
    rng = np.random.default_rng(0)
    counts = np.zeros(4)
    times = 4000
    for _ in range(times):
        masked = [0, 1, 2, 3]
        for step in range(4):
            shown = revealed("random", step, 4, masked, [], rng.random(4).tolist())
            masked = [j for j in masked if j not in shown]
            counts[step] += len(shown)
        assert not masked
    np.testing.assert_allclose(counts / times, 1, atol=0.06)


def test_the_engine_refuses_an_order_out_of_line_with_the_ratio_test():
    for order in ("random", "confidence"):
        assert "match" in pairing.fitting(ORDERS[order])
        assert not {"speculative", "block"} & set(pairing.fitting(ORDERS[order]))
    assert "speculative" in pairing.fitting(ORDERS["left_to_right"])


def test_an_engine_of_confidence_and_the_ratio_test_is_refused(folder, target):
    with pytest.raises(IncompatibleError, match="confidence"):
        Engine.of(
            target, drafter="block:confidence", verifier="speculative", drafter_options={"weights": folder}
        )


P = (np.array([0.5, 0.5]), np.array([[0.3, 0.7], [0.5, 0.5]]))
"""The target's distributions of the first token, and of the second given the first."""
JOINT = np.array([[0.9 * 0.4, 0.3 * 0.6], [0.1 * 0.4, 0.7 * 0.6]])
"""What the denoiser believes of both places."""


def rows_of(order, x):
    """The denoiser's rows at the steps at which the places were revealed."""
    first = JOINT.sum(1)
    second = JOINT.sum(0)
    if order == "together":
        return [first, second]
    return [first, JOINT[x[0]] / first[x[0]]] if order == "left" else [JOINT[:, x[1]] / second[x[1]], second]


def variation(order, rule):
    """Total variation between two emitted tokens and the target's distribution, by enumeration of all drafts of two tokens from two."""
    emitted = np.zeros((2, 2))
    chain = torch.tensor([[-1, 0, 1]])
    for x in product(range(2), repeat=2):
        rows = rows_of(order, x)
        chance = rows[0][x[0]] * rows[1][x[1]]
        tokens = tree.TokenTree.chain(torch.tensor([[0, *x]]))
        draft = Draft(tokens, DraftSampling.IID, TreeShape.CHAIN, torch.tensor(np.array([rows])), chain)
        if rule == "match":
            draft = Draft(tokens, DraftSampling.POINT_MASS, TreeShape.CHAIN, None, torch.full((1, 3), -1))
        verdict = registry.verifier(rule)(draft, torch.tensor(np.array([[P[0], P[1][x[0]], [0.5, 0.5]]])))
        after = [verdict.after(torch.tensor([node]))[0].numpy() for node in range(2)]
        stop = verdict.stop[0].numpy() * chance
        emitted += stop[0] * after[0][:, None] * P[1]
        emitted[x[0]] += stop[1] * after[1]
        emitted[x] += stop[2]
    return abs(emitted - P[0][:, None] * P[1]).sum() / 2


def test_rows_that_saw_a_token_to_the_right_bias_the_ratio_test_and_no_other_rows_do():
    assert variation("right", "speculative") == pytest.approx(0.116, abs=1e-6)
    assert variation("left", "speculative") == pytest.approx(0, abs=1e-12)
    assert variation("together", "speculative") == pytest.approx(0, abs=1e-12)
    assert variation("right", "match") == pytest.approx(0, abs=1e-12)


def spoiled(folder, tmp_path, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    return tmp_path


def test_the_states_enter_every_layer(folder, target, tmp_path):
    """Without the columns' values in one layer a draft is another."""
    ids = text(target, 20)
    drafter = drafter_of(folder, target)
    whole = drafter.propose([begun(drafter, target, ids)[0]], CHAIN).probs
    for layer in range(2):
        other = drafter_of(folder, target)
        state, _ = begun(other, target, ids)
        other.model.net.model.memory.values[layer, :, :, :, : len(ids) - 1] = 0
        less = other.propose([state], CHAIN).probs
        assert (whole[0, 0] - less[0, 0]).abs().sum() > 0.01


def test_columns_after_rounds_are_those_of_a_fresh_reading(folder, target):
    ids = text(target, 30)
    drafter = drafter_of(folder, target)
    state, _ = begun(drafter, target, ids)
    target.prefill([1], [ids[:-1]])
    for accepted in (2, 0, 4, 1):
        draft = drafter.propose([state], CHAIN)
        scores = target.score([1], draft.tree, hidden=drafter.needs.hidden)
        path = np.arange(1, accepted + 1)[None]
        outcome = Outcome.of(path, np.array([accepted]), np.array([7]))
        target.commit([1], outcome)
        ids = [*ids, *outcome.emitted(draft.tree)[0]]
        (state,) = drafter.observe([state], outcome, replace(scores, tree=draft.tree))
    target.release([1])
    other = drafter_of(folder, target)
    fresh = other.propose([begun(other, target, ids)[0]], CHAIN)
    draft = drafter.propose([state], CHAIN)
    assert drafter.model.net.model.memory.lengths[state.slot] == len(ids) - 1
    assert draft.tree.tokens.tolist() == fresh.tree.tokens.tolist()
    torch.testing.assert_close(draft.probs, fresh.probs, atol=1e-5, rtol=1e-3)


@both_forms
@pytest.mark.parametrize("order", [None, "left_to_right"])
def test_what_was_emitted_in_a_pause_is_cached_in_pieces_and_drafts_the_same(folder, target, form, order):
    ids = text(target, 90)
    drafter = drafter_of(folder, target, order or "chain", form)
    scores = target.prefill([0], [ids[:-1]], hidden=drafter.needs.hidden)
    target.release([0])
    (state,) = drafter.start(requests(ids[:1]))
    outcome, told = as_one_step([ids[0]], [ids[1:]])
    (state,) = drafter.observe([state], outcome, replace(told, hidden=scores.hidden))
    assert state.cursor.num_unread(ids) == 89
    whole = drafter.propose([state], CHAIN)
    drafter.release([state])
    (state,) = drafter.observe(drafter.start(requests(ids[:1])), outcome, replace(told, hidden=scores.hidden))
    for count in (30, 40):
        state.cursor.read(ids, count)
    assert state.cursor.num_unread(ids) == 19
    draft = drafter.propose([state], CHAIN)
    assert torch.equal(draft.tree.tokens, whole.tree.tokens)
    (read, _) = begun(drafter, target, ids)
    torch.testing.assert_close(
        draft.probs, drafter.propose([replace(read, request=state.request)], CHAIN).probs
    )
    drafter.release([state, read])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop("mask"), "no tensor mask"),
        (lambda t: t.update({"fc.weight": torch.ones(3, 3)}), "fc.weight of shape"),
    ],
)
def test_a_folder_that_is_no_drafter_is_refused_by_name(folder, tmp_path, change, said):
    with pytest.raises(ModelLoadError, match=said):
        BlockCheckpoint.load(spoiled(folder, tmp_path, change))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("sees", ["all", "some"]),
        ("sees", ["all"]),
        ("windows", [None, 0]),
        ("slots", "four"),
        ("in_place", "no"),
        ("markov_head_type", "cubic"),
        ("markov_rank", -1),
    ],
)
def test_a_configuration_that_no_head_computes_is_refused_by_its_field(folder, tmp_path, field, value):
    where = spoiled(folder, tmp_path, lambda tensors: None)
    config = json.loads((where / "config.json").read_text())
    (where / "config.json").write_text(json.dumps(config | {field: value}))
    with pytest.raises(ModelLoadError, match=field):
        BlockCheckpoint.load(where)


def test_no_steps_and_another_target_are_refused_and_longer_blocks_are_cut(folder, target):
    with pytest.raises(InvalidInputError, match="steps=0"):
        drafter_of(folder, target, "confidence", steps=0)
    draft = load.load_model(str(pair.draft_folder()), max_num_seqs=1)
    with pytest.raises(IncompatibleError, match="numbers"):
        CompiledBlock(BlockCheckpoint.load(folder), draft)
    for kind in ("chain", *ORDERS):
        drafter = drafter_of(folder, target, kind)
        state, _ = begun(drafter, target, text(target, 20))
        assert proposed(drafter, [state], [Budget.fixed(tree.chain(9))]).tree.num_nodes == 1 + BLOCK
        with pytest.raises(CapacityError, match=rf"expected at most {BLOCK}\b"):
            drafter.propose([state], [Budget.fixed(tree.chain(BLOCK + 1))])
