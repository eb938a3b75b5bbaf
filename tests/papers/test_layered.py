"""What every drafter promises, of those that run in a target's own layers and cache."""

from collections import Counter
from itertools import cycle

import numpy as np
import pytest
from scipy.stats import chi2

from polydraft import Engine, SamplingParams
from polydraft.drafters.model.kinds import KINDS
from polydraft.errors import IncompatibleError
from polydraft.methods import registry
from polydraft.verifiers import pairing
from tests.drafters.sessions import requests
from tests.engine.tables import TableModel
from tests.papers import layered

NAMES = ("early-exit", "hidden-transfer")
RULES = pairing.fitting(registry.drafter(NAMES[0]).methods[0])
PROMPTS = [[1, 2, 3, 1, 2], [4], [0, 0, 1, 0, 0]]
GREEDY = SamplingParams(temperature=0, max_tokens=24)


def options(name, model, folder):
    if name == "early-exit":
        return {"layer": 2}
    layered.transfer_net(model, folder)
    return {"weights": folder}


@pytest.fixture(scope="module")
def plain():
    return [r.token_ids for r in layered.engine(None, {}).generate(PROMPTS, GREEDY)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_greedy_text_is_the_targets_with_every_kind_of_draft(name, kind, plain, tmp_path):
    model = layered.target()
    results = layered.engine(name, {**options(name, model, tmp_path), "kind": kind}, model=model).generate(
        PROMPTS, GREEDY
    )
    assert [r.token_ids for r in results] == plain
    assert sum(r.stats.drafted_tokens for r in results) > 0
    assert [r.stats.drafter_error for r in results] == [None] * 3


@pytest.mark.parametrize(("name", "rule"), list(zip(cycle(NAMES), RULES, strict=False)))
def test_the_distribution_of_a_text_is_the_targets_with_every_verifier(name, rule, tmp_path):
    """Chi-square of two tokens in the middle of a text, with rounds before."""
    model = layered.target(V=3, seqs=128)
    count = 4
    start = [1, 2, 1, 0]
    made = layered.engine(name, options(name, model, tmp_path), rule, model=model)
    samples = made.generate([start], SamplingParams(max_tokens=count, n=127, seed=5, temperature=1.2))[
        0
    ].samples
    expected = layered.distribution(model, start, count, 1.2).sum((0, 1)).flatten() * len(samples)
    seen = Counter(s.token_ids[2] * 3 + s.token_ids[3] for s in samples)
    observed = np.array([float(seen[i]) for i in range(9)])
    assert chi2.sf(float(((observed - expected) ** 2 / expected).sum()), 8) > 1e-4


@pytest.mark.parametrize("name", NAMES)
def test_a_sampled_text_has_the_very_bits_of_its_logits_without_drafts(name, tmp_path):
    """Rows of the target have the same bits with and without drafts in its columns."""
    model = layered.target()
    params = SamplingParams(max_tokens=24, seed=3, logprobs=0)
    given = {**options(name, model, tmp_path), "kind": "coupled"}
    drafted = layered.engine(name, given, model=model).generate(PROMPTS, params)
    plain = layered.engine(None, {}, "race", model=model).generate(PROMPTS, params)
    for a, b in zip(drafted, plain, strict=True):
        assert a.token_ids == b.token_ids
        assert [t.logprob for t in a.samples[0].logprobs] == [t.logprob for t in b.samples[0].logprobs]


@pytest.mark.parametrize("name", NAMES)
def test_the_text_ends_at_end_of_sequence_inside_a_draft(name, plain, tmp_path):
    model = layered.target()
    eos = plain[0][-1]
    made = layered.engine(name, options(name, model, tmp_path), eos=(eos,), model=model).generate(
        PROMPTS[:1], GREEDY
    )[0]
    assert made.token_ids == plain[0][: plain[0].index(eos) + 1]
    assert made.finish_reason == "stop"


@pytest.mark.parametrize("name", NAMES)
def test_targets_without_compiled_layers_are_refused(name, tmp_path):
    given = options(name, layered.target(), tmp_path)
    with pytest.raises(IncompatibleError, match="backend='compiled'"):
        Engine.of(TableModel(), drafter=name, drafter_options=given)


@pytest.mark.parametrize("name", NAMES)
def test_requests_of_unknown_slots_are_refused(name, tmp_path):
    model = layered.target()
    drafter = registry.build_drafter(name, layered.parts(model), options(name, model, tmp_path))
    with pytest.raises(IncompatibleError, match="slot"):
        drafter.start(requests([1, 2]))
