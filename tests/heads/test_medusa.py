"""Compiled heads of Medusa against the heads as they are trained, and folders that are none."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from polydraft.core import Budget, Outcome, Request, SamplingParams
from polydraft.core import geometry as tree
from polydraft.errors import IncompatibleError, ModelLoadError
from polydraft.heads.checkpoint import head_config, output_rows
from polydraft.heads.folder import kind_of
from polydraft.heads.medusa import MedusaDrafter
from polydraft.heads.medusa.checkpoint import MedusaCheckpoint
from polydraft.heads.medusa.compiled import CompiledMedusa
from polydraft.heads.medusa.network import MedusaHeads, MedusaModel, MedusaRecipe
from polydraft.heads.recipe import Material
from polydraft.models import load, pair
from polydraft.models.torch.door import into
from tests.drafters.sessions import proposed
from tests.heads.test_eagle import spoil, text

HEADS = 3
BLOCKS = 2


@pytest.fixture(scope="module")
def target():
    return load.load_model(str(pair.target_folder()), max_num_seqs=3, max_model_len=256)


@pytest.fixture(scope="module")
def heads(target):
    torch.manual_seed(0)
    ids = np.arange(0, target.vocab_size, 3)
    output = into(output_rows(target, ids))
    config = head_config({"medusa_num_heads": HEADS, "medusa_num_layers": BLOCKS})
    made = MedusaHeads(config, Material(target, (max(target.offers.hidden),), ids, output, output, {}))
    for parameter in made.parameters():
        parameter.data = (0.1 * torch.randn_like(parameter)).bfloat16().float()  # as it is exported
    return made


@pytest.fixture(scope="module")
def folder(heads, target, tmp_path_factory):
    where = tmp_path_factory.mktemp("medusa")
    ids = np.arange(0, target.vocab_size, 3)
    MedusaRecipe().export(
        heads, Material(target, (max(target.offers.hidden),), ids, heads.output, heads.output, {}), where
    )
    return where


def begun(folder, target, ids, kind="paths", form="compiled"):
    """A drafter that has read a text, and the states along it."""
    head = MedusaCheckpoint.load(folder)
    model = (
        MedusaModel(head, target) if form == "torch" else CompiledMedusa(head, target, quantization="float32")
    )
    drafter = MedusaDrafter(model, head.layers, kind)
    (state,) = drafter.start([Request("a", tuple(ids), SamplingParams(), seed=3)])
    scores = target.prefill([0], [ids[:-1]], hidden=drafter.needs.hidden)
    target.release([0])
    return drafter, drafter.read([state], scores)[0], scores.hidden[head.layers[0]][0]


@pytest.mark.parametrize("form", ["compiled", "torch"])
def test_heads_draft_with_the_distributions_of_the_trained_ones(heads, folder, target, form):
    ids = text(target, 20)
    drafter, state, states = begun(folder, target, ids, form=form)
    draft = drafter.propose([state], [Budget.fixed(tree.paths(2, HEADS))])
    with torch.no_grad():
        expected = torch.stack([heads.logits(torch.from_numpy(states[-1]), k) for k in range(HEADS)]).softmax(
            -1
        )
    by_depth = draft.probs[0, draft.rows[0, 1:]].reshape(HEADS, 2, -1)
    for path in range(2):
        np.testing.assert_allclose(by_depth[:, path, ::3], expected, atol=2e-5, rtol=1e-3)
    assert not by_depth[..., 1::3].any()
    assert (expected[0] - expected[1]).abs().sum() > 0.05, "the test sees distributions that differ"


def test_all_sequences_of_a_batch_have_their_own_distributions(folder, target):
    texts = [text(target, n) for n in (5, 9, 30)]
    drafter, _, _ = begun(folder, target, texts[0])
    states = [begun(folder, target, ids)[1] for ids in texts]
    for slot, s in enumerate(states):
        s.cursor.slot = slot
    budget = Budget.fixed(tree.chain(HEADS))
    together = drafter.propose(states, [budget] * 3)
    for b, ids in enumerate(texts):
        other, alone, _ = begun(folder, target, ids)
        draft = other.propose([alone], [budget])
        assert np.array_equal(draft.tree.tokens[0], together.tree.tokens[b])
        assert np.array_equal(draft.probs[0], together.probs[b]), "bits do not depend on the batch"


@pytest.mark.parametrize(
    "kind", ["paths", "coupled", "systematic", "without_replacement", "greedy_plus_one", "top_k"]
)
def test_after_a_round_the_heads_read_the_state_of_what_was_kept(folder, target, kind):
    ids = text(target, 30)
    drafter, state, _ = begun(folder, target, ids, kind)
    target.prefill([1], [ids[:-1]])
    budget = Budget.grown(6, HEADS) if kind == "top_k" else Budget.fixed(tree.paths(2, HEADS))
    for accepted in (1, 0, 2):
        draft = drafter.propose([state], [budget])
        assert np.array_equal(draft.tree.tokens, drafter.propose([state], [budget]).tree.tokens)
        scores = target.score([1], draft.tree, hidden=drafter.needs.hidden)
        parents = draft.tree.lists.parents[0]
        path = [0]
        while len(path) <= accepted and path[-1] in parents:
            path.append(parents.index(path[-1]))
        outcome = Outcome.of(
            np.array([path[1:]], np.int64).reshape(1, -1), np.array([len(path) - 1]), np.array([7])
        )
        target.commit([1], outcome)
        ids = [*ids, *outcome.emitted(draft.tree)[0]]
        (state,) = drafter.observe([state], outcome, replace(scores, tree=draft.tree))
    target.release([1])
    _, fresh, _ = begun(folder, target, ids, kind)
    assert state.context == fresh.context
    np.testing.assert_allclose(state.cursor.states, fresh.cursor.states, atol=1e-4, rtol=1e-3)


def test_a_tree_is_no_deeper_than_there_are_heads(folder, target):
    drafter, state, _ = begun(folder, target, text(target, 20))
    draft = proposed(drafter, [state], [Budget.fixed(tree.chain(9))])
    assert draft.tree.num_nodes == HEADS + 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t, c: t.pop("1.0.linear.weight"), r"no tensor 1\.0\.linear\.weight"),
        (lambda t, c: t.update({"2.1.linear.bias": torch.ones(3)}), r"2\.1\.linear\.bias of shape"),
        (lambda t, c: c.update(medusa_num_heads=5), r"3\.0\.linear\.weight"),
    ],
)
def test_a_folder_of_other_heads_is_refused_by_name(folder, tmp_path, change, said):
    with pytest.raises(ModelLoadError, match=said):
        MedusaCheckpoint.load(spoil(folder, tmp_path, change))


def test_heads_of_another_target_are_refused(folder):
    draft = load.load_model(str(pair.draft_folder()), max_num_seqs=1)
    with pytest.raises(IncompatibleError, match="numbers"):
        CompiledMedusa(MedusaCheckpoint.load(folder), draft)


def test_the_authors_layout_is_read_with_output_rows_of_each_head(folder, heads, target, tmp_path):
    tensors = {n: t for n, t in load_file(folder / "model.safetensors").items() if "linear" in n}
    rows = into(output_rows(target, np.arange(target.vocab_size)))
    own = [rows.roll(k, 0) for k in range(HEADS)]
    tensors |= {f"{k}.{BLOCKS}.weight": own[k].contiguous() for k in range(HEADS)}
    torch.save(tensors, tmp_path / "medusa_lm_head.pt")
    (tmp_path / "config.json").write_text(
        json.dumps({"medusa_num_heads": HEADS, "medusa_num_layers": BLOCKS})
    )
    assert kind_of(tmp_path) == "medusa"
    ids = text(target, 20)
    head = MedusaCheckpoint.load(tmp_path)
    drafter = MedusaDrafter(CompiledMedusa(head, target, quantization="float32"), head.layers_of(target))
    (state,) = drafter.start([Request("a", tuple(ids), SamplingParams(), seed=3)])
    scores = target.prefill([0], [ids[:-1]], hidden=drafter.needs.hidden)
    target.release([0])
    draft = drafter.propose(drafter.read([state], scores), [Budget.fixed(tree.chain(HEADS))])
    x = torch.from_numpy(scores.hidden[drafter.layers[0]][0, -1])
    with torch.no_grad():
        for k in range(HEADS):
            y = x
            for block in heads.heads[k]:
                y = y + torch.nn.functional.silu(block(y))
            np.testing.assert_allclose(draft.probs[0, k], (own[k] @ y).softmax(-1), atol=2e-5, rtol=1e-3)
    del tensors[f"1.{BLOCKS}.weight"]
    torch.save(tensors, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(ModelLoadError, match=rf"1\.{BLOCKS}\.weight"):
        MedusaCheckpoint.load(tmp_path)
