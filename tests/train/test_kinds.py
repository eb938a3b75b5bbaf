"""Training early exits, maps of states and block diffusion: they learn, draft, and begin with what was trained."""

import pytest

from polydraft import Engine, SamplingParams
from polydraft.errors import InvalidInputError
from polydraft.train.loop import TrainingOptions
from polydraft.train.run import train_drafter


@pytest.mark.parametrize(
    ("kind", "enough"),
    [
        ("early-exit", 120),
        pytest.param("hidden-transfer", 120, marks=pytest.mark.slow),
        pytest.param("block", 60, marks=pytest.mark.slow),
    ],
)
def test_a_trained_one_foretells_more_than_a_fresh_one_and_drafts(kind, enough, engine, written, tmp_path):
    cards = {}
    for name, steps in (("fresh", 1), ("trained", enough)):
        options = TrainingOptions.of(kind, minutes=5, unroll=2, draft_vocab=512)
        chosen = TrainingOptions(**{**options.__dict__, "max_steps": steps, "batch": 8, "window": 64})
        cards[name] = train_drafter(
            engine, kind, tmp_path / name, chosen, data=[written], report=lambda _: None
        )
    fresh, trained = (cards[name]["acceptance"] for name in ("fresh", "trained"))
    assert trained[0] > fresh[0] + 0.05, (fresh, trained)
    greedy = SamplingParams(temperature=0, max_tokens=48)
    prompt = "def add(a, b):\n"
    drafted = Engine.of(
        engine.target,
        tokenizer=engine.tokenizer,
        drafter=kind,
        drafter_options={"weights": tmp_path / "trained"},
        depth=2,
    )
    result = drafted.generate(prompt, greedy)[0]
    assert result.token_ids == engine.generate(prompt, greedy)[0].token_ids
    assert result.stats.accepted_tokens > 0
    assert result.stats.drafter_error is None
    again = train_drafter(
        engine, kind, tmp_path / "again", TrainingOptions(**{**chosen.__dict__, "max_steps": 1}), data=[written],
        start=tmp_path / "trained", report=lambda _: None,
    )  # fmt: skip
    assert again["acceptance"][0] > fresh[0] + 0.05, "it begins with what was trained"


def test_an_exit_behind_the_last_layer_is_refused(engine, written, tmp_path):
    last = max(engine.target.offers.hidden)
    train_drafter(
        engine,
        "early-exit",
        tmp_path,
        TrainingOptions(max_steps=1, layers=(last,)),
        data=[written],
        report=lambda _: None,
    )
    with pytest.raises(InvalidInputError, match=f"expected one of 1 to {last - 1}"):
        Engine.of(engine.target, drafter="early-exit", drafter_options={"weights": tmp_path})


def test_a_trained_head_foretells_more_drafts_losslessly_and_its_confidence_is_calibrated(
    engine, written, tmp_path
):
    cards = {}
    for name, steps in (("fresh", 1), ("trained", 40)):
        small = {
            "sizes": {"layers": 1, "block": 2, "rank": 8},
            "minutes": 5,
            "draft_vocab": 256,
            "batch": 8,
            "window": 48,
        }
        options = TrainingOptions.of("dspark", **small, loss="lk", max_steps=steps)
        cards[name] = train_drafter(
            engine, "dspark", tmp_path / name, options, data=[written], report=lambda _: None
        )
    fresh, trained = (cards[name]["acceptance"] for name in ("fresh", "trained"))
    assert trained[0] > fresh[0] + 0.05 and trained[1] > fresh[1] + 0.02, (fresh, trained)
    confidence = cards["fresh"]["confidence"]
    assert confidence["calibration_error"] < confidence["calibration_error_before"]
    drafted = Engine.of(
        engine.target, tokenizer=engine.tokenizer, drafter_options={"weights": tmp_path / "trained"}, depth=2
    )
    result = drafted.generate("def add(a, b):\n", SamplingParams(temperature=0, max_tokens=32))[0]
    assert (
        result.token_ids
        == engine.generate("def add(a, b):\n", SamplingParams(temperature=0, max_tokens=32))[0].token_ids
    )
    assert result.stats.accepted_tokens > 0 and result.stats.drafter_error is None
