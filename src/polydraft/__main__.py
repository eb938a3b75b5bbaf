"""`python -m polydraft`: the live demo, or any command of the command line."""

import sys

from polydraft.cli.main import app

__all__ = ["arguments"]


def arguments(given: list[str]) -> list[str]:
    """What the command line is called with: without a command it is the demo.

    Example:
        >>> arguments(["--json"]), arguments(["methods"])
        (['demo', '--json'], ['methods'])
    """
    asks_for_help = "--help" in given or "--version" in given
    names_a_command = bool(given) and not given[0].startswith("-")
    return given if names_a_command or asks_for_help else ["demo", *given]


if __name__ == "__main__":
    app(arguments(sys.argv[1:]), prog_name="polydraft")
