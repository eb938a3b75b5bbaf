"""A whole proposal of a compiled draft model in one call: forward passes, distributions and draws, depth by depth for the whole batch.

The tree of each row is fixed beforehand, see `models/layout.py`, or ends earlier by the nodes' own paths (`budget.Stop`). Paths that agree share
their rows: a prefix is run through the model once, whatever the number of its copies, and nodes without children not at all.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from polydraft.core import Budget, DraftSampling, SamplingParams, TokenTree
from polydraft.core.budget import Stop
from polydraft.core.confidence import acceptance_at
from polydraft.models.compiled.draft_vocabulary import OutputTokens, draft_samplings, hide_other_texts
from polydraft.models.compiled.forward import draft_forward
from polydraft.models.compiled.guesses import MOST_GUESSES, Texts, guess
from polydraft.models.compiled.stops import add_spares, stops_asked
from polydraft.models.compiled.trees import draft_distribution, grow
from polydraft.models.layout import layouts, with_leaves
from polydraft.models.matrices.kernels import copy_row
from polydraft.models.slots import TREE_ROOM, SlotModel
from polydraft.numerics.compile_time import inner
from polydraft.numerics.compiled_code import njit
from polydraft.numerics.threads import sync
from polydraft.sampling.categorical import choose_row, choose_systematic
from polydraft.sampling.noise import DRAFT, first_arrivals, uniform_at
from polydraft.sampling.truncation import SAMPLING

__all__ = ["CompiledProposals", "Keys", "Proposal", "planted"]

_f32 = np.float32
DRAW = np.dtype([(name, np.int64) for name in ("slot", "seed", "sample", "position", "num_pending")])
"""A request for a tree that is drawn: the slot, the noise's key, and how many committed tokens the cache lacks."""
GROW = np.dtype([(name, np.int64) for name in ("slot", "depth", "width", "max_nodes", "num_pending")])
"""A request for the most probable tree, within these bounds."""
SOFTMAX: Any = np.array([(1.0, 0, 1.0, 0.0, 0.0)], SAMPLING)
"""Sampling parameters that change nothing."""
IID, COUPLED, DISTINCT = (
    s.value for s in (DraftSampling.IID, DraftSampling.COUPLED, DraftSampling.WITHOUT_REPLACEMENT)
)
_MISSING = -2
"""Token of a node that its row has too few tokens for; of one that is not drawn it is -1."""
LONGEST_PENDING = 32
"""Committed tokens that a proposal reads itself; more are read by a forward pass of their own before."""


class Trees(NamedTuple):
    """Drafts while they are drawn. first: earliest copy of a node.  row: of `probs` behind a first copy.  surest: largest probability of a row.

    reach: chance that a node is accepted.  goes_on: whether children of a node are drawn.  num_rows: [B] of `probs`.
    """

    tokens: Int[np.ndarray, "B N"]
    parents: Int[np.ndarray, "B N"]
    rows: Int[np.ndarray, "B N"]
    confidence: Float[np.ndarray, "B N"]
    probs: Float[np.ndarray, "B R V"]
    first: Int[np.ndarray, "B N"]
    row: Int[np.ndarray, "B N"]
    surest: Float[np.ndarray, "B R"]
    reach: Float[np.ndarray, "B N"]
    goes_on: Bool[np.ndarray, "B N"]
    num_rows: Int[np.ndarray, " B"]


@inner
def planted(B, N, num_rows, vocab):
    """Trees of which nothing is drawn, with room for so many nodes and rows of `probs`."""
    nowhere = np.full((B, N), -1, np.int64)
    certain = np.ones((B, N))
    return Trees(
        np.zeros((B, N), np.int64),
        nowhere,
        nowhere.copy(),
        certain,
        np.zeros((B, num_rows, vocab), _f32),
        np.zeros((B, N), np.int64),
        nowhere.copy(),
        np.ones((B, num_rows)),
        certain.copy(),
        np.ones((B, N), np.bool_),
        np.zeros(B, np.int64),
    )


