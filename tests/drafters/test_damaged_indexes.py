"""Index files that are cut, flipped or forged: refused with our errors, or drafted from within the vocabulary; never a crash."""

import json
from dataclasses import dataclass
from random import Random

import numpy as np
import pytest

from polydraft.core import Budget
from polydraft.drafters.text import index_file
from polydraft.drafters.text.suffix import SuffixDrafter, SuffixStore
from polydraft.errors import InvalidInputError, PolydraftError
from polydraft.papers.mixture.drafter import MixtureDrafter
from polydraft.papers.retrieval.drafter import RetrievalDrafter, TextIndex
from polydraft.papers.trigram.drafter import TrigramDrafter, TrigramStore, TrigramTable
from tests.drafters.sessions import requests
from tests.support.damage import NUMBERS, cut, flipped, mutated, read_apart

V = 12
TEXTS = [np.random.default_rng(i).integers(0, V, 150).tolist() for i in range(3)]
PROMPTS = ([1, 2, 3], [0, 0], [*TEXTS[0][:40]], [V - 1, 5])
TIGHT = Budget.grown(3, 8, 1)
WIDE = Budget.grown(60, 6, width=30)


def trigram_store():
    store = TrigramStore(64)
    for text in TEXTS:
        store.bump(TrigramTable.empty(), text, window=60, bump=0.5, cap=3.0)
    return store


def suffix_store():
    store = SuffixStore(1000, depth=8)
    for text in TEXTS:
        store.add(text)
    return store


def mixture(index):
    """Both drafters that read an index."""
    return MixtureDrafter(
        {"retrieval": RetrievalDrafter(index), "trigram": TrigramDrafter(TrigramTable.of(index))}
    )


@dataclass(frozen=True)
class Kind:
    make: object
    load: object
    drafter: object
    given: tuple = ()

    def save(self, path):
        self.make().save(path, *self.given)
        return path

    def read(self, path):
        """Load and draft, as an engine would whose target has the ids that the file says."""
        loaded = self.load(path)
        drafter = self.drafter(loaded)
        ids = getattr(loaded, "vocab_size", 0) or loaded.made_with[0]
        for prompt in PROMPTS:
            for budget in (TIGHT, WIDE):
                states = drafter.start(requests(prompt))
                tokens = drafter.propose(states, [budget]).tree.tokens
                assert 0 <= int(tokens.min()) <= int(tokens.max()) < max(ids, V)
                drafter.release(states)


KINDS = {
    "text": Kind(lambda: TextIndex.build(TEXTS, V), TextIndex.load, mixture),
    "trigram-store": Kind(
        trigram_store,
        TrigramStore.load,
        lambda store: TrigramDrafter(TrigramTable.empty(), store=store),
        (V,),
    ),
    "saved store": Kind(suffix_store, SuffixStore.load, lambda store: SuffixDrafter(store), (V,)),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


@every_kind
def test_every_flipped_bit_and_every_cut_is_refused(kind, tmp_path):
    whole = KINDS[kind].save(tmp_path / "i").read_bytes()
    rng = Random(1)
    head = 8 + int.from_bytes(whole[:8], "little")
    damaged = [flipped(whole, rng, head) for _ in range(200)] + [flipped(whole, rng) for _ in range(100)]
    damaged += [cut(whole, rng) for _ in range(50)] + [whole[:n] for n in range(10)] + [whole + b"\0"]
    for content in damaged:
        (tmp_path / "i").write_bytes(content)
        with pytest.raises(InvalidInputError, match="'i' was given as"):
            KINDS[kind].load(tmp_path / "i")


def taken_apart(path):
    """(what a file says of itself, of its arrays, their bytes)."""
    with open(path, "rb") as file:
        about, entries, _ = index_file._header(file)
        return about, entries, bytearray(file.read())


def put_together(path, about, entries, data):
    """Write a file whose checksum is right, whatever else is wrong."""
    about["checksum"] = index_file._checksum(about, entries, memoryview(data))
    text = json.dumps({"__metadata__": {index_file.FORMAT: json.dumps(about)}, **entries}).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def forged(path, rng, to, *, header):
    """With other numbers in one array, or with another entry in the header."""
    about, entries, data = taken_apart(path)
    if header:
        about, entries = rng.choice(((mutated(about, rng), entries), (about, mutated(entries, rng))))
        return put_together(to, about, entries, data)
    entry = rng.choice(list(entries.values()))
    span = slice(*entry["data_offsets"])
    array = np.frombuffer(data[span], index_file._FORMATS[entry["dtype"]])
    bits = array.view(f"u{array.itemsize}").copy()
    for at in rng.choices(range(len(array)), k=rng.choice((1, 2, len(array)))):
        other = int(
            bits[rng.randrange(len(array))]
        )  # a number that might stand here, or one near it, or one bit further
        odd = [as_bits(number, array.dtype) for number in NUMBERS]
        bits[at] = rng.choice((*odd, other, other + 1, other ^ 1 << rng.randrange(8 * array.itemsize))) % (
            1 << 8 * array.itemsize
        )
    data[span] = bits.tobytes()
    return put_together(to, about, entries, data)


def as_bits(number, dtype):
    """A number in a format, or its lowest bits where it does not fit."""
    if dtype.kind == "f":
        with np.errstate(over="ignore"):
            return int(np.array(float(number), dtype).view(f"u{dtype.itemsize}"))
    return int(np.nan_to_num(number, posinf=7, neginf=7)) if isinstance(number, float) else number


@every_kind
@pytest.mark.parametrize("header", [False, True], ids=["numbers", "header"])
def test_a_forged_file_is_refused_or_drafts_within_the_vocabulary(kind, header, tmp_path):
    """Its checksum is right: what compiled code would follow out of its arrays is found by the schema."""
    path = KINDS[kind].save(tmp_path / "i")
    KINDS[kind].read(path)

    def cases():
        for seed in range(150):
            damaged = forged(path, Random(seed), tmp_path / str(seed), header=header)
            yield f"seed {seed}", lambda damaged=damaged: KINDS[kind].read(damaged)

    refused = read_apart(cases())
    assert len(refused) > 15


@every_kind
@pytest.mark.parametrize("ids", [0, -1, 10**9, 1 << 70, 2.5, "12", None])
def test_a_size_of_the_vocabulary_that_cannot_be_is_refused_before_anything_is_allocated(kind, ids, tmp_path):
    about, entries, data = taken_apart(KINDS[kind].save(tmp_path / "i"))
    path = put_together(tmp_path / "forged", about | {"vocab_size": ids}, entries, data)
    with pytest.raises(InvalidInputError, match="vocab_size is"):
        KINDS[kind].load(path)


def test_a_vocabulary_that_no_file_may_have_is_refused_when_an_index_is_built():
    with pytest.raises(PolydraftError, match="vocab_size=1000000000 was given"):
        TextIndex.build(TEXTS, 10**9)
