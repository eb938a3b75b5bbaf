"""Where torch and transformers are not installed, models and heads that are compiled load and run, and what needs them says so."""

import os
import subprocess
import sys
from pathlib import Path

from polydraft.models import pair
from tests.models.test_oracle_gguf import FOLDER

HIDDEN = Path(__file__).parents[1] / "support" / "without_torch"
RUN = """
import sys
import warnings

from polydraft import Engine, SamplingParams
from polydraft.errors import IncompatibleError

warnings.simplefilter("ignore")
params = SamplingParams(temperature=0, max_tokens=8)
for name in sys.argv[1:]:
    try:
        engine = Engine.from_pretrained(name, max_num_seqs=1, max_model_len=64)
        print(len(engine.generate([[3, 1, 4]], params)[0].token_ids))
    except IncompatibleError as error:
        print("pip install" in str(error))
"""
HEADS = """
import sys
from importlib import import_module

for kind in ("eagle", "medusa", "block", "peagle"):
    import_module(f"polydraft.heads.{kind}.compiled")
import_module("polydraft.heads.mtp")
print("torch" in sys.modules)
"""


def printed(code, *arguments):
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(HIDDEN)},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_files_and_folders_generate_and_what_is_not_compiled_says_what_to_install():
    names = ["gemma3", "qwen35-mtp", "falcon-h1", "gpt2"]
    assert printed(RUN, pair.target_folder(), *(FOLDER / f"{name}.gguf" for name in names)) == ["8"] * 4 + [
        "True"
    ]


def test_compiled_forms_of_heads_import_no_torch():
    assert printed(HEADS) == ["False"]
