"""Greedy drafts: test the one sampled child, then take whatever the residual emits among the deterministic ones.

Hu et al. 2025 (arXiv 2502.18779). Draws: the top n-1 tokens of q, then one draw from the rest.

    S = the first n-1 children      qt = N(q without S)      x_n ~ qt
    accept x_n with probability min(1, p(x_n) / qt(x_n)); otherwise y ~ N((p - qt)+), accepted iff y is in S

Lossless for any S that is given first, and optimal for deterministic ones: acceptance P(S) + sum over x not in S of min(p(x), qt(x)).
SpecHub (Sun et al. 2024, arXiv 2411.05289) couples two tokens through the hub argmax q; its acceptance is that of n = 2
here, so this file stands for it. Draws without replacement may be read the same way: given all but the last, the last one follows
q without them. Where S holds all of q there is no qt: y ~ p, accepted iff in S.
Traps: q in the place of qt (bias 0.37 in a five-token example); S tested before x_n accepts less; a last draw made only after a look
at the others.
Cost: time and memory O(V) a node, beside the drafter's choice of the top n - 1.
"""

import numpy as np
from jaxtyping import Float, Int

from polydraft.core import FIXED, DraftSampling
from polydraft.core.arrays import Array, gather, like, namespace, scatter_add
from polydraft.methods.papers import method
from polydraft.verifiers import speculative
from polydraft.verifiers.lift.per_node import PerNode
from polydraft.verifiers.residual import normalise_or


def emitted_probs(
    p: Float[Array, "M V"], q: Float[Array, "M V"], draws: Int[Array, "M n"]
) -> Float[Array, "M V"]:
    """Distribution of the emitted token given the draws, the sampled one last; -1 = no draw.

    Example:
        >>> p, q = np.array([[0.5, 0.5, 0.0]]), np.array([[0.5, 0.25, 0.25]])
        >>> emitted_probs(p, q, np.array([[0, 1]])).tolist()
        [[0.0, 1.0, 0.0]]
    """
    xp = namespace(p)
    last = xp.count_nonzero(draws >= 0, axis=1)[:, None] - 1
    is_fixed = like(np.arange(draws.shape[1]), draws) < last
    times_fixed = scatter_add(xp.zeros_like(q), xp.clip(draws, min=0), xp.astype(is_fixed, q.dtype))
    qt = xp.where(times_fixed > 0, 0.0, q)
    is_sampled = xp.sum(qt, axis=-1) > 0
    qt = normalise_or(qt, otherwise=q)
    distribution = speculative.emitted_probs(p, qt, gather(draws, xp.clip(last, min=0)))
    return xp.where(is_sampled[:, None], distribution, p)


greedy_plus_one = PerNode(
    method(
        "greedy_plus_one",
        "Greedy drafts, one of them sampled (SpecHub where n = 2)",
        "2502.18779",
        {DraftSampling.GREEDY_PLUS_ONE, DraftSampling.WITHOUT_REPLACEMENT},
        FIXED,
    ),
    emitted_probs,
)
"""The verifier."""
