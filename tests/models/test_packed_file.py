"""Packed weights are kept for the next start, and whatever happens to the file, or to its folder, weights are those of the model."""

import errno
import os
import resource
import shutil

import numpy as np
import pytest

from polydraft.cache_folder import NOTHING_KEPT
from polydraft.models import checkpoint, pair
from polydraft.models.compiled import packed_file, weights
from polydraft.models.compiled.packed_file import PackedFile

MATRICES = "qkv", "out", "gate_up", "down", "head", "embed"
SIZES = [5000, 3, 70_000]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where files are kept, of small models too."""
    monkeypatch.setenv("POLYDRAFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(packed_file, "LEAST_BYTES", 0)
    return tmp_path / "cache" / "packed"


def kept(about=None):
    """A file that was packed into and kept."""
    file = PackedFile(about or {"model": 1}, SIZES)
    assert not file.is_filled and file.arrays is not None
    for k, array in enumerate(file.arrays):
        array[:] = np.arange(len(array)) + k
    file.keep(error=0.25)
    return file


def is_whole(file):
    arrays = file.arrays or []
    return [len(array) for array in arrays] == SIZES and all(
        (x == (np.arange(len(x)) + k) % 256).all() for k, x in enumerate(arrays)
    )


def packed(model):
    files = checkpoint.of_folder(model)
    assert files is not None
    found = weights.packed_weights(files, 8, "int4")
    return found.error, [getattr(found.weights, part).data.tobytes() for part in MATRICES]


def test_the_next_start_maps_the_weights_that_the_first_one_packed(folder, tmp_path, monkeypatch):
    model = shutil.copytree(pair.draft_folder(), tmp_path / "model")
    monkeypatch.setenv(NOTHING_KEPT, "1")
    plain = packed(model)
    assert not folder.exists()
    monkeypatch.delenv(NOTHING_KEPT)
    assert packed(model) == plain
    with monkeypatch.context() as patch:
        patch.setattr(weights, "_run", None)
        assert packed(model) == plain
    os.utime(model / "model.safetensors", ns=(1, 1))
    assert packed(model) == plain
    assert len(list(folder.iterdir())) == 2


@pytest.mark.parametrize("damage", ["cut", "a byte", "the line", "other sizes", "empty"])
def test_a_damaged_file_is_not_used_and_kept_anew(folder, damage):
    kept()
    (path,) = folder.iterdir()
    data = bytearray(path.read_bytes())
    if damage == "a byte":
        data[packed_file.HEADER + 4711] ^= 1
    elif damage == "the line":
        data[:9] = b"\xff not {it"
    elif damage == "other sizes":
        data[: data.index(b"\n")] = data[: data.index(b"\n")].replace(b"70000", b"69999")
    path.write_bytes(b"" if damage == "empty" else data[:-4096] if damage == "cut" else data)
    assert not PackedFile({"model": 1}, SIZES).is_filled
    assert not list(folder.glob("*.weights.*"))
    kept()
    again = PackedFile({"model": 1}, SIZES)
    assert again.is_filled and is_whole(again) and again.figures == {"error": 0.25}


def test_weights_of_other_files_or_another_version_are_others(folder, monkeypatch):
    kept({"model": 1, "code": "a"})
    assert not PackedFile({"model": 1, "code": "b"}, SIZES).is_filled
    assert PackedFile({"model": 1, "code": "a"}, SIZES).is_filled
    (path,) = folder.glob("*.weights")
    other = PackedFile({"model": 2}, SIZES)
    shutil.copy(path, other._path)
    assert not PackedFile({"model": 2}, SIZES).is_filled


def no_room(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("trouble", ["no room", "a limit", "a full disk", "no folder", "renaming", "no call"])
def test_what_cannot_be_kept_is_packed_into_memory(folder, tmp_path, monkeypatch, trouble):
    plain = packed(pair.target_folder())
    shutil.rmtree(folder)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if trouble == "no room":
        monkeypatch.setattr(os, "posix_fallocate", no_room)
    elif trouble == "a limit":
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    elif trouble == "a full disk":
        full = os.statvfs_result((4096, 4096, 1 << 20, 9, 9, 9, 9, 9, 0, 255))
        monkeypatch.setattr(os, "statvfs", lambda _: full)
    elif trouble == "no folder":
        folder.write_text("in the way", encoding="utf-8")
    elif trouble == "renaming":
        monkeypatch.setattr(os, "replace", no_room)
    else:
        monkeypatch.delattr(os, "posix_fallocate")
    try:
        assert packed(pair.target_folder()) == plain
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not folder.is_dir() or not list(folder.iterdir())


def test_two_processes_that_pack_at_once_keep_one_whole_file(folder):
    first, second = PackedFile({"model": 1}, SIZES), PackedFile({"model": 1}, SIZES)
    assert first.arrays is not None and second.arrays is not None
    for k, (a, b) in enumerate(zip(first.arrays, second.arrays, strict=True)):
        a[:] = np.arange(len(a)) + k
        b[:] = 7
    second.drop()
    first.keep(error=0.0)
    assert is_whole(PackedFile({"model": 1}, SIZES)) and len(list(folder.iterdir())) == 1


def test_the_folder_is_bounded_and_what_was_used_last_stays(folder, monkeypatch):
    monkeypatch.setattr(packed_file, "MOST_BYTES", 250_000)
    for model in (1, 2):
        kept({"model": model})
    (folder / "x.unfinished").write_bytes(b"")
    for k, path in enumerate(sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns)):
        os.utime(path, (1000 + k, 1000 + k))
    assert PackedFile({"model": 1}, SIZES).is_filled
    kept({"model": 3})
    assert PackedFile({"model": 1}, SIZES).is_filled and not list(folder.glob("x*"))
    second = PackedFile({"model": 2}, SIZES)
    assert not second.is_filled
    second.drop()


def test_a_change_to_mapped_weights_does_not_reach_the_file(folder):
    kept()
    arrays = PackedFile({"model": 1}, SIZES).arrays
    assert arrays is not None
    arrays[0][:] = 0
    assert is_whole(PackedFile({"model": 1}, SIZES))
