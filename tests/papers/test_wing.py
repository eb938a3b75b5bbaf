"""The wing of papers is registered as a plug-in from outside is, and the house stands without it."""

from importlib.metadata import Distribution
from pathlib import Path

import pytest

from polydraft import Engine, SamplingParams
from polydraft.errors import UnknownNameError
from polydraft.methods import registry
from tests.support.commands import commands

TABLE = Distribution.at(registry.WING).entry_points


def test_every_paper_of_the_wing_is_registered_by_the_table_of_the_wing():
    assert {point.group for point in TABLE} == set(registry.GROUPS.values())
    folders = {path.parent.name for path in Path(registry.WING).glob("*/__init__.py")}
    assert {point.module.split(".")[2] for point in TABLE} == folders
    for point in TABLE:
        point.load()


@pytest.fixture
def house(monkeypatch, tmp_path):
    """The package without its wing."""
    monkeypatch.setattr(registry, "WING", tmp_path)
    registry._plugins.cache_clear()
    yield
    registry._plugins.cache_clear()


def test_without_the_wing_its_names_are_unknown_and_the_rest_runs(house):
    for point in TABLE:
        kind = next(kind for kind, group in registry.GROUPS.items() if group == point.group)
        assert point.name not in registry.names(kind)
    with pytest.raises(UnknownNameError, match="unknown drafter 'amusd'"):
        registry.drafter("amusd")
    assert "generate" in commands() and not {"images", "index build"} & commands().keys()
    (result,) = Engine.embedded(drafter="ngram", max_num_seqs=1).generate(
        "import os", SamplingParams(max_tokens=4, temperature=0)
    )
    assert result.stats.generated_tokens == 4
