"""Training block heads with a Markov and a confidence part: what is trained is what drafts, and steps begin where they begin when drafting."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from polydraft.errors import IncompatibleError
from polydraft.heads.block.checkpoint import BlockCheckpoint
from polydraft.heads.block.compiled import CompiledBlock
from polydraft.heads.block.dspark import BlockPlaces, DSparkRecipe, accepted_depths
from polydraft.heads.block.network import BlockModel
from polydraft.heads.block.training import BlockRecipe
from polydraft.heads.checkpoint import embeddings, output_rows
from polydraft.heads.losses import KL
from polydraft.heads.markov import confidence_logits
from polydraft.heads.recipe import Batch, Material
from polydraft.models import load, pair
from polydraft.models.torch.door import into
from polydraft.sampling.softmax import softmax
from tests.heads.test_oracle_block import chain

LAYERS = (1, 2, 6)
BLOCK = 3
TEXT = 24


@pytest.fixture(scope="module")
def target():
    return load.load_model(
        str(pair.target_folder()), max_num_seqs=2, max_model_len=128, cache_dtype="float32"
    )


@pytest.fixture(scope="module")
def material(target):
    ids = np.arange(0, target.vocab_size, 4)
    return Material(
        target,
        LAYERS,
        ids,
        into(embeddings(target)),
        into(output_rows(target, ids)),
        {"layers": 2, "block": BLOCK, "rank": 8},
    )


@pytest.fixture(scope="module")
def net(material):
    """Random weights, rounded as they are stored."""
    torch.manual_seed(0)
    network = DSparkRecipe().fresh(material)
    for parameter in network.parameters():
        parameter.data = (
            (parameter.data.normal_(std=0.1) if parameter.ndim == 2 else parameter.data).bfloat16().float()
        )
    return network


@pytest.fixture(scope="module")
def batch(target, material):
    """A text, the target's states along it, and its distributions."""
    tokens = torch.randint(0, target.vocab_size, (1, TEXT), generator=torch.Generator().manual_seed(1))
    scores = target.prefill([0], tokens.tolist(), hidden=LAYERS)
    target.release([0])
    rows = torch.from_numpy(softmax(target.head(scores.hidden[LAYERS[-1]][0]))[None][..., material.ids])
    counted = torch.ones(1, TEXT, dtype=torch.bool)
    states = torch.from_numpy(np.concatenate([scores.hidden[layer] for layer in LAYERS], -1))
    return Batch(tokens, states, rows, counted)


def trained_places(net, batch, at):
    text = net.injected(batch.states, torch.arange(TEXT))
    return net.places(batch, text, torch.zeros(1, dtype=torch.long), torch.tensor([at]))


@pytest.mark.parametrize(
    "form", [BlockModel, partial(CompiledBlock, quantization="float32")], ids=["torch", "compiled"]
)
@torch.no_grad()
def test_a_saved_head_drafts_and_is_sure_as_the_network_in_training(
    net, batch, target, material, tmp_path, form
):
    DSparkRecipe().export(net, material, tmp_path)
    checkpoint = BlockCheckpoint.load(tmp_path)
    at = 9
    model = form(checkpoint, target)
    tokens = batch.tokens[0].tolist()
    model.inject(0, 0, batch.states[0, : at + 1].numpy(), tokens[1 : at + 2])
    model.roots[0] = tokens[at + 1]
    model.know([0], batch.states[:, at].numpy())
    drafted = chain(tokens[at + 1], tokens[at + 2 : at + 1 + BLOCK])
    rows = model.score([0], drafted).logits[0][:, material.ids]
    places = trained_places(net, batch, at)
    assert places.depth.tolist() == [0, 1, 2]
    torch.testing.assert_close(
        torch.from_numpy(softmax(rows)), net.drafted(places).float().softmax(-1), atol=1e-4, rtol=1e-3
    )
    longer = chain(tokens[at + 1], tokens[at + 2 : at + 2 + BLOCK])
    sure = confidence_logits(model.arrays.markov, [0], *longer.host)
    assert sure is not None
    np.testing.assert_allclose(sure[0, 1:], net.confidence(places).numpy(), atol=1e-4, rtol=1e-3)


@torch.no_grad()
def test_a_place_knows_the_token_before_it_and_nothing_behind(net, batch):
    whole = net.drafted(trained_places(net, batch, 9))
    for changed in range(10, 15):
        tokens = batch.tokens.clone()
        tokens[0, changed] = (tokens[0, changed] + 1) % 2048
        states = batch.states.clone()
        states[:, changed:] += 1
        other = net.drafted(trained_places(net, batch._replace(tokens=tokens, states=states), 9))
        differs = (other - whole).abs().amax(-1) > 1e-3
        assert differs.tolist() == [changed == 10, changed in (10, 11), changed in (10, 12)]


def test_a_step_accepts_up_to_the_first_rejection():
    places = BlockPlaces(
        *(torch.empty(0),) * 3,
        depth=torch.tensor([0, 1, 2, 0, 1, 2, 0]),
        block=torch.tensor([0, 0, 0, 1, 1, 1, 2]),
    )
    assert accepted_depths(torch.tensor([1.0, 0, 1, 1, 1, 1, 0]), places, 4).tolist() == [1, 3, 0, 0]


def test_gradients_reach_every_part_and_are_finite_and_replay_adds_blocks(net, batch, monkeypatch):
    asked = list[torch.Tensor]()
    places = type(net).places
    monkeypatch.setattr(
        type(net),
        "places",
        lambda self, batch, text, rows, at: (asked.append(at), places(self, batch, text, rows, at))[1],
    )
    torch.manual_seed(0)
    DSparkRecipe().loss(net, batch, steps=BLOCK, loss=KL).loss.backward()
    for name, parameter in net.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all() and parameter.grad.any(), name
    regular, replayed = asked
    assert not set(regular.tolist()) & set(replayed.tolist()) and set((replayed - 1).tolist()) & set(
        regular.tolist()
    )


def test_a_training_goes_on_from_a_head_of_its_own_form_alone(net, material, tmp_path):
    fresh = BlockRecipe().fresh(replace(material, sizes={"layers": 1, "block": 2}))
    for recipe, network in ((DSparkRecipe(), net), (BlockRecipe(), fresh)):
        recipe.export(network, material, tmp_path / type(recipe).__name__)
    dspark, block = (BlockCheckpoint.load(tmp_path / name) for name in ("DSparkRecipe", "BlockRecipe"))
    again = DSparkRecipe().started(material, dspark).state_dict()
    assert all(torch.equal(again[name], weight) for name, weight in net.state_dict().items())
    with pytest.raises(
        IncompatibleError, match=r"has in_place=True; expected one that `polydraft train dspark` wrote"
    ):
        DSparkRecipe().started(material, block)
    with pytest.raises(
        IncompatibleError, match="the Markov part 'vanilla'; expected one that `polydraft train block` wrote"
    ):
        BlockRecipe().started(material, dspark)
