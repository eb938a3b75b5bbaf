"""`python -m studies.inside_vllm FOLDER`: vLLM without drafts, with its own speculation and with polydraft's, in one interleaved run.

FOLDER is what `polydraft models export MODEL --head shipped --out FOLDER` writes. To be run with the interpreter that has vLLM
(`.venv-vllm/bin/python`). Every contender is a vLLM in a process of its own; each answers each question in turn, one at a time and then
all together, on the first core. Rates are tokens per processor second, prompts included; ratios are medians of those within a round.
"""

from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from polydraft.bench.record import markdown_table
from polydraft.integrations.vllm import VERIFIER
from polydraft.models.load import load_tokenizer
from studies.inside_vllm.engine import VLLM
from studies.options import Out, Quick, write_json

PLAIN = "without drafts"
DRAFTERS = "polydraft.integrations.vllm.drafters"

QUESTIONS = (
    "What is the capital of France, and what is it known for?",
    "Write a short poem about the sea.",
    "Explain in simple words why the sky is blue.",
    "Write a Python function that adds two numbers, and one that multiplies them.",
    "Correct the spelling of this text and write it out again: I recieved you're mesage yesterday and it maked me very hapy.",
)


def contenders(folder: Path) -> dict[str, tuple[dict[str, Any] | None, str]]:
    """Speculative configuration and rule of each, by name."""
    head = {
        "method": "eagle3",
        "model": str(folder / "head"),
        "num_speculative_tokens": 2,
        "draft_sample_method": "probabilistic",
    }
    ngram = {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4, "num_speculative_tokens": 4}

    def ours(name: str) -> dict[str, Any]:
        return {"method": "custom_class", "model": f"{DRAFTERS}.{name}", "num_speculative_tokens": 4}

    return {
        PLAIN: (None, ""),
        "vLLM's ngram": (ngram, ""),
        "vLLM's eagle3": (head, ""),
        "ngram, match": (ours("ngram"), "match"),
        "suffix, match": (ours("suffix"), "match"),
        "mixture, match": (ours("mixture"), "match"),
        "eagle3, block": (head, "block"),
    }


def _row(
    name: str, temperature: float, streams: int, runs: dict[str, list[dict[str, Any]]]
) -> dict[str, Any]:
    def rate(run: dict[str, Any]) -> float:
        return sum(map(len, run["outputs"])) / run["cpu_seconds"]

    mine = runs[name]
    plain = runs[PLAIN]
    drafts = sum(run["drafts"] for run in mine)
    kept = [sum(at) for at in zip(*(run["accepted"] for run in mine if run["accepted"]), strict=False)]
    same = sum(a["outputs"] == b["outputs"] for a, b in zip(mine, plain, strict=True))
    return {
        "temperature": temperature,
        "streams": streams,
        "contender": name,
        "tokens_per_second": median(map(rate, mine)),
        "over_plain": median(rate(a) / rate(b) for a, b in zip(mine, plain, strict=True)),
        "accepted": [count / drafts for count in kept] if drafts else [],
        "same_texts": same / len(mine),
    }


def _encoded(tokenizer: Any, question: str) -> list[int]:
    """As the model's chat template puts it, where it has one."""
    if not getattr(tokenizer, "chat_template", None):
        return tokenizer.encode(question)
    asked = [{"role": "user", "content": question}]
    return tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=True, return_dict=False)


def main(
    folder: Annotated[Path, typer.Argument(help="Of `polydraft models export`, with its head.")],
    out: Out = Path("build/inside_vllm"),
    tokens: Annotated[int, typer.Option(help="Of each answer.")] = 96,
    repetitions: Annotated[int, typer.Option(help="Of each question.")] = 3,
    only: Annotated[
        list[str] | None, typer.Option(help="Contenders beside the plain one; default all.")
    ] = None,
    quick: Quick = False,
) -> None:
    """Measure, and print a table."""
    tokenizer = load_tokenizer(str(folder))
    prompts = [_encoded(tokenizer, question) for question in QUESTIONS[: 1 if quick else None]]
    tokens, repetitions = (8, 1) if quick else (tokens, repetitions)
    chosen = {
        n: c for n, c in contenders(folder.absolute()).items() if n == PLAIN or only is None or n in only
    }
    served: dict[str, VLLM] = {}
    rows: list[dict[str, Any]] = []
    try:
        for name, (speculative, rule) in chosen.items():
            typer.echo(f"starting vLLM: {name}", err=True)
            options: dict[str, Any] = {} if speculative is None else {"speculative_config": speculative}
            environment = {VERIFIER: rule, "VLLM_CPU_OMP_THREADS_BIND": "0"}
            served[name] = VLLM(
                folder,
                environment=environment,
                dtype="bfloat16",
                max_model_len=1024,
                max_num_seqs=len(prompts),
                **options,
            )
        for temperature in (0.0, 1.0):
            for batches in ([[p] for p in prompts], [prompts]):
                runs: dict[str, list[dict[str, Any]]] = {name: [] for name in served}
                for repetition in range(-1, repetitions):  # the first compiles
                    for batch in batches:
                        for name in list(served)[:: 1 if repetition % 2 else -1]:
                            run = served[name].generate(batch, temperature=temperature, max_tokens=tokens)
                            if repetition >= 0:
                                runs[name].append(run)
                rows += [_row(name, temperature, len(batches[0]), runs) for name in served]
    finally:
        for each in served.values():
            each.close()
    write_json({"rows": rows}, out / "inside_vllm.json")
    head = ["temperature", "streams", "", "tokens/s", "over plain", "accepted by position", "the plain texts"]
    typer.echo(markdown_table(head, map(_cells, rows)))


def _cells(row: dict[str, Any]) -> list[Any]:
    """Of a line of the table."""
    accepted = " ".join(f"{a:.2f}" for a in row["accepted"]) or "-"
    texts = f"{row['same_texts']:.0%}" if row["temperature"] == 0 else "-"
    speed = f"{row['tokens_per_second']:.1f}", f"{row['over_plain']:.2f}"
    return [f"{row['temperature']:.0f}", row["streams"], row["contender"], *speed, accepted, texts]


if __name__ == "__main__":
    typer.run(main)
