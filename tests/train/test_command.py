"""`polydraft train` through the command line: the command that it prints drafts with what it wrote."""

import json
import shlex
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from polydraft.cli.main import app
from polydraft.methods import registry
from polydraft.train.loop import TrainingOptions


@pytest.mark.parametrize("kind", registry.names("recipe"))
def test_the_printed_command_drafts_with_the_trained_head(kind, written, tmp_path, monkeypatch):
    chosen = TrainingOptions.of
    monkeypatch.setattr(
        TrainingOptions, "of", lambda kind, **options: replace(chosen(kind, **options), max_steps=2)
    )
    folder = tmp_path / "head"
    options = ["--data", str(written), "--minutes", "1"]
    training = CliRunner().invoke(app, ["train", kind, "--model", "embedded", *options, "--out", str(folder)])
    assert training.exit_code == 0, training.output
    command, *arguments = shlex.split(training.stdout.partition("Use it: polydraft ")[2])
    result = CliRunner().invoke(
        app, [command, *arguments, "--json", "--max-tokens", "8", "--depth", "2"], input="def add(a, b):"
    )
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["engine"]["drafter"] == registry.recipe(kind).checkpoint.kind
    assert report["statistics"]["drafted_tokens"] > 0


def test_a_draft_model_of_a_reduced_vocabulary_is_refused(written, tmp_path):
    options = [
        "--data",
        str(written),
        "--minutes",
        "1",
        "--draft-vocab",
        "256",
        "--out",
        str(tmp_path / "head"),
    ]
    training = CliRunner().invoke(app, ["train", "model", "--model", "embedded", *options])
    assert "error: a draft vocabulary of 256 tokens was given; expected all 2048" in training.stderr
