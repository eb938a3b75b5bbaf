"""Lookahead decoding: the target refines guesses of its own future beside each forward pass, and what they become is drafted.

Fu, Bailis, Stoica & Zhang 2024, "Break the sequential dependency of LLM inference using lookahead decoding" (arXiv 2402.02057).

    W  columns: how far ahead      N  length of an n-gram      level r of column w is a guess for position 1 + w + r
    window  N - 1 levels of W guesses, level r + 1 made from level r by the target

1. The window rides along in the target's forward pass as auxiliary rows: row (r, w) sees the text, level 0 up to column w, and levels
   1..r of its own column. Real rows never see it and it is never committed.
2. The target's argmax behind the top level of column w completes an n-gram, from its level 0 upwards; it enters the pool under
   its first token. The levels move down by one, which is one position; k accepted tokens move the columns by k more.
3. The pool's latest phrases of the last token are the next draft's paths, and go on phrase by phrase.

Lossless: guesses and pool come from forward passes that are over; drafts are POINT_MASS. The argmaxes decide nothing that is emitted.
Beyond the paper: n-grams of prompt and output enter the pool too (`read_text`). New columns are tokens of the text, drawn with the
DRAFT stream. Without auxiliary rows (a target that has none) the pool lives of the text alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from polydraft.core import AuxRows, Budget, Needs, Offers, Outcome, Request, Scores
from polydraft.drafters.grown_tree import GrownTree
from polydraft.drafters.text.base import TextDrafter, TextState, text_method
from polydraft.errors import InvalidInputError
from polydraft.numerics.compiled_code import njit
from polydraft.papers.lookahead.phrase_pool import PhrasePool, add_phrase, most_likely, read_text
from polydraft.sampling.noise import Stream, uniform_at


@dataclass
class Window:
    """The guesses of one request. guesses: [N - 1, W] token ids.

    Example:
        >>> window = Window(np.array([[1, 2], [3, 4]]))
        >>> window.positions.tolist()
        [1, 2, 2, 3]
        >>> window.advance(np.array([5, 6]), 0, [])
        [(1, 3, 5), (2, 4, 6)]
        >>> window.guesses.tolist()
        [[3, 4], [5, 6]]
    """

    guesses: np.ndarray

    @property
    def positions(self) -> np.ndarray:
        """[(N - 1) W] below the root, level by level."""
        levels, columns = self.guesses.shape
        return (1 + np.arange(columns)[None] + np.arange(levels)[:, None]).ravel()

    @property
    def mask(self) -> np.ndarray:
        """[X, X] what each row sees of the others: level 0 up to its column, then its own column."""
        levels, columns = self.guesses.shape
        r, w = np.divmod(np.arange(levels * columns), columns)
        return ((r == 0) & (w <= w[:, None])) | ((w == w[:, None]) & (r <= r[:, None]))

    def advance(self, best: np.ndarray, num_accepted: int, new: Sequence[int]) -> list[tuple[int, ...]]:
        """The n-grams that the target's argmaxes behind the top level complete; the window moves on by the emitted tokens.

        best: [W].  new: tokens for the columns that come in, level by level; (N - 1) * min(W, num_accepted) of them.
        """
        windows = np.empty((self.guesses.shape[1], len(self.guesses) + 1), np.int64)
        _advance(self.guesses, best, num_accepted, np.array(new, np.int64), windows)
        return [tuple(column) for column in windows.tolist()]


@njit(cache=True)
def _advance(guesses, best, num_accepted, new, phrases):
    """`Window.advance`; the n-grams of the columns go into `phrases` [W, N]."""
    levels, columns = guesses.shape
    for w in range(columns):
        for r in range(levels):
            phrases[w, r] = guesses[r, w]
        phrases[w, levels] = best[w]
    shift = min(num_accepted, columns)
    for r in range(levels):
        for w in range(columns - shift):
            guesses[r, w] = phrases[w + shift, r + 1]
        for w in range(shift):
            guesses[r, columns - shift + w] = new[r * shift + w]


@njit(cache=True)
def _learn(pool, length, guesses, best, num_accepted, new, text):
    windows = np.empty((guesses.shape[1], len(guesses) + 1), np.int64)
    if len(best):
        _advance(guesses, best, num_accepted, new, windows)
        for w in range(len(windows)):
            add_phrase(pool, length, windows[w, 0], windows[w, 1:])
    read_text(pool, length, text)


@dataclass
class LookaheadState(TextState):
    """One request: its text, its window and the pool that it uses."""

    request: Request
    window: Window
    pool: PhrasePool


class LookaheadDrafter(TextDrafter[LookaheadState]):
    """Lookahead decoding.

    columns, ngram: W and N of the module; (N - 1) W rows are added to each forward pass.  per_token: phrases stored of a token.
    pool: shared by all requests, if they may learn from each other.  read_text: n-grams of the text enter the pool.
    eos_token_ids: nothing is drafted behind one.

    Raises:
        InvalidInputError: columns below 1, ngram below 2, or a pool of phrases of another length.

    Example:
        >>> from polydraft.core import SamplingParams
        >>> drafter = LookaheadDrafter(columns=2, ngram=3)
        >>> states = drafter.start([Request("r", (5, 6, 7, 8, 5), SamplingParams(), seed=0)])
        >>> drafter.propose(states, [Budget.grown(3, 3)]).tree.tokens.tolist()
        [[5, 6, 7, 8]]
        >>> drafter.aux(states).positions.tolist()
        [[1, 2, 2, 3]]
    """

    info = text_method("lookahead", "Lookahead decoding", "2402.02057")
    needs = Needs(aux=True)

    def __init__(
        self,
        *,
        columns: int = 4,
        ngram: int = 4,
        per_token: int = 8,
        pool: PhrasePool | None = None,
        read_text: bool = True,
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        if columns < 1 or ngram < 2:
            raise InvalidInputError(
                f"columns={columns} and ngram={ngram} were given; expected columns >= 1 and ngram >= 2."
            )
        if pool is not None and pool.length != ngram - 1:
            raise InvalidInputError(
                f"a pool of phrases of {pool.length} was given; expected {ngram - 1}, one less than ngram."
            )
        self.columns = columns
        self.ngram = ngram
        self.per_token = per_token
        self.pool = pool
        self.read_text = read_text
        super().__init__(eos_token_ids)
        PhrasePool(ngram - 1, per_token)
        window = Window(np.zeros((ngram - 1, columns), np.int64))
        self._positions = torch.from_numpy(window.positions)[None]
        self._mask = torch.from_numpy(window.mask)[None]
        self._nodes = torch.zeros_like(self._positions)

    @property
    def offers(self) -> Offers:
        """See `core.Drafter`."""
        return Offers(aux=self.aux)

    def begin(self, request: Request, tokens: Sequence[int] | np.ndarray) -> LookaheadState:
        """Guess tokens of the text, whose n-grams enter the pool."""
        text = list(map(int, tokens))
        shape = (self.ngram - 1, self.columns)
        window = Window(np.array(_drawn(request, text, shape[0] * shape[1])).reshape(shape))
        pool = PhrasePool(self.ngram - 1, self.per_token) if self.pool is None else self.pool
        if self.read_text:
            pool.read(text)
        return LookaheadState(text, request, window, pool)

    def continuations(self, state: LookaheadState, budget: Budget) -> GrownTree:
        """The latest phrases of the last token, each going on phrase by phrase."""
        return state.pool.continuations(state.tokens[-1], budget, self._eos)

    def aux(self, states: Sequence[LookaheadState]) -> AuxRows:
        """The windows, as rows of the next forward pass of the target."""
        inputs = torch.from_numpy(
            np.array([state.window.guesses for state in states]).reshape(len(states), -1)
        )
        if len(states) == 1:
            return AuxRows(inputs, self._positions, self._nodes, self._mask)
        return AuxRows(
            inputs, *(x.expand(len(states), *x.shape[1:]) for x in (self._positions, self._nodes, self._mask))
        )

    def observe(
        self, states: Sequence[LookaheadState], outcome: Outcome, scores: Scores
    ) -> list[LookaheadState]:
        """Complete n-grams with the target's argmaxes, and move the windows on."""
        best = np.empty((len(states), 0), np.int64)
        if scores.aux_logits is not None:
            best = most_likely(scores.aux_logits, self.columns)
        for b, (state, tokens) in enumerate(zip(states, outcome.emitted(scores.tree), strict=True)):
            state.extend(tokens)
            accepted = len(tokens) - 1
            drawn = _drawn(
                state.request,
                state.tokens,
                min(accepted, self.columns) * (self.ngram - 1) if best.size else 0,
            )
            text = np.array(state.tokens[-len(tokens) - self.ngram + 1 :] if self.read_text else [], np.int64)
            with state.pool.lock:
                _learn(
                    state.pool.arrays,
                    state.pool.length,
                    state.window.guesses,
                    best[b],
                    accepted,
                    np.array(drawn, np.int64),
                    text,
                )
        return list(states)


def _drawn(request: Request, tokens: Sequence[int], count: int) -> list[int]:
    """Tokens of the text, drawn with the DRAFT stream at its length."""
    uniforms = (
        uniform_at(request.seed, request.sample, len(tokens), int(Stream.DRAFT), i) for i in range(count)
    )
    return [tokens[int(u * len(tokens))] for u in uniforms]
