"""A GGUF file as a store: what its header says, by the names that every store has."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polydraft.models.store.gguf_header import GgufHeader, TextList
from polydraft.models.store.gguf_roles import TEMPLATE, TOKENS

SAMPLING = {
    "temperature": "general.sampling.temp",
    "top_p": "general.sampling.top_p",
    "top_k": "general.sampling.top_k",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}
"""Field of `SamplingParams` -> metadata of a file."""


class GgufStore(GgufHeader):
    """A GGUF file, or the parts of one; see `Store`."""

    @property
    def place(self) -> Path:
        return self.path

    @property
    def settings(self) -> Mapping[str, Any]:
        """Sizes by the names of transformers."""
        layers = self.setting("block_count")
        return {
            "hidden_size": self.setting("embedding_length"),
            "vocab_size": self.vocab_size,
            "num_hidden_layers": self.num_layers if layers else None,
        }

    @property
    def context(self) -> int | None:
        return positive(self.setting("context_length"))

    @property
    def vocab_size(self) -> int | None:
        tokens = self.metadata.get(TOKENS)
        return tokens.length if isinstance(tokens, TextList) else None

    @property
    def raw_tokens(self) -> bytes:
        return self.raw_strings(TOKENS)

    @property
    def tokens(self) -> Mapping[str, int]:
        return {token: i for i, token in enumerate(self.strings(TOKENS))} if self.raw_tokens else {}

    @property
    def has_template(self) -> bool:
        return any(key.startswith(TEMPLATE) for key in self.metadata)

    @property
    def sampling(self) -> Mapping[str, Any]:
        return {field: self.metadata.get(key) for field, key in SAMPLING.items()}


def positive(value: Any) -> int | None:
    """A count, or None where files say something else."""
    return value if isinstance(value, int) and value > 0 else None