@inner
def _most_rows(places):
    """Of `probs`, of the tree with most inner nodes."""
    most = 1
    for b in range(len(places.parents)):
        count = 0
        for d in range(places.inner.shape[1]):
            count += places.inner[b, d] - places.starts[b, d]
        most = max(most, count)
    return most


@inner(error_model="numpy")
def _add_row(sync, trees, b, node, logits, outputs, slot, sampling, bias, compact, room):
    """The draft distribution behind a node, a new row of `probs`; logits are changed."""
    row = trees.num_rows[b]
    ids = outputs.ids
    hide_other_texts(logits, outputs.in_text, slot, ids.size if ids.size else trees.probs.shape[2])
    out = compact if ids.size else trees.probs[b, row]
    if sampling.temperature == 0.0:
        trees.surest[b, row] = draft_distribution(sync, logits, bias, SOFTMAX[0], out, room)
        bias = bias[:0]  # it is in the logits now
    draft_distribution(sync, logits, bias, sampling, out, room)
    for i in range(ids.size):
        if compact[i] > 0.0:
            trees.probs[b, row, ids[i]] = compact[i]
    trees.row[b, node] = row
    trees.num_rows[b] += 1


@inner
def _in_context(trees, b, above, begin, end, context):
    """How many of the nodes begin .. end-1 have a parent whose earliest copy is `context`."""
    count = 0
    for m in range(begin, end):
        count += trees.first[b, above[m]] == context
    return count


@inner(error_model="numpy")
def _draw(trees, b, above, depth, n, siblings, key, drawn, rest):
    """The token of node n, a child of a node that goes on; where draws of a context belong together, those of its later nodes, too.

    above, depth: of the nodes of the tree, and where this depth begins, ends, and how deep it is.  drawn, rest: room for tokens and for a row.
    """
    begin, end, d = depth
    context = trees.first[b, above[n]]
    probs = trees.probs[b, trees.row[b, context]]
    if siblings == DISTINCT and _in_context(trees, b, above, begin, n, context):
        copy_row(probs, rest)
        for m in range(begin, n):
            if above[m] == above[n] and trees.tokens[b, m] >= 0:
                rest[trees.tokens[b, m]] = 0.0
        probs = rest
    if siblings in (IID, DISTINCT):
        trees.tokens[b, n] = choose_row(probs, uniform_at(key.seed, key.sample, key.position, DRAFT, n))
        return
    if _in_context(trees, b, above, begin, n, context):
        return  # drawn with the first of them
    many = _in_context(trees, b, above, n, end, context)
    turn = 0
    if siblings == COUPLED:
        first_arrivals(probs, key.seed, key.sample, key.position + d, drawn[:many])
    else:
        choose_systematic(probs, uniform_at(key.seed, key.sample, key.position, DRAFT, context), drawn[:many])
    for m in range(n, end):
        if trees.first[b, above[m]] == context:
            again = siblings == COUPLED and turn > 0 and drawn[turn] == drawn[turn - 1]
            trees.tokens[b, m] = _MISSING if again else drawn[turn]
            turn += 1


@inner(error_model="numpy")
def _join(trees, b, above, depth, n, greedy, stops):
    """Node n, whose token is drawn, becomes part of the tree."""
    begin, _, d = depth
    parent = above[n]
    token = trees.tokens[b, n]
    context = trees.first[b, parent]
    row = trees.row[b, context]
    trees.parents[b, n] = parent
    trees.rows[b, n] = row
    trees.confidence[b, n] = trees.surest[b, row] if greedy else trees.probs[b, row, token]
    if stops.min_reach.shape[1] > 0:
        trees.reach[b, n] = trees.reach[b, parent] * acceptance_at(
            trees.confidence[b, n], stops.acceptance[b]
        )
        trees.goes_on[b, n] = trees.reach[b, n] >= stops.min_reach[b, min(d, stops.min_reach.shape[1] - 1)]
    trees.first[b, n] = n
    for m in range(begin, n):
        if trees.tokens[b, m] == token and (d == 0 or trees.first[b, above[m]] == context):
            trees.first[b, n] = trees.first[b, m]
            return


