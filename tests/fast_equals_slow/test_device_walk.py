"""Walks in torch operations decide as the compiled ones and the readable rules do, and leave the device only once."""

import pytest
import torch

from polydraft import noise, registry
from polydraft.core import Draft, NoiseKey, SiblingLaw, TreeShape
from polydraft.tree import pad
from polydraft.verifiers import greedy
from polydraft.verifiers.fast import device
from polydraft.verifiers.fast.device_tree import GreedyTraversalRule, TraversalRule
from polydraft.verifiers.list_race import list_race
from polydraft.verifiers.race import race
from tests.fast_equals_slow.walk_rounds import DEGENERATE, TREES, B, V, degenerate, first_nodes, rounds, same
from tests.other_device import OneDevice, moved

IID, PM = SiblingLaw.IID, SiblingLaw.POINT_MASS
RULES = {
    "block": device.block,
    "match": device.match,
    "race": device.race(race.active),
    "list_race": device.race(list_race.active),
    "greedy_traversal": GreedyTraversalRule(),
    "traversal": TraversalRule(),
    "traversal_merged": TraversalRule(merged=True),
}
WALKS = [
    ("block", TreeShape.CHAIN, IID),
    *(("match", shape, law) for shape in TREES for law in (IID, PM)),
    *(("race", shape, IID) for shape in TREES),
    *(("list_race", shape, SiblingLaw.LISTED) for shape in (TreeShape.CHAIN, TreeShape.PATHS)),
    *(("greedy_traversal", shape, IID) for shape in TREES),
    *(("traversal", shape, law) for shape in TREES for law in (IID, PM)),
    *(("traversal", TreeShape.PATHS, law) for law in (SiblingLaw.WITHOUT_REPLACEMENT, SiblingLaw.INDEPENDENT)),
    *(("traversal_merged", shape, IID) for shape in TREES),
]


def compiled(name, draft, logits, key):
    """The walk of the compiled rule; None of one that has none on a CPU."""
    return registry.verifier(name).walk(draft, logits, key)


@pytest.mark.parametrize(("name", "shape", "law"), WALKS)
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "ragged"])
def test_a_walk_on_the_device_finds_what_the_compiled_walk_finds(name, shape, law, whole):
    rule, depths = registry.verifier(name), set[int]()
    for seed in range(3):
        draft, logits, key = rounds(shape, law, seed)
        if not whole:
            draft = first_nodes(draft, [1 + b % draft.tree.num_nodes for b in range(B)])
        found = device.walk(RULES[name], draft, logits, key)
        fast = compiled(name, draft, logits, key)
        assert fast is None if name.startswith("traversal") else same(found, fast)
        assert same(found, rule(draft, logits.softmax(-1)).sample(key))
        depths |= set(found.num_accepted.tolist())
    assert depths >= {0, 1, 2}


@pytest.mark.parametrize("kind", DEGENERATE)
@pytest.mark.parametrize("name", ["greedy_traversal", "traversal", "traversal_merged"])
def test_a_tree_on_the_device_is_decided_alike_on_degenerate_rows(name, kind):
    rule = registry.verifier(name)
    for vocab_size in (2, 5, 300):
        draft, logits, key = degenerate(kind, vocab_size, TreeShape.PATHS, IID)
        found = device.walk(RULES[name], draft, logits, key)
        assert same(found, rule(draft, logits.softmax(-1)).sample(key))


def test_another_draft_is_decided_otherwise():
    draft, logits, key = rounds(TreeShape.PATHS, IID, 0)
    right = device.walk(RULES["greedy_traversal"], draft, logits, key)
    assert not same(device.walk(RULES["traversal"], draft, logits, key), right)
    late = NoiseKey(key.seed, key.sample, key.position + 1)
    assert not same(device.walk(RULES["greedy_traversal"], draft, logits, late), right)


