"""What a call is given, checked before anything is submitted; and prompts and conversations as token ids of an engine's model."""

import operator
import reprlib
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from contextlib import suppress
from functools import cached_property
from numbers import Integral
from typing import Any, cast

from polydraft.core import EncoderDecoder, SamplingParams
from polydraft.engine.prefixes import PrefixKeeping
from polydraft.errors import CapacityError, IncompatibleError, InvalidInputError, no_template
from polydraft.models import load
from polydraft.models.tokens.chat_template import template_of
from polydraft.models.tokens.encoding import Cuts, longest_token, num_bytes, token_ids, unused_character
from polydraft.models.tokens.fitting import continued_by, fitted

Prompt = str | Seq[int]
"""Text, or token ids."""
MIN_LONGEST = 8
"""Minimum bytes of the longest token of any vocabulary: texts of fewer bytes for each token of the context are not looked into."""


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


class PromptEncoding(PrefixKeeping):
    """A loop that takes texts and conversations, too."""

    @property
    def model_name(self) -> str:
        """Of the target, or its class where it has none."""
        return self.target.name or type(self.target).__name__

    def encode(self, prompt: Prompt, *, parse_special: bool = True) -> list[int]:
        """Token ids of a prompt, with BOS once where the model wants it; for an encoder-decoder those of its source.

        parse_special: special tokens such as <|im_end|> in a text are control tokens; False: they are text, as in a text by someone else.

        Raises:
            InvalidInputError: an empty prompt, text without a tokenizer, or neither text nor token ids.
        """
        if not isinstance(prompt, str):
            ids = as_ids(prompt)
        elif self.tokenizer is None:
            raise InvalidInputError(
                "text was given to an engine without a tokenizer; give token ids, or build it with a tokenizer."
            )
        else:
            self._check_bytes(prompt)
            ids = (
                load.encode(
                    self.tokenizer,
                    prompt,
                    source=isinstance(self.target, EncoderDecoder),
                    parse_special=parse_special,
                )
                if prompt
                else []
            )
        if not ids:
            raise InvalidInputError(
                "an empty prompt was given; expected at least one token. Give some text to continue."
            )
        return ids

    def prepare_chats(self) -> None:
        """Make the program of the chat template, where there is one, before a conversation waits for it."""
        with suppress(Exception):  # a conversation that is asked for says what is wrong
            self.encode_chat([{"role": "user", "content": "x"}])

    def _through_template(
        self, conversation: list[dict[str, Any]], fields: Mapping[str, Any], *, opened: bool
    ) -> str:
        try:
            return self.tokenizer.apply_chat_template(
                conversation, tokenize=False, add_generation_prompt=opened, **fields
            )
        except Exception as error:  # a template is a program, and not ours
            raise IncompatibleError(
                f"the chat template of {self.model_name!r} refuses these messages: {error}. Change their roles or order."
            ) from error

    def encode_chat(
        self,
        messages: Seq[Mapping[str, Any]],
        *,
        parse_special: bool = False,
        continued: bool = False,
        opened: bool = True,
        **options: Any,
    ) -> list[int]:
        """Token ids of a conversation that the model is to answer, through the tokenizer's own template.

        messages: each with "role" (such as "system", "user" or "assistant") and "content"; the last one is not the assistant's, unless it is continued.
        parse_special: special tokens in messages are control tokens, so that a message can open a turn of another role; False: they are text.
        continued: the last message is the beginning of the answer, whose role it has.  opened: the template opens the answer's turn.
        options: what else the template is given, such as `tools` and `enable_thinking`.

        Raises:
            InvalidInputError: no messages, a message without role or content, or no tokenizer.
            IncompatibleError: a tokenizer without a chat template, or one that refuses these messages.
        """
        check_messages(messages, continued=continued or not opened)
        if self.tokenizer is None:
            raise InvalidInputError(
                "a chat needs a tokenizer; build the engine with one, or use generate with token ids."
            )
        templates = getattr(self.tokenizer, "chat_template", None)
        if not templates:
            raise no_template(self.model_name)
        if continued and not messages[-1]["content"].strip():
            messages = messages[:-1]
            continued = False
        template = template_of(templates, tools=bool(options.get("tools"))) or ""
        arguments: dict[str, Any] = {"messages": [dict(message) for message in messages], **options}
        self._check_bytes([*(message.get("content") for message in messages), *options.values()])
        cuts = None if parse_special else Cuts(self.tokenizer, arguments)
        template_fields = arguments if cuts is None else cuts.put(arguments)
        if isinstance(templates, Mapping):
            template_fields["chat_template"] = template
        conversation = fitted(template, template_fields.pop("messages"))
        mark = unused_character((template, template_fields, conversation))
        if continued:
            conversation[-1] = continued_by(conversation[-1], mark)
        text = self._through_template(conversation, template_fields, opened=opened and not continued)
        if continued:
            text = self._cut(text, mark)
        # the template writes its own special tokens
        return token_ids(self.tokenizer, text) if cuts is None else cuts.encode(text)

    def _cut(self, conversation: str, mark: str) -> str:
        """A conversation that is to be continued, up to the mark that its last message was rendered with."""
        beginning, found, _ = conversation.rpartition(mark)
        if not found:
            raise IncompatibleError(
                f"the chat template of {self.model_name!r} does not write the beginning of an answer; the last message is to be continued. "
                "Leave it out."
            )
        return beginning

    @cached_property
    def _longest_token(self) -> int | None:
        return longest_token(self.tokenizer)

    def _check_bytes(self, texts: Any) -> None:
        """Refuse texts that are too long whatever their tokens are, before they are tokenised."""
        longest = self.target.max_model_len
        text_bytes = num_bytes(texts)
        if (
            isinstance(self.target, EncoderDecoder)
            or text_bytes <= MIN_LONGEST * longest
            or self._longest_token is None
        ):
            return
        if text_bytes > self._longest_token * longest:
            raise CapacityError(
                f"a text of {text_bytes} bytes was given; the context holds {longest} tokens of at most {self._longest_token} bytes each. Shorten it."
            )
