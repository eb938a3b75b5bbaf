"""`polydraft tune`: what the policy learnt, predicted and measured speeds, the words, the saved profile."""

import json

import pytest
from typer.testing import CliRunner

from polydraft import SamplingParams
from polydraft.cli.main import app
from polydraft.cli.tune import _show
from polydraft.core import Budget
from polydraft.core.geometry import chain, paths
from polydraft.engine.api import Engine
from polydraft.errors import InvalidInputError
from polydraft.models import pair
from polydraft.numerics.processor import usable_cores
from polydraft.policy.acceptance import FIRST, NEXT
from polydraft.policy.adaptive import AdaptivePolicy
from polydraft.policy.fixed import FixedPolicy
from polydraft.tune.tune import SHAPES, ShapeTrial, Tuning, chain_costs, tune
from tests.policy.planning import costs, known


def tuning(plain, adaptive, fixed):
    found = [
        ShapeTrial("plain", FixedPolicy(Budget.fixed((-1,)))),
        ShapeTrial("adaptive", AdaptivePolicy(known())),
        ShapeTrial("chain of 4", FixedPolicy(Budget.fixed(chain(4))), Budget.fixed(chain(4))),
    ]
    for trial, rate in zip(found, (plain, adaptive, fixed), strict=True):
        trial.tokens = round(rate)
        trial.steps = round(rate)
        trial.seconds = 1.0
        trial.rates = 6 * [rate]
    return Tuning(known(costs(0.02, 0.1, 0.05), 0.7), found, False)


def test_a_predicted_speed_is_expected_tokens_over_the_seconds_of_a_step():
    found = tuning(500, 600, 700)
    tokens = 1 + 0.7 * (1 + 0.7 + 0.7**2 + 0.7**3)
    assert found.predicted(found.trials[2]) == pytest.approx(tokens / (1.0 + 4 * 0.02 + 0.05 + 4 * 0.1))
    assert found.predicted(found.trials[0]) == pytest.approx(1.0) and found.predicted(found.trials[1]) is None


def test_predictions_far_from_what_was_measured_are_said():
    close = tuning(1, 1, 2)
    far = tuning(1, 1, 3)  # 1.8 tokens a second are predicted
    assert (
        not close.doubt()
        and far.doubt().startswith("Predictions are up to 40% off")
        and far.to_dict()["doubt"]
    )


def test_what_other_chains_accepted_at_each_depth_predicts_a_chain():
    """Not the policy's acceptance, which is that of drafts that end when they are unsure."""
    found = tuning(500, 600, 700)
    shorter = ShapeTrial("chain of 2", FixedPolicy(Budget.fixed(chain(2))), Budget.fixed(chain(2)))
    shorter.drafted.update({0: 10, 1: 10})
    shorter.accepted.update({0: 6, 1: 3})
    found.trials.append(shorter)
    tokens = 1 + 0.6 + 0.3 + 0.15 + 0.075  # beyond the other chain at its last rate
    seconds = 1.0 + 4 * 0.02 + 0.05 + 4 * 0.1
    assert found.predicted(found.trials[2]) == pytest.approx(tokens / seconds)
    found.trials[2].accepted.update({0: 10})
    assert found.predicted(found.trials[2]) == pytest.approx(tokens / seconds), "its own tokens predicted it"


def _chain(depth, reach=()):
    """Ten steps of a chain that cost what a line says."""
    trial = ShapeTrial(
        f"chain of {depth}", FixedPolicy(Budget.fixed(chain(depth))), Budget.fixed(chain(depth)), steps=10
    )
    trial.scoring = 10 * (1 + 0.25 * depth)
    trial.drafting = 10 * (0.5 + 0.125 * depth)
    trial.beside = 10 * 0.75
    trial.drafted.update(dict.fromkeys(range(depth), 10))
    trial.accepted.update({d: round(10 * share) for d, share in enumerate(reach)})
    return trial


def test_costs_are_those_that_steps_of_chains_had():
    plain = tuning(500, 600, 700).trials[0]
    plain.steps = 10
    plain.scoring = 10.0
    plain.beside = 5.0
    costs = chain_costs([plain, _chain(1), _chain(3), _chain(6)])
    assert costs is not None and costs.overhead == pytest.approx(0.5)
    for depth in (2, 5, 8):
        assert costs.step(1 + depth, depth) == pytest.approx(1 + 0.25 * depth + 0.5 + 0.125 * depth + 0.75)
    assert chain_costs([plain, _chain(3)]) is None


