"""`python -m studies.replicas`: tokens a second of one server and of 1, 2 and 4 replicas behind Ray Serve, and first tokens behind known prompts.

Clients run on the same machine in a closed loop, as those of `python -m studies.load`. Beside the clock stands processor time, of the
replicas and of what is before them (Serve's proxy and the ingress), which neighbours do not change. Beyond the machine a model goes on:

    tokens/s(N) = min(N / r, 1 / f)    r, f   processor seconds of a token, of a replica and of the busiest process before them

for replicas that have a core each. Batches to 32 are measured on one core; for a GPU there is the roofline of `studies.theory.roofline`.
"""

import asyncio
import math
import os
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Annotated, Any

import torch
import typer

from polydraft import Engine, SamplingParams
from polydraft.bench.record import provenance
from studies import timing
from studies.load.__main__ import questions
from studies.load.measurement import answer, load
from studies.load.servers import serving
from studies.options import Out, Quick, write_json
from studies.processes import Process, processes
from studies.theory.roofline import Device, Shape, batched_rate, best_chain

app = typer.Typer(help="Many replicas: measured here, modelled beyond.")
REPLICAS = (1, 2, 4)
MODELLED = (1, 2, 4, 8, 16, 32, 64)
BATCHES = (1, 2, 4, 8, 16, 32)
STREAMS = 8
TOPICS = ("bread", "rain", "tides", "bees", "glass", "maps", "salt", "clocks")
RULES = [
    f"Rule {i}: answer briefly about topic number {i * 7 % 101} and cite section {i}." for i in range(24)
]

H100 = Device(operations=0.6 * 989e12, num_bytes=0.8 * 3.35e12, dollars=3.0)
"""NVIDIA's data sheet of the SXM board says 989e12 dense bfloat16 operations and 3.35e12 bytes a second; 60% and 80% of them are assumed, and the price."""
LLAMA_8B = Shape(parameters=8.03e9, bytes_each=2, attention=32 * 32 * 128, cache_bytes=2 * 32 * 8 * 128 * 2)
"""Llama 3.1 8B in bfloat16, by its configuration: 32 layers, 32 heads of 128, 8 of keys and values."""
LLAMA_1B = Shape(parameters=1.24e9, bytes_each=2, attention=16 * 32 * 64, cache_bytes=2 * 16 * 8 * 64 * 2)
"""Llama 3.2 1B: 16 layers, 32 heads of 64, 8 of keys and values."""
GPU_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
CONTEXTS = (512, 4096, 16384)
ACCEPTANCES = (0.6, 0.8)


@dataclass(frozen=True)
class Measured:
    """Of one way to serve. of_replicas, of_busiest, of_rest: processor seconds of a token: all replicas, the busiest process before them, all else."""

    name: str
    replicas: int
    tokens_per_second: float
    first_ms: float
    of_replicas: float
    of_busiest: float
    of_rest: float


def _spent(before: Mapping[int, Process], after: Mapping[int, Process]) -> dict[str, list[float]]:
    """Processor seconds between, of each process, by what it is."""
    found: dict[str, list[float]] = {"replica": [], "front": [], "rest": []}
    for pid, (name, seconds) in after.items():
        replica = ":Replica" in name or " serve " in name
        before_them = ":Ingress" in name or "Proxy" in name
        kind = "replica" if replica else "front" if before_them else "rest"
        found[kind].append(seconds - (before[pid].seconds if pid in before else 0.0))
    return found


@contextmanager
def cluster() -> Iterator[Callable[..., str]]:
    """Ray on this machine; what is yielded deploys replicas, in the place of those before, and gives their address."""
    from polydraft.cli.serve import _bound
    from polydraft.config import ServerConfig
    from polydraft.integrations.ray.serve import deploy, shutdown

    with _bound("127.0.0.1", 0) as listening:
        port = listening.getsockname()[1]

    def deployed(**asked: Any) -> str:
        deploy(port=port, server=ServerConfig(served_model_name="served"), threads=1, **asked)
        return f"http://127.0.0.1:{port}"

    try:
        yield deployed
    finally:
        shutdown()


def _prompts(model: str | None, count: int) -> list[str]:
    """Of the embedded pair: code that begins in as many ways."""
    return (
        questions((), count)
        if model
        else [f"def {TOPICS[i % len(TOPICS)]}_{i}(a, b):\n" for i in range(count)]
    )


