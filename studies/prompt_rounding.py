"""`python -m studies.prompt_rounding FILE --prompts FILE`: what the rounding of activations and of the cache costs where a text is read as a prompt.

Every token of each text is read by the model with activations and cache in float32, with activations in bytes, and as a matrix unit reads a prompt,
emulated where a processor of AVX-512 has none: activations and decoded weights in bfloat16. Compared are the distributions behind each token.
"""

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from polydraft.bench.record import markdown_table, write_texts
from polydraft.core import TokenTree
from polydraft.models import load
from polydraft.models.matrices.matrix_unit import has_matrix_unit
from polydraft.models.matrices.vectors import LANES
from polydraft.models.slots import TREE_ROOM
from studies.options import Quick
from studies.question_files import questions
from tests.support.emulated_unit import emulated

UNIT = "prompts by the matrix unit"
WAYS: dict[str, dict[str, Any]] = {
    "float32": {"activations": "float32", "cache_dtype": "float32"},
    "activations in bytes": {"activations": "int8", "cache_dtype": "float32"},
    "the same, cache in bfloat16": {"activations": "int8", "cache_dtype": "bfloat16"},
    UNIT: {"activations": "int8", "cache_dtype": "bfloat16"},
}
"""The first is what others are compared with. The unit attends in bfloat16, too."""


def log_probabilities(model: Any, text: list[int], num_prompt: int) -> np.ndarray:
    """[T, V] behind each token of a text, whose first so many stand in a prompt."""
    model.set_prompt_length(0, num_prompt)
    rows = list[np.ndarray]()
    for begin in range(0, len(text), TREE_ROOM):
        piece = text[begin : begin + TREE_ROOM]
        logits = model.score([0], TokenTree.chain(np.array([piece]))).logits[0].astype(np.float64)
        rows.append(logits - np.logaddexp.reduce(logits, -1, keepdims=True))
        model.prefill([0], [piece])
    model.release([0])
    return np.concatenate(rows)


def differences(ours: np.ndarray, theirs: np.ndarray, text: list[int]) -> np.ndarray:
    """[T-1, 3] divergence KL(theirs, ours), |difference| of the next token's log-probability, whether the likeliest token is the same."""
    divergence = (np.exp(theirs) * (theirs - ours)).sum(-1)[:-1]
    following = np.arange(len(text) - 1), text[1:]
    apart = np.abs(ours[following] - theirs[following])
    same = ours.argmax(-1)[:-1] == theirs.argmax(-1)[:-1]
    return np.stack([divergence, apart, same], 1)


HEAD = ("read with", "tokens", "KL, nats a token", "difference of log-probabilities, mean", "same argmax")


def line(way: str, found: np.ndarray) -> tuple[str, ...]:
    """Of the table. found: `differences` of all tokens."""
    divergence, apart, same = found.mean(0)
    error = found[:, 0].std() / len(found) ** 0.5
    return way, f"{len(found):,}", f"{divergence:.2e} ± {error:.0e}", f"{apart:.4f}", f"{100 * same:.1f}%"


def main(
    model: Annotated[str, typer.Argument(help="A GGUF file, or a folder.")],
    prompts: Annotated[Path, typer.Option(help="Questions, see `question_files`.")],
    count: Annotated[int, typer.Option(help="Of each category.")] = 5,
    out: Annotated[Path | None, typer.Option(help="Where the table goes, as Markdown.")] = None,
    quick: Quick = False,
) -> None:
    """Compare ways to read a prompt."""
    ways = {way: options for way, options in WAYS.items() if way != UNIT or LANES == 16}
    rows = {way: list[np.ndarray]() for way in ways}
    models = dict[str, Any]()
    for way, options in ways.items():
        with emulated() if way == UNIT and not has_matrix_unit() else nullcontext():
            models[way] = load.load_model(model, max_num_seqs=1, **options)
    tokenizer = load.load_tokenizer(model)
    for question in questions([prompts], 1 if quick else count):
        ids = tokenizer(question.text)["input_ids"][: 64 if quick else 512]
        exact, *others = (log_probabilities(models[way], ids, len(ids) if way == UNIT else 0) for way in ways)
        for way, found in zip([*ways][1:], others, strict=True):
            rows[way].append(differences(found, exact, ids))
    printed = markdown_table(HEAD, [line(way, np.concatenate(rows[way])) for way in [*ways][1:]])
    typer.echo(printed)
    if out is not None:
        write_texts({out: printed})


if __name__ == "__main__":
    typer.run(main)
