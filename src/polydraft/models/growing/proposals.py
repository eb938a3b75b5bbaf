"""What a compiled draft model offers: whole proposals in one call for a batch, drawn trees and most probable ones."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from polydraft.core import Budget, DraftSampling, SamplingParams, TokenTree
from polydraft.core.geometry import chain
from polydraft.models.growing.draft_vocabulary import OutputTokens, draft_samplings
from polydraft.models.growing.drawn import DRAW, MISSING, draw
from polydraft.models.growing.guesses import Texts
from polydraft.models.growing.layout import layouts, with_leaves
from polydraft.models.growing.ranked import RANK, rank
from polydraft.models.growing.rows import Rules
from polydraft.models.growing.stops import stops_asked
from polydraft.models.slots import TREE_ROOM, SlotModel
from polydraft.numerics.threads import sync

LONGEST_PENDING = 32
"""Committed tokens that a proposal reads itself; more are read by a forward pass of their own before."""
Keys = tuple[Sequence[int], Sequence[int], Sequence[int]]
"""Seeds, sample indices and positions of the noise."""


class Proposal(NamedTuple):
    """Tokens, each node's row, the rows that tokens were drawn from, `Draft.confidence`, and `Draft.logits` where they were made.

    tree: with the node numbers of the budget; what a stop left out has parent -1.
    """

    tree: TokenTree
    rows: Int[np.ndarray, "B N"]
    probs: Float[np.ndarray, "B R V"]
    confidence: Float[np.ndarray, "B N"] | None = None
    logits: Float[np.ndarray, "B N V"] | None = None


class CompiledProposals(SlotModel):
    """What a compiled model offers as a draft model, see `core.Target`: proposals in one call for the whole batch."""

    arrays: Any
    """A tuple of arrays for which there is a `rows.draft_forward`."""
    output_tokens: OutputTokens | None = None
    """Where slots draft tokens of their own."""
    read_texts = Texts(np.empty((0, 0), np.int32), np.empty(0, np.int64))
    """What slots have read, for guesses of what chains go on with: nothing where a row depends on more than the ids before it."""

    def propose_paths(
        self,
        slots: Sequence[int],
        pending: Sequence[Sequence[int]],
        keys: Keys,
        budgets: Sequence[Budget],
        params: Sequence[SamplingParams],
        *,
        draft_sampling: DraftSampling = DraftSampling.IID,
        leaves: bool = False,
    ) -> Proposal | None:
        """A tree for every row. Penalties are left out of the distribution.

        budgets: trees by position, whose nodes behind a stop have parent -1, and spare siblings follow the last node of a chain. Of a model that foretells
            all depths also trees that grow: a chain, `width` spare siblings of a token at most, and chains behind these.
        keys: seeds, sample indices and positions of the noise.  pending: committed tokens that the cache lacks, the root last; all but that are cached where
            there is a draft.
        draft_sampling: IID; WITHOUT_REPLACEMENT; COUPLED: the children of a node are its smallest clock / q (Kobus & Gunduz 2025, arXiv 2504.15475), and None is
            returned where its row has fewer tokens; SYSTEMATIC.
        leaves: whether the logits after all nodes are returned too, by a forward pass over the leaves: the slots then hold every distinct node
            at its first copy, to be committed. For models that have logits of all tokens. Trees are drawn whole, whatever the stops.

        Raises:
            CapacityError: a tree of more nodes than a forward pass takes.
        """
        places = layouts(tuple(g.parents or chain(g.chain_length) for g in budgets))
        stops = tuple(g.stop for g in budgets)
        drafting = [leaves or g.chain_length > 0 for g in budgets]
        raw = np.empty((len(slots), 0, 0), np.float32)
        if leaves:
            assert not len(self.draft_ids)
            places = with_leaves(places)
            stops = ()
            raw = np.empty((*places.parents.shape, self.arrays.sizes.outputs), np.float32)
        num_nodes = places.parents.shape[1]
        about = _noise_and_bounds(keys, budgets)
        requests, token_ids = self._request_arrays(DRAW, slots, about, pending, drafting, num_nodes)
        with self.pool:
            *nodes, probs, last, passes = draw(
                sync,
                self.arrays,
                self._rules(params),
                requests,
                token_ids,
                places,
                draft_sampling.value,
                raw,
                stops_asked(stops, len(slots)),
                self.read_texts,
            )
        tokens, parents, rows, confidence = (np.ascontiguousarray(x[:, :last]) for x in nodes)
        self._committed(requests, drafting, num_nodes, passes)
        if len(slots) == 1:  # without the rows that no forward pass has filled
            probs = probs[:, : max(int(rows.max()) + 1, 1)]
        if (tokens == MISSING).any():
            return None
        logits = raw[..., : self.vocab_size] if leaves else None
        return Proposal(TokenTree.of(tokens, parents), rows, probs, confidence, logits)

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
        bounds = [_bounds(g) for g in budgets]
        drafting = [depth > 0 for depth, *_ in bounds]
        most = 1 + max(min(width, nodes) * depth for depth, width, nodes in bounds)
        requests, token_ids = self._request_arrays(RANK, slots, bounds, pending, drafting, most)
        rules = self._rules(params)
        rules.samplings["min_path_prob"] = [g.min_path_prob for g in budgets]
        stops = stops_asked(tuple(g.stop for g in budgets), len(budgets))
        with self.pool:
            tokens, parents, confidences, scored, below, rows, passes = rank(
                sync, self.arrays, rules, requests, token_ids, stops
            )
        self._committed(requests, drafting, scored.shape[1], passes)
        cached = [(scored[b, :n].tolist(), below[b, :n].tolist()) for b, n in enumerate(rows.tolist())]
        return TokenTree.of(tokens, parents), confidences, cached

    def _rules(self, params: Sequence[SamplingParams]) -> Rules:
        """How logits become distributions, row by row."""
        outputs = self.output_tokens or OutputTokens.of(self.draft_ids)
        return Rules(self.vocab_size, outputs, *draft_samplings(params, self.vocab_size, self.draft_ids))

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

    def wide(self, logits: np.ndarray) -> Float[np.ndarray, "R V"]:
        """Rows of the draft vocabulary as rows of all tokens."""
        if not len(self.draft_ids):
            return logits[:, : self.vocab_size]
        wide = np.full((len(logits), self.vocab_size), -np.inf, np.float32)
        wide[:, self.draft_ids] = logits[:, : len(self.draft_ids)]
        return wide

    def _committed(
        self, requests: np.ndarray, drafting: Sequence[bool], num_nodes: int, num_passes: int
    ) -> None:
        """What was pending is committed, and trees lie behind it. requests: as of `_request_arrays`."""
        drafted = requests[np.array(drafting)]
        slots = drafted["slot"].tolist()
        self.appended(slots, drafted["num_pending"] - 1)
        self.scored(slots, num_nodes)
        self.passes += num_passes


def _noise_and_bounds(keys: Keys, budgets: Sequence[Budget]) -> list[tuple[int, ...]]:
    """Of each row: seed, sample index and position of its noise, then depth, width and nodes of its tree, a chain's where positions are given."""
    bounds = [(g.chain_length, 1, 0) if g.parents else _bounds(g) for g in budgets]
    return [(*key, *bound) for key, bound in zip(zip(*keys, strict=True), bounds, strict=True)]


def _bounds(budget: Budget) -> tuple[int, int, int]:
    """Depth, width and nodes of a tree that grows."""
    return budget.max_depth if budget.max_nodes else 0, budget.width, budget.max_nodes
