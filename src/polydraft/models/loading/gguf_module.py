"""A GGUF file as a module of transformers: shapes are compared before a weight is read, and each weight is decoded once, into its place.

Weights are numbers again, whatever blocks the file has them in, so the module may need several times the file's bytes: what it needs is compared
with the free memory first.
"""

import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from polydraft.errors import CapacityError
from polydraft.models.loading.gguf import GgufFile
from polydraft.models.loading.memory import available_bytes
from polydraft.models.loading.silence import silent_loading


@silent_loading()
def module_of_file(
    file: GgufFile, dtype: torch.dtype | None = None, device: torch.device | None = None
) -> Any:
    """The model of a file, in evaluation mode.

    dtype: None is float32, or bfloat16 where float32 does not fit, which is said.  device: default the CPU.

    Raises:
        ModelLoadError: weights are missing, of another shape, or there are others.
        CapacityError: the weights do not fit into memory.
    """
    from transformers import AutoModelForCausalLM

    config = file.transformers_config
    place = device or torch.device("cpu")
    with torch.device("meta"):
        outline = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    shapes = {name: weight.shape for name, weight in outline.named_parameters()}
    buffers = {name for name, _ in outline.named_buffers()}
    shapes |= {name: weight.shape for name, weight in outline.state_dict().items() if name in buffers}
    file.check_all_used(tensor for name in shapes for tensor in file.own_names(name))
    for name, shape in shapes.items():
        _check_shape(file, name, shape)
    number = _fitting(file, [shape.numel() for shape in shapes.values()], dtype, place)
    weights = {name: _read(file, name, shape, number, place) for name, shape in shapes.items()}
    network = (
        type(outline).from_pretrained(None, config=config, state_dict=weights, dtype=number).to(place).eval()
    )
    if file.rope_factors is not None:
        network.model.rotary_emb.inv_freq /= file.rope_factors.to(place)
    return network


def _check_shape(file: GgufFile, name: str, shape: torch.Size) -> None:
    names = ", ".join(f"{tensor!r} of shape {file.tensors[tensor].shape}" for tensor in file.own_names(name))
    try:
        file_shape: Any = _without_ones(file.weight(name, outline=True).shape)
    except (RuntimeError, ValueError, IndexError):  # what torch says where shapes do not go together
        file_shape = None
    if file_shape != _without_ones(shape):
        raise file.refusal(
            f"its {names} is not {name!r} of shape {tuple(shape)}", "Give another file of the model"
        )


def _without_ones(shape: Iterable[int]) -> list[int]:
    return [size for size in shape if size != 1]


def _fitting(
    file: GgufFile, sizes: list[int], dtype: torch.dtype | None, device: torch.device
) -> torch.dtype:
    """The number format of the weights. sizes: how many numbers each has; the largest is there twice in float32 while it is made."""
    free = available_bytes(device)
    choices = (torch.float32, torch.bfloat16) if dtype is None else (dtype,)
    spare = 2 * max(sizes) * torch.float32.itemsize
    needed = {choice: sum(sizes) * choice.itemsize + spare for choice in choices}
    number = next((choice for choice in choices if needed[choice] <= free), None)
    sizes_text = [
        f"{needed[choice] / 2**30:.2f} GiB in {str(choice).removeprefix('torch.')}" for choice in choices
    ]
    if number is None:
        raise CapacityError(
            f"the GGUF file {str(file.path)!r} was given; its weights take {' or '.join(sizes_text)} through transformers, and {free / 2**30:.2f} GiB "
            f"are free on {device}. Give a smaller model."
        )
    if dtype is None and number != torch.float32:
        warnings.warn(
            f"{str(file.path)!r} runs in bfloat16: its weights take {sizes_text[0]}, and {free / 2**30:.2f} GiB are free.",
            stacklevel=2,
        )
    return number


def _read(file: GgufFile, name: str, shape: torch.Size, number: torch.dtype, device: torch.device) -> Tensor:
    weight = file.weight(name).reshape(shape).to(device)
    return (
        weight.to(number) if weight.ndim > 1 else weight
    )  # transformers has some vectors in float32 whatever the others are
