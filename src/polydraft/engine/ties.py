"""Greedy decoding in low precision: near ties are decided by a forward pass that depends on the token ids alone.

In float16 and bfloat16 the rows of a tree, a batch and a grown cache differ in their last bits, so where the two best logits
lie within that error the winner depends on how the text was drafted. Such rows, on the path that greedy decoding takes, are
scored again over the whole text, alone and without a cache. Plain decoding does the same, so both take the same token
wherever the error of a row is below half the margin.

Compiled models need none of this: a row's bits depend on its own tokens alone, see `models.compiled.model`.
On a GPU, bits of a row depend on how many rows its forward pass has: the library that multiplies matrices chooses its kernel, and with it the order of
sums, by that number. Forward passes of one shape are bit-equal row for row, plain decoding and drafts run different shapes.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
from jaxtyping import Float

from polydraft.core import EncoderDecoder, Scores, Target, TokenTree
from polydraft.engine.sequence import Sequence as Running
from polydraft.errors import IncompatibleError, InvalidInputError
from polydraft.sampling import processing as sampling
from polydraft.sampling.softmax import top


class _Fresh(Protocol):
    def fresh(self, token_ids: Sequence[int]) -> Float[np.ndarray, " V"]: ...


def check_margin(target: Target, margin: float | None) -> None:
    """Refuse a margin that is no positive number, and a target that has no `fresh` forward pass.

    Raises:
        InvalidInputError, IncompatibleError: saying what to do.
    """
    if margin is None:
        return
    if not margin > 0:
        raise InvalidInputError(
            f"tie_margin={margin} was given; expected a number > 0, in logits. Use None to switch it off."
        )
    if isinstance(target, EncoderDecoder):
        raise IncompatibleError(
            f"tie_margin={margin} was given for an encoder-decoder, whose forward passes alone know no source. Leave it out, or load it in float32."
        )
    if not hasattr(target, "fresh"):
        raise IncompatibleError(
            f"tie_margin={margin} was given for {type(target).__name__}, whose rows do not depend on their batch: it needs none. "
            "Leave it out, or use backend='transformers'."
        )


def _child(tree: TokenTree, b: int, node: int, token: int) -> int:
    """The first child of a node that is this token; -1 where there is none."""
    tokens = tree.lists.tokens[b]
    parents = tree.lists.parents[b]
    return next((n for n in range(node + 1, len(tokens)) if parents[n] == node and tokens[n] == token), -1)


def rescored(
    target: Target, scores: Scores, sequences: Sequence[Running], margin: float, stop_ids: Sequence[int]
) -> Scores:
    """The scores with the near ties on each greedy path scored again; those of a text with faulty logits stay, for the verifier to refuse.

    A row that is scored again is counted in its request's statistics.

    margin: a row is scored again where its two best processed logits differ by less.
    """
    assert hasattr(target, "fresh")
    exact: _Fresh = target  # pyright: ignore[reportAssignmentType]
    greedy = [b for b, s in enumerate(sequences) if s.request.params.greedy]
    if not greedy:
        return scores
    logits = scores.logits.copy()
    running = [sequences[b] for b in greedy]
    best = _best(logits, scores.tree, greedy, running, stop_ids)
    for row, b, s in zip(range(len(greedy)), greedy, running, strict=True):
        node = 0
        path = list(s.token_ids)
        while node >= 0 and math.isfinite(best[row][node][0]):
            first, second, token, runner_up = best[row][node]
            if first - second < margin:
                s.sample.stats.near_ties += 1
                logits[b, node] = exact.fresh(path)
                first, second, token, runner_up = _best(logits, scores.tree, [b], [s], stop_ids)[0][node]
            token = int(min(token, runner_up) if first == second else token)
            path.append(token)
            node = _child(scores.tree, b, node, token)
    return replace(scores, logits=logits)


def _best(
    logits: Float[np.ndarray, "B N V"],
    tree: TokenTree,
    rows: list[int],
    running: Sequence[Running],
    stop_ids: Sequence[int],
) -> list[list[list[float]]]:
    """At every node of these rows the two largest processed logits, and their tokens."""
    x = logits[rows]
    part = TokenTree(tree.tokens[rows], tree.parents[rows])
    contexts = [s.token_ids for s in running]
    prompts = [s.num_prompt_tokens for s in running]
    processed = sampling.process(
        x, part, contexts, prompts, [s.request.params for s in running], stop_ids, checked=False
    )
    values, ids = top(processed.reshape(-1, processed.shape[-1]), 2)
    return np.concatenate([values, ids], -1, dtype=np.float64).reshape(*processed.shape[:2], 4).tolist()
