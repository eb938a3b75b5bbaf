"""Packed weights are kept for the next start, and whatever happens to the file, or to its folder, weights are those of the model."""

import errno
import os
import resource
import shutil

import numpy as np
import pytest

from polydraft.files.cache_folder import NO_CACHE
from polydraft.models import pair
from polydraft.models.compiled import packed_file, weights
from polydraft.models.compiled.packed_file import PackedFile
from polydraft.models.loading import checkpoint

MATRICES = "qkv", "out", "gate_up", "down", "head", "embed"
SIZES = [5000, 3, 70_000]
THIRD = packed_file.HEADER + 3 * packed_file.PAGE
"""Where the third one begins."""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where files are kept, of small models too."""
    monkeypatch.setenv("POLYDRAFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(packed_file, "MIN_BYTES", 0)
    monkeypatch.setattr(packed_file, "LEFT_FREE", 0.0)  # whatever else lies on this machine's disk
    return tmp_path / "cache" / "packed"


def memory(filled=False):
    """Of three matrices."""
    arrays = [np.zeros(size, np.uint8) for size in SIZES]
    for k, array in enumerate(arrays if filled else []):
        array[:] = np.arange(len(array)) + k
    return arrays


def kept(about):
    """Keep what such matrices hold."""
    PackedFile(about, memory(filled=True)).write(error=0.25)


def found(about):
    """What is read of a file, or None; memory is zero then."""
    arrays = memory()
    file = PackedFile(about, arrays)
    if file.read():
        assert file.figures == {"error": 0.25}
        return arrays
    assert not any(array.any() for array in arrays)
    return None


def is_whole(arrays):
    return arrays is not None and all(
        (x == y).all() for x, y in zip(arrays, memory(filled=True), strict=True)
    )


def packed(model):
    files = checkpoint.of_folder(model)
    assert files is not None
    found = weights.packed_weights(files, 8, "int4")
    return found.error, [getattr(found.weights, part).data.tobytes() for part in MATRICES]


def test_the_next_start_maps_the_weights_that_the_first_one_packed(folder, tmp_path, monkeypatch):
    model = shutil.copytree(pair.draft_folder(), tmp_path / "model")
    monkeypatch.setenv(NO_CACHE, "1")
    plain = packed(model)
    assert not folder.exists()
    monkeypatch.delenv(NO_CACHE)
    assert packed(model) == plain
    with monkeypatch.context() as patch:
        patch.setattr(weights.Packer, "run", None)
        assert packed(model) == plain
    os.utime(model / "model.safetensors", ns=(1, 1))
    assert packed(model) == plain
    assert len(list(folder.iterdir())) == 2


def with_swapped_pages(data):
    first, second = (slice(start, start + packed_file.PAGE) for start in (THIRD, THIRD + packed_file.PAGE))
    data[first], data[second] = data[second], data[first]


def with_bits_that_cancel(data):
    """One of a word is set, and the same one of another is not any more."""
    words = np.frombuffer(data, np.uint64, 8, THIRD)
    bit = np.uint64(1) << np.uint64(63)
    k = next(k for k in range(1, 8) if (words[k] ^ words[0]) & bit)
    words[[0, k]] ^= bit


def with_swapped_parts(data):
    """As a thread reads them."""
    first, second = (
        slice(THIRD + k * packed_file.TOGETHER, THIRD + (k + 1) * packed_file.TOGETHER) for k in (0, 1)
    )
    data[first], data[second] = data[second], data[first]


@pytest.mark.parametrize("damage", [with_swapped_pages, with_bits_that_cancel, with_swapped_parts])
def test_damage_that_leaves_the_sum_of_all_bytes_is_found(folder, damage, monkeypatch):
    monkeypatch.setattr(packed_file, "TOGETHER", 4 * packed_file.PAGE)
    rng = np.random.default_rng(0)
    arrays = memory()
    for array in arrays:
        array[:] = rng.integers(0, 256, len(array))
    PackedFile({"model": 1}, arrays).write(error=0.25)
    (path,) = folder.iterdir()
    data = bytearray(path.read_bytes())
    before = bytes(data)
    damage(data)
    assert data != before and sum(data) == sum(before)
    path.write_bytes(data)
    assert found({"model": 1}) is None


@pytest.mark.parametrize("damage", ["cut", "a byte", "the line", "other sizes", "empty"])
def test_a_damaged_file_is_not_used_and_kept_anew(folder, damage):
    kept({"model": 1})
    (path,) = folder.iterdir()
    data = bytearray(path.read_bytes())
    if damage == "a byte":
        data[packed_file.HEADER + 4711] ^= 1
    elif damage == "the line":
        data[:9] = b"\xff not {it"
    elif damage == "other sizes":
        data[: data.index(b"\n")] = data[: data.index(b"\n")].replace(b"70000", b"69999")
    path.write_bytes(b"" if damage == "empty" else data[:-4096] if damage == "cut" else data)
    assert found({"model": 1}) is None
    kept({"model": 1})
    assert is_whole(found({"model": 1})) and len(list(folder.iterdir())) == 1


def test_weights_of_other_files_or_another_version_are_others(folder):
    kept({"model": 1, "code": "a"})
    assert found({"model": 1, "code": "b"}) is None and is_whole(found({"model": 1, "code": "a"}))
    (path,) = folder.glob("*.weights")
    other = PackedFile({"model": 2}, memory())
    shutil.copy(path, other._path)
    assert found({"model": 2}) is None


def no_room(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("trouble", ["a limit", "a full disk", "no folder", "renaming"])
def test_what_cannot_be_kept_is_packed_into_memory(folder, tmp_path, monkeypatch, trouble):
    plain = packed(pair.target_folder())
    shutil.rmtree(folder)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if trouble == "a limit":
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    elif trouble == "a full disk":
        usage = shutil.disk_usage(tmp_path)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1 << 16))
    elif trouble == "no folder":
        folder.write_text("in the way", encoding="utf-8")
    else:
        monkeypatch.setattr(os, "replace", no_room)
    try:
        assert packed(pair.target_folder()) == plain
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not folder.is_dir() or not list(folder.iterdir())


def test_two_processes_that_pack_at_once_keep_one_whole_file(folder, monkeypatch):
    replace = os.replace

    def after_another(*paths):
        monkeypatch.setattr(os, "replace", replace)
        kept({"model": 1})
        replace(*paths)

    monkeypatch.setattr(os, "replace", after_another)
    kept({"model": 1})
    assert is_whole(found({"model": 1})) and len(list(folder.iterdir())) == 1


def flipped(path):
    """Change a byte, and leave size, inode and time as they were."""
    about = path.stat()
    with open(path, "r+b") as file:
        file.seek(THIRD + 4711)
        byte = file.read(1)
        file.seek(THIRD + 4711)
        file.write(bytes([byte[0] ^ 1]))
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))


def test_sums_are_counted_at_the_first_start_alone_and_by_the_doctor(folder, monkeypatch):
    kept({"model": 1})
    with monkeypatch.context() as patch:
        assert is_whole(found({"model": 1}))
        counted = list[int]()
        patch.setattr(packed_file, "_sum", lambda part, _=0: counted.append(part.nbytes) or 0)
        assert is_whole(found({"model": 1})), "a sealed file is read without sums"
        assert max(counted) < 100  # of the sums of parts alone
    assert list(packed_file.damaged()) == []
    (path,) = folder.iterdir()
    flipped(path)
    assert list(packed_file.damaged()) == [path]


@pytest.mark.parametrize("change", ["written to", "copied", "touched"])
def test_a_seal_holds_for_the_file_alone_that_was_counted(folder, change):
    kept({"model": 1})
    assert found({"model": 1}) is not None
    (path,) = folder.iterdir()
    about = path.stat()
    if change == "copied":
        copy = shutil.copy2(path, path.with_name("copy"))
        flipped(copy)
        os.replace(copy, path)
    else:
        flipped(path)
        seconds = 1 if change == "touched" else 0
        os.utime(path, ns=(0, about.st_mtime_ns + 1 + seconds * 10**9))
    assert found({"model": 1}) is None


def test_an_unsealed_file_that_is_damaged_is_found_at_once(folder):
    kept({"model": 1})
    (path,) = folder.iterdir()
    flipped(path)
    assert found({"model": 1}) is None


def test_the_folder_is_bounded_and_what_was_used_last_stays(folder, monkeypatch):
    monkeypatch.setattr(packed_file, "MOST_BYTES", 250_000)
    for model in (1, 2):
        kept({"model": model})
    (folder / "x.unfinished").write_bytes(b"")
    for k, path in enumerate(sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns)):
        os.utime(path, (1000 + k, 1000 + k))
    assert found({"model": 1}) is not None
    kept({"model": 3})
    assert found({"model": 1}) is not None and found({"model": 3}) is not None and not list(folder.glob("x*"))
    assert found({"model": 2}) is None
