"""Small GGUF files, written with the `gguf` package from models of transformers, and read again by transformers' own loader."""

import gguf
import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

K_TYPES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,)}
"""Those that the package cannot make: where their blocks hold a factor in float16."""


def _as_written(arch, config, name, weight):
    """A weight as llama.cpp's converter changes it."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    part = name.split(".")[-2]
    if arch in ("llama", "smollm3", "granite") and part in heads:
        halves = weight.reshape(heads[part], 2, weight.shape[0] // heads[part] // 2, -1)
        return halves.swapaxes(1, 2).reshape(weight.shape)
    return weight + 1 if arch.startswith("gemma") and "norm" in name else weight


def _random_blocks(shape, kind, rng):
    in_block, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = rng.integers(0, 256, (shape[0], shape[1] // in_block, num_bytes), np.uint8)
    for at in K_TYPES[kind]:
        blocks[..., at : at + 2] = np.array([2e-4], np.float16).view(np.uint8)
    return blocks.reshape(shape[0], -1)


def write(path, module, kind="F32", *, arch=None, tokenizer=None, rope_factors=None, without=(), more=(), **settings):
    """Write a module; matrices are of number format `kind`, or of what it returns for their names in the file.

    settings: metadata of the architecture, a dot written as two underscores.  without, more: tensors to leave out and to add.
    """
    config = module.config
    arch = arch or {"mistral": "llama", "gemma3_text": "gemma3"}.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(path, arch)
    writer.add_name("small")
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_rope_dimension_count(int(width * (config.rope_parameters.get("partial_rotary_factor") or 1)))
    writer.add_key_length(width)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    ropes = config.rope_parameters
    writer.add_rope_freq_base(ropes.get("rope_theta") or ropes["full_attention"]["rope_theta"])
    if getattr(config, "sliding_window", None) and arch in ("gemma2", "gemma3", "phi3"):
        writer.add_sliding_window(config.sliding_window)
    if arch == "granite":
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    for key, value in settings.items():
        add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}[type(value)]
        add(f"{arch}.{key.replace('__', '.')}", value)
    if tokenizer is not None:
        tokenizer(writer)
    names, rng = gguf.get_tensor_name_map(writer_arch(arch), config.num_hidden_layers), np.random.default_rng(0)
    weights = {
        name: w.numpy()
        for name, w in module.state_dict().items()
        if not (name == "lm_head.weight" and config.tie_word_embeddings)
    }
    for name, weight in [*weights.items(), *more]:
        if name in without:
            continue
        own = names.get_name(name, try_suffixes=(".weight", ".bias")) or name
        changed = np.ascontiguousarray(_as_written(arch, config, name, weight))
        chosen = kind(own) if callable(kind) else kind
        number = gguf.GGMLQuantizationType[chosen if changed.ndim > 1 else "F32"]
        blocks = _random_blocks(changed.shape, chosen, rng) if number.name in K_TYPES else gguf.quantize(changed, number)
        writer.add_tensor(own, blocks, raw_dtype=number)
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", rope_factors.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


def writer_arch(name):
    return next(kind for kind, known in gguf.MODEL_ARCH_NAMES.items() if known == name)


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