def test_seconds_between_measured_rows_are_interpolated_where_prices_of_rows_fall_too():
    """A pass of four rows may cost as one of three: the policy's prices, which do not fall, would make every longer chain too dear."""
    tuned = tuning(500, 600, 700)
    plain = tuned.trials[0]
    plain.steps = 10
    plain.scoring = 10.0
    tuned.trials[2:] = [_chain(depth, [0.5] * depth) for depth in (1, 3, 5, 8)]
    for trial, seconds in zip(tuned.trials[2:], (1.5, 1.6, 1.64, 1.7), strict=True):
        trial.scoring = 10 * seconds
    drafting = 0.5 + 0.125 * 5 + 0.75
    assert tuned.predicted(tuned.trials[4]) == pytest.approx((1 + 5 * 0.5) / (1.6 + 2 / 5 * 0.1 + drafting))


def test_a_chain_is_predicted_without_its_own_steps():
    found = tuning(500, 600, 700)
    found.trials[0].steps = 10
    found.trials[0].scoring = 10.0
    found.trials[0].beside = 5.0
    found.trials[2:] = [_chain(1, [0.6]), _chain(2, [0.8, 0.5]), _chain(4, [0.6, 0.3, 0.2, 0.1])]
    seconds = 1 + 0.25 * 2 + 0.5 + 0.125 * 2 + 0.75
    assert found.predicted(found.trials[3]) == pytest.approx((1 + 0.6 + 0.3) / seconds)
    found.trials[3].drafting = found.trials[3].scoring = 1e6
    assert found.predicted(found.trials[3]) == pytest.approx((1 + 0.6 + 0.3) / seconds)


def _paths(width, depth, accepted):
    """Ten steps of several paths, of which the first token of some was accepted so often."""
    budget = Budget.fixed(paths(width, depth))
    trial = ShapeTrial(f"{width} paths of {depth}", FixedPolicy(budget), budget, steps=10)
    trial.drafted.update(dict.fromkeys(range(depth), 10))
    trial.accepted.update({0: accepted})
    return trial


def test_several_paths_are_predicted_from_how_often_another_shape_s_second_path_was_accepted():
    """One path's first token is rejected in .4 of the steps and two paths' in .3: a further path is rejected in .75, and three paths in .225."""
    tuned = tuning(500, 600, 700)
    tuned.trials[0].steps = 10
    tuned.trials[0].scoring = 10.0
    tuned.trials[0].beside = 5.0
    tuned.trials[2:] = [_chain(1, [0.6]), _chain(8, [0.6, 0.3]), _paths(2, 2, 7), _paths(3, 2, 10)]
    seconds = 1 + 0.25 * 6 + 0.5 + 0.125 * 2 + 0.75
    reach = 0.775, 0.775 * 0.5
    assert tuned.predicted(tuned.trials[5]) == pytest.approx((1 + sum(reach)) / seconds)
    tuned.trials[4].accepted[0] = 10  # every step: the second path is never rejected
    assert tuned.predicted(tuned.trials[5]) == pytest.approx((1 + 1.0 + 0.5) / seconds)
    del tuned.trials[4]
    assert tuned.predicted(tuned.trials[4]) is None, "no other shape says what a second path is worth"


def test_a_draft_s_cost_is_printed_in_forward_passes_of_the_target(capsys):
    report = tuning(500, 600, 700)  # a pass of 1 row takes a second, a draft .05, and each of its steps .1
    _show(report)
    printed = " ".join(capsys.readouterr().out.split())
    assert "draft of 1 token: a forward pass of its head or model 150.000 0.15" in printed
    assert "each further draft step 100.000 0.10" in printed
    assert report.to_dict()["draft_in_forward_passes"] == pytest.approx({"first": 0.15, "further": 0.1})


def test_words_say_what_to_do():
    assert tuning(500, 499, 480).recommendation().startswith("Do not draft here")
    assert tuning(500, 690, 700).recommendation().startswith("Leave the policy adaptive")
    assert (
        tuning(500, 600, 700)
        .recommendation()
        .startswith("Use --num-paths 1 --depth 4: 1.40 [1.40, 1.40] times")
    )


def noisy(found, **rates):
    for name, each in rates.items():
        found.trial(name.replace("_", " ")).rates = each
    return found.recommendation()


def test_runs_in_which_plain_decoding_was_now_faster_and_now_slower_recommend_nothing():
    assert noisy(tuning(500, 600, 700), plain=[300, 800, 500, 400, 900, 500]).startswith(
        "Too noisy to tell whether drafts pay"
    )
    assert noisy(tuning(500, 499, 480), plain=[300, 800, 500, 400, 900, 500]).startswith(
        "Too noisy to tell whether drafts pay"
    )
    few = tuning(500, 600, 700)
    for trial in few.trials:
        del trial.rates[2:]
    assert few.recommendation().startswith("Too few repetitions to tell whether drafts pay")


