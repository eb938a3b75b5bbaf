"""From a name to a module of transformers: safetensors or GGUF only, no remote code, every fault with its remedy.

Of a GGUF file, shapes are compared before a weight is read, and each weight is decoded once, into its place. Weights are numbers again, whatever
blocks the file has them in, so the module may need several times the file's bytes: what it needs is compared with the free memory first.
"""

import os
import warnings
from collections.abc import Mapping
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from polydraft.errors import InvalidInputError, ModelLoadError, first_line
from polydraft.models.loading.checkpoint import unread
from polydraft.models.loading.gguf import GgufWeights, weights_of_file
from polydraft.models.memory import fitting_choice
from polydraft.models.store.gguf_parts import is_gguf
from polydraft.models.store.hub import located
from polydraft.models.store.places import Stored
from polydraft.models.store.scaled_weights import is_beside
from polydraft.models.store.store import opened_folder
from polydraft.models.store.tensor_files import FolderWeights
from polydraft.models.store.weights import ALL, LOSSLESS, Writing, write_all
from polydraft.models.supported import check_plain, is_encoder_decoder
from polydraft.models.torch.door import into, numpy_type
from polydraft.models.torch.silence import silent_loading
from polydraft.models.windows import text_config
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


def as_device(device: str | torch.device | None) -> torch.device:
    """The device meant; None is the first GPU, or the CPU where there is none.

    Raises:
        InvalidInputError: a device that does not exist here.

    Example:
        >>> as_device("cpu")
        device(type='cpu')
    """
    try:
        chosen = torch.device(
            device if device is not None else "cuda" if torch.cuda.is_available() else "cpu"
        )
        torch.zeros(1, device=chosen).item()  # the device meta holds no numbers
    except (RuntimeError, AssertionError, ImportError, TypeError) as error:
        raise InvalidInputError(
            f"device={device!r} was given, which this machine does not have. Use 'cpu'. ({first_line(error)})"
        ) from None
    return chosen


def as_dtype(dtype: str | torch.dtype | None, device: torch.device) -> torch.dtype | str:
    """The number format meant; None is float32 on a CPU (half precision is slower there) and the checkpoint's own elsewhere.

    Raises:
        InvalidInputError: a name that is no floating-point format of torch.

    Example:
        >>> as_dtype("bfloat16", torch.device("cpu"))
        torch.bfloat16
    """
    if dtype is None:
        return torch.float32 if device.type == "cpu" else "auto"
    number_format = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(number_format, torch.dtype) or not number_format.is_floating_point:
        raise InvalidInputError(f"dtype={dtype!r} was given; expected 'float32', 'float16' or 'bfloat16'.")
    return number_format


def load_config(name: str | os.PathLike[str]) -> Any:
    """Configuration of a model; its name is as in `hub.located`.

    Raises:
        ModelLoadError: it is missing, unreadable, of an unknown type, or needs code of its own.
    """
    place = located(name)
    if is_gguf(place):
        return config_of_file(weights_of_file(place))
    opened_folder(place).check()
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(place, trust_remote_code=False)
    except Exception as error:
        unknown = _unknown_kind(place)
        raise ModelLoadError(
            f"the configuration of {str(name)!r} could not be read: {unknown or first_line(error)}."
        ) from error


def _unknown_kind(folder: Path) -> str | None:
    """A kind of layer or of rotation that transformers does not have, by name, where a configuration asks for one."""
    from transformers.configuration_utils import ALLOWED_LAYER_TYPES
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    settings = dict(opened_folder(folder).settings)
    text = settings.get("text_config")
    settings |= text if isinstance(text, dict) else {}
    kinds = settings.get("layer_types")
    rope = settings.get("rope_parameters") or settings.get("rope_scaling")
    ropes = (
        [part for part in (rope, *rope.values()) if isinstance(part, dict)] if isinstance(rope, dict) else []
    )
    fields = {
        "layer_types": (kinds if isinstance(kinds, list) else [], [*ALLOWED_LAYER_TYPES]),
        "rope_type": (
            [part["rope_type"] for part in ropes if "rope_type" in part],
            ["default", *ROPE_INIT_FUNCTIONS],
        ),
    }
    for setting, (values, supported) in fields.items():
        if unknown := [value for value in values if value not in supported]:
            return f"it has {setting} {unknown[0]!r}; known are {', '.join(dict.fromkeys(supported))}"
    return None


