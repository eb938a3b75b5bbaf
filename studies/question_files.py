"""Prompts by category: some that stand here, and files of others."""

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from polydraft.errors import InvalidInputError, unknown_name


@dataclass(frozen=True)
class Question:
    """A prompt and what it is about."""

    category: str
    text: str


QUESTIONS = (
    Question("chat", "Explain in simple words why the sky is blue."),
    Question("code", "Write a Python function that merges two sorted lists."),
    Question("chat", "Give three tips for learning a new language."),
    Question("code", "Write a Python class for a binary search tree with insert and search."),
    Question("chat", "What is the capital of France, and what is it known for?"),
    Question("code", "Write a Python function that parses a CSV file without the csv module."),
)


def questions(files: Sequence[Path], count: int, categories: Sequence[str] = ()) -> list[Question]:
    """The first questions of each category of .jsonl files, which may be gzipped, the categories by turns.

    A line holds "prompt", or "turns" of which the first is taken; its "category", else the file's name.

    Raises:
        InvalidInputError: a line that has neither, or files without any.
        UnknownNameError: a category that no question has.
    """
    by_category: dict[str, list[Question]] = {}
    for file in files:
        packed = file.read_bytes()
        lines = (gzip.decompress(packed) if file.suffix == ".gz" else packed).decode().splitlines()
        for number, line in enumerate(lines, 1):
            try:
                entry = json.loads(line)
                text = str(entry["prompt"] if "prompt" in entry else entry["turns"][0])
            except (ValueError, KeyError, IndexError, TypeError) as error:
                raise InvalidInputError(
                    f"{str(file)!r}, line {number} holds no question; expected 'prompt', or 'turns'. Correct it."
                ) from error
            category = str(entry.get("category", file.name.partition(".")[0]))
            by_category.setdefault(category, []).append(Question(category, text))
    if not by_category:
        raise InvalidInputError(
            f"{', '.join(map(repr, map(str, files)))} hold no question; expected one a line. Add some."
        )
    for name in categories:
        if name not in by_category:
            raise unknown_name("category of these prompts", name, by_category)
    queues = [queue for name, queue in by_category.items() if not categories or name in categories]
    return [question for turn in range(count) for queue in queues for question in queue[turn : turn + 1]]
