"""The sequential test: false alarms, power, names from samples, and its two bounds against simulation."""

import numpy as np
import pytest

from polydraft import conformance
from polydraft.conformance.enumeration import signatures
from polydraft.conformance.mistakes import catalogue
from polydraft.conformance.sample_test import SAMPLED_TABLES
from polydraft.conformance.samplers import Rejection
from polydraft.conformance.sequential import Evidence
from polydraft.conformance.steps import DraftSetting
from polydraft.testing import Tables, target_text_probs

CHAIN = DraftSetting((-1, 0))
SIBLINGS = DraftSetting((-1, 0, 0))


class Numbers:
    """Uniforms of a seed."""

    def __init__(self, seed):
        self._rng = np.random.default_rng(seed)

    def __call__(self):
        return self._rng.random()


def seeded(sampler):
    return lambda p, q, tokens, seed: sampler(p, q, tokens, Numbers(seed))


def evidence_of(setting):
    tables = [Tables(3, seed) for seed in SAMPLED_TABLES]
    length = setting.depth + 1
    known = signatures(setting, tables, drafts=True)
    flat = {name: [probs.ravel() for probs in rows] for name, rows in known.items()}
    return Evidence([target_text_probs(case, length).ravel() for case in tables], flat)


def looked_at(evidence, truth, rng, *, batches, size):
    """Samples of these distributions in batches, with a look at each."""
    for _ in range(batches):
        for case, probs in enumerate(truth):
            evidence.add(case, rng.choice(len(probs), size=size, p=probs / probs.sum()))
    return evidence


@pytest.mark.parametrize("level", [0.2, 0.05])
def test_a_right_sampler_is_accused_no_oftener_than_stated_however_often_one_looks(level):
    rng = np.random.default_rng(3)
    base = evidence_of(CHAIN)
    runs = 300
    alarms = 0
    for _ in range(runs):
        evidence = Evidence(base.expected, base.mistakes)
        looked_at(evidence, base.expected, rng, batches=20, size=50)
        alarms += evidence.p_value <= level
    assert alarms <= runs * level + 2 * np.sqrt(runs * level * (1 - level))
    assert level < 0.1 or alarms > 0  # it is no test that never says anything


def test_the_bound_holds_and_the_p_value_falls_where_the_distribution_is_another():
    rng = np.random.default_rng(4)
    base = evidence_of(CHAIN)
    outside = 0
    for _ in range(100):
        evidence = looked_at(Evidence(base.expected, {}), base.expected, rng, batches=1, size=400)
        outside += evidence.bound(0.1) < 0  # the truth is at distance 0
        assert evidence.deviation <= evidence.bound(0.1)
    assert outside == 0
    name, truth = next(iter(base.mistakes.items()))
    distance = max(np.abs(a - b).sum() / 2 for a, b in zip(truth, base.expected, strict=True))
    evidence = looked_at(Evidence(base.expected, {}), truth, rng, batches=20, size=500)
    assert evidence.p_value < 1e-6, name
    assert evidence.deviation == pytest.approx(distance, abs=0.02)
    assert evidence.deviation <= distance + 0.02 <= evidence.bound(0.01) + 0.02


def test_an_impossible_text_settles_it():
    evidence = Evidence([np.array([0.5, 0.5, 0.0])], {})
    evidence.add(0, np.array([2]))
    assert evidence.p_value == 0


@pytest.mark.parametrize("setting", [CHAIN, SIBLINGS], ids=["chain", "siblings"])
def test_every_known_mistake_is_named_from_samples_of_its_distribution(setting):
    """Right kind first in nearly all runs; what remains is mistakes whose distributions hardly differ on these rows."""
    rng = np.random.default_rng(5)
    base = evidence_of(setting)
    named = 0
    found = 0
    wrong = []
    for name, truth in base.mistakes.items():
        evidence = Evidence(base.expected, base.mistakes)
        looked_at(evidence, truth, rng, batches=20, size=500)
        if evidence.p_value > 1e-4:
            continue
        found += 1
        likelihoods = evidence.log_likelihoods
        likeliest = max(likelihoods, key=likelihoods.__getitem__)
        same = np.abs(np.concatenate(base.mistakes[likeliest]) - np.concatenate(truth)).sum() < 0.02
        named += likeliest.partition(" (")[0] == name.partition(" (")[0] or bool(same)
        wrong += [(name, likeliest)] if likeliest != name and not same else []
    assert found > 0.8 * len(base.mistakes)
    assert named > 0.95 * found, wrong


def test_right_samplers_pass_and_say_what_they_would_have_shown():
    report = conformance.of_seeds(seeded(Rejection(CHAIN)), parents=CHAIN.parents, resolution=0.1)
    assert report.status == "passed" and report.error < report.bound <= 0.1 and report.p_value > 1e-4
    short = conformance.of_seeds(seeded(Rejection(CHAIN)), parents=CHAIN.parents, most_samples=1000)
    assert short.status == "inconclusive" and short.bound > 0.05


@pytest.mark.parametrize(
    "name",
    [
        "target distribution in the place of the residual",
        "residual not normalised (the last token where nothing is found)",
        "equal siblings dropped",
        "siblings verified in the order of their draft probability",
        "temperature on the target's side alone (2)",
        "top-p after the test (0.5)",
    ],
)
def test_a_wrong_sampler_of_seeds_fails_and_is_named(name):
    (mistake,) = [mistake for mistake in catalogue(SIBLINGS) if mistake.name == name]
    report = conformance.of_seeds(seeded(mistake.sampler), parents=SIBLINGS.parents, resolution=0.02)
    assert report.status == "failed" and report.mistake == name, report
    assert report.samples < 50_000 and report.p_value <= 1e-4


def test_a_system_of_seeds_that_drafts_its_top_token_is_named():
    def step(target, draft, seed):
        rng = np.random.default_rng(seed)
        p, q = target(()), draft(())
        x = int(q.argmax())
        if rng.random() < p[x] / q[x]:
            return [x]
        rest = np.maximum(p - q, 0)
        return [rng.choice(len(p), p=rest / rest.sum())]

    report = conformance.of_seeded_steps(step, parents=(-1, 0))
    assert report.status == "failed" and "most probable tokens reported as draws" in report.candidates
