"""Models of text and pictures as their language models alone, which read text as they do."""

import re
from collections.abc import Set as AbstractSet
from typing import Any

from polydraft.models.windows import text_config

COMPOSITES = frozenset({"gemma3", "lfm2_vl", "mistral3", "qwen3_5", "qwen3_5_moe"})
"""`model_type` of those whose language models may run compiled."""


def name_in_text_model(name: str) -> str:
    """What a weight of the language model in a composite one is called in the language model alone; any other weight's own name.

    Example:
        >>> name_in_text_model("model.language_model.norm.weight"), name_in_text_model("language_model.lm_head.weight")
        ('model.norm.weight', 'lm_head.weight')
    """
    # as transformers 5 and as those before it name them
    prefixes = r"^(?:model\.language_model\.|language_model\.(model|lm_head)\.)"
    return re.sub(prefixes, lambda match: f"{match[1] or 'model'}.", name)


def language_model_config(config: Any, names: AbstractSet[str]) -> Any:
    """The configuration of the language model in a composite one, with what only the whole one's says. names: its weights, as of `name_in_text_model`."""
    text = text_config(config)
    for name in ("bos_token_id", "eos_token_id"):
        if getattr(text, name, None) is None:
            setattr(text, name, getattr(config, name, None))
    text.tie_word_embeddings = "lm_head.weight" not in names
    text.name_or_path = config.name_or_path
    return text
