"""Conversations as clients send them: messages, their parts, and the tools that may be called."""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from polydraft.server.bodies import (
    PICTURES,
    Body,
    TextAlone,
    by_type,
    hosted_left_out,
)
from polydraft.server.errors import ApiError

log = logging.getLogger("polydraft.server")
WRITTEN = ("document", "search_result", "compaction")
"""Types of Anthropic's blocks that hold text."""
HOSTED = (
    "server_tool_use",
    "mcp_tool_use",
    "mcp_tool_listing",
    "container_upload",
    "tool_addition",
    "tool_removal",
    "fallback",
)
"""Types of its blocks that only its own host understands, beside the results of tools that it runs."""


def text_of_part(part: Mapping[str, Any]) -> str:
    """What stands in a conversation for a part.

    Example:
        >>> text_of_part({"type": "document", "title": "Notes", "source": {"type": "text", "data": "Buy plums."}})
        'Notes\\nBuy plums.\\n'
        >>> text_of_part({"type": "image", "source": {}})
        "[a part of the type 'image' was left out: it cannot be read here]\\n"
    """
    source = part.get("source")
    source = source if isinstance(source, Mapping) else {}
    places = (part.get("text"), part.get("tool_name"), part.get("content"), source.get("content"))
    written = (
        source.get("data")
        if source.get("type") == "text"
        else next((text for text in places if text is not None), None)
    )
    if isinstance(written, list):
        written = "".join(text_of_part(inner) for inner in written if isinstance(inner, Mapping))
    if not isinstance(written, str):
        kind = str(part.get("type"))[:64]
        _tell(kind)
        return f"[a part of the type {kind!r} was left out: it cannot be read here]\n"
    head = [text for text in (part.get("title"), part.get("context")) if isinstance(text, str)]
    return "\n".join([*head, written]) + ("" if part.get("type") == "text" else "\n")


def readable_results(content: Any, text: str = "text") -> Any:
    """The content of a tool's result with text in the place of pictures, files and references. text: the type of parts of text."""
    if not isinstance(content, list):
        return content

    def is_other(part: Any) -> bool:
        return isinstance(part, dict) and part.get("type") in (*PICTURES, *WRITTEN, "tool_reference")

    return [{"type": text, "text": text_of_part(part)} if is_other(part) else part for part in content]


def _readable_blocks(content: Any) -> Any:
    if not isinstance(content, list):
        return content
    blocks = list[Any]()
    for block in content:
        kind = str(block.get("type")) if isinstance(block, dict) else ""
        if kind in HOSTED or kind.endswith("_tool_result"):
            _tell(kind)
        elif kind in WRITTEN:
            blocks.append({"type": "text", "text": text_of_part(block)})
        else:
            blocks.append(block)
    return blocks


ReadableBlocks = BeforeValidator(_readable_blocks)
"""Of the content of a turn in Anthropic's format."""
ReadableResult = BeforeValidator(readable_results)
"""Of the content of a tool's result, in its format."""
ReadableOutput = BeforeValidator(partial(readable_results, text="input_text"))
"""The same of responses."""


@lru_cache(maxsize=256)  # once
def _tell(kind: str) -> None:
    log.warning("parts of conversations of the type %r are left out: they cannot be read here", kind)


ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,256}$")]


class TextPart(Body):
    type: Literal["text"]
    text: str


class RefusalPart(Body):
    """What an assistant refused before is a part of what it said."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


def text_of(content: str | Sequence[TextPart | RefusalPart]) -> str:
    """The text of a content, in parts or whole."""
    return content if isinstance(content, str) else "".join(part.text for part in content)


class Called(Body):
    """arguments: JSON."""

    name: str
    arguments: str


class PastCall(Body):
    """One that the model made before."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: Called


