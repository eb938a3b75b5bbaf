"""`python -m studies.speed_bench CLIENT --prompts question.jsonl`: llama.cpp's client of SPEED-Bench, unchanged, reads this server's answers.

CLIENT is `tools/server/bench/speed-bench/speed_bench.py` of llama.cpp's source, which `python -m studies.peers` fetches. It needs `requests` and `tqdm`;
its questions come from a file, as `hub/datasets.py` stands in for the hub's library. It runs against a server without drafts and one with them, behind
some chats of which drafts are compiled, prints its table of each, and its program beside it compares them. What it read has to be what the servers counted. `--llama-server` adds llama.cpp's own.

category, avg_pred_t/s, accept_rate   the client's columns: its README says what they are
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import sleep
from typing import Annotated, Any, NamedTuple
from urllib.request import Request, urlopen

import typer

from polydraft.errors import PolydraftError
from polydraft.models.store.catalogue import MODELS, cached
from studies import question_files
from studies.load.servers import serving
from studies.options import Out, Quick
from studies.peers import LlamaServer, flags
from studies.speed_bench.hub.datasets import FILE

HUB = Path(__file__).parent / "hub"
PLAIN = "plain"
WARM_CHATS = 30
"""At most; those that only copy from their own text may never draft in short chats."""
CONTEXT = 4096
"""Tokens of llama.cpp's cache; the longest question of Spec-Bench has 1,600."""
COUNTERS = {
    "prompt_tokens": "vllm:prompt_tokens_total",
    "completion_tokens": "vllm:generation_tokens_total",
    "draft_n": "vllm:spec_decode_num_draft_tokens_total",
    "draft_n_accepted": "vllm:spec_decode_num_accepted_tokens_total",
}
"""What the client sums, and the server's counter of the same."""


class Asked(NamedTuple):
    """What the client is told. limit: questions of each category.  max_tokens: of an answer, at most."""

    prompts: Path
    limit: int
    max_tokens: int
    temperature: float
    concurrency: int


def run_client(client: Path, url: str, asked: Asked, out: Path) -> list[dict[str, Any]]:
    """Runs the client, which writes `out` and prints its table; its results, one of each question.

    Raises:
        PolydraftError: it ended with an error, which is above.
    """
    command = [
        *(sys.executable, client, "--url", url, "--bench", asked.prompts.stem),
        *("--osl", str(asked.max_tokens), "--limit", str(asked.limit)),
        *("--concurrency", str(asked.concurrency), "--output", out),
        *("--extra-inputs", json.dumps({"temperature": asked.temperature})),
    ]
    environment = {**os.environ, FILE: str(asked.prompts.resolve()), "PYTHONPATH": str(HUB)}
    if subprocess.run(command, env=environment, check=False).returncode:
        raise PolydraftError(f"{client} ended with an error, which is above. Install requests and tqdm.")
    return json.loads(out.read_text(encoding="utf-8"))["results"]


def counted(url: str) -> dict[str, int]:
    """What a server counted so far, by the client's names."""
    with urlopen(f"{url}/metrics") as answer:
        text = answer.read().decode()
    found = {
        name: re.findall(rf"^{re.escape(family)}{{[^}}]*}} (\S+)$", text, re.MULTILINE)
        for name, family in COUNTERS.items()
    }
    return {name: int(sum(map(float, values))) for name, values in found.items()}


def read_and_counted(
    client: Path, url: str, asked: Asked, out: Path
) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """The client's results, and what the server counted meanwhile."""
    before = counted(url)
    results = run_client(client, url, asked, out)
    return results, {name: count - before[name] for name, count in counted(url).items()}


def differences(
    results: Sequence[Mapping[str, Any]], counts: Mapping[str, int]
) -> dict[str, tuple[int, int]]:
    """What the client summed and what the server counted, where these differ.

    Example:
        >>> differences([{"draft_n": 3}, {"draft_n": 4}], {"draft_n": 8})
        {'draft_n': (7, 8)}
    """
    sums = {name: sum(result[name] for result in results) for name in counts}
    return {name: (sums[name], counts[name]) for name in counts if sums[name] != counts[name]}


