"""The prompts of the study: of files, or those that come with the package."""

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from polydraft.engine.api import Engine
from polydraft.models import pair
from studies import question_files

LONGEST = 600
"""Tokens of a prompt, at most."""


def questions(files: Sequence[Path], count: int, engine: Engine, chat: bool) -> list[tuple[str, list[int]]]:
    """Category and token ids of prompts: of files the categories by turns, without the long ones."""
    return list(islice((each for each in _all(files, engine, chat) if len(each[1]) < LONGEST), count))


def _all(files: Sequence[Path], engine: Engine, chat: bool) -> Iterator[tuple[str, list[int]]]:
    if files:
        asked = [(question.category, question.text) for question in question_files.questions(files, 1 << 16)]
    elif chat:
        asked = [(question.category, question.text) for question in question_files.QUESTIONS]
    else:
        asked = [("python", prompt.text) for prompt in pair.prompts()]
    for category, text in asked:
        yield (
            category,
            engine.encode_chat([{"role": "user", "content": text}]) if chat else engine.encode(text),
        )
