"""The readable samplers and their enumeration against the verdicts of the verifiers; samplers that others would write, right and wrong."""

import numpy as np
import pytest
import torch

from polydraft import conformance
from polydraft.conformance import branching
from polydraft.conformance.enumeration import blocks_of_mistake, signatures
from polydraft.conformance.mistakes import Mistake, catalogue
from polydraft.conformance.samplers import BlockVerification, Rejection
from polydraft.conformance.steps import DraftSetting, blocks_of_sampler, can_draft, cases, text_probs
from polydraft.core import DraftSampling
from polydraft.errors import InvalidInputError
from polydraft.methods.registry import verifier
from polydraft.testing import Tables, enumerate_outputs, target_text_probs

IID, WOR, POINT = DraftSampling.IID, DraftSampling.WITHOUT_REPLACEMENT, DraftSampling.POINT_MASS
SETTINGS = {
    "chain": DraftSetting((-1, 0, 1)),
    "siblings": DraftSetting((-1, 0, 0)),
    "distinct siblings": DraftSetting((-1, 0, 0), WOR),
    "top tokens": DraftSetting((-1, 0, 0), POINT),
    "tree": DraftSetting((-1, 0, 0, 1)),
    "tree of distinct siblings": DraftSetting((-1, 0, 0, 1, 1), WOR),
}
RULES = {
    "chain": "speculative",
    "siblings": "recursive",
    "distinct siblings": "recursive_wor",
    "top tokens": "match",
    "tree of distinct siblings": "recursive_wor",
}


def accepted(setting, case, sampler):
    """E[accepted tokens] + 1."""
    return sum(len(block) * chance for block, chance in blocks(setting, case, sampler).items())


def blocks(setting, case, sampler):
    def outcomes(p, q, tokens):
        return branching.outcomes(lambda source: sampler(p, q, tokens, source))

    return blocks_of_sampler(setting, case, outcomes)


@pytest.mark.parametrize("name", SETTINGS)
def test_recursive_rejection_is_lossless(name):
    report = conformance.of_uniforms(
        Rejection(SETTINGS[name]), parents=SETTINGS[name].parents, sampling=SETTINGS[name].sampling
    )
    assert report.status == "passed" and report.error < 1e-14 and report.mistake is None


@pytest.mark.parametrize("name", RULES)
def test_recursive_rejection_accepts_what_the_verifiers_of_that_name_accept(name):
    setting = SETTINGS[name]
    for seed in (0, 4, 5):
        case = Tables(4, seed)
        theirs = enumerate_outputs(
            verifier(RULES[name]), case.target, case.draft, sampling=setting.sampling, parents=setting.parents
        )
        ours = accepted(setting, case, Rejection(setting))
        lost = name == "top tokens"  # an extra token that was drafted counts as accepted there
        assert ours == pytest.approx(theirs.block_efficiency, abs=1e-12) or lost
        assert ours <= theirs.block_efficiency + 1e-12


@pytest.mark.parametrize("seed", range(6))
def test_the_readable_block_rule_is_block_verification(seed):
    setting = DraftSetting((-1, 0, 1, 2))
    case = Tables(3, seed)
    theirs = enumerate_outputs(verifier("block"), case.target, case.draft, parents=setting.parents)
    assert accepted(setting, case, BlockVerification()) == pytest.approx(theirs.block_efficiency, abs=1e-12)
    found = text_probs(case, blocks(setting, case, BlockVerification()), 4)
    assert found == pytest.approx(target_text_probs(case, 4), abs=1e-14)


# Samplers in the words of others


def leviathan(p, q, tokens, rng):
    """In NumPy, all uniforms at once, as papers write it."""
    gamma = len(tokens)
    at = np.arange(gamma)
    ratio = np.divide(p[at, tokens], q[at, tokens])
    rejected = np.flatnonzero(rng.random(gamma) > ratio)
    n = int(rejected[0]) if len(rejected) else gamma
    row = np.maximum(p[n] - q[n], 0) if n < gamma else p[n]
    return n, rng.choice(len(row), p=row)


def module(p, q, tokens):
    """In PyTorch, as a library writes it."""
    at = torch.arange(len(tokens))
    ratio = p[at, tokens] / q[at, tokens]
    accepted = torch.rand_like(ratio) <= ratio
    n = int(accepted.long().cumprod(0).sum())
    row = (p[n] - q[n]).clamp(min=0) if n < len(tokens) else p[n]
    return n, torch.multinomial(row, 1)


