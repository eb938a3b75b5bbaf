"""Small GGUF files, written with the `gguf` package from models of transformers, and read again by transformers' own loader."""

from pathlib import Path

import gguf
import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from polydraft.bench.llama_cpp import quantized, write_model

K_TYPES = {
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    **dict.fromkeys(("IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"), (0,)),
    "IQ1_M": (),
    "NVFP4": (),
}
"""Those that the package cannot make: where their blocks hold a factor in float16."""
FACTOR = np.array([2e-4], np.float16)


def write(path, module, kind="F32", *, rope_factors=None, **options):
    """As `write_model`; formats that the package cannot make are random blocks."""
    rng = np.random.default_rng(0)

    def blocks(weight, stored):
        return _random_blocks(weight.shape, stored, rng) if stored in K_TYPES else quantized(weight, stored)

    write_model(Path(path), module, kind, rope_factors=rope_factors, quantize=blocks, **options)
    return str(path)


def _random_blocks(shape, kind, rng):
    in_block, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = rng.integers(0, 256, (shape[0], shape[1] // in_block, num_bytes), np.uint8)
    for at in K_TYPES[kind]:
        blocks[..., at : at + 2] = FACTOR.view(np.uint8)
    if kind == "IQ1_M":  # four bits of it in each of four words
        words = blocks[..., 48:].view(np.uint16)
        words[:] = words & 0xFFF | (FACTOR.view(np.uint16) >> np.array([0, 4, 8, 12], np.uint16) & 15) << 12
    if kind == "NVFP4":
        blocks[..., :4] = blocks[..., :4] & 7
    return blocks.reshape(shape[0], -1)


def read_by_transformers(path):
    """The model that transformers makes of a file: its configuration, its names, its dequantised weights in float32."""
    config = AutoConfig.for_model(**load_gguf_checkpoint(path)["config"])
    module = AutoModelForCausalLM.from_config(config).float().eval()
    weights = load_gguf_checkpoint(path, return_tensors=True, model_to_load=module)["tensors"]
    missing = module.load_state_dict(weights, strict=False).missing_keys
    assert set(missing) <= {"lm_head.weight"}
    module.tie_weights()
    return module


@torch.no_grad()
def logits(module, ids):
    return module(torch.tensor([ids])).logits[0, -1]
