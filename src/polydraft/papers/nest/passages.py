"""Passages of a corpus with the target's states along them, in one SQLite file: what a text is compared with, and quoted from.

    passage    fewer than 200 tokens of one document        words    its tokens, in SQLite's own full-text index (FTS5, BM25)
    vector     mean of its tokens' embeddings, less the mean of all passages (usearch)
    key        the state that enters the last block at a token; its value is the token behind it

Written in transactions: a file is what it was before or after an append, never between. Each passage has a checksum, and the file says whose states
it holds: the tokenizer's fingerprint and the states along a few tokens, which another model does not have.
"""

import sqlite3
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from polydraft.core import Target
from polydraft.drafters.text.index_file import check_tokens, check_vocabulary, fingerprint
from polydraft.errors import CapacityError, IncompatibleError, InvalidInputError

LONGEST = 192
"""Tokens of a passage."""
VERSION = "1"
PROBE = 24
"""Tokens whose states say which model a file is of."""
OTHER_MODEL = 0.2
"""Largest distance of those states, as a share of their size: formats of one model differ by less."""
TABLES = (
    "CREATE TABLE about (name TEXT PRIMARY KEY, value BLOB)",
    "CREATE TABLE passages (id INTEGER PRIMARY KEY AUTOINCREMENT, source TEXT, tokens BLOB, keys BLOB, vector BLOB, checksum INTEGER)",
    "CREATE VIRTUAL TABLE words USING fts5(body)",
)


class Passage(NamedTuple):
    """tokens: [T] token ids.  keys: [T - 1, D], key i is of tokens[i], its value tokens[i + 1].  source: name of its document."""

    source: str
    tokens: np.ndarray
    keys: np.ndarray


def key_layer(target: Target) -> int:
    """The layer whose output enters the last block.

    Raises:
        IncompatibleError: a target that does not give its states.
    """
    offered = target.offers.hidden
    if len(offered) < 2 or not target.offers.embeddings:
        raise IncompatibleError(
            f"passages need the target's hidden states and embeddings, which {type(target).__name__} does not give. "
            "Load it with another backend ('compiled' or 'transformers')."
        )
    return max(offered) - 1


def _index_type() -> Any:
    try:
        from usearch.index import Index
    except ImportError as error:
        raise IncompatibleError(
            f"passages need the package usearch ({error}); install polydraft[passages]."
        ) from error
    return Index


def _words(tokens: Iterable[int]) -> str:
    return " ".join(f"t{t}" for t in tokens)


