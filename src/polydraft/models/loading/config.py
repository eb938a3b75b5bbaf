"""Settings of a model by the names of transformers' configurations, without transformers; of models of text and pictures those of their language
models alone, which read text as they do."""

import re
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, fields
from typing import Any

from polydraft.models.networks import Network
from polydraft.models.networks.base import UncompiledError

COMPOSITES = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "gemma4_unified": "gemma4_unified_text",
    "lfm2_vl": "lfm2",
    "mistral3": "mistral",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}
"""`model_type` of those whose language models may run compiled -> that of these, where a folder does not say it."""


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
    def of_json(cls, settings: Mapping[str, Any], network: Network, place: str) -> "CheckpointConfig":
        """That of a config.json, as transformers reads it. network: of its `model_type`.

        Raises:
            UncompiledError: it lacks a size, or has one of another type.

        Example:
            >>> from polydraft.models.networks import LLAMA
            >>> CheckpointConfig.of_json({"hidden_size": 64, "num_attention_heads": 4}, LLAMA, "folder")
            Traceback (most recent call last):
            polydraft.models.networks.base.UncompiledError: its config.json has vocab_size=None
        """
        known = _completed(settings, network)
        eos = known["eos_token_id"]
        known |= {"name_or_path": place, "eos_token_id": [eos] if isinstance(eos, int) else eos}
        for name, kind in TYPES.items():
            if not isinstance(known.get(name), kind):
                raise UncompiledError(f"its config.json has {name}={known.get(name)!r}")
        kinds = known.get("layer_types") or ["full_attention"] * known["num_hidden_layers"]
        if not isinstance(kinds, list) or len(kinds) != known["num_hidden_layers"] or {*kinds} - KINDS:
            raise UncompiledError(f"its config.json has layer_types={kinds!r}")
        names = {field.name for field in fields(cls)} - {"of_architecture", "model_type"}
        own = network.defaults.keys() | DEFAULTS.keys() - names
        extra = {name: known[name] for name in own - names}
        return cls(network.model_type, **{name: known[name] for name in names}, of_architecture=extra)


def _completed(settings: Mapping[str, Any], network: Network) -> dict[str, Any]:
    """What a config.json says, with what follows from it and what it leaves out.

    Raises:
        UncompiledError: it says too little, or what nothing can be computed with.
    """
    said = {name: _number(value) for name, value in settings.items()}
    defaults = {**DEFAULTS, **network.defaults}
    functions = {name: default for name, default in defaults.items() if callable(default)}
    plain = {name: default for name, default in defaults.items() if name not in functions}
    known = {**plain, **said, **network.mended(said)}
    try:
        for name, default in functions.items():
            known[name] = default(known) if known.get(name) is None else known[name]
        known["rope_parameters"] = network.folder_rope(known)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise UncompiledError(f"its config.json says too little ({error!r})") from error
    return known


def _number(value: Any) -> Any:
    """A setting with numbers that JSON has not, such as infinity, as transformers writes them."""
    if isinstance(value, list):
        return [_number(each) for each in value]
    return float(value["__float__"]) if isinstance(value, dict) and "__float__" in value else value


DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": lambda settings: settings["num_attention_heads"],
    "head_dim": lambda settings: settings["hidden_size"] // settings["num_attention_heads"],
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "rope_theta": 10_000.0,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
"""Of all networks that say nothing else, see `Network.defaults`."""
KINDS = frozenset(
    {"full_attention", "sliding_attention", "linear_attention", "conv", "attention", "mamba", "hybrid"}
)
"""Of layers, as configurations name them."""
TYPES: dict[str, Any] = {
    **{f.name: f.type for f in fields(CheckpointConfig) if f.type in (int, bool, int | None)},
    "rms_norm_eps": (int, float),
    "eos_token_id": (list, type(None)),
    "rope_parameters": Mapping,
}
"""Of settings that all networks have."""


def name_in_text_model(name: str) -> str:
    """What a weight of the language model in a composite one is called in the language model alone; any other weight's own name.

    Example:
        >>> name_in_text_model("model.language_model.norm.weight"), name_in_text_model("language_model.lm_head.weight")
        ('model.norm.weight', 'lm_head.weight')
    """
    # as transformers 5 and as those before it name them; the last is Nemotron-H's own
    prefixes = r"^(?:model\.language_model\.|language_model\.(model|lm_head)\.|backbone\.)"
    return re.sub(prefixes, lambda match: f"{match[1] or 'model'}.", name)


def text_settings(settings: Mapping[str, Any], names: AbstractSet[str]) -> dict[str, Any]:
    """Settings of the language model in a composite one's config.json, with what only the whole one's says.

    names: its weights, as of `name_in_text_model`.
    """
    written = settings.get("text_config")
    text = dict(written) if isinstance(written, Mapping) else {}
    text.setdefault("model_type", COMPOSITES[settings["model_type"]])
    for name in ("bos_token_id", "eos_token_id"):
        if text.get(name) is None and settings.get(name) is not None:
            text[name] = settings[name]
    return text | {"tie_word_embeddings": "lm_head.weight" not in names}
