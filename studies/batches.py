"""`python -m studies.batches --model FOLDER`: reading a prompt, and sequences side by side, by format of the weights.

A prompt of 1,000 tokens is read from nothing; transformers makes the logits of its last token alone, in bfloat16 and in float32. Batches
decode plainly and greedily. All formats take turns; figures are the best of the turns.
"""

from functools import partial
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table

from polydraft import Engine, SamplingParams
from polydraft.models import load
from studies.options import Quick
from studies.timing import by_turns, seconds

FORMATS = (None, "int8", "int4")
BATCHES = (1, 2, 4, 8, 16)


def _ids(count: int, vocab_size: int) -> list[int]:
    return np.random.default_rng(0).integers(10, vocab_size, count).tolist()


@torch.inference_mode()
def prompts(folder: str, length: int, turns: int) -> dict[str, float]:
    """Seconds to read a prompt, by format and by transformers' number format."""
    from transformers import AutoModelForCausalLM

    ours = {str(f): load.load_model(folder, device="cpu", max_num_seqs=1, quantization=f) for f in FORMATS}
    theirs = {
        d: AutoModelForCausalLM.from_pretrained(folder, dtype=d).eval()
        for d in (torch.bfloat16, torch.float32)
    }
    ids = _ids(length, ours["None"].vocab_size)
    reads = {name: partial(_read, model, ids) for name, model in ours.items()}
    for dtype, model in theirs.items():
        name = f"transformers {dtype}".replace("torch.", "")
        reads[name] = partial(model, torch.tensor([ids]), logits_to_keep=1)
    return {name: min(each) for name, each in by_turns(reads, turns, warm=0).items()}


def _read(model: Any, ids: list[int]) -> None:
    model.prefill([0], [ids])
    model.release([0])


def batches(
    folder: str, quantization: str | None, num_tokens: int, turns: int, cache_dtype: str | None = None
) -> tuple[dict[int, float], int]:
    """Tokens per second by number of sequences, prompts of 32 tokens read on the way; and the bytes of the cache of 16 slots."""
    options: dict[str, Any] = {"quantization": quantization, "cache_dtype": cache_dtype, "threads": 1}
    engine = Engine.from_pretrained(
        folder, drafter=None, max_num_seqs=max(BATCHES), max_model_len=512, **options
    )
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    texts = np.array(_ids(16 * 32, 2000)).reshape(16, 32)
    found: dict[int, float] = dict.fromkeys(BATCHES, 0.0)
    for _ in range(turns):
        for b in BATCHES:
            rate = b * num_tokens / seconds(partial(engine.generate, texts[:b].tolist(), params))
            found[b] = max(found[b], rate)
    return found, engine.target.cache_bytes  # pyright: ignore[reportAttributeAccessIssue]


def main(
    model: Annotated[str, typer.Option(help="Folder of a model of the Llama family, weights in bfloat16.")],
    quick: Quick = False,
) -> None:
    """Print both tables."""
    torch.set_num_threads(1)
    console = Console(width=120)
    turns = 1 if quick else 4
    table = Table("read by", "ms", "tokens/s", title="a prompt of 1,000 tokens", box=None)
    for name, took in prompts(model, 100 if quick else 1000, turns).items():
        table.add_row(
            "bfloat16" if name == "None" else name,
            f"{1e3 * took:.0f}",
            f"{(100 if quick else 1000) / took:.0f}",
        )
    console.print(table)
    table = Table("format", *map(str, BATCHES), "cache, MB", title="tokens/s of so many sequences", box=None)
    for name, cache in ((None, None), ("int8", None), ("int4", None), ("int4", "bfloat16")):
        rates, size = batches(model, name, 4 if quick else 48, 1 if quick else 3, cache)
        table.add_row(
            (name or "bfloat16") + (f", {cache} cache" if cache else ""),
            *(f"{rate:.0f}" for rate in rates.values()),
            f"{size / 1e6:.0f}",
        )
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