def test_a_shape_that_runs_do_not_tell_from_the_adaptive_policy_is_not_recommended():
    said = noisy(tuning(500, 600, 700), adaptive=[600, 800, 600, 650, 900, 580])
    assert said.startswith(
        "Leave the policy adaptive: over plain decoding 1.25 [1.16, 1.80]; the best fixed shape, chain of 4, over adaptive too noisy"
    )


def test_a_recommended_shape_says_whether_the_second_is_told_from_it():
    found = tuning(500, 600, 700)
    found.trials.append(_chain(2))
    found.trials[3].tokens = 690
    found.trials[3].seconds = 1.0
    found.trials[3].rates = [650, 750, 690, 720, 660, 700]
    said = found.recommendation()
    assert (
        said.startswith("Use --num-paths 1 --depth 4")
        and "over the second shape, chain of 2, too noisy to tell [0.93, 1.08]" in said
    )


def test_an_engine_with_a_distribution_without_a_drafter_or_prompts_is_not_tuned():
    with pytest.raises(InvalidInputError, match="guided distribution"):
        tune(Engine.embedded(decoding="guidance"), [[1, 2]])
    with pytest.raises(InvalidInputError, match="without a drafter"):
        tune(Engine.embedded(drafter=None, max_num_seqs=1), [[5]])
    with pytest.raises(InvalidInputError, match="no prompt"):
        tune(Engine.embedded(max_num_seqs=1), [])


def test_every_shape_is_run_and_the_profile_is_what_the_policy_learnt():
    engine = Engine.embedded(max_num_seqs=1, threads=1)
    found = tune(
        engine, [engine.encode(p.text) for p in pair.prompts()[:2]], params=SamplingParams(max_tokens=48)
    )
    assert [t.budget for t in found.trials[2:]] == list(SHAPES)
    assert all(t.tokens == 96 and t.seconds > 0 for t in found.trials)
    rates, expected = found.profile.sampled
    assert 0.2 < rates[FIRST] < 0.95 and 0.2 < rates[NEXT] < 0.99 and expected.tokens > 1.2
    assert isinstance(engine.policy, AdaptivePolicy) and found.profile.costs != engine.policy.profile.costs


def test_only_shapes_that_drafter_and_verifier_have_in_common_are_run():
    found = tune(
        Engine.embedded(max_num_seqs=1, verifier="block"), [[5, 6, 7]], params=SamplingParams(max_tokens=2)
    )
    assert [t.budget for t in found.trials[2:]] == [g for g in SHAPES if g.width == 1]


def test_the_command_writes_a_profile_that_generate_reads(tmp_path):
    profile_file = tmp_path / "p.json"
    found_file = tmp_path / "t.json"
    drawn = tmp_path / "t.png"
    threads = str(min(2, usable_cores()))
    options = [
        "--quick",
        "--threads",
        threads,
        "--save",
        str(profile_file),
        "--report",
        str(found_file),
        "--picture",
        str(drawn),
    ]
    told = CliRunner().invoke(app, ["tune", "--model", "embedded", *options])
    assert told.exit_code == 0, told.output
    found = json.loads(found_file.read_text(encoding="utf-8"))
    assert found["recommendation"][:30] in " ".join(told.output.split())
    assert [t["name"] for t in found["trials"]] == [
        "plain",
        "adaptive",
        "chain of 2",
        "chain of 3",
        "chain of 4",
    ]
    assert all(t["measured"] > 0 for t in found["trials"])
    assert all(t["over_plain"]["interval"][0] <= t["over_plain"]["ratio"] for t in found["trials"])
    assert drawn.stat().st_size > 1000
    profile = json.loads(profile_file.read_text(encoding="utf-8"))
    assert profile["about"]["identity"]["machine"][-1] == int(threads)
    given = [
        "generate",
        "x = 1",
        "--model",
        "embedded",
        "--max-tokens",
        "8",
        "--seed",
        "1",
        "--threads",
        threads,
        "--profile",
        str(profile_file),
    ]
    texts = [CliRunner().invoke(app, given) for _ in range(2)]
    assert texts[0].exit_code == 0 and texts[0].stdout == texts[1].stdout
    refused = CliRunner().invoke(
        app, ["generate", "x", "--model", "embedded", "--profile", str(pair.draft_folder() / "config.json")]
    )
    assert refused.exit_code == 2 and "polydraft tune" in refused.stderr
