"""What cannot be is refused from names, headers and small files, before anything is loaded."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from polydraft.config import EngineConfig
from polydraft.core.params import SamplingParams
from polydraft.engine import pretrained
from polydraft.engine.api import Engine
from polydraft.engine.plan import Plan
from polydraft.errors import (
    CapacityError,
    IncompatibleError,
    InvalidInputError,
    ModelLoadError,
    UnknownNameError,
)
from polydraft.models import pair
from polydraft.models.store import catalogue
from polydraft.policy.profile import Profile

GGUF = Path(__file__).parents[1] / "models" / "oracle_gguf"


@pytest.fixture(autouse=True)
def nothing_is_loaded(monkeypatch):
    monkeypatch.setattr(pretrained.load, "load_model", lambda *_, **__: pytest.fail("a model was loaded"))


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"drafter": "modle"}, UnknownNameError, "did you mean 'model'"),
        (
            {"drafter": 5},
            InvalidInputError,
            "drafter=5 was given; expected a name of `polydraft methods`, or a `core.Drafter`",
        ),
        (
            {"drafter": object},
            InvalidInputError,
            "was given; expected a name of `polydraft methods`, or a `core.Drafter`",
        ),
        (
            {"verifier": 5},
            InvalidInputError,
            "verifier=5 was given; expected a name of `polydraft methods`, or a `core.Verifier`",
        ),
        ({"head": 5}, InvalidInputError, "head=5 was given; expected a path"),
        ({"asynchronous": 5}, InvalidInputError, "asynchronous=5 was given; expected True or False"),
        ({"drafter_options": 5}, InvalidInputError, "drafter_options=5 was given; expected options by name"),
        ({"draft_model": ""}, InvalidInputError, "draft_model='' was given; expected some text"),
        (
            {"draft_vocabulary": 99999},
            InvalidInputError,
            "draft_vocabulary=99999 was given; the draft model has 2048 tokens",
        ),
        ({"alpha": 0.1}, InvalidInputError, "alpha=0.1 was given without decoding, whose option it is"),
        (
            {"amateur": ..., "decoding": None},
            InvalidInputError,
            "amateur was given without decoding, whose option it is",
        ),
        ({"drafter": "model:"}, InvalidInputError, "expected a kind after the colon"),
        ({"offered": ("ngrm",)}, UnknownNameError, "did you mean 'ngram'"),
        ({"verifier": "blok"}, UnknownNameError, "did you mean 'block'"),
        ({"decoding": "gidance"}, UnknownNameError, "did you mean 'guidance'"),
        ({"policy": "adaptiv"}, UnknownNameError, "did you mean 'adaptive'"),
        ({"head": "nowhere"}, ModelLoadError, "has no config.json"),
        ({"index": "nowhere", "drafter": "trigram"}, InvalidInputError, "was given as a text index"),
        ({"profile": "nowhere"}, InvalidInputError, "cannot be read"),
        ({"model": "no/such/folder"}, ModelLoadError, "does not exist"),
        ({"max_model_len": 2000}, CapacityError, "the model's context holds 1024"),
    ],
    ids=str,
)
def test_an_option_is_refused_before_anything_is_loaded(options, error, said):
    with pytest.raises(error, match=said):
        Engine.from_config(EngineConfig(**{"model": "embedded", **options}))


def test_more_tokens_than_the_context_holds_are_refused():
    Plan.of(EngineConfig()).check_params(SamplingParams(max_tokens=1023))
    with pytest.raises(CapacityError, match="max_tokens=1024 was given; the context holds 1024"):
        Plan.of(EngineConfig()).check_params(SamplingParams(max_tokens=1024))


def test_a_profile_that_was_changed_is_refused(tmp_path):
    file = tmp_path / "profile.json"
    Profile.assumed().save(file)
    Plan.of(EngineConfig(profile=file))
    said = json.loads(file.read_text())
    file.write_text(json.dumps({**said, "about": {"machine": "another"}}))
    with pytest.raises(InvalidInputError, match="does not add up to its checksum"):
        Plan.of(EngineConfig(profile=file))


@pytest.fixture
def other(tmp_path):
    """The embedded draft with one token spelt in another way and half the context."""
    folder = shutil.copytree(pair.draft_folder(), tmp_path / "other")
    words = (folder / "tokenizer.json").read_text(encoding="utf-8")
    (folder / "tokenizer.json").write_text(words.replace("<|endoftext|>", "<|end|>"), encoding="utf-8")
    settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(
        json.dumps(settings | {"max_position_embeddings": 512}), encoding="utf-8"
    )
    return str(folder)


def test_two_vocabularies_are_told_before_two_contexts(other):
    said = "2 tokens differ, the first is '<|endoftext|>', id 0 in the target and None in the draft"
    with pytest.raises(IncompatibleError, match=re.escape(said)):
        Plan.of(EngineConfig(draft_model=other))
    Plan.of(EngineConfig(draft_model=other, drafter="slem", max_model_len=512))
    with pytest.raises(IncompatibleError, match="the draft's context holds 512 tokens, the target's 1024"):
        Plan.of(EngineConfig(draft_model=other, drafter="slem"))


def test_the_headers_of_two_gguf_files_tell_two_vocabularies():
    Plan.of(
        EngineConfig(model=f"{GGUF}/phi3.gguf", draft_model=f"{GGUF}/phi3-longrope.gguf", max_model_len=32)
    )
    with pytest.raises(IncompatibleError, match="target and draft have different vocabularies"):
        Plan.of(EngineConfig(model=f"{GGUF}/phi3.gguf", draft_model=f"{GGUF}/gemma2.gguf", max_model_len=32))


def test_a_model_that_is_not_here_yet_is_not_looked_into(monkeypatch, tmp_path):
    monkeypatch.setenv("POLYDRAFT_CACHE", str(tmp_path))
    monkeypatch.setattr(catalogue, "fetch", lambda model: pytest.fail("it was fetched"))
    Plan.of(EngineConfig(model="smollm2-135m-instruct"))
    Plan.of(EngineConfig(model="owner/name"))


def test_checks_import_neither_torch_nor_numba():
    asked = "import sys; from polydraft.config import EngineConfig; from polydraft.engine.plan import Plan; Plan.of(EngineConfig()); print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", asked], capture_output=True, text=True, check=True, timeout=60
    ).stdout.split()
    assert "polydraft.engine.plan" in loaded
    assert not {"torch", "numba", "transformers"} & set(loaded)


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        (
            {"drafter": "model:chian"},
            UnknownNameError,
            "unknown kind of model drafter 'chian'; did you mean 'chain'?",
        ),
        (
            {"drafter": "amusd:couple"},
            UnknownNameError,
            "unknown kind of amusd drafter 'couple'; did you mean 'coupled'?",
        ),
        ({"drafter": "model:coupled", "verifier": "block"}, IncompatibleError, "Verifiers that fit: "),
    ],
)
def test_kinds_of_drafters_and_verifiers_that_do_not_fit_are_refused_before_anything_is_loaded(
    options, error, said
):
    with pytest.raises(error, match=re.escape(said)):
        Plan.of(EngineConfig(**options))
    Plan.of(EngineConfig(drafter="model:paths", verifier="block"))


@pytest.mark.parametrize(
    "options",
    [
        {"drafter": "ngram", "verifier": "block"},
        {"drafter": "suffix", "verifier": "traversal_merged"},
        {"drafter": "eagle:coupled", "verifier": "block"},
        {"drafter": "medusa", "verifier": "greedy_traversal_wor"},
        {"drafter": "block:confidence", "verifier": "speculative"},
        {"drafter": "auto", "head": "HEAD", "verifier": "greedy_traversal_wor"},
    ],
)
def test_verifiers_that_do_not_fit_a_drafter_of_text_or_a_head_are_refused_before_anything_is_loaded(
    options, tmp_path
):
    (tmp_path / "config.json").write_text('{"polydraft_head": "eagle"}', encoding="utf-8")
    options = {name: str(tmp_path) if value == "HEAD" else value for name, value in options.items()}
    with pytest.raises(IncompatibleError, match="Verifiers that fit: "):
        Plan.of(EngineConfig(**options))
    if "head" not in options:  # whose files are not all there
        Plan.of(EngineConfig(**options | {"verifier": "match"}))


def test_a_prompt_of_more_tokens_than_the_context_holds_is_refused_before_weights_are_loaded(monkeypatch):
    plan = Plan.of(EngineConfig(max_model_len=32))
    plan.check_prompt("def add(a, b):\n" * 3)
    with pytest.raises(
        CapacityError,
        match=r"a prompt of \d+ tokens was given; the context holds 32, so it may have at most 31",
    ):
        plan.check_prompt("def add(a, b):\n" * 40)
    monkeypatch.setattr("polydraft.models.load.load_tokenizer", None)
    plan.check_prompt("x" * 30)
