"""What `verify` is given: every faulty input of every rule is refused with the argument, the place and the value; degenerate distributions are not."""

from dataclasses import replace
from inspect import unwrap

import numpy as np
import pytest
import torch

from polydraft import verifiers
from polydraft.core import Draft, DraftSampling, NoiseKey, TokenTree, TreeShape
from polydraft.errors import InvalidInputError
from polydraft.methods import registry
from polydraft.testing import Tables, as_batch, enumerate_drafts
from tests.exactness.harness import SHAPES

verify = unwrap(verifiers.verify)  # without the tests' own check of shapes
DISTRIBUTIONS = [
    (name, distribution)
    for name in registry.names("verifier")
    for distribution in DraftSampling
    if distribution in registry.verifier(name).info.draft_sampling
]
COUPLED = DraftSampling.COUPLED
LISTED = DraftSampling.LISTED
V = 4


def sound(name, distribution, seed=0):
    """Some drafts that the rule is declared for, as one batch, and the target's rows: tensors of torch, which has more kinds of faults."""
    shapes = registry.verifier(name).info.shapes
    shape = TreeShape.PATHS if TreeShape.PATHS in shapes else TreeShape.CHAIN
    drawn_as = (
        DraftSampling.WITHOUT_REPLACEMENT
        if distribution is COUPLED
        else DraftSampling.IID
        if distribution is LISTED
        else distribution
    )
    _, counts, depth = SHAPES[shape][0]
    tables = Tables(V, seed)
    draft, p = as_batch(tables, drawn_as, shape, (3 * enumerate_drafts(tables, drawn_as, counts, depth))[-3:])
    noise = NoiseKey.of([1, 2, 3], [0, 0, 0], [7, 8, 9])
    tree = TokenTree(torch.from_numpy(draft.tree.tokens), torch.from_numpy(draft.tree.parents))
    probs = None if draft.probs is None else torch.from_numpy(draft.probs)
    rows = torch.from_numpy(draft.rows)
    drawn = replace(draft, tree=tree, probs=probs, rows=rows, sampling=distribution, noise=noise)
    return drawn, torch.from_numpy(p)


def changed(x, place, value):
    y = x.clone()
    y[place] = value
    return y


def swapped(thing, **fields):
    """A copy with other fields, whatever they are."""
    copy = object.__new__(type(thing))
    copy.__dict__.update({k: v for k, v in vars(thing).items() if k in thing.__dataclass_fields__} | fields)
    return copy


