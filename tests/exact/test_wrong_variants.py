"""Known mistakes, kept as rules that the exact harness must catch: a check that cannot fail proves nothing."""

from functools import partial

import numpy as np
import pytest
import torch
from harness import Tables, by_depth, enumerate_drafts, measure
from oracle import Fixed, Q, lifted

from polydraft import tree
from polydraft.core import Draft, SiblingLaw, TreeShape
from polydraft.registry import verifier
from polydraft.verifiers._residual import normalise, normalise_or, positive_part
from polydraft.verifiers._verdict import TreeVerdict
from polydraft.verifiers.block import multipath as multipath_module
from polydraft.verifiers.token import kseq, recursive, recursive_merged, speculative


def duplicates_skipped(p, q, draws):
    kept = draws.clone()
    for j in range(1, draws.shape[1]):
        seen = (draws[:, :j] == draws[:, j : j + 1]).any(1)
        kept[seen, j] = -1
    return recursive.emitted(p, q, kept, replacement=True)


def resorted(p, q, draws):
    order = q.gather(1, draws).argsort(1, descending=True)
    return recursive.emitted(p, q, draws.gather(1, order), replacement=False)


def redraws(p, q, draws):
    accept = p.gather(1, draws[:, :1])
    return ((1 - accept) * p).scatter_add(1, draws[:, :1], accept)


def iid_as_distinct(p, q, draws):
    """Duplicates tested against q without them: c(x) = 0 there, and r(x) = 0 as x was rejected before."""
    repeated = torch.zeros_like(draws, dtype=torch.bool)
    for j in range(1, draws.shape[1]):
        repeated[:, j] = (draws[:, :j] == draws[:, j : j + 1]).any(1)
    law, alive, r, c = torch.zeros_like(p), torch.ones_like(p[:, 0]), p, q
    for j, x in enumerate(draws.unbind(1)):
        accept = torch.where(repeated[:, j], 0.0, speculative.accept_probability(r, c, x))
        law, alive = law.scatter_add(1, x[:, None], (alive * accept)[:, None]), alive * (1 - accept)
        r = normalise_or(positive_part(r - c), otherwise=r)
        c = normalise_or(c.scatter(1, x[:, None], 0.0), otherwise=c)
    return law + alive[:, None] * r


with_replacement = partial(recursive.emitted, replacement=True)
without_replacement = partial(recursive.emitted, replacement=False)


@pytest.mark.parametrize(
    ("emitted", "law", "tv"),
    [
        (duplicates_skipped, SiblingLaw.IID, 0.099),
        (iid_as_distinct, SiblingLaw.IID, 0.098),
        (with_replacement, SiblingLaw.WITHOUT_REPLACEMENT, 0.135),
        (resorted, SiblingLaw.WITHOUT_REPLACEMENT, 0.205),
    ],
    ids=["duplicates skipped", "iid as without", "without as iid", "sorted siblings"],
)
def test_wrong_child_law_has_the_documented_bias(emitted, law, tv):
    found = measure(lifted(emitted), Fixed(), law, TreeShape.PATHS, by_depth(3), 1)
    assert found.tv == pytest.approx(tv, abs=6e-4)


def test_deterministic_children_with_a_real_q_have_the_documented_bias():
    top = tuple(np.argsort(-Q)[:3])
    drafts = enumerate_drafts(Fixed(), SiblingLaw.POINT_MASS, by_depth(3), 1)
    assert drafts[0].tokens[1:] == list(top)
    found = measure(lifted(without_replacement), Fixed(), SiblingLaw.WITHOUT_REPLACEMENT, TreeShape.PATHS, by_depth(3), 1, drafts)
    assert found.tv == pytest.approx(0.300, abs=6e-4)


def test_redrawing_after_a_mismatch_is_caught():
    found = measure(lifted(redraws), Tables(3, 0), SiblingLaw.IID, TreeShape.CHAIN, by_depth(1), 1)
    assert found.tv > 0.01


def test_dropping_an_unlikely_token_after_sampling_it_is_caught():
    tables = Tables(4, 0)
    drafts = enumerate_drafts(tables, SiblingLaw.IID, by_depth(1), 1)
    for d in drafts:
        if tables.row("q", ())[d.tokens[1]] < 0.25:
            d.tokens, d.parents, d.paths = d.tokens[:1], d.parents[:1], d.paths[:1]
    found = measure(lifted(speculative.emitted), tables, SiblingLaw.IID, TreeShape.CHAIN, by_depth(1), 1, drafts)
    assert found.tv > 0.01


