"""ADED: a sparse table of what follows each pair of tokens, updated while it is used and searched as a game tree.

"Adaptive draft-verification for efficient large language model decoding", 2024 (arXiv 2407.12021, AAAI 2025).

    M[(a, b)][c]  weight of c after the pair (a, b): relative frequency in a corpus, plus the bumps of online updates
    W, n          summed reward and visits of a node        N  visits of its parent
    c1, c2        exploration: c1 + ln((N + c2 + 1) / c2)   L  levels of the search below the root

1. The table counts the triples inside each document, divides by the pair's total and stores the heaviest successors of a pair.
2. After each step, and once for the prompt, every triple of the last tokens is bumped, up to a cap. Windows overlap.
3. Each iteration descends to the child with the largest W/n + (c1 + ln((N + c2 + 1)/c2)) M sqrt(N)/(1 + n), an unvisited one
   first; expands a leaf into all its successors; rolls out to level L, drawing in proportion to M; adds 1 + the sum of M
   along the path to every node above.
4. The most visited nodes, then one greedy successor of each, make the draft, in this order, as far as the budget goes.

Lossless: the tree is a function of earlier steps, the committed text and the DRAFT stream, none of which the draws of
`match` depend on; the table never hears of the step that it drafts for. Weights are scores, never a q: drafts are POINT_MASS.
Trap: drawing again from p after a failed match, as the released code does at temperature > 0, is biased.
Beyond the paper: a search has no more iterations than a small budget can use (four for each node, no fewer than 64); the prompt is read
whole when a request starts; updates live in a bounded table of their own on top of the corpus's, longest untouched pairs
leaving first, so that requests do not see each other.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from polydraft.core import Budget, Outcome, Request, Scores
from polydraft.drafters.base import Parts
from polydraft.drafters.grown_tree import GrownTree, limits, new_tree
from polydraft.drafters.text import index_file
from polydraft.drafters.text.base import TextDrafter, TextState, text_method
from polydraft.drafters.text.text_index import TextIndex
from polydraft.errors import InvalidInputError
from polydraft.papers.trigram.search import Search, explore, grow
from polydraft.papers.trigram.store import TrigramStore, bump_all
from polydraft.papers.trigram.table import TrigramTable

CAP = 3.0
"""Largest weight of a bumped triple."""


@dataclass
class TrigramState(TextState):
    """One request: its text and the updates that it sees.

    store: its own, or the one shared by the drafter's requests.
    unread: tokens at the end of the text whose triples are to be bumped, when next it drafts or leaves.
    ended: whether they end in a block that may go on behind a stop: nothing was drafted since.
    """

    request: Request
    store: TrigramStore
    unread: int = 0
    ended: bool = False


class TrigramDrafter(TextDrafter[TrigramState]):
    """ADED over a corpus's table, or over the request's own text alone.

    table: counted from a corpus; None knows nothing at first.
    store: shared by all requests, if they may learn from each other; without it each request has a store of `max_pairs`.
    iterations: of the search, fewer for small budgets (see the module).  c1: exploration.
    num_paths: most visited nodes that are drafted, each extended by one.
    window, bump: of the online update; bump=0 makes the table static.
    eos_token_ids: nothing is drafted behind one.

    Raises:
        InvalidInputError: a parameter out of its range.

    Example:
        >>> from polydraft.core import SamplingParams
        >>> drafter = TrigramDrafter(TrigramTable.of(TextIndex.build([[1, 2, 3, 4, 5]], vocab_size=9)))
        >>> states = drafter.start([Request("r", (7, 1, 2), SamplingParams(), seed=0)])
        >>> drafter.propose(states, [Budget.grown(4, 4)]).tree.tokens.tolist()
        [[2, 3, 4, 5]]
    """

    info = text_method("trigram", "Adaptive trigram table with tree search", "2407.12021")
    store_class = TrigramStore

    def __init__(
        self,
        table: TrigramTable | None = None,
        *,
        store: TrigramStore | None = None,
        iterations: int = 150,
        c1: float = 32.0,
        num_paths: int = 24,
        window: int = 16,
        bump: float = 0.04,
        max_pairs: int = 4096,
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        if min(iterations, num_paths, max_pairs) < 1 or window < 3 or c1 < 0 or not 0 <= bump <= CAP:
            raise InvalidInputError(
                f"iterations={iterations}, num_paths={num_paths}, max_pairs={max_pairs}, window={window}, c1={c1} and bump={bump} were given; "
                f"expected counts >= 1, window >= 3, c1 >= 0 and 0 <= bump <= {CAP:g}."
            )
        super().__init__(eos_token_ids)
        self.table = TrigramTable.empty() if table is None else table
        self.store = store
        self.max_pairs = max_pairs
        self.window = window
        # L and c2 of the paper; drafts are one level deeper than L
        self._search = Search(3, iterations, num_paths, explore(iterations, float(c1), 8.0))
        self._bump = float(bump)

    @classmethod
    def build(
        cls, parts: Parts, *, index: str | Path | TextIndex | None = None, **options: Any
    ) -> "TrigramDrafter":
        """For the engine. index: whose triples are counted, or a file of `polydraft index build`; other options as the constructor.

        Raises:
            InvalidInputError: a file that is no index.
            IncompatibleError: an index, or a saved store, of another tokenizer.
        """
        index_file.check_store(
            "the trigram store", options.get("store"), parts.target.vocab_size, parts.tokenizer
        )
        table = None if index is None else TrigramTable.of(TextIndex.for_engine(index, parts))
        return cls(table, eos_token_ids=parts.eos_token_ids, **options)

    def begin(self, request: Request, tokens: Sequence[int] | np.ndarray) -> TrigramState:
        """Bump every triple of the text once."""
        store = TrigramStore(self.max_pairs) if self.store is None else self.store
        state = TrigramState(list(map(int, tokens)), request, store, len(tokens))
        self._learn(state)
        return state

    def _unread(self, state: TrigramState) -> np.ndarray:
        """What is unread, as it is handed over."""
        if not state.unread or not self._bump:
            return np.empty(0, np.int64)
        unread = state.unread
        state.unread = 0
        state.ended = False
        return np.array(state.tokens[-unread:])

    def _learn(self, state: TrigramState) -> None:
        unread = self._unread(state)
        with state.store.lock:
            bump_all(self.table.arrays, state.store.arrays, unread, self._bump, CAP)

    def release(self, states: Sequence[TrigramState]) -> None:
        """Bump what is unread of a prompt; what a shared store learnt stays in it. A last block is not read: it may go on behind a stop."""
        for state in states:
            if not state.ended:
                self._learn(state)

    def continuations(self, state: TrigramState, budget: Budget) -> GrownTree:
        """The search's candidates, most visited first, scored by their share of the parent's visits; empty for a text of one token or a pair that was never seen."""
        tree = new_tree(budget, self._eos)
        request = state.request
        text = state.tokens
        last_pair = text[-2] if len(text) > 1 else -1, text[-1]
        update = (self._unread(state), self._bump, CAP)
        key = (request.seed, request.sample, len(text))
        with state.store.lock:
            grow(
                tree,
                self.table.arrays,
                state.store.arrays,
                update,
                last_pair,
                self._search,
                key,
                limits(budget),
            )
        return GrownTree(tree)

    def observe(self, states: Sequence[TrigramState], outcome: Outcome, scores: Scores) -> list[TrigramState]:
        """Append what was emitted; the triples of the last tokens are bumped before the next draft."""
        for state in super().observe(states, outcome, scores):
            state.unread = self.window
            state.ended = True
        return list(states)
