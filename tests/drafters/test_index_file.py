"""Index files: complete or not at all, and nothing but what they say they are."""

import os
import stat
import subprocess
import sys
import threading

import numpy as np
import pytest
from safetensors.numpy import load_file

from polydraft.drafters.text import index_file
from polydraft.errors import CapacityError, InvalidInputError

ARRAYS = {"tokens": np.arange(1000, dtype=np.int32) % 7, "order": np.arange(1000, dtype=np.uint32)}


def save(path, value=3, vocab_size=7):
    same = {"tokens": np.full(50_000, value, np.int32), "order": np.arange(50_000, dtype=np.uint32)}
    index_file.save(path, "text", ARRAYS if value == 3 else same, vocab_size=vocab_size, tokens_of="ab" * 8)


def load(path, kind="text"):
    return index_file.load(path, kind)


def test_what_is_saved_is_mapped_back_read_only(tmp_path):
    save(tmp_path / "i")
    found = load(tmp_path / "i")
    assert all(
        np.array_equal(found.arrays[k], v) and found.arrays[k].dtype == v.dtype for k, v in ARRAYS.items()
    )
    assert isinstance(found.arrays["tokens"].base.base, np.memmap)
    assert (found.vocab_size, found.tokens_of) == (7, "ab" * 8)
    with pytest.raises(ValueError, match="read-only"):
        found.arrays["tokens"][0] = 1


def test_other_programs_read_it_as_safetensors(tmp_path):
    save(tmp_path / "i")
    found = load_file(tmp_path / "i")
    assert all(np.array_equal(found[k], v) for k, v in ARRAYS.items())


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_a_file_is_as_readable_as_any_new_one(tmp_path, umask):
    before = os.umask(umask)
    try:
        save(tmp_path / "i")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "i").stat().st_mode) == 0o666 & ~umask


def test_a_truncated_file_is_refused_wherever_it_was_cut(tmp_path):
    save(tmp_path / "i")
    whole = (tmp_path / "i").read_bytes()
    for length in (0, 5, 9, 60, len(whole) // 2, len(whole) - 1):
        (tmp_path / "cut").write_bytes(whole[:length])
        with pytest.raises(InvalidInputError, match="'cut' was given as a text index"):
            load(tmp_path / "cut")


@pytest.mark.parametrize(
    "content",
    [b"", b"\x80\x04pickle", b"some text " * 50, (20).to_bytes(8, "little") + b'{"a": 1}            ' + b"x"],
)
def test_a_foreign_file_is_refused(content, tmp_path):
    (tmp_path / "f").write_bytes(content)
    with pytest.raises(InvalidInputError, match="polydraft index build CORPUS --out FILE"):
        load(tmp_path / "f")


def test_json_that_is_nested_beyond_reason_is_refused(tmp_path):
    header = b"[" * 200_000
    (tmp_path / "f").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(InvalidInputError, match="'f' was given as"):
        load(tmp_path / "f")


def test_another_kind_or_version_and_a_missing_file_are_refused(tmp_path):
    save(tmp_path / "i")
    with pytest.raises(
        InvalidInputError, match="it is a text index of version 4, version 4 of trigram-store was expected"
    ):
        load(tmp_path / "i", "trigram-store")
    whole = (tmp_path / "i").read_bytes()
    older = whole.replace(b'\\"version\\": 4', b'\\"version\\": 3').replace(b'\\"text\\"', b'\\"retrieval\\"')
    assert older != whole
    (tmp_path / "i").write_bytes(older)
    with pytest.raises(
        InvalidInputError,
        match=r"it is a retrieval index of version 3, version 4 of text was expected\. Build one with `polydraft index build",
    ):
        load(tmp_path / "i")
    with pytest.raises(InvalidInputError, match="No such file"):
        load(tmp_path / "none")
    with pytest.raises(InvalidInputError, match="Is a directory"):
        load(tmp_path)


FULL_DISK = """
import resource, sys
import numpy as np
from polydraft.drafters.text import index_file
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))  # every larger file meets an error in the middle of its writing
try:
    index_file.save(sys.argv[1], "text", {"tokens": np.zeros(100_000, np.int32)}, vocab_size=7, tokens_of="")
except index_file.CapacityError as error:
    print(error)
"""


def test_a_full_disk_leaves_the_old_index_and_no_debris(tmp_path):
    save(tmp_path / "i")
    said = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path / "i")],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "what was there before is intact" in said.stdout
    assert np.array_equal(load(tmp_path / "i").arrays["tokens"], ARRAYS["tokens"])
    assert [p.name for p in tmp_path.iterdir()] == ["i"]


def test_a_folder_that_is_not_there_is_said_and_not_made(tmp_path):
    with pytest.raises(InvalidInputError, match=r"there is no folder .*nowhere"):
        save(tmp_path / "nowhere" / "i")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(CapacityError, match="Not a directory"):
        save(tmp_path / "file" / "i")


def test_concurrent_writers_leave_one_whole_index_at_every_moment(tmp_path):
    path = tmp_path / "i"
    stop = threading.Event()
    seen = []
    save(path, 0, 12)

    def write(value):
        for _ in range(20):
            save(path, value, vocab_size=10 + value)

    def read():
        while not stop.is_set():
            found = load(path)
            seen.append([*np.unique(found.arrays["tokens"]).tolist(), found.vocab_size])

    reader = threading.Thread(target=read)
    writers = [threading.Thread(target=write, args=(v,)) for v in (1, 2, 4)]
    for t in (reader, *writers):
        t.start()
    for t in writers:
        t.join()
    stop.set()
    reader.join()
    assert seen
    assert all(values in ([0, 12], [1, 11], [2, 12], [4, 14]) for values in seen)
    assert [p.name for p in tmp_path.iterdir()] == ["i"]


def test_a_fingerprint_tells_tokenizers_apart():
    class Words:
        def __init__(self, *words):
            self.words = words

        def get_vocab(self):
            return {w: i for i, w in enumerate(self.words)}

    assert index_file.fingerprint(Words("a", "b")) == index_file.fingerprint(Words("a", "b"))
    assert index_file.fingerprint(Words("a", "b")) != index_file.fingerprint(Words("b", "a"))
