"""A compiled EAGLE-3 head, and an MTP module, against the head as it is trained, and folders that are none."""

import json
import shutil
import warnings
from dataclasses import dataclass, replace
from itertools import count, pairwise
from random import Random

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from polydraft import Engine, FixedPolicy
from polydraft.core import Budget, Request, SamplingParams
from polydraft.core import geometry as tree
from polydraft.drafters.base import as_one_step
from polydraft.drafters.text.ngram import NgramDrafter
from polydraft.engine import reader
from polydraft.engine.admission import Arrivals
from polydraft.errors import IncompatibleError, ModelLoadError
from polydraft.heads.checkpoint import head_config
from polydraft.heads.eagle import EagleDrafter
from polydraft.heads.eagle.checkpoint import EagleCheckpoint
from polydraft.heads.eagle.compiled import CompiledEagle
from polydraft.heads.eagle.network import EagleHead, EagleModel, EagleRecipe
from polydraft.heads.folder import kind_of
from polydraft.heads.mtp import MtpDrafter
from polydraft.heads.mtp.network import MtpModel, MtpRecipe
from polydraft.heads.recipe import Material
from polydraft.models import load, pair
from polydraft.papers.mixture.drafter import MixtureDrafter
from polydraft.papers.several.drafter import SeveralDrafter
from polydraft.policy.measuring import measured
from tests.support.damage import cut, flipped, mutated_json, read_apart
from tests.support.reading import read_counts

LAYERS = (1, 2, 4)
RECIPES = {"eagle": EagleRecipe, "mtp": MtpRecipe}


@pytest.fixture(scope="module")
def target():
    return load.load_model(
        str(pair.target_folder()), max_num_seqs=2, max_model_len=256, cache_dtype="float32"
    )


@pytest.fixture(scope="module", params=RECIPES)
def recipe(request):
    return RECIPES[request.param]()


@pytest.fixture(scope="module")
def head(target, recipe):
    """A head with random weights over every third token."""
    torch.manual_seed(0)
    h = target.embed(np.array([0])).shape[1]
    config = head_config({"hidden_size": h, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
                          "rms_norm_eps": 1e-5, "rope_theta": 10000.0})  # fmt: skip
    ids = torch.arange(0, target.vocab_size, 3)
    embeddings = torch.from_numpy(target.embed(np.arange(target.vocab_size))).bfloat16().float()
    output = torch.from_numpy(target.head(np.eye(h, dtype=np.float32))[:, ids].T.copy())
    made = recipe.network(config, Material(target, layers_of(recipe), ids.numpy(), embeddings, output, {}))
    for matrix in made.parameters():
        if matrix.ndim == 2:
            torch.nn.init.normal_(matrix, std=0.1)
    made.norm.weight.data.mul_(3)  # distributions that are not flat
    for parameter in made.parameters():
        parameter.data = parameter.data.bfloat16().float()  # as it is exported
    return made


@pytest.fixture(scope="module")
def folder(head, recipe, target, tmp_path_factory):
    where = tmp_path_factory.mktemp("head")
    ids = np.arange(0, target.vocab_size, 3)
    recipe.export(head, Material(target, layers_of(recipe), ids, head.embeddings, head.output, {}), where)
    return where


both_forms = pytest.mark.parametrize("form", ["compiled", "torch"])
only_eagle = pytest.mark.parametrize("recipe", ["eagle"], indirect=True)


def layers_of(recipe):
    return LAYERS if recipe.network is EagleHead else LAYERS[-1:]


def text(target, length):
    return torch.randint(0, target.vocab_size, (length,), generator=torch.Generator().manual_seed(1)).tolist()


def distributions_of(head, tokens, features, drafted):
    """The distributions that the trained head has along a chain of drafts behind a text."""
    states = head.read(features[None])
    lines = []
    found = []
    T = features.shape[0]
    line = torch.tensor([[*tokens, *drafted]])
    for k in range(1, len(drafted) + 2):
        following = torch.zeros(1, T, dtype=torch.long)
        following[0] = torch.cat([line[0, k:], line.new_zeros(T)])[:T]
        states = head.step(following, states, lines)
        found.append(head.logits(states[0, T - 1]).softmax(-1))
    return torch.stack(found)


