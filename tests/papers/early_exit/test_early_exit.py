"""The target's first layers as its drafter: one cache, one set of weights, and the distribution of the target."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from polydraft import SamplingParams
from polydraft.core import Budget
from polydraft.core.geometry import chain
from polydraft.drafters.base import Parts
from polydraft.errors import InvalidInputError
from polydraft.heads.target_slots import ExitArrays
from polydraft.models.torch.hf import HFTarget
from polydraft.papers.early_exit import EarlyExitDrafter
from tests.drafters.sessions import requests
from tests.papers import layered
from tests.support.tiny import compiled

PROMPTS = [[1, 2, 3, 1, 2], [4], [0, 0, 1, 0, 0]]


@pytest.mark.parametrize("backend", [compiled, HFTarget])
def test_drafts_have_the_distributions_of_the_layers_below_the_exit(backend):
    """Against the module of transformers: its states behind layer E, its norm and its head."""
    module = layered.module()
    model = backend(layered.module(), max_num_seqs=4, max_model_len=64)
    drafter = EarlyExitDrafter.build(Parts(model, None, None, ()), layer=2)
    (request,) = requests([1, 2, 3, 4])
    (state,) = layered.started(drafter, model, [[1, 2, 3, 4]])
    draft = drafter.propose([state], [Budget.fixed(chain(3))])
    text = torch.tensor([[*request.prompt_token_ids, *draft.tree.tokens[0, 1:].tolist()]])
    with torch.no_grad():
        states = module.model(text, output_hidden_states=True).hidden_states[2]
        expected = module.lm_head(module.model.norm(states)).softmax(-1)
    np.testing.assert_allclose(draft.probs[0], expected[0, 3:6], atol=1e-5, rtol=1e-4)
    assert (expected[0, 3] - expected[0, 4]).abs().sum() > 0.05, "distributions that differ"


def test_an_exit_behind_nearly_all_layers_is_the_target_where_the_last_one_does_nothing():
    """E = L accepts everything; here layer L adds nothing, so that E = L - 1 has the target's own distributions."""
    module = layered.module()
    with torch.no_grad():
        module.model.layers[-1].self_attn.o_proj.weight.zero_()
        module.model.layers[-1].mlp.down_proj.weight.zero_()
    model = compiled(module, max_num_seqs=4, max_model_len=64)
    made = layered.engine("early-exit", {"layer": 3}, "speculative", num_paths=1, model=model)
    result = made.generate(PROMPTS[:1], SamplingParams(max_tokens=41, seed=1))[0]
    assert result.stats.accepted_tokens == result.stats.drafted_tokens


def test_nothing_is_run_but_the_drafted_rows_and_no_weight_is_copied():
    """Committed tokens are never run through the first layers again: a proposal costs its own nodes that have children."""
    model = layered.target()
    made = layered.engine("early-exit", {"layer": 2}, num_paths=1, depth=3, model=model)
    net = made.drafter.model
    assert net.weight_bytes == 0
    assert net.arrays.target.embed.data.ctypes.data == model.arrays.embed.data.ctypes.data
    assert net.arrays.memory.keys.ctypes.data == model.arrays.memory.keys.ctypes.data
    result = made.generate([[1, 2, 3] * 8], SamplingParams(max_tokens=30, seed=1))[0]
    assert 0 < net.passes <= 3 * result.stats.steps
    assert net.cache_bytes == 0


@pytest.mark.parametrize("layer", [0, 4, 9, -1])
def test_a_layer_that_is_none_below_the_last_is_refused(layer):
    with pytest.raises(InvalidInputError, match="expected one of 1 to 3"):
        layered.engine("early-exit", {"layer": layer})


def test_an_exit_of_nothing_is_refused():
    with pytest.raises(InvalidInputError, match="expected one of them"):
        layered.engine("early-exit", {})


def test_the_module_of_the_arrays_imports_no_torch():
    """Stored code names its types, and whoever looks for code of the same functions imports their module."""
    asked = f"import {ExitArrays.__module__}, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True)
    assert not {"torch", "transformers"} & set(done.stdout.split())
