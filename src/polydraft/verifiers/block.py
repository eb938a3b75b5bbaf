"""Block verification: decide how much of a chain to accept from the whole chain at once.

Sun et al. 2024 (arXiv 2403.10444). Row i is the context after i accepted tokens.

    w_0 = 1     w_i = min(1, w_{i-1} p_{i-1}(x_i) / q_{i-1}(x_i))          the PRODUCT is clamped, not each factor
    S_i = sum_y max(0, w_i p_i(y) - q_i(y))     h_i = S_i / (S_i + 1 - w_i)     h_L = w_L
    stop at the largest i with u_i < h_i, u_i independent; then emit N((w_i p_i - q_i)+), or p_L at the leaf

Lossless for one chain drawn from q, and no lossless verifier accepts more of a single chain. 1 + E[sum w_i] tokens per step.
Traps: clamping each factor; a residual without the weight; an uncapped last position; stopping at the first failure.
Cost: A chain of N tokens: time O(N V), memory O(N V) for p and q, which the forward passes made.
"""

from polydraft.core import DraftSampling, TreeShape
from polydraft.core.arrays import namespace
from polydraft.methods.papers import method
from polydraft.verifiers.lift.contexts import Contexts, Decision
from polydraft.verifiers.lift.leaf_to_root import LeafToRoot, accepted_weight, rejected
from polydraft.verifiers.walks.traversal import walk


def tries(at: Contexts) -> Decision:
    """At contexts of weight w_i and their one draw."""
    w = at.weight
    p = at.p
    q = at.q
    assert q is not None
    following = accepted_weight(w, p, q, at.tokens[:, 0])
    h, residual = rejected(w, p, q)
    first_turn = namespace(w).clip(at.tokens, max=0)
    return Decision(following[:, None], h, residual, first_turn)


block = LeafToRoot(
    method("block", "Block verification", "2403.10444", {DraftSampling.IID}, {TreeShape.CHAIN}), tries, walk
)
"""The verifier."""
