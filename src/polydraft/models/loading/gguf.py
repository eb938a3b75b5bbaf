"""GGUF files: a model's settings, tokenizer and weights in one file, as llama.cpp reads and writes them.

Weights are offered by the names that transformers gives them: as float32, or as the blocks of the file, which the `gguf` package knows.
The distribution of a file is that of its dequantised weights.
"""

import os
from collections.abc import Iterable, Mapping
from functools import cached_property
from math import prod
from pathlib import Path

import numpy as np

from polydraft.errors import ModelLoadError
from polydraft.models.loading.config import CheckpointConfig
from polydraft.models.matrices import codebooks
from polydraft.models.matrices.formats import BLOCKS
from polydraft.models.networks import NETWORKS, Network, network_of_file
from polydraft.models.networks.base import HEAD, LAYER
from polydraft.models.store.gguf import GgufStore
from polydraft.models.store.gguf_header import GgufTensor
from polydraft.models.store.gguf_parts import parts_of
from polydraft.models.store.gguf_rope import LONG_FACTORS, ROPE_FACTORS, SHORT_FACTORS
from polydraft.models.store.mapped import forgotten
from polydraft.models.store.places import NUMBERS, Stored
from polydraft.models.store.store import opened_file, remembered
from polydraft.models.store.weights import ALL, StoredWeights, dequantised
from polydraft.numerics.floats import outline

ARCHITECTURES = dict.fromkeys(name for network in NETWORKS.values() for name in network.gguf_names).keys()
"""Names in files, of those that are read."""


def weights_of_file(place: Path) -> "GgufWeights":
    """Weights of a file, the same ones as long as its files are the same. Raises as `GgufWeights` and `GgufStore`."""
    return remembered(_bound, place, parts_of(place))


def _bound(place: Path) -> "GgufWeights":
    return GgufWeights(opened_file(place))


