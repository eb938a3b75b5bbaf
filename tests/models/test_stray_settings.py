"""A family takes of a config.json only what its class of transformers takes, and windows as that class switches them."""

import json

import pytest
import transformers as hf
from huggingface_hub.errors import StrictDataclassFieldValidationError

from polydraft.models.compiled.model import CompiledModel
from polydraft.models.load import in_transformers
from polydraft.models.loading import checkpoint
from polydraft.models.networks import COMPILED
from polydraft.models.networks.base import UncompiledError
from polydraft.models.torch.hf import HFTarget
from polydraft.models.torch.module import load_module
from polydraft.models.torch.module_weights import of_module
from tests.models.small_types import small_config
from tests.models.tree_rounds import fresh, small_model
from tests.support.closeness import assert_close

TEXT = [5, 9, 4, 9, 5, 7, 2, 7, 5, 1, 5, 3, 11, 8]
SLIDING = ["sliding_attention"] * 4
STRAY = {
    "part": {"partial_rotary_factor": 0.5},
    "part among rotary parameters": {"rope_parameters": {"partial_rotary_factor": 0.5}},
    "window": {"sliding_window": 3},
    "no window": {"sliding_window": None},
    "window switched off": {"use_sliding_window": False, "sliding_window": 3},
    "window switched on": {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1},
    "kinds of layers": {"layer_types": SLIDING, "sliding_window": 3, "use_sliding_window": True},
    "chunk": {"attention_chunk_size": 3},
    "other names of a window": {
        "attention_window_size": 3,
        "window_size": 3,
        "sliding_window_size": 3,
        "local_attention": 3,
    },
    "norms and biases": {"use_qk_norm": False, "qkv_bias": False, "attention_bias": False},
    "activation": {"hidden_act": "gelu_pytorch_tanh"},
    "settings of our own": {"tiled_value_heads": True, "yarn_truncates": True},
    "scales": {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "final_logit_softcapping": 2.0},
}
HYBRID = frozenset(
    {
        "falcon_h1",
        "gemma4_text",
        "gemma4_unified_text",
        "granitemoehybrid",
        "lfm2",
        "lfm2_moe",
        "nemotron_h",
        "qwen3_5_text",
        "qwen3_5_moe_text",
        "qwen3_next",
    }
)
"""Whose kinds of layers say what they are made of."""
MANY = HYBRID | {
    "cohere2",
    "deepseek_v3",
    "gemma",
    "gemma2",
    "gemma3_text",
    "glm4",
    "glm4_moe",
    "gpt_oss",
    "granite",
    "llama",
    "mistral",
    "mixtral",
    "olmo2",
    "phi3",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "smollm3",
}
"""Which many people run: the others are tried in the slow tests."""


def said_too(settings, more):
    """A config.json that says more; of rotary parameters, beside its own."""
    rope = settings.get("rope_parameters") or {}
    kinds = [kind for kind, value in rope.items() if isinstance(value, dict)]
    own = more.get("rope_parameters")
    merged = {kind: rope[kind] | own for kind in kinds} if own and kinds else rope | own if own else rope
    return settings | more | {"rope_parameters": merged}


def of_class(folder, weights):
    """The logits of what transformers makes of the folder; None where it refuses the settings, or lacks weights for them."""
    try:
        model = hf.AutoModelForCausalLM.from_config(hf.AutoConfig.from_pretrained(folder)).eval()
        model.load_state_dict(weights)
        return fresh(model, TEXT)[-1]
    except (RuntimeError, StrictDataclassFieldValidationError, ValueError):
        return None


def compiled(folder):
    """Logits of the compiled path; None where it leaves the folder to transformers."""
    try:
        files = checkpoint.of_folder(folder)
    except UncompiledError:
        files = of_module(load_module(folder, device="cpu"))
    if CompiledModel.why_unsupported(files):
        return None
    return (
        CompiledModel(files, max_num_seqs=1, max_model_len=16, cache_dtype="float32")
        .prefill([0], [TEXT])
        .logits[0, 0]
    )


@pytest.mark.parametrize(
    "kind",
    [kind if kind in MANY else pytest.param(kind, marks=pytest.mark.slow) for kind in sorted(COMPILED)],
)
def test_a_family_takes_only_the_settings_of_its_class(kind, tmp_path):
    module = small_model(small_config(kind))
    module.save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    weights = module.state_dict()
    compared = 0
    for more in STRAY.values():
        if kind in HYBRID and "layer_types" in more:
            continue
        (tmp_path / "config.json").write_text(json.dumps(said_too(settings, more)))
        theirs = of_class(tmp_path, weights)
        ours = None if theirs is None else compiled(tmp_path)
        if ours is not None:
            assert_close(ours, theirs, 1e-4)
            compared += 1
    assert compared >= 8


@pytest.mark.parametrize("kind", ["mistral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3"])
@pytest.mark.parametrize(
    "switch", [{"use_sliding_window": False}, {"use_sliding_window": True, "max_window_layers": 1}, {}]
)
def test_a_width_without_kinds_of_layers_is_a_window_where_its_class_switches_it_on(kind, switch, tmp_path):
    module = small_model(small_config(kind))
    module.save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text()) | {
        "sliding_window": 3,
        "max_window_layers": 1,
    }
    for name in ("layer_types", "use_sliding_window"):
        settings.pop(name, None)
    (tmp_path / "config.json").write_text(json.dumps(settings | switch))
    theirs = of_class(tmp_path, module.state_dict())
    assert_close(compiled(tmp_path), theirs, 1e-4)


def test_a_window_that_a_folder_leaves_to_the_class_is_that_of_the_class(tmp_path):
    small_model(small_config("mistral")).save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    del settings["sliding_window"]
    (tmp_path / "config.json").write_text(json.dumps(settings))
    assert set(checkpoint.of_folder(tmp_path).spec.windows) == {hf.MistralConfig().sliding_window}


def test_a_window_of_a_class_that_has_none_leaves_drafts_their_cache():
    config = small_config("granite")
    config.sliding_window = 3
    config.layer_types = SLIDING
    config.window_size = 3
    assert type(in_transformers(small_model(config), max_model_len=64)) is HFTarget
