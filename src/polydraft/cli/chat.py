"""`polydraft chat`: a conversation in the terminal, streamed, with the origin of every token in colour."""

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polydraft.cli import options as given
from polydraft.cli.progress import Preparation
from polydraft.cli.start import build

if TYPE_CHECKING:
    from polydraft.core import SamplingParams
    from polydraft.engine.api import Engine

__all__ = ["chat"]


def chat(
    model: Annotated[str, typer.Option(help="Folder of a chat model (its tokenizer has a chat template).")],
    draft_model: given.DraftModel = None,
    drafter: given.Drafter = "auto",
    verifier: given.Verifier = "auto",
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 512,
    temperature: given.Temperature = 0.7,
    top_p: given.TopP = 1.0,
    seed: Annotated[int | None, typer.Option(help="Noise of the first answer; later ones count on.")] = None,
    dtype: given.Dtype = None,
    device: given.Device = None,
    max_model_len: Annotated[int | None, typer.Option(help="Longest conversation, in tokens.")] = None,
    show: Annotated[bool, typer.Option(help="Colour accepted draft tokens.")] = True,
) -> None:
    """Talk to a model: one message a line. /reset forgets the conversation, /exit or an empty input ends it."""
    options: dict[str, Any] = {"drafter": drafter, "verifier": verifier, "dtype": dtype, "device": device}
    with Preparation(f"loading {model} ..."):
        from polydraft.core import SamplingParams

        engine = build(model, draft_model, max_model_len=max_model_len, max_num_seqs=1, **options)
    params = SamplingParams(temperature=temperature, top_p=top_p, max_tokens=max_tokens, seed=seed)
    start = [] if system is None else [{"role": "system", "content": system}]
    engine.encode_chat([*start, {"role": "user", "content": "?"}])  # no template is told before the first message
    history = list(start)
    while (message := _ask()) is not None:
        if message == "/reset":
            history = list(start)
            continue
        history.append({"role": "user", "content": message})
        answer = _answer(engine, history, params, show)
        history.append({"role": "assistant", "content": answer})
        params = params if params.seed is None else params.with_(seed=params.seed + 1)


def _ask() -> str | None:
    """The next message, or None at the end."""
    if sys.stdin.isatty():
        typer.secho("> ", bold=True, nl=False, err=True)
    line = sys.stdin.readline()
    message = line.strip()
    return None if not message or message == "/exit" else message


def _answer(engine: "Engine", history: list[dict[str, str]], params: "SamplingParams", show: bool) -> str:
    """Stream an answer; returns its text."""
    from polydraft.cli.show import Palette, play, speed

    ids = engine.encode_chat(history)
    room = engine.target.max_model_len - len(ids)
    fitting = params.with_(max_tokens=max(1, min(params.max_tokens or room, room)))
    with Preparation() as preparation:
        sample = play(engine, ids, fitting, Palette(), colour=show, begin=preparation.close)
    if sample is None:
        return ""
    first = sample.stats.seconds_to_first_token or 0
    typer.secho(f"{speed(sample.stats)}, first token after {first:.2f} s", dim=True, err=True)
    return sample.text
