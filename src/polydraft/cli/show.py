"""Text with its accepted draft tokens in colour."""

import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import Any

import typer

from polydraft.core import SamplingParams
from polydraft.engine.api import Engine
from polydraft.engine.detokenizer import Detokenizer
from polydraft.engine.output import StepOutput
from polydraft.engine.sequence import Origin, Sample
from polydraft.engine.stats import RequestStats

COLOURS = ("green", "cyan", "yellow", "magenta", "blue", "red")


class Palette:
    """One colour for each kind of drafted token, given out in order of appearance; the target's own token has none.

    Example:
        >>> palette = Palette()
        >>> palette.style(Origin("model")), palette.style(Origin("target")), palette.style(Origin("ngram"))
        ('green', None, 'cyan')
    """

    def __init__(self) -> None:
        self._styles: dict[Origin, str] = {}

    def style(self, origin: Origin) -> str | None:
        """Colour of a token."""
        if origin.source == "target":
            return None
        return self._styles.setdefault(origin, COLOURS[len(self._styles) % len(COLOURS)])

    def legend(self) -> str:
        """What the colours seen so far mean, in these colours."""
        kinds = [
            typer.style(f"drafted by {o.source}, path {o.branch + 1}", fg=colour)
            for o, colour in self._styles.items()
        ]
        return " · ".join([*kinds, "plain: the one token that a forward pass of the target adds"])


class Painter:
    """Splits the text that steps give out into pieces of one origin each; it never shows more than the engine did."""

    def __init__(self, tokenizer: Any, prompt_token_ids: Sequence[int], palette: Palette) -> None:
        self._detokenizer = Detokenizer(tokenizer, prompt_token_ids, skip_special_tokens=True)
        self._pieces: deque[tuple[str, Origin]] = deque()
        self._palette = palette

    def paint(self, output: StepOutput) -> Iterator[tuple[str, str | None]]:
        """The step's certain text in order, each piece with its colour."""
        for token, origin in zip(output.token_ids, output.origins, strict=True):
            self._pieces.append((self._detokenizer.push(token), origin))
        room = len(output.text)
        while room and self._pieces:
            piece, origin = self._pieces.popleft()
            if len(piece) > room:
                self._pieces.appendleft((piece[room:], origin))
            yield piece[:room], self._palette.style(origin)
            room -= min(len(piece), room)


def play(
    engine: Engine,
    prompt: Sequence[int],
    params: SamplingParams,
    palette: Palette,
    *,
    colour: bool,
    begin: Callable[[], None],
    stop: Callable[[], bool] = bool,
) -> Sample | None:
    """Print a continuation as it comes, and say what it was. begin: called before the first word.  stop: whether to end it here."""
    painter = Painter(engine.tokenizer, prompt, palette)
    sample = None
    coloured = colour and sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    with closing(engine.stream(prompt, params)) as outputs:
        for output in outputs:
            if sample is None:
                begin()
            sample = output.sample
            pieces = painter.paint(output)
            sys.stdout.write(
                "".join(
                    typer.style(piece, fg=style) if coloured and style else piece for piece, style in pieces
                )
            )
            sys.stdout.flush()
            if stop():
                break
    typer.echo()
    return sample


def speed(stats: RequestStats) -> str:
    """Tokens, tokens per second, tokens per step and acceptance rate of a sample."""
    accepted = f", acceptance rate {stats.acceptance_rate:.0%} ({stats.accepted_tokens} of {stats.drafted_tokens} tokens)"
    speeds = f"{stats.generated_tokens} tokens, {stats.tokens_per_second:.0f} tokens/s, {stats.tokens_per_step:.2f} tokens per step"
    return speeds + (accepted if stats.drafted_tokens else "")
