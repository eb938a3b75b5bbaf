"""Index files: complete or not at all, and nothing but what they say they are."""

import subprocess
import sys
import threading

import numpy as np
import pytest

from polydraft.drafters import index_file
from polydraft.errors import CapacityError, InvalidInputError

ARRAYS = {"a": np.arange(1000, dtype=np.int32), "b": np.ones((3, 2), np.float32), "c": np.empty(0, np.int64)}


def save(path, kind="trigram", arrays=ARRAYS, version=1):
    index_file.save(path, kind, version, arrays, vocab_size=7, tokens_of="ab", top=12)


def test_what_is_saved_is_mapped_back_read_only(tmp_path):
    save(tmp_path / "i")
    found = index_file.load(tmp_path / "i", "trigram", 1)
    assert all(np.array_equal(found.arrays[k], v) and found.arrays[k].dtype == v.dtype for k, v in ARRAYS.items())
    assert isinstance(found.arrays["a"].base, np.memmap)
    assert (found.vocab_size, found.tokens_of, found.facts) == (7, "ab", {"top": 12})
    with pytest.raises(ValueError, match="read-only"):
        found.arrays["a"][0] = 1


def test_a_truncated_file_is_refused_wherever_it_was_cut(tmp_path):
    save(tmp_path / "i")
    whole = (tmp_path / "i").read_bytes()
    for length in (0, 5, 9, 60, len(whole) // 2, len(whole) - 1):
        (tmp_path / "cut").write_bytes(whole[:length])
        with pytest.raises(InvalidInputError, match="'cut' was given as a trigram index"):
            index_file.load(tmp_path / "cut", "trigram", 1)


@pytest.mark.parametrize(
    "content", [b"", b"\x80\x04pickle", b"some text " * 50, (20).to_bytes(8, "little") + b'{"a": 1}            ' + b"x"]
)
def test_a_foreign_file_is_refused(content, tmp_path):
    (tmp_path / "f").write_bytes(content)
    with pytest.raises(InvalidInputError, match="polydraft index build --kind trigram"):
        index_file.load(tmp_path / "f", "trigram", 1)


def test_another_kind_or_version_and_a_missing_file_are_refused(tmp_path):
    save(tmp_path / "i", kind="retrieval")
    with pytest.raises(InvalidInputError, match="it is a retrieval index of version 1"):
        index_file.load(tmp_path / "i", "trigram", 1)
    with pytest.raises(InvalidInputError, match="version 2 of retrieval was expected"):
        index_file.load(tmp_path / "i", "retrieval", 2)
    with pytest.raises(InvalidInputError, match="No such file"):
        index_file.load(tmp_path / "none", "trigram", 1)


FULL_DISK = """
import resource, sys
import numpy as np
from polydraft.drafters import index_file
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))  # every larger file meets an error in the middle of its writing
try:
    index_file.save(sys.argv[1], "trigram", 1, {"a": np.zeros(100_000)}, vocab_size=7, tokens_of="")
except index_file.CapacityError as error:
    print(error)
"""


def test_a_full_disk_leaves_the_old_index_and_no_debris(tmp_path):
    save(tmp_path / "i")
    said = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path / "i")], capture_output=True, text=True, timeout=120, check=True
    )
    assert "what was there before is intact" in said.stdout
    assert np.array_equal(index_file.load(tmp_path / "i", "trigram", 1).arrays["a"], ARRAYS["a"])
    assert [p.name for p in tmp_path.iterdir()] == ["i"]


def test_a_folder_that_is_not_there_is_said(tmp_path):
    with pytest.raises(CapacityError, match="No such file"):
        save(tmp_path / "nowhere" / "i")


def test_concurrent_writers_leave_one_whole_index_at_every_moment(tmp_path):
    path, stop, seen = tmp_path / "i", threading.Event(), []
    save(path, arrays={"a": np.zeros(50_000)})

    def write(value):
        for _ in range(20):
            save(path, arrays={"a": np.full(50_000, float(value))})

    def read():
        while not stop.is_set():
            seen.append(np.unique(index_file.load(path, "trigram", 1).arrays["a"]).tolist())

    reader, writers = threading.Thread(target=read), [threading.Thread(target=write, args=(v,)) for v in (1, 2, 3)]
    for t in (reader, *writers):
        t.start()
    for t in writers:
        t.join()
    stop.set()
    reader.join()
    assert seen
    assert all(values in ([0.0], [1.0], [2.0], [3.0]) for values in seen)
    assert [p.name for p in tmp_path.iterdir()] == ["i"]


def test_a_fingerprint_tells_tokenizers_apart():
    class Words:
        def __init__(self, *words):
            self.words = words

        def get_vocab(self):
            return {w: i for i, w in enumerate(self.words)}

    assert index_file.fingerprint(Words("a", "b")) == index_file.fingerprint(Words("a", "b"))
    assert index_file.fingerprint(Words("a", "b")) != index_file.fingerprint(Words("b", "a"))
