"""The header of a GGUF file: its settings, and where each tensor lies.

It is read here, as the `gguf` package parses every token of a vocabulary as an array of its own, which takes seconds.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import mmap
import os
import struct
from collections.abc import Collection, Iterable
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from polydraft.errors import ModelLoadError
from polydraft.models.store.gguf_folders import instead_of
from polydraft.models.store.gguf_parts import parts_of
from polydraft.models.store.gguf_texts import LENGTH, text_starts
from polydraft.models.store.mapped import mapped


class BlockLayout(NamedTuple):
    """A number format: its name, how many numbers are in a block, bytes of a block."""

    type: str
    block: int
    num_bytes: int


LAYOUTS = {
    0: BlockLayout("F32", 1, 4),
    1: BlockLayout("F16", 1, 2),
    2: BlockLayout("Q4_0", 32, 18),
    3: BlockLayout("Q4_1", 32, 20),
    6: BlockLayout("Q5_0", 32, 22),
    7: BlockLayout("Q5_1", 32, 24),
    8: BlockLayout("Q8_0", 32, 34),
    10: BlockLayout("Q2_K", 256, 84),
    11: BlockLayout("Q3_K", 256, 110),
    12: BlockLayout("Q4_K", 256, 144),
    13: BlockLayout("Q5_K", 256, 176),
    14: BlockLayout("Q6_K", 256, 210),
    16: BlockLayout("IQ2_XXS", 256, 66),
    17: BlockLayout("IQ2_XS", 256, 74),
    18: BlockLayout("IQ3_XXS", 256, 98),
    19: BlockLayout("IQ1_S", 256, 50),
    20: BlockLayout("IQ4_NL", 32, 18),
    21: BlockLayout("IQ3_S", 256, 110),
    22: BlockLayout("IQ2_S", 256, 82),
    23: BlockLayout("IQ4_XS", 256, 136),
    29: BlockLayout("IQ1_M", 256, 56),
    30: BlockLayout("BF16", 1, 2),
    34: BlockLayout("TQ1_0", 256, 54),
    35: BlockLayout("TQ2_0", 256, 66),
    39: BlockLayout("MXFP4", 32, 17),
    40: BlockLayout("NVFP4", 64, 36),
}
"""Number formats by their numbers in a file, as ggml.h has them."""
UNREAD = {
    9: "Q8_1",
    15: "Q8_K",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    41: "Q1_0",
}
"""Names of others, for refusals."""
TYPES = tuple(layout.type for layout in LAYOUTS.values())
"""Number formats that are read."""
SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
"""Types of metadata that have a size of their own, as `struct` formats."""
STRING = 8
ARRAY = 9
NO_TEXT = "backslashreplace"
"""Of bytes that are no UTF-8, which llama.cpp passes on as they are: names and tokens with them stay apart."""
CHUNK = 1 << 20
"""Bytes that are looked at together."""


class GgufTensor(NamedTuple):
    """A tensor of the file: shape as of transformers, name of its number format, where it begins and how long it is, in bytes, in which part."""

    shape: tuple[int, ...]
    type: str
    start: int
    num_bytes: int
    part: int = 0


class TextList(NamedTuple):
    """A list of texts of the metadata that was not read yet: where its first one begins, how many there are, where the last one ends."""

    start: int
    length: int
    end: int


class GgufHeader:
    """A GGUF file's header, with those of its other parts; weights are read from the file when they are asked for.

    path: of the first part, whichever was given.  files: all parts.  metadata: keys and values; lists of texts, which only tokenizers need, are read by `strings`.  tensors: by the file's own names.

    Raises:
        ModelLoadError: it is missing, no GGUF file, cut off or too long, or of a number format that is not read.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        paths = parts_of(Path(os.path.expanduser(path)))
        self.path = paths[0]
        self.files: tuple[Path, ...] = tuple(paths)
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GgufTensor] = {}
        self.parts: list[mmap.mmap] = []
        for self.path in paths:  # refusals name the part
            self._map(len(paths))
            try:
                self._read_part(len(paths))
            except (struct.error, KeyError, TypeError, OverflowError, ZeroDivisionError) as error:
                raise self.refusal(
                    f"its header is damaged or cut off ({error})", "Copy or download it again"
                ) from error
        self.path = paths[0]
        self._data = self.parts[0]

    def _map(self, num_parts: int) -> None:
        try:
            self._data = mapped(self.path)
        except ValueError as error:  # nothing can be mapped of an empty file
            raise self.refusal("it is empty", "Copy or download it again") from error
        except FileNotFoundError as error:
            advice = (
                "Check the path"
                if num_parts == 1
                else f"It is one of {num_parts} parts: put all of them into one folder"
            )
            raise self.refusal("there is no such file", advice) from error
        except OSError as error:
            raise self.refusal(f"it cannot be read: {error.strerror}", "Check the path") from error
        self.parts.append(self._data)

    def refusal(self, problem: str, advice: str) -> ModelLoadError:
        """Why the file cannot be used, and what to do instead, as an error to raise."""
        return ModelLoadError(f"the GGUF file {str(self.path)!r} was given, but {problem}. {advice}.")

    def setting(self, name: str, otherwise: Any = None) -> Any:
        """A key of its architecture, or `otherwise`."""
        return self.metadata.get(f"{self.architecture}.{name}", otherwise)

    def number(self, name: str, otherwise: float | None = None) -> Any:
        """A positive number of its architecture; `otherwise` where the file lacks it.

        Raises:
            ModelLoadError: it is something else, or missing.
        """
        setting = self.setting(name, otherwise)
        if not isinstance(setting, (int, float)) or not setting > 0:
            raise self.refusal(
                f"its {self.architecture}.{name} is {setting!r}; expected a positive number",
                "Give another file of the model",
            )
        return setting

    def number_or_none(self, name: str) -> Any:
        """As `number`, None where the file lacks it or has 0, which converters write for none."""
        return self.number(name) if self.setting(name) else None

    def count(self, name: str, otherwise: int | None = None) -> int:
        """As `number`, and whole."""
        number = self.number(name, otherwise)
        if not isinstance(number, int) or isinstance(number, bool):
            raise self.refusal(
                f"its {self.architecture}.{name} is {number!r}; expected a whole number",
                "Give another file of the model",
            )
        return number

    def floats(self, name: str) -> list[float]:
        """A small tensor of numbers in float32, such as the divisors of frequencies.

        Raises:
            ModelLoadError: there is none of that name, or it is of another format.
        """
        entry = self.tensors.get(name)
        if entry is None or entry.type != "F32":
            present = "no tensor" if entry is None else f"a tensor in {entry.type}, not F32, of the name"
            raise self.refusal(f"it has {present} {name!r}", "Copy or download it again")
        return np.frombuffer(self.parts[entry.part], "<f4", entry.num_bytes // 4, entry.start).tolist()

    @property
    def num_layers(self) -> int:
        """Of the trunk: those behind it predict further tokens.

        Raises:
            ModelLoadError: settings that are no such numbers.
        """
        extra = self.setting("nextn_predict_layers", 0)
        blocks = self.count("block_count")
        if not isinstance(extra, int) or not 0 <= extra < blocks:
            problem = f"its {self.architecture}.nextn_predict_layers is {extra!r}; expected 0 to {blocks - 1}"
            raise self.refusal(problem, "Give another file of the model")
        return blocks - extra

    def _read_part(self, num_parts: int) -> None:
        """Header of the part that was mapped last; settings are in the first one alone."""
        num_tensors, num_keys = self._counts()
        metadata = {self._string(): self._value(self._number("<I")) for _ in range(num_keys)}
        number = len(self.parts) - 1
        stated = metadata.get("split.no", 0), metadata.get("split.count", 1) or 1
        if stated != (number, num_parts):
            raise self.refusal(
                f"it says that it is part {stated[0] + 1} of {stated[1]}; expected part {number + 1} of {num_parts}",
                "Give the parts the names that gguf-split gave them, NAME-00001-of-00003.gguf and so on",
            )
        if number == 0:
            self.metadata = metadata
            self.architecture = str(metadata["general.architecture"])
        entries = [self._tensor() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", self.metadata.get("general.alignment", 32))
        begin = -(-self._at // alignment) * alignment
        tensors = {name: entry._replace(start=begin + entry.start, part=number) for name, entry in entries}
        self.tensors |= tensors
        end = max((entry.start + entry.num_bytes for entry in tensors.values()), default=self._at)
        self._check_length(end, alignment)

    def _counts(self) -> tuple[int, int]:
        """How many tensors and settings the part has that was mapped last."""
        if (magic := self._data[:4]) != b"GGUF":
            raise self.refusal(
                f"it begins with {magic!r} and not with b'GGUF'", "Give a file that llama.cpp can read"
            )
        _, version, num_tensors, num_keys = struct.unpack_from("<4sIQQ", self._data)
        if version in (2 << 24, 3 << 24):
            advice = "Give a little-endian one, or convert it with llama.cpp's gguf_convert_endian.py"
            raise self.refusal("it is big-endian; expected little-endian", advice)
        if version not in (2, 3):
            raise self.refusal(
                f"it is of version {version}; expected 2 or 3", "Convert it again with llama.cpp"
            )
        if (num_tensors + num_keys) * 12 > len(self._data):  # bytes of the smallest entry
            raise struct.error(f"{num_keys} keys and {num_tensors} tensors in {len(self._data)} bytes")
        self._at = struct.calcsize("<4sIQQ")
        return num_tensors, num_keys

    def _check_length(self, end: int, alignment: int) -> None:
        """Refuse a part that does not end behind its last tensor."""
        if len(self._data) < end or self._has_more(-(-end // alignment) * alignment):
            raise self.refusal(
                f"it has {len(self._data)} bytes, where its header tells of {end}: it is {'cut off' if len(self._data) < end else 'too long'}",
                "Copy or download it again",
            )

    def _has_more(self, end: int) -> bool:
        """Whether anything but zeros, to which some tools fill up files, stands behind the data."""
        return any(self._data[at : at + CHUNK].strip(b"\0") for at in range(end, len(self._data), CHUNK))

    def check_architecture(self, known: Collection[str]) -> None:
        """Refuse a file of an architecture that is none of these.

        Raises:
            ModelLoadError: naming it.
        """
        if self.architecture not in known:
            raise self.refusal(
                f"its architecture is {self.architecture!r}; expected one of {', '.join(known)}",
                instead_of(self.architecture),
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
        return self._data[self._at - length : self._at].decode(errors=NO_TEXT)

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._string()
        if kind != ARRAY:
            return self._number(SCALARS[kind])
        kind = self._number("<I")
        count = self._number("<Q")
        if kind == STRING:
            return self._skipped_texts(count)
        form = SCALARS[kind]
        values = struct.unpack_from(f"<{min(count, len(self._data))}{form[1]}", self._data, self._at)
        self._at += count * struct.calcsize(form)
        return list(values)

    def _skipped_texts(self, count: int) -> "TextList":
        start = self._at
        at = int(text_starts(self._data, start, count)[-1])
        if at > len(self._data):
            raise struct.error(f"{count} texts at {start}")
        self._at = at
        return TextList(start, count, at)

    def raw_strings(self, key: str) -> bytes:
        """A list of texts as the file holds it; b"" where there is none of that name."""
        entry = self.metadata.get(key)
        return self._data[entry.start : entry.end] if isinstance(entry, TextList) else b""

    def strings(self, key: str) -> list[str]:
        """A list of texts of the metadata.

        Raises:
            ModelLoadError: there is none of that name.
        """
        entry = self.metadata.get(key)
        if not isinstance(entry, TextList):
            raise self.refusal(
                f"its {key} is {entry!r}; expected a list of texts", "Give another file of the model"
            )
        starts = text_starts(self._data, entry.start, entry.length)
        begins = (starts[:-1] + LENGTH.size).tolist()
        data = self._data
        return [
            data[begin:end].decode(errors=NO_TEXT)
            for begin, end in zip(begins, starts[1:].tolist(), strict=True)
        ]

    def find(self, key: str, texts: Iterable[str]) -> dict[str, int]:
        """Places of texts, none of them empty, in a list of the metadata; of those that are not there none, of equal ones the last."""
        encoded = {text.encode(): text for text in texts}
        entry = self.metadata[key]
        starts = text_starts(self._data, entry.start, entry.length)
        lengths = np.diff(starts) - LENGTH.size
        firsts = np.frombuffer(self._data, np.uint8)[np.minimum(starts[:-1] + LENGTH.size, entry.end - 1)]
        likely = np.isin(lengths, [len(text) for text in encoded])
        likely &= np.isin(firsts, [text[0] for text in encoded])
        places = dict[str, int]()
        for place in np.flatnonzero(likely).tolist():
            begin = int(starts[place]) + LENGTH.size
            text = self._data[begin : int(starts[place + 1])]
            if text in encoded:
                places[encoded[text]] = place
        return places

    def _tensor(self) -> tuple[str, GgufTensor]:
        name = self._string()
        num_dimensions = self._number("<I")
        shape = tuple(self._number("<Q") for _ in range(min(num_dimensions, 8)))[::-1]
        number = self._number("<I")
        start = self._number("<Q")
        if (layout := LAYOUTS.get(number)) is None:
            raise self.refusal(
                f"its tensor {name!r} is of type {_type_name(number)}; expected one of {', '.join(TYPES)}",
                "Give a file of another type",
            )
        format_name, in_block, bytes_of_block = layout
        if shape and shape[-1] % in_block:
            raise struct.error(f"{name!r} has rows of {shape[-1]} numbers in blocks of {in_block}")
        return name, GgufTensor(shape, format_name, start, prod(shape) // in_block * bytes_of_block)


def _type_name(number: int) -> str:
    """Name of a number format that is not read."""
    return UNREAD.get(number, f"number {number}")
