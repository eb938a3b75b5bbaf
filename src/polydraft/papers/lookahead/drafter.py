"""Lookahead decoding: the target refines guesses of its own future beside each forward pass, and what they become is drafted.

Fu, Bailis, Stoica & Zhang 2024, "Break the sequential dependency of LLM inference using lookahead decoding" (arXiv 2402.02057).

    W  columns: how far ahead      N  length of an n-gram      level r of column w is a guess for position 1 + w + r
    window  N - 1 levels of W guesses, level r + 1 made from level r by the target

1. The window is scored beside the draft, as a tree below the last token: level 0 is a chain, and level r of a column hangs on level r - 1 of it.
   It is never committed.
2. The target's argmax behind the top level of column w completes an n-gram, from its level 0 upwards; it enters the pool under
   its first token. The levels move down by one, which is one position; k accepted tokens move the columns by k more.
3. The pool's latest phrases of the last token are the next draft's paths, and go on phrase by phrase.

Lossless: guesses and pool come from forward passes that are over; drafts are POINT_MASS. The argmaxes decide nothing that is emitted.
Beyond the paper: n-grams of prompt and output enter the pool too (`read_text`). New columns are tokens of the text, drawn with the
DRAFT stream.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from polydraft.core import Budget, Offers, Outcome, Request, Scores, TokenTree
from polydraft.drafters.grown_tree import GrownTree
from polydraft.drafters.text.base import TextDrafter, TextState, text_method
from polydraft.errors import InvalidInputError
from polydraft.numerics.compiled_code import njit
from polydraft.papers.lookahead.phrase_pool import PhrasePool, add_phrase, most_likely, read_text
from polydraft.sampling.noise import Stream, uniform_at


@dataclass
class GuessWindow:
    """The guesses of one request. guesses: [N - 1, W] token ids.

    Example:
        >>> window = GuessWindow(np.array([[1, 2], [3, 4]]))
        >>> window.parents.tolist()
        [0, 1, 1, 2]
        >>> window.advance(np.array([5, 6]), 0, [])
        [(1, 3, 5), (2, 4, 6)]
        >>> window.guesses.tolist()
        [[3, 4], [5, 6]]
    """

    guesses: np.ndarray

    @property
    def parents(self) -> np.ndarray:
        """[(N - 1) W] in a tree whose root is the last token, level by level."""
        levels, columns = self.guesses.shape
        level_0 = np.arange(columns)
        return np.concatenate([level_0, 1 + np.arange((levels - 1) * columns)])

    def advance(self, best: np.ndarray, num_accepted: int, new: Sequence[int]) -> list[tuple[int, ...]]:
        """The n-grams that the target's argmaxes behind the top level complete; the window moves on by the emitted tokens.

        best: [W].  new: tokens for the columns that come in, level by level; (N - 1) * min(W, num_accepted) of them.
        """
        windows = np.empty((self.guesses.shape[1], len(self.guesses) + 1), np.int64)
        _advance(self.guesses, best, num_accepted, np.array(new, np.int64), windows)
        return [tuple(column) for column in windows.tolist()]


@njit(cache=True)
def _advance(guesses, best, num_accepted, new, phrases):
    """`GuessWindow.advance`; the n-grams of the columns go into `phrases` [W, N]."""
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
    window: GuessWindow
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
        >>> drafter.extra_nodes(states).parents.tolist()
        [[-1, 0, 1, 1, 2]]
    """

    info = text_method("lookahead", "Lookahead decoding", "2402.02057")
    reads_text_alone = False

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
        window = GuessWindow(np.zeros((ngram - 1, columns), np.int64))
        self._parents = np.append(-1, window.parents)

    @property
    def offers(self) -> Offers:
        """See `core.Drafter`."""
        return Offers(extra_nodes=self.extra_nodes)

    def begin(self, request: Request, tokens: Sequence[int] | np.ndarray) -> LookaheadState:
        """Guess tokens of the text, whose n-grams enter the pool."""
        text = list(map(int, tokens))
        shape = (self.ngram - 1, self.columns)
        window = GuessWindow(np.array(_drawn(request, text, shape[0] * shape[1])).reshape(shape))
        pool = PhrasePool(self.ngram - 1, self.per_token) if self.pool is None else self.pool
        if self.read_text:
            pool.read(text)
        return LookaheadState(text, request, window, pool)

    def continuations(self, state: LookaheadState, budget: Budget) -> GrownTree:
        """The latest phrases of the last token, each going on phrase by phrase."""
        return state.pool.continuations(state.tokens[-1], budget, self._eos)

    def extra_nodes(self, states: Sequence[LookaheadState]) -> TokenTree:
        """The windows, scored in the next forward pass of the target."""
        tokens = [[state.tokens[-1], *state.window.guesses.ravel()] for state in states]
        return TokenTree.of(np.array(tokens), np.tile(self._parents, (len(states), 1)))

    def observe(
        self, states: Sequence[LookaheadState], outcome: Outcome, scores: Scores
    ) -> list[LookaheadState]:
        """Complete n-grams with the target's argmaxes, and move the windows on."""
        best = np.empty((len(states), 0), np.int64)
        if scores.extra_logits is not None:
            best = most_likely(scores.extra_logits, self.columns)
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
