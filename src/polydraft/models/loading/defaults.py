"""Sampling parameters that a model comes with: those of generation_config.json, or of `general.sampling.*` in a GGUF file."""

from collections.abc import Mapping
from typing import Any

from polydraft.core.params import SamplingParams
from polydraft.errors import InvalidInputError, ModelLoadError
from polydraft.files.schema import read_json
from polydraft.models.loading.gguf import GgufFile
from polydraft.models.loading.gguf_parts import is_gguf
from polydraft.models.loading.hub import located

GGUF_KEYS = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_p": "top_p",
    "general.sampling.top_k": "top_k",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}
"""Metadata of a GGUF file -> field of `SamplingParams`, which a generation_config.json sets under that name."""


def sampling_defaults(name: str) -> dict[str, Any]:
    """Fields of `SamplingParams` that the model's authors set; its name is as in `hub.located`.

    Raises:
        ModelLoadError: a value outside its range.

    Example:
        >>> from polydraft.models import pair
        >>> sampling_defaults(str(pair.target_folder()))
        {}
    """
    place = located(name)
    if is_gguf(place):
        file = place
        metadata = GgufFile(place).metadata
        settings: dict[str, Any] = {field: metadata.get(key) for key, field in GGUF_KEYS.items()}
    else:
        file = place / "generation_config.json"
        written = _read(file) if file.is_file() else {}
        settings = {field: written.get(field) for field in GGUF_KEYS.values()}
    defaults = {field: value for field, value in settings.items() if value is not None}
    try:
        SamplingParams(**defaults)
    except InvalidInputError as error:
        raise ModelLoadError(
            f"the sampling defaults of {str(file)!r} cannot be used: {error} Correct them there."
        ) from error
    return defaults


def _read(file: Any) -> Mapping[str, Any]:
    try:
        written = read_json(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelLoadError(
            f"the configuration {str(file)!r} cannot be read: {error}. Copy or download it again."
        ) from error
    return written if isinstance(written, Mapping) else {}
