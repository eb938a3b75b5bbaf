"""`polydraft tune`: the model's predictions, the words, the saved profile."""

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from polydraft import SamplingParams
from polydraft.cli.main import app
from polydraft.engine.api import Engine
from polydraft.errors import IncompatibleError, InvalidInputError
from polydraft.models import pair
from polydraft.plan.acceptance import DEPTHS
from polydraft.plan.costs import Charges, RoundCosts
from polydraft.plan.fixed import FixedPlan
from polydraft.plan.plan import AdaptivePlan
from polydraft.plan.profile import Profile
from polydraft.plan.sizes import paths
from polydraft.tune.advice import Trial, Tuning, break_even, predicted
from polydraft.tune.measure import measured_profile
from polydraft.tune.shapes import draft_shapes
from polydraft.tune.tune import SIZES, tune


def profile(rate=0.7, at_all=2e-4, **seconds):
    """Costs by phase; at_all: of drafting once."""
    scoring = Charges(**seconds.pop("scoring"))
    plain = scoring._replace(plain_once=scoring.once, plain_sequences=scoring.rows)
    drafting = Charges(once=at_all, **seconds.pop("drafting"))
    return Profile(RoundCosts({"drafting": drafting, "scoring": plain, "other": Charges()}), (rate,) * DEPTHS)


USUAL = profile(drafting={"depth": 1e-4}, scoring={"once": 1e-3, "rows": 1e-4})


def tuning(plain, adaptive, fixed, known=USUAL):
    found = [
        Trial("plain", FixedPlan(paths(1, 1)), plain),
        Trial("adaptive", AdaptivePlan(known), None),
        Trial("1x4", FixedPlan(paths(1, 4)), fixed, (1, 4)),
    ]
    for trial, rate in zip(found, (plain, adaptive, fixed), strict=True):
        trial.tokens, trial.calls, trial.seconds = round(rate), round(rate), 1.0
    return Tuning(known, found, 100)


def test_a_speed_is_expected_tokens_over_the_seconds_of_a_round():
    seconds = 1e-3 + 5e-4 + 4e-4 + 2e-4
    assert predicted(USUAL, 1, 4) == pytest.approx((1 - 0.7**5) / 0.3 / seconds)
    assert predicted(USUAL, 1, 0) == pytest.approx(1 / 1.1e-3)


def test_an_engine_with_a_law_is_not_tuned():
    with pytest.raises(InvalidInputError, match="guided law"):
        tune(Engine.embedded(law="guidance"), [[1, 2]])


def test_break_even_is_where_drafting_begins_to_pay():
    need = break_even(USUAL)
    at, below = (replace(USUAL, acceptance=(a,) * DEPTHS) for a in (need, need - 0.01))
    assert max(predicted(at, w, d) for w in (1, 2, 3, 4) for d in range(1, 13)) > predicted(at, 1, 0)
    assert max(predicted(below, w, d) for w in (1, 2, 3, 4) for d in range(1, 13)) <= predicted(below, 1, 0)
    assert break_even(profile(drafting={"depth": 1.0}, scoring={"once": 1e-3})) is None


def test_plain_words_when_drafting_does_not_pay():
    words = tuning(500, 499, 480, replace(USUAL, acceptance=(0.1,) * DEPTHS)).recommendation()
    assert words.startswith("Do not draft here") and "--drafter none" in words and "10%" in words


def test_words_and_profile_agree_where_single_rounds_promised_what_runs_did_not_bear_out():
    found = tuning(500, 499, 480)
    assert break_even(USUAL) < USUAL.acceptance[0]
    words = found.recommendation()
    assert words.startswith("Do not draft here") and "only where" not in words and "whole runs" in words
    assert not found.advised.drafts and tuning(500, 600, 700).advised.drafts


