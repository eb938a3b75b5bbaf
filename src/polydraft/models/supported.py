"""Which models can be read at all, and which rolled back in a KV cache of our own, told from their configuration.

A cache can be rolled back if every token has keys and values of its own for as long as the sequence lasts, and if they depend on nothing
but the tokens before it and its position. What a configuration cannot tell is proven when a model is built, see `proof`.
"""

from typing import Any

from polydraft.errors import CapacityError, InvalidInputError, ModelLoadError
from polydraft.models.slots import TREE_ROOM
from polydraft.models.windows import FIELDS, setting, text_config

PLAIN_DECODING = "`Engine.from_pretrained` and the command line run it in its own cache"
NOT_CAUSAL = "Use transformers' `generate` for it, or another model"
PREDICT_ELSEWHERE = ("xlm", "xlnet")
"""Model types that transformers lists among causal ones, and whose rows are of other tokens than the next."""
ENCODER_DECODERS = ("t5", "mt5", "bart", "mbart", "marian", "pegasus")
"""Model types whose decoders follow masks and positions that are given, see `seq2seq`."""


def is_encoder_decoder(config: Any) -> bool:
    """Whether it reads a source and writes another text."""
    return bool(getattr(config, "is_encoder_decoder", False))


def context_length(config: Any) -> int | None:
    """Longest sequence that the model was made for, or None if it does not say."""
    length = getattr(text_config(config), "max_position_embeddings", None)
    return length if length is None or length > 0 else None  # -1 of XLNet's


def _refuse(config: Any, reason: str, advice: str) -> ModelLoadError:
    name = (getattr(config, "architectures", None) or [type(config).__name__.removesuffix("Config")])[0]
    return ModelLoadError(f"{name} (model type {config.model_type!r}) was given, but {reason}. {advice}.")


def check_plain(config: Any, max_model_len: int | None = None) -> None:
    """Refuse a model that cannot even be decoded without drafts, where no cache is ever rolled back.

    Raises:
        ModelLoadError: an encoder-decoder of another kind than `ENCODER_DECODERS`, or one of `PREDICT_ELSEWHERE`.
        CapacityError: `max_model_len` beyond the model's context.
        InvalidInputError: `max_model_len` below 1.

    Example:
        >>> from transformers import MambaConfig
        >>> check_plain(MambaConfig())
    """
    if is_encoder_decoder(config) and config.model_type not in ENCODER_DECODERS:
        reason = f"it is an encoder-decoder; causal language models are expected, or one of {', '.join(ENCODER_DECODERS)}"
        raise _refuse(config, reason, NOT_CAUSAL)
    if config.model_type in PREDICT_ELSEWHERE:
        raise _refuse(
            config,
            "its forward pass does not predict the next token of a text: `generate` adds one that stands for it",
            NOT_CAUSAL,
        )
    if not is_encoder_decoder(config) and getattr(config, "add_cross_attention", False):
        raise _refuse(config, "it attends to an encoder; causal language models are expected", NOT_CAUSAL)
    if max_model_len is not None and max_model_len < 1:
        raise InvalidInputError(
            f"max_model_len={max_model_len} was given; expected an integer >= 1, or None for the model's context."
        )
    context = context_length(config)
    if max_model_len is not None and context is not None and max_model_len > context:
        raise CapacityError(
            f"max_model_len={max_model_len} was given; the model's context holds {context}. Give at most that."
        )


def _built_in_window(config: Any) -> int | None:
    """The width of windows that lie in tables of the layers, which no mask moves."""
    widths = [
        setting(config, name) for name in FIELDS if name not in ("sliding_window", "attention_chunk_size")
    ]
    kinds = getattr(config, "attention_layers", None)
    return (
        None
        if kinds is not None and "local" not in kinds
        else min((w for w in widths if isinstance(w, int)), default=None)
    )


def check_rolls_back(config: Any, max_model_len: int | None = None, model: Any | None = None) -> None:
    """Refuse a model whose cache cannot be rolled back over `max_model_len` tokens (default: its whole context).

    config: the configuration of a transformers model.  model: the module, once it is loaded.

    Raises:
        ModelLoadError: another encoder-decoder than `ENCODER_DECODERS`, recurrent, hybrid, or with windows that no mask moves.
        CapacityError, InvalidInputError: as `check_plain`.

    Example:
        >>> from transformers import LlamaConfig
        >>> check_rolls_back(LlamaConfig(), 2048)
    """
    check_plain(config, max_model_len)
    inner = text_config(config)
    odd = sorted(
        {*(setting(inner, "layer_types") or ())}
        - {"full_attention", "sliding_attention", "chunked_attention"}
    )
    if odd:
        raise _refuse(
            config,
            f"its layers of kind {', '.join(odd)} have a state that cannot be rolled back",
            PLAIN_DECODING,
        )
    if getattr(model, "_is_stateful", False):
        raise _refuse(config, "it is recurrent: its state cannot be rolled back", PLAIN_DECODING)
    longest = max_model_len or context_length(config)
    if longest is None and is_encoder_decoder(config):
        return  # positions are relative
    if longest is None:
        raise _refuse(
            config, "its configuration does not say how long a sequence may be", "Give max_model_len"
        )
    window = _built_in_window(inner)
    if window is not None and window < longest + TREE_ROOM:
        raise _refuse(
            config,
            f"the windows of {window} tokens in its layers are no mask, and sequences are longer ({longest})",
            PLAIN_DECODING,
        )
