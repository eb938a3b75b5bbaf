"""Pseudo states of the next positions, run through the target's remaining layers: the distributions of the trained maps, and no trace in the target."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from polydraft.core import Budget, TokenTree
from polydraft.core.geometry import chain
from polydraft.errors import IncompatibleError, InvalidInputError, ModelLoadError
from polydraft.models.torch.hf import HFTarget
from polydraft.papers.hidden_transfer import TransferDrafter
from polydraft.papers.hidden_transfer.compiled import CompiledTransfer
from polydraft.papers.hidden_transfer.network import TransferCheckpoint, TransferModel
from tests.papers import layered

TEXT = [1, 2, 3, 4, 0, 1]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A target, and maps of random weights with their folder."""
    model = layered.target()
    folder = tmp_path_factory.mktemp("maps")
    return model, layered.transfer_net(model, folder), folder


def drafted(model, folder, depth=3, texts=(TEXT,), **options):
    """The first draft behind texts, float32 maps."""
    head = TransferCheckpoint.load(folder)
    maps = (
        TransferModel(head, model)
        if isinstance(model, HFTarget)
        else CompiledTransfer(head, model, quantization="float32")
    )
    drafter = TransferDrafter(maps, head.layers, "paths", **options)
    states = layered.started(drafter, model, texts)
    return drafter.propose(states, [Budget.fixed(chain(depth))] * len(texts))


@pytest.mark.parametrize("form", ["compiled", "torch"])
def test_drafts_have_the_distributions_of_the_trained_maps(made, form):
    """Compiled, and as a draft model in the cache of a target of transformers."""
    model, net, folder = made
    model = HFTarget(layered.module(), max_num_seqs=4, max_model_len=64) if form == "torch" else model
    model.release([0])
    hidden = model.prefill([0], [TEXT[:-1]], hidden=net.begins).hidden
    states = torch.from_numpy(np.concatenate([hidden[layer] for layer in net.begins], -1))
    with torch.no_grad():
        rows = net.rows(states, torch.tensor([len(TEXT) - 2]))[0, 0]
        expected = torch.nn.functional.linear(rows, net.output).softmax(-1)
    np.testing.assert_allclose(drafted(model, folder).probs[0], expected, atol=1e-4, rtol=1e-3)
    assert (expected[0] - expected[1]).abs().sum() > 0.2, "distributions that differ"


def test_text_rows_of_the_training_are_the_targets(made):
    model, net, _ = made
    model.release([0])
    hidden = model.prefill([0], [TEXT], hidden=(1, 2, 3, 4)).hidden
    every = torch.arange(len(TEXT))
    text = torch.from_numpy(hidden[1])[:, None]
    for layer in net.layers:
        text, _ = layer(text, every, [], every <= every[:, None])
    last = layered.module().model.norm(text[:, 0])
    np.testing.assert_allclose(last.detach(), hidden[4], atol=1e-4, rtol=1e-3)


def test_a_row_sees_the_text_and_earlier_rows_and_nothing_else(made):
    """Through the layers: another text changes a row though the newest state stays, and an earlier row's map changes later rows only."""
    _, net, _ = made
    torch.manual_seed(1)
    states = torch.randn(1, 6, 3 * 32)
    at = torch.tensor([3])
    with torch.no_grad():
        whole = net.rows(states, at)
        later = states.clone()
        before = states.clone()
        later[:, 4:] += 1
        before[:, 1] += 1
        np.testing.assert_allclose(net.rows(later, at), whole, rtol=1.3e-6, atol=1e-5)
        assert (net.rows(before, at) - whole).abs().max() > 1e-2
        net.maps[1].weight.mul_(2)
        changed = net.rows(states, at)
        net.maps[1].weight.div_(2)
    np.testing.assert_allclose(changed[:, :, 0], whole[:, :, 0], rtol=1.3e-6, atol=1e-5)
    assert (changed[:, :, 2] - whole[:, :, 2]).abs().max() > 1e-2


def test_without_layers_behind_it_a_map_is_a_linear_head(tmp_path):
    model = layered.target()
    net = layered.transfer_net(model, tmp_path, layers=(4,))
    model.release([0])
    last = model.prefill([0], [TEXT[:-1]], hidden=(4,)).hidden[4][0, -1]
    with torch.no_grad():
        x = net.maps[0].weight @ torch.from_numpy(last)
        gain = torch.from_numpy(model.arrays.norm)
        expected = (
            net.output @ (x * torch.rsqrt(x.square().mean() + model.arrays.sizes.epsilon) * gain)
        ).softmax(-1)
    np.testing.assert_allclose(drafted(model, tmp_path, depth=1).probs[0, 0], expected, atol=1e-4, rtol=1e-3)


def test_the_target_keeps_its_bits_and_no_column_of_a_draft(made):
    model, _, folder = made
    rows = []
    for drafting in (False, True):
        model.release([0])
        model.prefill([0], [TEXT[:-1]])
        if drafting:
            drafted(model, folder)
        tree = np.array([[TEXT[-1], 2, 3, 0]])
        rows.append(model.score([0], TokenTree.chain(tree)).logits)
        assert model.lengths[0] == len(TEXT) - 1
    assert np.array_equal(*rows)


@pytest.mark.parametrize("form", ["compiled", "torch"])
def test_rows_of_a_batch_are_what_they_are_alone(made, form):
    model, _, folder = made
    if form == "torch":
        model = HFTarget(layered.module(), max_num_seqs=4, max_model_len=64)
    texts = [TEXT, [3, 3], [2, 1, 0, 4]]
    together = drafted(model, folder, texts=texts).probs
    for b, text in enumerate(texts):
        alone = drafted(model, folder, texts=[text]).probs[0]
        np.testing.assert_allclose(
            together[b], alone, atol=1e-5, rtol=1e-4
        ) if form == "torch" else np.array_equal(together[b], alone)


def test_skipping_the_layers_behind_the_map_changes_the_distributions(made):
    model, _, folder = made
    whole = drafted(model, folder).probs
    head = TransferCheckpoint.load(folder)
    short = replace(head, layers=(2, 3, 4))
    drafter = TransferDrafter(CompiledTransfer(short, model, quantization="float32"), head.layers)
    fewer = drafter.propose(layered.started(drafter, model, [TEXT]), [Budget.fixed(chain(3))]).probs
    assert np.abs(whole - fewer).sum(-1).min() > 0.05


def test_maps_of_no_layers_or_another_target_are_refused(made, tmp_path):
    model, _, folder = made
    head = TransferCheckpoint.load(folder)
    for layers in ((0, 1, 2), (2, 1, 3), (2, 3, 9), ()):
        with pytest.raises(InvalidInputError, match="rising"):
            CompiledTransfer(replace(head, layers=layers), model)
    with pytest.raises(IncompatibleError, match="another model"):
        CompiledTransfer(head, layered.target(seed=3))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelLoadError, match="hidden-transfer"):
        TransferCheckpoint.load(tmp_path)
