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
"""

from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polydraft.core import Draft, DraftSampling, TokenTree, TreeShape
from polydraft.core import geometry as tree
from polydraft.methods.papers import method
from polydraft.verifiers.block import block
from polydraft.verifiers.lift.verdict import TreeVerdict
from polydraft.verifiers.residual import normalise
from polydraft.verifiers.selection import highest_probs


def _times(copies: Float[Tensor, "B M"], children: Int[Tensor, " B"]) -> Float[Tensor, "B K"]:
    """Distribution of the number of draws at a context: its copies times the children of each."""
    most = (copies.shape[1] - 1) * int(children.max())
    draws = torch.arange(copies.shape[1], device=copies.device) * children[:, None]
    return copies.new_zeros(len(copies), most + 1).scatter_add(1, draws, copies)


def _copies(
    chance: Float[Tensor, "B M"], q: Float[Tensor, " B"], below: Float[Tensor, " B"]
) -> Float[Tensor, "B M"]:
    """Distribution of how many of n draws are the picked token, which has mass q, if no draw ranks higher; n has distribution `chance`."""
    n = torch.arange(chance.shape[-1], device=chance.device, dtype=chance.dtype)
    reach = chance * (below + q)[:, None] ** n
    share = (q / (below + q))[:, None, None]
    k = n
    more = (n[:, None] - n).clamp(min=0)
    binomial = (
        (torch.lgamma(n + 1)[:, None] - torch.lgamma(k + 1) - torch.lgamma(more + 1)).exp().round().tril()
    )
    distribution = (reach[:, :, None] * binomial * share**k * (1 - share) ** more).sum(1)
    distribution[:, 0] = 0
    return normalise(distribution)


def _after(verdict: TreeVerdict, path: Int[Tensor, "B A"], node: Int[Tensor, " B"]) -> Float[Tensor, "B V"]:
    return verdict.after((path == node[:, None]).int().argmax(1))


class Multipath:
    """The verifier."""

    info = method(
        "multipath",
        "Greedy multi-path block verification (GBV)",
        "2602.16961",
        {DraftSampling.IID},
        {TreeShape.CHAIN, TreeShape.PATHS, TreeShape.PRODUCT},
    )

    def __call__(self, draft: Draft, target_probs: Float[Tensor, "B N V"]) -> TreeVerdict:
        path, distributions = _pick(draft, target_probs)
        real = path >= 0
        nodes = path.clamp(min=0)
        above = torch.arange(-1, path.shape[1] - 1, device=path.device)
        chain = TokenTree(draft.tree.tokens.gather(1, nodes).where(real, 0), torch.where(real, above, -1))
        rows = target_probs.gather(1, nodes[..., None].expand(-1, -1, target_probs.shape[-1])).double()
        verdict = block(Draft(chain, DraftSampling.IID, TreeShape.CHAIN, distributions, chain.parents), rows)
        stop = verdict.stop.new_zeros(draft.tree.tokens.shape).scatter_add(1, nodes, verdict.stop)
        return TreeVerdict(draft.tree, stop, partial(_after, verdict, path))


def _pick(
    draft: Draft, target_probs: Float[Tensor, "B N V"]
) -> tuple[Int[Tensor, "B A"], Float[Tensor, "B R V"] | None]:
    """The picked path, root included, padded with -1, and the distribution of each of its tokens given those before."""
    tokens = draft.tree.tokens
    draws = tree.children(draft.tree)
    probs = draft.probs
    batch = torch.arange(len(tokens), device=tokens.device)
    node = torch.zeros_like(batch)
    path = [node]
    distributions = []
    copies = target_probs.new_tensor([0.0, 1.0], dtype=torch.float64).expand(len(tokens), 2)
    while draws.shape[-1] and (drawn := draws[batch, node] >= 0).any():
        children = draws[batch, node].clamp(min=0)
        assert probs is not None
        p = normalise(target_probs[batch, node].double())
        q = normalise(probs[batch, draft.rows[batch, children[:, 0]].clamp(min=0)].double())
        chance = _times(copies, (draft.tree.parents == node[:, None]).sum(1))
        distribution, below, rank = highest_probs(p, q, chance)
        ranks = rank.gather(1, tokens.gather(1, children)).where(drawn, -1)
        child = children.gather(
            1, ranks.argmax(1, keepdim=True)
        )  # the first draw of the highest token: its first copy
        x = tokens.gather(1, child)
        copies = _copies(chance, q.gather(1, x)[:, 0], below.gather(1, x)[:, 0])
        node = child[:, 0].where(drawn[:, 0], node)
        path.append(node.where(drawn[:, 0], -1))
        distributions.append(distribution)
    return torch.stack(path, 1), torch.stack(distributions, 1) if distributions else None


multipath = Multipath()
"""The verifier."""
