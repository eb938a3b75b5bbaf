"""GGUF files: a model's settings, tokenizer and weights in one file, as llama.cpp reads and writes them.

The header is read here (the `gguf` package parses every token of a vocabulary as an array of its own, which takes seconds); the
package knows the blocks of the number formats. Weights are offered by the names that transformers gives them: as float32, or as the
blocks of the file. The law of a file is the law of its dequantised weights.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import mmap
import os
import struct
from collections.abc import Iterable
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from polydraft.errors import ModelLoadError, first_line

__all__ = ["ARCHITECTURES", "TYPES", "GgufFile", "is_gguf"]

ARCHITECTURES = {
    "llama": "llama",  # Mistral, too
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
}
"""Those that are read, with transformers' names of them."""
TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
"""Number formats that are read."""
VERSIONS = (2, 3)
SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
"""Types of metadata that have a size of their own, as `struct` formats."""
STRING, ARRAY = 8, 9
SHORTEST_ENTRY = 12
"""Bytes of the smallest entry of the header; more entries than fit into the file are damage."""
ROPE_FACTORS = "rope_freqs.weight"
GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}
"""Their 27B models scale queries by the width of the model over its heads, all others by the width of a head."""


class Entry(NamedTuple):
    """A tensor of the file: shape as of transformers, name of its number format, where it begins and how long it is, in bytes."""

    shape: tuple[int, ...]
    type: str
    start: int
    num_bytes: int


def is_gguf(name: str | os.PathLike[str]) -> bool:
    """Whether a name is that of a GGUF file; there need not be one.

    Example:
        >>> is_gguf("model.Q4_1.gguf"), is_gguf("model")
        (True, False)
    """
    return str(name).endswith(".gguf")


