"""GGUF files: a model's settings, tokenizer and weights in one file, as llama.cpp reads and writes them.

Weights are offered by the names that transformers gives them: as float32, or as the blocks of the file, which the `gguf` package knows.
The distribution of a file is that of its dequantised weights.
"""

import mmap
import re
from collections.abc import Iterable
from dataclasses import fields
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polydraft.errors import first_line
from polydraft.models.config import CheckpointConfig
from polydraft.models.gguf_header import ARCHITECTURES, GgufHeader
from polydraft.models.gguf_roles import end_ids, special_id
from polydraft.models.gguf_rope import LONG_FACTORS, ORIGINAL_LENGTH, SHORT_FACTORS, rope_scaling

__all__ = ["GgufFile"]

COMPILED_AS = {"phi3": "mistral"}
"""Architectures that are another one with the rows of some matrices below one another."""
INTERLEAVED = ("llama", "smollm3")
"""Whose files have the two halves of a rotation side by side in the rows of queries and keys."""
PARTS = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""Files' names of what transformers' modules are called, without the layer."""
GEMMA_PARTS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
"""Where the second and third Gemma differ."""
ROPE_FACTORS = "rope_freqs.weight"
GENERAL = ("model_type", "attention_bias", "mlp_bias", "hidden_act", "sliding_window")
"""Settings that transformers' configurations of the architectures have of themselves."""
GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}
"""Their 27B models scale queries by the width of the model over its heads, all others by the width of a head."""


