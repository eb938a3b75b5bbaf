"""What README and docs show is run as it stands: Python blocks in order, and every line that begins with `$ polydraft`."""

import asyncio
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from polydraft.bench.llama_cpp import write_gguf
from polydraft.cli.main import app
from polydraft.methods.papers import PAPERS
from polydraft.models import pair
from polydraft.models.load import load_tokenizer
from polydraft.models.store import catalogue
from polydraft.models.torch.module import load_module
from polydraft.server.starting import Starting
from tests.docs import request_fields, tables
from tests.exactness import validity
from tests.support.commands import commands as commands_offered

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)


def blocks(page: Path, language: str) -> list[str]:
    return [text for kind, text in BLOCK.findall(page.read_text(encoding="utf-8")) if kind == language]


def commands(page: Path) -> list[str]:
    lines = (line.partition(" # ")[0] for text in blocks(page, "console") for line in text.splitlines())
    return [line[2:].rstrip() for line in lines if line.startswith("$ polydraft")]


COMMANDS = sorted({command for page in PAGES for command in commands(page)})

SERVE = "polydraft serve "
"""It runs until it is told to end."""


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """The embedded pair with a chat template as GGUF files in a cache: they stand for the models that are fetched by name."""
    cache = tmp_path_factory.mktemp("cache")
    (cache / "models").mkdir()
    for folder, size in ((pair.target_folder(), "1.5b"), (pair.draft_folder(), "0.5b")):
        words = load_tokenizer(str(folder))
        words.chat_template = "{% for m in messages %}# {{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
        write_gguf(load_module(str(folder), device="cpu"), words, cache / size)
    for name in catalogue.MODELS:
        (cache / "models" / f"{name}.gguf").hardlink_to(cache / ("0.5b" if "0.5b" in name else "1.5b"))
    return cache


@pytest.fixture
def models(tmp_path, monkeypatch, cache):
    """The pages' placeholders `my-model` and `my-draft` are folders here, `a.gguf` and others files, and models by name are other ones."""
    for name, model in catalogue.MODELS.items():
        size = (cache / "models" / f"{name}.gguf").stat().st_size
        monkeypatch.setitem(catalogue.MODELS, name, replace(model, num_bytes=size))
    monkeypatch.setenv("POLYDRAFT_CACHE", str(cache))
    (tmp_path / "my-model").symlink_to(pair.target_folder())
    (tmp_path / "my-draft").symlink_to(pair.draft_folder())
    for placeholder in ("a.gguf", "b.gguf", "c.gguf"):
        (tmp_path / placeholder).symlink_to(cache / "models" / "qwen2.5-coder-0.5b-instruct.gguf")
    (tmp_path / "module.py").write_text("import os\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "python")], ids=lambda p: p.name)
def test_python_blocks_run(page, models):
    namespace: dict = {}
    for number, block in enumerate(blocks(page, "python")):
        exec(compile(block, f"{page.name}, block {number + 1}", "exec"), namespace)


async def until_ready(app: Starting) -> None:
    """Run a server's application until its models are loaded."""
    events: asyncio.Queue[dict] = asyncio.Queue()
    events.put_nowait({"type": "lifespan.startup"})
    life = asyncio.create_task(app({"type": "lifespan"}, events.get, lambda _: asyncio.sleep(0)))
    while app.error is None and app.loading:
        await asyncio.sleep(0.01)
    events.put_nowait({"type": "lifespan.shutdown"})
    await life


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith(SERVE)])
def test_a_server_would_start(command, models, monkeypatch):
    monkeypatch.setattr("uvicorn.Server.run", lambda self, sockets: asyncio.run(until_ready(self.config.app)))
    done = CliRunner().invoke(app, [*shlex.split(command, comments=True)[1:], "--port", "0"])
    assert done.exit_code == 0 and "http://127.0.0.1:" in done.stderr, done.output


@pytest.mark.parametrize("command", [c for c in COMMANDS if not c.startswith(SERVE)])
def test_command_runs(command, models):
    done = CliRunner().invoke(app, shlex.split(command, comments=True)[1:])
    assert done.exit_code == 0, done.output
    assert done.stdout


def test_pages_have_something_to_run():
    assert len(COMMANDS) >= 4
    assert blocks(ROOT / "README.md", "python")


@pytest.mark.parametrize("mark", tables.TABLES)
def test_a_table_is_what_the_registry_says(mark):
    made = tables.TABLES[mark][1]
    assert tables.split(mark)[2] == made(), "run `python -m tests.docs.tables`"


def test_the_table_of_pairs_is_what_enumeration_says():
    assert tables.PAIRS.read_text(encoding="utf-8") == validity.csv_text(), (
        "run `python -m tests.docs.tables`"
    )


def test_the_table_of_request_fields_is_what_the_server_says():
    assert tables.REQUEST_FIELDS.read_text(encoding="utf-8") == request_fields.csv_text(), (
        "run `python -m tests.docs.tables`"
    )


def test_readme_installs_and_shows_python_and_a_measured_result_within_35_lines():
    head = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()[:35]
    places = [
        next(i for i, line in enumerate(head) if what in line)
        for what in ("pip install", "```python", "tokens/s")
    ]
    assert places == sorted(places)


def test_everything_that_readme_shows_as_code_is_run():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert {kind for kind, _ in BLOCK.findall(text)} <= {
        "python",
        "console",
        "text",
    } and "```\n\n" not in BLOCK.sub("", text)
    shown = [line for block in blocks(ROOT / "README.md", "console") for line in block.splitlines()]
    assert all(line.startswith(("$ polydraft ", "$ make ", "$ pip install ")) for line in shown)


