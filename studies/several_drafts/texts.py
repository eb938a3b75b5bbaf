"""Contexts: places in the target's own answers to code and chat prompts."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polydraft import SamplingParams
from polydraft.engine.api import Engine
from polydraft.models import load, pair
from studies.question_files import QUESTIONS, questions

__all__ = ["COMPLETE_FUNCTION", "CONTEXTS", "Context", "answers", "packaged_prompts", "read_prompts"]

ANSWER_TOKENS = 96
PLACES = (0.3, 0.8)
CONTEXTS = len(PLACES)
"""Where in an answer the contexts end, and how many there are."""
ANSWER_TEMPERATURE = 0.7
MAX_PROMPT = 200
"""Tokens of the longest prompt that is taken."""
LONGEST_FILE = 10_000
"""Prompts of one category."""
COMPLETE_FUNCTION = "Complete this function.\n\n```python\n{}```"
CONTINUE_FILE = "Continue this file.\n\n```python\n{}```"


@dataclass(frozen=True)
class Context:
    """A text so far. answer: its number, by which contexts of one answer belong together."""

    text: str
    answer: int
    token_ids: tuple[int, ...]


def read_prompts(file: Path, wrap: str = "{}") -> list[str]:
    """Prompts of a JSONL file, the categories by turns. wrap: what stands around each."""
    return [wrap.format(question.text) for question in questions([file], LONGEST_FILE)]


def packaged_prompts() -> dict[str, list[str]]:
    """The few that come with the package, where no files are named."""
    code = [CONTINUE_FILE.format(prompt.text) for prompt in pair.prompts()]
    return {"code": code, "chat": [question.text for question in QUESTIONS]}


def _prompt_ids(tokenizer: Any, prompt: str) -> list[int]:
    if not getattr(tokenizer, "chat_template", None):
        return load.encode(tokenizer, prompt)
    turn = [{"role": "user", "content": prompt}]
    text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def answers(
    engine: Engine, tokenizer: Any, prompts: dict[str, Sequence[str]], count: int, done: Callable[[int], bool]
) -> Iterator[list[Context]]:
    """Contexts of one answer after another, the kinds of text by turns, `count` answers of each. done: numbers that are left out."""
    lists = {
        text: [ids for prompt in texts if len(ids := _prompt_ids(tokenizer, prompt)) <= MAX_PROMPT]
        for text, texts in prompts.items()
    }
    for number in range(count):
        for kind, (text, prompt_ids) in enumerate(lists.items()):
            if number < len(prompt_ids) and not done(len(lists) * number + kind):
                ids = prompt_ids[number]
                answer = engine.generate(
                    [ids], SamplingParams(temperature=ANSWER_TEMPERATURE, max_tokens=ANSWER_TOKENS, seed=number)
                )
                tokens = list(answer[0].samples[0].token_ids)
                yield [
                    Context(text, len(lists) * number + kind, (*ids, *tokens[: max(int(place * len(tokens)), 1)]))
                    for place in PLACES
                ]
