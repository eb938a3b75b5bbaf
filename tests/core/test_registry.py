import json
import shutil

import pytest

from polydraft import SamplingParams
from polydraft.core import Method
from polydraft.drafters.text.suffix import SuffixDrafter, SuffixStore
from polydraft.engine.api import Engine
from polydraft.errors import InvalidInputError, UnknownNameError
from polydraft.methods import registry
from tests.heads import oracle


@pytest.mark.parametrize("name", registry.names("verifier"))
def test_every_registered_verifier_loads_and_is_declared_under_its_name(name):
    rule = registry.verifier(name)
    assert callable(rule)
    assert isinstance(rule.info, Method)
    assert rule.info.name == name
    assert rule.info.draft_sampling
    assert rule.info.shapes


@pytest.mark.parametrize("name", registry.names("drafter"))
def test_every_registered_drafter_loads_and_makes_one_sibling_distribution_a_method(name):
    drafter = registry.drafter(name)
    assert all(
        callable(getattr(drafter, verb)) for verb in ("build", "start", "propose", "observe", "release")
    )
    assert drafter.methods
    assert all(len(method.draft_sampling) == 1 and method.shapes for method in drafter.methods)


def test_unknown_names_are_refused_with_the_nearest_known_one():
    with pytest.raises(UnknownNameError, match=r"unknown verifier 'blok'; did you mean 'block'\?"):
        registry.verifier("blok")
    with pytest.raises(UnknownNameError, match="unknown drafter 'zzz'; Known: "):
        registry.drafter("zzz")


def test_options_that_a_constructor_takes_by_place_are_known_too():
    store = SuffixStore(max_tokens=100)
    made = Engine.embedded(drafter="suffix", drafter_options={"store": store, "depth": 5}, max_num_seqs=1)
    assert isinstance(made.drafter, SuffixDrafter)
    assert made.drafter.store is store and made.drafter.depth == 5


@pytest.mark.parametrize(
    ("drafter", "options", "said"),
    [
        (
            "ngram",
            {"index": "code.trigram"},
            r"no such option. Leave the index out, or name .*: trigram, retrieval, mixture",
        ),
        (
            "model",
            {"widht": 3},
            r"the option widht='3' was given to the drafter 'model', .* Expected one of: kind\.",
        ),
        ("suffix", {"dept": 3}, r"no such option. Expected one of: .*depth, factor, .*store"),
        ("trigram", {"itrations": 3}, r"Expected one of: .*index, iterations"),
        ("slem:chain", {}, r"slem:chain was given; the drafter 'slem' has no kinds. Use 'slem'"),
        ("mixture:ngram:long,suffix", {}, r"ngram:long was given"),
        (
            "mixture",
            {"sources": ["ngram", ("trigram", {"dept": 1})]},
            r"the option dept='1' was given to the drafter 'trigram'",
        ),
    ],
)
def test_an_option_that_a_drafter_does_not_have_is_refused_with_those_it_has(drafter, options, said):
    with pytest.raises(InvalidInputError, match=said):
        Engine.embedded(drafter=drafter, drafter_options=options, max_num_seqs=1)


@pytest.mark.parametrize(
    ("kind", "table"), [("verifier", registry.VERIFIERS), ("drafter", registry.DRAFTERS)]
)
def test_names_list_all_that_is_built_in(kind, table):
    assert set(table) <= set(registry.names(kind))


def test_methods_of_other_packages_are_found_through_entry_points(tmp_path, monkeypatch):
    (tmp_path / "plugged.py").write_text("from polydraft.verifiers.match import match as rule\n")
    info = tmp_path / "plugged-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugged\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[polydraft.verifiers]\nplugged = plugged:rule\n")
    monkeypatch.syspath_prepend(tmp_path)
    registry._plugins.cache_clear()
    try:
        assert "plugged" in registry.names("verifier")
        assert registry.verifier("plugged") is registry.verifier("match")
    finally:
        registry._plugins.cache_clear()


OUTSIDE = '''
"""A head of another package: EAGLE-3 in a layout of its own."""

from polydraft.heads.eagle import EagleDrafter
from polydraft.heads.eagle.checkpoint import EagleCheckpoint
from polydraft.methods.papers import method


class OutsideCheckpoint(EagleCheckpoint):
    kind = "outside"
    FIELDS = EagleCheckpoint.FIELDS | {"outside_version"}

    @classmethod
    def reads(cls, settings):
        return "outside_version" in settings


class OutsideDrafter(EagleDrafter):
    methods = (method("outside", "A head from outside", "2503.01840", EagleDrafter.methods[0].draft_sampling, EagleDrafter.methods[0].shapes),)
    checkpoint = OutsideCheckpoint
'''


def test_a_head_of_another_package_reads_its_own_folders_and_drafts(tmp_path, monkeypatch):
    from polydraft.heads.folder import kind_of

    (tmp_path / "outside.py").write_text(OUTSIDE)
    info = tmp_path / "outside-1.0.dist-info"
    head = tmp_path / "head"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outside\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[polydraft.heads]\noutside = outside:OutsideDrafter\n")
    monkeypatch.syspath_prepend(tmp_path)
    registry._plugins.cache_clear()
    try:
        shutil.copytree(oracle.folder("speculators-eagle3-norm"), head)
        assert kind_of(head) == "eagle"
        said = json.loads((head / "config.json").read_text())
        (head / "config.json").write_text(json.dumps(said | {"outside_version": 1}))
        assert kind_of(head) == "outside" and "outside" in registry.names("drafter")
        engine = Engine.of(oracle.target(""), drafter="auto", drafter_options={"weights": head}, depth=2)
        (result,) = engine.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
        assert engine.drafter.info.name == "outside" and result.stats.drafted_tokens > 0
    finally:
        registry._plugins.cache_clear()
