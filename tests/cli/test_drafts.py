"""Several draft models, options of drafters and draft trees on the command line."""

import json

import pytest
from typer.testing import CliRunner

from polydraft.cli.main import app
from polydraft.cli.serve import model_choices
from polydraft.config import EngineConfig
from polydraft.engine.plan import Plan, with_several
from polydraft.errors import IncompatibleError, InvalidInputError
from polydraft.models import pair

DRAFT = str(pair.draft_folder())
TARGET = str(pair.target_folder())
SHORT = ["--model", "embedded", "--max-tokens", "16", "--seed", "3", "--json"]


def generated(*options: str) -> dict:
    found = CliRunner().invoke(app, ["generate", "def f(x):", *SHORT, *options])
    assert found.exit_code == 0, found.output
    return json.loads(found.stdout)


def refused(*options: str) -> str:
    found = CliRunner().invoke(app, ["generate", "def f(x):", *SHORT, *options])
    assert found.exit_code != 0
    return str(found.exception) + found.output


def drafts_of(generated: dict, size: int) -> bool:
    """Whether every step but the last one, which is cut, drafted so many tokens."""
    statistics = generated["statistics"]
    return size * (statistics["steps"] - 1) <= statistics["drafted_tokens"] <= size * statistics["steps"]


def test_several_draft_models_draft_a_path_each():
    both = generated("--draft-model", DRAFT, "--draft-model", TARGET, "--depth", "2", "--num-paths", "2")
    assert both["engine"]["drafter"] == "several" and both["engine"]["lossless"]
    assert drafts_of(both, 4)
    assert generated("--draft-model", DRAFT)["engine"]["drafter"] == "model"


def test_several_draft_models_are_refused_beside_a_drafter_of_one():
    assert "several" in refused("--draft-model", DRAFT, "--draft-model", DRAFT, "--drafter", "model:chain")
    with pytest.raises(IncompatibleError, match="several"):
        Plan.of(EngineConfig(draft_model=DRAFT, further_draft_models=[DRAFT], drafter="ngram"))
    with pytest.raises(InvalidInputError, match="Move the first"):
        with_several(EngineConfig(further_draft_models=[DRAFT]))


def test_a_command_of_one_draft_model_refuses_two():
    found = CliRunner().invoke(app, ["check", "--draft-model", DRAFT, "--draft-model", DRAFT])
    assert found.exit_code != 0 and "expected it once" in str(found.exception) + found.output


def test_a_server_has_several_draft_models_for_each_of_its_models():
    first, second = model_choices(["a=x", "b=y"], None, ["b=p", "b=q"])
    assert (first.draft, first.further) == (None, ()) and (second.draft, second.further) == ("p", ("q",))


def test_a_draft_tree_is_drafted_as_it_is_given():
    tree = generated("--draft-tree", "3,2", "--drafter", "model")
    assert drafts_of(tree, 9)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--draft-tree", "3,x"], "number of children"),
        (["--draft-tree", "16,16,2"], "at most 255"),
        (["--draft-tree", "2", "--depth", "3"], "Drop one of them"),
        (["--draft-tree", "2,2", "--drafter", "model:chain"], "equal numbers of children"),
        (["--drafter", "ngram", "--drafter-option", "max_match=3"], "max_ngram"),
        (["--drafter", "none", "--drafter-option", "k=3"], "without drafts"),
    ],
)
def test_what_no_drafter_can_draw_is_refused(options, said):
    assert said in refused(*options)


def test_options_of_a_drafter_reach_it():
    assert "max_ngram=0" in refused("--drafter", "ngram", "--drafter-option", "max_ngram=0")
    assert generated("--drafter", "ngram", "--drafter-option", "max_ngram=2")["engine"]["drafter"] == "ngram"