def drafter_of(folder, target, kind="chain", form="compiled"):
    made, in_torch = {"eagle": (EagleDrafter, EagleModel), "mtp": (MtpDrafter, MtpModel)}[kind_of(folder)]
    checkpoint = made.checkpoint.load(folder)
    model = (
        in_torch(checkpoint, target)
        if form == "torch"
        else CompiledEagle(checkpoint, target, quantization="float32")
    )
    return made(model, checkpoint.layers, kind)


def begun(drafter, target, ids):
    request = Request("a", tuple(ids), SamplingParams(), seed=3)
    (state,) = drafter.start([request])
    scores = target.prefill([0], [ids[:-1]], hidden=drafter.needs.hidden)
    target.release([0])
    states = torch.from_numpy(np.concatenate([scores.hidden[layer][0] for layer in drafter.layers], -1))
    return drafter.read([state], scores)[0], states


@both_forms
def test_costs_of_a_heads_steps_are_measured_and_a_longer_text_adds_nothing_to_its_drafts(
    form, folder, target
):
    drafter = drafter_of(folder, target, form=form)
    costs = measured(target, drafter).costs
    assert costs.drafting(2) > 0 and costs.draft_token == 0
    assert not any(target.lengths) and drafter.slots.num_free == target.max_num_seqs


@both_forms
@pytest.mark.parametrize("length", [2, 3, 40, 100])
def test_a_head_drafts_with_the_distributions_of_the_trained_one(head, folder, target, length, form):
    ids = text(target, length)
    drafter = drafter_of(folder, target, form=form)
    state, features = begun(drafter, target, ids)
    draft = drafter.propose([state], [Budget.fixed(tree.chain(4))])
    drafted = draft.tree.tokens[0, 1:].tolist()
    with torch.no_grad():
        expected = distributions_of(head, ids, features, drafted[:-1])
    rows = draft.probs[0][:, ::3]
    np.testing.assert_allclose(rows, expected, atol=2e-5, rtol=1e-3)
    assert not draft.probs[0][:, 1::3].any() and not draft.probs[0][:, 2::3].any()
    assert expected[0].max() < 0.99 and (expected[0] - expected[1]).abs().sum() > 0.05, (
        "the test sees distributions that differ"
    )


def test_a_heads_bits_do_not_depend_on_the_targets_threads(folder, target):
    """A head runs on its target's threads."""
    options = {"max_num_seqs": 2, "max_model_len": 256, "cache_dtype": "float32"}
    shared = load.load_model(str(pair.target_folder()), **options, threads=3)
    ids = text(target, 40)
    drafters = [drafter_of(folder, each) for each in (target, shared)]
    assert [len(drafter.model.arrays.work.queries) for drafter in drafters] == [target.num_threads, 3]
    states = [begun(drafter, each, ids)[0] for drafter, each in zip(drafters, (target, shared), strict=True)]
    for _ in range(20):
        one, other = (
            drafter.propose([state], [Budget.fixed(tree.chain(4))])
            for drafter, state in zip(drafters, states, strict=True)
        )
        assert np.array_equal(one.tree.tokens, other.tree.tokens)
        assert np.array_equal(one.probs, other.probs)


