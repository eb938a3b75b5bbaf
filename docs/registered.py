"""For the reference: the modules of all registered methods, in the order of the registry, in the place of a mark."""

from typing import Any

from polydraft.methods import registry

MARKS = {"<!-- every verifier -->": "verifier", "<!-- every drafter -->": "drafter"}


def on_page_markdown(markdown: str, **_: Any) -> str:
    """MkDocs calls it for every page."""
    for mark, kind in MARKS.items():
        modules = dict.fromkeys(where.partition(":")[0] for where in registry.places(kind).values())
        markdown = markdown.replace(mark, "\n\n".join(f"::: {module}" for module in modules))
    return markdown