def racing(p, q, tokens):
    """In PyTorch, the extra token by exponential clocks."""
    at = torch.arange(len(tokens))
    ratio = p[at, tokens] / q[at, tokens]
    accepted = ratio >= torch.rand(len(tokens))
    n = int(accepted.long().cumprod(0).sum())
    row = (p[n] - q[n]).clamp(min=0) if n < len(tokens) else p[n]
    return n, (row / torch.empty_like(row).exponential_()).argmax(dim=-1)


def test_samplers_of_numpy_and_pytorch_pass():
    assert conformance.of_uniforms(leviathan, parents=(-1, 0, 1, 2)).status == "passed"
    for sampler in (module, racing):
        report = conformance.of_uniforms(conformance.with_uniforms(sampler), arrays=torch.from_numpy)
        assert report.status == "passed" and report.error < 1e-12


def test_a_sampler_in_float32_passes_with_its_tolerance_alone():
    def single(p, q, tokens):
        return module(p.float(), q.float(), tokens)

    sampler = conformance.with_uniforms(single)
    tolerance = conformance.TOLERANCE_OF_FLOAT32
    assert conformance.of_uniforms(sampler, arrays=torch.from_numpy, tolerance=tolerance).status == "passed"
    assert conformance.of_uniforms(sampler, arrays=torch.from_numpy).status == "failed"


def compiled(p, q, tokens, u):
    """Numbers in, numbers out."""
    for i, x in enumerate(tokens):
        if u[i] >= p[i, x] / q[i, x]:
            rest = np.maximum(p[i] - q[i], 0)
            return i, int(np.searchsorted(rest.cumsum() / rest.sum(), u[len(tokens)], side="right"))
    return len(tokens), min(
        int(np.searchsorted(p[-1].cumsum(), u[len(tokens)], side="right")), p.shape[1] - 1
    )


def test_a_sampler_of_an_array_of_uniforms_is_enumerated_by_bisection():
    report = conformance.of_array(compiled, 3)
    assert report.status == "passed" and report.error < 1e-10
    wrong = conformance.of_array(lambda p, q, tokens, u: compiled(p, q, tokens, u[[0, 1, 0]]), 3)
    assert wrong.mistake == "one uniform for test and extra token" or wrong.status == "failed"


# Mistakes written otherwise than those of the catalogue


def resample(p, q, tokens, rng):
    n, token = leviathan(p, q, tokens, rng)
    return (n, token) if n == len(tokens) else (n, rng.choice(p.shape[1], p=p[n]))


def cut_sum(p, q, tokens, rng):
    """A residual that is searched as if it summed to one."""
    for i, x in enumerate(tokens):
        if rng.random() * q[i, x] > p[i, x]:
            rest = np.maximum(p[i] - q[i], 0).cumsum()
            return i, min(int(np.searchsorted(rest, rng.random(), side="right")), p.shape[1] - 1)
    return len(tokens), rng.choice(p.shape[1], p=p[-1])


def warm_target(p, q, tokens, rng):
    warm = p ** (1 / 0.7)
    return leviathan(warm / warm.sum(-1, keepdims=True), q, tokens, rng)


def slightly_warm_draft(p, q, tokens, rng):
    """A strength that the catalogue has not."""
    warm = q ** (1 / 0.6)
    return leviathan(p, warm / warm.sum(-1, keepdims=True), tokens, rng)


def cut_extra(p, q, tokens, rng):
    """Top-p 0.8 of the extra token, after a test without it."""
    cut = []
    for n in range(len(p)):
        row = np.maximum(p[n] - q[n], 0) if n < len(q) else p[n].copy()
        total = row.sum()
        for x in np.argsort(row)[: len(row) - 1]:
            if row.sum() - row[x] >= 0.8 * total - 1e-12:
                row[x] = 0
        cut.append(row)
    n, _ = leviathan(p, q, tokens, rng)
    return n, rng.choice(p.shape[1], p=cut[n] if cut[n].sum() else p[n])


