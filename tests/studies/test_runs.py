"""Every study runs with `--quick` and writes its table."""

import json
import shutil
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from polydraft.bench.llama_cpp import write_gguf
from polydraft.models import pair
from polydraft.models.load import load_tokenizer
from polydraft.models.torch.module import load_module
from tests.server.test_formats import BODIES, FOOT, HEAD
from tests.studies.test_commands import DESCRIBED, study_of

ROOT = Path(__file__).parents[2]
TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"

RUNS = {
    "bench_picture": "{report}",
    "equal_bits": "--model {draft} --format int4 --way none --way ngram@1x3 --json {out}/bits.json",
    "inflate": "2 --out {out}",
    "long_contexts": "--model {target} --out {out}/lengths.csv",
    "gallery": "--out {out}",
    "never_slower": "--out {out}/turns.csv",
    "passes": "--size 3M",
    "policy": "",
    "profile": "",
    "prompt_rounding": "{gguf} --prompts {questions} --out {out}/table.md",
    "spec_bench": "--model {chat} --drafter ngram --prompts {questions} --out {out}",
    "step_time": "",
    "threads": "--model {target} --threads 1",
    "tool_formats": "--templates {templates} --out {out}",
    "yardstick": "--model {target} --prompts {questions} --way ngram --out {out}",
}
"""Options of each, beside `--quick` where it has it."""
SLOW = {
    "images": "--out {out}",
    "rules": "--out {out}",
    "one_pass": "--model tests/models/oracle_gguf/qwen35-mtp.gguf --drafter mtp --prompts {questions} --out {out}",
    "shapes": "tiny --folder {out}",
    "limits": "--out {out} --rule greedy_traversal --node-contexts 2",
    "drafters": "--out {out}",
    "batches": "--model {target}",
    "load": "--model embedded --threads 1 --out {out}/load.md",
    "mutants": "--out {out}",
    "neighbours": "--context 100 --rounds 1 --seconds 2 --only none --out {out}/table.md",
    "same_file": "--model {gguf} --prompts {questions} --max-tokens 8 --count 1 --threads 1 --temperature 0 --out {out}/page.md",
    "scaling": "--out {out}",
    "unchanged": "record {out}/before.json",
}
"""Those that take more than some seconds."""
NOT_RUN = {
    "audited": "two minutes of enumeration; `tests/conformance/test_audited.py` tests its parts",
    "audits": "servers of llama.cpp with a model that is downloaded; `tests/check/test_audit.py` tests what it calls",
    "clients": "programs of others, which are installed for it",
    "embedded_pair": "hours of training; its parts are tested beside",
    "first_start": "a machine on which nothing is compiled",
    "gaps": "a head of a model that is downloaded; `tests/studies/test_gaps.py` tests its parts",
    "followups": "a server that is killed and started again, with a model that is downloaded",
    "inside_vllm": "vLLM, whose environment `make vllm` makes",
    "peers": "a build of llama.cpp",
    "repeats": "a chat model and the history of the repository; `tests/drafters/test_state_lookup.py` tests the drafter",
    "replicas": "Ray",
    "seq2seq": "training, with message catalogues that are installed for it; its parts are tested beside",
    "serving": "a running server with a chat model",
    "soak": "ten minutes",
    "specdec_bench": "a client of NVIDIA's; `tests/studies/test_specdec_bench.py` tests the adapter, and runs the client where it is",
    "speed_bench": "a client of llama.cpp's source; `tests/studies/test_speed_bench.py` runs it where that is",
}
"""Why the others are not run."""
WITHOUT_QUICK = ("bench_picture", "inflate", "neighbours", "same_file")


def test_every_study_is_run_or_says_why_not():
    assert set(DESCRIBED) == RUNS.keys() | SLOW.keys() | NOT_RUN.keys()


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """Files that the options name: the embedded pair as folders, with a chat template, as a GGUF file; questions; a report."""
    folder = tmp_path_factory.mktemp("studies")
    target = pair.target_folder()
    shutil.copytree(target, folder / "chat")
    settings = json.loads((folder / "chat" / "tokenizer_config.json").read_text())
    (folder / "chat" / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": TEMPLATE}))
    (folder / "questions.jsonl").write_text('{"prompt": "def f(x):", "category": "code"}\n' * 2)
    shutil.copy(ROOT / "docs" / "results" / "temperature-0.json", folder / "report.json")
    (folder / "templates").mkdir()
    (folder / "templates" / "tags.jinja").write_text(
        HEAD + BODIES["tags"].replace("\n", "{{ '\\n' }}") + FOOT
    )
    draft = str(pair.draft_folder())
    write_gguf(load_module(draft, device="cpu"), load_tokenizer(draft), folder / "draft.gguf", "Q8_0")
    return {
        "target": target,
        "draft": draft,
        "chat": folder / "chat",
        "gguf": folder / "draft.gguf",
        "questions": folder / "questions.jsonl",
        "templates": folder / "templates",
        "report": folder / "report.json",
    }


@pytest.mark.parametrize("name", [*RUNS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_a_study_runs_and_writes_its_table(name, places, tmp_path, monkeypatch):
    if name == "shapes":
        pytest.importorskip("xllamacpp")
    options = (RUNS | SLOW)[name].format(**places, out=tmp_path / "out").split()
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path)
    study = study_of(name)
    app = getattr(study, "app", None)
    if app is None:
        app = typer.Typer()
        app.command()(study.main)
    done = CliRunner().invoke(app, [*options, *([] if name in WITHOUT_QUICK else ["--quick"])])
    assert done.exit_code == 0, done.output or done.exception
    assert done.stdout.strip() or "wrote" in done.stderr
    assert all(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file())
