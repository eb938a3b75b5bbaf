"""`polydraft generate`: continue a prompt."""

import json
import math
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polydraft.cli import options as given
from polydraft.cli.files import read_prompt
from polydraft.cli.progress import Preparation
from polydraft.cli.start import build, weights
from polydraft.errors import DrafterWarning, InvalidInputError

if TYPE_CHECKING:
    from polydraft.core import SamplingParams
    from polydraft.engine.api import Engine
    from polydraft.engine.sequence import Result, Sample


def generate(
    prompt: Annotated[str | None, typer.Argument(help="Text to continue; - or nothing reads standard input.")] = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="Read the prompt from a file.")] = None,
    model: given.Model = None,
    draft_model: given.DraftModel = None,
    dtype: given.Dtype = None,
    device: given.Device = None,
    backend: given.Backend = "auto",
    quantization: given.Quantization = None,
    exact: given.Exact = False,
    cache_dtype: given.CacheDtype = None,
    threads: given.PassThreads = None,
    tensor_parallel: given.TensorParallel = None,
    draft_quantization: Annotated[
        str | None, given.models("The same of the draft: does not change the output distribution.")
    ] = None,
    max_model_len: Annotated[int | None, given.models("Longest prompt plus output, in tokens.")] = None,
    tie_margin: Annotated[
        float | None, given.models("Low precision: decide greedy near ties (in logits) by a pass of their own.")
    ] = None,
    drafter: given.Drafter = "auto",
    verifier: given.Verifier = "auto",
    depth: given.Depth = None,
    num_paths: given.NumPaths = None,
    index: Annotated[
        list[Path] | None, given.drafts("File of `polydraft index build` for the drafter; several for a mixture.")
    ] = None,
    head: given.Head = None,
    decoding: given.Decoding = None,
    amateur: given.Amateur = None,
    alpha: given.Alpha = None,
    beta: given.Beta = None,
    decoding_option: given.DecodingOption = None,
    asynchronous: Annotated[
        bool, given.drafts("The draft model runs ahead on another core while the target verifies.", "--asynchronous")
    ] = False,
    lead_cap: Annotated[int | None, given.drafts("With --asynchronous: most drafted tokens that wait, at least 1.")] = None,
    trace: Annotated[
        Path | None, given.drafts("With --asynchronous: write when each worker did what, a file for ui.perfetto.dev.")
    ] = None,
    profile: Annotated[Path | None, given.drafts("Costs and acceptance that `polydraft tune --save` wrote.")] = None,
    max_tokens: Annotated[int, given.sampling("Most tokens to emit.")] = 128,
    temperature: given.ModelTemperature = None,
    top_p: given.ModelTopP = None,
    top_k: Annotated[int | None, given.sampling("0 and -1 switch it off. Default: the model's own, else 0.")] = None,
    min_p: Annotated[float | None, given.sampling("In [0, 1]. Default: the model's own, else 0.")] = None,
    repetition_penalty: Annotated[float | None, given.sampling("1 switches it off. Default: the model's own, else 1.")] = None,
    presence_penalty: Annotated[float, given.sampling("0 switches it off.")] = 0.0,
    frequency_penalty: Annotated[float, given.sampling("0 switches it off.")] = 0.0,
    seed: Annotated[
        int | None,
        given.sampling(
            "Noise of the request; drawn and reported without it. It repeats a text at temperature 0, with --depth or --profile, or with the rule race."
        ),
    ] = None,
    stop: Annotated[list[str] | None, given.sampling("Text that ends the output; may be repeated.")] = None,
    ignore_eos: Annotated[bool, given.sampling("Go on after the end-of-text token.", "--ignore-eos")] = False,
    n: Annotated[int, given.sampling("Independent samples.", "--n", "-n")] = 1,
    logprobs: Annotated[int | None, given.output("Report this many alternatives beside each token (with --json).")] = None,
    chat: Annotated[bool, given.output("PROMPT is a message: the model's chat template is put around it.", "--chat")] = False,
    as_json: given.AsJson = False,
    show: Annotated[bool, given.output("Colour accepted draft tokens.", "--show")] = False,
    stream: Annotated[bool, given.output("Print text as it comes.")] = True,
) -> None:
    """Continue PROMPT: text on standard output, statistics on standard error."""
    text = read_prompt(prompt, file)
    from polydraft.core import SamplingParams

    sampling = given.set_options(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        max_tokens=max_tokens,
        stop=stop or (),
        ignore_eos=ignore_eos,
        n=n,
        seed=seed,
        logprobs=logprobs,
    )
    SamplingParams(**sampling)  # refused before anything is loaded
    if logprobs is not None and not as_json:
        raise InvalidInputError(
            f"--logprobs {logprobs} was given without --json, which alone reports them. Add it, or drop both."
        )
    options: dict[str, Any] = {
        "drafter": drafter,
        "verifier": verifier,
        "depth": depth,
        "num_paths": num_paths,
        "drafter_options": ({} if not index else {"index": index[0] if len(index) == 1 else index})
        | ({} if head is None else {"weights": head})
        | _ahead(asynchronous, lead_cap, trace),
        "asynchronous": asynchronous,
        "decoding": decoding,
        "decoding_options": given.decoding_options(decoding_option, amateur=amateur, alpha=alpha, beta=beta),
        "profile": None if profile is None else str(profile),
        "dtype": dtype,
        "device": device,
        "backend": backend,
        "quantization": quantization,
        "activations": given.activations(exact),
        "cache_dtype": cache_dtype,
        "draft_quantization": draft_quantization,
        "threads": threads,
        "tensor_parallel": tensor_parallel,
        "max_model_len": max_model_len,
        "max_num_seqs": max(1, min(n, 8)),
        "tie_margin": tie_margin,
    }
    with Preparation(f"loading {model or 'the embedded models'} ...") as preparation, warnings.catch_warnings():
        warnings.simplefilter("ignore", DrafterWarning)  # the statistics tell it
        engine = build(model, draft_model, **options)
        preparation.say(_limits(engine))
        params = engine.default_params(chat=chat).with_(**sampling)
        asked = engine.encode_chat([{"role": "user", "content": text}]) if chat else text
        if as_json:
            _print_json(engine, engine.generate(asked, params)[0])
        elif stream and n == 1:
            _stream(engine, text, engine.encode(asked), params, show, preparation)
        else:
            preparation.close()  # a bar takes its place
            _print_samples(engine.generate(asked, params, progress=sys.stderr.isatty())[0])
    if trace is not None:
        ahead: Any = engine.drafter
        ahead.close()
        ahead.trace.save(trace)