def test_a_profile_that_advises_against_drafts_makes_none(tmp_path):
    engine = Engine.embedded(max_num_seqs=1)
    known = measured_profile(engine.target, engine.drafter, engine.verifier, [[5, 6, 7]], budget_seconds=0.02)
    for drafts in (True, False):
        replace(known, costs=USUAL.costs, acceptance=USUAL.acceptance, drafts=drafts).save(tmp_path / "p.json")
        planned = Engine.embedded(max_num_seqs=1, profile=str(tmp_path / "p.json"))
        stats = planned.generate("import os\n", SamplingParams(max_tokens=12, seed=0))[0].stats
        assert (stats.drafted > 0) == drafts
    with pytest.raises(IncompatibleError, match=r"'ngram'.*polydraft tune"):
        Engine.embedded(max_num_seqs=1, drafter="ngram", profile=str(tmp_path / "p.json"))
    with pytest.raises(IncompatibleError, match="same models"):
        Engine.embedded(max_num_seqs=1, draft=str(pair.target_folder()), profile=str(tmp_path / "p.json"))


def test_the_adaptive_plan_is_recommended_where_it_is_as_good_and_a_size_where_it_is_not():
    assert tuning(500, 690, 700).recommendation().startswith("Leave the plan adaptive")
    assert tuning(500, 600, 700).recommendation().startswith("Use --num-paths 1 --depth 4: 1.40 times")


def test_advice_promises_more_for_a_quicker_draft_and_its_error_is_reported():
    found = tuning(500, 600, 700)
    found.trials[2].predicted = 770
    assert found.error == pytest.approx(0.05)
    promised = [float(line.split(": ")[-1].split()[0]) for line in found.advice()[1:3]]
    assert all(1 < p < 3 for p in promised)


def test_wider_drafts_of_the_same_size_are_timed():
    from transformers import LlamaConfig

    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=2
    )
    shapes = draft_shapes(config, repetitions=5)
    assert [layers for layers, *_ in shapes] == [4, 2, 1, 8]
    assert all(0.5 < size / shapes[0][2] < 2 for _, _, size, _ in shapes)
    assert shapes[-1][3] > shapes[2][3] > 0


def test_every_size_is_run_and_the_plain_ones_beside_it():
    found = tune(Engine.embedded(max_num_seqs=1), [[5, 6, 7]], params=SamplingParams(max_tokens=2), budget_seconds=0.02)
    assert [t.name for t in found.trials] == ["plain", "adaptive", *(f"{width}x{depth}" for width, depth in SIZES)]
    assert all(t.tokens == 2 and t.seconds > 0 for t in found.trials)


def test_only_sizes_that_drafter_and_rule_have_in_common_are_run():
    chains = Engine.embedded(max_num_seqs=1, verifier="block")
    found = tune(chains, [[5, 6, 7]], params=SamplingParams(max_tokens=2), budget_seconds=0.02)
    assert [t.size for t in found.trials[2:]] == [size for size in SIZES if size[0] == 1]


def test_tuning_needs_prompts_and_a_drafter():
    with pytest.raises(InvalidInputError, match="without a drafter"):
        tune(Engine.embedded(drafter=None, max_num_seqs=1), [[5]])
    with pytest.raises(InvalidInputError, match="no prompt"):
        tune(Engine.embedded(max_num_seqs=1), [])


def test_the_command_writes_a_profile_that_generate_reads(tmp_path):
    profile_file, found_file, drawn = tmp_path / "p.json", tmp_path / "t.json", tmp_path / "t.png"
    options = ["--quick", "--save", str(profile_file), "--json", str(found_file), "--picture", str(drawn)]
    told = CliRunner().invoke(app, ["tune", *options])
    assert told.exit_code == 0, told.output
    found = json.loads(found_file.read_text(encoding="utf-8"))
    assert found["recommendation"][:30] in " ".join(told.output.split())
    assert [t["name"] for t in found["trials"]] == ["plain", "adaptive", "1x2", "1x4", "2x2"]
    assert all(t["measured"] > 0 for t in found["trials"])
    assert drawn.stat().st_size > 1000
    given = ["generate", "x = 1", "--max-tokens", "8", "--seed", "1", "--profile", str(profile_file)]
    texts = [CliRunner().invoke(app, given) for _ in range(2)]
    assert texts[0].exit_code == 0 and texts[0].stdout == texts[1].stdout
    refused = CliRunner().invoke(app, ["generate", "x", "--profile", str(pair.draft_folder() / "config.json")])
    assert refused.exit_code == 2 and "polydraft tune" in refused.stderr
