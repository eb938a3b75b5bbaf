"""Heads as they are in torch, for targets that the compiled path does not serve: they draft, and the text is the target's."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from polydraft import Engine, SamplingParams
from polydraft.errors import IncompatibleError
from polydraft.heads.network import DepthModel, HeadModel
from polydraft.methods import registry
from polydraft.models import load, pair
from polydraft.models.torch.hf import HFTarget
from polydraft.train.run import untrained

HEADS = [kind for kind in registry.names("recipe") if kind != "model"]
PROMPTS = ["def add(a, b):\n", "import os\n\nfor name in "]


@pytest.fixture(scope="module")
def target():
    return load.load_model(
        str(pair.target_folder()), backend="transformers", device="cpu", max_num_seqs=4, max_model_len=128
    )


@pytest.fixture(scope="module")
def tokenizer():
    return load.load_tokenizer(str(pair.target_folder()))


def bound(kind, target, folder, tokenizer=None, **options):
    """An engine with an untrained head, whose weights are random but for what the target begins it with."""
    torch.manual_seed(0)
    weights = untrained(kind, target, folder / kind)
    drafter = registry.recipe(kind).checkpoint.kind
    return Engine.of(
        target, tokenizer=tokenizer, drafter=drafter, drafter_options={"weights": weights}, **options
    )


@pytest.mark.parametrize("kind", HEADS)
def test_a_head_drafts_for_a_target_of_transformers_whose_text_it_leaves_alone(
    kind, target, tokenizer, tmp_path
):
    engine = bound(kind, target, tmp_path, tokenizer, depth=2)
    assert isinstance(getattr(engine.drafter, "model", None), (HeadModel, DepthModel))
    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    drafted = engine.generate(PROMPTS, greedy)
    plain = Engine.of(target, tokenizer=tokenizer, drafter=None).generate(PROMPTS, greedy)
    assert [result.token_ids for result in drafted] == [result.token_ids for result in plain]
    for result in drafted:
        assert result.stats.drafter_error is None
        assert result.stats.drafted_tokens > 0


@pytest.mark.parametrize("kind", ["early-exit", "hidden-transfer"])
def test_a_head_that_runs_its_targets_layers_refuses_those_of_another_family(kind, tmp_path):
    module = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=4, n_head=2, n_positions=128))
    with pytest.raises(IncompatibleError, match="its type 'gpt2' is not one of llama"):
        bound(kind, HFTarget(module, max_num_seqs=2), tmp_path)