class GgufFile(GgufHeader):
    """A model in a GGUF file; weights are read from the file when they are asked for. Raises as `GgufHeader`."""

    @cached_property
    def config(self) -> CheckpointConfig:
        """Its settings; those of Gemma's own kind are in `transformers_config` alone.

        Raises:
            ModelLoadError: settings are missing, or ask for what the architecture is not read with.
        """
        if self.setting("expert_count"):
            raise self.refusal(f"it is a mixture of {self.setting('expert_count')} experts", "Give its safetensors folder")
        if "token_embd.weight" not in self.tensors:
            raise self.refusal("it has no tensor 'token_embd.weight'", "Give a file with a whole model")
        hidden, heads = self.count("embedding_length"), self.count("attention.head_count")
        width = self.count("attention.key_length", hidden // heads)
        return CheckpointConfig(
            model_type=COMPILED_AS.get(self.architecture, ARCHITECTURES[self.architecture]),
            name_or_path=str(self.path),
            vocab_size=self.tensors["token_embd.weight"].shape[0],
            max_position_embeddings=self.count("context_length"),
            num_hidden_layers=self.count("block_count"),
            hidden_size=hidden,
            intermediate_size=self.count("feed_forward_length"),
            num_attention_heads=heads,
            num_key_value_heads=self.count("attention.head_count_kv", heads),
            head_dim=width,
            rms_norm_eps=self.number("attention.layer_norm_rms_epsilon"),
            rope_parameters={"rope_theta": self.number("rope.freq_base", 10_000.0)} | self._rope_scaling(width),
            tie_word_embeddings="output.weight" not in self.tensors,
            bos_token_id=special_id(self, "bos"),
            eos_token_id=end_ids(self) or None,
            pad_token_id=special_id(self, "padding"),
            sliding_window=self.number_or_none("attention.sliding_window") if self.architecture == "phi3" else None,
            attention_bias=self.architecture == "llama" and "blk.0.attn_q.bias" in self.tensors,
        )

    @cached_property
    def transformers_config(self) -> Any:
        """The same as a configuration of transformers, with what only transformers runs.

        Raises:
            ModelLoadError: as `config`, or a setting that transformers refuses.
        """
        from transformers import AutoConfig

        config = self.config
        settings = {field.name: getattr(config, field.name) for field in fields(config) if field.name not in GENERAL}
        if self.architecture == "llama":
            settings["attention_bias"] = config.attention_bias
        if self.architecture == "phi3":
            settings["sliding_window"] = config.sliding_window
            settings["original_max_position_embeddings"] = self.count(ORIGINAL_LENGTH, config.max_position_embeddings)
        if self.architecture in GEMMA_27B_LAYERS:
            largest = config.num_hidden_layers == GEMMA_27B_LAYERS[self.architecture]
            settings["query_pre_attn_scalar"] = config.hidden_size // config.num_attention_heads if largest else config.head_dim
            settings["sliding_window"] = self.number("attention.sliding_window")
        if self.architecture == "gemma2":
            settings["attn_logit_softcapping"] = self.number("attn_logit_softcapping", 50.0)
            settings["final_logit_softcapping"] = self.number("final_logit_softcapping", 30.0)
        try:
            rope = dict(settings.pop("rope_parameters"))
            theta, part = rope.pop("rope_theta"), rope.pop("partial_rotary_factor", None)
            settings |= {} if part is None else {"partial_rotary_factor": part}
            scaling = None if rope["rope_type"] == "default" else rope
            return AutoConfig.for_model(ARCHITECTURES[self.architecture], **settings, rope_theta=theta, rope_scaling=scaling)
        except Exception as error:  # transformers checks types and ranges
            raise self.refusal(f"its settings cannot be: {first_line(error)}", "Give another file of the model") from error

    def _rope_scaling(self, width: int) -> dict[str, Any]:
        scaling = rope_scaling(self, width)
        if scaling["rope_type"] != "longrope":
            return scaling
        long, short = (_dequantised(*self._blocks(name)).tolist() for name in (LONG_FACTORS, SHORT_FACTORS))
        return scaling | {"long_factor": long, "short_factor": short}

    @property
    def rope_factors(self) -> Tensor | None:
        """By what the frequencies of a head's rotations are divided, [half of a head], where the file says so (as Llama 3.1 does)."""
        return _dequantised(*self._blocks(ROPE_FACTORS)) if ROPE_FACTORS in self.tensors else None

    def own_name(self, name: str) -> str:
        """The file's name of a weight that has this one in transformers.

        Raises:
            ModelLoadError: the file lacks it.
        """
        stem, _, kind = name.rpartition(".")
        layer, part = re.fullmatch(r"model\.layers\.(\d+)\.(.+)|.+", stem).groups()  # pyright: ignore[reportOptionalMemberAccess]
        part_name = self._fused[part][0] if part in self._fused else PARTS.get(part or stem, part or stem)
        if self.architecture in GEMMA_27B_LAYERS:
            part_name = GEMMA_PARTS.get(part, part_name)
        full_name = f"{part_name}.{kind}" if layer is None else f"blk.{layer}.{part_name}.{kind}"
        if full_name not in self.tensors:
            raise self.refusal(f"it has no tensor {full_name!r}, which is {name!r} of transformers", "Copy or download it again")
        return full_name

    @cached_property
    def _fused(self) -> dict[str, tuple[str, slice]]:
        """Of weights that lie below one another in a matrix of the file: its name, and their rows."""
        if self.architecture != "phi3":
            return {}
        c = self.config
        q, kv, inner = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim, c.intermediate_size
        return {
            "self_attn.q_proj": ("attn_qkv", slice(0, q)),
            "self_attn.k_proj": ("attn_qkv", slice(q, q + kv)),
            "self_attn.v_proj": ("attn_qkv", slice(q + kv, None)),
            "mlp.gate_proj": ("ffn_up", slice(0, inner)),
            "mlp.up_proj": ("ffn_up", slice(inner, None)),
        }

    def _rows(self, name: str) -> slice:
        """Rows of a weight in the file's matrix."""
        part = name.rpartition(".")[0].partition("model.layers.")[2].partition(".")[2]
        return self._fused[part][1] if part in self._fused else slice(None)

    def check_all_used(self, names: Iterable[str]) -> None:
        """Refuse a file with tensors that a model of these weights, by transformers' names, would not have: its distribution would be another."""
        factors = {ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS} if self.architecture == "phi3" else {ROPE_FACTORS}
        unused = self.tensors.keys() - {self.own_name(name) for name in names} - factors
        if unused:
            raise self.refusal(f"its tensor {min(unused)!r} is none of the architecture's", "Give another file of the model")

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a weight, by transformers' name."""
        first, *others = self.tensors[self.own_name(name)].shape
        return len(range(first)[self._rows(name)]), *others

    def blocks(self, name: str) -> tuple[str, np.ndarray]:
        """Number format of a weight, and its bytes as in the file, uint8 [outputs, bytes of a row]; by transformers' name.

        The rows have the order of transformers, which is another one for queries and keys of Llama.
        """
        stored_name = self.own_name(name)
        kind, raw = self._blocks(stored_name)
        if self.architecture not in INTERLEAVED or not (".attn_q." in stored_name or ".attn_k." in stored_name):
            return kind, raw[self._rows(name)]
        heads = self.config.num_attention_heads if ".attn_q." in stored_name else self.config.num_key_value_heads
        rows = raw.reshape(
            heads, self.tensors[stored_name].shape[0] // heads // 2, 2, -1
        )  # the halves of a rotation lie side by side
        return kind, rows.swapaxes(1, 2).reshape(raw.shape)

    def _blocks(self, own: str) -> tuple[str, np.ndarray]:
        entry = self.tensors[own]
        return entry.type, np.frombuffer(self.parts[entry.part], np.uint8, entry.num_bytes, entry.start).reshape(
            *entry.shape[:-1], -1
        )

    def forget(self, names: Iterable[str], rows: slice = slice(None)) -> None:
        """Give back the memory of some rows of weights; they are read from the file again when they are asked for again."""
        if not hasattr(mmap, "MADV_DONTNEED"):
            return
        for name in names:
            entry = self.tensors[self.own_name(name)]
            first, last, _ = rows.indices(entry.shape[0])
            start, end = (entry.start + entry.num_bytes * row // entry.shape[0] for row in (first, last))
            begin = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
            if end - begin >= mmap.PAGESIZE:
                self.parts[entry.part].madvise(mmap.MADV_DONTNEED, begin, (end - begin) // mmap.PAGESIZE * mmap.PAGESIZE)

    def rows(self, name: str, rows: slice) -> Tensor:
        """Some rows of a matrix in float32, by transformers' name."""
        kind, blocks = self.blocks(name)
        return _dequantised(kind, blocks[rows])

    def read(self, name: str) -> Tensor:
        """A weight in float32, by transformers' name."""
        kind, blocks = self.blocks(name)
        weight = _dequantised(kind, blocks)
        return (
            weight - 1 if self.architecture.startswith("gemma") and "norm" in name else weight
        )  # kept with the one that is added

    def module(self) -> Any:
        """The model as a module of transformers with float32 weights, on a CPU, in evaluation mode.

        Raises:
            ModelLoadError: weights are missing, or there are others.
        """
        from transformers import AutoModelForCausalLM

        network = AutoModelForCausalLM.from_config(self.transformers_config, dtype=torch.float32).eval()
        tied = network.lm_head.weight is network.get_input_embeddings().weight
        weights = {
            name: weight
            for name, weight in network.named_parameters(remove_duplicate=False)
            if not (tied and name == "lm_head.weight")
        }
        self.check_all_used(weights)
        for name, weight in weights.items():
            if self.shape(name) != tuple(weight.shape):
                raise self.refusal(
                    f"its {name!r} is of shape {self.shape(name)}; expected {tuple(weight.shape)}", "Give another file"
                )
            weight.data = self.read(name)
        if self.rope_factors is not None:
            network.model.rotary_emb.inv_freq /= self.rope_factors
        return network

    def transformers_tokenizer(self) -> Any:
        """Its tokenizer as transformers makes it, with the chat template where it has one."""
        from transformers import PreTrainedTokenizerFast

        place = {"name_or_path": str(self.path.parent), "vocab_file": str(self.path)}
        return PreTrainedTokenizerFast(gguf_file=self.path.name, **place)


def _dequantised(kind: str, blocks: np.ndarray) -> Tensor:
    """Bytes [outputs, bytes of a row] -> float32."""
    import gguf

    return torch.from_numpy(np.require(gguf.dequantize(blocks, gguf.GGMLQuantizationType[kind]), np.float32, "W"))