def _auto_class(config: Any) -> Any:
    """The class of transformers that loads a model of this configuration."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSeq2SeqLM
    from transformers.models.auto import modeling_auto

    if is_encoder_decoder(config):
        return AutoModelForSeq2SeqLM
    if type(config) in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING:
        return AutoModelForCausalLM
    if type(config) in modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return AutoModelForImageTextToText  # its text model alone is run
    raise ModelLoadError(
        f"a model of type {config.model_type!r} was given, for which transformers has no causal language model. Use another model."
    )


@silent_loading()
def load_module(
    name: str | os.PathLike[str],
    *,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    max_model_len: int | None = None,
    **placement: Any,
) -> Any:
    """A causal language model or an encoder-decoder of transformers, in evaluation mode, on its device; of models of pictures and text, the whole.

    name: see `hub.located`.  dtype, device: see `as_dtype` and `as_device`.
    placement: options of `from_pretrained` that say where which weights go, in place of the device.

    Raises:
        ModelLoadError: the folder is missing, incomplete or corrupt, or the model is no language model that transformers knows.
        CapacityError: `max_model_len` beyond the model's context.
    """
    place = as_device(device)
    number = as_dtype(dtype, place)
    folder = located(name)
    if is_gguf(folder):
        file = weights_of_file(folder)
        check_plain(config_of_file(file), max_model_len)
        return module_of_file(file, None if dtype is None else number, place)  # pyright: ignore[reportArgumentType]
    config = load_config(folder)
    check_plain(config, max_model_len)
    kind = _auto_class(config)
    state = _own_state(folder, place, placement)
    try:
        if state is None:
            loaded: Any = kind.from_pretrained(
                folder,
                dtype=number,
                use_safetensors=True,
                trust_remote_code=False,
                output_loading_info=True,
                **placement,
            )
        else:
            loaded = _from_state(kind, config, state, number, folder)
    except Exception as error:
        unknown = _unknown_kind(folder)
        raise ModelLoadError(
            f"the model {str(name)!r} could not be loaded: {unknown or first_line(error)}."
        ) from error
    module, report = loaded
    _check_report(report, module, folder, str(name))
    return module.eval() if placement else module.to(place).eval()


def _check_report(report: Mapping[str, Any], module: Any, folder: Path, name: str) -> None:
    """Refuse a module that lacks weights, or whose folder has others. report: of `from_pretrained`."""
    if report["missing_keys"]:
        missing = sorted(report["missing_keys"])
        raise ModelLoadError(
            f"the weights of {name!r} are incomplete: {len(missing)} tensors are missing, such as {missing[0]!r}. "
            "Copy or download them again."
        )
    config = text_config(module.config)
    is_ours = getattr(config, "quantization_config", None) is None
    layers = getattr(config, "num_hidden_layers", 0)
    tensors = opened_folder(folder).entries
    if is_ours and (others := unread(report["unexpected_keys"], tensors, layers)):
        raise ModelLoadError(
            f"nothing reads {len(others)} tensors of {name!r}, such as {others[0]!r}: with them it would be another model. "
            "Give a folder whose config.json is that of its weights."
        )


class _Unread:
    """A tensor that is read where transformers asks for it."""

    def __init__(self, reader: FolderWeights, name: str) -> None:
        self._reader = reader
        self._name = name

    def __getitem__(self, rows: Any) -> torch.Tensor:
        return into(self._reader.tensor(self._name))[rows]


def _own_state(folder: Path, device: torch.device, placement: Mapping[str, Any]) -> dict[str, Any] | None:
    """A folder's tensors by name where transformers would read others: codes without their scales, or one that a second file has, too.

    Raises:
        ModelLoadError: such tensors are to be placed on several devices.
    """
    store = opened_folder(folder)
    entries = store.entries
    twice = store.twice
    scalings = store.scalings
    if scalings and store.is_quantized_for_transformers and (placement or device.type != "cpu"):
        scalings = {}  # its kernels take them as they are
    if not scalings and not twice:
        return None
    if placement:
        problem = (
            f"{twice[0]!r} lies in two of its files"
            if twice
            else f"{min(scalings)!r} has its scale beside it"
        )
        raise ModelLoadError(
            f"{str(folder)!r} cannot be read onto several devices: {problem}. Save it again with `save_pretrained`."
        )
    reader = FolderWeights(entries, {}, scalings)
    return {name: _Unread(reader, name) for name in entries if not is_beside(name, scalings)}


def _from_state(kind: Any, config: Any, state: dict[str, Any], number: Any, folder: Path) -> Any:
    """As `from_pretrained` of a folder, of tensors that are given."""
    from transformers import GenerationConfig
    from transformers.models.auto.auto_factory import _get_model_class

    for part in (config, text_config(config)):
        if getattr(part, "quantization_config", None) is not None:
            del part.quantization_config
    dtype = (config.dtype or torch.bfloat16) if number == "auto" else number
    model_class = _get_model_class(config, kind._model_mapping)
    module, report = model_class.from_pretrained(
        None, config=config, state_dict=state, dtype=dtype, output_loading_info=True
    )
    module.name_or_path = module.config.name_or_path = str(folder)
    if (folder / "generation_config.json").is_file():
        module.generation_config = GenerationConfig.from_pretrained(folder)
    return module, report
