import json
import shutil

import pytest
import torch
from typer.testing import CliRunner

from polydraft.bench import examine
from polydraft.cli.main import app
from polydraft.models import pair


def test_doctor_measures_this_machine_and_says_which_path_is_active_and_why():
    found = CliRunner().invoke(app, ["doctor", "--json"])
    assert found.exit_code == 0, found.output
    facts = json.loads(found.stdout)
    assert facts["machine"]["copy_bandwidth_gb_per_s"] > 0
    assert facts["embedded target"]["path"] == "CompiledModel"
    assert "Llama" in facts["embedded target"]["why"]
    assert facts["embedded pair"]["prompts"] > 0
    assert (facts["gpu"]["path"] == "none") == (facts["machine"]["cuda"] == "none")
    assert set(facts["versions"]) >= {"python", "polydraft", "torch", "transformers", "numba"}


def test_doctor_says_which_gpu_path_is_active_or_why_none(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for version, reason in ((None, "without CUDA"), ("13.0", "finds no CUDA device")):
        monkeypatch.setattr(torch.version, "cuda", version)
        assert reason in examine._gpu()["why"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some GPU")
    found = examine._gpu()
    assert "HFTarget" in found["path"] and "Some GPU" in found["why"]


TEMPLATE = "{{ tools }}{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}<call>{{ c.function|tojson }}</call>{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "origin", "call"),
    [
        (TEMPLATE, "template", '<call>{"name": "add", "arguments": {"a": 1, "b": "x"}}</call>'),
        (
            "{% for m in messages %}{{ m.content }}{% endfor %}",
            "default",
            '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "x"}}\n</tool_call>',
        ),
    ],
)
def test_doctor_shows_how_a_model_writes_calls_and_where_that_was_found(tmp_path, template, origin, call):
    folder = tmp_path / "chat"
    shutil.copytree(pair.draft_folder(), folder)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": template}))
    found = CliRunner().invoke(app, ["doctor", "--model", str(folder), "--json"])
    assert found.exit_code == 0, found.output
    (facts,) = json.loads(found.stdout).values()
    assert (facts["origin"], facts["call"], facts["thinking"]) == (origin, call, [])
    assert call in CliRunner().invoke(app, ["doctor", "--model", str(folder)]).stdout
