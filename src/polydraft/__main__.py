"""`python -m polydraft`: the command line, as `polydraft` is."""

from polydraft.cli.main import app

if __name__ == "__main__":
    app(prog_name="polydraft")
