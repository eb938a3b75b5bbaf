"""The command line as it is offered: commands of groups and of the wing too."""

from collections.abc import Iterator
from typing import Any

from typer import Context
from typer.main import get_command

from polydraft.cli.main import app


def commands() -> dict[str, Any]:
    """By words, such as "generate" and "index build"; what groups take themselves is below their own word, and the program's below "".

    Example:
        >>> {"", "generate", "index build", "images"} <= commands().keys()
        True
    """
    return dict(_below(get_command(app), "", None))


def _below(command: Any, words: str, above: Context | None) -> Iterator[tuple[str, Any]]:
    yield words, command
    context = Context(command, parent=above, info_name=words.rpartition(" ")[2] or "polydraft")
    for name in command.list_commands(context) if hasattr(command, "list_commands") else ():
        yield from _below(command.get_command(context, name), f"{words} {name}".strip(), context)
