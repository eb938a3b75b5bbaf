"""Parts of a conversation that are no plain text: what of them can be read stands in their place, and the log says what was left out.

A history is what agents send again with every request: a part of it that cannot be read must not end the conversation.
"""

import logging
from collections.abc import Mapping
from functools import lru_cache, partial
from typing import Any

from pydantic import BeforeValidator

from polydraft.server.bodies import PICTURES

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
