"""Lookahead's window is scored beside the draft: on models whose layers see a window of the text, or keep a state of it, texts stay the target's."""

import json
from pathlib import Path

import pytest

from polydraft.core import SamplingParams
from polydraft.engine.api import Engine
from polydraft.models.load import load_model

FOLDER = Path(__file__).parents[2] / "models" / "oracle_gguf"
GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
LOOKAHEAD = {
    "drafter": "lookahead",
    "drafter_options": {"columns": 3, "ngram": 3},
    "depth": 3,
    "num_paths": 3,
}


@pytest.fixture(params=["gemma3", "qwen35", "granitehybrid", "lfm2"])
def target(request):
    """A tiny model: of windows, of gated delta rules, of state spaces, of short convolutions."""
    place = FOLDER / f"{request.param}.gguf"
    return load_model(str(place), max_num_seqs=2, max_model_len=256, cache_dtype="float32")


@pytest.fixture
def prompts(target):
    """One that is longer than any window, and one that is not."""
    cases = json.loads(Path(target.name).with_suffix(".json").read_text(encoding="utf-8"))["cases"]
    return [cases[0]["prompt"] * 12, cases[-1]["prompt"]]


def results(target, prompts, params, **drafts):
    return Engine.of(target, **drafts).generate(prompts, params)


def test_greedy_texts_are_those_without_drafts(target, prompts):
    plain = results(target, prompts, GREEDY, drafter=None)
    drafted = results(target, prompts, GREEDY, **LOOKAHEAD)
    assert [r.token_ids for r in drafted] == [r.token_ids for r in plain]
    assert all(r.stats.drafted_tokens > 0 and r.stats.drafter_error is None for r in drafted)


def test_a_seed_gives_the_text_without_drafts(target, prompts):
    params = SamplingParams(temperature=1.0, max_tokens=32, seed=7, ignore_eos=True)
    plain = results(target, prompts, params, drafter=None, verifier="race")
    drafted = results(target, prompts, params, verifier="race", **LOOKAHEAD)
    assert [r.token_ids for r in drafted] == [r.token_ids for r in plain]
