"""Block diffusion: the distribution of a draft is fixed by its order, passes are counted, columns are the target's states in every layer."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from polydraft.core import Budget, DraftSampling, Outcome
from polydraft.core import geometry as tree
from polydraft.drafters.base import as_one_step
from polydraft.errors import CapacityError, IncompatibleError, ModelLoadError
from polydraft.heads.block import BlockDrafter
from polydraft.heads.block.checkpoint import BlockCheckpoint
from polydraft.heads.block.compiled import CompiledBlock
from polydraft.heads.block.network import BlockModel
from polydraft.heads.block.training import BlockRecipe
from polydraft.heads.checkpoint import embeddings, output_rows
from polydraft.heads.recipe import Material
from polydraft.models import load, pair
from polydraft.models.torch.door import into
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
            target,
            LAYERS,
            ids,
            into(embeddings(target)),
            into(output_rows(target, ids)),
            {"layers": 2, "block": BLOCK},
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


def drafter_of(folder, target, kind="chain", form="compiled", drafter=BlockDrafter, **options):
    checkpoint = BlockCheckpoint.load(folder)
    compiled = form == "compiled"
    model = (
        CompiledBlock(checkpoint, target, quantization="float32")
        if compiled
        else BlockModel(checkpoint, target)
    )
    return drafter(model, checkpoint.layers, kind, **options)


both_forms = pytest.mark.parametrize("form", ["compiled", "torch"])


def begun(drafter, target, ids):
    (state,) = drafter.start(requests(ids))
    scores = target.prefill([0], [ids[:-1]], hidden=drafter.needs.hidden)
    target.release([0])
    states = torch.from_numpy(np.concatenate([scores.hidden[layer] for layer in LAYERS], -1))
    return drafter.read([state], scores)[0], states


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
    np.testing.assert_allclose(draft.probs[0][:, ::3], expected, atol=2e-5, rtol=1e-3)
    assert not draft.probs[0][:, 1::3].any() and not draft.probs[0][:, 2::3].any()
    assert drafter.model.passes - before == 1 + BLOCK  # one over the block; the others copy its rows by depth
    assert (expected[0] - expected[1]).abs().sum() > 0.05, "distributions that differ"


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
        assert np.abs(whole[0, 0] - less[0, 0]).sum() > 0.01


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
    np.testing.assert_allclose(draft.probs, fresh.probs, atol=1e-5, rtol=1e-3)


def check_a_pause(drafter, target):
    """What was emitted in a pause is cached in pieces, and drafts are the same."""
    ids = text(target, 90)
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
    assert np.array_equal(draft.tree.tokens, whole.tree.tokens)
    (read, _) = begun(drafter, target, ids)
    np.testing.assert_allclose(
        draft.probs,
        drafter.propose([replace(read, request=state.request)], CHAIN).probs,
        rtol=1.3e-6,
        atol=1e-5,
    )
    drafter.release([state, read])


@both_forms
def test_what_was_emitted_in_a_pause_is_cached_in_pieces_and_drafts_the_same(folder, target, form):
    check_a_pause(drafter_of(folder, target, form=form), target)


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


def test_another_target_is_refused_and_longer_blocks_are_cut(folder, target):
    draft = load.load_model(str(pair.draft_folder()), max_num_seqs=1)
    with pytest.raises(IncompatibleError, match="numbers"):
        CompiledBlock(BlockCheckpoint.load(folder), draft)
    drafter = drafter_of(folder, target)
    state, _ = begun(drafter, target, text(target, 20))
    assert proposed(drafter, [state], [Budget.fixed(tree.chain(9))]).tree.num_nodes == 1 + BLOCK
    with pytest.raises(CapacityError, match=rf"expected at most {BLOCK}\b"):
        drafter.propose([state], [Budget.fixed(tree.chain(BLOCK + 1))])
