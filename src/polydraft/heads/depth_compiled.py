"""Draft models that know logits of all depths before anything is drafted, as slots of rows: all kinds of drafts come from `proposals` unchanged.

Medusa's heads, rows that a target transferred, a block that was drafted at once: what they know of a sequence before its drafts are
logits by depth, [K, D]. `DepthDistributions.know` computes them; a proposal copies them, and adds what the drafted tokens before a node say,
where a head has such a part (`heads.markov`). Branches cost no forward pass of the head. Nothing is cached: a slot has no columns.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from numba.extending import overload
from torch import Tensor

from polydraft.core import Budget, Needs, SamplingParams, Scores, TokenTree
from polydraft.heads.markov import Markov, add_bias, bias_vectors, markov
from polydraft.heads.one_pass import most_probable_trees
from polydraft.models.compiled.draft_vocabulary import draft_samplings
from polydraft.models.compiled.forward import draft_forward
from polydraft.models.compiled.proposals import CompiledProposals
from polydraft.models.compiled.trees import draft_distribution
from polydraft.models.matrices.kernels import copy_row
from polydraft.models.matrices.vectors import aligned
from polydraft.models.mixers.cache import whole
from polydraft.numerics.compiled_code import njit
from polydraft.numerics.threads import ROWS, sync

__all__ = ["DepthDistributions"]


class DepthSizes(NamedTuple):
    """As `layers.Sizes`; outputs: D in whole panels."""

    outputs: int


class DepthMemory(NamedTuple):
    """As `cache.SlotMemory`."""

    lengths: np.ndarray


class DepthArrays(NamedTuple):
    """logits: [slots, K, outputs], of the first to the K-th token behind the root."""

    sizes: DepthSizes
    memory: DepthMemory
    logits: np.ndarray
    markov: Markov


@njit(cache=True, nogil=True)
def depth_forward(model, slots, tokens, parents, first_nodes, node_ends, logits_from, logits):
    """Logits of the nodes logits_from[b] .. node_ends[b]-1 that are no padding, each those of its depth and path, see `forward.compiled_forward`."""
    row = 0
    rank = model.markov.words.shape[1]
    vectors = np.empty((len(logits) if model.markov.kind else 0, rank), np.float32)
    for b in range(len(slots)):
        for n in range(max(first_nodes[b], logits_from[b]), node_ends[b]):
            if n > 0 and parents[b, n] < 0:
                continue
            depth = 0
            m = parents[b, n]
            while m >= 0:
                depth = depth + 1
                m = parents[b, m]
            copy_row(model.logits[slots[b], depth], logits[row])
            if model.markov.kind:
                bias_vectors(model.markov, slots[b], tokens[b], parents[b], n, depth, vectors[row])
            row += 1
    if model.markov.kind:
        add_bias(model.markov.rows, vectors, logits, row)


@overload(draft_forward)
def _(model, slots, tokens, parents, first_nodes, node_ends, logits_from, logits):
    if model.instance_class is DepthArrays:
        return lambda model, slots, tokens, parents, first_nodes, node_ends, logits_from, logits: (
            depth_forward(model, slots, tokens, parents, first_nodes, node_ends, logits_from, logits)
        )
    return None


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
        self.device = torch.device("cpu")
        self.dtype = torch.float32
        outputs = whole(len(self.draft_ids))
        self.open_slots(
            target.max_model_len, target.max_num_seqs, context=0, bytes_per_token=0, device=self.device
        )
        logits = aligned(target.max_num_seqs, depths, outputs)
        self.cache_bytes = logits.nbytes
        added = (bias or partial(markov, {}, "none"))(len(logits), depths, len(self.draft_ids))
        self.arrays = DepthArrays(DepthSizes(outputs), DepthMemory(self._lengths), logits, added)

    @abstractmethod
    def know(self, slots: Sequence[int], states: Float[Tensor, "B F"]) -> None:
        """Compute `arrays.logits` of these slots from what the target told."""

    def append(
        self, token_ids: Mapping[int, Sequence[int]], hidden: Sequence[int]
    ) -> list[tuple[Tensor, list[Tensor]]]:
        """Nothing is read of texts; see `slots.SlotModel.append`."""
        return [(torch.zeros(self.vocab_size), []) for _ in token_ids]

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
        real = torch.from_numpy(parents[:, since:] >= 0)
        if since == 0:
            real[:, 0] = True
        logits = np.empty((int(real.sum()), self.arrays.sizes.outputs), np.float32)
        depth_forward(
            self.arrays, np.array(slots), tokens, parents, first_nodes, node_ends, first_nodes, logits
        )
        self.scored(slots, N)
        rows = torch.full((B, N - since, self.vocab_size), -torch.inf)
        rows[real] = self.wide(logits)
        rows[~real] = 0
        return Scores(scored, rows)

    def propose_tree(
        self,
        slots: Sequence[int],
        pending: Sequence[Sequence[int]],
        budgets: Sequence[Budget],
        params: Sequence[SamplingParams],
    ) -> tuple[TokenTree, np.ndarray, list[tuple[list[int], list[int]]]]:
        """See `proposals.CompiledProposals.propose_tree`; nothing is run, and nothing is cached."""
        tree, confidence = most_probable_trees(self, slots, [ids[-1] for ids in pending], budgets, params)
        return tree, confidence, [([], [])] * len(slots)

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