def mistakes(draft, p):
    """(what the message names, faulty draft, faulty target rows)."""
    rows = draft.rows
    tokens = draft.tree.tokens
    parents = draft.tree.parents
    q = draft.probs
    for value in (99, 2**40, -2, -(2**40)):
        yield f"draft.rows[1, 2] = {value}", swapped(draft, rows=changed(rows, (1, 2), value)), p
        yield f"{value}", swapped(draft, tree=swapped(draft.tree, tokens=changed(tokens, (1, 2), value))), p
    yield "draft.rows[0, 0] = 99", swapped(draft, rows=changed(rows, (0, 0), 99)), p
    for value in (2, 99, 2**40):
        yield "parents", swapped(draft, tree=swapped(draft.tree, parents=changed(parents, (1, 2), value))), p
    for name, x in (("tokens", tokens), ("parents", parents)):
        for other in (x[:, :-1], x[:-1], x[0], x[:, :0], x[..., None], x.int(), x.float(), x.tolist()):
            yield "draft.tree.", swapped(draft, tree=swapped(draft.tree, **{name: other})), p
    for other in (rows[:, :-1], rows[:-1], rows[0], rows.int(), rows.double(), rows.tolist(), None):
        yield "draft.rows", swapped(draft, rows=other), p
    noise = draft.noise
    for name in ("seed", "sample", "position"):
        for other in (getattr(noise, name)[:-1], getattr(noise, name).astype(float), None):
            yield f"draft.noise.{name}", swapped(draft, noise=swapped(noise, **{name: other})), p
    for value in (-0.2, float("nan"), float("inf"), -1e300):
        yield (
            f"target_probs[1, 2{', 3' if value != np.inf else '] sums'}",
            draft,
            changed(p, (1, 2, 3), value),
        )
    for other in (changed(p, (1, 2), 0.0), 2 * p, p.log(), p.log_softmax(-1).exp() / 2):
        yield "target_probs[", draft, other
    for other in (p[:, :-1], p[:-1], p[0], p[None], p.half(), p.long(), p.clone().requires_grad_()):
        yield "target_probs", draft, other
    yield "0 <= id < 0", draft, p[..., :0]
    if q is None:
        yield "draft.rows[1, 2] = 0", swapped(draft, rows=changed(rows, (1, 2), 0)), p
        return
    row = int(rows[1, 2])
    x = int(tokens[1, 2])
    yield "draft.probs = None", swapped(draft, probs=None), p
    yield "draft.rows[1, 2] = -1", swapped(draft, rows=changed(rows, (1, 2), -1)), p
    for value in (-0.2, float("nan"), 0.0):
        if value or draft.sampling is not DraftSampling.GREEDY_PLUS_ONE:
            yield (
                f"draft.probs[1, {row}, {x}] = {value}",
                swapped(draft, probs=changed(q, (1, row, x), value)),
                p,
            )
    for value in (-0.2, float("nan"), float("inf")):
        yield f"draft.probs[1, {row}", swapped(draft, probs=changed(q, (1, row, (x + 1) % V), value)), p
    for other in (2 * q, q / 2, q.log()):
        yield "draft.probs[", swapped(draft, probs=other), p
    yield "draft.probs", draft, torch.cat([p, 0 * p], -1)
    for other in (
        q[:-1],
        q[..., :-1],
        q[0],
        q[None],
        q[:, :0],
        q.half(),
        q.bfloat16(),
        q.long(),
        q.clone().requires_grad_(),
        q.tolist(),
    ):
        yield "draft.", swapped(draft, probs=other), p
    if (
        draft.sampling in (DraftSampling.WITHOUT_REPLACEMENT, DraftSampling.GREEDY_PLUS_ONE)
        and int(parents[1, 2]) == 0
    ):
        yield (
            "twice",
            swapped(draft, tree=swapped(draft.tree, tokens=changed(tokens, (1, 2), int(tokens[1, 1])))),
            p,
        )


@pytest.mark.parametrize(("name", "distribution"), DISTRIBUTIONS, ids=str)
def test_every_faulty_input_is_refused_by_name_place_and_value(name, distribution):
    draft, p = sound(name, distribution)
    assert torch.allclose(verify(name, draft, p).stop.sum(1), torch.ones(3, dtype=torch.float64))
    for words, faulty, rows in mistakes(draft, p):
        with pytest.raises(InvalidInputError) as error:
            verify(name, faulty, rows)
        assert words in str(error.value), (words, str(error.value))


def assert_is_verdict(verdict, num_nodes):
    assert torch.allclose(verdict.stop.sum(1), torch.ones(3, dtype=torch.float64), atol=1e-9)
    for n in range(num_nodes):
        reached = verdict.stop[:, n] > 0
        sums = verdict.after(torch.full((3,), n)).sum(1)[reached]
        assert torch.allclose(sums, torch.ones_like(sums), atol=1e-9)


@pytest.mark.parametrize(("name", "distribution"), DISTRIBUTIONS, ids=str)
def test_random_damage_is_refused_or_gives_a_verdict(name, distribution):
    rng = np.random.default_rng(len(name) + distribution.value)
    draft, p = sound(name, distribution)
    refused = 0
    for _ in range(60):
        tokens, parents, rows, target = (
            x.clone() for x in (draft.tree.tokens, draft.tree.parents, draft.rows, p)
        )
        q = None if draft.probs is None else draft.probs.clone()
        for _ in range(rng.integers(1, 3)):
            x = (tokens, parents, rows, target, q)[rng.integers(4 if q is None else 5)]
            values = (
                [-(2**62), -2, -1, 0, 1, 2, 3, 4, 5, 2**62]
                if x.dtype == torch.int64
                else [0, 1, -1e-9, 1e-9, np.nan, np.inf]
            )
            x[tuple(map(rng.integers, x.shape))] = values[rng.integers(len(values))]
        damaged = replace(draft, tree=TokenTree(tokens, parents), rows=rows, probs=q)
        try:
            verdict = verify(name, damaged, target)
        except InvalidInputError:
            refused += 1
        else:
            assert_is_verdict(verdict, tokens.shape[1])
    assert 20 < refused < 60