def clamped(p, q, tokens, rng):
    """Block verification with min(1, p/q) multiplied."""
    at = np.arange(len(tokens))
    w = np.concatenate([[1.0], np.minimum(p[at, tokens] / q[at, tokens], 1).cumprod()])
    if rng.random() < w[-1]:
        return len(tokens), rng.choice(p.shape[1], p=p[-1])
    for i in range(len(tokens) - 1, 0, -1):
        rest = np.maximum(w[i] * p[i] - q[i], 0)
        if rng.random() < rest.sum() / (rest.sum() + 1 - w[i]):
            return i, rng.choice(p.shape[1], p=rest)
    return 0, rng.choice(p.shape[1], p=np.maximum(p[0] - q[0], 0))


CHAIN_MISTAKES = {
    resample: "target distribution in the place of the residual",
    cut_sum: "residual not normalised (the last token where nothing is found)",
    warm_target: "temperature on the target's side alone (0.7)",
    cut_extra: "top-p after the test (0.8)",
    clamped: "block verification with each factor clamped",
}


@pytest.mark.parametrize("sampler", CHAIN_MISTAKES, ids=lambda sampler: sampler.__name__)
def test_a_mistake_of_a_chain_is_named(sampler):
    report = conformance.of_uniforms(sampler)
    assert report.status == "failed"
    assert report.mistake == CHAIN_MISTAKES[sampler], report
    assert report.nearest.distance < 0.2  # tokens of equal probability are cut in another order
    assert CHAIN_MISTAKES[sampler] in str(report) and report.to_dict()["mistake"] == report.mistake


def test_a_mistake_of_another_strength_is_named_by_the_nearest():
    report = conformance.of_uniforms(slightly_warm_draft)
    assert report.mistake in {f"temperature on the draft's side alone ({t})" for t in (0.5, 0.7)}
    assert 0.02 < report.nearest.distance < 0.5


def of_siblings(p, q, tokens, rng, *, sort=False, unique=False, update=True, distinct=False):
    """Siblings of one node, as published code has them."""
    order = list(range(len(tokens)))
    order = sorted(order, key=lambda i: -q[i, tokens[i]]) if sort else order
    r, c, seen = p[0], q[0].copy(), set()
    for i in order:
        x = int(tokens[i])
        if unique and x in seen:
            continue
        seen.add(x)
        if rng.random() * c[x] < (r if update else p[0])[x]:
            return i + 1, rng.choice(p.shape[1], p=p[i + 1])
        r = np.maximum(r - c, 0)
        r = r / r.sum() if r.sum() else r
        if distinct:
            c[x] = 0
            c = c / max(c.sum(), 1e-300)
    return 0, rng.choice(p.shape[1], p=r if r.sum() else p[0])


@pytest.mark.parametrize(
    ("options", "sampling", "name"),
    [
        ({"sort": True}, IID, "siblings verified in the order of their draft probability"),
        ({"unique": True}, IID, "equal siblings dropped"),
        ({"update": False}, IID, "each sibling tested against the whole target"),
        ({}, WOR, "distinct siblings verified as iid ones"),
        ({"distinct": True, "sort": True}, WOR, "siblings verified in the order of their draft probability"),
    ],
    ids=["sorted", "unique", "not updated", "iid for distinct", "distinct and sorted"],
)
def test_a_mistake_of_siblings_is_named(options, sampling, name):
    def sampler(p, q, tokens, rng):
        return of_siblings(p, q, tokens, rng, **options)

    report = conformance.of_uniforms(sampler, parents=(-1, 0, 0), sampling=sampling)
    assert report.mistake == name, report


@pytest.mark.parametrize("sampling", [IID, WOR])
def test_siblings_without_a_mistake_pass(sampling):
    def sampler(p, q, tokens, rng):
        return of_siblings(p, q, tokens, rng, distinct=sampling is WOR)

    assert conformance.of_uniforms(sampler, parents=(-1, 0, 0), sampling=sampling).status == "passed"


def test_what_no_known_mistake_explains_is_not_named():
    def cyclic(p, q, tokens, rng):
        n, token = leviathan(p, q, tokens, rng)
        return n, (token + 1) % p.shape[1]

    report = conformance.of_uniforms(cyclic)
    assert report.status == "failed" and report.mistake is None and "none of the known" in str(report)


# Systems that draft for themselves


def system(pick):
    def step(target, draft, rng):
        p, q = target(()), draft(())
        x = pick(q, rng)
        if rng.random() < p[x] / q[x]:
            return [x, rng.choice(len(p), p=target((x,)))]
        return [rng.choice(len(p), p=np.maximum(p - q, 0))]

    return step


