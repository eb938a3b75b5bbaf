"""Folders of GPTQ, AWQ and compressed-tensors are read into blocks with the same numbers; what is not read is refused by name before anything is loaded."""

import json

import numpy as np
import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from polydraft.errors import IncompatibleError
from polydraft.models.compiled.model import CompiledModel
from polydraft.models.load import load_model
from tests.models.tree_rounds import fresh, small_model
from tests.support.closeness import assert_close

GROUP = 64
SIZES = {"vocab_size": 96, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2}
CONFIG = hf.LlamaConfig(**SIZES, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64)
TEXT = [5, 9, 4, 9, 5, 7, 2, 7, 5, 1]
WORD = torch.arange(8)


def words(codes, order=WORD):
    """Eight codes of the last dimension in each word; place k of a word has the code `order[k]`."""
    eight = codes.reshape(*codes.shape[:-1], -1, 8)[..., order].to(torch.int64)
    return (eight << (4 * WORD)).sum(-1).to(torch.int32)


def gptq(codes, scales, zeros, less=1):
    return {
        "qweight": words(codes.T.reshape(-1, 8, len(codes)).swapaxes(1, 2))[..., 0].contiguous(),
        "scales": scales.T.contiguous(),
        "qzeros": words((zeros - less).T.contiguous() % 16),
        "g_idx": torch.arange(codes.shape[1], dtype=torch.int32) // GROUP,
    }


def awq(codes, scales, zeros):
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    return {
        "qweight": words(codes.T.contiguous(), order),
        "scales": scales.T.contiguous(),
        "qzeros": words(zeros.T.contiguous(), order),
    }


def compressed(codes, scales, zeros):
    shape = torch.tensor(codes.shape)
    return {"weight_packed": words(codes), "weight_scale": scales, "weight_shape": shape}


WAYS = {
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False}, True),
    "gptq without symmetry": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP}, False),
    "gptq 2": (
        lambda *parts: gptq(*parts, less=0),
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "checkpoint_format": "gptq_v2"},
        False,
    ),
    "awq": (
        awq,
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
        False,
    ),
    "compressed-tensors": (
        compressed,
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {
                "group_0": {"weights": {"num_bits": 4, "group_size": GROUP, "symmetric": True}}
            },
        },
        True,
    ),
}


def in_codes(folder, way, quantization, symmetric):
    """A folder whose products are codes, and the model of the numbers that they stand for."""
    module = small_model(CONFIG)
    module.save_pretrained(folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    torch.manual_seed(0)
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        outputs, inputs = tensors.pop(name).shape
        codes = torch.randint(0, 16, (outputs, inputs))
        groups = outputs, inputs // GROUP
        scales = (torch.rand(groups) * 0.02 + 0.02).half()
        zeros = torch.full(groups, 8) if symmetric else torch.randint(4, 12, groups)
        tensors |= {name.replace("weight", part): x for part, x in way(codes, scales, zeros).items()}
        spread = [x.repeat_interleave(GROUP, 1).float() for x in (scales, zeros)]
        module.get_submodule(name.removesuffix(".weight")).weight.data = (codes - spread[1]) * spread[0]
    save_file({name: x.contiguous() for name, x in tensors.items()}, file, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    return module


@pytest.mark.parametrize("name", WAYS)
def test_codes_in_groups_are_blocks_with_their_numbers(name, tmp_path):
    module = in_codes(tmp_path, *WAYS[name])
    exact = {"activations": "float32", "cache_dtype": "float32"}
    target = load_model(str(tmp_path), device="cpu", max_num_seqs=1, **exact)
    assert isinstance(target, CompiledModel)
    assert ("Q4_0" if WAYS[name][2] else "Q4_1") in target.weight_format
    # minima of Q4_1 are rounded to float16
    share = 1e-5 if WAYS[name][2] else 2e-3
    assert_close(target.prefill([0], [TEXT]).logits[0, 0], fresh(module, TEXT)[-1], share)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"bits": 3}, "gptq weights have 3 bits; 4 are read"),
        ({"group_size": 24}, "groups of 24 inputs; multiples of 32 are read"),
        ({"desc_act": True}, "inputs in another order"),
        ({"quant_method": "bitsandbytes"}, "codes of bitsandbytes"),
    ],
)
def test_what_is_not_read_is_refused_by_name_before_anything_is_loaded(change, reason, tmp_path, monkeypatch):
    way, quantization, symmetric = WAYS["gptq"]
    in_codes(tmp_path, way, quantization | change, symmetric)
    monkeypatch.setattr("polydraft.models.torch.module.load_module", None)
    monkeypatch.setattr("polydraft.models.plan.find_spec", lambda name: None)
    with pytest.raises(IncompatibleError, match=f"{reason}.*and that is not installed"):
        load_model(str(tmp_path), device="cpu")


def test_codes_are_rows_of_one_matrix_where_a_family_has_them_fused(tmp_path):
    config = hf.Phi3Config(
        **SIZES, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0
    )
    small_model(config).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.0.self_attn.qkv_proj.weight"
    codes = torch.randint(0, 16, tuple(tensors.pop(name).shape))
    scales = torch.full((len(codes), 2), 0.03).half()
    tensors |= {name.replace("weight", part): x for part, x in compressed(codes, scales, None).items()}
    save_file(tensors, file, {"format": "pt"})
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps(settings | {"quantization_config": WAYS["compressed-tensors"][1]})
    )
    target = load_model(str(tmp_path), device="cpu", max_num_seqs=1)
    keys = target.checkpoint.read("model.layers.0.self_attn.k_proj.weight")
    assert np.array_equal(keys, ((codes - 8)[128:192] * scales[0, 0].float()).numpy())