@inner
def _last_node(trees, raw):
    """Behind the last node that is drawn; copies get the logits of their first ones."""
    last = 1
    for b in range(len(trees.tokens)):
        for n in range(1, trees.tokens.shape[1]):
            if trees.parents[b, n] >= 0:
                last = max(last, n + 1)
            elif trees.tokens[b, n] == -1:
                trees.tokens[b, n] = 0
        for n in range(raw.shape[1]):
            if trees.first[b, n] != n:
                copy_row(raw[b, trees.first[b, n]], raw[b, n])
    return last


@njit(cache=True, error_model="numpy", nogil=True)
def _propose(
    sync, model, vocab, outputs, requests, pending, places, samplings, bias, siblings, raw, stops, read
):
    """requests: [B] of `DRAW`.  pending: [B, P] tokens, the root last: less the root they lie in the caches then, and the tree behind them;
    lengths are the caller's, see `CompiledProposals._committed`.  places: `layout.Layout`.  samplings: [B] of `truncation.SAMPLING`.  outputs: `OutputTokens`.
    siblings: value of the DraftSampling of the draws.  raw: [B, N, all outputs], what the logits after each node are written to; or no nodes.
    read: `guesses.Texts`, whose tokens a forward pass of a single chain guesses ahead.
    Returns tokens, parents, rows and confidences [B, N], probs [B, R, V], the end of the last node that is drawn, and the number of
    forward passes; a node that is not drawn has parent -1.
    """
    B, N = places.parents.shape
    P = pending.shape[1]
    passes = 0
    num_spares = min(stops.min_spare_chance.shape[1], N - 1)
    trees = planted(B, N + num_spares, _most_rows(places), vocab)
    drawn = np.empty(N, np.int64)
    compact = np.empty(outputs.ids.size, _f32)
    room = np.empty(vocab, np.int32)
    rest = np.empty(vocab if siblings == DISTINCT or num_spares else 0, _f32)
    fed = np.zeros((B, P + N), np.int64)
    above = np.full((B, P + N), -1, np.int64)  # the tree that the model sees
    slots = np.empty(B, np.int64)
    first_nodes = np.empty(B, np.int64)  # rows of one array would compile the forward pass twice
    node_ends = np.empty(B, np.int64)
    first_logits = np.empty(B, np.int64)
    for b in range(B):
        slots[b] = requests[b].slot
        trees.tokens[b, 0] = pending[b, requests[b].num_pending - 1]
        for i in range(requests[b].num_pending):
            fed[b, i] = pending[b, i]
            above[b, i] = i - 1
    is_chain = B == 1 and places.starts.shape[1] > N and places.starts[0, N - 1] == N - 1
    num_ahead = 0
    last_run = places.inner[0].max() - 1 if is_chain else 0
    logits = np.empty((0, 0), _f32)
    r = 0
    for d in range(places.inner.shape[1] - 1):
        num_logits = 0
        for b in range(B):
            root = requests[b].num_pending - 1
            begin = places.starts[b, d]
            end = places.inner[b, d]
            first_logits[b] = root + begin
            first_nodes[b] = 0 if d == 0 else first_logits[b]
            node_ends[b] = root + end if end > begin else first_nodes[b]
            for node in range(begin, end):
                num_logits += trees.goes_on[b, node]
        if num_logits == 0:
            break
        if num_ahead > 0:
            num_ahead -= 1
        else:
            if read.tokens.size > 0 and d < last_run:
                num_ahead = guess(
                    read, slots[0], fed[0], above[0], node_ends[0], min(MOST_GUESSES, last_run - d)
                )
                node_ends[0] += num_ahead
            logits = np.empty((num_logits + num_ahead, model.sizes.outputs), _f32)
            draft_forward(model, slots, fed, above, first_nodes, node_ends, first_logits, logits)
            r = 0
            passes = passes + 1
        for b in range(B):
            root = requests[b].num_pending - 1
            parents = places.parents[b]
            depth = places.starts[b, d + 1], places.starts[b, d + 2], d
            for node in range(places.starts[b, d], places.inner[b, d]):
                if trees.first[b, node] == node and trees.goes_on[b, node]:
                    _add_row(
                        sync,
                        trees,
                        b,
                        node,
                        logits[r],
                        outputs,
                        slots[b],
                        samplings[b],
                        bias[b],
                        compact,
                        room,
                    )
                    if raw.shape[1] > 0:
                        copy_row(logits[r], raw[b, node])
                    r += 1
            for n in range(depth[0], depth[1]):
                parent = parents[n]
                if trees.tokens[b, parent] < 0 or not trees.goes_on[b, parent]:
                    trees.tokens[b, n] = -1
                else:
                    _draw(trees, b, parents, depth, n, siblings, requests[b], drawn, rest)
                if trees.tokens[b, n] < 0:
                    trees.goes_on[b, n] = False
                    continue
                _join(trees, b, parents, depth, n, samplings[b].temperature == 0.0, stops)
                if trees.first[b, n] == n and trees.goes_on[b, n]:
                    num_ahead *= fed[b, root + n] == trees.tokens[b, n]
                    fed[b, root + n], above[b, root + n] = trees.tokens[b, n], root + trees.first[b, parent]
    for b in range(B if num_spares else 0):
        add_spares(trees, b, stops, requests[b], rest)
    last = _last_node(trees, raw)
    return trees.tokens, trees.parents, trees.rows, trees.confidence, trees.probs, last, passes


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
    """A tuple of arrays for which there is a `forward.draft_forward`."""
    output_tokens: OutputTokens | None = None
    """Where slots draft tokens of their own."""
    read_texts = Texts(np.empty((0, 0), np.int32), np.empty(0, np.int64))
    """What slots have read, for guesses of what chains go on with: nothing where a row depends on more than the ids before it."""

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
        leaves: bool = False,
    ) -> Proposal | None:
        """A tree for every row. Penalties are left out of the distribution.

        trees: of every row, the parents of a fixed `core.Budget`; its nodes behind a `stop` have parent -1, and spare siblings follow the last
            node of a chain.  keys: seeds, sample indices and
            positions of the noise.  pending: committed tokens that the cache lacks, the root last; all but that are cached where there is a draft.
        draft_sampling: IID; WITHOUT_REPLACEMENT; COUPLED: the children of a node are its smallest clock / q (Kobus & Gunduz 2025, arXiv 2504.15475), and None is
            returned where its row has fewer tokens; SYSTEMATIC.
        leaves: whether the logits after all nodes are returned too, by a forward pass over the leaves: the slots then hold every distinct node
            at its first copy, to be committed. For models that have logits of all tokens. Trees are drawn whole, whatever the stops.

        Raises:
            CapacityError: a tree of more nodes than a forward pass takes.
        """
        places = layouts(tuple(trees))
        drafting = [leaves or len(parents) > 1 for parents in trees]
        raw = np.empty((len(slots), 0, 0), _f32)
        if leaves:
            assert not len(self.draft_ids)
            places = with_leaves(places)
            stops = ()
            raw = np.empty((*places.parents.shape, self.arrays.sizes.outputs), _f32)
        requests, token_ids = self._request_arrays(
            DRAW, slots, list(zip(*keys, strict=True)), pending, drafting, places.parents.shape[1]
        )
        samplings = draft_samplings(params, self.vocab_size, self.draft_ids)
        path_stops = stops_asked(tuple(stops), len(slots))
        model = sync, self.arrays, self.vocab_size, self.output_tokens or OutputTokens.of(self.draft_ids)
        with self.pool:
            *nodes, probs, last, passes = _propose(
                *model,
                requests,
                token_ids,
                places,
                *samplings,
                draft_sampling.value,
                raw,
                path_stops,
                self.read_texts,
            )
        tokens, parents, rows, confidence = (np.ascontiguousarray(x[:, :last]) for x in nodes)
        self._committed(requests, drafting, places.parents.shape[1], passes)
        if len(slots) == 1:  # without the rows that no forward pass has filled
            probs = probs[:, : max(int(rows.max()) + 1, 1)]
        if (tokens == _MISSING).any():
            return None
        logits = torch.from_numpy(raw)[..., : self.vocab_size] if leaves else None
        return Proposal(
            TokenTree.of(tokens, parents), *map(torch.from_numpy, (rows, probs, confidence)), logits
        )

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
            CapacityError: more expanded nodes than a forward pass takes.
        """
        sizes = [(g.max_depth if g.max_nodes else 0, g.width, g.max_nodes) for g in budgets]
        depths = [depth for depth, *_ in sizes]
        most = 1 + max(min(width, nodes) * depth for depth, width, nodes in sizes)
        requests, token_ids = self._request_arrays(
            GROW, slots, sizes, pending, [depth > 0 for depth in depths], most
        )
        samplings, bias = draft_samplings(params, self.vocab_size, self.draft_ids)
        samplings["min_path_prob"] = [g.min_path_prob for g in budgets]
        stops = stops_asked(tuple(g.stop for g in budgets), len(budgets))
        model = sync, self.arrays, self.output_tokens or OutputTokens.of(self.draft_ids), self.vocab_size
        with self.pool:
            tokens, parents, confidences, scored, below, rows, passes = grow(
                *model, requests, token_ids, samplings, bias, *stops[:2]
            )
        self._committed(requests, [depth > 0 for depth in depths], scored.shape[1], passes)
        cached = [(scored[b, :n].tolist(), below[b, :n].tolist()) for b, n in enumerate(rows.tolist())]
        return TokenTree.of(tokens, parents), confidences, cached

    def _request_arrays(
        self,
        kind: np.dtype,
        slots: Sequence[int],
        about: Sequence[tuple[int, ...]],
        pending: Sequence[Sequence[int]],
        drafting: Sequence[bool],
        num_rows: int,
    ) -> tuple[np.ndarray, Int[np.ndarray, "B P"]]:
        """What is asked for, a record each: slot, what is said about it, number of pending tokens; and those tokens. What does not fit beside
        a proposal of so many rows is read now."""
        self.check_tree(num_rows)
        self.settle([slot for slot, drafts in zip(slots, drafting, strict=True) if drafts])
        most = min(LONGEST_PENDING, TREE_ROOM + 1 - num_rows)
        for slot, ids, drafts in zip(slots, pending, drafting, strict=True):
            if drafts and len(ids) > most:
                self.prefill([slot], [ids[:-most]])
        token_ids = [
            ids[-most:] if drafts else ids[-1:] for ids, drafts in zip(pending, drafting, strict=True)
        ]
        for slot, ids, drafts in zip(slots, token_ids, drafting, strict=True):
            if drafts:
                self.reads(slot, ids)
        longest = max(map(len, token_ids))
        records = [
            (slot, *fields, len(ids)) for slot, fields, ids in zip(slots, about, token_ids, strict=True)
        ]
        return np.array(records, kind), np.array([[*ids, *[0] * (longest - len(ids))] for ids in token_ids])

    def settle(self, slots: Sequence[int]) -> None:
        """Be ready for forward passes over new trees behind the committed tokens of these slots: for models whose layers have states."""

    def reads(self, slot: int, token_ids: Sequence[int]) -> None:
        """The next proposal reads these tokens behind those of this slot: for models that read more of them than their ids."""

    def wide(self, logits: np.ndarray) -> Float[Tensor, "R V"]:
        """Rows of the draft vocabulary as rows of all tokens."""
        if not len(self.draft_ids):
            return torch.from_numpy(logits[:, : self.vocab_size])
        wide = np.full((len(logits), self.vocab_size), -np.inf, np.float32)
        wide[:, self.draft_ids] = logits[:, : len(self.draft_ids)]
        return torch.from_numpy(wide)

    def _committed(
        self, requests: np.ndarray, drafting: Sequence[bool], num_nodes: int, num_passes: int
    ) -> None:
        """What was pending is committed, and trees lie behind it. requests: as of `_request_arrays`."""
        drafted = requests[np.array(drafting)]
        slots = drafted["slot"].tolist()
        self.appended(slots, drafted["num_pending"] - 1)
        self.scored(slots, num_nodes)
        self.passes += num_passes
