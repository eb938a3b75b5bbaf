"""Compiled code is kept where this user may write, and what is damaged or does not fit is compiled anew."""

import importlib
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from polydraft.files import cache_folder
from polydraft.numerics import compiled_code
from polydraft.numerics.compiled_code import Place, _Files

FUNCTION = """from polydraft.numerics.compiled_code import njit


@njit(cache=True)
def double(x):
    return x + x
"""

LINE = "        x = (x * 3 + number) & 4095 ^ x >> 7\n"
CODES = f"""import sys
from numba import types
from polydraft.numerics.compiled_code import cfunc, njit

def long(number):
    @njit
    def run(x):  # too long to be inlined: it is called by its symbol
{100 * LINE}        return x
    return run

LONG = (0, long(10)), (1, long(20))

def code(place):
    def call(x):
        _, run = LONG[place]
        return run(x)
    return cfunc(types.int64(types.int64))(call)

places = [int(place) for place in sys.argv[1:]]
codes = [code(place) for place in places]
right = [compiled.ctypes(1) == LONG[place][1].py_func(1) for place, compiled in zip(places, codes)]
print(right, sum(compiled.cache_hits for compiled in codes))
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A folder that stands for the package, with one compiled function, whose code is kept in the folder `kept`."""
    root = tmp_path / "code"
    root.mkdir()
    (root / "doubling.py").write_text(FUNCTION, encoding="utf-8")
    monkeypatch.setattr(compiled_code, "_ROOT", root)
    monkeypatch.setattr(compiled_code, "place", lambda: Place(tmp_path / "kept"))
    monkeypatch.syspath_prepend(root)
    compiled_code._warn_not_stored.cache_clear()
    compiled_code._say_temporary.cache_clear()
    return root


def fresh():
    """The function, as a new process would import it."""
    sys.modules.pop("doubling", None)
    importlib.invalidate_caches()
    return importlib.import_module("doubling").double


def hits(function) -> int:
    return sum(function.stats.cache_hits.values())


def test_code_is_found_by_the_next_process(package):
    assert fresh()(2) == 4
    again = fresh()
    assert again(2) == 4 and hits(again) == 1


@pytest.mark.parametrize("damage", [b"", b"\x80\x04damaged", None])
@pytest.mark.parametrize("kind", ["nbi", "nbc"])
def test_damaged_code_is_compiled_anew_and_kept_again(package, kind, damage):
    fresh()(2)
    for file in (package.parent / "kept").rglob(f"*.{kind}"):
        data = file.read_bytes()
        file.write_bytes(data[: len(data) // 2] + bytes(len(data) // 2) if damage is None else damage)
    mended = fresh()
    assert mended(2) == 4 and hits(mended) == 0
    again = fresh()
    assert again(2) == 4 and hits(again) == 1


def test_code_that_cannot_be_written_is_done_without_in_one_line(package):
    (package.parent / "kept").write_text("a file, where a folder is expected")
    with pytest.warns(UserWarning, match="could not be stored in .*NUMBA_CACHE_DIR") as told:
        assert [fresh()(number) for number in (2, 2.5)] == [4, 5.0]
    assert len(told) == 1


def test_code_in_a_temporary_folder_is_told_of_when_it_is_compiled_and_not_when_it_is_found(
    package, monkeypatch
):
    monkeypatch.setattr(compiled_code, "place", lambda: Place(package.parent / "kept", lasting=False))
    with pytest.warns(UserWarning, match="Name a folder that lasts in POLYDRAFT_CACHE"):
        fresh()(2)
    compiled_code._say_temporary.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fresh()(2) == 4


def test_two_processes_that_save_at_once_never_find_the_code_of_other_types(tmp_path, monkeypatch):
    files = [_Files(str(tmp_path), "f", "stamp") for _ in range(2)]
    for one in files:
        monkeypatch.setattr(one, "_load_index", dict)  # each began before the other wrote its index
    saving = [(one, key, one._save_index) for one, key in zip(files, "ab", strict=True)]
    monkeypatch.setattr(
        files[0], "_save_index", lambda index: (files[1].save("b", "code of b"), saving[0][2](index))
    )
    files[0].save("a", "code of a")
    reader = _Files(str(tmp_path), "f", "stamp")
    assert (reader.load("a"), reader.load("b")) == ("code of a", None)


def test_functions_of_one_name_that_two_processes_compiled_are_two_for_a_third(tmp_path):
    """Each process numbered its only function 1, and both had one symbol: the second was called as the first."""
    (tmp_path / "codes.py").write_text(CODES, encoding="utf-8")

    def process(*numbers: int) -> str:
        command = [sys.executable, tmp_path / "codes.py", *map(str, numbers)]
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=True,
            env=os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)},
        ).stdout

    assert [process(0), process(1)] == ["[True] 0\n"] * 2
    assert process(0, 1) == "[True, True] 2\n"


