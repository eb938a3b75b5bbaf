"""Tables on standard output: as wide as the terminal, or as a file wants them."""

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def output(width: int = 120) -> "Console":
    """Standard output; of this width where it is no terminal."""
    from rich.console import Console

    return Console() if sys.stdout.isatty() else Console(width=width)


def grid(
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    left_aligned: Sequence[str] = (),
    title: str | None = None,
) -> "Table":
    """Numbers to the right; to the left the first column and those that are named in `left_aligned`."""
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=None, header_style="bold", pad_edge=False)
    for name in head:
        table.add_column(
            name, justify="left" if name in (head[0], *left_aligned) else "right", no_wrap=name == head[0]
        )
    for row in rows:
        table.add_row(*row)
    return table
