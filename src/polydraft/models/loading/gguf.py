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

from polydraft.errors import ModelLoadError, first_line
from polydraft.models.compiled.architectures import ARCHITECTURES, Architecture, Stored
from polydraft.models.loading.config import CheckpointConfig
from polydraft.models.loading.conversions import CONVERSIONS, Conversion, conversion_of
from polydraft.models.loading.conversions.base import ROPE_FACTORS, layer_sizes
from polydraft.models.loading.gguf_header import Entry, GgufHeader
from polydraft.models.loading.gguf_roles import TOKENS, end_ids, special_id
from polydraft.models.loading.gguf_rope import LONG_FACTORS, SHORT_FACTORS, rope_scaling

NUMBERS = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
"""Number formats that are no blocks, of GGUF files and folders; the former have none of 64 bits."""
LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)|.+")
"""Transformers' name of a weight: its layer, and its name in it."""
DESCRIBED = {(a.gguf, a.mixture is not None): a for a in ARCHITECTURES.values() if a.gguf is not None}
DESCRIBED = {(a.gguf, False): a for a in ARCHITECTURES.values() if a.some_without_experts} | DESCRIBED
"""By name and whether there are experts: Mixtral is called as Llama is, and Granite 4 the same with experts and without."""


class GgufFile(GgufHeader):
    """A model in a GGUF file; weights are read from the file when they are asked for. Raises as `GgufHeader`."""

    architectures = dict.fromkeys([*(name for name, _ in DESCRIBED if name is not None), *CONVERSIONS]).keys()

    @property
    def is_described(self) -> bool:
        """Whether its architecture is one of the compiled path's."""
        return (self.architecture, bool(self.setting("expert_count"))) in DESCRIBED

    @cached_property
    def described(self) -> Architecture:
        """Its architecture, where it is one of the compiled path's.

        Raises:
            ModelLoadError: it is not read with experts, or not without.
        """
        experts = self.setting("expert_count") or 0
        if (architecture := DESCRIBED.get((self.architecture, experts > 0))) is None:
            raise self.refusal(f"it is a mixture of {experts} experts", "Give its safetensors folder")
        return architecture

    @property
    def conversion(self) -> Conversion | None:
        """How it is converted for transformers, where that takes more than names."""
        return conversion_of(self.architecture, self.setting("expert_count") or 0)

    @cached_property
    def config(self) -> CheckpointConfig:
        """Its settings, by the names of transformers' configurations.

        Raises:
            ModelLoadError: settings are missing, or ask for what the architecture is not read with.
        """
        described = self.described
        hidden = self.count("embedding_length")
        heads = self.count("attention.head_count")
        width = self.count("attention.key_length", hidden // heads)
        config = CheckpointConfig(
            model_type=described.model_type,
            name_or_path=str(self.path),
            vocab_size=self._vocab_size(),
            max_position_embeddings=self.count("context_length"),
            num_hidden_layers=self.num_layers,
            hidden_size=hidden,
            intermediate_size=max(layer_sizes(self, "feed_forward_length")),
            num_attention_heads=heads,
            num_key_value_heads=max(layer_sizes(self, "attention.head_count_kv", heads)),
            head_dim=width,
            rms_norm_eps=self.number("attention.layer_norm_rms_epsilon"),
            rope_parameters={"rope_theta": self.number("rope.freq_base", 10_000.0)}
            | self._rope_scaling(width),
            tie_word_embeddings="output.weight" not in self.tensors,
            bos_token_id=special_id(self, "bos"),
            eos_token_id=end_ids(self) or None,
            pad_token_id=special_id(self, "padding"),
            of_architecture=described.gguf_settings(self),
        )
        if (mixture := described.mixture_of(config)) is not None and (fault := mixture.fault):
            raise self.refusal(fault, "Give another file of the model")
        return config

    @cached_property
    def transformers_config(self) -> Any:
        """The same as a configuration of transformers, with what only transformers runs.

        Raises:
            ModelLoadError: as `config`, or a setting that transformers refuses.
        """
        from transformers import AutoConfig

        if self.conversion is not None:
            return self._converted_config(self.conversion)
        config = self.config
        settings = {field.name: getattr(config, field.name) for field in fields(config)}
        settings |= settings.pop("of_architecture")
        del settings["model_type"]
        try:
            rope = dict(settings.pop("rope_parameters"))
            theta = rope.pop("rope_theta")
            part = rope.pop("partial_rotary_factor", None)
            settings |= {} if part is None else {"partial_rotary_factor": part}
            scaling = None if rope["rope_type"] == "default" else rope
            return AutoConfig.for_model(config.model_type, **settings, rope_theta=theta, rope_scaling=scaling)
        except Exception as error:  # transformers checks types and ranges
            raise self.refusal(
                f"its settings cannot be: {first_line(error)}", "Give another file of the model"
            ) from error

    def _vocab_size(self) -> int:
        """Rows of its embeddings; a file with a model's further layers alone may share those of the model, and lists as many tokens."""
        if "token_embd.weight" not in self.tensors and self.setting("nextn_predict_layers"):
            return len(self.strings(TOKENS))
        self._check_whole()
        return self.tensors["token_embd.weight"].shape[0]

    def _check_whole(self) -> None:
        if "token_embd.weight" not in self.tensors:
            raise self.refusal("it has no tensor 'token_embd.weight'", "Give a file with a whole model")

    def _converted_config(self, conversion: Conversion) -> Any:
        from transformers import AutoConfig

        self._check_whole()
        settings = conversion.config_settings(self)
        try:
            return AutoConfig.for_model(conversion.model_type, **settings)
        except Exception as error:  # transformers checks types and ranges
            raise self.refusal(
                f"its settings cannot be: {first_line(error)}", "Give another file of the model"
            ) from error

    def _rope_scaling(self, width: int) -> dict[str, Any]:
        scaling = rope_scaling(self, width, partial=self.described.partial_rotary or None)
        if scaling["rope_type"] != "longrope":
            return scaling
        long, short = (_dequantised(*self._blocks(name)).tolist() for name in (LONG_FACTORS, SHORT_FACTORS))
        return scaling | {"long_factor": long, "short_factor": short}

    @property
    def rope_factors(self) -> Tensor | None:
        """By what the frequencies of a head's rotations are divided, [half of a head], where the file says so (as Llama 3.1 does)."""
        if self.conversion is not None and self.conversion.reads_rope_factors:
            return None
        return _dequantised(*self._blocks(ROPE_FACTORS)) if ROPE_FACTORS in self.tensors else None

    def own_name(self, name: str) -> str:
        """The file's name of the tensor that has a weight of transformers, or where experts are stacked those of a layer.

        Raises:
            ModelLoadError: the file lacks it.
        """
        return self._place(name)[0]

    def _place(self, name: str) -> tuple[str, int | None]:
        """The tensor of a weight, and its index in a stack of experts."""
        if name not in self._places:
            layer, part = LAYER.fullmatch(name).groups()  # pyright: ignore[reportOptionalMemberAccess]
            module, _, kind = (part or name).rpartition(".")
            in_file = (
                Stored(f"{self._fused[module][0]}.{kind}")
                if module in self._fused
                else self.described.in_gguf(part or name)
            )
            full_name = in_file.name if layer is None else f"blk.{layer}.{in_file.name}"
            if full_name not in self.tensors:
                raise self._lacks(full_name, name)
            if in_file.index is not None:
                self._check_stack(full_name)
            self._places[name] = full_name, in_file.index
        return self._places[name]

    @cached_property
    def _places(self) -> dict[str, tuple[str, int | None]]:
        return {}

    def _check_stack(self, tensor: str) -> None:
        count = self.setting("expert_count")
        num_stacked, *_ = self.tensors[tensor].shape
        if num_stacked != count:
            raise self.refusal(
                f"it has {count} experts by its settings, and {num_stacked} in its tensor {tensor!r}",
                "Copy or download it again",
            )

    def _entry(self, name: str) -> Entry:
        """Where a weight lies, by transformers' name; of one expert alone."""
        tensor, index = self._place(name)
        entry = self.tensors[tensor]
        if index is None:
            return entry
        count, *shape = entry.shape
        size = entry.num_bytes // count
        return Entry(tuple(shape), entry.type, entry.start + index * size, size, entry.part)

    @cached_property
    def _fused(self) -> dict[str, tuple[str, slice]]:
        """Of weights that lie below one another in a matrix of the file: its name, and their rows."""
        rows = self.described.fused_rows(self.config)
        return {part: (self.described.gguf_name(module), some) for part, (module, some) in rows.items()}

    def _rows(self, name: str) -> slice:
        """Rows of a weight in the file's matrix."""
        part = name.rpartition(".")[0].partition("model.layers.")[2].partition(".")[2]
        return self._fused[part][1] if part in self._fused else slice(None)

    def own_names(self, name: str) -> tuple[str, ...]:
        """The file's names of all tensors that a weight of transformers is made of.

        Raises:
            ModelLoadError: the file lacks one.
        """
        if self.conversion is None:
            return (self.own_name(name),)
        names = self.conversion.source(name).tensors
        if names == ("output.weight",) and names[0] not in self.tensors:
            return ("token_embd.weight",)
        if missing := [tensor for tensor in names if tensor not in self.tensors]:
            raise self._lacks(missing[0], name)
        return names

    def _lacks(self, tensor: str, name: str) -> ModelLoadError:
        return self.refusal(
            f"it has no tensor {tensor!r}, which is {name!r} of transformers", "Copy or download it again"
        )

    def check_all_used(self, used: Iterable[str]) -> None:
        """Refuse a file with tensors that are not used, by their names in the file: its distribution would be another."""
        factors = (
            {ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS} if self.architecture == "phi3" else {ROPE_FACTORS}
        )
        beside = factors if self.conversion is None else self.conversion.beside(self)
        unused = self.tensors.keys() - {*used} - beside
        if unused:
            raise self.refusal(
                f"its tensor {min(unused)!r} is none of the architecture's", "Give another file of the model"
            )

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a weight, by transformers' name."""
        first, *others = self._entry(name).shape
        return len(range(first)[self._rows(name)]), *others

    def blocks(self, name: str) -> tuple[str, np.ndarray]:
        """Number format of a weight, and its bytes as in the file, uint8 [outputs, bytes of a row]; by transformers' name.

        The rows have the order of transformers, which is another one for queries and keys of Llama.
        """
        stored_name = self.own_name(name)
        entry = self._entry(name)
        kind, raw = self._bytes(entry)
        if not self.described.interleaved or not (".attn_q." in stored_name or ".attn_k." in stored_name):
            return kind, raw[self._rows(name)]
        heads = (
            self.config.num_attention_heads if ".attn_q." in stored_name else self.config.num_key_value_heads
        )
        rows = raw.reshape(
            heads, self.tensors[stored_name].shape[0] // heads // 2, 2, -1
        )  # the halves of a rotation lie side by side
        return kind, rows.swapaxes(1, 2).reshape(raw.shape)

    def _blocks(self, tensor: str) -> tuple[str, np.ndarray]:
        return self._bytes(self.tensors[tensor])

    def _bytes(self, entry: Entry) -> tuple[str, np.ndarray]:
        return entry.type, np.frombuffer(
            self.parts[entry.part], np.uint8, entry.num_bytes, entry.start
        ).reshape(*entry.shape[:-1], -1)

    def forget(self, names: Iterable[str], rows: slice = slice(None)) -> None:
        """Give back the memory of some rows of weights; they are read from the file again when they are asked for again."""
        if not hasattr(mmap, "MADV_DONTNEED"):
            return
        for name in names:
            entry = self._entry(name)
            first, last, _ = rows.indices(entry.shape[0])
            start, end = (entry.start + entry.num_bytes * row // entry.shape[0] for row in (first, last))
            begin = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
            if end - begin >= mmap.PAGESIZE:
                self.parts[entry.part].madvise(
                    mmap.MADV_DONTNEED, begin, (end - begin) // mmap.PAGESIZE * mmap.PAGESIZE
                )

    def rows(self, name: str, rows: slice) -> Tensor:
        """Some rows of a matrix in float32, by transformers' name."""
        kind, blocks = self.blocks(name)
        return _dequantised(kind, blocks[rows])

    def tensor(self, own_name: str) -> Tensor:
        """A tensor in float32, by the file's name."""
        return _dequantised(*self._blocks(own_name))

    def read(self, name: str) -> Tensor:
        """A weight in float32, by transformers' name."""
        weight = _dequantised(*self.blocks(name))
        layer = LAYER.fullmatch(name)
        transform = self.described.gguf_values.get(layer[2] or "") if layer else None
        return weight if transform is None else transform(weight)

    def weight(self, name: str, *, outline: bool = False) -> Tensor:
        """A weight of transformers' model in float32, or, as an outline, a tensor without values of its shape, but for sizes of 1."""
        if self.conversion is None:
            return (
                torch.empty(self.shape(name), device="meta")
                if outline
                else self.read(name) - self._offset(name)
            )
        names = self.own_names(name)
        tensors = [
            torch.empty(self.tensors[n].shape, device="meta") if outline else _dequantised(*self._blocks(n))
            for n in names
        ]
        return self.conversion.source(name).make(self.transformers_config, *tensors)

    def _offset(self, name: str) -> float:
        """What the file adds to a weight."""
        return self.described.norm_offset if "norm" in name else 0.0

    def transformers_tokenizer(self) -> Any:
        """Its tokenizer as transformers makes it, with the chat template where it has one."""
        from transformers import PreTrainedTokenizerFast

        place = {"name_or_path": str(self.path.parent), "vocab_file": str(self.path)}
        return PreTrainedTokenizerFast(gguf_file=self.path.name, **place)


def _dequantised(kind: str, blocks: np.ndarray) -> Tensor:
    """Bytes [..., bytes of a row] -> float32."""
    if kind in NUMBERS:
        return torch.from_numpy(np.array(blocks)).view(NUMBERS[kind]).float()
    from polydraft.models.compiled.decoding import decoded

    rows = decoded(kind, blocks.reshape(-1, blocks.shape[-1]))
    return torch.from_numpy(rows.reshape(*blocks.shape[:-1], -1))