def _measured(name: str, url: str, replicas: int, model: str | None, quick: bool) -> Measured:
    tokens = 16 if quick else 64
    count = 8 if quick else 48
    asyncio.run(
        load(
            "", url, _prompts(model, 4 * STREAMS), streams=STREAMS, max_tokens=tokens, chat=model is not None
        )
    )  # compiled, and learnt
    before = processes(os.getpid())
    found = asyncio.run(
        load(name, url, _prompts(model, count), streams=STREAMS, max_tokens=tokens, chat=model is not None)
    )
    spent = _spent(before, processes(os.getpid()))
    figures = found.figures()
    return Measured(
        name,
        replicas,
        figures["tokens_per_second"],
        figures["first_p50_ms"],
        sum(spent["replica"]) / found.tokens,
        max(spent["front"], default=0.0) / found.tokens,
        (sum(spent["front"]) + sum(spent["rest"])) / found.tokens,
    )


def served(model: str | None, deployed: Callable[..., str] | None, *, quick: bool = False) -> list[Measured]:
    """One server without Ray, then replicas."""
    given = ["--model", model or "embedded", "--threads", "1", "--max-num-seqs", str(STREAMS)]
    with serving(*given) as server:
        found = [_measured("polydraft serve", server.url, 1, model, quick)]
    if deployed is not None:
        for number in REPLICAS[:1] if quick else REPLICAS:
            url = deployed(model=model, replicas=number, max_num_seqs=STREAMS)
            found.append(_measured(f"{number} behind Serve", url, number, model, quick))
    return found


def prefixes(
    model: str | None, deployed: Callable[..., str], *, quick: bool = False
) -> dict[str, dict[str, float]]:
    """Median seconds to the first token of what begins like an earlier request, by router; and the share of such prompts' tokens that was known."""
    found = dict[str, dict[str, float]]()
    topics = 2 if quick else 6
    for router, by_prefix in (("by prefix", True), ("Serve's own", False)):
        url = deployed(model=model, replicas=2, by_prefix=by_prefix)
        found[router] = asyncio.run(_topics(url, topics, topics))
    return found


async def _topics(url: str, topics: int, times: int) -> dict[str, float]:
    asked = [(t, i) for t in range(topics) for i in range(times)]
    rng = random.Random(0)
    waited = []
    known = []
    cold = []
    rng.shuffle(asked)
    seen = set[int]()
    for topic, i in asked:
        prompt = f"Topic {topic}. " + " ".join(RULES[topic:]) + f" Question {i}:"
        body = {
            "prompt": prompt,
            "max_tokens": 2,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        began, came, events = await answer(url, "/v1/completions", body)
        usage = events[-1]["usage"]
        (waited if topic in seen else cold).append(came[0] - began)
        if topic in seen:
            known.append(usage["prompt_tokens_details"]["cached_tokens"] / usage["prompt_tokens"])
        seen.add(topic)
    return {"first_s": median(waited), "new_s": median(cold), "known": sum(known) / len(known)}


def modelled(found: list[Measured]) -> dict[int, float]:
    """Tokens a second of so many replicas with a core each, by the figures of one: more of them shared the cores here."""
    one = found[min(1, len(found) - 1)]
    full = 1 / one.of_busiest if one.of_busiest else math.inf
    return {n: min(n / one.of_replicas, full) for n in MODELLED}


def batches(model: str | None, *, quick: bool = False) -> list[dict[str, Any]]:
    """Tokens per processor second by batch: plainly, with a chain of four always, and with what the policy chooses, in turns."""
    ways: dict[str, dict[str, Any]] = {
        "plain": {"drafter": None},
        "chain of 4": {"depth": 4, "num_paths": 1},
        "policy": {},
    }
    made = Engine.embedded if model is None else lambda **more: Engine.from_pretrained(model, **more)
    engines = {
        name: made(max_num_seqs=BATCHES[-1], max_model_len=256, threads=1, **more)
        for name, more in ways.items()
    }
    rows = list[dict[str, Any]]()
    tokens = 8 if quick else 48
    for size in BATCHES[:2] if quick else BATCHES:
        rates = {name: list[float]() for name in engines}
        for turn in range(2 if quick else 5):
            for name, engine in engines.items():
                prompts = _prompts(model, size)
                params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, seed=turn)
                took = timing.seconds(partial(engine.generate, prompts, params), process_time)
                rates[name].append(size * tokens / took)
        rows.append(
            {"batch": size, **{name: median(each[1:]) for name, each in rates.items()}}
        )  # the first turn learns
    return rows