@both_forms
@pytest.mark.parametrize(
    "kind", ["paths", "coupled", "systematic", "without_replacement", "greedy_plus_one", "top_k"]
)
def test_what_was_accepted_is_read_again_with_the_targets_states(folder, target, kind, form):
    """After rounds with drafts, some of which are accepted, the head drafts as one that has just read the whole text."""
    ids = text(target, 30)
    drafter = drafter_of(folder, target, kind, form)
    state, _ = begun(drafter, target, ids)
    target.prefill([1], [ids[:-1]])
    budget = Budget.grown(6, 3) if kind == "top_k" else Budget.fixed(tree.paths(2, 3))
    for accepted in (2, 0, 3, 1):
        draft = drafter.propose([state], [budget])
        again = drafter.propose([state], [budget])
        assert np.array_equal(draft.tree.tokens, again.tree.tokens)
        scores = target.score([1], draft.tree, hidden=drafter.needs.hidden)
        outcome = tree_path(draft, accepted)
        target.commit([1], outcome)
        ids = [*ids, *outcome.emitted(draft.tree)[0]]
        (state,) = drafter.observe([state], outcome, replace(scores, tree=draft.tree))
    draft = drafter.propose([state], [budget])
    other = drafter_of(folder, target, kind, form)
    fresh = other.propose([begun(other, target, ids)[0]], [budget])
    target.release([1])
    assert draft.tree.tokens.tolist() == fresh.tree.tokens.tolist()
    if draft.probs is not None:
        np.testing.assert_allclose(draft.probs, fresh.probs, atol=1e-5, rtol=1e-3)


def tree_path(draft, accepted):
    """The first path of a tree as deep as that, and token 7."""
    from polydraft.core import Outcome

    parents = draft.tree.lists.parents[0]
    path = [0]
    while len(path) <= accepted and path[-1] in parents:
        path.append(parents.index(path[-1]))
    path = path[1:]
    return Outcome.of(np.array([path], np.int64).reshape(1, -1), np.array([len(path)]), np.array([7]))


@only_eagle
def test_the_low_and_the_middle_layer_change_drafts(folder, target, tmp_path):
    ids = text(target, 20)
    drafter = drafter_of(folder, target)
    whole = drafter.propose([begun(drafter, target, ids)[0]], [Budget.fixed(tree.chain(2))]).probs
    for i in range(2):
        tensors = load_file(folder / "model.safetensors")
        h = tensors["fc.weight"].shape[0]
        tensors["fc.weight"][:, i * h : (i + 1) * h] = 0
        save_file(tensors, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text((folder / "config.json").read_text())
        other = drafter_of(tmp_path, target)
        less = other.propose([begun(other, target, ids)[0]], [Budget.fixed(tree.chain(2))]).probs
        assert np.abs(whole[0, 0] - less[0, 0]).sum() > 0.01


def spoil(folder, tmp_path, change):
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    change(tensors, config)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t, c: t.pop("fc.weight"), "no tensor fc.weight"),
        (lambda t, c: t.update({"norm.weight": torch.ones(3)}), "norm.weight of shape"),
        (lambda t, c: c.update(eagle_aux_hidden_state_layer_ids=7), "eagle_aux_hidden_state_layer_ids"),
        (lambda t, c: c.update(rope_theta=10**30), "rope_theta is 1000000000000000000000000000000; expected"),
        (lambda t, c: t.update({"d2t": t["d2t"] + 10**6}), "d2t"),
        (lambda t, c: t.update({"d2t": t["d2t"].flip(0)}), "d2t"),
    ],
)
@only_eagle
def test_a_folder_that_is_no_head_is_refused_by_name(folder, tmp_path, change, said):
    with pytest.raises(ModelLoadError, match=said):
        EagleCheckpoint.load(spoil(folder, tmp_path, change))


@only_eagle
def test_a_head_of_another_target_is_refused(folder, target, tmp_path):
    def change(tensors, config):
        tensors["target_probe"] = tensors["target_probe"].flip(0).contiguous()

    with pytest.raises(IncompatibleError, match="another model"):
        CompiledEagle(EagleCheckpoint.load(spoil(folder, tmp_path, change)), target)
    draft = load.load_model(str(pair.draft_folder()), max_num_seqs=1)
    with pytest.raises(IncompatibleError, match="numbers"):
        CompiledEagle(EagleCheckpoint.load(folder), draft)


@only_eagle
def test_layers_that_the_target_lacks_are_refused_when_the_engine_is_built(folder, target, tmp_path):
    from polydraft import Engine

    def change(tensors, config):
        config["eagle_aux_hidden_state_layer_ids"] = [1, 2, 99]

    with pytest.raises(IncompatibleError, match="99"):
        Engine.of(target, drafter="eagle", drafter_options={"weights": spoil(folder, tmp_path, change)})


