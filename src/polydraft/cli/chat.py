"""`polydraft chat`: a conversation in the terminal, streamed, with the origin of every token in colour."""

import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import typer

from polydraft.cli import options
from polydraft.cli.downloads import Yes, agree_on_downloads
from polydraft.cli.help import HelpAll
from polydraft.cli.options import Only, configured
from polydraft.cli.progress import Preparation
from polydraft.cli.start import build, check, leave_costs, loaded
from polydraft.cli.waiting import process_seconds
from polydraft.config import SamplingConfig
from polydraft.errors import IncompatibleError, InvalidInputError, PolydraftError

if TYPE_CHECKING:
    from polydraft.core import SamplingParams
    from polydraft.engine.api import Engine
    from polydraft.engine.stats import RequestStats


FENCE = '"""'
ROOM = 64
"""Tokens that an answer may always have: where the conversation is longer than the context: older messages make way for them."""
HELP = f"""/reset forgets the conversation, /stats tells what it cost, /save FILE writes it as JSON, /exit ends.
{FENCE} begins a message of several lines and ends it. Ctrl-C ends an answer, Ctrl-D the program."""


@configured
def chat(
    *,
    config: options.Engine,
    sampling: Annotated[SamplingConfig, Only(without=("n", "logprobs"), max_tokens=512)],
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    show: Annotated[bool, typer.Option(help="Accepted draft tokens in colour.")] = True,
    verbose: options.Verbose = False,
    yes: Yes = False,
    no_cache: options.NoCache = False,
    help_all: HelpAll = False,
) -> None:
    """Talk to a model. One message a line; /help shows what else there is."""
    name = str(config.model)
    config = config.with_(max_num_seqs=1)
    from polydraft.core.params import SamplingParams

    check(config, SamplingParams(**sampling.chosen())).check_template()
    agree_on_downloads([config], yes=yes)
    with Preparation(f"loading {name} ...") as preparation:
        engine = build(config, answers=True)
        preparation.say(f"{loaded(engine, name, verbose=verbose)}; ready after {process_seconds():.1f} s")
    params = engine.default_params(chat=True).with_(**sampling.chosen())
    start = [] if system is None else [{"role": "system", "content": system}]
    engine.encode_chat(
        [*start, {"role": "user", "content": "?"}]
    )  # no template is told before the first message
    _converse(_Talk(engine, params, show, start))
    leave_costs(engine)


def _converse(talk: "_Talk") -> None:
    """Message by message, until the input ends."""
    while (message := _ask()) is not None:
        if message.startswith("/"):
            if message == "/exit":
                break
            talk.command(message)
        elif message:
            with _errors_shown():
                talk.answer(message)


