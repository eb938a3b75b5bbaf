"""What the compiled path lacks of architectures that run through transformers for it, by model type."""

from typing import Any

from polydraft.models.windows import text_config

MISSING = {
    "deepseek_v3": "latent attention, whose keys and values are made of one compressed row",
    "gemma4_text": "inputs of each layer beside those of the layer before, layers that share keys and values, heads of two widths, norms of values, "
    "and mixtures beside a dense feed-forward; its drafter `gemma4_assistant` reads the shared keys and values, and is not run either",
    "ministral3": "queries that are multiplied by the logarithm of their position",
    "nemotron_h": "layers of a mixer or of a feed-forward alone, and squared ReLU without a gate, of mixtures, too",
    "olmo2": "norms of all queries together, and of all keys; layers with norms behind attention and feed-forward alone",
    "starcoder2": "norms with means and biases, and feed-forwards without a gate",
}


def missing_parts(config: Any) -> str | None:
    """Those of a model of this configuration, or None where nobody has written them down.

    Example:
        >>> from transformers import Olmo2Config
        >>> missing_parts(Olmo2Config()).partition(";")[0]
        'norms of all queries together, and of all keys'
    """
    return MISSING.get(text_config(config).model_type)
