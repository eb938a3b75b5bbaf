"""Questions, tools and answers that templates write."""

from collections.abc import Mapping
from typing import Any, NamedTuple

QUESTION = {"role": "user", "content": "How warm is it?"}
NEXT = {"role": "user", "content": "And tomorrow?"}
TEXT = "Let me look."
BEHIND = "That is all."
THOUGHT = "They ask for the weather."


SEARCH = {
    "type": "object",
    "properties": {
        "text": {"type": "string", "description": "What is looked for."},
        "count": {"type": "integer", "description": "How many."},
        "share": {"type": "number", "description": "Of all."},
        "exact": {"type": "boolean", "description": "Whether word by word."},
        "inner": {"type": "object", "description": "Further options.", "additionalProperties": {}},
        "words": {"type": "array", "items": {"type": "string"}, "description": "All of these."},
    },
    "required": ["text"],
}


def described(name: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """A tool as clients offer it."""
    function = {"name": name, "description": f"Does a {name}.", "parameters": parameters}
    return {"type": "function", "function": function}


TOOLS = [
    described("search_all", SEARCH),
    described("now", {"type": "object", "properties": {}, "required": []}),
]
SCHEMAS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
Arguments = dict[str, Any]


class Case(NamedTuple):
    """An answer. calls: names and arguments.  behind: what the model writes behind them, which no template has."""

    name: str
    calls: tuple[tuple[str, Arguments], ...] = ()
    content: str = ""
    thoughts: str = ""
    behind: str = ""


def call(**arguments: Any) -> tuple[str, Arguments]:
    """One of the tool that has parameters."""
    return ("search_all", arguments)


NOW: tuple[str, Arguments] = ("now", {})
NESTED = {"list": [1, "two", True], "deeper": {"key": "a, b: {c}"}}
CASES = (
    Case("words", (call(text="warm weather"),)),
    Case("quotes", (call(text="""say "yes", don't say \\no"""),)),
    Case("newlines", (call(text="one\n  two\n\nthree"),)),
    Case("unicode", (call(text="Zürich 東京 🙂 }]"),)),
    Case("numbers", (call(text="12", count=3, share=0.5, exact=True),)),
    Case("nested", (call(text="x", inner=NESTED, words=["a", "b c"]),)),
    Case("two calls", (call(text="one"), call(text="two", count=2))),
    Case("no arguments", (NOW,)),
    Case("text before", (call(text="warm"),), content=TEXT),
    Case("text behind", (call(text="warm"),), behind=BEHIND),
    Case("thinking before", (call(text="warm"),), thoughts=THOUGHT),
)
THINKING = (
    Case("thinking", content=TEXT, thoughts=THOUGHT),
    Case("thinking with tools", content=TEXT, thoughts=THOUGHT),
)
FEW = ("quotes", "two calls", "thinking", "thinking before")
"""Those of a quick run."""
