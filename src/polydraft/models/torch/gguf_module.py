"""A GGUF file as a module of transformers: shapes are compared before a weight is read, and each weight is decoded once, into its place.

Weights are numbers again, whatever blocks the file has them in, so the module may need several times the file's bytes: what it needs is compared
with the free memory first.
"""

import warnings
from collections.abc import Mapping
from functools import partial
from math import prod
from typing import Any

import numpy as np
import torch

from polydraft.errors import first_line
from polydraft.models.loading.gguf import GgufWeights
from polydraft.models.memory import fitting_choice
from polydraft.models.store.places import Stored
from polydraft.models.store.weights import ALL, LOSSLESS, Writing, write_all
from polydraft.models.torch.door import into, numpy_type
from polydraft.models.torch.silence import silent_loading
from polydraft.numerics.processor import usable_cores


def config_of_file(file: GgufWeights) -> Any:
    """The settings of a file as a configuration of transformers.

    Raises:
        ModelLoadError: as `GgufWeights.config`, or a setting that transformers refuses.
    """
    from transformers import CONFIG_MAPPING, AutoConfig

    kind = CONFIG_MAPPING[file.network.model_type]
    settings = {
        name: value
        for name, value in file.network.settings_of(file.store).items()
        if getattr(getattr(kind, name, None), "fset", True)  # else it follows from others
    }
    try:
        return AutoConfig.for_model(file.network.model_type, **settings)
    except Exception as error:  # transformers checks types and ranges
        raise file.store.refusal(
            f"its settings cannot be: {first_line(error)}", "Give another file of the model"
        ) from error


@silent_loading()
def module_of_file(
    file: GgufWeights, dtype: torch.dtype | None = None, device: torch.device | None = None
) -> Any:
    """The model of a file, in evaluation mode.

    dtype: None is float32, or bfloat16 where float32 does not fit, which is said.  device: default the CPU.

    Raises:
        ModelLoadError: weights are missing, of another shape, or there are others.
        CapacityError: the weights do not fit into memory.
    """
    from transformers import AutoModelForCausalLM

    config = config_of_file(file)
    target = device or torch.device("cpu")
    with torch.device("meta"):
        outline = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    shapes = {name: tuple(weight.shape) for name, weight in outline.named_parameters()}
    buffers = {name for name, _ in outline.named_buffers()}
    shapes |= {name: tuple(weight.shape) for name, weight in outline.state_dict().items() if name in buffers}
    settings = config if file.network.lacks else file.config
    pieces = file.network.shapes(settings)
    places = file.network.located(settings, pieces, shapes)
    whole = shapes.keys() - {place.name for place in places.values()}
    own_names = {file.network.canonical(name): name for name in whole}
    file.check_weights(pieces | {name: shapes[own] for name, own in own_names.items()})
    number = _fitting(file, [prod(shape) for shape in shapes.values()], dtype, target)
    places |= {name: Stored(own) for name, own in own_names.items()}
    weights = _tensors(file, places, shapes, number, target)
    network = (
        type(outline).from_pretrained(None, config=config, state_dict=weights, dtype=number).to(target).eval()
    )
    if file.rope_factors is not None:
        network.model.rotary_emb.inv_freq /= into(file.rope_factors, target)
    return network


def _fitting(
    file: GgufWeights, sizes: list[int], dtype: torch.dtype | None, device: torch.device
) -> torch.dtype:
    """The number format of the weights. sizes: how many numbers each has; those in the making are there twice in float32."""
    choices = (torch.float32, torch.bfloat16) if dtype is None else (dtype,)
    in_the_making = sum(sorted(sizes)[-usable_cores() :])
    spare = 2 * in_the_making * torch.float32.itemsize
    formats = {str(choice).removeprefix("torch."): choice for choice in choices}
    needed = {name: sum(sizes) * choice.itemsize + spare for name, choice in formats.items()}
    place = str(file.store.path)
    chosen = fitting_choice(place, needed, device)
    if dtype is None and formats[chosen] != torch.float32:
        gibibytes = needed["float32"] / 2**30
        warnings.warn(
            f"{place!r} runs in bfloat16: its weights take {gibibytes:.2f} GiB in float32, which are not free on {device}.",
            stacklevel=2,
        )
    return formats[chosen]


def _tensors(
    file: GgufWeights,
    places: Mapping[str, Stored],
    shapes: Mapping[str, tuple[int, ...]],
    number: torch.dtype,
    device: torch.device,
) -> dict[str, torch.Tensor]:
    """The state dict of a module, each tensor made of the weights that lie in it. places: of all weights in them."""
    by_tensor = dict[str, list[str]]()
    for name, place in places.items():
        by_tensor.setdefault(place.name, []).append(name)
    tensors = dict[str, torch.Tensor]()

    def make(tensor_name: str) -> tuple[float, float]:
        shape = shapes[tensor_name]
        names = by_tensor[tensor_name]
        # transformers has some vectors in float32 whatever the others are
        dtype = numpy_type(number) if len(shape) > 1 else np.dtype(np.float32)
        tensor = _empty(places[names[0]], shape, dtype)
        for name in names:
            places[name].write(tensor, file.weight(name))
        tensors[tensor_name] = into(tensor, device)
        return LOSSLESS

    writings = [Writing(names, ALL, partial(make, tensor_name)) for tensor_name, names in by_tensor.items()]
    num_bytes = sum(map(prod, shapes.values())) * number.itemsize
    write_all(file, writings, str(file.store.path), num_bytes)
    return tensors


def _empty(place: Stored, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Memory of a tensor in which rows of a weight that lies there lie in one piece, even where it is transposed."""
    tensor = np.empty(shape, dtype)
    part = place.part(tensor if place.index is None else tensor[place.index])
    if part.ndim == 2 and part.strides[0] < part.strides[1]:
        return np.empty((*shape[:-2], shape[-1], shape[-2]), dtype).swapaxes(-2, -1)
    return tensor