class GgufWeights(StoredWeights):
    """Weights of a GGUF file by the names of its network, read when they are asked for. store: of the file.

    Raises:
        ModelLoadError: an architecture that is not read.
    """

    has_rows = True

    def __init__(self, store: GgufStore) -> None:
        store.check_architecture(ARCHITECTURES)
        self.store = store
        self.files = store.files

    @classmethod
    def of(cls, place: str | os.PathLike[str]) -> "GgufWeights":
        """Those of a file that is opened for them alone."""
        return cls(GgufStore(place))

    @cached_property
    def network(self) -> Network:
        """Its architecture.

        Raises:
            ModelLoadError: it is not read with experts, or not without.
        """
        if (network := network_of_file(self.store)) is None:
            experts = self.store.setting("expert_count") or 0
            raise self.store.refusal(f"it is a mixture of {experts} experts", "Give its safetensors folder")
        return network

    @cached_property
    def config(self) -> CheckpointConfig:
        """Its settings, by the names of transformers' configurations.

        Raises:
            ModelLoadError: settings are missing, or ask for what the architecture is not read with.
        """
        config = CheckpointConfig.of_settings(self.network.model_type, self.network.settings_of(self.store))
        if (experts := self.network.experts.of(config)) is not None and (fault := experts.fault):
            raise self.store.refusal(fault, "Give another file of the model")
        return config

    @property
    def rope_factors(self) -> np.ndarray | None:
        """By what the frequencies of a head's rotations are divided, [half of a head], where the file says so (as Llama 3.1 does)."""
        if self.network.reads_rope_factors or ROPE_FACTORS not in self.store.tensors:
            return None
        return dequantised(*self._blocks(ROPE_FACTORS))

    def own_name(self, name: str) -> str:
        """The file's name of the tensor that has a weight of transformers, or where experts are stacked those of a layer.

        Raises:
            ModelLoadError: the file lacks it.
        """
        return self._place(name).name

    def _place(self, name: str) -> Stored:
        """The tensor of a weight, its index in a stack of experts, and which half of that matrix it is."""
        if name not in self._places:
            places = self._expected(name)
            if name == HEAD:
                places.append(Stored("token_embd.weight"))
            place = next((place for place in places if place.name in self.store.tensors), None)
            if place is None:
                raise self._lacks(places[0].name, name)
            if place.index is not None:
                self._check_stack(place.name, is_of_heads=name.partition(".self_attn.")[1] != "")
            self._places[name] = place
        return self._places[name]

    def _expected(self, name: str) -> list[Stored]:
        """Where a file may have a weight."""
        _, layer, part = LAYER.fullmatch(name).groups()  # pyright: ignore[reportOptionalMemberAccess]
        module, _, kind = part.rpartition(".")
        places = (
            [Stored(f"{self._fused[module][0]}.{kind}")]
            if module in self._fused
            else self.network.in_gguf(part)
        )
        block = "" if layer is None else f"blk.{layer}."
        return [place._replace(name=block + place.name) for place in places]

    @cached_property
    def _places(self) -> dict[str, Stored]:
        return {}

    def _check_stack(self, tensor: str, *, is_of_heads: bool) -> None:
        count = self.store.setting("attention.head_count" if is_of_heads else "expert_count")
        num_stacked, *_ = self.store.tensors[tensor].shape
        if num_stacked != count:
            kind = "heads" if is_of_heads else "experts"
            raise self.store.refusal(
                f"it has {count} {kind} by its settings, and {num_stacked} in its tensor {tensor!r}",
                "Copy or download it again",
            )

    def _entry(self, name: str) -> GgufTensor:
        """Where a weight lies, by transformers' name; of one expert alone."""
        place = self._place(name)
        entry = self.store.tensors[place.name]
        if place.index is None:
            return entry
        count, rows, *columns = entry.shape
        size = entry.num_bytes // count
        start = entry.start + place.index * size
        if place.half is not None:
            rows //= 2
            size //= 2
            start += place.half * size
        return GgufTensor((rows, *columns), entry.type, start, size, entry.part)

    @cached_property
    def _fused(self) -> dict[str, tuple[str, slice]]:
        """Of weights that lie below one another in a matrix of the file: its name, and their rows."""
        rows = self.network.fused_rows(self.config) if self.network.fused else {}
        return {part: (self.network.file_names[module], some) for part, (module, some) in rows.items()}

    def _rows(self, name: str) -> slice:
        """Rows of a weight in the file's matrix."""
        part = name.rpartition(".")[0].partition("model.layers.")[2].partition(".")[2]
        return self._fused[part][1] if part in self._fused else slice(None)

    def _lacks(self, tensor: str, name: str) -> ModelLoadError:
        return self.store.refusal(
            f"it has no tensor {tensor!r}, which is {name!r} of transformers", "Copy or download it again"
        )

    def check_weights(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Refuse a file that is of another model: whose weights lack a tensor or differ in shape, or that has others.

        shapes: of all weights, by transformers' names.
        """
        shapes = {name: shape for name, shape in shapes.items() if self._in_settings(name) is None}
        self._check_all_read({self.own_name(name) for name in shapes})
        for name, shape in shapes.items():
            self._check_shape(name, shape)

    def _check_all_read(self, used: set[str]) -> None:
        """Refuse a file with a tensor that nothing reads. used: by the model's weights."""
        unread = () if self.network.lacks else self.network.unread(self.config)
        used |= {place.name for name in unread for place in self._expected(name)}
        behind = range(self.store.num_layers, self.store.count("block_count"))
        factors = (
            {ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS}
            if LONG_FACTORS in self.store.tensors
            else {ROPE_FACTORS}
        )
        others = self.store.tensors.keys() - used - factors
        unused = [name for name in others if not name.startswith(tuple(f"blk.{layer}." for layer in behind))]
        if unused:
            raise self.store.refusal(
                f"its tensor {min(unused)!r} is none of the architecture's", "Give another file of the model"
            )

    def _check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        """Refuse a weight of another shape; sizes of 1 do not count."""
        stored_shape = self.shape(name)
        if len(shape) == 1 and prod(stored_shape) == shape[0]:
            return  # gains by group
        if [size for size in stored_shape if size > 1] != [size for size in shape if size > 1]:
            problem = f"its tensor {self.own_name(name)!r} has the shape {stored_shape} for {name!r}; expected {tuple(shape)}"
            raise self.store.refusal(problem, "Give another file of the model")

    def _in_settings(self, name: str) -> np.ndarray | None:
        """A weight that is a number of the file's settings, [1], or None of any other."""
        _, layer, part = LAYER.fullmatch(name).groups()  # pyright: ignore[reportOptionalMemberAccess]
        key = self.network.in_settings.get(part)
        if key is None:
            return None
        numbers = self.store.metadata.get(key)
        if not isinstance(numbers, list) or len(numbers) < self.store.num_layers:
            problem = f"its {key} is {numbers!r}; expected a number for each layer"
            raise self.store.refusal(problem, "Give another file of the model")
        return np.array(numbers[int(layer)], np.float32).reshape(1)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a weight, by transformers' name."""
        first, *others = self._entry(name).shape
        return len(range(first)[self._rows(name)]), *others

    def kind(self, name: str) -> str:
        """Number format of a weight as `blocks` and `read` give it, by transformers' name."""
        if self._in_settings(name) is not None:
            return "F32"
        entry = self._entry(name)
        if entry.type == codebooks.NVFP4:
            return "BF16"  # has all numbers of it
        if entry.type not in codebooks.CODEBOOKS:
            return entry.type
        if name not in self._regrouped:
            _, raw = self._bytes(entry)
            self._regrouped[name] = codebooks.regrouped_kind(entry.type, raw) or "F32"
        return self._regrouped[name]

    @cached_property
    def _regrouped(self) -> dict[str, str]:
        return {}

    def outline(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """An array without values, of this shape and a weight's type; float32 where it is in blocks."""
        return outline(shape, NUMBERS.get(self.kind(name), NUMBERS["F32"]))

    def blocks(self, name: str, rows: slice = ALL) -> tuple[str, np.ndarray]:
        """Number format of a weight, and bytes of some of its rows, uint8 [outputs, bytes of a row]; by transformers' name.

        The rows have the order of transformers, which is another one for queries and keys of Llama. Blocks that are no products' are those of another
        format with the same numbers, where there is one, see `matrices.codebooks`.
        """
        entry = self._entry(name)
        kind, raw = self._bytes(entry)
        by_row = raw.reshape(entry.shape[0], -1)[self._rows(name)]
        part = LAYER.fullmatch(name)[3]  # pyright: ignore[reportOptionalSubscript]
        if self.network.interleaved or self.network.pairs:
            halves = self.network.halves(part, self.config)
            by_row = by_row if halves is None else halves(by_row)
        if raw.ndim == 1:
            return kind, by_row.reshape(-1)
        some = by_row[rows]
        if (other := self.kind(name)) in BLOCKS and other != kind:
            return other, codebooks.regrouped(kind, some)
        return kind, some.reshape(-1, *raw.shape[1:])

    def _blocks(self, tensor: str) -> tuple[str, np.ndarray]:
        return self._bytes(self.store.tensors[tensor])

    def _bytes(self, entry: GgufTensor) -> tuple[str, np.ndarray]:
        return entry.type, np.frombuffer(
            self.store.parts[entry.part], np.uint8, entry.num_bytes, entry.start
        ).reshape(*entry.shape[:-1], -1)

    def forget(self, names: Iterable[str], rows: slice = ALL) -> None:
        """Give back the memory of some rows of weights; they are read from the file again when they are asked for again."""
        for name in names:
            if self._in_settings(name) is not None:
                continue
            entry = self._entry(name)
            first, last, _ = rows.indices(entry.shape[0])
            start, end = (entry.start + entry.num_bytes * row // entry.shape[0] for row in (first, last))
            forgotten(self.store.parts[entry.part], start, end)

    def rows(self, name: str, rows: slice) -> np.ndarray:
        """Some rows of a matrix in float32, by transformers' name."""
        return dequantised(*self.blocks(name, rows))

    def tensor(self, own_name: str) -> np.ndarray:
        """A tensor in float32, by the file's name."""
        return dequantised(*self._blocks(own_name))

    def read(self, name: str) -> np.ndarray:
        """A weight in float32, by transformers' name."""
        if (number := self._in_settings(name)) is not None:
            return number
        weight = dequantised(*self.blocks(name))
        transform = self.network.file_value(name)
        return weight if transform is None else transform(weight)

    def weight(self, name: str) -> np.ndarray:
        """A weight in float32 as transformers has it, in whose order the compiled path does not read all."""
        weight = self.read(name) - np.float32(self.network.offset_of(name))
        reordered = self.network.order.get(LAYER.fullmatch(name)[3])  # pyright: ignore[reportOptionalSubscript]
        return weight if reordered is None else reordered(self.config, weight)