def wrong_block(*, clamp_factors=False, plain_residual=False, uncapped=False, first_failure=False):
    """Block verification in plain torch, right without options and wrong with any of them."""

    def rule(draft: Draft, target_probs: torch.Tensor) -> TreeVerdict:
        p, q = normalise(target_probs), normalise(draft.probs)
        L = draft.tree.num_nodes - 1
        x = draft.tree.tokens[:, 1:, None]
        ratio = (p[:, :L].gather(2, x) / q[:, :L].gather(2, x))[..., 0]
        w = [torch.ones_like(ratio[:, 0])]
        for i in range(L):
            factor = ratio[:, i].clamp(max=1) if clamp_factors else ratio[:, i]
            grown = ratio.prod(1) if uncapped and i == L - 1 else w[-1] * factor
            w.append(grown.clamp(max=1))
        rest = [positive_part((1 if plain_residual else w[i][:, None]) * p[:, i] - q[:, i]) for i in range(L)]
        S = [r.sum(-1) for r in rest]
        h = [torch.where(S[i] + 1 - w[i] > 0, S[i] / (S[i] + 1 - w[i]), 1.0) for i in range(L)] + [w[L]]
        stop = torch.zeros_like(p[..., 0])
        if first_failure:
            alive = torch.ones_like(h[0])
            for i in range(1, L + 1):
                stop[:, i - 1] = alive * (1 - h[i])
                alive = alive * h[i]
            stop[:, L] = alive
        else:
            alive = torch.ones_like(h[0])
            for i in range(L, 0, -1):
                stop[:, i] = alive * h[i]
                alive = alive * (1 - h[i])
            stop[:, 0] = alive
        laws = torch.stack([*(normalise_or(r, otherwise=p[:, i]) for i, r in enumerate(rest)), p[:, L]], 1)
        return TreeVerdict(draft.tree, stop, lambda node: laws[torch.arange(len(p)), node])

    return rule


def worst(rule):
    return max(measure(rule, Tables(3, s), SiblingLaw.IID, TreeShape.CHAIN, by_depth(1, 1), 2).tv for s in range(6))


def test_plain_torch_block_rule_agrees_with_the_registered_one():
    assert worst(wrong_block()) < 1e-12
    for seed in range(6):
        args = Tables(3, seed), SiblingLaw.IID, TreeShape.CHAIN, by_depth(1, 1), 2
        ours, theirs = measure(verifier("block"), *args), measure(wrong_block(), *args)
        assert ours.block_efficiency == pytest.approx(theirs.block_efficiency, abs=1e-12)


@pytest.mark.parametrize("mistake", ["clamp_factors", "plain_residual", "uncapped", "first_failure"])
def test_block_rule_with_a_known_mistake_is_caught(mistake):
    assert worst(wrong_block(**{mistake: True})) > 1e-3


def reordered(draft: Draft) -> Draft:
    """Paths sorted by the draft probability of their first token: a sibling order that looks at the draws."""
    keep = []
    for b in range(draft.tree.batch_size):
        a, c = draft.tree.tokens[b, 1:3].tolist()
        q = draft.probs[b, draft.rows[b, 1]]
        keep.append([0, 1, 2, 3, 4] if q[a] >= q[c] else [0, 2, 1, 4, 3])
    order = torch.tensor(keep)
    rank = order.argsort(1)
    parents = draft.tree.parents.gather(1, order)
    moved = torch.where(parents >= 0, rank.gather(1, parents.clamp(min=0)), -1)
    fresh = tree.TokenTree(draft.tree.tokens.gather(1, order), moved)
    rows = torch.where(moved >= 0, tree.first_copies(fresh).gather(1, moved.clamp(min=0)), -1)
    probs = draft.probs.gather(1, order[..., None].expand(-1, -1, draft.probs.shape[-1]))
    return Draft(fresh, draft.law, draft.shape, probs, rows)


def test_sorted_paths_break_recursive_rejection_and_are_caught():
    def rule(draft, p):
        again = reordered(draft)
        order = torch.tensor([[0, 1, 2, 3, 4]]).expand(len(p), 5)
        swapped = (again.tree.tokens[:, 1] != draft.tree.tokens[:, 1]) | (again.tree.tokens[:, 3] != draft.tree.tokens[:, 3])
        order = torch.where(swapped[:, None], torch.tensor([[0, 2, 1, 4, 3]]), order)
        verdict = verifier("recursive")(again, p.gather(1, order[..., None].expand(-1, -1, p.shape[-1])))
        stop = torch.zeros_like(verdict.stop).scatter(1, order, verdict.stop)
        return TreeVerdict(draft.tree, stop, lambda node: verdict.after(order.argsort(1).gather(1, node[:, None])[:, 0]))

    found = max(measure(rule, Tables(4, s), SiblingLaw.IID, TreeShape.PATHS, by_depth(2, 1), 2).tv for s in (0, 5, 6))
    assert found > 1e-3


