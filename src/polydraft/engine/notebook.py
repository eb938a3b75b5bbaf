"""A result as HTML, for notebooks: the text with its accepted draft tokens in colour."""

from collections.abc import Iterable
from html import escape
from itertools import groupby

COLOURS = ("76, 175, 80", "33, 150, 243", "255, 152, 0", "156, 39, 176", "0, 188, 212", "233, 30, 99")
"""As red, green, blue; half transparent, they are legible on light and dark pages."""
PLAIN = ""
"""The label of what no drafter made."""


def coloured_text(pieces: Iterable[tuple[str, str]], caption: str) -> str:
    """A block of text whose pieces have the colour of their label, and a legend below.

    pieces: text and label; everything is escaped.  caption: what stands before the legend.

    Example:
        >>> html = coloured_text([("<b>", "model, path 1"), ("x", "")], "2 tokens")
        >>> "&lt;b&gt;</span>x</pre>" in html, "<b>" in html
        (True, False)
    """
    colours = dict[str, str]()
    parts = list[str]()
    for label, neighbours in groupby(pieces, key=lambda piece: piece[1]):
        text = "".join(piece for piece, _ in neighbours)
        if text:
            if label != PLAIN:
                colours.setdefault(label, COLOURS[len(colours) % len(COLOURS)])
            parts.append(_mark(text, label, colours))
    legend = [_mark(f"drafted by {label}", label, colours) for label in colours]
    notes = " · ".join([escape(caption), *legend, *(["plain: by the target model"] if legend else [])])
    # a newline at the beginning of <pre> is dropped by browsers
    return f'<pre style="white-space: pre-wrap; margin: 0">\n{"".join(parts)}</pre><small>{notes}</small>'


def _mark(text: str, label: str, colours: dict[str, str]) -> str:
    if label == PLAIN:
        return escape(text)
    return f'<span title="{escape(label)}" style="background: rgba({colours[label]}, 0.35)">{escape(text)}</span>'
