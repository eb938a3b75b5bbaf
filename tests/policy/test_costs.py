"""Seconds of steps: measured with a handful of passes, interpolated, with prices that do not fall, and followed while steps run."""

import os
from dataclasses import replace

import numpy as np
import pytest
from transformers import LlamaForCausalLM

from polydraft import Engine, SamplingParams
from polydraft.drafters.model.paths import ModelDrafter
from polydraft.drafters.text.ngram import NgramDrafter
from polydraft.engine.sample_text import sample_ids
from polydraft.errors import InvalidInputError
from polydraft.models.compiled.model import CompiledModel
from polydraft.models.matrices.vectors import PANEL
from polydraft.policy import measuring as module
from polydraft.policy import profile
from polydraft.policy.costs import KNOTS, MEASURED, Costs, LiveCosts
from polydraft.policy.marginal import depth_of, min_reaches, min_spare_chances
from polydraft.policy.measuring import PROMPT, measured
from polydraft.policy.profile import Profile, identity, profile_of
from polydraft.policy.rehearsal import DEPTH, Rehearsed
from tests.engine.tables import table_engine
from tests.policy.planning import costs as made
from tests.support.tiny import llama_config


def test_prices_of_a_further_row_never_fall():
    padded = Costs(
        (1.18, 0.99, 1.25, 1.25, 1.35, 1.36, 1.9, 3.0, 5.2, 6.0), 0.1, 0.2
    )  # a tile of four is cheaper than one of two
    prices = [padded.row(n) for n in range(1, 80)]
    assert prices == sorted(prices) and prices[0] == 0.0
    below = np.cumsum(
        [1.18, *prices[:71]]
    )  # the greatest convex function below what was measured, from a pass of one row on
    measured_seconds = np.maximum([padded.rows(n) for n in range(1, 73)], 1.18)
    assert (below <= measured_seconds + 1e-9).all()
    touching = [n for n in KNOTS if below[n - 1] == pytest.approx(measured_seconds[n - 1])]
    assert touching == [1, 4, 6, 8, 16, 32, 64, 72]


def test_rows_of_a_tile_share_what_it_costs_and_a_spare_sibling_pays_for_its_own():
    tiles = Costs((1.0, 1.0, 1.2, 1.22, 1.6, 1.62, 3.2, 6.4, 12.8, 15.4), 0.1, 0.2)
    assert tiles.row(4) == tiles.row(5) == pytest.approx(0.11)
    assert min_spare_chances(1.0, 0.3, 1, 4, tiles) == pytest.approx(
        [0.0, 0.0, 0.2, 0.02, 0.38, 0.02, 0.1975]
    )
    assert min_spare_chances(1.0, 0.1, 1, 2, tiles) == pytest.approx([0.0, 0.0])


def test_seconds_between_measured_rows_are_interpolated():
    known = Costs.of({1: 1.0, 4: 1.3, 8: 1.9}, draft_start=0.5, draft_step=0.25)
    assert [known.rows(n) for n in (1, 2, 4, 6, 8, 10)] == pytest.approx([1.0, 1.1, 1.3, 1.6, 1.9, 2.2])
    assert known.step(4, 3) == pytest.approx(1.3 + 0.5 + 0.75) and known.drafting(0) == 0.0


@pytest.mark.parametrize(
    "knots", [(0.0, *[1.0] * 9), (1.0, -1.0, *[1.0] * 8), (1.0, float("nan"), *[1.0] * 8), (1.0,)]
)
def test_costs_that_cannot_be_are_refused_with_advice(knots):
    with pytest.raises(InvalidInputError, match="polydraft tune"):
        Costs(knots, 0.0, 0.0)


def test_live_costs_come_to_what_steps_take_and_one_stalled_step_is_no_news():
    live = LiveCosts(Costs.assumed())
    rng = np.random.default_rng(0)
    for _ in range(2000):
        steps = int(rng.integers(0, 8))
        rows = 1 + steps
        live.observe(
            rows, steps, scoring=2.0 + 0.1 * rows, drafting=0.3 + 0.5 * steps if steps else 0.0, rest=0.2
        )
    found = live.costs
    for steps in (0, 1, 3, 7):
        expected = 2.0 + 0.1 * (1 + steps) + 0.2 + (0.3 + 0.5 * steps if steps else 0.0)
        assert found.step(1 + steps, steps) == pytest.approx(expected, rel=0.05)
    assert found.draft_step == pytest.approx(0.5, rel=0.1)
    live.observe(1, 0, scoring=1000.0, drafting=0.0, rest=0.2)
    assert live.costs.rows(1) < 1.1 * found.rows(1)


