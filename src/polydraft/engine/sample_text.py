"""A text that passes are timed on: tokens of one text share experts as those of users' texts do, which one token again and again would not show."""

from typing import Any

from polydraft.models.load import encode

__all__ = ["sample_ids"]

TEXT = """A pass over several tokens reads the weights once. What it costs beside that depends on the text, as in a mixture of experts every token chooses
those that it goes through:

def mean(values):
    return sum(values) / len(values)
"""


def sample_ids(tokenizer: Any) -> list[int]:
    """Its token ids; none without a tokenizer.

    Example:
        >>> sample_ids(None)
        []
    """
    return [] if tokenizer is None else encode(tokenizer, TEXT)
