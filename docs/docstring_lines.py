"""For the reference: what the docstrings of this project mean is said in the words of the parser.

They say one thing a line ("tokens: [B, N] token ids"), which Markdown would run together, and head an example by "Example:".
"""

import re
from typing import Any

from griffe import Extension, Object

ENTRY = re.compile(r" *[A-Za-z_][\w, ]*: \S")


def as_parsed(text: str) -> str:
    """Each line of the form `name: text` begins a line of the page too; an example is code.

    Example:
        >>> as_parsed("law: how\\nshape: what")
        'law: how  \\nshape: what'
    """
    lines = re.sub(r"^( *)Example:$", r"\1Examples:", text, flags=re.MULTILINE).split("\n")
    following = [*lines[1:], ""]
    return "\n".join(
        line + "  " if line.strip() and ENTRY.match(after) else line
        for line, after in zip(lines, following, strict=True)
    )


class DocstringLines(Extension):
    """Griffe calls it for every object that it has read."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = as_parsed(obj.docstring.value)