def test_steps_of_a_batch_say_what_still_more_rows_cost():
    """Else a batch that joins before anything was measured drafts, as if further rows were as cheap as those of one sequence."""
    live = LiveCosts(Costs.assumed())
    for rows, seconds in [(1, 1.0)] * 50 + [(64, 20.0)] * 150:
        live.observe(rows, 0, scoring=seconds, drafting=0.0, rest=0.0)
    assert live.costs.rows(64) == pytest.approx(20.0, rel=0.05)
    assert live.costs.row(64) > 0.8 * (20.0 - 1.0) / 63


@pytest.mark.parametrize("speed", [0.001, 1.0, 1000.0])
def test_a_machine_of_another_speed_changes_no_decision_from_the_first_step_on(speed):
    """Costs of which only one kind of steps is seen keep their ratios; with a factor for each kind drafts would look dear, or free."""
    start = Costs.of({1: 1.0, 4: 1.1, 8: 1.2}, draft_start=0.05, draft_step=0.2)
    for rows, steps in ((1, 0), (4, 3)):
        live = LiveCosts(start)
        for _ in range(40):
            drafting = speed * start.drafting(steps)
            live.observe(rows, steps, scoring=speed * start.rows(rows), drafting=drafting, rest=0.0)
            ratio = live.costs.step(5, 4) / live.costs.step(1, 0)
            assert ratio == pytest.approx(start.step(5, 4) / start.step(1, 0), rel=0.02)
        assert live.costs.step(rows, steps) == pytest.approx(speed * start.step(rows, steps), rel=0.05)


def test_what_a_step_takes_beside_pass_and_drafts_is_learnt_while_every_step_drafts():
    """Else drafting would be charged for what plain steps take as well, and pause."""
    live = LiveCosts(Costs.of({1: 1.0, 4: 1.1, 8: 1.2}, draft_start=0.05, draft_step=0.2))
    for _ in range(200):
        live.observe(4, 3, scoring=1.1, drafting=0.65, rest=0.4)
    assert live.costs.overhead == pytest.approx(0.4, rel=0.05) and live.costs.draft_start == pytest.approx(
        0.05, abs=0.02
    )


def test_a_long_text_makes_rows_and_draft_steps_dearer_and_drafts_shorter():
    short = replace(made(row=0.02, step=0.05), first_row_token=1e-4, row_token=2e-5, draft_token=1e-4)
    long = short.behind(2000)
    assert long.rows(1) == pytest.approx(1.2) and long.rows(4) - long.rows(1) == pytest.approx(
        3 * (0.02 + 0.04)
    )
    assert long.drafting(2) - short.drafting(2) == pytest.approx(0.4)
    assert short.behind(2000, num_sequences=4).rows(4) - short.rows(4) == pytest.approx(0.8)
    depths = [
        depth_of(min_reaches(1.0 / costs.rows(1), 0.8, 1, 1, costs), 0.8, 0.8) for costs in (short, long)
    ]
    assert depths[0] > depths[1]


def test_steps_behind_a_long_text_are_no_news_about_short_ones():
    start = replace(made(row=0.02, step=0.05), first_row_token=1e-4, row_token=2e-5, draft_token=1e-4)
    live = LiveCosts(start)
    long = start.behind(3000)
    for _ in range(200):
        live.observe(4, 3, scoring=long.rows(4), drafting=long.drafting(3), rest=0.0, num_tokens=3000)
    assert live.costs.step(4, 3) == pytest.approx(start.step(4, 3), rel=1e-6)
    assert live.costs.behind(3000).step(1, 0) == pytest.approx(long.step(1, 0), rel=0.02)


