"""A whole proposal of a compiled draft model in one call: passes, laws and draws, depth by depth for the whole batch.

The tree of each row is fixed beforehand, see `models/layout.py`. Paths that agree share their rows: a prefix is run through the model
once, whatever the number of its copies, and nodes without children not at all.
"""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float, Int
from numba import njit
from torch import Tensor

from polydraft.core import Budget, SamplingParams, TokenTree
from polydraft.models.compiled.forward import ModelArrays, compiled_pass
from polydraft.models.compiled.trees import draft_law, grow
from polydraft.models.layout import layouts
from polydraft.models.slots import TREE_ROOM, SlotModel
from polydraft.noise import choose_row, first_arrivals, uniform_at

__all__ = ["CompiledProposals"]

_f32 = np.float32
LONGEST_PENDING = 32
"""Committed tokens that a proposal reads itself; more are read by a pass of their own before."""


@njit(cache=True, error_model="numpy")
def _propose(model, vocab, asked, given, starts, inner, law, bias, coupled):
    """asked [B, 5 + P] = slot, seed, sample, position, number of pending tokens, those tokens, the root last.

    given, starts, inner: see `layout.Layout`.  law [B, 4] = temperature, top_k, top_p, min_p.  Caches grow by what is pending, less the root, behind which the tree lies.
    Returns tokens, parents, rows [B, N] and probs [B, R, V]. coupled: draws by the race, else independent ones.
    """
    slots, keys, counts, pending = asked[:, 0].copy(), asked[:, 1:4], asked[:, 4], asked[:, 5:]
    (B, N), P, distinct = given.shape, pending.shape[1], 1
    for b in range(B):
        distinct = max(distinct, (inner[b] - starts[b, :-1]).sum())
    tokens, parents, rows = np.zeros((B, N), np.int64), given.copy(), np.full((B, N), -1, np.int64)
    probs = np.zeros((B, distinct, vocab), _f32)
    first, row_of = np.zeros((B, N), np.int64), np.full((B, N), -1, np.int64)  # earliest copy of a node, its row of probs
    fed, above = np.zeros((B, P + N), np.int64), np.full((B, P + N), -1, np.int64)  # the tree that the model sees
    begins, ends, wanted, used = np.zeros(B, np.int64), np.zeros(B, np.int64), np.zeros(B, np.int64), np.zeros(B, np.int64)
    whole = model.sizes.outputs
    taken = np.full(model.weights.attention_norm.shape[0] + 1, -1, np.int64)
    states, drawn = np.empty((0, 0, 0), _f32), np.empty(N, np.int64)
    extra, mask = np.empty((B, 3, 0), np.int64), np.empty((B, 0, 0), np.bool_)
    for b in range(B):
        tokens[b, 0] = pending[b, counts[b] - 1]
        for i in range(counts[b]):
            fed[b, i], above[b, i] = pending[b, i], i - 1
    for d in range(inner.shape[1] - 1):
        R = 0
        for b in range(B):
            wanted[b] = counts[b] - 1 + starts[b, d]
            begins[b] = 0 if d == 0 else wanted[b]
            ends[b] = counts[b] - 1 + inner[b, d] if inner[b, d] > starts[b, d] else begins[b]
            R += inner[b, d] - starts[b, d]
        logits = np.empty((R, whole), _f32)
        compiled_pass(model, slots, fed, above, begins, ends, wanted, logits, states, taken, extra, mask)
        r = 0
        for b in range(B):
            root, here, end = counts[b] - 1, starts[b, d + 1], starts[b, d + 2]
            for node in range(starts[b, d], inner[b, d]):
                if first[b, node] != node:
                    continue
                row_of[b, node] = used[b]
                draft_law(logits[r], bias[b], law[b, 0], int(law[b, 1]), law[b, 2], law[b, 3], probs[b, used[b]])
                used[b] += 1
                r += 1
            for n in range(here, end):
                parent = parents[b, n]
                source = row_of[b, first[b, parent]]
                if tokens[b, parent] < 0:
                    tokens[b, n] = -1
                elif not coupled:
                    tokens[b, n] = choose_row(probs[b, source], uniform_at(keys[b, 0], keys[b, 1], keys[b, 2], 0, n))
                elif not (parents[b, here:n] == parent).any():  # all children of a node at once
                    many = (parents[b, n:end] == parent).sum()
                    first_arrivals(probs[b, source], keys[b, 0], keys[b, 1], keys[b, 2] + d, drawn[:many])
                    turn = 0
                    for m in range(n, end):
                        if parents[b, m] == parent:
                            tokens[b, m] = drawn[turn] if turn == 0 or drawn[turn] != drawn[turn - 1] else -1
                            turn += 1
                if tokens[b, n] < 0:  # no draft, which the caller sees
                    continue
                rows[b, n] = source
                first[b, n] = n
                for m in range(here, n):
                    if tokens[b, m] == tokens[b, n] and (d == 0 or first[b, parents[b, m]] == first[b, parent]):
                        first[b, n] = first[b, m]
                        break
                if first[b, n] == n:
                    fed[b, root + n], above[b, root + n] = tokens[b, n], root + first[b, parent]
    for b in range(B):
        if inner[b, 0] > 0:
            model.memory.lengths[slots[b]] += counts[b] - 1
    return tokens, parents, rows, probs


