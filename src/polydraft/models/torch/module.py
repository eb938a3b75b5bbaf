"""From a name to a module of transformers: safetensors or GGUF only, no remote code, every fault with its remedy."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from polydraft.errors import InvalidInputError, ModelLoadError, first_line
from polydraft.models.loading.checkpoint import unread
from polydraft.models.loading.gguf import weights_of_file
from polydraft.models.store.gguf_parts import is_gguf
from polydraft.models.store.hub import located
from polydraft.models.store.scaled_weights import is_beside
from polydraft.models.store.store import opened_folder
from polydraft.models.store.tensor_files import FolderWeights
from polydraft.models.supported import check_plain, is_encoder_decoder
from polydraft.models.torch.door import into
from polydraft.models.torch.gguf_module import config_of_file, module_of_file
from polydraft.models.torch.silence import silent_loading
from polydraft.models.windows import text_config


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