class Message(Body):
    """content: what is said; an assistant that called tools may say nothing.  tool_call_id: of the call whose result a tool's message is.
    reasoning_content, reasoning, thinking: what an assistant thought before, by the names of several servers.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        str | list[Annotated[TextPart | RefusalPart, by_type(TextPart, RefusalPart)]], TextAlone
    ]
    name: str | None = None
    tool_calls: list[PastCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    thinking: str | None = None

    @property
    def thoughts(self) -> str | None:
        """What an assistant thought before it said this."""
        return self.reasoning_content or self.reasoning or self.thinking

    @model_validator(mode="before")
    @classmethod
    def _with_readable_content(cls, body: Any) -> Any:
        if not (isinstance(body, dict) and body.get("role") in ("assistant", "tool")):
            return body
        content = "" if body.get("content") is None else body["content"]
        return {**body, "content": readable_results(content) if body["role"] == "tool" else content}

    def plain(self) -> dict[str, Any]:
        """As chat templates know it."""
        content = text_of(self.content)
        message: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": content,
        }
        if self.tool_calls:
            message["tool_calls"] = [
                {**_given(id=call.id), "type": "function", "function": _called(call.function)}
                for call in self.tool_calls
            ]
        if self.thoughts and self.role == "assistant":
            message["reasoning_content"] = self.thoughts
        return message | (
            _given(name=self.name, tool_call_id=self.tool_call_id) if self.role == "tool" else {}
        )


def _given(**fields: Any) -> dict[str, Any]:
    """Those that are not None: to a template a name that is None is there."""
    return {name: value for name, value in fields.items() if value is not None}


def _called(call: Called) -> dict[str, Any]:
    """As templates know it; arguments that the model wrote and that are no JSON object stay text."""
    try:
        arguments = json.loads(call.arguments or "{}")
    except (ValueError, RecursionError):
        arguments = None
    return {"name": call.name, "arguments": arguments if isinstance(arguments, dict) else call.arguments}


class Function(Body):
    """strict: arguments always follow the schema here."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def described(self) -> dict[str, Any]:
        """As templates tell it to the model."""
        return {
            "type": "function",
            "function": self.model_dump(exclude={"strict", "type"}, exclude_none=True),
        }


class Tool(Body):
    type: Literal["function"]
    function: Function


class FunctionName(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: FunctionName

    @property
    def name(self) -> str:
        """Of the function."""
        return self.function.name


class AllowedOf(Body):
    """Of those that are offered, the ones that may be called in this answer."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], hosted_left_out("function")]


class AllowedTools(Body):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedOf


Choice = Literal["none", "auto", "required"]


@dataclass(frozen=True)
class Tools:
    """What may be called in one answer. functions: all that the model is told of.  callable: those that it may call.  required: it has to.

    place: of a function's parameters in the request.
    """

    functions: Sequence[Function] = ()
    callable: Sequence[Function] = ()
    required: bool = False
    parallel: bool = True
    place: str = "tools.{}.function.parameters"

    @classmethod
    def chosen(cls, functions: Sequence[Function], choice: Any, parallel: bool) -> "Tools":
        """As OpenAI's clients choose: by a word, one by its name, or several by theirs."""
        if isinstance(choice, AllowedTools):
            choice = choice.allowed_tools
        if isinstance(choice, AllowedOf):
            return cls.of(functions, choice.mode, [tool.name for tool in choice.tools], parallel)
        if isinstance(choice, str | None):
            return cls.of(functions, choice, None, parallel)
        return cls.of(functions, "required", [choice.name], False)

    @classmethod
    def of(
        cls, functions: Sequence[Function], choice: str | None, allowed: Sequence[str] | None, parallel: bool
    ) -> "Tools":
        """From the fields of a request. choice: auto where nothing is said.  allowed: names of those that may be called, None: all.

        Raises:
            ApiError: a call is asked for of a function that is not there, or of none.
        """
        names = [function.name for function in functions]
        if len(set(names)) < len(names):
            raise ApiError(
                400, f"tools has the names {', '.join(names)[:300]}; expected each once.", param="tools"
            )
        unknown = next((name for name in allowed or () if name not in names), None)
        if unknown is not None:
            raise ApiError(
                400,
                f"tool_choice names {unknown[:64]!r}; expected one of tools: {', '.join(names)[:300] or 'there are none'}.",
                param="tool_choice",
            )
        may_call = [function for function in functions if allowed is None or function.name in allowed]
        if choice == "required" and not may_call:
            raise ApiError(
                400,
                "tool_choice is 'required' without tools; expected some to choose from.",
                param="tool_choice",
            )
        if choice == "none" or not names:
            return cls()
        return cls(functions, may_call, choice == "required", parallel)
