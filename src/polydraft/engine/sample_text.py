"""A text that forward passes are timed on: tokens of one text share experts as those of users' texts do, which one token again and again would not show; and
what short requests ask, of which drafts are accepted as of users' requests."""

from contextlib import suppress
from typing import Any

from polydraft.models.load import encode
from polydraft.models.tokens.encoding import token_ids

TEXT = """A pass over several tokens reads the weights once. What it costs beside that depends on the text, as in a mixture of experts every token chooses
those that it goes through:

def mean(values):
    return sum(values) / len(values)
"""
QUESTIONS = "Why is the sky blue in the daytime?", "Write a Python function that counts the words of a text."


def sample_prompts(tokenizer: Any) -> list[list[int]]:
    """Token ids of two questions, through the chat template where there is one; tokens of no text without a tokenizer.

    Example:
        >>> sample_prompts(None)
        [[1, 2, 3, 4], [1, 2, 3, 4]]
    """
    if tokenizer is None:
        return [[1, 2, 3, 4] for _ in QUESTIONS]
    with suppress(Exception):  # a template is a program, and there may be none
        chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
        return [
            token_ids(tokenizer, tokenizer.apply_chat_template(x, tokenize=False, add_generation_prompt=True))
            for x in chats
        ]
    return [encode(tokenizer, question) for question in QUESTIONS]


def sample_ids(tokenizer: Any) -> list[int]:
    """Its token ids; none without a tokenizer.

    Example:
        >>> sample_ids(None)
        []
    """
    return [] if tokenizer is None else encode(tokenizer, TEXT)