def test_a_system_that_drafts_what_it_reports_passes():
    assert (
        conformance.of_steps(system(lambda q, rng: rng.choice(len(q), p=q)), parents=(-1, 0)).status
        == "passed"
    )


def test_mistakes_of_drafts_are_named():
    top = conformance.of_steps(system(lambda q, rng: int(q.argmax())), parents=(-1, 0))
    assert top.mistake == "most probable tokens reported as draws"
    warm = conformance.of_steps(system(lambda q, rng: rng.choice(len(q), p=q**0.5)), parents=(-1, 0))
    assert warm.mistake == "drafts drawn at another temperature than reported (2)"


# The smallest example, the catalogue, what is refused


def test_the_example_is_the_smallest_case_and_shows_the_bias():
    example = conformance.of_uniforms(resample, parents=(-1, 0)).example
    p, q, emitted = map(np.array, (example.p, example.q, example.emitted))
    assert len(p) == 2 and example.path == ()
    overlap = np.minimum(p, q)
    assert emitted == pytest.approx(overlap + (1 - overlap.sum()) * p, abs=1e-12)


@pytest.mark.parametrize("name", SETTINGS)
def test_mistakes_of_the_catalogue_that_bias_have_signatures_of_their_own(name):
    setting = SETTINGS[name]
    tables = cases(setting)
    expected = np.concatenate([target_text_probs(case, setting.depth + 1).ravel() for case in tables])
    found = {
        mistake: np.concatenate([probs.ravel() for probs in rows])
        for mistake, rows in signatures(setting, tables, drafts=False).items()
    }
    biases = {mistake: np.abs(probs - expected).sum() for mistake, probs in found.items()}
    biased = [mistake for mistake, bias in biases.items() if bias > 1e-9]
    assert len(biased) >= (15 if setting.sampling is POINT else 30)
    same = [
        (one, other)
        for i, one in enumerate(biased)
        for other in biased[i + 1 :]
        if np.abs(found[one] - found[other]).sum() < 0.02 * biases[one]
        and one.partition(" (")[0] != other.partition(" (")[0]
    ]
    untested = {
        "residual of the wrong sign",
        "draft tokens accepted untested",
        "ratio of probabilities inverted",
        "typical acceptance",
    }
    assert all({*pair} <= untested for pair in same), same


def test_mistakes_of_drafts_come_with_drafters_alone():
    kinds = {mistake.kind for mistake in catalogue(SETTINGS["chain"])}
    more = {mistake.kind for mistake in catalogue(SETTINGS["chain"], drafts=True)}
    assert "most probable tokens reported as draws" in more - kinds
    assert all(
        mistake.in_drafts == (mistake.kind in more - kinds)
        for mistake in catalogue(SETTINGS["chain"], drafts=True)
    )


def test_a_right_sampler_as_a_mistake_would_show_no_bias():
    setting = SETTINGS["chain"]
    case = Tables(3, 0)
    found = text_probs(case, blocks_of_mistake(setting, case, Mistake("none", Rejection(setting))), 3)
    assert found == pytest.approx(target_text_probs(case, 3), abs=1e-14)


def test_cases_have_as_many_tokens_as_distinct_siblings_need():
    assert all(
        can_draft(SETTINGS["tree of distinct siblings"], case)
        for case in cases(SETTINGS["tree of distinct siblings"])
    )
    assert not can_draft(DraftSetting((-1, 0, 0, 0), WOR), Tables(2, 0))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: conformance.of_uniforms(leviathan, parents=(0, 1)), "expected -1 for the root"),
        (lambda: conformance.of_uniforms(leviathan, sampling=DraftSampling.LISTED), "expected IID"),
        (lambda: conformance.of_uniforms(lambda *given: (7, 0)), "last accepted node"),
        (lambda: conformance.of_steps(lambda *given: [0] * 9), "emitted 9 tokens"),
        (lambda: conformance.of_seeds(leviathan, level=2.0), "level=2.0"),
        (lambda: conformance.of_array(compiled, 0), "num_uniforms=0"),
    ],
)
def test_what_cannot_be_checked_is_refused(call, words):
    with pytest.raises(InvalidInputError, match=words):
        call()
