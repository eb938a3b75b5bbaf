"""Greedy multi-path block verification (GBV): pick one path by an order of p/q, then verify it as a block.

Thomas & Pal 2026 (arXiv 2602.16961), with the distribution of the picked path in count form.

    rank   tokens in ascending p/q at each context (ties by token id; q = 0 last); the path goes to the drawn token of highest rank
    n      draws at the context, known only through its distribution Pr(n) given the prefix: the copies of the prefix times the
           children of each; one copy at the root
    C(t)   q-mass ranked below t;   a = C(t), b = C(t) + q(t)
    s(t)   = q(t) sum_n Pr(n) sum_{j<n} b^j a^(n-1-j)                  distribution of the picked token
    Pr'(k) proportional to sum_n Pr(n) binom(n, k) q(t)^k a^(n-k)      distribution of the copies of the longer prefix, k >= 1

Block verification of the picked path with s in the place of q is lossless for iid draws whose number at each node was fixed
beforehand. More paths may accept less: where p and q are equal it is worse than block verification of the first path.
Traps: q in place of s; draws counted by path; ties broken by draw order.
Cost: K paths of L tokens: time O(L (V log V + K V)) along the picked path alone, memory O(V + K).
"""

from functools import partial
from math import comb

import numpy as np
from jaxtyping import Float, Int

from polydraft.core import Draft, DraftSampling, TokenTree, TreeShape
from polydraft.core import geometry as tree
from polydraft.core.arrays import Array, double, first, gather, host, like, namespace, scatter_add, take
from polydraft.methods.papers import method
from polydraft.verifiers.block import block
from polydraft.verifiers.lift.verdict import TreeVerdict
from polydraft.verifiers.residual import normalise
from polydraft.verifiers.selection import highest_probs


def _times(copies: Float[Array, "B M"], children: Int[np.ndarray, " B"]) -> Float[Array, "B K"]:
    """Distribution of the number of draws at a context: its copies times the children of each."""
    most = (copies.shape[1] - 1) * int(children.max())
    draws = np.arange(copies.shape[1]) * children[:, None]
    none = np.zeros((len(copies), most + 1))
    return scatter_add(like(none, copies), like(draws, copies), copies)


def _copies(
    chance: Float[Array, "B M"], q: Float[Array, " B"], below: Float[Array, " B"]
) -> Float[Array, "B M"]:
    """Distribution of how many of n draws are the picked token, which has mass q, if no draw ranks higher; n has distribution `chance`."""
    counts = np.arange(chance.shape[-1])
    n = like(counts.astype(np.float64), chance)
    reach = chance * (below + q)[:, None] ** n
    share = (q / (below + q))[:, None, None]
    more = like(np.maximum(counts[:, None] - counts, 0).astype(np.float64), chance)
    # No draw at all is left out: the picked token was drawn.
    ways = np.array([[comb(n, k) if k else 0 for k in counts.tolist()] for n in counts.tolist()], np.float64)
    binomial = like(ways, chance)
    distribution = namespace(chance).sum(
        reach[:, :, None] * binomial * share**n * (1 - share) ** more, axis=1
    )
    return normalise(distribution)


def _after(verdict: TreeVerdict, path: Int[Array, "B A"], node: Int[Array, " B"]) -> Float[Array, "B V"]:
    return verdict.after(first(path == node[:, None]))