@pytest.mark.parametrize("recipe", ["mtp"], indirect=True)
def test_the_next_token_and_the_state_before_it_change_an_mtp_draft(head):
    tokens = torch.randint(0, 64, (1, 6))
    states = torch.randn(1, 6, head.config.hidden_size)
    other = tokens.clone()
    moved = states.roll(1, 1)
    other[0, -1] += 1
    with torch.no_grad():
        distribution, by_token, by_state = (
            head.logits(head.step(t, head.read(s), []))[0, -1].softmax(-1)
            for t, s in ((tokens, states), (other, states), (tokens, moved))
        )
    assert (distribution - by_token).abs().sum() > 0.01
    assert (distribution - by_state).abs().sum() > 0.01


def relaid(folder, where, layout):
    """The same head as others publish it."""
    tensors = load_file(folder / "model.safetensors")
    said = json.loads((folder / "config.json").read_text())
    where.mkdir()
    del tensors["target_probe"]
    if layout == "authors":
        for name in ("polydraft_head", "norm_before_residual"):
            said.pop(name, None)
        tensors["t2d"] = torch.zeros(said["vocab_size"], dtype=torch.bool)
        torch.save(tensors, where / "pytorch_model.bin")
    else:
        nested = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps",
                  "rope_theta", "vocab_size", "model_type")  # fmt: skip
        said = {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "draft_vocab_size": said["draft_vocab_size"],
            "norm_before_residual": layout == "speculators, norm first",
            "eagle_aux_hidden_state_layer_ids": said["eagle_aux_hidden_state_layer_ids"],
            "transformer_layer_config": {name: said[name] for name in nested},
        }
        tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
        tensors["embed_tokens.weight"] = load_file(pair.target_folder() / "model.safetensors")[
            "model.embed_tokens.weight"
        ]
        save_file(tensors, where / "model.safetensors")
    (where / "config.json").write_text(json.dumps(said))
    return where


@only_eagle
@pytest.mark.parametrize("layout", ["authors", "speculators", "speculators, norm first"])
def test_published_layouts_are_read(head, folder, target, tmp_path, layout):
    where = relaid(folder, tmp_path / "head", layout)
    assert kind_of(where) == "eagle"
    ids = text(target, 20)
    drafter = drafter_of(where, target)
    state, features = begun(drafter, target, ids)
    draft = drafter.propose([state], [Budget.fixed(tree.chain(3))])
    head.config.norm_before_residual = layout.endswith("first")
    with torch.no_grad():
        expected = distributions_of(head, ids, features, draft.tree.tokens[0, 1:].tolist()[:-1])
    head.config.norm_before_residual = False
    np.testing.assert_allclose(draft.probs[0][:, ::3], expected, atol=2e-5, rtol=1e-3)


@only_eagle
def test_published_heads_of_another_target_and_other_layouts_are_refused(folder, target, tmp_path):
    where = relaid(folder, tmp_path / "head", "speculators")
    tensors = load_file(where / "model.safetensors")
    tensors["embed_tokens.weight"] = tensors["embed_tokens.weight"].flip(0).contiguous()
    save_file(tensors, where / "model.safetensors")
    with pytest.raises(IncompatibleError, match="another model"):
        CompiledEagle(EagleCheckpoint.load(where), target)
    del tensors["layers.0.hidden_norm.weight"]  # as in the first EAGLE
    save_file(tensors, where / "model.safetensors")
    with pytest.raises(ModelLoadError, match="hidden_norm"):
        EagleCheckpoint.load(where)
    (where / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"pytorch_model\.bin"):
        EagleCheckpoint.load(where)


