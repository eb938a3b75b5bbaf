"""What a call is given: text, token ids or a conversation, and sampling parameters; checked before anything is submitted."""

import operator
import reprlib
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from contextlib import suppress
from numbers import Integral
from typing import Any, cast

from polydraft.core import SamplingParams
from polydraft.errors import InvalidInputError

Prompt = str | Seq[int]
"""Text, or token ids."""


def check_params(params: Any) -> None:
    """Refuse what is no `SamplingParams`."""
    if not isinstance(params, SamplingParams):
        raise InvalidInputError(
            f"params={params!r} was given; expected a SamplingParams, such as SamplingParams(temperature=0.8, max_tokens=64)."
        )


def check_messages(messages: Seq[Mapping[str, Any]], *, continued: bool = False) -> None:
    if isinstance(messages, str) or not messages:
        raise InvalidInputError(
            f"messages={messages!r} were given; expected a list such as [{{'role': 'user', 'content': 'Hello'}}] with at least one."
        )
    for number, message in enumerate(messages):
        if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
            raise InvalidInputError(
                f"message {number} is {dict(message)!r}; expected text for 'role' and for 'content'."
            )
    if messages[-1]["role"] == "assistant" and not continued:
        raise InvalidInputError(
            "the last message is the assistant's; expected one to answer. Append the user's next message."
        )


def as_list(prompts: Prompt | Seq[Prompt]) -> list[Prompt]:
    """One prompt alone or several; what is neither is taken for one, which `as_ids` refuses."""
    if not isinstance(prompts, (str, bytes, Mapping)):
        with suppress(TypeError):
            prompt_list: list[Any] = list(prompts)
            return [prompt_list] if prompt_list and isinstance(prompt_list[0], Integral) else prompt_list
    return [cast(Prompt, prompts)]


def as_ids(prompt: Iterable[Any]) -> list[int]:
    if not isinstance(prompt, (bytes, Mapping)):
        with suppress(TypeError):
            return [operator.index(token) for token in prompt]
    raise InvalidInputError(
        f"the prompt {reprlib.repr(prompt)} was given; expected text, or whole numbers: token ids."
    )