Keys = tuple[Sequence[int], Sequence[int], Sequence[int]]
"""Seeds, sample indices and positions of the noise."""


class CompiledProposals(SlotModel):
    """What a compiled model offers as a draft model, see `core.Target`: proposals in one call for the whole batch."""

    arrays: ModelArrays
    vocab_size: int

    def propose_paths(
        self,
        slots: Sequence[int],
        pending: Sequence[Sequence[int]],
        keys: Keys,
        trees: Sequence[tuple[int, ...]],
        params: Sequence[SamplingParams],
        *,
        coupled: bool = False,
    ) -> tuple[TokenTree, Int[Tensor, "B N"], Float[Tensor, "B R V"]] | None:
        """A tree for every row: its tokens, each node's row, and the rows that tokens were drawn from. Penalties are left out of the law.

        trees: of every row, the parents of a fixed `core.Budget`.  keys: seeds, sample indices and positions of the noise.
        pending: committed tokens that the cache lacks, the root last; all but that are cached where there is a draft.
        coupled: the children of a node are its smallest clock / q (Kobus & Gunduz 2025, arXiv 2504.15475); else every token is an
            independent draw of its row. None where a law has fewer tokens than a node has children.

        Raises:
            CapacityError: a tree of more nodes than a pass takes.
        """
        places, drafting = layouts(tuple(trees)), [len(parents) > 1 for parents in trees]
        given = self._asked(slots, list(zip(*keys, strict=True)), pending, drafting, places.parents.shape[1])
        law, bias = _laws(params, self.vocab_size)
        with self.pool:
            tokens, parents, rows, probs = _propose(self.arrays, self.vocab_size, given, *places, np.array(law), bias, coupled)
        self._note(slots, drafting, places.parents.shape[1], places.inner.shape[1] - 1)
        if coupled and (tokens < 0).any():
            return None
        return TokenTree.of(tokens, parents), torch.from_numpy(rows), torch.from_numpy(probs)

    def propose_tree(
        self,
        slots: Sequence[int],
        pending: Sequence[Sequence[int]],
        budgets: Sequence[Budget],
        params: Sequence[SamplingParams],
    ) -> tuple[TokenTree, np.ndarray, list[tuple[list[int], list[int]]]]:
        """The most probable trees: the draft, its nodes' path probabilities [B, N], and tokens and parents of each row's scored nodes.

        The cache then holds these from the root on.  budgets: grown ones.  pending: as of `propose_paths`.

        Raises:
            CapacityError: more expanded nodes than a pass takes.
        """
        sizes = [(g.max_depth if g.max_nodes else 0, g.width, g.max_nodes) for g in budgets]
        depths = [depth for depth, *_ in sizes]
        most = 1 + max(min(width, nodes) * depth for depth, width, nodes in sizes)
        given = self._asked(slots, sizes, pending, [depth > 0 for depth in depths], most)
        law, bias = _laws(params, self.vocab_size)
        limited = np.array([(*row, g.least) for row, g in zip(law, budgets, strict=True)])
        with self.pool:
            tokens, parents, scores, scored, below, rows = grow(self.arrays, self.vocab_size, given, limited, bias)
        self._note(slots, [depth > 0 for depth in depths], scored.shape[1], max(depths))
        cached = [(scored[b, :n].tolist(), below[b, :n].tolist()) for b, n in enumerate(rows.tolist())]
        return TokenTree.of(tokens, parents), scores, cached

    def _asked(
        self,
        slots: Sequence[int],
        about: Sequence[tuple[int, ...]],
        pending: Sequence[Sequence[int]],
        drafting: Sequence[bool],
        num_rows: int,
    ) -> np.ndarray:
        """What is asked for, a row each: slot, what is said about it, number of pending tokens, those tokens. What does not fit beside
        a proposal of so many rows is read now."""
        self.check_tree(num_rows)
        most = min(LONGEST_PENDING, TREE_ROOM + 1 - num_rows)
        for slot, ids, drafts in zip(slots, pending, drafting, strict=True):
            if drafts and len(ids) > most:
                self.prefill([slot], [ids[:-most]])
        left = [ids[-most:] if drafts else ids[-1:] for ids, drafts in zip(pending, drafting, strict=True)]
        longest = max(map(len, left))
        rows = zip(slots, about, left, strict=True)
        return np.array([[slot, *said, len(ids), *ids, *[0] * (longest - len(ids))] for slot, said, ids in rows])

    def _note(self, slots: Sequence[int], drafting: Sequence[bool], num_nodes: int, num_passes: int) -> None:
        self.scored([slot for slot, drafts in zip(slots, drafting, strict=True) if drafts], num_nodes)
        self.passes += num_passes


def _laws(params: Sequence[SamplingParams], vocab_size: int) -> tuple[list[tuple[float, float, float, float]], np.ndarray]:
    """Temperature, top_k, top_p, min_p of every row, and what is added to its logits, [B, V] or [B, 0]."""
    bias = np.zeros((len(params), vocab_size if any(g.logit_bias for g in params) else 0), np.float32)
    for b, g in enumerate(params):
        for token, value in g.logit_bias.items():
            bias[b, token] = value
    return [(g.temperature, max(g.top_k, 0), g.top_p, g.min_p) for g in params], bias