class GgufFile:
    """A GGUF file's header; weights are read from the file when they are asked for.

    metadata: keys and values; of arrays of strings, which only tokenizers need, the length.  tensors: by the file's own names.

    Raises:
        ModelLoadError: it is missing, no GGUF file, cut off or too long, or of an architecture or a number format that is not read.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(os.path.expanduser(path))
        try:
            with open(self.path, "rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError as error:  # nothing can be mapped of an empty file
            raise self._refusal("it is empty", "Copy or download it again") from error
        except OSError as error:
            raise self._refusal(f"it cannot be read: {error.strerror}", "Check the path") from error
        try:
            self._read_header()
        except (struct.error, UnicodeDecodeError, KeyError, TypeError, OverflowError, ZeroDivisionError) as error:
            raise self._refusal(f"its header is damaged or cut off ({error})", "Copy or download it again") from error

    def _refusal(self, found: str, advice: str) -> ModelLoadError:
        return ModelLoadError(f"the GGUF file {str(self.path)!r} was given, but {found}. {advice}.")

    def _read_header(self) -> None:
        if (magic := self._data[:4]) != b"GGUF":
            raise self._refusal(f"it begins with {magic!r} and not with b'GGUF'", "Give a file that llama.cpp can read")
        _, version, num_tensors, num_keys = struct.unpack_from("<4sIQQ", self._data)
        if version not in VERSIONS:
            raise self._refusal(f"it is of version {version}; expected 2 or 3, little-endian", "Convert it again with llama.cpp")
        if (num_tensors + num_keys) * SHORTEST_ENTRY > len(self._data):
            raise struct.error(f"{num_keys} keys and {num_tensors} tensors in {len(self._data)} bytes")
        self._at = struct.calcsize("<4sIQQ")
        self.metadata = {self._string(): self._value(self._number("<I")) for _ in range(num_keys)}
        self.architecture = self.metadata["general.architecture"]
        if self.architecture not in ARCHITECTURES:
            raise self._refusal(
                f"its architecture is {self.architecture!r}; expected one of {', '.join(ARCHITECTURES)}",
                "Give another model, or its safetensors folder, which transformers may know",
            )
        entries = [self._tensor() for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        begin = -(-self._at // alignment) * alignment
        self.tensors = {name: entry._replace(start=begin + entry.start) for name, entry in entries}
        end = max((entry.start + entry.num_bytes for entry in self.tensors.values()), default=begin)
        if not end <= len(self._data) <= -(-end // alignment) * alignment:
            raise self._refusal(
                f"it has {len(self._data)} bytes, where its header tells of {end}: it is {'cut off' if len(self._data) < end else 'too long'}",
                "Copy or download it again",
            )

    def _number(self, form: str) -> Any:
        (value,) = struct.unpack_from(form, self._data, self._at)
        self._at += struct.calcsize(form)
        return value

    def _string(self) -> str:
        length = self._number("<Q")
        if length > len(self._data) - self._at:
            raise struct.error(f"a text of {length} bytes at {self._at}")
        self._at += length
        return self._data[self._at - length : self._at].decode()

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._string()
        if kind != ARRAY:
            return self._number(SCALARS[kind])
        kind, count = self._number("<I"), self._number("<Q")
        if kind == STRING:
            for _ in range(count):
                self._string()
            return count
        form = SCALARS[kind]
        values = struct.unpack_from(f"<{min(count, len(self._data))}{form[1]}", self._data, self._at)
        self._at += count * struct.calcsize(form)
        return list(values)

    def _tensor(self) -> tuple[str, Entry]:
        import gguf

        name, num_dimensions = self._string(), self._number("<I")
        shape = tuple(self._number("<Q") for _ in range(min(num_dimensions, 8)))[::-1]
        number, start = self._number("<I"), self._number("<Q")
        known = gguf.GGMLQuantizationType(number).name if number in set(gguf.GGMLQuantizationType) else f"number {number}"
        if known not in TYPES:
            raise self._refusal(
                f"its tensor {name!r} is of type {known}; expected one of {', '.join(TYPES)}",
                "Give a file of another type",
            )
        in_block, bytes_of_block = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(number)]
        if shape and shape[-1] % in_block:
            raise struct.error(f"{name!r} has rows of {shape[-1]} numbers in blocks of {in_block}")
        return name, Entry(shape, known, start, prod(shape) // in_block * bytes_of_block)

    def _setting(self, name: str, otherwise: Any = None) -> Any:
        return self.metadata.get(f"{self.architecture}.{name}", otherwise)

    def _needed(self, name: str, otherwise: float | None = None) -> Any:
        found = self._setting(name, otherwise)
        if not isinstance(found, (int, float)) or not found > 0:
            raise self._refusal(
                f"its {self.architecture}.{name} is {found!r}; expected a positive number", "Give another file of the model"
            )
        return found

    @cached_property
    def config(self) -> Any:
        """Its settings as a configuration of transformers.

        Raises:
            ModelLoadError: settings are missing, or ask for what the architecture is not read with.
        """
        from transformers import AutoConfig

        if self._setting("expert_count"):
            raise self._refusal(f"it is a mixture of {self._setting('expert_count')} experts", "Give its safetensors folder")
        if "token_embd.weight" not in self.tensors:
            raise self._refusal("it has no tensor 'token_embd.weight'", "Give a file with a whole model")
        hidden, heads = self._needed("embedding_length"), self._needed("attention.head_count")
        width = self._needed("attention.key_length", hidden // heads)
        settings = {
            "name_or_path": str(self.path),
            "vocab_size": self.tensors["token_embd.weight"].shape[0],
            "max_position_embeddings": self._needed("context_length"),
            "num_hidden_layers": self._needed("block_count"),
            "hidden_size": hidden,
            "intermediate_size": self._needed("feed_forward_length"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._needed("attention.head_count_kv", heads),
            "head_dim": width,
            "rms_norm_eps": self._needed("attention.layer_norm_rms_epsilon"),
            "rope_theta": self._needed("rope.freq_base", 10_000.0),
            "rope_scaling": self._rope_scaling(),
            "tie_word_embeddings": "output.weight" not in self.tensors,
            "bos_token_id": self._special("bos"),
            "eos_token_id": [i for i in map(self._special, ("eos", "eot", "eom")) if i is not None] or None,
            "pad_token_id": self._special("padding"),
        }
        if self.architecture == "llama":
            settings["attention_bias"] = "blk.0.attn_q.bias" in self.tensors
        if self.architecture in GEMMA_27B_LAYERS:
            largest = settings["num_hidden_layers"] == GEMMA_27B_LAYERS[self.architecture]
            settings["query_pre_attn_scalar"] = hidden // heads if largest else width
            settings["sliding_window"] = self._needed("attention.sliding_window")
        if self.architecture == "gemma2":
            settings["attn_logit_softcapping"] = self._needed("attn_logit_softcapping", 50.0)
            settings["final_logit_softcapping"] = self._needed("final_logit_softcapping", 30.0)
        try:
            return AutoConfig.for_model(ARCHITECTURES[self.architecture], **settings)
        except Exception as error:  # transformers checks types and ranges
            raise self._refusal(f"its settings cannot be: {first_line(error)}", "Give another file of the model") from error

    def _special(self, role: str) -> int | None:
        return self.metadata.get(f"tokenizer.ggml.{role}_token_id")

    def _rope_scaling(self) -> dict[str, Any] | None:
        kind, factor = self._setting("rope.scaling.type", "none"), self._needed("rope.scaling.factor", 1.0)
        if kind == "none" or factor == 1.0:
            return None
        if kind not in ("linear", "yarn"):
            raise self._refusal(f"its rope scaling is {kind!r}; expected 'linear' or 'yarn'", "Give its safetensors folder")
        first = (
            {"original_max_position_embeddings": self._needed("rope.scaling.original_context_length")} if kind == "yarn" else {}
        )
        return {"rope_type": kind, "factor": factor, **first}

    @property
    def rope_factors(self) -> Tensor | None:
        """By what the frequencies of a head's rotations are divided, [half of a head], where the file says so (as Llama 3.1 does)."""
        return _dequantised(*self._blocks(ROPE_FACTORS)) if ROPE_FACTORS in self.tensors else None

    def own_name(self, name: str) -> str:
        """The file's name of a weight that has this one in transformers.

        Raises:
            ModelLoadError: the file lacks it.
        """
        found = self._names.get_name(name, try_suffixes=(".weight", ".bias"))
        if found not in self.tensors:
            raise self._refusal(f"it has no tensor {found!r}, which is {name!r} of transformers", "Copy or download it again")
        return found

    @cached_property
    def _names(self) -> Any:
        import gguf

        kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == self.architecture)
        return gguf.get_tensor_name_map(kind, self.config.num_hidden_layers)

    def check_all_used(self, names: Iterable[str]) -> None:
        """Refuse a file with tensors that a model of these weights, by transformers' names, would not have: its law would be another."""
        unused = self.tensors.keys() - {self.own_name(name) for name in names} - {ROPE_FACTORS}
        if unused:
            raise self._refusal(f"its tensor {min(unused)!r} is none of the architecture's", "Give another file of the model")

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a weight, by transformers' name."""
        return self.tensors[self.own_name(name)].shape

    def blocks(self, name: str) -> tuple[str, np.ndarray]:
        """Number format of a weight, and its bytes as in the file, uint8 [outputs, bytes of a row]; by transformers' name.

        The rows have the order of transformers, which is another one for queries and keys of Llama.
        """
        own = self.own_name(name)
        kind, found = self._blocks(own)
        if self.architecture != "llama" or not (".attn_q." in own or ".attn_k." in own):
            return kind, found
        heads = self.config.num_attention_heads if ".attn_q." in own else self.config.num_key_value_heads
        rows = found.reshape(heads, self.tensors[own].shape[0] // heads // 2, 2, -1)  # the halves of a rotation lie side by side
        return kind, rows.swapaxes(1, 2).reshape(found.shape)

    def _blocks(self, own: str) -> tuple[str, np.ndarray]:
        entry = self.tensors[own]
        return entry.type, np.frombuffer(self._data, np.uint8, entry.num_bytes, entry.start).reshape(*entry.shape[:-1], -1)

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

        made = AutoModelForCausalLM.from_config(self.config, dtype=torch.float32).eval()
        tied = made.lm_head.weight is made.get_input_embeddings().weight
        weights = {
            name: weight
            for name, weight in made.named_parameters(remove_duplicate=False)
            if not (tied and name == "lm_head.weight")
        }
        self.check_all_used(weights)
        for name, weight in weights.items():
            if self.shape(name) != tuple(weight.shape):
                raise self._refusal(
                    f"its {name!r} is of shape {self.shape(name)}; expected {tuple(weight.shape)}", "Give another file"
                )
            weight.data = self.read(name)
        if self.rope_factors is not None:
            made.model.rotary_emb.inv_freq /= self.rope_factors
        return made

    def tokenizer(self) -> Any:
        """Its tokenizer, with the chat template where it has one.

        Raises:
            ModelLoadError: it has none.
        """
        from transformers import PreTrainedTokenizerFast

        if "tokenizer.ggml.tokens" not in self.metadata:
            raise self._refusal("it has no tokenizer (tokenizer.ggml.tokens)", "Give a whole file, or token ids instead of text")
        place = {"name_or_path": str(self.path.parent), "vocab_file": str(self.path)}
        return PreTrainedTokenizerFast(gguf_file=self.path.name, **place)


def _dequantised(kind: str, blocks: np.ndarray) -> Tensor:
    """Bytes [outputs, bytes of a row] -> float32."""
    import gguf

    return torch.from_numpy(np.require(gguf.dequantize(blocks, gguf.GGMLQuantizationType[kind]), np.float32, "W"))
