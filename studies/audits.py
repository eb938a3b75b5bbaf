"""Servers tested from outside by `polydraft check --url`: llama.cpp's with and without its speculation, ours, and ours made wrong on purpose.

    python -m studies.audits [--steps 960] [--only PART OF A NAME]

Each row is one server and one temperature; the command's own JSON is in docs/results/audits.csv. llama.cpp's server is that of the `xllamacpp` wheel.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from polydraft.bench.llama_cpp import LlamaCpp, write_gguf
from polydraft.bench.record import csv_table, markdown_table, write_texts
from polydraft.models import load as models
from polydraft.models import pair
from polydraft.models.store.hub import located
from polydraft.models.torch.module import load_module

RESULTS = Path(__file__).parents[1] / "docs" / "results"
MODEL = "smollm2-135m-instruct"
CONTEXT = 4096
FIELDS: Sequence[str] = ("server", "temperature", "status", "tokens_status", "logprobs_status", "tokens", "texts", "p_value", "detectable", "first_difference_token", "first_difference_margin", "near_ties", "logprob_difference", "logprobs_off")  # fmt: skip


@contextmanager
def llama_cpp(lookup: str | None) -> Iterator[str]:
    """The address of llama.cpp's server."""
    server = LlamaCpp(Path(located(MODEL)), context=CONTEXT, num_threads=1, lookup=lookup)
    yield server.server.listening_address


@contextmanager
def llama_cpp_pair(drafts: bool) -> Iterator[str]:
    """The address of llama.cpp's server with the embedded pair's target model, and perhaps its draft model, in float32."""
    with TemporaryDirectory() as folder:
        files = [Path(folder) / name for name in ("target.gguf", "draft.gguf")]
        for file, source in zip(files, (pair.target_folder(), pair.draft_folder()), strict=True):
            write_gguf(load_module(str(source)), models.load_tokenizer(str(source)), file, "F32")
        server = LlamaCpp(files[0], files[1] if drafts else None, context=1024)
        yield server.server.listening_address


@contextmanager
def ours(*given: str, model: str = MODEL) -> Iterator[str]:
    """The address of `polydraft serve`."""
    command = [sys.executable, "-m", "polydraft", "serve", "--model", model, "--port", "0", *given]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as running:
        assert running.stderr is not None
        line = next(line for line in running.stderr if line.startswith("http://"))
        yield line.split(",")[0]
        running.terminate()


SERVERS: dict[str, Any] = {
    "llama.cpp": lambda: llama_cpp(None),
    "llama.cpp, ngram_simple": lambda: llama_cpp("NGRAM_SIMPLE"),
    "llama.cpp, embedded pair without drafts": lambda: llama_cpp_pair(False),
    "llama.cpp, embedded pair with its draft model": lambda: llama_cpp_pair(True),
    "polydraft, plain": lambda: ours("--drafter", "none"),
    "polydraft, ngram": lambda: ours("--drafter", "ngram", "--depth", "4"),
    "polydraft, ngram, typical acceptance (wrong on purpose)": lambda: ours(
        "--drafter", "ngram", "--depth", "4", "--verifier", "typical"
    ),
    "polydraft, embedded pair with its draft model": lambda: ours(
        "--drafter", "model:chain", "--depth", "4", model="embedded"
    ),
    "polydraft, embedded pair, typical acceptance (wrong on purpose)": lambda: ours(
        "--drafter", "model:chain", "--depth", "4", "--verifier", "typical", model="embedded"
    ),
}


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m studies.audits")
    parser.add_argument("--steps", type=int, default=960)
    parser.add_argument("--only", default="", help="part of a server's name: the figures are printed alone")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    rows = list[dict[str, Any]]()
    steps = chosen.steps
    for name, serving in SERVERS.items():
        if chosen.only not in name:
            continue
        model = "embedded" if "embedded pair" in name else MODEL
        with serving() as url:
            for temperature in (0, 1):
                verdict = audited(url, temperature, steps, model=model, seed=chosen.seed)
                rows.append({"server": name, "temperature": temperature, **verdict})
                print(rows[-1], flush=True)
    if chosen.only:
        return
    table = csv_table(FIELDS, ([row.get(name) for name in FIELDS] for row in rows))
    write_texts({RESULTS / "audits.csv": table, RESULTS / "audits.md": page(rows, steps)})


def audited(url: str, temperature: float, steps: int, *, model: str = MODEL, seed: int = 0) -> dict[str, Any]:
    """What the command says of a server."""
    command = [
        sys.executable,
        "-m",
        "polydraft",
        "check",
        "--url",
        url,
        "--model",
        model,
        "--temperature",
        str(temperature),
    ]
    done = subprocess.run(
        [*command, "--steps", str(steps), "--seed", str(seed), "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    if not done.stdout:
        raise RuntimeError(done.stderr)
    found = json.loads(done.stdout)
    first = min(found["differences"], key=lambda one: one["position"], default={"position": "", "margin": ""})
    verdicts = {f"{what}_status": found[f"{what}_verdict"]["status"] for what in ("tokens", "logprobs")}
    return {
        **found,
        **verdicts,
        "first_difference_token": first["position"],
        "first_difference_margin": first["margin"],
    }


def page(rows: Sequence[dict[str, Any]], steps: int) -> str:
    """docs/results/audits.md: a line for each server."""
    lines = [
        "# Servers tested from outside",
        "",
        f"`python -m studies.audits --steps {steps}`: `polydraft check --url` on servers of {MODEL}, 4-bit weights, and of the embedded pair in float32, against a forward",
        f"pass of transformers in float32 over the same weights. llama.cpp is that of xllamacpp {version('xllamacpp')}. Eight prompts of Python code, 32 tokens a text.",
        "",
        "Are the sampled tokens lossless at each temperature? *Would have seen*: the total variation distance that so many tokens show with probability 0.9.",
        "*Log-probabilities*: the verdict on those that the server reports at temperature 1, with their mean difference from the model's.",
        "[p-values, near ties, temperature 0](audits.csv).",
        "",
    ]
    head = ["server", "T = 0", "T = 1", "tokens", "would have seen", "log-probabilities", "differ by"]
    cells = list[list[Any]]()
    for cold, hot in zip(rows[::2], rows[1::2], strict=True):
        seen = "" if hot["detectable"] is None else f"{hot['detectable']:.2g}"
        noise = "" if hot["logprob_difference"] is None else f"{hot['logprob_difference']:.2g}"
        tested = [hot["server"], cold["tokens_status"], hot["tokens_status"], hot["tokens"], seen]
        cells.append([*tested, hot["logprobs_status"], noise])
    lines += [
        markdown_table(head, cells),
        "",
        "*Inconclusive*: nothing was found, and fewer tokens than a deviation of 0.1 needs were asked for; `--steps 1600` is enough. Drafts that are looked up in the text are",
        "seldom accepted, so a wrong acceptance changes few tokens. With a draft model 1,600 tokens find typical acceptance (`tests/check/test_audit.py`). At temperature 0 it is",
        "exact matching, and passes.",
        "",
        "With a draft model llama.cpp's tokens show no deviation, but the log-probabilities that it reports are not those of its model. Without drafts they are.",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
