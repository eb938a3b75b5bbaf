"""What a release and a repository's host read: workflows, forms, hooks, citation, changelog; nothing in them is missing or made up."""

import importlib.util
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

import polydraft
from polydraft.models.store.catalogue import MODELS
from tests.docs import citation_file
from tests.support.commands import commands as commands_offered
from tests.test_constraints import PYTHONS

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
FORMS = [ROOT / f".github/ISSUE_TEMPLATE/{name}.yml" for name in ("bug", "method")]
HOOKS = ROOT / ".pre-commit-config.yaml"
TARGETS = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
VARIABLES = set(re.findall(r"^([A-Z_]+) \?=", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
ADDRESSES = {"https://download.pytorch.org/whl/cpu"}
"""That the files may name."""
ACTIONS = ("actions/", "pypa/gh-action-pypi-publish@")


def read(file: Path) -> Any:
    return yaml.safe_load(file.read_text(encoding="utf-8"))


def steps(workflow: Path) -> list[dict[str, Any]]:
    return [step for job in read(workflow)["jobs"].values() for step in job["steps"]]


def check_command(line: str) -> None:
    """A command of a workflow names make targets, variables, modules and commands that exist."""
    program, *words = shlex.split(line)
    if program == "make":
        for word in words:
            known = VARIABLES if "=" in word else TARGETS
            assert word.partition("=")[0] in known, word
    else:
        assert (program, words[0]) == ("python", "-m"), line
        assert importlib.util.find_spec(words[1]) is not None, line
        assert words[1] != "polydraft" or words[2] in commands_offered(), line


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda file: file.stem)
def test_workflows_run_what_exists(workflow):
    for step in steps(workflow):
        assert ("run" in step) != ("uses" in step)
        for line in step.get("run", "").splitlines():
            check_command(line)
        assert step.get("uses", ACTIONS[0]).startswith(ACTIONS)


@pytest.mark.parametrize(
    "line", ["make no-such-target", "make test NO_SUCH=1", "python -m polydraft no-such", "curl -s somewhere"]
)
def test_a_command_that_does_not_exist_is_found(line):
    with pytest.raises(AssertionError):
        check_command(line)


def test_the_tests_run_on_every_python_and_system_that_the_metadata_names():
    jobs = read(ROOT / ".github/workflows/tests.yml")["jobs"]
    matrix = jobs["make-test"]["strategy"]["matrix"]
    assert tuple(matrix["python"]) == PYTHONS
    machines = {*matrix["machine"], *(more["machine"] for more in matrix["include"])}
    machines |= {job["runs-on"] for job in jobs.values()}
    kinds = {"ubuntu-24.04", "ubuntu-24.04-arm", "macos-15", "windows-2025", "${{ matrix.machine }}"}
    assert machines == kinds
    classifiers = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert all(f'"Programming Language :: Python :: {python}"' in classifiers for python in PYTHONS)


def test_only_the_job_that_publishes_may_ask_the_index_for_a_token():
    jobs = read(ROOT / ".github/workflows/release.yml")["jobs"]
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert "permissions" not in jobs["build"]
    assert jobs["publish"]["needs"] == "build"


@pytest.mark.parametrize("form", FORMS, ids=lambda file: file.stem)
def test_forms_have_what_github_asks_for(form):
    whole = read(form)
    assert {"name", "description", "body"} <= whole.keys()
    fields = [field for field in whole["body"] if field["type"] != "markdown"]
    assert all(field["attributes"]["label"] for field in fields)
    ids = [field["id"] for field in fields]
    assert len(ids) == len(set(ids))
    assert {field["type"] for field in fields} <= {"input", "textarea", "dropdown", "checkboxes"}


def test_hooks_run_what_make_lint_runs():
    (repository,) = read(HOOKS)["repos"]
    assert repository["repo"] == "local"
    recipe = re.search(
        r"^lint:\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert recipe is not None
    linters = [line.strip().replace("$(BIN)", ".venv/bin") for line in recipe[1].splitlines()]
    assert [hook["entry"] for hook in repository["hooks"]] == linters


@pytest.mark.parametrize(
    "file", [*WORKFLOWS, *FORMS, HOOKS, ROOT / "SECURITY.md", ROOT / "pyproject.toml"], ids=lambda f: f.name
)
def test_no_file_names_an_address_that_nobody_has(file):
    text = file.read_text(encoding="utf-8")
    assert set(re.findall(r"https?://[^\s\"'<>)]+", text)) <= ADDRESSES
    assert not re.search(r"[\w.]+@[\w-]+\.\w{2,}", text)  # no mail either


def test_security_links_lead_somewhere():
    links = re.findall(r"\]\(([^)#]+)", (ROOT / "SECURITY.md").read_text(encoding="utf-8"))
    assert links and all((ROOT / link).exists() for link in links)


def test_the_citation_file_is_what_citation_prints():
    assert citation_file.FILE.read_text(encoding="utf-8") == citation_file.text(), (
        "run `python -m tests.docs.tables`"
    )


def test_the_citation_file_has_every_paper_and_this_version():
    whole = read(citation_file.FILE)
    assert {"cff-version", "message", "title", "authors"} <= whole.keys()
    assert whole["version"] == polydraft.__version__
    assert len(whole["references"]) == citation_file.printed().count("archivePrefix")
    assert all(paper["authors"] and isinstance(paper["year"], int) for paper in whole["references"])


def test_the_changelog_has_this_version_before_older_ones():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## \[(.+?)\]", text, re.MULTILINE)
    assert headings[:2] == ["Unreleased", polydraft.__version__]
    versions = [tuple(map(int, heading.split("."))) for heading in headings[1:]]
    assert versions == sorted(versions, reverse=True)


def test_the_first_command_of_the_readme_is_one_that_the_release_can_run():
    from deploy.release_check import first_command

    words = first_command((ROOT / "README.md").read_text(encoding="utf-8"))
    assert words[:2] == ["polydraft", "generate"]
    assert words[words.index("--model") + 1] in MODELS
