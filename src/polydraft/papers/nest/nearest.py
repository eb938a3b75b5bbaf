"""NEST's mixture: the target distribution, and what followed the nearest states of retrieved passages, by how sure the retrieval is.

Li, Chen, Holtzman, Chen, Lin, Yih & Lin 2024, nearest neighbour speculative decoding (arXiv 2405.19325).
    s        -|key - state|^2, of the r nearest keys of the b passages nearest to the text      d    size of a state
    p_kNN    sum of softmax(s / sqrt(d)) over hits with that value
    lambda   sigmoid((min|s| / max|s| - alpha) / temperature): small where one neighbour is much nearer than the rest
    distribution      lambda p_LM + (1 - lambda) p_kNN; sampling parameters apply to its logarithm

Lossless to this distribution with every lossless verifier; `lenient` is the authors' own test, which is not. A row is a function of its own path: the passages are
those of the 64 tokens before the last multiple of 64 (of a shorter text, a power of two), and nothing that was quoted leaves the store, as it does in
the paper; `papers.nest.spans` does not begin a span at one place twice. No passages, or lambda = 1: the target distribution.
"""

import math
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from polydraft.core import Needs, Scores, Target, TokenTree
from polydraft.drafters.base import Parts
from polydraft.errors import InvalidInputError
from polydraft.methods.papers import decoding_method
from polydraft.papers.nest.passages import Passages, key_layer
from polydraft.sampling.softmax import log_softmax

WINDOW = 64
"""Tokens of a query, at most, and those after which a text that goes on is looked up again."""


class Hits(NamedTuple):
    """What was found, nearest first. tokens: [R] values.  weights: [R], of sum 1.  passages, positions: [R] where each value stands.
    model_share: lambda."""

    tokens: np.ndarray
    weights: np.ndarray
    passages: np.ndarray
    positions: np.ndarray
    model_share: float


def query_end(length: int) -> int:
    """How much of a text passages are searched by: a multiple of 64 tokens, of less text a power of two.

    Example:
        >>> [query_end(n) for n in (1, 3, 63, 64, 130)]
        [1, 2, 32, 64, 128]
    """
    return length // WINDOW * WINDOW or 1 << (length.bit_length() - 1)


