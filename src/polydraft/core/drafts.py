"""What is drafted, and how siblings were drawn: it decides which verifiers are exact."""

from dataclasses import dataclass
from enum import Enum, auto

from jaxtyping import Float, Int
from torch import Tensor

from polydraft.core.budget import TreeShape
from polydraft.core.trees import NoiseKey, TokenTree

FIXED = frozenset(TreeShape) - {TreeShape.GROWN}
"""Shapes that are settled before the first draw."""


class DraftSampling(Enum):
    """How the children of one node were drawn; it decides which rules may verify them."""

    IID = auto()
    """With replacement from q, duplicates kept."""
    WITHOUT_REPLACEMENT = auto()
    """One after the other from q without the tokens already drawn, in this order."""
    POINT_MASS = auto()
    """Deterministic: top-k, retrieval, n-gram, argmax; there is no q."""
    COUPLED = auto()
    """By an exponential race whose noise the verifier shares: the smallest E/q first."""
    GREEDY_PLUS_ONE = auto()
    """The top n-1 of q, then one draw from the rest of q."""
    INDEPENDENT = auto()
    """With replacement, draw j from a row q_j of its own (several draft models); duplicates kept."""
    LISTED = auto()
    """Paths that each win races of their own: argmin E^(k)/q, one set of clocks a path, which the verifier shares."""
    SYSTEMATIC = auto()
    """The k draws at a context at equal steps of one uniform: draw j is the token where q's cumulative distribution passes (u + j)/k. Copies pool theirs, in node order."""


@dataclass(frozen=True)
class Draft:
    """A batch of drafted trees with all that a rule may know of how they were drawn.

    tree: the drafted tokens.  sampling: how siblings were drawn.  shape: what was fixed beforehand.
    probs: [B, R, V] the very rows that the tokens were drawn from, in full; None where `sampling` is POINT_MASS.
    rows: [B, N] row of `probs` that node n was drawn from; -1 = deterministic, root or padding.
        Siblings share one row, and nodes that hang on equal prefixes share one row (bit-equal distributions); only where `sampling` is
        INDEPENDENT has each sibling a row of its own.
    noise: the shared noise, only for COUPLED and LISTED.
    logits: [B, N, V] of the draft model after every node, leaves too, where it drafts in the slots of a decoding method's second sequences; its
        cache then holds every node at its first copy. For the decoding method; no verifier reads them.
    confidence: [B, N] of a draft model in each node's token, see `polydraft.core.confidence`; None where nobody says. No rule reads it.
    """

    tree: TokenTree
    sampling: DraftSampling
    shape: TreeShape
    probs: Float[Tensor, "B R V"] | None
    rows: Int[Tensor, "B N"]
    noise: NoiseKey | None = None
    logits: Float[Tensor, "B N V"] | None = None
    confidence: Float[Tensor, "B N"] | None = None

    @classmethod
    def empty(cls, roots: Int[Tensor, " B"]) -> "Draft":
        """No draft: the engine then decodes plainly."""
        tree = TokenTree.roots(roots)
        return cls(tree, DraftSampling.POINT_MASS, TreeShape.CHAIN, None, tree.parents)