def gpu() -> list[dict[str, Any]]:
    """Best chains of a 1B draft for an 8B target on one H100, by batch, context and acceptance; rates and dollars."""
    rows = list[dict[str, Any]]()
    for acceptance in ACCEPTANCES:
        for context in CONTEXTS:
            for size in GPU_BATCHES:
                if (
                    size * context * (LLAMA_8B.cache_bytes + LLAMA_1B.cache_bytes) > 55e9
                ):  # of 80e9, beside the weights
                    continue
                asked: dict[str, Any] = {"batch": size, "context": context, "acceptance": acceptance}
                depth, gain = best_chain(H100, LLAMA_8B, LLAMA_1B, **asked)
                rate = batched_rate(H100, LLAMA_8B, LLAMA_1B, depth=0, **asked)
                cost = dollars(H100.dollars, rate)
                rows.append(
                    {
                        **asked,
                        "plain": rate,
                        "depth": depth,
                        "gain": gain,
                        "plain_cost": cost,
                        "cost": cost / gain,
                    }
                )
    return rows


def dollars(an_hour: float, tokens_per_second: float) -> float:
    """Of a million tokens."""
    return an_hour / 3600 / tokens_per_second * 1e6


def picture(report: dict[str, Any], path: Path) -> None:
    """Replicas, measured and modelled, where there were any; gains by batch, measured here and modelled for a GPU."""
    from matplotlib import pyplot as plt

    count = 3 if report["prefixes"] else 2
    figure, panels = plt.subplots(1, count, figsize=(4.4 * count, 4), layout="constrained")
    left = panels[0]
    middle = panels[-2]
    right = panels[-1]
    for model, part in report["served"].items() if count == 3 else ():
        ours = [row for row in part["measured"] if row["name"] != "polydraft serve"]
        (line,) = left.plot(
            [r["replicas"] for r in ours],
            [r["tokens_per_second"] for r in ours],
            "o-",
            label=f"{model}, measured",
        )
        left.plot(
            list(map(int, part["modelled"])),
            list(part["modelled"].values()),
            "--",
            color=line.get_color(),
            label=f"{model}, modelled",
        )
    if count == 3:
        left.set(xscale="log", yscale="log", xlabel="replicas", ylabel="tokens/s", title="replicas")
    for model, rows in report["batches"].items():
        for way in ("chain of 4", "policy"):
            middle.plot(
                [r["batch"] for r in rows], [r[way] / r["plain"] for r in rows], "o-", label=f"{model}, {way}"
            )
    middle.set(
        xscale="log",
        xlabel="sequences at a time",
        ylabel="speed over plain decoding",
        title="measured on one core",
    )
    for context in CONTEXTS:
        rows = [r for r in report["gpu"] if r["context"] == context and r["acceptance"] == ACCEPTANCES[-1]]
        right.plot(
            [r["batch"] for r in rows], [r["gain"] for r in rows], "o-", label=f"{context} tokens of context"
        )
    right.set(
        xscale="log",
        xlabel="sequences at a time",
        ylabel="speed over plain decoding",
        title="modelled: 8B with 1B on an H100",
    )
    for axes in panels:
        axes.legend(fontsize=7)
        axes.grid(alpha=0.3)
    middle.axhline(1, color="grey", linewidth=0.8)
    right.axhline(1, color="grey", linewidth=0.8)
    figure.savefig(path, dpi=100)
    plt.close(figure)


@app.callback(invoke_without_command=True)
def main(
    model: Annotated[
        list[str] | None, typer.Option(help="Beside the embedded pair; may be repeated.")
    ] = None,
    out: Out = Path("build/replicas"),
    quick: Quick = False,
    skip_ray: Annotated[bool, typer.Option("--skip-ray", help="Without replicas.")] = False,
) -> None:
    """Write replicas.json and replicas.png."""
    torch.set_num_threads(1)
    models = [None, *(model or [])]
    began = perf_counter()
    report: dict[str, Any] = {
        "provenance": provenance(),
        "served": {},
        "prefixes": {},
        "batches": {},
        "gpu": gpu(),
    }
    with nullcontext() if skip_ray else cluster() as deployed:
        for each in models:
            name = each or "embedded"
            found = served(each, deployed, quick=quick)
            report["served"][name] = {"measured": [vars(one) for one in found], "modelled": modelled(found)}
            if deployed is not None:
                report["prefixes"][name] = prefixes(each, deployed, quick=quick)
            write_json(report, out / "replicas.json")
    for each in models:
        report["batches"][each or "embedded"] = batches(each, quick=quick)
    write_json(report, out / "replicas.json")
    picture(report, out / "replicas.png")
    typer.echo(f"{perf_counter() - began:.0f} s", err=True)


if __name__ == "__main__":
    app()
