"""Draft models that know logits of all depths before anything is drafted, as slots of rows: all kinds of drafts come from `proposals` unchanged.

Medusa's heads, rows that a target transferred, a block that was drafted at once: what they know of a sequence before its drafts are
logits by depth, [K, D]. `DepthDistributions.know` computes them; a proposal copies them, and adds what the drafted tokens before a node say,
where a head has such a part (`heads.markov`). Branches cost no forward pass of the head. Nothing is cached: a slot has no columns.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from jaxtyping import Float

from polydraft.core import Needs, SamplingParams, Scores, TokenTree
from polydraft.heads.foretold import DepthArrays, DepthMemory, DepthSizes, depth_forward
from polydraft.heads.markov import Markov, markov
from polydraft.models.growing.draft_vocabulary import draft_samplings
from polydraft.models.growing.proposals import CompiledProposals
from polydraft.models.growing.rows import draft_distribution
from polydraft.models.matrices.vectors import aligned
from polydraft.models.mixers.cache import whole
from polydraft.numerics.threads import ROWS, sync


class DepthDistributions(CompiledProposals):
    """A draft model of `depths` distributions for each sequence, over the tokens `draft_ids`; see the module.

    target: whose vocabulary, context and number of slots it has.  bias: makes what drafted tokens add, of slots, depths and number of draft tokens; default nothing.
    """

    def __init__(
        self,
        target: Any,
        draft_ids: np.ndarray,
        depths: int,
        name: str,
        bias: Callable[[int, int, int], Markov] | None = None,
    ) -> None:
        self.target = target
        self.name = name
        self.depths = depths
        self.vocab_size = target.vocab_size
        self.draft_ids = draft_ids[draft_ids < target.vocab_size]
        outputs = whole(len(self.draft_ids))
        self.open_slots(target.max_model_len, target.max_num_seqs, context=0, bytes_per_token=0)
        logits = aligned(target.max_num_seqs, depths, outputs)
        self.cache_bytes = logits.nbytes
        added = (bias or partial(markov, {}, "none"))(len(logits), depths, len(self.draft_ids))
        self.arrays = DepthArrays(DepthSizes(outputs), DepthMemory(self._lengths), logits, added)

    @abstractmethod
    def know(self, slots: Sequence[int], states: Float[np.ndarray, "B F"]) -> None:
        """Compute `arrays.logits` of these slots from what the target told."""

    def append(
        self, token_ids: Mapping[int, Sequence[int]], hidden: Sequence[int]
    ) -> list[tuple[np.ndarray, list[np.ndarray]]]:
        """Nothing is read of texts; see `slots.SlotModel.append`."""
        return [(np.zeros(self.vocab_size, np.float32), []) for _ in token_ids]

    def move(self, source: np.ndarray, target: np.ndarray) -> None:
        """There are no columns."""

    def score(
        self,
        slots: Sequence[int],
        tree: TokenTree,
        *,
        hidden: Sequence[int] = (),
        since: int = 0,
    ) -> Scores:
        """Distributions of the nodes `since` .. N-1; see `core.Target.score`."""
        tokens, parents = tree.host
        B, N = tokens.shape
        first_nodes = np.full(B, since)
        node_ends = np.full(B, N)
        scored = TokenTree(tree.tokens[:, since:], tree.parents[:, since:])
        real = parents[:, since:] >= 0
        if since == 0:
            real[:, 0] = True
        logits = np.empty((int(real.sum()), self.arrays.sizes.outputs), np.float32)
        depth_forward(
            self.arrays, np.array(slots), tokens, parents, first_nodes, node_ends, first_nodes, logits
        )
        self.scored(slots, N)
        rows = np.full((B, N - since, self.vocab_size), -np.inf, np.float32)
        rows[real] = self.wide(logits)
        rows[~real] = 0
        return Scores(scored, rows)

    def check_tree(self, num_nodes: int, num_extra: int = 0) -> None:
        """Trees of any size: no row is run."""

    @property
    def offers(self) -> Needs:
        """Nothing beyond its distributions."""
        return Needs()

    def rows(
        self, logits: Float[np.ndarray, "B X D"], params: Sequence[SamplingParams]
    ) -> Float[np.ndarray, "B X V"]:
        """Distributions over all tokens, as tokens are drawn from them."""
        samplings, bias = draft_samplings(params, self.vocab_size, self.draft_ids)
        D = len(self.draft_ids)
        probs = np.zeros((*logits.shape[:2], self.vocab_size), np.float32)
        compact = np.empty(D, np.float32)
        for b in range(len(params)):
            for j in range(logits.shape[1]):
                with ROWS:
                    draft_distribution(
                        sync, logits[b, j].copy(), bias[b], samplings[b], compact, np.empty(D, np.int32)
                    )
                probs[b, j, self.draft_ids] = compact
        return probs