@pytest.mark.parametrize(("name", "distribution"), DISTRIBUTIONS, ids=str)
def test_degenerate_distributions_are_taken(name, distribution):
    """Zeros in p and in q, equal rows, sharp rows, and every row of p one-hot: the verdict is that of the rule itself."""
    for seed in (1, 2, 3, 4):
        draft, p = sound(name, distribution, seed)
        sharp = torch.nn.functional.one_hot(p.argmax(-1), V).double()
        for rows in (p, sharp):
            verdict = verify(name, draft, rows)
            assert torch.equal(verdict.stop, registry.verifier(name)(draft, rows).stop)
            assert_is_verdict(verdict, p.shape[1])


def test_a_fixed_child_may_lack_mass_only_where_the_children_hold_all_of_it():
    p = torch.full((1, 3, 3), 1 / 3, dtype=torch.float64)
    tree = TokenTree(torch.tensor([[0, 0, 1]]), torch.tensor([[-1, 0, 0]]))

    def of(*q):
        rows = torch.tensor([[q]], dtype=torch.float64)
        return Draft(tree, DraftSampling.GREEDY_PLUS_ONE, TreeShape.PATHS, rows, torch.tensor([[-1, 0, 0]]))

    assert verify("traversal", of(1.0, 0.0, 0.0), p).stop.sum().item() == pytest.approx(1)
    with pytest.raises(InvalidInputError, match=r"draft.probs\[0, 0, 1\] = 0.0"):
        verify("traversal", of(0.75, 0.0, 0.25), p)


@pytest.mark.parametrize("name", ["block", "greedy_traversal", "traversal", "traversal_merged"])
def test_a_rule_called_by_hand_does_not_take_the_targets_row_for_a_q_that_is_missing(name):
    draft, p = sound(name, DraftSampling.IID)
    with pytest.raises(InvalidInputError, match="probability 0"):
        registry.verifier(name)(replace(draft, probs=None, rows=draft.rows.clamp(max=0)), p)


def test_a_tree_that_branches_is_no_chain():
    tree = TokenTree(torch.tensor([[0, 0, 1]]), torch.tensor([[-1, 0, 0]]))
    q = torch.full((1, 1, 2), 0.5)
    p = torch.full((1, 3, 2), 0.5)
    with pytest.raises(
        InvalidInputError, match=r"parents\[0, 2\] = 0 was given in a draft of shape CHAIN; expected 1"
    ):
        verify("block", Draft(tree, DraftSampling.IID, TreeShape.CHAIN, q, torch.tensor([[-1, 0, 0]])), p)


@pytest.mark.parametrize("name", ["block", "greedy_traversal", "traversal", "match", "race", "typical"])
def test_a_verdict_is_asked_about_its_own_nodes_and_noise(name):
    draft, p = sound(name, DraftSampling.IID)
    verdict = verify(name, draft, p)
    for node in ([0, 1, 99], [0, -1, 0], [0, 0], [0.0, 1.0, 2.0], [[0, 0, 0]]):
        with pytest.raises(InvalidInputError, match="3 whole numbers"):
            unwrap(type(verdict).after)(verdict, torch.tensor(node))
    for key in (NoiseKey.of([1], [0], [7]), NoiseKey.of([1] * 9, [0] * 9, [7] * 9)):
        with pytest.raises(InvalidInputError, match="for 3 trees"):
            verdict.sample(key)
