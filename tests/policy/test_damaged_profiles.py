"""Profiles that are cut, flipped or forged: refused with our error, or planned with; never another error."""

import json
import warnings
from contextlib import suppress
from dataclasses import replace
from random import Random

import pytest

from polydraft.drafters.model.paths import ModelDrafter
from polydraft.errors import InvalidInputError
from polydraft.methods.registry import verifier
from polydraft.policy import profile
from polydraft.policy.adaptive import AdaptivePolicy
from polydraft.policy.profile import Profile
from tests.engine.tables import TableModel
from tests.policy.planning import known, sequences
from tests.support.damage import cut, flipped, mutated

KNOWN = replace(known(), about={"x": [1]})


@pytest.fixture
def whole(tmp_path):
    KNOWN.save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json") == KNOWN
    return (tmp_path / "p.json").read_bytes()


def test_every_flipped_bit_and_every_cut_is_refused(tmp_path, whole):
    rng = Random(1)
    for damage in (flipped,) * 200 + (cut,) * 50:
        damaged = damage(whole.rstrip(), rng)
        (tmp_path / "p.json").write_bytes(damaged)
        with suppress(ValueError):
            if json.loads(damaged) == json.loads(whole):  # a blank became another, an e an E
                continue
        with pytest.raises(InvalidInputError, match="polydraft tune --save FILE"):
            Profile.load(tmp_path / "p.json")


def test_a_forged_profile_is_refused_or_planned_with(whole):
    said = KNOWN.to_dict()
    refused = 0
    for seed in range(200):
        try:
            forged = Profile.from_dict(mutated(said, Random(seed)))
        except InvalidInputError as error:
            refused += "polydraft tune" in str(error)
            continue
        for kind in ("paths", "top_k"):
            policy = AdaptivePolicy(forged)
            policy.prepare(TableModel(), ModelDrafter(TableModel(), kind), verifier("match"))
            assert all(budget.max_nodes >= 0 for budget in policy.budgets(sequences(2, temperature=0.5)))
    assert 100 < refused < 200


def test_a_damaged_cache_is_left_with_a_warning_and_mended_by_the_next_measurement(
    tmp_path, monkeypatch, whole
):
    monkeypatch.setenv("POLYDRAFT_CACHE", str(tmp_path / "cache"))
    profile.remember({"pair": 1}, KNOWN)
    (file,) = (tmp_path / "cache").iterdir()
    for seed in range(20):
        file.write_text(json.dumps(mutated(json.loads(whole), Random(seed))))
        monkeypatch.setattr(profile, "_known", {})
        with pytest.warns(UserWarning, match="the cached costs are not used, and learnt anew: profile"):
            assert profile.remembered({"pair": 1}) is None
        profile.remember({"pair": 1}, KNOWN)
        monkeypatch.setattr(profile, "_known", {})
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert profile.remembered({"pair": 1}) == KNOWN
