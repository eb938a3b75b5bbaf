"""Text between a prefix and a suffix, by the marks that a model was trained to fill in with (fill in the middle, Bavarian et al. 2022, arXiv 2207.14255).

    Qwen, CodeGemma    <|fim_prefix|>prefix<|fim_suffix|>suffix<|fim_middle|>
    StarCoder, SmolLM  <fim_prefix>prefix<fim_suffix>suffix<fim_middle>
    CodeLlama          <PRE> prefix <SUF> suffix <MID>
    DeepSeek           <|fim▁begin|>prefix<|fim▁hole|>suffix<|fim▁end|>, with full-width bars
    Codestral          [SUFFIX]suffix[PREFIX]prefix

Marks are tokens of the vocabulary; in the texts themselves they are text.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

FORMS = (
    ("<|fim_prefix|>", "prefix", "<|fim_suffix|>", "suffix", "<|fim_middle|>"),
    ("<fim_prefix>", "prefix", "<fim_suffix>", "suffix", "<fim_middle>"),
    ("<fim-prefix>", "prefix", "<fim-suffix>", "suffix", "<fim-middle>"),
    ("▁<PRE>", "prefix", "▁<SUF>", "suffix", "▁<MID>"),
    ("<｜fim▁begin｜>", "prefix", "<｜fim▁hole｜>", "suffix", "<｜fim▁end｜>"),
    ("[SUFFIX]", "suffix", "[PREFIX]", "prefix"),
)
ENDS = (
    "<|endoftext|>",
    "<|fim_pad|>",
    "<|file_sep|>",
    "<|repo_name|>",
    "<|file_separator|>",
    "<file_sep>",
    "▁<EOT>",
    "<｜end▁of▁sentence｜>",
)
"""Tokens that end what is filled in, beside those that end any text."""


@dataclass(frozen=True)
class FillForm:
    """How one model fills in. parts: ids of marks, and where prefix and suffix stand.  end_ids: ids that end the text.  repository, file: of further files."""

    parts: Sequence[int | str]
    end_ids: tuple[int, ...]
    repository: int | None = None
    file: int | None = None

    def prompt(
        self,
        prefix: Sequence[int],
        suffix: Sequence[int],
        before: Sequence[int] = (),
        behind: Sequence[int] = (),
    ) -> list[int]:
        """Token ids that the filled-in text follows. before: the first token and further files.  behind: how it begins.

        Example:
            >>> FillForm((7, "prefix", 8, "suffix", 9), (0,)).prompt([1, 2], [3])
            [7, 1, 2, 8, 3, 9]
        """
        texts = {"prefix": prefix, "suffix": suffix}
        middle = [
            token for part in self.parts for token in (texts[part] if isinstance(part, str) else (part,))
        ]
        return [*before, *middle, *behind]


def fill_form(tokenizer: Any) -> FillForm | None:
    """Of a model by its vocabulary; None where it has no marks."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None

    def first(marks: Sequence[str]) -> int | None:
        return next((token for mark in marks if (token := backend.token_to_id(mark)) is not None), None)

    for form in FORMS:
        parts = [part if part in ("prefix", "suffix") else backend.token_to_id(part) for part in form]
        if None not in parts:
            marks = [part for part in parts if isinstance(part, int)]
            end_marks = [token for mark in ENDS if (token := backend.token_to_id(mark)) is not None]
            repository = first(("<|repo_name|>", "<reponame>"))
            file = first(("<|file_sep|>", "<file_sep>"))
            return FillForm(parts, tuple(dict.fromkeys([*end_marks, *marks])), repository, file)
    return None
