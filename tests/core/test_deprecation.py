"""Old public names work and warn."""

import warnings

import pytest
from typer.testing import CliRunner

from polydraft import DraftSampling, Engine, Method, TreeShape, deprecation
from polydraft.cli.main import app
from polydraft.config import EngineConfig
from polydraft.engine.stats import RequestStats
from polydraft.errors import UnknownNameError


@pytest.mark.parametrize(("old", "new"), deprecation.STATISTICS.items())
def test_old_statistics_are_read_with_a_warning(old, new):
    stats = RequestStats()
    stats.record(num_nodes=4, depth=4, num_accepted=2)
    with pytest.warns(DeprecationWarning, match=f"^{old} is deprecated; use {new}.$"):
        value = getattr(stats, old)
    assert value == getattr(stats, new) > 0


def test_an_old_field_is_taken_by_its_new_name():
    fields = {"name": "x", "title": "", "authors": "", "year": 2026, "arxiv": "", "shapes": frozenset({TreeShape.CHAIN})}
    with pytest.warns(DeprecationWarning, match="laws is deprecated; use draft_sampling"):
        method = Method(**fields, laws=frozenset({DraftSampling.IID}))
    assert method.draft_sampling == {DraftSampling.IID}


@pytest.mark.parametrize("option", [["--law", "nonsense"], ["--law=nonsense"]])
def test_an_old_option_is_the_new_one(option):
    with pytest.warns(DeprecationWarning, match="--law is deprecated; use --decoding"):
        result = CliRunner().invoke(app, ["generate", "x", *option])
    assert "unknown decoding 'nonsense'" in result.stderr


def test_new_names_do_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert deprecation.arguments(["--decoding", "nest", "x=--law"]) == ["--decoding", "nest", "x=--law"]
        assert deprecation.keywords({"decoding": 1}) == {"decoding": 1}


def test_the_old_name_of_the_draft_model_is_taken():
    with pytest.warns(DeprecationWarning, match="^draft is deprecated; use draft_model.$"):
        assert EngineConfig.of(draft="small").draft_model == "small"


def test_an_option_that_there_is_not_is_refused_with_the_nearest():
    with pytest.raises(UnknownNameError, match=r"unknown option 'draft_modle'; did you mean 'draft_model'\?"):
        Engine.from_pretrained("large", draft_modle="small")
