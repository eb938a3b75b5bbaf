"""What a GGUF file of one architecture is in transformers, as data: settings of a configuration, and each weight by the file's tensors.

It serves every architecture of which transformers has a model, whether its layers are compiled here or not. Names of weights are those of
transformers' modules, without the layer; names of tensors are the file's, without the block.
"""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from polydraft.models.loading.conversions.names import LLAMA_NAMES
from polydraft.models.loading.gguf_header import GgufHeader
from polydraft.models.loading.gguf_roles import end_ids, special_id
from polydraft.models.loading.gguf_rope import rope_scaling

NAMES = LLAMA_NAMES | {
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    **{
        f"mlp.{shared}.{name}_proj": f"ffn_{name}_shexp"
        for shared in ("shared_expert", "shared_experts")
        for name in ("gate", "up", "down")
    },
}
"""Files' names of modules."""
ROPE_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True)
class Source:
    """tensors: names of those that a weight is made of.  make: from the configuration and these tensors, which may be on the meta device."""

    tensors: tuple[str, ...]
    make: Callable[..., Tensor] = lambda config, tensor: tensor


def joined(*tensors: str) -> Source:
    """Matrices, or stacks of them, with their rows below one another.

    Example:
        >>> joined("a", "b").make(None, torch.zeros(4, 2, 3), torch.ones(4, 1, 3)).shape
        torch.Size([4, 3, 3])
    """
    return Source(tensors, lambda config, *parts: torch.cat(parts, -2))


def scaled(tensor: str, factor: float = 1.0, less: float = 0.0) -> Source:
    """A tensor times a factor, less a number.

    Example:
        >>> scaled("a", less=1.0).make(None, torch.ones(2)).tolist()
        [0.0, 0.0]
    """
    return Source((tensor,), lambda config, weight: weight * factor - less)