class Passages:
    """See the module; made by `create` or `open`. Not for several threads at a time.

    dimension: of keys.  version: changes with every change of the file, whoever made it.
    """

    def __init__(self, path: Path, connection: sqlite3.Connection, dimension: int) -> None:
        self.path = path
        self._connection = connection
        self.dimension = dimension
        self._index: tuple[object, Any, np.ndarray] | None = None
        self._load = lru_cache(maxsize=1024)(self._read)
        self.searches = 0
        """Of passages, so far."""

    @classmethod
    def create(cls, path: str | Path, target: Target, tokenizer: Any = None) -> "Passages":
        """A new file without passages.

        Raises:
            InvalidInputError: there is such a file already, or no such folder.
            IncompatibleError: a target without hidden states, or no usearch.
        """
        path = Path(path)
        _ = _index_type()
        if path.exists() or not path.parent.is_dir():
            raise InvalidInputError(
                f"{str(path)!r} was given for new passages; expected a new name in a folder that is there. Name another."
            )
        states = _states(target, _probe(target))
        about = {
            "version": VERSION,
            "vocab_size": str(target.vocab_size),
            "tokens_of": fingerprint(tokenizer),
            "layer": str(key_layer(target)),
            "probe": states.astype(np.float32).tobytes(),
        }
        connection = sqlite3.connect(path, check_same_thread=False)
        store = cls(path, connection, states.shape[1])
        with store._writing():
            for table in TABLES:
                connection.execute(table)
            connection.executemany("INSERT INTO about VALUES (?, ?)", about.items())
        return store

    @classmethod
    def open(
        cls, path: str | Path, target: Target, tokenizer: Any = None, *, write: bool = False
    ) -> "Passages":
        """A file, after a look at all of it; read-only unless it is to be written.

        Raises:
            InvalidInputError: no such file, none of passages, or a damaged one.
            IncompatibleError: another model's or another tokenizer's, or no usearch.
        """
        path = Path(path)
        _ = _index_type()
        if not path.is_file():
            raise InvalidInputError(
                f"{str(path)!r} was given as passages; there is no such file. Build it: polydraft index build --kind passages."
            )
        connection = sqlite3.connect(
            f"file:{path}?mode={'rw' if write else 'ro'}", uri=True, check_same_thread=False
        )
        try:
            about: dict[str, Any] = dict(connection.execute("SELECT name, value FROM about"))
            whole = list(
                connection.execute("SELECT id, source, tokens, keys, vector, checksum FROM passages")
            )
            damaged = [row[0] for row in whole if _checksum(*row[1:5]) != row[5]]
            if about.get("version") != VERSION or damaged:
                raise ValueError(
                    f"passage {damaged[0]} does not add up to its checksum"
                    if damaged
                    else "it is of another version"
                )
            probe = np.frombuffer(about["probe"], np.float32).reshape(
                min(PROBE, int(about["vocab_size"])), -1
            )
        except (sqlite3.Error, ValueError, KeyError) as error:
            connection.close()
            raise InvalidInputError(
                f"{path.name!r} was given as passages, but {error}. Build it: polydraft index build --kind passages."
            ) from error
        what = f"the passages {path.name!r}"
        check_vocabulary(what, int(about["vocab_size"]), about["tokens_of"], target.vocab_size, tokenizer)
        ours = (
            _states(target, _probe(target)) if key_layer(target) == int(about["layer"]) else np.zeros((0, 0))
        )
        if ours.shape != probe.shape or np.linalg.norm(ours - probe) > OTHER_MODEL * np.linalg.norm(probe):
            raise IncompatibleError(
                f"{what} hold states of another model. Build them with this one: polydraft index build --kind passages --model."
            )
        return cls(path, connection, probe.shape[1])

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            with self._connection:
                yield
        except sqlite3.Error as error:
            raise CapacityError(
                f"{str(self.path)!r} could not be written ({error}); what was there before is intact. Make room, or open it for writing."
            ) from error

    def append(self, documents: Iterable[tuple[str, Sequence[int]]], target: Target) -> int:
        """Cut documents, (name, token ids), into passages and store them with the target's states, all of them or none; how many passages.

        Raises:
            InvalidInputError: ids that the target does not have.
            CapacityError: a target whose context holds no passage, or a file that cannot be written.
        """
        bos = target.bos_token_id
        count = 0
        if target.max_model_len < LONGEST:
            raise CapacityError(
                f"passages have up to {LONGEST} tokens; the context holds {target.max_model_len}. Raise max_model_len."
            )
        with self._writing():
            for source, ids in documents:
                ids = [t for t in ids if t != bos]
                check_tokens(np.array(ids, np.int64), target.vocab_size, f"document {source!r}")
                for begin in range(0, len(ids) - 1, LONGEST):
                    self._add(source, ids[begin : begin + LONGEST], target)
                    count += 1
        return count

    def _add(self, source: str, ids: Sequence[int], target: Target) -> None:
        most = np.finfo(np.float16).max
        keys = np.clip(_states(target, ids)[:-1], -most, most).astype(np.float16)
        tokens = np.array(ids, np.int32)
        vector = _vector(target, ids)
        parts = source, tokens.tobytes(), keys.tobytes(), vector.tobytes()
        row = self._connection.execute(
            "INSERT INTO passages (source, tokens, keys, vector, checksum) VALUES (?, ?, ?, ?, ?)",
            (*parts, _checksum(*parts)),
        )
        self._connection.execute(
            "INSERT INTO words (rowid, body) VALUES (?, ?)", (row.lastrowid, _words(ids))
        )

    def delete(self, source: str) -> int:
        """Delete the passages of a document; how many there were.

        Raises:
            CapacityError: a file that is not open for writing.
        """
        with self._writing():
            gone = [
                row[0]
                for row in self._connection.execute("SELECT id FROM passages WHERE source = ?", (source,))
            ]
            for table, column in (("passages", "id"), ("words", "rowid")):
                self._connection.executemany(
                    f"DELETE FROM {table} WHERE {column} = ?", [(number,) for number in gone]
                )
        return len(gone)

    @property
    def version(self) -> object:
        """Of what the file holds."""
        (others,) = self._connection.execute("PRAGMA data_version").fetchone()
        return others, self._connection.total_changes

    @property
    def sources(self) -> dict[str, int]:
        """Passages of each document."""
        return dict(
            self._connection.execute("SELECT source, count(*) FROM passages GROUP BY source ORDER BY source")
        )

    def passage(self, number: int) -> Passage | None:
        """One of them; None where it was deleted."""
        return self._load(number, self.version)

    def _read(self, number: int, version: object) -> Passage | None:
        row = self._connection.execute(
            "SELECT source, tokens, keys FROM passages WHERE id = ?", (number,)
        ).fetchone()
        if row is None:
            return None
        keys = np.frombuffer(row[2], np.float16).reshape(-1, self.dimension).astype(np.float32)
        return Passage(row[0], np.frombuffer(row[1], np.int32).astype(np.int64), keys)

    def search(
        self, tokens: Sequence[int], target: Target, count: int, longer: int = 100, dense: float = 0.3
    ) -> tuple[int, ...]:
        """The passages nearest to a text. Scores of the best count * longer of either list, as shares of its best, are summed, `dense` that of
        vectors; one that a list lacks counts as its worst."""
        self.searches += 1
        words = " OR ".join(f"t{t}" for t in dict.fromkeys(tokens))
        most = count * longer
        rows = self._connection.execute(
            "SELECT rowid, bm25(words) FROM words WHERE words MATCH ? ORDER BY bm25(words), rowid LIMIT ?",
            (words, most),
        )
        sparse = {number: -score for number, score in rows}
        near = self._near(_vector(target, tokens), most)
        both = [(1 - dense, sparse), (dense, near)]
        lowest = [min(scores.values(), default=0.0) for _, scores in both]
        best = [max([abs(x) for x in scores.values()], default=1.0) or 1.0 for _, scores in both]

        def score(number: int) -> float:
            return sum(
                w * s.get(number, low) / top for (w, s), low, top in zip(both, lowest, best, strict=True)
            )

        return tuple(sorted({*sparse, *near}, key=lambda number: (-score(number), number))[:count])

    def _near(self, vector: np.ndarray, count: int) -> dict[int, float]:
        if self._index is None or self._index[0] != self.version:
            self._index = (self.version, *self._indexed())
        _, index, mean = self._index
        if not len(index):
            return {}
        matches = index.search(vector - mean, min(count, len(index)))
        return {
            int(number): 1 - float(distance)
            for number, distance in zip(matches.keys, matches.distances, strict=True)
        }

    def _indexed(self) -> tuple[Any, np.ndarray]:
        Index = _index_type()
        rows = list(self._connection.execute("SELECT id, vector FROM passages ORDER BY id"))
        vectors = np.array([np.frombuffer(vector, np.float32) for _, vector in rows])
        if not rows:
            return [], np.zeros(0, np.float32)
        index = Index(ndim=vectors.shape[1], metric="cos", dtype="f32")
        mean = vectors.mean(0)
        index.add(np.array([number for number, _ in rows]), vectors - mean)
        return index, mean


def _checksum(source: str, *data: bytes) -> int:
    checksum = zlib.crc32(source.encode())
    for part in data:
        checksum = zlib.crc32(part, checksum)
    return checksum


def _probe(target: Target) -> list[int]:
    return [7919 * i % target.vocab_size for i in range(1, min(PROBE, target.vocab_size) + 1)]


def _states(target: Target, ids: Sequence[int]) -> np.ndarray:
    """[T, D] what enters the last block, along a text alone; the target's first slot is taken for it, which is empty."""
    layer = key_layer(target)
    assert target.lengths[0] == 0, "passages are read while nothing runs"
    try:
        return target.prefill([0], [list(ids)], hidden=(layer,)).hidden[layer][0]
    finally:
        target.release([0])


def _vector(target: Any, ids: Sequence[int]) -> np.ndarray:
    return target.embed(np.array(list(ids), np.int64)).mean(0, dtype=np.float32)
