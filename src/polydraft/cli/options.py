"""Options that several commands take, declared once."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from polydraft.errors import InvalidInputError


def _panel(name: str) -> Callable[..., Any]:
    return lambda text, *flags, **more: typer.Option(*flags, help=text, rich_help_panel=name, **more)


PANELS = ("Models", "Drafts", "Decoding", "Sampling", "Output", "Server", "Replicas")
models, drafts, decoding, sampling, output, server, replicas = map(_panel, PANELS)
"""(help, names of the option) -> an option in this panel of the help."""

Model = Annotated[
    str | None,
    models(
        "Target: a folder, FILE.gguf, a name of `polydraft models list`, OWNER/NAME or OWNER/NAME:Q4_K_M; the embedded pair without it."
    ),
]
DraftModel = Annotated[str | None, models("A smaller model with the same vocabulary, named alike.")]
Dtype = Annotated[str | None, models("For example float32 or bfloat16.")]
Device = Annotated[str | None, models("For example cpu or cuda.")]
Backend = Annotated[str, models("auto, compiled or transformers.")]
Quantization = Annotated[
    str | None,
    models(
        "Weights of the target rounded to int8, int4, bfloat16 or bfloat16-dot, on the compiled path: another model. Default: as they are."
    ),
]
Exact = Annotated[
    bool, models("Float32 activations with quantized weights of a GGUF file: slower; without it, 8 bits a block.", "--exact")
]
CacheDtype = Annotated[str | None, models("float32 or bfloat16 keys and values of the target, on the compiled path.")]
PassThreads = Annotated[
    int | None, models("Threads of the compiled path; physical cores that the process may use without it.", "--threads", min=1)
]
TensorParallel = Annotated[
    int | None, models("Processes that hold a part of the target each; one whole without it.", "--tensor-parallel")
]
Drafter = Annotated[str, drafts("A name of `polydraft methods`, none, or auto.")]
Head = Annotated[Path | None, drafts("Folder of a draft head, see `polydraft train`.")]
Verifier = Annotated[str, drafts("A name of `polydraft methods`, or auto.")]
Depth = Annotated[int | None, drafts("Drafted tokens on a path; planned without it.")]
NumPaths = Annotated[int | None, drafts("Drafted paths per step; planned without it.")]
Decoding = Annotated[
    str | None, decoding("A decoding method of `polydraft methods`: what is sampled, exactly, in place of the target's.")
]
Amateur = Annotated[
    str | None, decoding("The weaker model of contrastive decoding, named like --model; the draft model without it.")
]
Alpha = Annotated[float | None, decoding("contrastive: in [0, 1]; tokens less likely than this share of the likeliest are out.")]
Beta = Annotated[float | None, decoding("contrastive: >= 0; weight of the amateur.")]
DecodingOption = Annotated[list[str] | None, decoding("NAME=VALUE: another option of the decoding method; may be repeated.")]
Temperature = Annotated[float, sampling("0 is greedy.", min=0)]
TopP = Annotated[float, sampling("In (0, 1].")]
ModelTemperature = Annotated[
    float | None, sampling("0 is greedy. Default: the model's own, else 1, or 0.7 for chats.", "--temperature")
]
ModelTopP = Annotated[float | None, sampling("In (0, 1]. Default: the model's own, else 1, or 0.95 for chats.", "--top-p")]
MaxTokens = Annotated[int, sampling("Tokens of each continuation.", min=1)]
Prompts = Annotated[
    Path | None, typer.Option(help="Text file, one prompt a line, or .jsonl with a prompt key; default: held-out Python files.")
]
Threads = Annotated[int, typer.Option(min=1, help="Threads of everyone. One avoids stalls on a busy machine.")]
Repetitions = Annotated[int, typer.Option(min=1, help="Of all prompts; fewer with --quick or on a slow machine.")]
AsJson = Annotated[bool, output("Print one JSON object.", "--json")]


def set_options(**options: Any) -> dict[str, Any]:
    """Those that were set.

    Example:
        >>> set_options(temperature=None, top_p=0.9)
        {'top_p': 0.9}
    """
    return {name: value for name, value in options.items() if value is not None}


def activations(exact: bool) -> str | None:
    """The option of models that --exact stands for."""
    return "float32" if exact else None


def decoding_options(said: list[str] | None, **named: Any) -> dict[str, Any]:
    """Options of a decoding method: those that were named, and NAME=VALUE; a value that reads as a number is one.

    Raises:
        InvalidInputError: something else.

    Example:
        >>> decoding_options(["k=8", "passages=notes"], alpha=0.2, beta=None)
        {'alpha': 0.2, 'k': 8, 'passages': 'notes'}
    """
    found = set_options(**named)
    for one in said or ():
        name, equals, value = one.partition("=")
        if not name or not equals:
            raise InvalidInputError(f"--decoding-option {one!r} was given; expected NAME=VALUE, such as alpha=0.2.")
        found[name] = _number(value)
    return found


def _number(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text