def _ahead(asynchronous: bool, lead_cap: int | None, trace: Path | None) -> dict[str, Any]:
    """Options of a drafter that runs ahead.

    Raises:
        InvalidInputError: without it, or a trace in a folder that is not there.
    """
    if not asynchronous and (lead_cap, trace) != (None, None):
        raise InvalidInputError(
            "--lead-cap or --trace was given without --asynchronous, whose options they are. Add it, or drop them."
        )
    if trace is not None and not trace.parent.is_dir():
        raise InvalidInputError(f"--trace {str(trace)!r} was given, but there is no folder {str(trace.parent)!r}. Make it first.")
    return ({} if lead_cap is None else {"lead_cap": lead_cap}) | ({} if trace is None else {"trace": True})


def _limits(engine: "Engine") -> str:
    built = engine.summary()
    size = "" if built["cache_bytes"] is None else f", KV cache {built['cache_bytes'] / 1e6:.1f} MB"
    size += " when full, taken as texts grow" if size and built["cache_grows"] else ""
    drafts = "no drafts" if built["drafter"] is None else f"drafter {built['drafter']}"
    distribution = "" if built["decoding"] == "the target distribution" else f", lossless to {built['decoding']}"
    return (
        f"{built['target']}{weights(built)}: context of {built['max_model_len']} tokens, {built['max_num_seqs']} at a time{size}; "
        f"{drafts}, verifier {built['verifier']}{'' if built['lossless'] else ' (not lossless)'}{distribution}"
    )


def _statistics(sample: "Sample") -> str:
    from polydraft.cli.show import speed

    stats = sample.stats
    first = f", first token after {stats.seconds_to_first_token:.2f} s" if stats.seconds_to_first_token is not None else ""
    accepted = f", {stats.accepted_tokens} of {stats.drafted_tokens} drafted tokens accepted" if stats.drafted_tokens else ""
    failed = f"; drafter switched off: {stats.drafter_error}" if stats.drafter_error else ""
    ahead = stats.drafter_counts
    if ahead is not None and "rollbacks" in ahead:
        accepted += f", {ahead['rollbacks']:.0f} rollbacks, {ahead['reused']:.0f} extra tokens drafted ahead, lead at most {ahead['longest']:.0f}"
    return f"{speed(stats)}{first}{accepted}; finish reason {sample.finish_reason}, seed {sample.seed}{failed}"


def _stream(
    engine: "Engine", prompt: str, prompt_ids: list[int], params: "SamplingParams", show: bool, preparation: Preparation
) -> None:
    from rich.console import Console

    from polydraft.cli.show import Palette, play

    def begin() -> None:
        preparation.close()
        if show:
            Console().out(prompt, style="dim", end="", highlight=False)

    palette = Palette()
    sample = play(engine, prompt_ids, params, palette, colour=show, begin=begin)
    if show:
        Console(stderr=True).print(palette.legend())
    if sample is not None:
        typer.echo(_statistics(sample), err=True)


def _print_samples(result: "Result") -> None:
    for sample in result.samples:
        if len(result.samples) > 1:
            typer.echo(f"--- sample {sample.index + 1} of {len(result.samples)}", err=True)
        typer.echo(sample.text)
        typer.echo(_statistics(sample), err=True)


def _print_json(engine: "Engine", result: "Result") -> None:
    whole = {"text": result.text, "statistics": result.stats.to_dict(), "engine": engine.summary(), **result.to_dict()}
    typer.echo(json.dumps(_plain(whole), ensure_ascii=False))


def _plain(value: Any) -> Any:
    """The same with null for infinities: JSON has none, and a banned token has log-probability -inf."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
