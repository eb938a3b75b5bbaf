"""Frequencies of rotary positions are those of transformers."""

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from polydraft.models.rotary import frequencies

LONGER = {"factor": 4.0, "original_max_position_embeddings": 2048}
SCALED = {
    "linear": {"rope_type": "linear", "factor": 2.5},
    "yarn": {"rope_type": "yarn", **LONGER},
    "yarn, another growth": {"rope_type": "yarn", **LONGER, "attention_factor": 1.25},
    "yarn, other turns": {"rope_type": "yarn", **LONGER, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn, shorter": {"rope_type": "yarn", **LONGER, "factor": 0.5},
    "yarn, of DeepSeek": {"rope_type": "yarn", **LONGER, "mscale": 0.707, "mscale_all_dim": 0.8},
    "llama3": {"rope_type": "llama3", **LONGER, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
}


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("theta", [1e4, 1e6])
def test_scaled_frequencies_are_those_of_transformers(name, theta):
    config = LlamaConfig(
        hidden_size=512, num_attention_heads=4, rope_parameters={"rope_theta": theta, **SCALED[name]}
    )
    ours, growth = frequencies(config)
    theirs, their_growth = ROPE_INIT_FUNCTIONS[SCALED[name]["rope_type"]](config, torch.device("cpu"))
    np.testing.assert_array_max_ulp(ours, theirs.numpy(), 4)  # powers of torch are rounded otherwise
    assert growth == pytest.approx(their_growth, rel=1e-12)
