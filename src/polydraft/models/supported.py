"""Which models can be rolled back, told from their configuration; the others are refused with the reason.

A cache can be rolled back if every token keeps keys and values of its own for as long as the sequence lasts, and if
they depend on nothing but the tokens before it and its position.
"""

from typing import Any

from polydraft.errors import CapacityError, InvalidInputError, ModelLoadError

__all__ = ["check_plain", "check_supported", "context_length", "is_encoder_decoder"]

PLAIN_DECODING = "Decode it plainly, without drafts (drafter=None, `--drafter none`), or use another model"
NOT_CAUSAL = "Use transformers' `generate` for it, or another model"
ENCODER_DECODERS = ("t5", "mt5", "bart", "mbart", "marian", "pegasus")
"""Model types whose decoders follow masks and positions that are given, see `seq2seq`."""
WINDOWED = ("sliding_attention", "chunked_attention")


def is_encoder_decoder(config: Any) -> bool:
    """Whether it reads a source and writes another text."""
    return bool(getattr(config, "is_encoder_decoder", False))


def context_length(config: Any) -> int | None:
    """Longest sequence that the model was made for, or None if it does not say."""
    return getattr(config, "max_position_embeddings", None)


def _refuse(config: Any, reason: str, advice: str) -> ModelLoadError:
    name = (getattr(config, "architectures", None) or [type(config).__name__.removesuffix("Config")])[0]
    return ModelLoadError(f"{name} (model type {config.model_type!r}) was given, but {reason}. {advice}.")


def _check_causal(config: Any) -> None:
    if is_encoder_decoder(config):
        if config.model_type not in ENCODER_DECODERS:
            reason = f"it is an encoder-decoder; causal language models are expected, or one of {', '.join(ENCODER_DECODERS)}"
            raise _refuse(config, reason, NOT_CAUSAL)
        return
    if getattr(config, "add_cross_attention", False):
        raise _refuse(config, "it attends to an encoder; causal language models are expected", NOT_CAUSAL)


def _check_length(config: Any, max_model_len: int | None) -> None:
    if max_model_len is not None and max_model_len < 1:
        raise InvalidInputError(
            f"max_model_len={max_model_len} was given; expected an integer >= 1, or None for the model's context."
        )
    context = context_length(config)
    if max_model_len is not None and context is not None and max_model_len > context:
        raise CapacityError(f"max_model_len={max_model_len} was given; the model's context holds {context}. Give at most that.")


def check_plain(config: Any, max_model_len: int | None = None) -> None:
    """Refuse a model that cannot even be decoded without drafts, where no cache is ever rolled back.

    Raises:
        ModelLoadError: an encoder-decoder of another kind than `ENCODER_DECODERS`.
        CapacityError: `max_model_len` beyond the model's context.
        InvalidInputError: `max_model_len` below 1.

    Example:
        >>> from transformers import MambaConfig
        >>> check_plain(MambaConfig())
    """
    _check_causal(config)
    _check_length(config, max_model_len)


def _check_kind(config: Any, model: Any | None) -> None:
    """Encoder-decoder, recurrent and hybrid models."""
    _check_causal(config)
    kinds = getattr(config, "layer_types", None) or ()
    odd = sorted({kind for kind in kinds if kind not in ("full_attention", *WINDOWED)})
    if odd:
        raise _refuse(config, f"its layers of kind {', '.join(odd)} keep a state that cannot be rolled back", PLAIN_DECODING)
    if getattr(model, "_is_stateful", False):
        raise _refuse(config, "it is recurrent: its state cannot be rolled back", PLAIN_DECODING)


def _window(config: Any) -> int | None:
    """Tokens that the narrowest layer sees, or None if all layers see everything."""
    kinds = getattr(config, "layer_types", None)
    widths = []
    if getattr(config, "use_sliding_window", True) and (kinds is None or "sliding_attention" in kinds):
        widths.append(getattr(config, "sliding_window", None))
    if kinds is None or "chunked_attention" in kinds:
        widths.append(getattr(config, "attention_chunk_size", None))
    if "local" in (getattr(config, "attention_layers", None) or ()):
        widths.append(getattr(config, "window_size", None))
    return min((w for w in widths if w is not None), default=None)


def _unchanging_rope(config: Any) -> int | None:
    """Longest sequence whose rotary frequencies do not depend on its length, or None if they never do."""
    ropes = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    limits = []
    for rope in [r for r in ropes.values() if isinstance(r, dict)] or [ropes]:
        if rope.get("rope_type", rope.get("type")) in ("dynamic", "longrope"):
            limits.append(
                rope.get("original_max_position_embeddings")
                or getattr(config, "original_max_position_embeddings", None)
                or config.max_position_embeddings
            )
    return min(limits, default=None)


def check_supported(config: Any, max_model_len: int | None = None, model: Any | None = None) -> None:
    """Refuse a model whose cache cannot be rolled back over `max_model_len` tokens (default: its whole context).

    config: the configuration of a transformers model.  model: the module, once it is loaded.

    Raises:
        ModelLoadError: another encoder-decoder than `ENCODER_DECODERS`, recurrent, hybrid, or a window shorter than `max_model_len`.
        CapacityError: `max_model_len` beyond the model's context.
        InvalidInputError: `max_model_len` below 1.

    Example:
        >>> from transformers import LlamaConfig
        >>> check_supported(LlamaConfig(), 2048)
    """
    _check_kind(config, model)
    _check_length(config, max_model_len)
    longest = max_model_len or context_length(config)
    if longest is None and is_encoder_decoder(config):
        return  # positions are relative
    if longest is None:
        raise _refuse(config, "its configuration does not say how long a sequence may be", "Give max_model_len")
    window = _window(config)
    if window is not None and window < longest:
        raise _refuse(
            config,
            f"its sliding window of {window} tokens is shorter than a sequence ({longest}), so it cannot be rolled back",
            f"Use max_model_len <= {window}, or decode it plainly, without drafts (drafter=None, `--drafter none`)",
        )
    rope = _unchanging_rope(config)
    if rope is not None and rope < longest:
        raise _refuse(
            config,
            f"its rotary frequencies change once a sequence (up to {longest} tokens) passes {rope}: cached keys would be stale",
            f"Use max_model_len <= {rope}, or decode it plainly, without drafts (drafter=None, `--drafter none`)",
        )
