"""From the root down, node by node: lift a verifier for the children of one node to a whole tree.

Start at the root. At a node with children the verifier for one node emits one token; if it is a child's token, descend to that child,
otherwise stop. At a node without children emit a token of the target distribution. Used by SpecInfer (arXiv 2305.09781), Sequoia
(2402.12374) and most tree methods.

    e_u(y)  distribution of the token emitted at context u for the drawn children, with the verifier's own randomness integrated out
    T(v)    probability that the walk reaches v:  T(child x of u) = T(u) e_u(x)
    stop(u) = T(u) (1 - sum over distinct children e_u(x))

Lossless whenever the verifier for one node is: e_u averaged over the draws at u is p_u. An emitted token that equals a drafted child
counts as that child, whether an acceptance or a residual emitted it.
Trap: copies of a context pool their children in draw order; a child list made from paths counts a shared draw twice.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float

from polydraft.core import Draft, Method
from polydraft.core.arrays import Array, gather, namespace, scatter
from polydraft.verifiers.lift.contexts import Contexts, Decision, lifted
from polydraft.verifiers.lift.draws import without_repeats
from polydraft.verifiers.lift.verdict import TreeVerdict

TokenRule = Callable[[Array, Any, Array], Array]
"""(p [M, V], q [M, V], draws [M, n] token ids padded with -1) -> distribution of the emitted token [M, V].

Where the draft sampling is INDEPENDENT, q is [M, n, V]: row j is the distribution of draw j; where it is POINT_MASS, q is None."""


@dataclass(frozen=True)
class PerNode:
    """A verifier for trees, made of one for one node.

    emitted_probs: see `TokenRule`; float64 in and out.
    merged: equal siblings are one draw, of draws without replacement; see `lift.draws`.
    """

    info: Method
    emitted_probs: TokenRule
    merged: bool = False

    def _decide(self, at: Contexts) -> Decision:
        xp = namespace(at.p)
        e = self.emitted_probs(at.p, at.q, at.tokens)
        tokens = xp.where(at.tokens >= 0, at.tokens, at.tokens[:, :1])  # the first draw is always there
        rest = scatter(e, tokens, 0.0)
        is_new = without_repeats(at.tokens) >= 0
        weights = xp.where(is_new, at.weight[:, None] * gather(e, tokens), 0.0)
        stops = at.weight * xp.sum(rest, axis=-1)
        return Decision(weights, stops, rest, xp.where(is_new, xp.zeros_like(tokens), -1))

    def __call__(self, draft: Draft, target_probs: Float[Array, "B N V"]) -> TreeVerdict:
        tables = lifted(draft, target_probs, self._decide, self.merged)
        return TreeVerdict(draft.tree, tables.weights, tables.after)
