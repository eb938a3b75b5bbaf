"""Matrices of a head in eight bits, in its own file: blocks of 32 inputs with one float16 scale, as Q8_0 of GGUF files, 8.5 bits a weight.

    NAME         a matrix of numbers
    NAME.q8_0    [O, 34 I / 32] bytes: of each block its scale, and a signed code for each input

The compiled form of a head rounds its layers' matrices to such blocks, whatever the file has, and blocks are rounded to themselves: a file of half the
size drafts the same.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from jaxtyping import Float, UInt8

from polydraft.errors import InvalidInputError
from polydraft.files.atomic import replacing
from polydraft.models.matrices.dequantising import decoded
from polydraft.models.matrices.formats import BLOCK, raw_blocks, rounded_blocks
from polydraft.models.store.places import NUMBERS
from polydraft.models.store.tensor_files import tensors_of

FORMAT = "Q8_0"
SUFFIX = ".q8_0"
BYTES = raw_blocks(FORMAT).itemsize
"""Of a block."""


def in_eight_bits(matrix: Float[np.ndarray, "O I"]) -> UInt8[np.ndarray, "O B"]:
    """The blocks of a matrix whose width is a whole number of them.

    Example:
        >>> in_eight_bits(np.ones((2, 64))).shape
        (2, 68)
    """
    return rounded_blocks(matrix, FORMAT).view(np.uint8)


def expanded(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Tensors of a file with its matrices in float32, where it has blocks.

    Raises:
        ValueError: what cannot be blocks.

    Example:
        >>> np.unique(expanded({"fc.weight.q8_0": in_eight_bits(np.full((1, 32), -127.0))})["fc.weight"]).tolist()
        [-127.0]
    """
    matrices = dict(tensors)
    for name in [name for name in tensors if name.endswith(SUFFIX)]:
        blocks = matrices.pop(name)
        if blocks.dtype != np.uint8 or blocks.ndim != 2 or blocks.shape[1] % BYTES:
            raise ValueError(
                f"{name} has the shape {blocks.shape} and {blocks.dtype}; expected blocks of {BYTES} bytes"
            )
        matrices[name.removesuffix(SUFFIX)] = decoded(FORMAT, np.ascontiguousarray(blocks))
    return matrices


def write_in_eight_bits(head: str | Path, out: str | Path) -> Path:
    """Write the head of a folder into another one, its matrices in blocks; norms, and what has no whole number of blocks, stay as they are.

    Raises:
        InvalidInputError: a folder without model.safetensors, or one to write that is not empty.
    """
    from safetensors.numpy import save

    folder = Path(head).expanduser()
    place = Path(out).expanduser()
    file = folder / "model.safetensors"
    if not file.is_file():
        raise InvalidInputError(
            f"{str(head)!r} was given, which has no model.safetensors; expected the folder of a draft head."
        )
    if place.exists() and any(place.iterdir()):
        raise InvalidInputError(
            f"out={str(out)!r} was given, which is not empty; expected a new folder. Give another one."
        )
    tensors = dict[str, np.ndarray]()
    for name, tensor in tensors_of(file).items():
        matrix = (
            tensor.dtype in NUMBERS.values()
            and tensor.ndim == 2
            and tensor.shape[1] % BLOCK == 0
            and name != "target_probe"
        )
        tensors[name + SUFFIX * matrix] = in_eight_bits(tensor) if matrix else tensor
    place.mkdir(parents=True, exist_ok=True)
    for settings in folder.glob("*.json"):
        shutil.copy(settings, place)
    with replacing(place / "model.safetensors") as written:
        written.write(save(tensors))
    return place
