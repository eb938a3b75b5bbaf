"""Settings of a model by the names of transformers' configurations, without transformers."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from polydraft.errors import ModelLoadError, first_line
from polydraft.models.store.store import opened_folder


@dataclass(frozen=True)
class CheckpointConfig:
    """What the compiled path reads of a configuration; its names and meanings are those of transformers' `LlamaConfig`.

    rope_parameters: `rope_theta`, `rope_type` and what that kind of scaling needs.
    eos_token_id: ids that end a text, or None.
    """

    model_type: str
    name_or_path: str
    vocab_size: int
    max_position_embeddings: int
    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_parameters: Mapping[str, Any]
    tie_word_embeddings: bool
    bos_token_id: int | None
    eos_token_id: list[int] | None
    pad_token_id: int | None
    of_architecture: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Settings that only some architectures have; they are attributes, too."""

    def __getattr__(self, name: str) -> Any:
        of_architecture = self.__dict__.get("of_architecture", {})
        if name not in of_architecture:
            raise AttributeError(f"{type(self).__name__} has no setting {name!r}")
        return of_architecture[name]

    @classmethod
    def of_settings(cls, model_type: str, settings: Mapping[str, Any]) -> "CheckpointConfig":
        """That of settings of which some are an architecture's own."""
        common = {field.name for field in fields(cls)}
        own = {name: value for name, value in settings.items() if name not in common}
        shared = {name: value for name, value in settings.items() if name in common}
        return cls(model_type, **shared, of_architecture=own)

    @classmethod
    def of_json(cls, settings: Mapping[str, Any], place: str) -> "CheckpointConfig | None":
        """That of a config.json of transformers 5, or None where it leaves something to the defaults of a class, or asks for more than is here.

        Example:
            >>> CheckpointConfig.of_json({"model_type": "llama", "vocab_size": 8}, "folder") is None
            True
        """
        layers = settings.get("layer_types") or []
        if any(settings.get(name) for name in UNREAD) or layers != ["full_attention"] * len(layers):
            return None
        ids = {name: settings[name] for name in ID_NAMES if name in settings}
        fields = {
            "pad_token_id": None,
            **ids,
            **{name: settings[name] for name in NAMES if settings.get(name) is not None},
        }
        rope = fields.setdefault(
            "rope_parameters", {"rope_type": "default", "rope_theta": settings.get("rope_theta")}
        )
        fits = all(isinstance(fields[name], kind) for name, kind in PLAIN.items() if name in fields)
        needed = NAMES - {"head_dim"} | {"bos_token_id", "eos_token_id"}
        if (
            not fits
            or needed - fields.keys()
            or rope.get("rope_type") not in ("default", "linear")
            or not rope.get("rope_theta")
        ):
            return None
        of_type = OF_TYPES.get(fields["model_type"], ())
        if "sliding_window" in of_type and "sliding_window" not in settings:
            return None
        eos = fields["eos_token_id"]
        fields["head_dim"] = fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"]
        fields["of_architecture"] = {
            name: settings[name] for name in of_type if settings.get(name) is not None
        }
        return cls(**fields | {"name_or_path": place, "eos_token_id": [eos] if isinstance(eos, int) else eos})


ID_NAMES = ("bos_token_id", "eos_token_id", "pad_token_id")
NAMES = {field.name for field in fields(CheckpointConfig)} - {"name_or_path", "of_architecture", *ID_NAMES}
PLAIN: dict[str, Any] = {
    f.name: f.type for f in fields(CheckpointConfig) if f.type in (int, float, str, bool, int | None)
}
"""Settings whose types are no containers."""
OF_TYPES = {
    "llama": ("attention_bias", "hidden_act", "mlp_bias"),
    "mistral": ("hidden_act", "sliding_window"),
    "qwen2": ("hidden_act",),
    "qwen3": ("attention_bias", "hidden_act"),
}
"""What transformers' classes of the Llama family have beside what all have; a window of Qwen's without `use_sliding_window` is none."""
UNREAD = (
    "attention_chunk_size",
    "auto_map",
    "partial_rotary_factor",
    "quantization_config",
    "rope_scaling",
    "use_sliding_window",
)
"""Settings of which transformers knows what they ask for."""


def config_of_folder(place: Path) -> Any:
    """The configuration of a folder as transformers reads it.

    Raises:
        ModelLoadError: it is missing, unreadable, of an unknown type, or needs code of its own.
    """
    opened_folder(place).check()
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(place, trust_remote_code=False)
    except Exception as error:
        unknown = unknown_kind(place)
        raise ModelLoadError(
            f"the configuration of {str(place)!r} could not be read: {unknown or first_line(error)}."
        ) from error


def unknown_kind(folder: Path) -> str | None:
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