def test_trunk_token_counted_once_for_each_path_is_caught():
    """GTV told of two draws on the trunk where there was one."""

    def rule(draft, p):
        tokens = torch.cat([draft.tree.tokens[:, [0, 1, 1]], draft.tree.tokens[:, 2:]], 1)
        parents = torch.tensor([[-1, 0, 0, 1, 2]]).expand(len(tokens), 5)
        rows = torch.tensor([[-1, 0, 0, 1, 1]]).expand(len(tokens), 5)
        doubled = Draft(tree.TokenTree(tokens, parents.contiguous()), draft.law, draft.shape, draft.probs, rows.contiguous())
        verdict = verifier("greedy_traversal")(doubled, p[:, [0, 1, 1, 2, 3]].contiguous())
        stop = torch.zeros_like(draft.tree.tokens, dtype=torch.float64)
        stop[:, 0], stop[:, 1] = verdict.stop[:, 0], verdict.stop[:, 1]
        stop[:, 2:] = verdict.stop[:, 3:]
        at = torch.tensor([0, 1, 3, 4])
        return TreeVerdict(draft.tree, stop, lambda node: verdict.after(at[node]))

    assert max(measure(rule, Tables(4, s), SiblingLaw.IID, TreeShape.PATHS, by_depth(1, 2), 2).tv for s in (0, 5, 6)) > 1e-3


def kseq_with_divisor_one(p, q, draws):
    """K-SEQ with rho = 1 where its root is above 1."""
    n = (draws >= 0).sum(1)
    b = torch.minimum(p, q).sum(-1)
    A = 1 - (1 - b) ** n
    law, alive = torch.zeros_like(p), torch.ones_like(p[:, 0])
    for x in draws.unbind(1):
        accept = speculative.accept_probability(p, q, x)
        law, alive = law.scatter_add(1, x[:, None], (alive * accept)[:, None]), alive * (1 - accept)
    return law + alive[:, None] * normalise_or(positive_part(p - torch.minimum(p, q) * (A / b)[:, None]), otherwise=p)


def kseq_of_merged_children(p, q, draws):
    return kseq.emitted(p, q, recursive_merged.without_repeats(draws))


def greedy_against_the_whole_q(p, q, draws):
    x = draws[:, -1]
    accept = speculative.accept_probability(p, q, x)
    law = (1 - accept)[:, None] * normalise_or(positive_part(p - q), otherwise=p)
    return law.scatter_add(1, x[:, None], accept[:, None])


@pytest.mark.parametrize(
    ("emitted", "law", "tv"),
    [
        (kseq_with_divisor_one, SiblingLaw.IID, 0.111),
        (kseq_of_merged_children, SiblingLaw.IID, None),
        (greedy_against_the_whole_q, SiblingLaw.GREEDY_PLUS_ONE, 0.367),
    ],
    ids=["divisor below its root", "kseq merged", "q in the place of qt"],
)
def test_wrong_rule_at_one_node_has_the_documented_bias(emitted, law, tv):
    found = measure(lifted(emitted), Fixed(), law, TreeShape.PATHS, by_depth(3), 1)
    assert found.tv > 1e-3 if tv is None else found.tv == pytest.approx(tv, abs=6e-4)


def told(law, name):
    """The rule `name` on drafts that claim to be of another sibling law than they are."""
    return lambda draft, p: verifier(name)(Draft(draft.tree, law, draft.shape, draft.probs, draft.rows), p)


def biggest(rule, law, shape, *counts):
    return max(measure(rule, Tables(4, s), law, shape, by_depth(*counts), len(counts)).tv for s in (0, 5, 6))


def test_traversal_that_takes_draws_without_replacement_for_iid_is_caught():
    wrong = told(SiblingLaw.IID, "traversal")
    assert biggest(wrong, SiblingLaw.WITHOUT_REPLACEMENT, TreeShape.PRODUCT, 2, 2) > 1e-3


def test_traversal_that_takes_iid_draws_for_draws_without_replacement_is_caught():
    wrong = told(SiblingLaw.WITHOUT_REPLACEMENT, "traversal")
    assert biggest(wrong, SiblingLaw.IID, TreeShape.PATHS, 3) > 1e-3


def test_traversal_that_tests_greedy_drafts_with_the_whole_q_is_caught():
    wrong = told(SiblingLaw.IID, "traversal")
    assert biggest(wrong, SiblingLaw.GREEDY_PLUS_ONE, TreeShape.PRODUCT, 2, 2) > 1e-2


def test_selected_path_verified_with_q_in_the_place_of_its_own_law_is_caught():
    """GBV whose picked path, which is no draw of q, meets block verification as if it were one."""

    def rule(draft, p):
        path, laws = multipath_module._pick(draft, p)
        chain = tree.TokenTree.chain(draft.tree.tokens.gather(1, path))
        rows = p.gather(1, path[..., None].expand(-1, -1, p.shape[-1]))
        q = draft.probs.gather(1, path[:, :-1, None].expand(-1, -1, p.shape[-1]))
        assert q.shape == laws.shape
        verdict = verifier("block")(Draft(chain, draft.law, TreeShape.CHAIN, q, chain.parents), rows)
        stop = torch.zeros_like(draft.tree.tokens, dtype=torch.float64).scatter_add(1, path, verdict.stop)
        return TreeVerdict(draft.tree, stop, lambda node: verdict.after((path == node[:, None]).int().argmax(1)))

    assert biggest(rule, SiblingLaw.IID, TreeShape.PATHS, 2, 1) > 1e-2
