"""A whole proposal of a compiled draft model in one call: passes, laws and draws, depth by depth for the whole batch.

The tree of each row is fixed beforehand, see `models/layout.py`, or ends earlier by the nodes' own paths (`budget.Stop`). Paths that agree share
their rows: a prefix is run through the model once, whatever the number of its copies, and nodes without children not at all.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from numba import njit
from torch import Tensor

from polydraft.budget import Stop
from polydraft.confidence import BINS, acceptance_at
from polydraft.core import Budget, DraftSampling, SamplingParams, TokenTree
from polydraft.models.compiled.draft_vocabulary import OutputTokens, hide_other_texts
from polydraft.models.compiled.forward import draft_pass
from polydraft.models.compiled.trees import draft_law, grow
from polydraft.models.layout import Layout, layouts, with_leaves
from polydraft.models.slots import TREE_ROOM, SlotModel
from polydraft.noise import choose_row, choose_systematic, first_arrivals, uniform_at

__all__ = ["CompiledProposals", "Proposal", "laws_asked", "stops_asked"]

_f32 = np.float32
IID, COUPLED = DraftSampling.IID.value, DraftSampling.COUPLED.value
_MISSING = -2
"""Token of a node that its row has too few tokens for; of one that is not drawn it is -1."""
LONGEST_PENDING = 32
"""Committed tokens that a proposal reads itself; more are read by a pass of their own before."""


@njit(cache=True, error_model="numpy", nogil=True)
def _propose(model, vocab, outputs, asked, given, starts, inner, law, bias, siblings, raw, least, acceptance):
    """asked [B, 5 + P] = slot, seed, sample, position, number of pending tokens, those tokens, the root last.

    given, starts, inner: see `layout.Layout`.  law [B, 4] = temperature, top_k, top_p, min_p.  What is pending, less the root, lies in the caches then, and the tree behind it: lengths are the caller's, see `CompiledProposals._committed`.
    outputs: `OutputTokens`.
    siblings: value of the DraftSampling of the draws.  raw: [B, N, all outputs], what the logits after each node are written to; or no nodes.
    least [B, D], acceptance [B, BINS]: of `budget.Stop`; D = 0 draws whole trees.
    Returns tokens, parents, rows and confidences [B, N] without the nodes behind the last one that is drawn, probs [B, R, V], and the number of
    passes; a node that is not drawn has parent -1.
    """
    ids, slots, keys, counts, pending = outputs.ids, asked[:, 0].copy(), asked[:, 1:4], asked[:, 4], asked[:, 5:]
    (B, N), P, distinct = given.shape, pending.shape[1], 1
    for b in range(B):
        distinct = max(distinct, (inner[b] - starts[b, :-1]).sum())
    tokens, rows = np.zeros((B, N), np.int64), np.full((B, N), -1, np.int64)
    parents = rows.copy()
    probs = np.zeros((B, distinct, vocab), _f32)
    first, row_of = np.zeros((B, N), np.int64), np.full((B, N), -1, np.int64)  # earliest copy of a node, its row of probs
    fed, above = np.zeros((B, P + N), np.int64), np.full((B, P + N), -1, np.int64)  # the tree that the model sees
    begins, ends, wanted, used = np.zeros(B, np.int64), np.zeros(B, np.int64), np.zeros(B, np.int64), np.zeros(B, np.int64)
    whole, drawn = model.sizes.outputs, np.empty(N, np.int64)
    compact = np.empty(ids.size, _f32)
    reach, confidence, sure = np.ones((B, N)), np.ones((B, N)), np.ones((B, distinct))  # sure: of the likeliest token of a row
    goes_on, passes = np.ones((B, N), np.bool_), 0
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
            for node in range(starts[b, d], inner[b, d]):
                R += goes_on[b, node]
        if R == 0:
            break
        logits = np.empty((R, whole), _f32)
        draft_pass(model, slots, fed, above, begins, ends, wanted, logits)
        r, passes = 0, passes + 1
        for b in range(B):
            root, here, end = counts[b] - 1, starts[b, d + 1], starts[b, d + 2]
            for node in range(starts[b, d], inner[b, d]):
                if first[b, node] != node or not goes_on[b, node]:
                    continue
                row_of[b, node] = used[b]
                hide_other_texts(logits[r], outputs.in_text, slots[b], ids.size if ids.size else vocab)
                out = compact if ids.size else probs[b, used[b]]
                if law[b, 0] == 0.0 and bias.shape[1] > 0:
                    sure[b, used[b]] = draft_law(logits[r].copy(), bias[b], 1.0, 0, 1.0, 0.0, out)
                elif law[b, 0] == 0.0:
                    sure[b, used[b]] = draft_law(logits[r], bias[b], 1.0, 0, 1.0, 0.0, out)
                draft_law(logits[r], bias[b], law[b, 0], int(law[b, 1]), law[b, 2], law[b, 3], out)
                for i in range(ids.size):
                    if compact[i] > 0.0:
                        probs[b, used[b], ids[i]] = compact[i]
                if raw.shape[1] > 0:
                    raw[b, node] = logits[r]
                used[b] += 1
                r += 1
            for n in range(here, end):
                parent = given[b, n]
                source = row_of[b, first[b, parent]]
                if tokens[b, parent] < 0 or not goes_on[b, parent]:
                    tokens[b, n] = -1
                elif siblings == IID:
                    tokens[b, n] = choose_row(probs[b, source], uniform_at(keys[b, 0], keys[b, 1], keys[b, 2], 0, n))
                elif not (first[b][given[b, here:n]] == first[b, parent]).any():  # all draws of a context at once
                    context, turn = first[b, parent], 0
                    many = (first[b][given[b, n:end]] == context).sum()
                    if siblings == COUPLED:
                        first_arrivals(probs[b, source], keys[b, 0], keys[b, 1], keys[b, 2] + d, drawn[:many])
                    else:
                        u = uniform_at(keys[b, 0], keys[b, 1], keys[b, 2], 0, context)
                        choose_systematic(probs[b, source], u, drawn[:many])
                    for m in range(n, end):
                        if first[b, given[b, m]] == context:
                            again = siblings == COUPLED and turn > 0 and drawn[turn] == drawn[turn - 1]
                            tokens[b, m] = _MISSING if again else drawn[turn]
                            turn += 1
                if tokens[b, n] < 0:
                    goes_on[b, n] = False
                    continue
                parents[b, n], rows[b, n] = parent, source
                confidence[b, n] = sure[b, source] if law[b, 0] == 0.0 else probs[b, source, tokens[b, n]]
                if least.shape[1] > 0:
                    reach[b, n] = reach[b, parent] * acceptance_at(confidence[b, n], acceptance[b])
                    goes_on[b, n] = reach[b, n] >= least[b, min(d, least.shape[1] - 1)]
                first[b, n] = n
                for m in range(here, n):
                    if tokens[b, m] == tokens[b, n] and (d == 0 or first[b, given[b, m]] == first[b, parent]):
                        first[b, n] = first[b, m]
                        break
                if first[b, n] == n and goes_on[b, n]:
                    fed[b, root + n], above[b, root + n] = tokens[b, n], root + first[b, parent]
    last = 1
    for b in range(B):
        for n in range(1, N):
            if parents[b, n] >= 0:
                last = max(last, n + 1)
            elif tokens[b, n] == -1:
                tokens[b, n] = 0
        for n in range(raw.shape[1]):
            if first[b, n] != n:
                raw[b, n] = raw[b, first[b, n]]
    return tokens[:, :last].copy(), parents[:, :last].copy(), rows[:, :last].copy(), confidence[:, :last].copy(), probs, passes


Keys = tuple[Sequence[int], Sequence[int], Sequence[int]]
"""Seeds, sample indices and positions of the noise."""


class Proposal(NamedTuple):
    """Tokens, each node's row, the rows that tokens were drawn from, `Draft.confidence`, and `Draft.logits` where they were made.

    tree: with the node numbers of the budget; what a stop left out has parent -1.
    """

    tree: TokenTree
    rows: Int[Tensor, "B N"]
    probs: Float[Tensor, "B R V"]
    confidence: Float[Tensor, "B N"] | None = None
    logits: Float[Tensor, "B N V"] | None = None


class CompiledProposals(SlotModel):
    """What a compiled model offers as a draft model, see `core.Target`: proposals in one call for the whole batch."""

    arrays: Any
    """A tuple of arrays for which there is a `forward.draft_pass`."""
    output_tokens: OutputTokens | None = None
    """Where slots draft tokens of their own."""

    def propose_paths(
        self,
        slots: Sequence[int],
        pending: Sequence[Sequence[int]],
        keys: Keys,
        trees: Sequence[tuple[int, ...]],
        params: Sequence[SamplingParams],
        *,
        draft_sampling: DraftSampling = DraftSampling.IID,
        stops: Sequence[Stop | None] = (),
    ) -> Proposal | None:
        """A tree for every row. Penalties are left out of the law.

        trees: of every row, the parents of a fixed `core.Budget`; its nodes behind a `stop` have parent -1.  keys: seeds, sample indices and
            positions of the noise.  pending: committed tokens that the cache lacks, the root last; all but that are cached where there is a draft.
        law: IID; COUPLED: the children of a node are its smallest clock / q (Kobus & Gunduz 2025, arXiv 2504.15475), and None is
            returned where its row has fewer tokens; SYSTEMATIC.

        Raises:
            CapacityError: a tree of more nodes than a pass takes.
        """
        raw = np.empty((len(slots), 0, 0), _f32)
        return self._paths(
            slots, pending, keys, layouts(tuple(trees)), [len(x) > 1 for x in trees], params, draft_sampling, raw, stops
        )

    def propose_and_score(
        self,
        slots: Sequence[int],
        pending: Sequence[Sequence[int]],
        keys: Keys,
        trees: Sequence[tuple[int, ...]],
        params: Sequence[SamplingParams],
        *,
        draft_sampling: DraftSampling = DraftSampling.IID,
        stops: Sequence[Stop | None] = (),
    ) -> Proposal | None:
        """The same draft, and the logits after each of its nodes, in one more pass, over the leaves; see `propose_paths`.

        The slots then hold every distinct node at its first copy, to be committed. For models that have logits of all tokens. Trees are
        drawn whole, whatever the stops.
        """
        assert not len(self.draft_ids)
        places = with_leaves(layouts(tuple(trees)))
        raw = np.empty((*places.parents.shape, self.arrays.sizes.outputs), _f32)
        found = self._paths(slots, pending, keys, places, [True] * len(slots), params, draft_sampling, raw, ())
        return None if found is None else found._replace(logits=torch.from_numpy(raw)[..., : self.vocab_size])

    def _paths(
        self,
        slots: Sequence[int],
        pending: Sequence[Sequence[int]],
        keys: Keys,
        places: Layout,
        drafting: Sequence[bool],
        params: Sequence[SamplingParams],
        draft_sampling: DraftSampling,
        raw: np.ndarray,
        stops: Sequence[Stop | None],
    ) -> Proposal | None:
        given = self._asked(slots, list(zip(*keys, strict=True)), pending, drafting, places.parents.shape[1])
        rows_asked, bias = laws_asked(params, self.vocab_size, self.draft_ids)
        with self.pool:
            tokens, parents, rows, confidence, probs, passes = _propose(
                self.arrays,
                self.vocab_size,
                self.output_tokens or OutputTokens.of(self.draft_ids),
                given,
                *places,
                np.array(rows_asked),
                bias,
                draft_sampling.value,
                raw,
                *stops_asked(tuple(stops), len(slots)),
            )
        self._committed(given, drafting, places.parents.shape[1], passes)
        if len(slots) == 1:  # without the rows that no pass has filled
            probs = probs[:, : max(int(rows.max()) + 1, 1)]
        if (tokens == _MISSING).any():
            return None
        confidences = torch.from_numpy(confidence)
        return Proposal(TokenTree.of(tokens, parents), torch.from_numpy(rows), torch.from_numpy(probs), confidences)

    def propose_tree(
        self,
        slots: Sequence[int],
        pending: Sequence[Sequence[int]],
        budgets: Sequence[Budget],
        params: Sequence[SamplingParams],
    ) -> tuple[TokenTree, np.ndarray, list[tuple[list[int], list[int]]]]:
        """The most probable trees: the draft, its nodes' confidences [B, N], and tokens and parents of each row's scored nodes.

        The cache then holds these from the root on.  budgets: grown ones; with a stop path probabilities are products of calibrated
        acceptances.  pending: as of `propose_paths`.

        Raises:
            CapacityError: more expanded nodes than a pass takes.
        """
        sizes = [(g.max_depth if g.max_nodes else 0, g.width, g.max_nodes) for g in budgets]
        depths = [depth for depth, *_ in sizes]
        most = 1 + max(min(width, nodes) * depth for depth, width, nodes in sizes)
        given = self._asked(slots, sizes, pending, [depth > 0 for depth in depths], most)
        law, bias = laws_asked(params, self.vocab_size, self.draft_ids)
        limited = np.array([(*row, g.least) for row, g in zip(law, budgets, strict=True)])
        with self.pool:
            tokens, parents, confidences, scored, below, rows, passes = grow(
                self.arrays,
                self.output_tokens or OutputTokens.of(self.draft_ids),
                self.vocab_size,
                given,
                limited,
                bias,
                *stops_asked(tuple(g.stop for g in budgets), len(budgets)),
            )
        self._committed(given, [depth > 0 for depth in depths], scored.shape[1], passes)
        cached = [(scored[b, :n].tolist(), below[b, :n].tolist()) for b, n in enumerate(rows.tolist())]
        return TokenTree.of(tokens, parents), confidences, cached

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
        for slot, ids, drafts in zip(slots, left, drafting, strict=True):
            if drafts:
                self.reads(slot, ids)
        longest = max(map(len, left))
        rows = zip(slots, about, left, strict=True)
        return np.array([[slot, *said, len(ids), *ids, *[0] * (longest - len(ids))] for slot, said, ids in rows])

    def reads(self, slot: int, token_ids: Sequence[int]) -> None:
        """The next proposal reads these tokens behind those of this slot: for models that read more of them than their ids."""

    def wide(self, logits: np.ndarray) -> Float[Tensor, "R V"]:
        """Rows of the draft vocabulary as rows of all tokens."""
        if not len(self.draft_ids):
            return torch.from_numpy(logits[:, : self.vocab_size])
        wide = np.full((len(logits), self.vocab_size), -np.inf, np.float32)
        wide[:, self.draft_ids] = logits[:, : len(self.draft_ids)]
        return torch.from_numpy(wide)

    def _committed(self, requests: np.ndarray, drafting: Sequence[bool], num_nodes: int, num_passes: int) -> None:
        """What was pending is committed, and trees lie behind it. requests: as of `_asked`."""
        slots, num_pending = requests[np.array(drafting)][:, [0, 4]].T
        self.appended(slots, num_pending - 1)
        self.scored(slots, num_nodes)
        self.passes += num_passes


@lru_cache(maxsize=256)
def stops_asked(stops: tuple[Stop | None, ...], count: int) -> tuple[np.ndarray, np.ndarray]:
    """`least` [B, D] and `acceptance` [B, BINS] of every row; D = 0 where none has a stop.

    Example:
        >>> stops_asked((Stop((0.3, 0.5)), None), 2)[0].tolist()
        [[0.3, 0.5], [0.0, 0.0]]
    """
    most = max((len(stop.least) for stop in stops if stop), default=0)
    least, acceptance = np.zeros((count, most)), np.ones((count, BINS))
    for b, stop in enumerate(stops):
        if stop:
            least[b] = stop.least + stop.least[-1:] * (most - len(stop.least))
            acceptance[b] = stop.acceptance
    return least, acceptance


def laws_asked(
    params: Sequence[SamplingParams], vocab_size: int, ids: np.ndarray
) -> tuple[list[tuple[float, float, float, float]], np.ndarray]:
    """Temperature, top_k, top_p, min_p of every row, and what is added to its logits, [B, V or draft vocabulary] or [B, 0]."""
    bias = np.zeros((len(params), vocab_size if any(g.logit_bias for g in params) else 0), np.float32)
    for b, g in enumerate(params):
        for token, value in g.logit_bias.items():
            bias[b, token] = value
    bias = bias[:, ids] if ids.size and bias.size else bias
    return [(g.temperature, max(g.top_k, 0), g.top_p, g.min_p) for g in params], bias