@pytest.mark.parametrize("shape", [TreeShape.CHAIN, TreeShape.PATHS, TreeShape.PRODUCT])
def test_the_greedy_walk_on_the_device_is_the_compiled_one_at_ties_too(shape):
    draft, logits, key = rounds(shape, SiblingLaw.POINT_MASS, 4)
    liked = torch.nn.functional.one_hot(draft.tree.tokens[:, -1:], V)
    tied = logits.round() + 3 * liked
    found = device.walk(device.greedy, draft, tied, key)
    assert same(found, greedy.walk(draft, tied, key))
    assert found.num_accepted.max() > 0


@pytest.mark.parametrize("name", RULES)
def test_a_bare_root_gives_one_token_of_the_target(name):
    draft = Draft.empty(torch.tensor([3] * B))
    _, logits, key = rounds(TreeShape.CHAIN, SiblingLaw.IID, 0)
    draft = Draft(draft.tree, draft.law, draft.shape, None, draft.rows, key)
    found = device.walk(RULES[name], draft, logits[:, :1], key)
    assert same(found, registry.verifier("race" if name.endswith("race") else "match").walk(draft, logits[:, :1], key))


@pytest.mark.parametrize("fault", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", [*RULES, "greedy"])
def test_faulty_logits_are_left_to_the_readable_path(name, fault):
    draft, logits, key = rounds(TreeShape.CHAIN, SiblingLaw.IID, 0)
    logits[7, 0, 5] = fault
    assert device.walk({**RULES, "greedy": device.greedy}[name], draft, logits, key) is None


@pytest.mark.parametrize("name", ["block", "greedy_traversal", "traversal"])
def test_a_token_that_the_draft_could_not_draw_is_left_to_the_readable_path(name):
    draft, logits, key = rounds(TreeShape.CHAIN if name == "block" else TreeShape.PATHS, SiblingLaw.IID, 0)
    draft.probs[3, 0, draft.tree.tokens[3, 1]] = 0
    assert device.walk(RULES[name], draft, logits, key) is None


def test_masked_tokens_are_never_emitted():
    draft, logits, key = rounds(TreeShape.CHAIN, SiblingLaw.IID, 1)
    logits[..., ::2] = -torch.inf
    emitted = [t for row in device.walk(device.block, draft, logits, key).emitted(draft.tree) for t in row]
    assert len(emitted) > B and all(token % 2 for token in emitted)


def test_equal_siblings_are_one_context():
    drafted = pad([([0, 1, 1, 2, 3, 1], [-1, 0, 0, 1, 2, 4])] * 200)
    rows = torch.tensor([[-1, 0, 0, 1, 1, 2]] * 200)
    logits = torch.zeros(200, 6, 4)
    key = NoiseKey.of(range(200), [0] * 200, [1] * 200)
    draft = Draft(drafted, SiblingLaw.IID, TreeShape.PATHS, torch.full((200, 3, 4), 0.25), rows, key)
    for name in ("greedy_traversal", "match", "race"):
        found = device.walk(RULES[name], draft, logits, key)
        assert same(found, registry.verifier(name).walk(draft, logits, key))
    assert found.num_accepted.max() == 3
    assert set(found.path[:, 0].tolist()) == {-1, 1, 2}


@pytest.mark.parametrize("name", [*RULES, "greedy"])
def test_nothing_waits_for_the_host_before_the_outcome(name):
    draft, logits, key = rounds(TreeShape.CHAIN if name == "block" else TreeShape.BY_POSITION, SiblingLaw.IID, 0)
    rule = {**RULES, "greedy": device.greedy}[name]
    far = Draft(draft.tree, draft.law, draft.shape, moved(draft.probs), draft.rows, key)
    with OneDevice():
        table = device.decide(rule, far, moved(logits), key)
    assert (table.device.type, table.shape) == ("meta", (B, draft.tree.num_nodes + 1))


def test_the_noise_of_a_device_is_that_of_the_host():
    _, _, key = rounds(TreeShape.CHAIN, SiblingLaw.IID, 0)
    for stream in (noise.Stream.STOP, noise.Stream.EXTRA):
        assert torch.equal(noise.uniforms(key, stream, 1), noise._uniforms_torch(key, int(stream), 1, 0))
    assert torch.equal(noise.clocks(key, V), noise._clocks_torch(key, V))
