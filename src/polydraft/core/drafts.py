"""What is drafted, and how siblings were drawn: it decides which verifiers are exact."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto

import numpy as np
from jaxtyping import Float, Int

from polydraft.core.arrays import Array, like, namespace
from polydraft.core.batch import padded, scatter, uniform
from polydraft.core.budget import TreeShape
from polydraft.core.trees import NoiseKey, TokenTree

FIXED = frozenset(TreeShape) - {TreeShape.GROWN}
"""Shapes that are settled before the first draw."""


class DraftSampling(Enum):
    """How the children of one node were drawn; it decides which verifiers are exact for them."""

    IID = auto()
    """With replacement from q, duplicates among them."""
    WITHOUT_REPLACEMENT = auto()
    """One after the other from q without the tokens already drawn, in this order."""
    POINT_MASS = auto()
    """Deterministic: top-k, retrieval, n-gram, argmax; there is no q."""
    COUPLED = auto()
    """By an exponential race whose noise the verifier shares: the smallest E/q first."""
    GREEDY_PLUS_ONE = auto()
    """The top n-1 of q, then one draw from the rest of q."""
    INDEPENDENT = auto()
    """With replacement, draw j from a row q_j of its own (several draft models), duplicates among them."""
    LISTED = auto()
    """Paths that each win races of their own: argmin E^(k)/q, one set of clocks a path, which the verifier shares."""
    SYSTEMATIC = auto()
    """The k draws at a context at equal steps of one uniform: draw j is the token where q's cumulative distribution crosses (u + j)/k. Copies pool theirs, in node order."""


@dataclass(frozen=True)
class Draft:
    """A batch of drafted trees with all that a verifier may know of how they were drawn.

    tree: the drafted tokens.  sampling: how siblings were drawn.  shape: what was fixed beforehand.
    probs: [B, R, V] the very rows that the tokens were drawn from, in full; None where `sampling` is POINT_MASS.
    rows: [B, N] row of `probs` that node n was drawn from; -1 = deterministic, root or padding.
        Siblings share one row, and nodes that hang on equal prefixes share one row (bit-equal distributions); only where `sampling` is
        INDEPENDENT has each sibling a row of its own.
    noise: the shared noise, only for COUPLED and LISTED.
    logits: [B, N, V] of the draft model after every node, leaves too, where it drafts in the slots of a decoding method's second sequences; its
        cache then holds every node at its first copy. For the decoding method; no verifier reads them.
    confidence: [B, N] of a draft model in each node's token, see `polydraft.core.confidence`; None where nobody says. No verifier reads it.
    """

    tree: TokenTree
    sampling: DraftSampling
    shape: TreeShape
    probs: Float[Array, "B R V"] | None = field(metadata=padded(uniform))
    rows: Int[Array, "B N"] = field(metadata=padded(-1))
    noise: NoiseKey | None = None
    logits: Float[Array, "B N V"] | None = field(default=None, metadata=padded(0.0))
    confidence: Float[Array, "B N"] | None = field(default=None, metadata=padded(1.0))

    @classmethod
    def bare(cls, roots: Int[Array, " B"]) -> "Draft":
        """No draft: the engine then decodes plainly."""
        return cls.point_mass(TokenTree.roots(roots))

    @classmethod
    def point_mass(cls, tree: TokenTree, shape: TreeShape = TreeShape.CHAIN) -> "Draft":
        """Trees that nothing was drawn for."""
        no_rows = like(np.full(tree.tokens.shape, -1), tree.tokens)
        return cls(tree, DraftSampling.POINT_MASS, shape, None, no_rows)

    @classmethod
    def scatter(cls, rows: Sequence[Sequence[int]], drafts: Sequence["Draft"]) -> "Draft":
        """Drafts of some rows each as the draft of all: of one sampling, beside which some may be point masses, whose nodes have no row.

        Chains lie beside chains with spare siblings, too, which are drawn without replacement.

        Example:
            >>> roots = [Draft.bare(np.array(tokens)) for tokens in ([5], [6, 7])]
            >>> Draft.scatter([[1], [0, 2]], roots).tree.tokens.tolist()
            [[6], [5], [7]]
        """
        drawn = [d for d in drafts if d.probs is not None] or list(drafts)
        distinct = any(d.sampling is DraftSampling.WITHOUT_REPLACEMENT for d in drawn)
        draft_sampling = DraftSampling.WITHOUT_REPLACEMENT if distinct else drawn[0].sampling
        shape = (
            drawn[0].shape
            if len({d.shape for d in drawn}) == 1
            else TreeShape.of_batch([d.shape for d in drawn])
        )
        parts = [replace(d._beside(drawn[0].probs), sampling=draft_sampling, shape=shape) for d in drafts]
        for name in ("noise", "logits", "confidence"):  # of the whole only where all say so
            if any(getattr(d, name) is None for d in parts):
                parts = [replace(d, **{name: None}) for d in parts]
        return scatter(rows, parts)

    def _beside(self, draft_probs: Float[Array, "B R V"] | None) -> "Draft":
        """The same with rows of probabilities where others have some, and with the confidence of what drew nothing."""
        probs = self.probs
        confidence = self.confidence
        if probs is None and draft_probs is not None:
            V = draft_probs.shape[-1]
            probs = namespace(draft_probs).full_like(draft_probs[:1, :1], 1 / V)
            probs = namespace(probs).broadcast_to(probs, (len(self.rows), 1, V))
        if confidence is None and self.tree.num_nodes == 1:
            confidence = like(np.ones(self.rows.shape, np.float32), self.rows)
        return replace(self, probs=probs, confidence=confidence)
