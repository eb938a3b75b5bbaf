"""What clients send: OpenAI's fields, those of vLLM, SGLang and llama.cpp beyond them, and `speculation`, which is ours.

`sampled` has what all requests share, `conversation` messages and tools; `fields` says what becomes of other fields.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import Field

from polydraft.server.bodies import (
    Requested,
    Text,
    Texts,
    also,
    by_type,
    hosted_left_out,
)
from polydraft.server.conversation import AllowedTools, Choice, Message, NamedTool, Tool, Tools, text_of
from polydraft.server.errors import ApiError
from polydraft.server.sampled import MOST_LOGPROBS, TokensTold


class CompletionRequest(TokensTold):
    """Of /v1/completions. prompt: text, token ids, or several of either.  parse_special: special tokens in text are control tokens.

    add_special_tokens: text begins with the token that texts begin with.  echo: the answer begins with the prompt, and log-probabilities with its own.
    """

    group: ClassVar[str] = "completions"

    prompt: Texts
    parse_special: bool = True
    add_special_tokens: bool = True
    logprobs: Annotated[int | None, Field(ge=0, le=MOST_LOGPROBS), also("logprobs", "n_probs")] = None
    echo: bool | None = False
    suffix: str | None = None
    _further: tuple[Sequence[tuple[str, str]], str] | None = None

    @classmethod
    def infill(
        cls, fields: Mapping[str, Any], extra: Sequence[tuple[str, str]], begin: str
    ) -> "CompletionRequest":
        """To fill in between `prompt` and `suffix`, either of which may be empty. extra: names and texts of further files.  begin: of what is filled in."""
        body = cls.model_validate({**fields, "prompt": fields["prompt"] or " "})
        body.prompt = fields["prompt"]
        body._further = (extra, begin)
        return body

    @property
    def fills_in(self) -> bool:
        """Whether what is asked for lies between two texts."""
        return bool(self.suffix) or self._further is not None

    @property
    def further(self) -> tuple[Sequence[tuple[str, str]], str]:
        """See `infill`."""
        return self._further or ((), "")

    def prompts(self) -> list[str | list[int]]:
        """Each of them."""
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]  # pyright: ignore[reportReturnType]
        return list(self.prompt)  # pyright: ignore[reportReturnType, reportArgumentType]

    def most_tokens(self) -> int:
        return 16 if self.max_tokens is None else self.max_tokens  # OpenAI's default

    def most_logprobs(self) -> int | None:
        return self.logprobs

    def most_prompt_logprobs(self) -> int | None:
        asked = [
            most for most in (self.prompt_logprobs, self.logprobs if self.echo else None) if most is not None
        ]
        return max(asked, default=None)


class ThoughtBudget(NamedTuple):
    """Most tokens of thoughts, None for any number; message: what is said where they end."""

    tokens: int | None = None
    message: str = ""


EFFORTS = {"none": 0, "minimal": 256, "low": 1024}
"""Budgets of `reasoning_effort`, of models whose templates know no effort."""


def budget_of(tokens: int | None, switch: int | None, options: Mapping[str, Any]) -> int | None:
    """The budget that a request names first. switch: of `thinking`.  options: of the template.

    Example:
        >>> budget_of(None, 64, {}), budget_of(-1, 64, {}), budget_of(None, None, {"thinking_budget": 8})
        (64, None, 8)
    """
    given = options.get("thinking_budget")
    named = next((value for value in (tokens, switch, given) if isinstance(value, int)), None)
    return None if named is None or named < 0 else named


class ThinkingSwitch(Requested):
    """Whether the model thinks before it answers."""

    group: ClassVar[str] = "thinking"

    type: Literal["enabled", "disabled", "adaptive", "auto"]
    budget_tokens: Annotated[int | None, Field(ge=0)] = None

    def options(self) -> dict[str, Any]:
        """For templates."""
        return {"enable_thinking": self.type != "disabled"}


class ChatRequest(TokensTold):
    """Of /v1/chat/completions. parse_special: special tokens in messages are control tokens, and not text.

    echo: the answer begins with the last message where that is the assistant's.  add_special_tokens: the token that texts begin with stands before
    what the template writes.  include_reasoning, separate_reasoning: thoughts are told, and apart from the answer.
    return_prompt_text: tell what the template has written.  thinking_budget_tokens: most tokens of thoughts, -1 for any number.
    reasoning_budget_message: what is said at their end, where that is reached.
    """

    group: ClassVar[str] = "chats"

    messages: Annotated[list[Message], Field(min_length=1)]
    tools: Annotated[list[Tool] | None, hosted_left_out("function")] = None
    tool_choice: Annotated[Choice | NamedTool | AllowedTools | None, by_type(NamedTool, AllowedTools)] = None
    modalities: list[Literal["text"]] | None = None
    continue_final_message: bool = False
    echo: bool = False
    add_special_tokens: bool = False
    include_reasoning: bool = True
    separate_reasoning: bool = True
    reasoning_format: Literal["none", "auto", "deepseek", "deepseek-legacy"] = "auto"
    thinking: ThinkingSwitch | None = None
    return_prompt_text: bool = False
    return_prompt_token_ids: bool = False
    n_probs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    add_generation_prompt: bool = True
    enable_thinking: bool | None = None
    thinking_budget_tokens: Annotated[
        int | None,
        Field(ge=-1),
        also("thinking_budget_tokens", "thinking_token_budget", "reasoning_budget_tokens", "thinking_budget"),
    ] = None
    reasoning_budget_message: Text | None = None
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    parse_special: bool = False
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None

    def most_tokens(self) -> int:
        return super().most_tokens() if self.max_completion_tokens is None else self.max_completion_tokens

    def continues(self) -> bool:
        return self.continue_final_message

    def opens(self) -> bool:
        return self.add_generation_prompt

    def offered_tools(self) -> Tools:
        """What may be called."""
        return Tools.chosen(
            [tool.function for tool in self.tools or ()], self.tool_choice, self.parallel_tool_calls
        )

    def template_options(self) -> dict[str, Any]:
        """What else the chat template is given."""
        named = {"reasoning_effort": self.reasoning_effort, "enable_thinking": self.enable_thinking}
        switch = {} if self.thinking is None else self.thinking.options()
        return (
            switch
            | {name: value for name, value in named.items() if value is not None}
            | (self.chat_template_kwargs or {})
        )

    def budget_of_thoughts(self) -> ThoughtBudget:
        """How many tokens may be thoughts."""
        switch = self.thinking and self.thinking.budget_tokens
        budget = budget_of(self.thinking_budget_tokens, switch, self.template_options())
        return ThoughtBudget(budget, self.reasoning_budget_message or "")

    def keeps_thoughts_apart(self) -> bool:
        """Whether what the model thinks is told apart from its answer."""
        return self.separate_reasoning and self.reasoning_format != "none"

    def echoed(self) -> list[str]:
        """What the answer begins with."""
        last = self.messages[-1]
        return [text_of(last.content)] if self.echo and (last.role == "assistant" or not self.opens()) else []

    def most_logprobs(self) -> int | None:
        if self.n_probs:
            return max(self.n_probs, self.top_logprobs or 0)
        if self.top_logprobs and not self.logprobs:
            raise ApiError(
                400, "top_logprobs was given without logprobs; set logprobs to true.", param="top_logprobs"
            )
        return (self.top_logprobs or 0) if self.logprobs else None


class TokenizeRequest(Requested):
    """Of /tokenize: text or a conversation, whose fields are those of chats. parse_special: as of completions, and of chats.

    add_special_tokens: text begins with the token that texts begin with; `content`, llama.cpp's name of the text, where `add_special` says so.
    return_token_strs, with_pieces: tell the text of each token, vLLM's and llama.cpp's way.
    """

    group: ClassVar[str] = "tokenize"

    model: str | None = None
    prompt: Text | None = None
    content: Text | None = None
    add_special: bool = False
    add_special_tokens: bool | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    parse_special: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    return_token_strs: bool = False
    with_pieces: bool = False

    def chat(self) -> ChatRequest:
        """The conversation, as chats have it."""
        return ChatRequest.model_validate(
            {name: getattr(self, name) for name in self.model_fields_set & ChatRequest.model_fields.keys()}
        )


class DetokenizeRequest(Requested):
    """Of /detokenize. skip_special_tokens: leave special tokens out of the text."""

    group: ClassVar[str] = "detokenize"

    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0)]]
    skip_special_tokens: bool = False
