"""For the reference: the modules of all registered methods, in the order of the registry, in the place of a mark."""

from typing import Any

from polydraft import registry

MARKS = {"<!-- every verifier -->": registry.VERIFIERS, "<!-- every drafter -->": registry.DRAFTERS}


def on_page_markdown(markdown: str, **_: Any) -> str:
    """MkDocs calls it for every page."""
    for mark, table in MARKS.items():
        modules = dict.fromkeys(where.partition(":")[0] for where in table.values())
        markdown = markdown.replace(mark, "\n\n".join(f"::: {module}" for module in modules))
    return markdown