MOST_WORDS = {"README.md": 900, "docs/results": 1000, "docs/reference": 2000, "docs": 1200}
"""Of a page, by the file or folder that its path begins with."""


def test_pages_have_at_most_so_many_words():
    pages = {str(page.relative_to(ROOT)): len(page.read_text(encoding="utf-8").split()) for page in PAGES}
    limits = {
        name: most for name in pages for start, most in reversed(MOST_WORDS.items()) if name.startswith(start)
    }
    assert len(limits) == len(pages) - 1  # all but CONTRIBUTING.md
    assert {name: pages[name] for name, most in limits.items() if pages[name] > most} == {}


def test_all_pages_but_the_reference_are_read_in_three_hours():
    pages = [page for page in (ROOT / "docs").rglob("*.md") if page.parent.name != "reference"]
    assert sum(len(page.read_text(encoding="utf-8").split()) for page in pages) < 40_500  # 220 words a minute


def test_links_between_pages_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_no_link_is_shown_as_a_file_name():
    for page in PAGES:
        shown = re.findall(r"\[([^\]]+)\]\([^)]+\)", page.read_text(encoding="utf-8"))
        assert not [text for text in shown if re.search(r"\.(?:md|json|csv)\b", text)], page.name


def test_a_paper_page_opens_with_authors_years_and_titles():
    for page in (ROOT / "docs" / "papers").glob("*.md"):
        head, _, text = page.read_text(encoding="utf-8").partition("**Claim.**")
        cited = re.findall(r"\d{4}\.\d{5}", "".join(re.findall(r"polydraft\.citation\((.*)\)", text)))
        for number, line in zip(cited, head.splitlines()[2:], strict=False):
            paper = PAPERS[number]
            assert f"({paper.year}). [{paper.title}](https://arxiv.org/abs/{number})" in line
            assert paper.authors.split(",")[0] in line.split("(")[0]


def test_constraints_pin_every_direct_dependency():
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    lists = re.findall(
        r"^(?:dependencies|torch|bench|theory|passages|parquet|distributed|docs|dev) = \[\n(.*?)^\]",
        project,
        re.DOTALL | re.MULTILINE,
    )
    wanted = set(re.findall(r'^ *"([A-Za-z0-9_.-]+)', "".join(lists), re.MULTILINE))
    pinned = set(
        re.findall(
            r"^([A-Za-z0-9_.-]+)==", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE
        )
    )
    wanted -= {"polydraft"}  # the development extra takes in other extras of this project
    assert (
        {"torch", "fastapi", "uvicorn", "llguidance", "pytest", "xllamacpp", "mkdocs-material"}
        <= wanted
        <= pinned
    )


def test_structure_shows_every_package_and_only_folders_that_exist():
    text = (ROOT / "docs" / "structure.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```text\n(src/polydraft/\n.*?)```", text, re.DOTALL)
    shown = set[str]()
    parents = dict[int, str]()
    for line in block.splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        names = re.match(r" *((?:[\w/]+(?:/|\.py) ?)+)", line)
        assert names is not None, line
        for name in names[1].split():
            parents[depth] = parents.get(depth - 1, "") + name
            shown.add(parents[depth])
    assert [path for path in shown if not (ROOT / path).exists()] == []
    packages = {f"{path.parent.relative_to(ROOT)}/" for path in (ROOT / "src" / "polydraft").glob("*/*.py")}
    assert packages <= shown


def test_the_journeys_pass_through_files_that_exist():
    text = (ROOT / "docs" / "structure.md").read_text(encoding="utf-8")
    files = re.findall(r"`([\w/]+\.py)`", text.partition("## Four journeys")[2].partition("## Layers")[0])
    assert len(files) > 20
    assert [file for file in files if not (ROOT / "src" / "polydraft" / file).exists()] == []


FOREIGN = {
    "--extra-index-url": "pip",
    "--max-num-batched-tokens": "vLLM",
    "--name": "docker",
    "--network": "docker",
    "--no-async-scheduling": "vLLM",
    "--speculative-config": "vLLM",
    "--only": "studies.inside_vllm",
    "--tasks": "lm_eval",
    "--tokens": "studies.inside_vllm",
    "--repetitions": "studies",
    "--contexts": "studies.limits",
    "--drafts": "studies.limits",
    "--node-contexts": "studies.limits",
    "--tree-contexts": "studies.limits",
    "--rule": "studies.limits",
    "--text": "studies.limits",
}
"""Options of other programs on pages for users, and whose they are."""


def test_every_option_on_a_page_for_users_exists():
    offered = {
        name
        for command in commands_offered().values()
        for p in command.params
        for name in (*p.opts, *p.secondary_opts)
    }
    known = offered | {"--help"} | FOREIGN.keys()
    pages = [
        ROOT / "README.md",
        ROOT / "CHANGELOG.md",
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "docs" / "use").glob("*.md"),
    ]
    for page in [*pages, *(ROOT / "docs" / "serve").glob("*.md")]:
        lines = page.read_text(encoding="utf-8").splitlines()
        if page.name == "coming-from.md":  # the last column of its tables is ours
            lines = [line.split("|")[-2] if line.startswith("|") else line for line in lines]
        named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", "\n".join(lines)))
        assert named <= known, f"{page.name}: {sorted(named - known)}"


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_a_first_page_shows_real_models_only(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    assert not re.search("100M|inflate|padded", text)


def test_one_page_says_which_drafter_for_what_and_others_link_to_it():
    pages = {page: page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("*.md")}
    assert [page.name for page, text in pages.items() if "Which drafter for what\n" in text] == [
        "drafters.md"
    ]
    linking = {page.name for page, text in pages.items() if "(drafters.md" in text}
    assert {"choosing.md", "index.md", "methods.md", "heads.md"} <= linking
