"""A small model distilled on a target, and used as its draft model."""

import pytest
from transformers import AutoConfig

from polydraft import Engine, SamplingParams
from polydraft.errors import IncompatibleError
from polydraft.models import load
from polydraft.train.loop import TrainingOptions
from polydraft.train.run import train_drafter


def options(steps, **sizes):
    return TrainingOptions.of(
        "model", minutes=5, batch=4, window=128, max_steps=steps, sizes={"layers": 1, "width": 64, **sizes}
    )


def test_a_distilled_model_drafts_more_than_a_fresh_one(engine, written, tmp_path):
    cards = {
        name: train_drafter(
            engine, "model", tmp_path / name, options(steps), data=[written], report=lambda _: None
        )
        for name, steps in (("fresh", 1), ("trained", 120))
    }
    fresh, trained = (cards[name]["acceptance"][0] for name in ("fresh", "trained"))
    assert trained > fresh + 0.02, (fresh, trained)
    begun = train_drafter(
        engine,
        "model",
        tmp_path / "more",
        options(1),
        data=[written],
        start=tmp_path / "trained",
        report=lambda _: None,
    )
    assert begun["acceptance"][0] > fresh + 0.01, "it begins with what was trained"
    greedy = SamplingParams(temperature=0, max_tokens=32)
    prompt = "def add(a, b):\n"
    small = load.load_model(str(tmp_path / "trained"), max_num_seqs=2)
    drafted = Engine.of(engine.target, draft_model=small, tokenizer=engine.tokenizer, depth=2)
    result = drafted.generate(prompt, greedy)[0]
    assert result.token_ids == engine.generate(prompt, greedy)[0].token_ids
    assert result.stats.drafted_tokens > 0
    assert load.load_tokenizer(str(tmp_path / "trained")).encode(prompt) == engine.tokenizer.encode(prompt)


def test_its_depth_and_width_are_the_ones_asked_for_and_another_vocabulary_is_refused(
    engine, written, tmp_path
):
    train_drafter(
        engine, "model", tmp_path, options(1, layers=3, width=32), data=[written], report=lambda _: None
    )
    config = AutoConfig.from_pretrained(tmp_path)
    assert (config.num_hidden_layers, config.hidden_size) == (3, 32)
    config.vocab_size += 8
    config.save_pretrained(tmp_path)
    with pytest.raises(IncompatibleError, match="tokens and the target"):
        train_drafter(
            engine,
            "model",
            tmp_path / "more",
            options(1),
            data=[written],
            start=tmp_path,
            report=lambda _: None,
        )
