import shutil

import pytest
from transformers import AutoTokenizer
from typer.testing import CliRunner

from polydraft.cli.main import app
from polydraft.models import pair

TEMPLATE = "{% for m in messages %}# {{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The embedded target with a template in which the whole conversation can be seen."""
    made = tmp_path_factory.mktemp("chat") / "model"
    shutil.copytree(pair.target_folder(), made)
    tokenizer = AutoTokenizer.from_pretrained(str(made))
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(made)
    return str(made)


def talk(folder, lines, *more):
    options = ["chat", "--model", folder, "--max-tokens", "6", "--temperature", "0", "--drafter", "ngram", *more]
    return CliRunner().invoke(app, options, input=lines)


def test_each_message_gets_one_streamed_answer_and_statistics(folder):
    done = talk(folder, "import os\nimport sys\n/exit\nnot read\n")
    assert done.exit_code == 0, done.output
    assert done.stderr.count("tokens per target call") == 2


def test_the_history_changes_the_answer_and_reset_forgets_it(folder):
    alone = talk(folder, "x = 1\n").stdout
    after = talk(folder, "def add(a, b):\nx = 1\n").stdout
    reset = talk(folder, "def add(a, b):\n/reset\nx = 1\n").stdout
    assert reset.endswith(alone)
    assert not after.endswith(alone)


def test_the_system_prompt_is_read(folder):
    assert talk(folder, "x = 1\n", "--system", "import numpy").stdout != talk(folder, "x = 1\n").stdout


def test_a_model_without_a_template_is_told_in_one_line():
    done = talk(str(pair.target_folder()), "hello\n")
    assert done.exit_code == 2
    assert "no chat template" in done.stderr