@only_eagle
def test_the_authors_layers_are_read_where_a_folder_names_none(folder, target):
    unnamed = replace(EagleCheckpoint.load(folder), layers=())
    last = max(target.offers.hidden)
    assert unnamed.layers_of(target) == (2, last // 2, last - 3)
    assert unnamed.shapes() == EagleCheckpoint.load(folder).shapes()


@both_forms
def test_a_head_that_reads_in_pieces_or_kept_a_beginning_drafts_as_one_that_reads_all(folder, target, form):
    ids = text(target, 100)
    budget = Budget.fixed(tree.paths(2, 3))
    drafter = drafter_of(folder, target, "paths", form)
    state, _ = begun(drafter, target, ids)
    expected = drafter.propose([state], [budget])
    other = drafter_of(folder, target, "paths", form)
    request = Request("a", tuple(ids), SamplingParams(), seed=3)
    for starts in ((0, 40, 45, 90), (0, 99 - 2)):
        (state,) = other.start([request])
        held = state.cursor.length
        assert held == (0 if len(starts) == 4 else 98)  # the root was proposed with and not committed
        target.prefill([0], [ids[:held]]) if held else None
        for begin, end in pairwise([*(max(held, s) for s in starts), 99]):
            if end > begin:
                scores = target.prefill([0], [ids[begin:end]], hidden=other.needs.hidden)
                (state,) = other.read([state], scores, begin)
        target.release([0])
        draft = other.propose([state], [budget])
        assert np.array_equal(draft.tree.tokens, expected.tree.tokens)
        np.testing.assert_allclose(draft.probs, expected.probs, atol=2e-5, rtol=1e-3)
        other.release([state])
    (parted,) = other.start([replace(request, prompt_token_ids=(*ids[:30], 1, 2, 3))])
    assert parted.cursor.length == 29


@both_forms
def test_a_head_that_reads_in_pieces_what_it_was_told_drafts_the_same(folder, target, form):
    ids = text(target, 90)
    drafter = drafter_of(folder, target, form=form)
    scores = target.prefill([0], [ids[:-1]], hidden=drafter.needs.hidden)
    target.release([0])
    (state,) = drafter.start([Request("a", (ids[0],), SamplingParams(), seed=3)])
    outcome, told = as_one_step([ids[0]], [ids[1:]])
    (state,) = drafter.observe([state], outcome, replace(told, hidden=scores.hidden))
    whole = drafter.propose([state], [Budget.fixed(tree.chain(3))])
    drafter.release([state])
    request = Request("a", (ids[0],), SamplingParams(), seed=3)
    (state,) = drafter.observe(drafter.start([request]), outcome, replace(told, hidden=scores.hidden))
    assert state.cursor.num_unread(ids) == 88
    for piece in (30, 40):
        state.cursor.read(ids, piece)
    assert state.cursor.num_unread(ids) == 18
    draft = drafter.propose([state], [Budget.fixed(tree.chain(3))])
    assert np.array_equal(draft.tree.tokens, whole.tree.tokens)
    np.testing.assert_allclose(draft.probs, whole.probs, atol=2e-5, rtol=1e-3)
    drafter.release([state])


def test_an_engine_with_a_head_keeps_beginnings_and_says_the_same(folder, target):
    ids = text(target, 60)
    greedy = SamplingParams(temperature=0, max_tokens=8)
    kept = Engine.of(target, drafter=drafter_of(folder, target), depth=3, keep_prefixes=True)
    first = kept.generate([ids], greedy)[0]
    more = [*ids, *first.token_ids, 5, 6, 7]
    again = kept.generate([more], greedy)[0]
    running = kept.submit([*ids[:50], 9, 9, 9], greedy.with_(max_tokens=30))
    kept.step()
    joined = kept.submit([*ids[:50], 8, 8, 8], greedy)
    while kept.has_unfinished_requests:
        kept.step()
    assert (
        first.stats.cached_tokens == 0
        and again.stats.cached_tokens >= len(ids)
        and joined.stats.cached_tokens >= 45
    )
    fresh = Engine.of(target, drafter=None)
    for result in (again, running, joined):
        assert (
            result.token_ids
            == fresh.generate([result.prompt_token_ids], greedy.with_(max_tokens=len(result.token_ids)))[
                0
            ].token_ids
        )
    assert kept.num_free == target.max_num_seqs
    target.release(range(target.max_num_seqs))  # other tests fill its slots themselves


@dataclass(frozen=True)
class Few(FixedPolicy):
    """Drafts that pay for so many sequences."""

    most: int = 1

    def expect(self, num_sequences, riding):
        """Nothing is learnt from it."""

    def opens(self, s, num_sequences, *, again=False):
        return num_sequences <= self.most


def test_a_head_reads_no_prompt_in_a_batch_where_drafts_do_not_pay_and_drafts_when_it_is_alone_again(
    folder, target
):
    prompts = [text(target, 20 + n) for n in range(2)]
    greedy = SamplingParams(temperature=0, max_tokens=4)
    engine = Engine.of(target, drafter=drafter_of(folder, target), policy=Few(Budget.fixed(tree.chain(2))))
    engine._arrivals = Arrivals(
        count().__next__
    )  # a step takes a second, after which who left is not expected back
    results = engine.generate(prompts, [greedy.with_(max_tokens=24), greedy])
    assert results[0].stats.drafted_tokens > 0 == results[1].stats.drafted_tokens
    expected = Engine.of(target, drafter=None).generate(prompts, [greedy.with_(max_tokens=24), greedy])
    assert [result.token_ids for result in results] == [result.token_ids for result in expected]


@only_eagle
@pytest.mark.parametrize("source", ["head", "several", "mixture"])
def test_a_head_that_begins_late_reads_its_text_in_pieces_beside_others(folder, recipe, monkeypatch, source):
    monkeypatch.setattr(reader.Reader, "room", lambda self, *_: 40)
    for name, value in {"ALONE_FIRST": 40, "ALONE_MIN": 40, "ALONE_SECONDS": 0.0}.items():
        monkeypatch.setattr(reader, name, value)
    model = load.load_model(str(pair.target_folder()), max_num_seqs=4, max_model_len=256)
    head = drafter_of(folder, model)
    budget = Budget.fixed(tree.chain(2))
    drafter = head
    if source == "several":
        drafter = SeveralDrafter(
            [load.load_model(str(pair.draft_folder()), max_num_seqs=4, max_model_len=256)], head=head
        )
    elif source == "mixture":
        drafter = MixtureDrafter({"head": head, "ngram": NgramDrafter()})
        budget = Budget.grown(2, 2)
    engine = Engine.of(model, drafter=drafter, policy=Few(budget, most=2))
    engine._arrivals = Arrivals(count().__next__)
    prompts = [text(model, 150 + n) for n in range(4)]
    greedy = SamplingParams(temperature=0, max_tokens=4)
    samples = [
        engine.add_request(Request(str(n), tuple(ids), greedy.with_(max_tokens=30 if n < 2 else 4), n))
        for n, ids in enumerate(prompts)
    ]
    while engine.num_running != 2 or engine.num_waiting:
        engine.step()
    counts, head_counts = (read_counts(each, monkeypatch) for each in (model, head.model))
    while engine.has_unfinished_requests:
        engine.step()
    assert max(counts) <= 40 and sum(counts) > 300 and max(head_counts) <= 41 and sum(head_counts) > 280
    assert all(sample.stats.drafted_tokens for sample in samples[:2])
    plain = Engine.of(
        load.load_model(str(pair.target_folder()), max_num_seqs=4, max_model_len=256), drafter=None
    )
    expected = plain.generate(prompts[:2], greedy.with_(max_tokens=30))
    assert [sample.token_ids for sample in samples[:2]] == [result.token_ids for result in expected]


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_damaged_head_is_refused_or_drafts_within_the_vocabulary(folder, target, recipe, tmp_path, name):
    content = (folder / name).read_bytes()

    def read(where):
        engine = Engine.of(target, drafter=kind_of(where), drafter_options={"weights": where}, depth=2)
        (result,) = engine.generate([[5, 6, 7]], SamplingParams(max_tokens=4, seed=1))
        assert all(0 <= token < target.vocab_size for token in result.token_ids)

    def cases():
        warnings.simplefilter("ignore")
        for seed in range(40):
            rng = Random(seed)
            where = tmp_path / str(seed)
            shutil.copytree(folder, where)
            ways = (flipped, cut) if name == "model.safetensors" else (mutated_json,)
            (where / name).write_bytes(rng.choice(ways)(content, rng))
            yield f"seed {seed}", lambda where=where: read(where)

    assert len(read_apart(cases())) >= 10
