"""What ADED learns while it is used: rows copied from the corpus's table when they are first bumped, in a bounded table."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from polydraft.drafters.text import index_file
from polydraft.errors import InvalidInputError
from polydraft.numerics.compiled_code import njit
from polydraft.papers.entry_table import Table, claim, lift, seat
from polydraft.papers.trigram.table import WIDTH, TrigramTable, find_row

TOKEN, WEIGHT = range(2)
"""Words of an entry."""


class TrigramStore(Table):
    """Rows that differ from the corpus's table, by pair, entries of a token and a float32 weight, the heaviest first.

    One belongs to each request, unless a store is given to the drafter: then all its requests share what they learn.
    made_with: vocabulary size and tokenizer of the file it was loaded from.
    max_pairs: most pairs, of which the one longest untouched leaves first.  Memory: 156 to 160 bytes a pair, allocated at once.

    Example:
        >>> store = TrigramStore(max_pairs=4)
        >>> store.bump(TrigramTable.empty(), [1, 2, 3, 1, 2, 3], window=6, bump=1.25, cap=3.0)
        >>> store.successors(1, 2)
        [(3, 2.5)]
    """

    def __init__(self, max_pairs: int = 4096) -> None:
        super().__init__(max_pairs, WIDTH, 2)
        self.made_with: tuple[int, str] | None = None

    def bump(
        self, table: TrigramTable, tokens: Sequence[int], *, window: int, bump: float, cap: float
    ) -> None:
        """Raise the weight of every triple in the last `window` tokens by `bump`, up to `cap`."""
        last = np.array(tokens[-window:], np.int64)
        with self.lock:
            bump_all(table.arrays, self.arrays, last, bump, cap)

    def successors(self, a: int, b: int) -> list[tuple[int, float]]:
        """(token, weight) of a pair that was bumped, heaviest first; empty for others."""
        entries = self.entries((a << 32) | b)
        return list(
            zip(entries[:, TOKEN].tolist(), entries[:, WEIGHT].view(np.float32).tolist(), strict=True)
        )

    def save(self, path: str | Path, vocab_size: int, tokens_of: str = "") -> None:
        """Write what was learnt; see `index_file.save`."""
        arrays = self.to_arrays()
        entry = arrays.pop("entry")
        arrays |= {"token": entry[..., TOKEN], "weight": entry[..., WEIGHT].view(np.float32)}
        index_file.save(path, "trigram-store", arrays, vocab_size=vocab_size, tokens_of=tokens_of)

    @classmethod
    def load(cls, path: str | Path, max_pairs: int = 4096) -> "TrigramStore":
        """Read what was learnt.

        Raises:
            InvalidInputError: what `index_file.load` refuses, and pairs that cannot be or are there twice.
        """
        stored = index_file.load(path, "trigram-store", width=WIDTH)
        name = Path(path).name
        arrays = stored.arrays
        keys = arrays["key"]
        if len(np.unique(keys)) != len(keys):
            raise InvalidInputError(
                f"{name!r} was given as a trigram-store index, but it holds a pair twice. Save the store again."
            )
        for ids in (keys >> 32, keys & 0xFFFFFFFF):
            index_file.check_tokens(ids, stored.vocab_size, name)
        store = cls(max_pairs)
        store.read_arrays(
            keys, arrays["size"], np.stack([arrays["token"], arrays["weight"].view(np.int32)], -1)
        )
        store.made_with = stored.vocab_size, stored.tokens_of
        return store


@njit(cache=True)
def bump_all(table, store, tokens, bump, cap):
    """Raise the weight of every triple of the tokens."""
    entries = store.entries
    links = store.links
    step = np.float32(bump)
    most = np.float32(cap)
    weights = entries.view(np.float32)
    for i in range(len(tokens) - 2):
        a = tokens[i]
        b = tokens[i + 1]
        c = tokens[i + 2]
        at = claim(store, (a << 32) | b)
        if links[at].num_entries == 0:
            begin, links[at].num_entries = find_row(table, a, b)
            for j in range(links[at].num_entries):
                entries[at, j, TOKEN], entries[at, j, WEIGHT] = (
                    table.tokens[2 * (begin + j)],
                    table.tokens[2 * (begin + j) + 1],
                )
        j = seat(store, at, (c,), 1)
        weight = min(most, weights[at, j, WEIGHT] + step)
        weights[at, j, WEIGHT] = weight
        to = j
        while to > 0 and weights[at, to - 1, WEIGHT] < weight:
            to -= 1
        lift(store, at, j, to)
