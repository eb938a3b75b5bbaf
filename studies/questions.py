"""`python -m studies.questions`: five questions to a chat model, plainly and with drafts, in one interleaved run on one thread.

Greedy. Every text has to be the one without drafts. Rates are tokens per CPU second without the prefill, which is kept from one repetition to the
next; of each question the median over the repetitions, in which the ways take turns.
"""

from collections.abc import Sequence
from statistics import median
from typing import Annotated, Any

import torch
import typer

from polydraft import Engine, SamplingParams
from polydraft.engine.stats import RequestStats
from studies.options import Quick

QUESTIONS = (
    "What is the capital of France, and what is it known for?",
    "Write a short poem about the sea.",
    "Explain in simple words why the sky is blue.",
    "Write a Python function that adds two numbers, and one that multiplies them.",
    "Correct the spelling of this text and write it out again: I recieved you're mesage yesterday and it maked me very hapy.",
)


def measured(
    engines: dict[str, Any], questions: Sequence[str], *, max_tokens: int, repetitions: int
) -> dict[tuple[str, str], list[RequestStats]]:
    """Statistics of each way and question. The first way is the plain one.

    Raises:
        AssertionError: a text that is not the plain one.
    """
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    found = dict[tuple[str, str], list[RequestStats]]()
    texts = {}
    for repetition in range(-1, repetitions):
        for question in questions[: 1 if repetition < 0 else None]:
            for way in list(engines)[:: 1 if repetition % 2 else -1]:
                result = engines[way].chat([{"role": "user", "content": question}], params)
                assert texts.setdefault(question, result.token_ids) == result.token_ids, (
                    f"{way} changed the answer to {question!r}"
                )
                if repetition >= 0:
                    found.setdefault((way, question), []).append(result.stats)
    return found


def _decoding(stats: RequestStats) -> float:
    return stats.total_seconds - stats.seconds["prefill"]


def main(
    model: Annotated[
        str, typer.Option(help="A name of `polydraft models`, a folder or a file.")
    ] = "smollm2-135m-instruct",
    quantization: Annotated[
        str | None, typer.Option(help="Format of the weights; default the file's own.")
    ] = None,
    drafter: Annotated[
        list[str] | None, typer.Option(help="Drafters beside none; default ngram and the model's default.")
    ] = None,
    repetitions: int = 3,
    quick: Quick = False,
) -> None:
    """Print a table."""
    torch.set_num_threads(1)
    ways = {"plain": None} | {name: name for name in drafter or ["ngram", "auto"]}
    options: dict[str, Any] = {"quantization": quantization} if quantization else {}
    engines = {
        way: Engine.from_pretrained(
            model, drafter=name, max_num_seqs=1, max_model_len=1024, threads=1, **options
        )
        for way, name in ways.items()
    }
    asked = QUESTIONS[:1] if quick else QUESTIONS
    found = measured(engines, asked, max_tokens=8 if quick else 128, repetitions=1 if quick else repetitions)
    print(f"| question | {' | '.join(f'{way}: passes, tokens/s, over plain' for way in ways)} |")
    print("|---|" + "---|" * len(ways))
    gains = {way: list[float]() for way in ways}
    for question in asked:
        cells = list[str]()
        for way in ways:
            pairs = list(zip(found["plain", question], found[way, question], strict=True))
            gains[way].append(median(_decoding(p) / _decoding(s) for p, s in pairs))
            rate = median(s.generated_tokens / _decoding(s) for _, s in pairs)
            cells.append(f"{pairs[0][1].steps}, {rate:.0f}, {gains[way][-1]:.2f}x")
        print(f"| {question} | {' | '.join(cells)} |", flush=True)
    print(f"median over plain: {', '.join(f'{way} {median(gain):.2f}x' for way, gain in gains.items())}")


if __name__ == "__main__":
    typer.run(main)