@contextmanager
def _errors_shown() -> Iterator[None]:
    """What goes wrong with one message is said, and the conversation goes on."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo(err=True)
    except (PolydraftError, OSError) as error:
        typer.secho(" ".join(str(error).split()), fg="red", err=True)


def _ask() -> str | None:
    """The next message, or None at the end of the input."""
    terminal = sys.stdin.isatty()
    if terminal:
        with suppress(ImportError):
            import readline  # noqa: F401 - lines can then be edited, and the earlier ones are found with the arrow keys

    def line(sign: str) -> str:
        if terminal:
            return input(sign)
        if not (read := sys.stdin.readline()):
            raise EOFError
        return read.removesuffix("\n")

    try:
        message = line("> ")
        if not message.startswith(FENCE):
            return message.strip()
        lines = [message.removeprefix(FENCE)]
        while not lines[-1].rstrip().endswith(FENCE):
            lines.append(line(". "))
    except KeyboardInterrupt:  # what was typed is dropped
        typer.echo("\n(Ctrl-D or /exit ends)", err=True)
        return ""
    except EOFError:
        return None
    return "\n".join(lines).rstrip().removesuffix(FENCE).strip("\n")


@contextmanager
def _interruptible() -> Iterator[list[int]]:
    """While entered, Ctrl-C is noted in the list: what runs ends between two steps, with its cache whole. Only a second one interrupts."""
    noted: list[int] = []

    def note(number: int, _: object) -> None:
        if noted:
            raise KeyboardInterrupt
        noted.append(number)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, before)


@dataclass
class _Talk:
    """A conversation. start: what it begins with, again after a reset.  answers: what each one cost."""

    engine: "Engine"
    params: "SamplingParams"
    show: bool
    start: list[dict[str, str]]
    answers: list["RequestStats"] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.messages = list(self.start)

    def command(self, line: str) -> None:
        """Do what a line that begins with a slash says."""
        name, _, rest = line.partition(" ")
        if name == "/reset":
            self.messages = list(self.start)
        elif name == "/stats":
            typer.echo(self._costs(), err=True)
        elif name == "/save" and rest.strip():
            with _errors_shown():
                self._save(rest.strip())
        else:
            typer.echo(HELP if name == "/help" else f"{line!r} was given. {HELP}", err=True)

    def _save(self, file: str) -> None:
        from polydraft.files.atomic import replacing

        with replacing(file) as written:
            written.write(json.dumps(self.messages, ensure_ascii=False, indent=2).encode())
        typer.echo(f"{len(self.messages)} messages written to {file}", err=True)

    def _costs(self) -> str:
        """What all answers took together."""
        if not self.answers:
            return "no answer yet"
        last = self.answers[-1]
        tokens = sum(a.generated_tokens for a in self.answers)
        steps = sum(a.steps for a in self.answers)
        seconds = sum(a.total_seconds - a.seconds["prefill"] for a in self.answers)
        prompts = sum(a.prompt_tokens for a in self.answers)
        cached = sum(a.cached_tokens for a in self.answers)
        return (
            f"{len(self.answers)} answers, {tokens} tokens, {tokens / max(seconds, 1e-9):.0f} tokens/s, "
            f"{tokens / max(steps, 1):.2f} tokens per step; prompts of {prompts} tokens, {cached} of them from the prefix cache; "
            f"{last.prompt_tokens + last.generated_tokens} of {self.engine.target.max_model_len} tokens of the context in use"
        )

    def _fitting(self, message: str) -> tuple[list[dict[str, str]], list[int]]:
        """The conversation with the message, without the oldest turns where it is too long, and its token ids.

        Raises:
            IncompatibleError: the template refuses it.
            InvalidInputError: the message alone is too long.
        """
        system = self.messages[: len(self.start)]
        turns = self.messages[len(self.start) :]
        longest = self.engine.target.max_model_len
        dropped = 0
        room = min(ROOM, longest // 4, self.params.max_tokens or ROOM)
        while True:
            messages = [*system, *turns[dropped:], {"role": "user", "content": message}]
            ids = self.engine.encode_chat(messages)
            if len(ids) + room <= longest:
                break
            if dropped >= len(turns):
                raise InvalidInputError(
                    f"a message that makes a prompt of {len(ids)} tokens was given; the context holds {longest}, with {room} for the answer. "
                    "Shorten it; the conversation is as it was before."
                )
            dropped += 2
        if dropped:
            typer.secho(
                f"The context holds {longest} tokens: the {dropped} oldest messages were dropped.",
                fg="yellow",
                err=True,
            )
        return messages, ids

    def answer(self, message: str) -> None:
        """Stream the answer to a message; a conversation that fails stays as it was."""
        from polydraft.cli.show import Palette, play, speed

        messages, ids = self._fitting(message)
        room = self.engine.target.max_model_len - len(ids)
        fitting = self.params.with_(max_tokens=min(self.params.max_tokens or room, room))
        with _interruptible() as interrupted, Preparation() as preparation:
            sample = play(
                self.engine,
                ids,
                fitting,
                Palette(),
                colour=self.show,
                begin=preparation.close,
                stop=lambda: bool(interrupted),
            )
        if sample is None:
            return
        if sample.error:
            raise IncompatibleError(sample.error)
        self.messages = [*messages, {"role": "assistant", "content": sample.text}]
        self.answers.append(sample.stats)
        if self.params.seed is not None:
            self.params = self.params.with_(seed=self.params.seed + 1)
        first = sample.stats.seconds_to_first_token or 0
        ended = {"abort": ", ended by Ctrl-C", "length": ", ended by its length"}.get(
            sample.finish_reason or "", ""
        )
        typer.secho(f"{speed(sample.stats)}, first token after {first:.2f} s{ended}", dim=True, err=True)