def halves_apart(config: Any, rows: Tensor, *, heads: str) -> Tensor:
    """Rows of queries or keys in the order of transformers; files have the two halves of a rotation side by side.

    Example:
        >>> from types import SimpleNamespace
        >>> halves_apart(SimpleNamespace(n=1), torch.arange(4)[:, None], heads="n").flatten().tolist()
        [0, 2, 1, 3]
    """
    count = getattr(config, heads)
    return rows.view(count, rows.shape[0] // count // 2, 2, -1).transpose(1, 2).reshape(rows.shape)


def log_of_negative(tensor: str) -> Source:
    """The logarithm of a decay rate, which files have as its negative."""
    return Source((tensor,), lambda config, rate: (-rate).log())


INTERLEAVED = {
    "self_attn.q_proj.weight": Source(("attn_q.weight",), partial(halves_apart, heads="num_attention_heads")),
    "self_attn.k_proj.weight": Source(("attn_k.weight",), partial(halves_apart, heads="num_key_value_heads")),
}
EXPERTS = {
    "mlp.experts.gate_up_proj": joined("ffn_gate_exps.weight", "ffn_up_exps.weight"),
    "mlp.experts.down_proj": Source(("ffn_down_exps.weight",)),
    "mlp.gate.e_score_correction_bias": Source(("exp_probs_b.bias",)),
}
"""Weights of mixtures, which transformers stacks."""


def has(file: GgufHeader, tensor: str) -> bool:
    """Whether any block has a tensor."""
    return any(name.startswith("blk.") and name.split(".", 2)[2] == tensor for name in file.tensors)


def routed_experts(file: GgufHeader) -> dict[str, Any]:
    """How rows choose experts among groups of them, as DeepSeek V3 and those after it say it (arXiv 2412.19437, section 2.1.2)."""
    return {
        "moe_intermediate_size": file.count("expert_feed_forward_length"),
        "n_routed_experts": file.count("expert_count"),
        "num_experts_per_tok": file.count("expert_used_count"),
        "n_group": file.count("expert_group_count", 1),
        "topk_group": file.count("expert_group_used_count", 1),
        "norm_topk_prob": bool(file.setting("expert_weights_norm", False)),
        "routed_scaling_factor": file.number_or_none("expert_weights_scale") or 1.0,
    }


def layer_sizes(file: GgufHeader, key: str, otherwise: int | None = None) -> list[int]:
    """A whole number for each layer of the trunk, which files write once where all are equal.

    Raises:
        ModelLoadError: something else.
    """
    layers = file.num_layers
    sizes = file.setting(key, otherwise)
    if not isinstance(sizes, list):
        return [file.count(key, otherwise)] * layers
    if len(sizes) < layers or not all(isinstance(size, int) and size >= 0 for size in sizes):
        problem = (
            f"its {file.architecture}.{key} is {sizes!r}; expected a whole number for each of {layers} layers"
        )
        raise file.refusal(problem, "Give another file of the model")
    return sizes[:layers]


def largest(file: GgufHeader, key: str, otherwise: int | None = None) -> int:
    """The largest of `layer_sizes`.

    Raises:
        ModelLoadError: all are 0.
    """
    size = max(layer_sizes(file, key, otherwise))
    if size == 0:
        raise file.refusal(
            f"its {file.architecture}.{key} is 0 in every layer", "Give another file of the model"
        )
    return size


def rotary(
    file: GgufHeader, width: int, *, read: Collection[str] = (), partial: bool = False
) -> dict[str, Any]:
    """Rotary parameters as transformers names them. width: of what may rotate of a head.

    read: further keys of scaling that the architecture reads.  partial: whether a part of it may rotate.
    """
    return {
        "rope_theta": file.number("rope.freq_base", 10_000.0),
        **rope_scaling(file, width, read=read, partial=partial),
    }


partly_rotary = partial(rotary, partial=True)
"""Where a part of each head may rotate."""


@dataclass(frozen=True)
class Conversion:
    """One architecture of GGUF files as a model of transformers.

    model_type: of transformers.  settings: of its configuration, beyond those that all have, see `config_settings`.
    names: files' names of modules, where they differ from Llama's.  weights: sources of parameters that are not a tensor as it is.
    interleaved: whether files have the two halves of a rotation side by side in the rows of queries and keys.
    rotary: rotary parameters, of a file and the width of its heads.
    reads_rope_factors: whether `settings` reads the divisors of frequencies, which are otherwise taken as they are.
    """

    model_type: str
    settings: Callable[[GgufHeader], Mapping[str, Any]] = lambda file: {}
    names: Mapping[str, str] = field(default_factory=dict[str, str])
    weights: Mapping[str, Source] = field(default_factory=dict[str, Source])
    interleaved: bool = False
    rotary: Callable[[GgufHeader, int], Mapping[str, Any]] = rotary
    reads_rope_factors: bool = False

    def config_settings(self, file: GgufHeader) -> dict[str, Any]:
        """Settings of transformers' configuration.

        Raises:
            ModelLoadError: settings are missing, or ask for what the architecture is not read with.
        """
        heads = largest(file, "attention.head_count")
        hidden = file.count("embedding_length")
        width = file.count("attention.key_length", hidden // heads)
        experts = file.setting("expert_count") or 0
        if experts and not 0 < file.count("expert_used_count") <= experts:
            problem = f"it chooses {file.count('expert_used_count')} of {experts} experts"
            raise file.refusal(f"{problem}; expected 1 to {experts}", "Give another file of the model")
        settings = {
            "name_or_path": str(file.path),
            "vocab_size": file.tensors["token_embd.weight"].shape[0],
            "max_position_embeddings": file.count("context_length"),
            "num_hidden_layers": file.num_layers,
            "hidden_size": hidden,
            "intermediate_size": max(layer_sizes(file, "feed_forward_length")),
            "num_attention_heads": heads,
            "num_key_value_heads": largest(file, "attention.head_count_kv", heads),
            "head_dim": width,
            "rope_parameters": self.rotary(file, width),
            "tie_word_embeddings": "output.weight" not in file.tensors,
            "bos_token_id": special_id(file, "bos"),
            "eos_token_id": end_ids(file) or None,
            "pad_token_id": special_id(file, "padding"),
        }
        if file.setting("attention.layer_norm_rms_epsilon") is not None:
            settings["rms_norm_eps"] = file.number("attention.layer_norm_rms_epsilon")
        return {**settings, **self.settings(file)}

    def source(self, name: str) -> Source:
        """What a weight is made of, by the file's full names. name: of transformers."""
        match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
        block, part = ("", name) if match is None else (f"blk.{match[1]}.", match[2])
        source = (
            self.weights.get(part)
            or (INTERLEAVED.get(part) if self.interleaved else None)
            or EXPERTS.get(part)
        )
        if source is None:
            module, _, kind = part.rpartition(".")
            source = Source((f"{self.names.get(module) or NAMES.get(module, module)}.{kind}",))
        return Source(tuple(block + tensor for tensor in source.tensors), source.make)

    def beside(self, file: GgufHeader) -> set[str]:
        """Tensors that are none of the model's weights: layers behind the trunk, and what settings are read from."""
        extra = range(file.num_layers, file.count("block_count"))
        behind = {
            name
            for name in file.tensors
            if (match := re.match(r"blk\.(\d+)\.", name)) and int(match[1]) in extra
        }
        return behind | {ROPE_FACTORS}
