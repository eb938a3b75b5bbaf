"""`python -m studies.formats`: what each format of a real model's weights loses, and whether exact ones write transformers' greedy texts.

Divergence: over held-out conversations that the model wrote itself, sum p log p / q from transformers in float32, p, to the format's
distribution, q, at every token after the first; perplexity is of the tokens that follow. Greedy: a chat engine's answers at temperature 0, each
token held against the argmax of transformers' float32 pass over the text; near ties, closer than 1e-4 in logits, are counted.
"""

import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table

from polydraft.check.texts import check_distribution
from polydraft.cli.files import read_lines
from polydraft.core import SamplingParams
from polydraft.engine.api import Engine
from polydraft.models.compiled.llama import CompiledLlama
from polydraft.models.load import load_model, load_tokenizer
from polydraft.models.loading.folder import load_module
from studies.equal_bits import QUESTIONS, OwnDistribution
from studies.options import Quick

__all__ = ["divergence", "held_out", "main"]

HELD_OUT = Path(__file__).parent / "chat_head" / "00000.npz"
FORMATS = ("float32", "bfloat16", "bfloat16-dot", "int8", "int4")
QUANTIZED = {"float32": None}
LONGEST = 512


def held_out(tokens: int) -> Iterator[list[int]]:
    """Conversations that no head was trained on, cut at LONGEST, until there are so many tokens."""
    with np.load(HELD_OUT) as shard:
        texts = np.split(shard["tokens"], np.cumsum(shard["lengths"])[:-1])
    for text in texts:
        if tokens <= 0:
            return
        yield text[: min(LONGEST, tokens + 1)].tolist()
        tokens -= LONGEST if len(text) > LONGEST else len(text)


@torch.inference_mode()
def divergence(
    judge: Any, distributions: dict[str, OwnDistribution], texts: Sequence[list[int]]
) -> dict[str, tuple[float, float, float]]:
    """By format, and "transformers": mean divergence in nats, share of tokens with the same argmax, perplexity."""
    sums = {name: np.zeros(3) for name in ("transformers", *distributions)}
    count = 0
    for text in texts:
        ids, follows = torch.tensor([text]), torch.tensor(text[1:])[:, None]
        own = judge(ids).logits[0, :-1].double().log_softmax(-1)
        for name, total in sums.items():
            q = own if name == "transformers" else distributions[name](ids).logits[0, :-1].double().log_softmax(-1)
            lost = (own.exp() * (own - q)).sum(-1).sum()
            total += [float(lost), float((own.argmax(-1) == q.argmax(-1)).sum()), float(q.gather(1, follows).sum())]
        count += len(text) - 1
    return {name: (kl / count, same / count, math.exp(-said / count)) for name, (kl, same, said) in sums.items()}


def greedy(model: CompiledLlama, judge: Any, tokenizer: Any, questions: Sequence[str], max_tokens: int) -> dict[str, Any]:
    """Whether the engine's answers are the judge's."""
    engine = Engine.of(model, tokenizer=tokenizer, drafter=None)
    asked = [engine.encode_chat([{"role": "user", "content": text}]) for text in questions]
    answers = engine.generate(asked, SamplingParams(temperature=0, max_tokens=max_tokens))
    return check_distribution(judge, 0.0, ((r.prompt_token_ids, r.token_ids) for r in answers))


def main(
    model: Annotated[str, typer.Option(help="A chat model: a folder, FILE.gguf or a name.")] = "smollm2-135m-instruct",
    prompts: Annotated[Path | None, typer.Option(help="Questions, one a line; some of our own without it.")] = None,
    quick: Quick = False,
) -> None:
    """Print both tables."""
    torch.set_num_threads(1)
    judge, tokenizer = load_module(model, device="cpu"), load_tokenizer(model)
    questions = read_lines("--prompts", prompts) if prompts else list(QUESTIONS)
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("format", "divergence, nats", "same argmax", "perplexity"):
        table.add_column(title, justify="left" if title == "format" else "right")
    as_it_is: Any = load_model(model, activations="float32", max_model_len=LONGEST, max_num_seqs=4)
    distributions = {f"as it is ({as_it_is.weight_format})": OwnDistribution(as_it_is)}
    if as_it_is.weight_format not in FORMATS:  # blocks of a file, times rounded activations
        kept: Any = load_model(model, max_model_len=LONGEST, max_num_seqs=1)
        distributions["the file, activations of 8 bits"] = OwnDistribution(kept)
    halved = CompiledLlama(judge, cache_dtype="bfloat16", max_model_len=LONGEST, max_num_seqs=1)
    distributions["float32, keys and values in bfloat16"] = OwnDistribution(halved)
    for name in FORMATS:
        distributions[name] = OwnDistribution(
            CompiledLlama(judge, quantization=QUANTIZED.get(name, name), max_model_len=LONGEST, max_num_seqs=1)
        )
    texts = list(held_out(200 if quick else 6000))
    for name, (lost, same, perplexity) in divergence(judge, distributions, texts).items():
        table.add_row(name, f"{lost:.2g}", f"{100 * same:.1f}%", f"{perplexity:.3f}")
    console = Console() if sys.stdout.isatty() else Console(width=120)
    console.print(table)
    console.print(f"{sum(map(len, texts)) - len(texts)} tokens of {len(texts)} held-out conversations", highlight=False)
    del distributions
    for name in ("as it is", "rounded to bfloat16"):
        if name != "as it is":
            for weight in judge.parameters():
                weight.data = weight.data.bfloat16().float()
            as_it_is = CompiledLlama(judge, max_model_len=LONGEST, max_num_seqs=4)
        found = greedy(as_it_is, judge, tokenizer, questions, 8 if quick else 96)
        console.print(
            f"greedy, {name} ({as_it_is.weight_format}): {found['tokens']} tokens of {len(questions)} answers, "
            f"{found['wrong']} differ, {found['near_ties']} near ties",
            highlight=False,
        )


if __name__ == "__main__":
    typer.run(main)