def test_what_a_token_of_the_context_costs_is_measured_and_the_cache_left_as_it_was(monkeypatch):
    """Behind 4,096 columns, which are written, as a page that nobody wrote is read at no cost: here a pass takes as long as its rows attend to columns."""
    config = llama_config(num_hidden_layers=1, max_position_embeddings=5000)
    target, draft = (
        CompiledModel(LlamaForCausalLM(config).eval(), max_num_seqs=2, cache_dtype="bfloat16")
        for _ in range(2)
    )
    attended = list[int]()
    written = list[bool]()

    def counting(model):
        score = model.score

        def scored(slots, tree, **options):
            attended.append((length := int(model.lengths[slots[0]])) * tree.num_nodes)
            keys = model.arrays.memory.keys[:, slots[0], :, : length // PANEL]
            written.append(bool(keys.any(axis=(-1, -2, -3)).all()))
            return score(slots, tree, **options)

        monkeypatch.setattr(model, "score", scored)

    counting(target)
    counting(draft)
    monkeypatch.setattr(module, "clock", lambda _: lambda: float(sum(attended)))
    costs = measured(target, ModelDrafter(draft)).costs
    assert (costs.first_row_token, costs.row_token, costs.draft_token) == pytest.approx(
        (1.0, 1.0, 1.0)
    ) and all(written)
    assert not any(target.lengths) and max(*target.written, *draft.written) < 100


def test_passes_that_differ_by_more_than_half_are_measured_again():
    acts = list[int]()
    clock = iter(np.cumsum([0.0, 1.0, 0.0, 9.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.1, 0.0, 1.2]).tolist())
    spreads = list[float]()
    assert module._seconds(lambda: acts.append(1), lambda: next(clock), spreads) == pytest.approx(1.0)
    assert (
        spreads == pytest.approx([1.2]) and len(acts) == 7
    )  # one that does not count, three that differ, three that count


def test_drafts_are_timed_behind_passes_of_the_target_as_in_a_step(monkeypatch):
    engine = Engine.embedded(max_num_seqs=1, threads=1)
    order = list[str]()
    for owner, name in ((engine.target, "score"), (engine.drafter, "propose")):
        act = getattr(owner, name)
        monkeypatch.setattr(
            owner, name, lambda *a, act=act, name=name, **k: order.append(name[0]) or act(*a, **k)
        )
    measured(engine.target, engine.drafter)
    assert "".join(order).count("sp") >= 2 * module.PASSES


def test_measuring_leaves_models_idle_and_is_kept_for_the_next_engine(monkeypatch):
    monkeypatch.setattr(profile, "_known", {})
    monkeypatch.setattr(profile, "_tried", set())
    engine = Engine.embedded(max_num_seqs=2, threads=1)
    engine.measure()
    assert not any(engine.target.lengths) and engine.drafter.slots.num_free == 2
    costs = engine.policy.profile.costs
    assert len(costs.knots) == len(KNOTS) and costs.rows(1) > 0 and costs.overhead > 0
    monkeypatch.setattr(profile, "measured", lambda *_: 1 / 0)
    assert Engine.embedded(max_num_seqs=2, threads=1).policy.profile == engine.policy.profile
    monkeypatch.setattr(profile, "_known", {})  # another process
    assert Engine.embedded(max_num_seqs=2, threads=1).policy.profile == engine.policy.profile


def test_figures_of_another_process_serve_whatever_memory_is_free_and_steadier_ones_replace_them(
    monkeypatch, tmp_path
):
    engine = Engine.embedded(max_num_seqs=2, threads=1)
    monkeypatch.setenv("POLYDRAFT_CACHE", str(tmp_path))
    parts = (engine.target, engine.drafter, engine.verifier)
    paid = [made(0.3), made(0.2), made(0.1)]
    spreads = iter([3.0, 4.0, 1.1])
    monkeypatch.setattr(profile, "measured", lambda *_: module.Measured(paid.pop(0), next(spreads)))

    def started():
        monkeypatch.setattr(profile, "_known", {})
        monkeypatch.setattr(profile, "_tried", set())
        monkeypatch.setattr(engine.target, "cache_bytes", engine.target.cache_bytes + 1, raising=False)
        return profile_of(*parts).costs

    assert [started() for _ in range(4)] == [made(0.3), made(0.3), made(0.1), made(0.1)] and not paid


def test_what_a_step_with_drafts_does_beside_its_pass_is_charged_to_the_drafts(monkeypatch, tmp_path):
    """Reading what was accepted, verifying several rows: a tenth of a step of a small model, which is lost where a draft hardly pays."""
    engine = Engine.embedded(max_num_seqs=2, threads=1)
    start = made(0.1, 0.2)
    monkeypatch.setenv("POLYDRAFT_CACHE", str(tmp_path))
    monkeypatch.setattr(profile, "_known", {})
    monkeypatch.setattr(profile, "_tried", set())
    monkeypatch.setattr(profile, "measured", lambda *_: module.Measured(start, 1.0))
    costs = profile_of(engine.target, engine.drafter, engine.verifier, lambda: Rehearsed(0.1, 0.9)).costs
    assert costs.step(1, 0) == pytest.approx(1.1) and costs.step(1 + DEPTH, DEPTH) == pytest.approx(
        start.rows(1 + DEPTH) + 0.9
    )


def test_costs_that_cannot_be_measured_are_assumed_and_say_why_once(monkeypatch, tmp_path, caplog):
    engine = Engine.embedded(max_num_seqs=2, threads=1)
    monkeypatch.setenv("POLYDRAFT_CACHE", str(tmp_path))
    monkeypatch.setattr(profile, "_known", {})
    monkeypatch.setattr(profile, "_tried", set())
    monkeypatch.setattr(profile, "measured", lambda *_: 1 / 0)
    for _ in range(2):
        assert profile_of(engine.target, engine.drafter, engine.verifier).costs == Costs.assumed()
    (record,) = caplog.records
    assert (
        record.levelname == "WARNING"
        and "'model' are assumed" in record.message
        and "ZeroDivisionError" in record.message
    )


def test_the_folder_of_figures_is_bounded_and_nothing_else_in_it_is_touched(monkeypatch, tmp_path):
    monkeypatch.setenv("POLYDRAFT_CACHE", str(tmp_path))
    monkeypatch.setattr(profile, "MOST_FILES", 3)
    (tmp_path / "other.json").write_text("{}")
    for number in range(5):
        profile.remember({"pair": number}, Profile.assumed())
    assert len([*tmp_path.iterdir()]) == 4 and (tmp_path / "other.json").exists()
    monkeypatch.setattr(profile, "_known", {})
    assert profile.remembered({"pair": 4}) == Profile.assumed() and profile.remembered({"pair": 0}) is None


def test_a_model_file_that_changed_under_its_name_is_another_model(tmp_path):
    engine = table_engine()
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    engine.target.name = str(file)
    parts = engine.target, NgramDrafter(), engine.verifier
    before = identity(*parts)
    assert before is not None and identity(*parts) == before
    os.utime(file, ns=(1, 1))
    assert identity(*parts) != before


def test_models_at_work_or_without_a_name_are_not_measured():
    fast = table_engine()
    assert identity(fast.target, fast.drafter, fast.verifier) is None
    assert profile_of(fast.target, fast.drafter, fast.verifier) == Profile.assumed()


@pytest.mark.parametrize("drafter", ["model", "ngram"])
def test_a_draft_step_of_a_model_is_a_pass_and_one_of_text_is_none(drafter, monkeypatch):
    engine = Engine.embedded(max_num_seqs=1, threads=1, drafter=drafter)
    models = [engine.target, *([engine.drafter.model] if drafter == "model" else [])]
    monkeypatch.setattr(module, "clock", lambda target: lambda: sum(model.passes for model in models))
    found = measured(engine.target, engine.drafter).costs
    assert (found.rows(1), found.draft_step) == (1, drafter == "model")
    engine.generate("x = 1", SamplingParams(max_tokens=2))


@pytest.mark.parametrize("given", [True, False])
def test_passes_are_timed_on_a_text_and_not_on_one_token_again_and_again(given, monkeypatch):
    engine = Engine.embedded(max_num_seqs=1, threads=1, drafter="ngram")
    rows = list[list[int]]()
    score = engine.target.score
    text = sample_ids(engine.tokenizer)
    monkeypatch.setattr(
        engine.target,
        "score",
        lambda slots, tree, **more: (rows.append(tree.tokens[0].tolist()), score(slots, tree, **more))[1],
    )
    measured(engine.target, engine.drafter, text=text if given else None)
    assert len(text) > PROMPT + MEASURED[-1]
    longest = max(rows, key=len)
    assert len(longest) == MEASURED[-1] and len({*longest}) > 8
    assert (longest == text[PROMPT - 1 : PROMPT - 1 + MEASURED[-1]]) == given