class Nearest:
    """See the module. passages: open ones of this target.  count: b.  neighbours: r.

    Raises:
        InvalidInputError: an option out of range.
    """

    info = decoding_method(
        "nest",
        "Nearest neighbours in passages (NEST)",
        "2405.19325",
        "the mixture of the target distribution and its nearest neighbours'",
        drafter="nest",
    )
    gives_logits = True

    def __init__(
        self,
        passages: Passages,
        target: Target,
        *,
        count: int = 40,
        neighbours: int = 1024,
        alpha: float = 0.3,
        temperature: float = 0.1,
    ) -> None:
        sound = {
            "count": count >= 1,
            "neighbours": neighbours >= 1,
            "alpha": math.isfinite(alpha),
            "temperature": temperature > 0,
        }
        for name, good in sound.items():
            if not good:
                raise InvalidInputError(
                    f"{name}={locals()[name]!r} was given to the decoding method 'nest'; expected {'a finite number' if name == 'alpha' else 'more than 0'}."
                )
        self.passages = passages
        self.target = target
        self.layer = key_layer(target)
        self.count = count
        self.neighbours = neighbours
        self.alpha = alpha
        self.temperature = temperature
        self.needs = Needs(hidden=(self.layer,), embeddings=True)
        self._version: object = None
        self._found: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._keys: dict[tuple[int, ...], tuple[np.ndarray, ...]] = {}
        self._hits: OrderedDict[tuple[int, ...], Hits | None] = OrderedDict()

    @classmethod
    def build(cls, parts: Parts, *, passages: Any = None, **options: Any) -> "Nearest":
        """For the engine. passages: a file of `polydraft index build --kind passages`, or open ones.  options: as the constructor.

        Raises:
            InvalidInputError: none, or a file without any.
            IncompatibleError: those of another model.
        """
        if passages is None:
            raise InvalidInputError(
                "the decoding method 'nest' was asked for without passages; give passages=FILE (--decoding-option passages=FILE)."
            )
        if isinstance(passages, str | Path):
            passages = Passages.open(passages, parts.target, parts.tokenizer)
        if not passages.sources:
            raise InvalidInputError(
                f"{str(passages.path)!r} was given to the decoding method 'nest'; it has no passages. Add some: polydraft index build --append."
            )
        return cls(passages, parts.target, **options)

    def hits(self, context: Sequence[int], state: np.ndarray) -> Hits | None:
        """The nearest keys to the state after a text; None where there is nothing to compare with. Asked again, it does not search again."""
        if self.passages.version != self._version:
            self._version = self.passages.version
            for store in (self._found, self._keys, self._hits):
                store.clear()
        text = tuple(context)
        if text not in self._hits:
            self._hits[text] = self._search(text, state)
            if len(self._hits) > 512:  # those of the newest texts stay
                self._hits.popitem(last=False)
        return self._hits[text]

    def _search(self, text: tuple[int, ...], state: np.ndarray) -> Hits | None:
        end = query_end(len(text))
        query = text[max(0, end - WINDOW) : end]
        if query not in self._found:
            self._found = {
                **dict(list(self._found.items())[-15:]),
                query: self.passages.search(query, self.target, self.count),
            }
        chosen = self._found[query]
        if chosen not in self._keys:
            self._keys = {**dict(list(self._keys.items())[-15:]), chosen: self._stacked(chosen)}
        keys, squares, tokens, passages, positions = self._keys[chosen]
        if not len(keys):
            return None
        distance = np.maximum(
            squares - 2.0 * (keys @ state.astype(np.float32)) + np.float32(state @ state), 0.0
        ).astype(np.float64)
        best = np.argsort(distance, kind="stable")[: self.neighbours]
        near = distance[best]
        weights = np.exp((near[0] - near) / math.sqrt(keys.shape[1]))
        share = _sigmoid((near[0] / near[-1] - self.alpha) / self.temperature) if near[-1] > 0 else 1.0
        return Hits(tokens[best], weights / weights.sum(), passages[best], positions[best], share)

    def _stacked(self, chosen: tuple[int, ...]) -> tuple[np.ndarray, ...]:
        passages = [(number, p) for number in chosen if (p := self.passages.passage(number)) is not None]
        if not passages:
            return (np.empty((0, 0)),) * 5
        keys = np.concatenate([p.keys for _, p in passages])
        tokens = np.concatenate([p.tokens[1:] for _, p in passages])
        numbers = np.repeat([number for number, _ in passages], [len(p.keys) for _, p in passages])
        return (
            keys,
            (keys**2).sum(1),
            tokens,
            numbers,
            np.concatenate([np.arange(1, len(p.tokens)) for _, p in passages]),
        )

    def __call__(
        self, scores: Scores, tree: TokenTree, contexts: Sequence[Sequence[int]], second: Scores | None = None
    ) -> Float[np.ndarray, "B N V"]:
        """Logarithms of the mixture at every node."""
        log_probs = log_softmax(scores.logits).astype(scores.logits.dtype)
        states = scores.hidden[self.layer]
        tokens, parents = tree.lists
        for b, context in enumerate(contexts):
            texts = [tuple(context)]
            for n, parent in enumerate(parents[b]):
                if n and parent < 0:
                    break
                if n:
                    texts.append((*texts[parent], tokens[b][n]))
                if (hits := self.hits(texts[n], states[b, n])) is not None and hits.model_share < 1:
                    log_probs[b, n] = mixed(log_probs[b, n], hits)
        return log_probs


def mixed(logs: Float[np.ndarray, " V"], hits: Hits) -> Float[np.ndarray, " V"]:
    """Logarithm of the mixture of a distribution, given by its logarithm, and what was found."""
    p = hits.model_share * np.exp(logs, dtype=np.float64)
    np.add.at(p, hits.tokens, (1 - hits.model_share) * hits.weights)
    with np.errstate(divide="ignore"):
        return np.log(p).astype(logs.dtype)


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-min(max(x, -700.0), 700.0)))