def place_where(monkeypatch, *writable: Path) -> Place:
    monkeypatch.setattr(
        compiled_code,
        "_writable",
        lambda folder: folder in writable and not folder.mkdir(parents=True, exist_ok=True),
    )
    return compiled_code.place.__wrapped__()


def test_the_first_folder_that_can_be_written_is_taken(tmp_path, monkeypatch):
    monkeypatch.setattr(compiled_code.config, "CACHE_DIR", "")
    monkeypatch.setenv("POLYDRAFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(compiled_code, "temporary_folder", lambda: tmp_path)
    package = compiled_code._ROOT / "__pycache__"
    user = tmp_path / "cache" / "compiled"
    assert place_where(monkeypatch, package, user) == Place(None)
    kept = place_where(monkeypatch, user)
    assert kept.folder is not None and kept.folder.parent == user and kept.folder.is_dir() and kept.lasting
    temporary = place_where(monkeypatch)
    assert temporary == Place(tmp_path / kept.folder.name, lasting=False)
    monkeypatch.setattr(compiled_code.config, "CACHE_DIR", str(tmp_path / "asked"))
    assert place_where(monkeypatch, package, tmp_path / "asked") == Place(
        tmp_path / "asked" / kept.folder.name
    )


def test_code_of_other_sources_goes_but_for_the_last_used(tmp_path, monkeypatch):
    monkeypatch.setattr(compiled_code.config, "CACHE_DIR", str(tmp_path))
    for state in ("a", "b", "c", "d"):
        monkeypatch.setattr(compiled_code, "_digest_of_sources", lambda state=state: state)
        place_where(monkeypatch, tmp_path)
    assert {folder.name for folder in tmp_path.iterdir()} == {"polydraft-b", "polydraft-c", "polydraft-d"}


def test_a_user_without_a_home_has_no_cache_folder_but_a_temporary_one(tmp_path, monkeypatch):
    for name in ("POLYDRAFT_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(
        Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("Could not determine home directory."))
    )
    assert cache_folder.cache_folder() is None
    monkeypatch.setattr(cache_folder.tempfile, "gettempdir", lambda: str(tmp_path))
    mine = cache_folder.temporary_folder.__wrapped__()
    assert mine == cache_folder.temporary_folder.__wrapped__() and mine.stat().st_mode & 0o777 == 0o700
    mine.chmod(0o777)  # anyone could put code there
    other = cache_folder.temporary_folder.__wrapped__()
    assert other != mine
    other.rmdir()


def test_every_compiled_function_of_the_package_is_kept_by_it():
    root = Path(compiled_code.__file__).parent
    numba_alone = re.compile(
        r"^from numba import .*\b(njit|cfunc|jit)\b|\bnumba\.(njit|jit|cfunc)\(.*cache=True", re.MULTILINE
    )
    named = {file.name for file in root.rglob("*.py") if numba_alone.search(file.read_text(encoding="utf-8"))}
    assert not named


def test_code_of_a_few_functions_in_the_package_does_not_count_where_another_folder_is_read(
    package, monkeypatch
):
    monkeypatch.setattr(compiled_code, "mark", lambda what: package.parent / "kept" / what)
    compiled_code._came_with_code.cache_clear()
    (package / "__pycache__").mkdir()
    (package / "__pycache__" / compiled_code.WALKS).touch()
    assert not compiled_code.is_marked(compiled_code.WALKS)
    (package / "__pycache__" / compiled_code.EVERYTHING).touch()
    compiled_code._came_with_code.cache_clear()
    assert compiled_code.is_marked(compiled_code.WALKS)
    compiled_code._came_with_code.cache_clear()
