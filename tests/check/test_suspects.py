"""The mistake of a server is named from its texts: wrong verifiers and drafters behind our own server, and right ones that nobody accuses."""

from functools import partial

import numpy as np
import pytest

from polydraft import Engine
from polydraft.check.audit import audit
from polydraft.check.remote import Completions
from polydraft.check.suspects import Suspects, emission, known, place_of, setting_of
from polydraft.check.wrong_drafters import DropsUnlikely, TopWithRow
from polydraft.conformance.branching import Branches, outcomes
from polydraft.conformance.checks import blocks_of_mistake
from polydraft.conformance.mistakes import Mistake
from polydraft.conformance.samplers import Rejection
from polydraft.conformance.steps import Setting
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

CHAIN = Setting((-1, 0))
IID = Setting((-1, 0, 0))
DISTINCT = Setting((-1, 0, 0), DraftSampling.WITHOUT_REPLACEMENT)
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


CHAINS = {
    "target distribution in the place of the residual": partial(
        wrong_rules.chain, residual=wrong_rules.whole_target
    ),
    "residual not normalised": partial(wrong_rules.chain, residual=wrong_rules.not_normalised),
    "temperature on the target's side alone": partial(wrong_rules.chain, temperature=1.5),
    "top-p after the test": partial(wrong_rules.chain, top_p=0.7),
    "draft tokens accepted untested": partial(wrong_rules.chain, accept=np.ones_like),
}


@pytest.mark.parametrize("name", CHAINS)
def test_the_mistake_of_a_servers_verifier_is_named(name, engine, models):
    found = audited(engine, models, Wrong(CHAINS[name]))
    status, why = found.tokens_verdict
    assert status == "failed" and found.suspicion.candidates[0].startswith(name), why
    assert f"look like: {name}" in why
    assert found.to_dict()["mistake"]["mistake"].startswith(name)


@pytest.mark.parametrize(
    ("drafter", "name"),
    [
        (TopWithRow, "most probable tokens reported as draws"),
        (DropsUnlikely, "unlikely draws left out after the draw"),
    ],
)
def test_the_mistake_of_a_servers_drafter_is_named(drafter, name, engine, models):
    found = audited(engine, models, verifier("speculative"), depth=1, drafter=drafter)
    assert found.tokens_verdict[0] == "failed", found.tokens_verdict
    assert found.suspicion.candidates[0].startswith(name), found.suspicion


SIBLINGS = {
    "equal siblings dropped": (wrong_rules.duplicates_skipped, "paths"),
    "siblings verified in the order of their draft probability": (
        wrong_rules.resorted,
        "without_replacement",
    ),
}


@pytest.mark.parametrize("name", SIBLINGS)
def test_the_mistake_of_a_servers_siblings_is_named(name, engine, models):
    rule, kind = SIBLINGS[name]
    wrong = PerNode(wrong_rules.ANYTHING, rule)
    found = audited(engine, models, wrong, kind=kind, depth=1, width=2, tokens=3000)
    assert found.tokens_verdict[0] == "failed", found.tokens_verdict
    assert name in found.suspicion.candidates, found.suspicion
