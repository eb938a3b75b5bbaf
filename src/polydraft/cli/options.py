"""Options that several commands take, declared once."""

from pathlib import Path
from typing import Annotated

import typer

MODELS, DRAFTS, SAMPLING, OUTPUT = "Models", "Drafts", "Sampling", "Output"
"""Panels of the help."""

Model = Annotated[
    str | None,
    typer.Option(
        help="Target: a folder, FILE.gguf, a name of `polydraft models list` or OWNER/NAME; the embedded pair without it.",
        rich_help_panel=MODELS,
    ),
]
DraftModel = Annotated[
    str | None, typer.Option(help="A smaller model with the same vocabulary, named alike.", rich_help_panel=MODELS)
]
Dtype = Annotated[str | None, typer.Option(help="For example float32 or bfloat16.", rich_help_panel=MODELS)]
Device = Annotated[str | None, typer.Option(help="For example cpu or cuda.", rich_help_panel=MODELS)]
Backend = Annotated[str, typer.Option(help="auto, compiled, static or transformers.", rich_help_panel=MODELS)]
Quantization = Annotated[
    str | None, typer.Option(help="bfloat16 or int8 weights of the target, on the compiled path.", rich_help_panel=MODELS)
]
Drafter = Annotated[str, typer.Option(help="A name of `polydraft methods`, none, or auto.", rich_help_panel=DRAFTS)]
Verifier = Annotated[str, typer.Option(help="A name of `polydraft methods`, or auto.", rich_help_panel=DRAFTS)]
Depth = Annotated[int | None, typer.Option(help="Drafted tokens on a path; planned without it.", rich_help_panel=DRAFTS)]
NumPaths = Annotated[int | None, typer.Option(help="Drafted paths per step; planned without it.", rich_help_panel=DRAFTS)]
Temperature = Annotated[float, typer.Option(min=0, help="0 is greedy.", rich_help_panel=SAMPLING)]
TopP = Annotated[float, typer.Option(help="In (0, 1].", rich_help_panel=SAMPLING)]
MaxTokens = Annotated[int, typer.Option(min=1, help="Tokens of each continuation.", rich_help_panel=SAMPLING)]
Prompts = Annotated[
    Path | None,
    typer.Option(help="Text file, one prompt a line, or .jsonl with a prompt key; default: held-out Python files."),
]
Threads = Annotated[int, typer.Option(min=1, help="Threads of everyone. One avoids stalls on a busy machine.")]
Repetitions = Annotated[int, typer.Option(min=1, help="Of all prompts; fewer with --quick or on a slow machine.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.", rich_help_panel=OUTPUT)]
