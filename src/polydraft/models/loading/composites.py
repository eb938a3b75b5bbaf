"""Models of text and pictures as their language models alone, which read text as they do."""

import re
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any

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
