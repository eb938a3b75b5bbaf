"""Drafts, trees and kept prefixes of models whose layers keep states are lossless: texts are those without drafts, and transformers'."""

import json
from pathlib import Path

import pytest

from polydraft.core import SamplingParams
from polydraft.engine.api import Engine
from polydraft.heads.mtp import MtpDrafter
from polydraft.models.compiled.model import CompiledModel
from polydraft.models.load import load_model

FOLDER = Path(__file__).parents[1] / "models" / "oracle_gguf"
CASES = json.loads((FOLDER / "qwen35.json").read_text(encoding="utf-8"))["cases"]
PROMPTS = [case["prompt"] for case in CASES] + [CASES[1]["prompt"] * 6]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SAMPLED = [
    SamplingParams(temperature=1.0, max_tokens=40, seed=seed, ignore_eos=True) for seed in range(len(PROMPTS))
]


def hybrid(seqs=4, name="qwen35"):
    target = load_model(
        str(FOLDER / f"{name}.gguf"),
        backend="compiled",
        max_num_seqs=seqs,
        max_model_len=256,
        cache_dtype="float32",
    )
    assert isinstance(target, CompiledModel)
    return target


def texts(params, **drafts):
    return [r.token_ids for r in Engine.of(hybrid(), **drafts).generate(PROMPTS, params)]


@pytest.fixture(scope="module")
def plain():
    return texts(GREEDY, drafter=None)


def test_greedy_texts_are_those_of_transformers(plain):
    assert plain[:3] == [case["ids"] for case in CASES]


DRAFTS = {
    "chain": {"drafter": "ngram", "depth": 5, "num_paths": 1},
    "tree": {"drafter": "ngram", "depth": 4, "num_paths": 3, "verifier": "traversal"},
    "grown": {"drafter": "suffix"},
    "race": {"drafter": "ngram", "num_paths": 2, "depth": 3, "verifier": "race"},
    "model-chain": {"drafter": "model:chain", "depth": 4, "verifier": "block"},
    "model-tree": {"drafter": "model:paths", "num_paths": 3, "depth": 3},
    "model-grown": {"drafter": "model:coupled", "num_paths": 2},
}


def drafted(params, name):
    """With the drafts of a name; a draft model is another hybrid, whose drafts are mostly rejected."""
    draft = {"draft_model": hybrid(name="qwen35-mtp")} if name.startswith("model") else {}
    return texts(params, **draft, **DRAFTS[name])


@pytest.mark.parametrize("name", DRAFTS)
def test_drafts_change_no_greedy_token(plain, name):
    assert drafted(GREEDY, name) == plain


@pytest.mark.parametrize("name", ["tree", "grown"])
def test_a_seed_gives_the_same_text_with_drafts(name):
    drafts = DRAFTS[name] | {"verifier": "race"}
    assert texts(SAMPLED, **drafts) == texts(SAMPLED, drafter=None, verifier="race")


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("qwen35-mtp", fields)
        for fields in (
            {},
            {"depth": 3},
            {"drafter": "mtp", "num_paths": 2, "depth": 2},
            {"drafter": "mtp:chain", "depth": 2},
        )
    ]
    + [("glm4moe", {"depth": 3})],
)
def test_a_layer_that_predicts_in_the_targets_own_file_drafts_by_default(name, fields):
    cases = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))["cases"]
    engine = Engine.of(hybrid(name=name), **fields)
    assert isinstance(engine.drafter, MtpDrafter)
    results = engine.generate([case["prompt"] for case in cases], GREEDY)
    assert [r.token_ids for r in results] == [case["ids"] for case in cases]
    assert not fields or any(r.stats.drafted_tokens for r in results)
