"""Engines are built with named, typed arguments, which come from the settings and which editors and notebooks complete."""

import json
import subprocess
import sys
from importlib.resources import files
from inspect import Parameter, signature
from pathlib import Path

import pytest

from polydraft import Engine
from polydraft.config import EngineConfig, SpeculationConfig, settings
from polydraft.errors import UnknownNameError
from polydraft.models import pair
from polydraft.policy.profile import Profile
from tests.docs import fields

SOURCE = Path(str(files("polydraft"))).parent
RIGHT = """
from pathlib import Path
from polydraft import Engine

a: Engine = Engine.from_pretrained(Path("a.gguf"), draft_model="b.gguf", depth=4, quantization="int8", drafter=None)
b: Engine = Engine.embedded(max_num_seqs=1, verifier="block", policy="fixed")
"""
WRONG = """
from polydraft import Engine

Engine.from_pretrained("a.gguf", depth="four")
Engine.from_pretrained("a.gguf", deph=4)
Engine.from_pretrained("a.gguf", quantization="int3")
Engine.embedded(threads=2.5)
Engine.from_pretrained(model=3)
"""


def test_the_file_of_fields_follows_from_the_settings():
    assert fields.FILE.read_text(encoding="utf-8") == fields.text(), "run `python -m tests.docs.tables`"


def test_a_type_checker_takes_right_arguments_and_names_each_wrong_one(tmp_path):
    (tmp_path / "right.py").write_text(RIGHT, encoding="utf-8")
    (tmp_path / "wrong.py").write_text(WRONG, encoding="utf-8")
    config = {"extraPaths": [str(SOURCE)], "typeCheckingMode": "standard", "pythonVersion": "3.10"}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(config), encoding="utf-8")
    command = [sys.executable, "-m", "basedpyright", "--outputjson", "--pythonpath", sys.executable]
    checked = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    errors = [
        (Path(e["file"]).name, e["range"]["start"]["line"])
        for e in json.loads(checked.stdout)["generalDiagnostics"]
    ]
    assert errors == [("wrong.py", line) for line in range(3, 8)], checked.stdout


@pytest.mark.parametrize(
    ("build", "config"),
    [(Engine.from_pretrained, EngineConfig), (Engine.embedded, EngineConfig), (Engine.of, SpeculationConfig)],
)
def test_a_signature_names_every_setting_with_its_default(build, config):
    parameters = signature(build).parameters
    beside = {"model"} if config is EngineConfig else set()
    defaults = {name: spec.default for name, spec in settings(config).items() if name not in beside}
    assert defaults.items() <= {name: p.default for name, p in parameters.items()}.items()
    assert not any(p.kind is Parameter.VAR_KEYWORD for p in parameters.values())


def test_models_and_profiles_are_taken_as_paths(tmp_path):
    Profile.assumed().save(tmp_path / "profile.json")
    built = Engine.from_pretrained(
        pair.target_folder(), draft_model=pair.draft_folder(), profile=tmp_path / "profile.json"
    )
    assert built.summary()["target"] == str(pair.target_folder())
    assert EngineConfig(draft_model=Path("b.gguf")).draft_model == "b.gguf"  # pyright: ignore[reportArgumentType]


def test_an_option_that_there_is_not_is_refused_with_the_nearest():
    with pytest.raises(UnknownNameError, match=r"unknown option 'draft_modle'; did you mean 'draft_model'\?"):
        Engine.from_pretrained("large", draft_modle="small")  # pyright: ignore[reportCallIssue]


def test_the_package_says_that_it_is_typed():
    assert (SOURCE / "polydraft" / "py.typed").is_file()