def warm(url: str, *, drafts: bool) -> None:
    """Short chats until a server drafts, which it does once drafts are compiled and it had time to measure costs."""
    for turn in range(WARM_CHATS):
        question = question_files.QUESTIONS[turn % len(question_files.QUESTIONS)].text
        body = {"messages": [{"role": "user", "content": question}], "max_tokens": 32, "temperature": 0}
        asked = Request(f"{url}/v1/chat/completions", json.dumps(body).encode())
        asked.add_header("Content-Type", "application/json")
        with urlopen(asked) as answer:
            timings = json.load(answer)["timings"]
        if not drafts or timings["draft_n"]:
            break
        sleep(1)  # costs are measured while nobody asks


def ours(client: Path, name: str, arguments: Sequence[str], asked: Asked, out: Path) -> Path:
    """The client against a server of our own; its file.

    Raises:
        PolydraftError: the client read other figures than the server counted.
    """
    file = out / f"{name}.json"
    with serving(*arguments) as server:
        warm(server.url, drafts=name != PLAIN)
        results, counts = read_and_counted(client, server.url, asked, file)
    if wrong := differences(results, counts):
        raise PolydraftError(f"{name}: the client read other figures than the server counted: {wrong}.")
    print(f"{name}: {counts}, by the client and by the server's counters\n", flush=True)
    return file


def main(
    client: Annotated[Path, typer.Argument(help="speed_bench.py of llama.cpp.")],
    prompts: Annotated[Path, typer.Option(help="Spec-Bench's question.jsonl, or a file like it.")],
    model: Annotated[
        str, typer.Option(help="A name of `polydraft models`, a folder or a file.")
    ] = "smollm2-135m-instruct",
    draft_model: Annotated[str | None, typer.Option()] = None,
    drafter: Annotated[str, typer.Option(help="A name of `polydraft methods`.")] = "auto",
    limit: Annotated[int, typer.Option(help="Questions of each category.")] = 2,
    max_tokens: Annotated[int, typer.Option()] = 64,
    temperature: Annotated[float, typer.Option()] = 0.0,
    concurrency: Annotated[int, typer.Option(help="Requests at the same time.")] = 1,
    threads: Annotated[int, typer.Option()] = 1,
    llama_server: Annotated[Path | None, typer.Option(help="llama.cpp's, on the same file.")] = None,
    out: Out = Path("build/speed-bench"),
    quick: Quick = False,
) -> None:
    """The client's tables."""
    if quick:
        limit = 1
        max_tokens = 8
    out.mkdir(parents=True, exist_ok=True)
    asked = Asked(prompts, limit, max_tokens, temperature, concurrency)
    common = ["--model", model, "--threads", str(threads)]
    drafts = ["--drafter", drafter, *(["--draft-model", draft_model] if draft_model else [])]
    plain = ours(client, PLAIN, [*common, "--drafter", "none"], asked, out)
    drafted = ours(client, "drafts", [*common, *drafts], asked, out)
    compare = client.with_name("speed_bench_compare.py")
    command = [sys.executable, compare, "--baseline", plain, "--speculative", drafted]
    environment = {**os.environ, FILE: str(prompts.resolve()), "PYTHONPATH": str(HUB)}
    subprocess.run(command, env=environment, check=True)
    if llama_server is not None:
        file = cached(MODELS[model]) if model in MODELS else Path(model)
        assert file is not None, f"{model} is not on this machine"
        options = flags(file, threads, CONTEXT * concurrency, None, "plain", 0)
        peer = LlamaServer(llama_server, [*options, "-np", str(concurrency)])
        try:
            print("\nllama.cpp's own server, without drafts", flush=True)
            run_client(client, f"http://127.0.0.1:{peer.port}", asked, out / "llama.cpp.json")
        finally:
            peer.close()


if __name__ == "__main__":
    typer.run(main)
