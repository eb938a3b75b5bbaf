"""A disk that is full, or a limit on the size of files: what would be kept is done without, in one line at most, and nothing half is left."""

import importlib
import resource
import subprocess
import sys
import warnings

import numpy as np
import pytest

from polydraft.models.compiled import packed_file
from polydraft.models.compiled.packed_file import PackedFile
from polydraft.numerics import compiled_code
from polydraft.numerics.compiled_code import Place
from polydraft.policy import profile
from polydraft.policy.profile import Profile

FUNCTION = "from polydraft.numerics.compiled_code import njit\n\n\n@njit(cache=True)\ndef double(x):\n    return x + x\n"
ROOM = 16 << 10


@pytest.fixture(params=["a full disk", "a limit"])
def full(request, tmp_path, monkeypatch):
    """A folder in which no file of some KB can be written, and what gives it room."""
    folder = tmp_path / "kept"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    folder.mkdir()
    monkeypatch.setenv("POLYDRAFT_CACHE", str(folder))
    if request.param == "a limit":
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, before[1]))
        yield folder, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, before)
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        return
    mount = ["mount", "-t", "tmpfs", "-o", f"size={ROOM}", "small", folder]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a file system of its own cannot be mounted here")
    (folder / "others").write_bytes(bytes(ROOM))
    yield folder, lambda: subprocess.run(["mount", "-o", "remount,size=4m", folder], check=True)
    subprocess.run(["umount", "-l", folder], check=True)


def left(folder):
    return [path for path in folder.rglob("*") if path.is_file() and path.name != "others"]


def test_compiled_code_runs_and_is_kept_once_there_is_room(full, tmp_path, monkeypatch):
    folder, enlarge = full
    package = tmp_path / "code"
    package.mkdir()
    monkeypatch.setattr(compiled_code, "_ROOT", package)
    monkeypatch.setattr(compiled_code, "place", lambda: Place(folder))
    monkeypatch.syspath_prepend(package)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # Python before 3.13 leaves half a .pyc at a limit
    compiled_code._warn_not_stored.cache_clear()

    def fresh():
        sys.modules.pop("doubling_on_full_disk", None)
        importlib.invalidate_caches()
        return importlib.import_module("doubling_on_full_disk").double

    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit[1], limit[1]))
    (package / "doubling_on_full_disk.py").write_text(FUNCTION, encoding="utf-8")
    resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    with pytest.warns(UserWarning, match=r"could not be stored in .*(No space left|too large)") as told:
        assert [fresh()(number) for number in (2, 2.5)] == [4, 5.0]
    assert len(told) == 1 and not left(folder)
    enlarge()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fresh()(2) == 4
        again = fresh()
        assert again(2) == 4 and sum(again.stats.cache_hits.values()) == 1


def test_costs_serve_this_process_and_are_kept_once_there_is_room(full, monkeypatch):
    folder, enlarge = full
    monkeypatch.setattr(profile, "_known", {})
    about = {"pair": 1}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        profile.remember(about, Profile.assumed())
        assert profile.remembered(about) == Profile.assumed() and not left(folder)
        enlarge()
        profile.remember(about, Profile.assumed())
        monkeypatch.setattr(profile, "_known", {})
        assert profile.remembered(about) == Profile.assumed()


def test_weights_are_packed_into_memory_and_kept_once_there_is_room(full, monkeypatch):
    folder, enlarge = full
    monkeypatch.setattr(packed_file, "MIN_BYTES", 0)
    monkeypatch.setattr(packed_file, "LEFT_FREE", 0.0)  # whatever else lies on this machine's disk
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        memory = (np.arange(70_000) % 251).astype(np.uint8)
        PackedFile({"model": 1}, [memory]).write(error=0.0)
        assert not left(folder)
        enlarge()
        PackedFile({"model": 1}, [memory]).write(error=0.0)
        again = np.zeros_like(memory)
        assert PackedFile({"model": 1}, [again]).read() and (again == memory).all()


def test_two_processes_that_measure_at_once_leave_whole_costs_of_one(tmp_path, monkeypatch):
    monkeypatch.setenv("POLYDRAFT_CACHE", str(tmp_path))
    code = (
        "from polydraft.policy import profile; from polydraft.policy.profile import Profile\n"
        "for k in range(40): profile.remember({'pair': k % 3}, Profile.assumed())"
    )
    running = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(2)]
    assert [process.wait(120) for process in running] == [0, 0]
    monkeypatch.setattr(profile, "_known", {})
    assert [profile.remembered({"pair": k}) for k in range(3)] == [Profile.assumed()] * 3
    assert len(left(tmp_path)) == 3
