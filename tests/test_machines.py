"""It starts, answers and serves where Linux's own modules, signals and files are absent, and below folders with any name."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.release_check import ask_server, check_answer
from polydraft.bench.llama_cpp import write_gguf
from polydraft.models import pair
from polydraft.models.load import load_tokenizer
from polydraft.models.torch.module import load_module
from tests.support import poorer_machine
from tests.test_layers import modules

ROOT = Path(__file__).parents[1]
POORER = [sys.executable, "-m", "tests.support.poorer_machine"]
IN_OTHERS = ("integrations.vllm", "integrations.ray", "papers.amusd.trace")
"""Modules that need programs which are not installed beside the tests."""
NAME = "C:\\Modelle & Köpfe\\Käse mit Weißbrot"
"""Of a folder; on Windows it is a drive and two folders."""
SAMPLE = ["--max-tokens", "8", "--temperature", "0"]


def run(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=os.environ | environment, timeout=500
    )


def poorer(code: str, before: str = "") -> subprocess.CompletedProcess[str]:
    """Of a program, and of what it begins with before anything is taken away."""
    taken = f"{before}\nfrom tests.support import poorer_machine as p\np.take_away()\n{code}"
    return run([sys.executable, "-c", taken])


def test_what_is_taken_away_is_absent():
    """So that the tests below can fail; and this package alone misses modules."""
    done = poorer(
        "import os, signal\n"
        "for name in p.MODULES:\n"
        "    __import__(name)\n"
        "    try: __import__(name, {'__name__': 'polydraft.some'})\n"
        "    except ModuleNotFoundError as error: print(error.name)\n"
        "print(*[name for name in p.OF_OS if hasattr(os, name)])\n"
        "print(*[name for name in p.OF_SIGNAL if hasattr(signal, name)])"
    )
    assert done.stdout.split() == list(poorer_machine.MODULES), done.stderr


def test_every_module_is_imported():
    names = [name for name in sorted(modules()) if not name.startswith(IN_OTHERS) and name != "__main__"]
    imports = "\n".join(f"import polydraft.{name}" for name in names)
    done = poorer(imports, before="from transformers import PreTrainedModel")
    assert done.returncode == 0, done.stderr
    assert len(names) > 400


def test_an_engine_answers_with_a_grammar():
    done = poorer(
        "from polydraft import Engine, SamplingParams, StructuredOutputs\n"
        "words = StructuredOutputs(regex='[a-z]{3}')\n"
        "params = SamplingParams(temperature=0, max_tokens=8, structured_outputs=words)\n"
        "print(Engine.embedded().generate(['import '], params)[0].text)"
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.strip()) == 3


def test_the_command_line_answers():
    done = run([*POORER, "polydraft", "generate", "import os", "--model", "embedded", *SAMPLE])
    assert done.returncode == 0, done.stderr
    assert "8 tokens" in done.stderr


def test_a_server_answers():
    check_answer(ask_server([*POORER, "polydraft"], ROOT, os.environ))


def test_free_memory_is_what_windows_says():
    done = poorer("from polydraft.numerics.processor import available_memory\nprint(available_memory())")
    assert done.stdout == f"{poorer_machine.FREE}\n", done.stderr


@pytest.fixture(scope="module")
def anywhere(tmp_path_factory) -> Path:
    """A folder whose name has blanks, umlauts, a drive and backslashes, with the embedded pair as folders and the target as a file."""
    folder = tmp_path_factory.mktemp("machine") / NAME
    shutil.copytree(pair.target_folder(), folder / "großes Modell")
    shutil.copytree(pair.draft_folder(), folder / "kleines Modell")
    tokenizer = load_tokenizer(str(pair.target_folder()))
    write_gguf(load_module(str(pair.target_folder()), device="cpu"), tokenizer, folder / "großes Modell.gguf")
    return folder


@pytest.mark.parametrize("model", ["großes Modell", "großes Modell.gguf"])
def test_models_and_caches_lie_in_folders_of_any_name(anywhere, model):
    options = ["--model", str(anywhere / model), "--draft-model", str(anywhere / "kleines Modell")]
    cache = anywhere / f"Ablage für {model}"
    done = run(
        [sys.executable, "-m", "polydraft", "generate", "import os", *options, *SAMPLE],
        POLYDRAFT_CACHE=str(cache),
    )
    assert done.returncode == 0, done.stderr
    assert "8 tokens" in done.stderr
    assert list(cache.glob("*.json")), "costs are stored there"


def test_code_compiles_into_a_folder_of_any_name(anywhere):
    """Code for a type that nothing calls: `make warm` has stored none of it."""
    place = anywhere / "Übersetztes"
    code = "from numba import types\nfrom polydraft.numerics import threads\n"
    done = run(
        [sys.executable, "-c", code + "threads._end.compile((types.uint64[::1],))"],
        NUMBA_CACHE_DIR=str(place),
    )
    assert done.returncode == 0, done.stderr
    assert list(place.rglob("*.nbc"))
