"""`polydraft generate`: continue a prompt."""

import json
import math
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polydraft.cli import options
from polydraft.cli.downloads import Yes, agree_on_downloads
from polydraft.cli.files import check_output, read_prompt
from polydraft.cli.help import HelpAll
from polydraft.cli.options import Only, configured
from polydraft.cli.progress import Preparation
from polydraft.cli.start import build, check, leave_costs, loaded
from polydraft.cli.waiting import Waiting
from polydraft.config import Config, SamplingConfig, setting
from polydraft.errors import DrafterWarning

if TYPE_CHECKING:
    from polydraft.config import EngineConfig
    from polydraft.core import SamplingParams
    from polydraft.engine.api import Engine
    from polydraft.engine.sequence import Result, Sample


@dataclass(frozen=True, kw_only=True)
class Output(Config):
    """What is printed, and how."""

    chat: bool = setting(
        "Chat template around PROMPT, which is a message", bool, False, flag="--chat", panel="Output"
    )
    as_json: bool = setting(options.JSON_HELP, bool, False, flag="--json", panel="Output")
    show: bool = setting("Accepted draft tokens in colour", bool, False, flag="--show", panel="Output")
    stream: bool = setting("Text as it is generated", bool, True, panel="Output")
    verbose: bool = setting(
        "Context, batch, KV cache and activations of what was loaded, too",
        bool,
        False,
        flag="--verbose",
        panel="Output",
    )
    trace: Path | None = setting(
        "File for ui.perfetto.dev: when each worker of asynchronous drafting did what", Path, panel="Output"
    )


@configured
def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="Text to continue; - or nothing reads standard input.")
    ] = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="File of the prompt.")] = None,
    *,
    config: options.Engine,
    sampling: Annotated[SamplingConfig, Only(max_tokens=128)],
    output: Output,
    yes: Yes = False,
    no_cache: options.NoCache = False,
    help_all: HelpAll = False,
) -> None:
    """Continue PROMPT: text on standard output, statistics on standard error."""
    text = read_prompt(prompt, file)
    if output.trace is not None:
        check_output("--trace", output.trace)
        config = config.with_(drafter_options={"trace": True})
    _check(text, config, sampling, output.chat)
    agree_on_downloads([config], yes=yes)
    with Preparation(f"loading {config.model} ...") as preparation, warnings.catch_warnings():
        warnings.simplefilter("ignore", DrafterWarning)  # the statistics report it
        engine = build(config.with_(max_num_seqs=max(1, min(sampling.n, 8))), answers=True)
        preparation.say(loaded(engine, str(config.model), verbose=output.verbose))
        params = engine.default_params(chat=output.chat).with_(**sampling.chosen())
        _answer(engine, text, params, output, preparation)
    if output.trace is not None:
        drafter: Any = engine.drafter
        drafter.close()
        drafter.trace.save(output.trace)
    leave_costs(engine)


def _check(text: str, config: "EngineConfig", sampling: SamplingConfig, chat: bool) -> None:
    """Refuse what cannot be generated before anything is loaded."""
    from polydraft.core.params import SamplingParams

    plan = check(config, SamplingParams(**sampling.chosen()))
    if chat:
        plan.check_template()
    plan.check_prompt(text)


def _answer(
    engine: "Engine", text: str, params: "SamplingParams", output: Output, preparation: Preparation
) -> None:
    """Generate and print, as it was asked for."""
    waiting = Waiting()
    message = [{"role": "user", "content": text}]
    prompt_ids = engine.encode_chat(message) if output.chat else engine.encode(text)
    prompt = prompt_ids if output.chat else text
    waiting.begin()
    if output.as_json:
        _print_json(engine, engine.generate(prompt, params)[0], waiting)
    elif output.stream and params.n == 1:
        _stream(engine, text, prompt_ids, params, output.show, preparation, waiting)
    else:
        preparation.close()  # a progress bar takes its place
        _print_samples(engine.generate(prompt, params, progress=sys.stderr.isatty())[0], waiting)


def _statistics(sample: "Sample") -> str:
    from polydraft.cli.show import speed

    stats = sample.stats
    latency = (
        f", first token after {stats.seconds_to_first_token:.2f} s"
        if stats.seconds_to_first_token is not None
        else ""
    )
    failure = f"; drafter switched off: {stats.drafter_error}" if stats.drafter_error else ""
    counts = stats.drafter_counts or {}
    lead = ""
    if "rollbacks" in counts:
        lead = f", {counts['rollbacks']:.0f} rollbacks, {counts['reused']:.0f} extra tokens drafted ahead, lead at most {counts['longest']:.0f}"
    return f"{speed(stats)}{latency}{lead}; finish reason {sample.finish_reason}, seed {sample.seed}{failure}"


def _stream(
    engine: "Engine",
    prompt: str,
    prompt_ids: list[int],
    params: "SamplingParams",
    show: bool,
    preparation: Preparation,
    waiting: Waiting,
) -> None:
    from polydraft.cli.show import Palette, play

    def begin() -> None:
        preparation.close()
        if show:
            typer.secho(prompt, dim=True, nl=False)

    palette = Palette()
    sample = play(engine, prompt_ids, params, palette, colour=show, begin=begin)
    if show:
        typer.echo(palette.legend(), err=True)
    if sample is not None:
        typer.echo(f"{_statistics(sample)}\n{waiting.line(sample.stats)}", err=True)


def _print_samples(result: "Result", waiting: Waiting) -> None:
    for sample in result.samples:
        if len(result.samples) > 1:
            typer.echo(f"--- sample {sample.index + 1} of {len(result.samples)}", err=True)
        typer.echo(sample.text)
        typer.echo(_statistics(sample), err=True)
    typer.echo(waiting.line(result.stats), err=True)


def _print_json(engine: "Engine", result: "Result", waiting: Waiting) -> None:
    waited = waiting.until(result.stats)
    whole = {
        "text": result.text,
        "statistics": result.stats.to_dict(),
        "waited": waited,
        "engine": engine.summary(),
        **result.to_dict(),
    }
    typer.echo(json.dumps(_plain(whole), ensure_ascii="utf" not in sys.stdout.encoding.lower()))


def _plain(value: Any) -> Any:
    """The same with null for infinities: JSON has none, and a banned token has log-probability -inf."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
