"""`polydraft tune`: what the policy learnt, predicted and measured speeds, the words, the saved profile."""

import json

import pytest
from typer.testing import CliRunner

from polydraft import SamplingParams
from polydraft.cli.main import app
from polydraft.core import Budget
from polydraft.engine.api import Engine
from polydraft.errors import InvalidInputError
from polydraft.models import pair
from polydraft.policy.acceptance import FIRST, NEXT
from polydraft.policy.adaptive import AdaptivePolicy
from polydraft.policy.fixed import FixedPolicy
from polydraft.tree import chain
from polydraft.tune.tune import SHAPES, Trial, Tuning, tune
from tests.policy.planning import costs, known


def tuning(plain, adaptive, fixed):
    found = [
        Trial("plain", FixedPolicy(Budget.fixed((-1,)))),
        Trial("adaptive", AdaptivePolicy(known())),
        Trial("chain of 4", FixedPolicy(Budget.fixed(chain(4))), Budget.fixed(chain(4))),
    ]
    for trial, rate in zip(found, (plain, adaptive, fixed), strict=True):
        trial.tokens, trial.steps, trial.seconds = round(rate), round(rate), 1.0
    return Tuning(known(costs(0.02, 0.1, 0.05), 0.7), found, False)


def test_a_predicted_speed_is_expected_tokens_over_the_seconds_of_a_step():
    found = tuning(500, 600, 700)
    tokens = 1 + 0.7 * (1 + 0.7 + 0.7**2 + 0.7**3)
    assert found.predicted(found.trials[2]) == pytest.approx(tokens / (1.0 + 4 * 0.02 + 0.05 + 4 * 0.1))
    assert found.predicted(found.trials[0]) == pytest.approx(1.0) and found.predicted(found.trials[1]) is None


def test_words_say_what_to_do():
    assert tuning(500, 499, 480).recommendation().startswith("Do not draft here")
    assert tuning(500, 690, 700).recommendation().startswith("Leave the policy adaptive")
    assert tuning(500, 600, 700).recommendation().startswith("Use --num-paths 1 --depth 4: 1.40 times")


def test_an_engine_with_a_law_without_a_drafter_or_prompts_is_not_tuned():
    with pytest.raises(InvalidInputError, match="guided law"):
        tune(Engine.embedded(decoding="guidance"), [[1, 2]])
    with pytest.raises(InvalidInputError, match="without a drafter"):
        tune(Engine.embedded(drafter=None, max_num_seqs=1), [[5]])
    with pytest.raises(InvalidInputError, match="no prompt"):
        tune(Engine.embedded(max_num_seqs=1), [])


def test_every_shape_is_run_and_the_profile_is_what_the_policy_learnt():
    engine = Engine.embedded(max_num_seqs=1, threads=1)
    found = tune(engine, [engine.encode(p.text) for p in pair.prompts()[:2]], params=SamplingParams(max_tokens=48))
    assert [t.budget for t in found.trials[2:]] == list(SHAPES)
    assert all(t.tokens == 96 and t.seconds > 0 for t in found.trials)
    rates, expected = found.profile.sampled
    assert 0.2 < rates[FIRST] < 0.95 and 0.2 < rates[NEXT] < 0.99 and expected.tokens > 1.2
    assert found.profile.costs != engine.policy.profile.costs


def test_only_shapes_that_drafter_and_verifier_have_in_common_are_run():
    found = tune(Engine.embedded(max_num_seqs=1, verifier="block"), [[5, 6, 7]], params=SamplingParams(max_tokens=2))
    assert [t.budget for t in found.trials[2:]] == [g for g in SHAPES if g.width == 1]


def test_the_command_writes_a_profile_that_generate_reads(tmp_path):
    profile_file, found_file, drawn = tmp_path / "p.json", tmp_path / "t.json", tmp_path / "t.png"
    options = ["--quick", "--save", str(profile_file), "--json", str(found_file), "--picture", str(drawn)]
    told = CliRunner().invoke(app, ["tune", *options])
    assert told.exit_code == 0, told.output
    found = json.loads(found_file.read_text(encoding="utf-8"))
    assert found["recommendation"][:30] in " ".join(told.output.split())
    assert [t["name"] for t in found["trials"]] == ["plain", "adaptive", "chain of 2", "chain of 3", "chain of 4"]
    assert all(t["measured"] > 0 for t in found["trials"])
    assert drawn.stat().st_size > 1000
    given = ["generate", "x = 1", "--max-tokens", "8", "--seed", "1", "--profile", str(profile_file)]
    texts = [CliRunner().invoke(app, given) for _ in range(2)]
    assert texts[0].exit_code == 0 and texts[0].stdout == texts[1].stdout
    refused = CliRunner().invoke(app, ["generate", "x", "--profile", str(pair.draft_folder() / "config.json")])
    assert refused.exit_code == 2 and "polydraft tune" in refused.stderr
