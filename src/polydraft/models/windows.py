"""Windows of attention: which layers see only the last tokens, or only those of their chunk, as masks over a KV cache of all tokens.

A ring of the last W tokens could not be rolled back: what a rejected draft pushed out is gone. A cache of all tokens can, and a
mask says what a layer sees.

    sliding   a token at position t sees the positions t - W + 1 .. t
    chunked   it sees those from the last multiple of W up to t (Llama 4)
"""

from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float32, Int64

FIELDS = (
    "sliding_window",
    "attention_chunk_size",
    "sliding_window_size",
    "attention_window_size",
    "local_attention",
    "window_size",
)
"""What configurations call the width of a window."""


class Window(NamedTuple):
    """width: W of the module's first lines.  chunked: of that kind.

    Example:
        >>> Window(3).first(np.array([[1, 7]])).tolist(), Window(3, chunked=True).first(np.array([[1, 7]])).tolist()
        ([[-1, 5]], [[0, 6]])
    """

    width: int
    chunked: bool = False

    def first(self, positions: Int64[np.ndarray, "B T"]) -> Int64[np.ndarray, "B T"]:
        """The first position that a token at each of these sees."""
        return positions - (positions % self.width if self.chunked else self.width - 1)


def text_config(config: Any) -> Any:
    """The configuration of the language model in a composite one; any other is its own.

    Example:
        >>> from transformers import Gemma3Config
        >>> text_config(Gemma3Config()).model_type
        'gemma3_text'
    """
    nested = getattr(config, "get_text_config", None)
    return config if nested is None or getattr(config, "is_encoder_decoder", False) else nested(decoder=True)


def setting(config: Any, name: str, default: Any = None) -> Any:
    """A setting as the class of a configuration has it, else the default.

    Configurations of transformers carry whatever else a config.json says as attributes, too, which no model reads.

    Example:
        >>> from transformers import LlamaConfig, MistralConfig
        >>> [setting(kind(sliding_window=8), "sliding_window") for kind in (LlamaConfig, MistralConfig)]
        [None, 8]
    """
    kind = type(config)
    if not hasattr(kind, "model_type"):  # none of transformers: it has what its family reads
        return getattr(config, name, default)
    is_read = name in signature(kind).parameters or name in kind.attribute_map
    return getattr(config, name, default) if is_read else default


def windows(config: Any) -> dict[str, Window | None]:
    """The window of each kind of layer, by the name that transformers has for its mask; None sees everything.

    Example:
        >>> from transformers import MistralConfig
        >>> windows(MistralConfig(sliding_window=64))
        {'sliding_attention': Window(width=64, chunked=False)}
    """
    config = text_config(config)
    # classes with `use_sliding_window` have no width where it is off
    sliding = setting(config, "sliding_window")
    chunk = setting(config, "attention_chunk_size")
    by_kind = {
        "sliding_attention": Window(sliding) if sliding else None,
        "chunked_attention": Window(chunk, chunked=True) if chunk else None,
    }
    only = next((kind for kind, window in by_kind.items() if window is not None), "full_attention")
    kinds = setting(config, "layer_types") or [only]
    return {kind: by_kind.get(kind) for kind in dict.fromkeys(kinds)}


def within(
    mask: Float32[np.ndarray, "B T C"],
    positions: Int64[np.ndarray, "B T"],
    columns: Int64[np.ndarray, "B C"],
    window: Window,
) -> Float32[np.ndarray, "B T C"]:
    """A mask (0 or -inf) cut to a window. positions: of its rows.  columns: positions of what lies in the cache.

    Example:
        >>> within(np.zeros((1, 1, 4), np.float32), np.array([[3]]), np.arange(4)[None], Window(2)).tolist()
        [[[-inf, -inf, 0.0, 0.0]]]
    """
    return np.where(columns[:, None] < window.first(positions)[:, :, None], np.float32(-np.inf), mask)


@contextmanager
def narrowed(model: Any, width: int) -> Iterator[None]:
    """A module of transformers with windows of at most `width` tokens, so that a short text crosses them.

    Masks are made from the configuration at each forward pass: what a short text shows of narrow windows holds for wide ones. Windows that lie in
    tables of a layer stay as they are.
    """
    configs = {id(part.config): part.config for part in model.modules() if hasattr(part, "config")}
    wide = [
        (config, name, size)
        for config in configs.values()
        for name in FIELDS
        if isinstance(size := getattr(config, name, None), int) and size > width
    ]
    for config, name, _ in wide:
        setattr(config, name, width)
    try:
        yield
    finally:
        for config, name, size in wide:
            setattr(config, name, size)
