"""Drafts of a draft model: what its chain may go on with, guessed from the text that it has read.

A forward pass of a draft model that reads a few rows costs little more than one of a single row. So a pass reads guessed tokens behind the last drawn
one; a token that is then drawn and is the guessed one has its row already. Tokens and the q that they are drawn from stay what they are, bit by bit.
Spector & Re 2023, staged speculative decoding (arXiv 2308.04623); Chen et al. 2023, cascade speculative drafting (arXiv 2312.11462), whose lowest
drafts are n-grams too.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from polydraft.numerics.compile_time import inner

MOST_GUESSES = 3
"""Guessed tokens of a forward pass: with the drawn one before them they fill a tile of four rows. Passes of the 0.5B cost .67 / .86 of those without on
code at temperature 0 / 1, .73 / .86 with two guesses and .77 / .89 with one; repeats of at least two tokens cost .73 / .88."""
LONGEST = 8
"""Tokens of a repeat that are compared: longer ones were right as often."""


class Texts(NamedTuple):
    """tokens: what the columns of each slot hold.  lengths: committed ones."""

    tokens: Int[np.ndarray, "slots columns"]
    lengths: Int[np.ndarray, " slots"]


@inner
def _token(texts, slot, fed, at):
    """Of a text that goes on in `fed`."""
    length = texts.lengths[slot]
    return np.int64(texts.tokens[slot, at]) if at < length else fed[at - length]


@inner
def guess(texts, slot, fed, above, end, most):
    """Write to `fed`, from `end` on, what followed the longest repeat of the end of the text, the latest of equal ones; above: their parents.

    fed: a chain behind the committed tokens of the slot.  Returns how many were written, `most` or none.
    """
    size = texts.lengths[slot] + end
    longest = 0
    place = 0
    for at in range(size - 2, -1, -1):
        count = 0
        while count < min(LONGEST, at + 1) and _token(texts, slot, fed, at - count) == _token(
            texts, slot, fed, size - 1 - count
        ):
            count += 1
        if count > longest:
            longest = count
            place = at + 1
            if longest == LONGEST:
                break
    if longest == 0:
        return 0
    for k in range(most):
        fed[end + k] = _token(texts, slot, fed, place + k)
        above[end + k] = end + k - 1
    return most
