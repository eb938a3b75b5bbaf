"""The mistake of a server is named from its texts: wrong verifiers and drafters behind our own server, and right ones that nobody accuses."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from polydraft import Engine
from polydraft.check.audit import audit
from polydraft.check.remote import Completions
from polydraft.check.suspects import Suspects, arithmetic, emission, known, place_of, setting_of
from polydraft.check.wrong_drafters import DropsUnlikely, TopWithRow
from polydraft.conformance.enumeration import blocks_of_mistake
from polydraft.conformance.mistakes import Mistake
from polydraft.conformance.samplers import Rejection
from polydraft.conformance.steps import DraftSetting
from polydraft.core import DraftSampling
from polydraft.drafters.model.paths import ModelDrafter
from polydraft.methods.registry import verifier
from polydraft.models import load, pair
from polydraft.models.torch.module import load_module
from polydraft.testing import Tables
from polydraft.verifiers.lift.per_node import PerNode
from tests.server.conftest import serving
from tests.support import wrong_rules
from tests.support.wrong_rules import Wrong

CHAIN = DraftSetting((-1, 0))
IID = DraftSetting((-1, 0, 0))
DISTINCT = DraftSetting((-1, 0, 0), DraftSampling.WITHOUT_REPLACEMENT)
TARGET = str(pair.target_folder())


@pytest.fixture(scope="module")
def models():
    return tuple(
        load_module(str(folder), dtype="float32") for folder in (pair.target_folder(), pair.draft_folder())
    )


@pytest.fixture(scope="module")
def engine():
    return Engine.embedded(drafter="model:chain", depth=3, max_num_seqs=4, max_model_len=512)


def audited(
    engine,
    models,
    rule,
    *,
    kind="chain",
    depth=3,
    width=1,
    drafter=ModelDrafter,
    tokens=1400,
    known_draft=True,
):
    """The audit of a server whose verifier or drafter is this one."""
    judge, draft = models
    draft_model = engine.drafter.offers.model
    wrong = Engine.of(
        engine.target,
        tokenizer=engine.tokenizer,
        draft_model=draft_model,
        drafter=drafter(draft_model, kind, stop_ids=engine.eos_token_ids),
        verifier=rule,
        depth=depth,
        num_paths=width,
        eos_token_ids=engine.eos_token_ids,
    )
    tokenizer = load.load_tokenizer(TARGET)
    prompts = [load.encode(tokenizer, prompt.text) for prompt in pair.prompts()[:4]]
    setting, depths = setting_of(f"model:{kind}", depth, width)
    more = {"draft": draft, "suspects": Suspects(setting, depths)} if known_draft else {}
    with serving(wrong) as served:
        server = Completions(served.url, tokenizer)
        return audit(
            server, judge, prompts, temperature=1.0, max_tokens=24, tokens=tokens, eos_token_ids=(0,), **more
        )


# Without a server


@pytest.mark.parametrize("setting", [CHAIN, IID, DISTINCT], ids=["chain", "siblings", "distinct siblings"])
def test_emissions_are_those_of_the_enumerated_samplers(setting):
    case = Tables(4, 3)
    p = case.row("p", ())
    q = case.row("q", ())
    for mistake in [*known(setting), Mistake("none", Rejection(setting))]:
        accepted = np.zeros(4)
        replaced = np.zeros(4)
        for block, chance in blocks_of_mistake(setting, case, mistake).items():
            (accepted if len(block) == 2 else replaced)[block[0]] += chance
        for x in range(4):
            found = emission(mistake, place_of(p, q, x, 4), setting)
            assert found[:2] == pytest.approx((accepted[x], replaced[x]), abs=1e-12), mistake.name


def test_a_lossless_sampler_emits_the_target_wherever_a_step_stands():
    case = Tables(5, 1)
    for setting in (CHAIN, IID, DISTINCT):
        for x in range(5):
            place = place_of(case.row("p", ()), case.row("q", ()), x, 5)
            accepted, replaced, extra = emission(Mistake("none", Rejection(setting)), place, setting)
            assert accepted + replaced == pytest.approx(extra, abs=1e-12)
            assert extra == pytest.approx(place.p[place.at].sum(), abs=1e-12)


@pytest.mark.parametrize("setting", [CHAIN, IID, DISTINCT], ids=["chain", "siblings", "distinct siblings"])
def test_the_probabilities_of_all_tokens_add_to_one_where_most_are_cut_off(setting):
    rng = np.random.default_rng(5)
    p, q = (rng.dirichlet(np.full(200, 0.3)) for _ in range(2))
    for mistake in known(setting):
        whole = 0.0
        rest = 0.0
        for x in range(200):
            place = place_of(p, q, x, 8)
            accepted, replaced, _ = emission(mistake, place, setting)
            if len(place.at) == 1:
                whole = whole + accepted + replaced
            else:
                rest = accepted + replaced
        assert whole + rest == pytest.approx(1, abs=1e-9), mistake.name


def rows(seed, length=12, V=6):
    """Rows of target and draft by position."""
    rng = np.random.default_rng(seed)
    return rng.dirichlet(np.ones(V), length), rng.dirichlet(np.ones(V), length)


class Uniforms:
    def __init__(self, rng):
        self.rng = rng

    def __call__(self):
        return self.rng.random()


def text(mistake, depth, p, q, rng):
    """Steps of a chain by a readable sampler, from the second token on."""
    chain = Rejection(DraftSetting(tuple(range(-1, depth))))
    sampler = replace(mistake.sampler, setting=chain.setting)
    tokens = [int(rng.choice(len(p[0]), p=p[0]))]
    while len(tokens) < len(p):
        places = np.minimum(np.arange(len(tokens), len(tokens) + depth + 1), len(p) - 1)
        drawn = [mistake.drawn(q[at]) for at in places[:-1]]
        drafts = np.array([int(rng.choice(len(row), p=row)) for row in drawn])
        accepted, token = sampler(p[places], q[places[:-1]], drafts, Uniforms(rng))
        tokens += [*drafts[:accepted].tolist(), token]
    return tokens[: len(p)]


def suspicion(mistake, depth, count, rng, level=1e-4, depths=None):
    p, q = rows(7)
    suspects = Suspects(CHAIN, depths or (depth,))
    for _ in range(count):
        suspects.add(p, q, text(mistake, depth, p, q, rng))
    return suspects.verdict(level)


RIGHT = Mistake("none", Rejection(CHAIN))


@pytest.mark.parametrize("level", [0.5, 0.1])
def test_a_lossless_server_is_accused_no_oftener_than_stated(level):
    rng = np.random.default_rng(2)
    runs = 60
    found = [suspicion(RIGHT, 2, 3, rng, level) for _ in range(runs)]
    alarms = sum(bool(each.candidates) for each in found)
    assert alarms <= runs * level + 2 * np.sqrt(runs * level * (1 - level))
    assert all((each.p_value <= level) == bool(each.candidates) for each in found)


SIMULATED = (
    "target distribution in the place of the residual",
    "residual not normalised (token 0 where nothing is found)",
    "draft tokens accepted untested",
    "temperature on the draft's side alone (0.5)",
    "top-p after the test (0.5)",
    "drafts drawn at another temperature than reported (2)",
    "most probable tokens reported as draws",
)


@pytest.mark.parametrize("name", SIMULATED)
def test_a_mistake_is_named_from_texts_of_a_readable_sampler(name):
    (mistake,) = [mistake for mistake in known(CHAIN) if mistake.name == name]
    found = suspicion(mistake, 2, 80, np.random.default_rng(1))
    assert name in found.candidates and found.p_value < 1e-4, found


def test_a_depth_that_is_not_known_is_summed_over():
    (mistake,) = [mistake for mistake in known(CHAIN) if mistake.name.startswith("draft tokens accepted")]
    found = suspicion(mistake, 3, 60, np.random.default_rng(1), depths=(1, 2, 3, 4))
    assert found.candidates[0] == mistake.name


def test_what_arithmetic_explains_is_taken_off():
    assert arithmetic(1000, 0.0) == 0 < arithmetic(1000, 0.01) < arithmetic(1000, 0.06) < 20


def test_drafts_that_texts_do_not_show_are_known_without_them():
    assert setting_of("model", 4, 2)[0] is None and setting_of(None, None, None)[1] == tuple(range(1, 9))
    names = {mistake.kind for mistake in known(None)}
    assert "temperature on the target's side alone" in names and "lenient ratio" not in names
    with pytest.raises(ValueError, match="two siblings"):
        Suspects(DraftSetting((-1, 0, 0, 0)))


# Behind a server


CHAINS = {
    "target distribution in the place of the residual": partial(
        wrong_rules.chain, residual=wrong_rules.whole_target
    ),
    "residual not normalised": partial(wrong_rules.chain, residual=wrong_rules.not_normalised),
    "temperature on the target's side alone": partial(wrong_rules.chain, temperature=1.5),
    "top-p after the test": partial(wrong_rules.chain, top_p=0.7),
    "draft tokens accepted untested": partial(wrong_rules.chain, accept=np.ones_like),
}


TOKENS = {"target distribution in the place of the residual": 2000}


@pytest.mark.parametrize("name", CHAINS)
def test_the_mistake_of_a_servers_verifier_is_named(name, engine, models):
    found = audited(engine, models, Wrong(CHAINS[name]), tokens=TOKENS.get(name, 600))
    status, why = found.tokens_verdict
    assert status == "failed" and found.suspicion.candidates[0].startswith(name), why
    assert f"look like: {name}" in why
    assert found.to_dict()["mistake"]["mistake"].startswith(name)


def test_a_lossless_server_has_no_mistake(engine, models):
    found = audited(engine, models, verifier("speculative"), tokens=1000)
    assert found.tokens_verdict[0] != "failed" and found.p_value > 1e-3
    assert not found.suspicion.candidates and found.to_dict()["mistake"]["mistake"] is None


def test_a_mistake_that_changes_every_token_is_named_without_the_draft_model(engine, models):
    rule = Wrong(CHAINS["temperature on the target's side alone"])
    found = audited(engine, models, rule, tokens=600, known_draft=False)
    assert found.suspicion.candidates[0].startswith("temperature on the target's side alone")


@pytest.mark.parametrize(
    ("drafter", "name"),
    [
        (TopWithRow, "most probable tokens reported as draws"),
        (DropsUnlikely, "unlikely draws left out after the draw"),
    ],
)
def test_the_mistake_of_a_servers_drafter_is_named(drafter, name, engine, models):
    found = audited(engine, models, verifier("speculative"), depth=1, drafter=drafter, tokens=1000)
    assert found.tokens_verdict[0] == "failed", found.tokens_verdict
    assert found.suspicion.candidates[0].startswith(name), found.suspicion


@pytest.mark.slow
def test_the_mistake_of_a_servers_siblings_is_named(engine, models):
    wrong = PerNode(wrong_rules.ANYTHING, wrong_rules.resorted)
    found = audited(engine, models, wrong, kind="without_replacement", depth=1, width=2, tokens=3000)
    assert found.tokens_verdict[0] == "failed", found.tokens_verdict
    assert "siblings verified in the order of their draft probability" in found.suspicion.candidates


@pytest.mark.parametrize(
    ("kind", "rule", "tokens"),
    [("paths", "recursive", 1500), ("without_replacement", "recursive_wor", 300)],
)
def test_a_lossless_server_of_siblings_has_no_mistake(kind, rule, tokens, engine, models):
    found = audited(engine, models, verifier(rule), kind=kind, depth=1, width=2, tokens=tokens)
    assert found.tokens_verdict[0] != "failed", found.tokens_verdict
    assert not found.suspicion.candidates