class Multipath:
    """The verifier."""

    info = method(
        "multipath",
        "Greedy multi-path block verification (GBV)",
        "2602.16961",
        {DraftSampling.IID},
        {TreeShape.CHAIN, TreeShape.PATHS, TreeShape.PRODUCT},
    )

    def __call__(self, draft: Draft, target_probs: Float[Array, "B N V"]) -> TreeVerdict:
        path, distributions = _pick(draft, target_probs)
        is_node = path >= 0
        nodes = np.maximum(path, 0)
        batch = np.broadcast_to(np.arange(len(path))[:, None], path.shape)
        tokens = np.where(is_node, draft.tree.host.tokens[batch, nodes], 0)
        parents = np.where(is_node, np.arange(-1, path.shape[1] - 1), -1)
        chain = TokenTree(like(tokens, target_probs), like(parents, target_probs))
        rows = double(take(target_probs, batch, nodes))
        verdict = block(Draft(chain, DraftSampling.IID, TreeShape.CHAIN, distributions, chain.parents), rows)
        none = like(np.zeros(draft.tree.tokens.shape), target_probs)
        stop = scatter_add(none, like(nodes, target_probs), verdict.stop)
        return TreeVerdict(draft.tree, stop, partial(_after, verdict, like(path, target_probs)))


def _pick(
    draft: Draft, target_probs: Float[Array, "B N V"]
) -> tuple[Int[np.ndarray, "B A"], Float[Array, "B R V"] | None]:
    """The picked path, root included, padded with -1, and the distribution of each of its tokens given those before."""
    all_draws = host(tree.children(draft.tree))
    batch = np.arange(len(all_draws))
    node = np.zeros_like(batch)
    path = [node]
    distributions = list[Array]()
    copies = like(np.tile(np.array([0.0, 1.0]), (len(batch), 1)), target_probs)
    while all_draws.shape[-1] and (all_draws[batch, node] >= 0).any():
        draws = all_draws[batch, node]
        child, distribution, copies = _descend(draft, target_probs, node, draws, copies)
        is_inner = draws[:, 0] >= 0
        node = np.where(is_inner, child, node)
        path.append(np.where(is_inner, node, -1))
        distributions.append(distribution)
    every = namespace(target_probs).stack(distributions, axis=1) if distributions else None
    return np.stack(path, 1), every


def _descend(
    draft: Draft,
    target_probs: Float[Array, "B N V"],
    node: Int[np.ndarray, " B"],
    draws: Int[np.ndarray, "B W"],
    copies: Float[Array, "B C"],
) -> tuple[Int[np.ndarray, " B"], Float[Array, "B V"], Float[Array, "B D"]]:
    """The child that each path goes on to, the distribution of its token, and of how many copies of it were drawn."""
    tokens, parents = draft.tree.host
    batch = np.arange(len(node))
    children = np.maximum(draws, 0)
    p, q = _rows_at(draft, target_probs, node, children[:, 0])
    chance = _times(copies, (parents == node[:, None]).sum(1))
    with np.errstate(divide="ignore", invalid="ignore"):
        distribution, below, rank = highest_probs(p, q, chance)
    drawn_tokens = np.where(draws >= 0, tokens[batch[:, None], children], -1)
    child = children[batch, _first_of_highest(host(rank), drawn_tokens)]
    x = like(tokens[batch, child][:, None], target_probs)
    return child, distribution, _copies(chance, gather(q, x)[:, 0], gather(below, x)[:, 0])


def _first_of_highest(rank: Int[np.ndarray, "B V"], tokens: Int[np.ndarray, "B W"]) -> Int[np.ndarray, " B"]:
    """Place of the first copy of the highest token. tokens: padded with -1."""
    ranks = np.take_along_axis(rank, np.maximum(tokens, 0), 1)
    return np.where(tokens >= 0, ranks, -1).argmax(1)


def _rows_at(
    draft: Draft,
    target_probs: Float[Array, "B N V"],
    node: Int[np.ndarray, " B"],
    child: Int[np.ndarray, " B"],
) -> tuple[Float[Array, "B V"], Float[Array, "B V"]]:
    """Target distributions at a node of each tree, and the distribution that a child was drawn from there."""
    assert draft.probs is not None
    batch = np.arange(len(node))
    row = np.maximum(host(draft.rows)[batch, child], 0)
    p = normalise(double(take(target_probs, batch, node)))
    q = normalise(double(take(draft.probs, batch, row)))
    return p, q


multipath = Multipath()
"""The verifier."""
