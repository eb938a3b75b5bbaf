"""`python -m studies.passages`: NEST on documentation strings of the standard library, or on a text of one's own (`--corpus FILE`).

Nine tenths of the corpus are stored, the last tenth is held out.

    perplexity   of held-out tokens, under the target's distribution and under the mixture, by alpha
    quoted       share of generated tokens that stand in a passage         deviation   of the relaxed test, exact: total variation a token where
                 the nearest hit's value is drafted
"""

import ast
from pathlib import Path
from tempfile import TemporaryDirectory
from time import process_time
from typing import Annotated, Any

import torch
import typer

from polydraft import Engine, SamplingParams, TokenTree
from polydraft.models import load, pair
from polydraft.papers.nest.lenient import deviation
from polydraft.papers.nest.nearest import Nearest
from polydraft.papers.nest.passages import Passages
from studies.embedded_pair.held_out import standard_library
from studies.options import Out, Quick, write_json

__all__ = ["docstrings", "main"]

WINDOW = 160


def docstrings(most: int) -> list[tuple[str, str]]:
    """Documentation strings of the standard library's modules, classes and functions, a document a module."""
    found = list[tuple[str, str]]()
    for document in standard_library()[:most]:
        nodes = ast.walk(ast.parse(document.text))
        said = [ast.get_docstring(node) for node in nodes if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))]
        text = "\n\n".join(x for x in said if x)
        found += [(document.path, text)] if len(text) > 200 else []
    return found


def of_rows(distribution: Nearest, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Log-probabilities of the tokens behind the first under the target and under the mixture, and the relaxed test's mean deviation."""
    target, tree = distribution.target, TokenTree.chain(torch.tensor([ids]))
    try:
        scores = target.score([0], tree, hidden=(distribution.layer,))
    finally:
        target.release([0])
    plain, mixture = scores.logits.log_softmax(-1)[0, :-1], distribution(scores, tree, [ids[:1]])[0, :-1]
    wanted, states = torch.tensor(ids[1:])[:, None], scores.hidden[distribution.layer][0].numpy()
    hits = [distribution.hits(ids[: n + 1], states[n]) for n in range(len(ids) - 1)]
    p = mixture.double().exp()
    moved = [float(deviation(row, row[h.tokens[0]])) for row, h in zip(p, hits, strict=True) if h is not None]
    return plain.gather(1, wanted)[:, 0], mixture.gather(1, wanted)[:, 0], sum(moved) / max(len(moved), 1)


def main(
    out: Out = Path("build/passages"),
    corpus: Annotated[Path | None, typer.Option(help="A text; documentation strings without it.")] = None,
    model: Annotated[str | None, typer.Option(help="The target; the embedded one without it.")] = None,
    tokens: Annotated[int, typer.Option(help="Stored, at most.")] = 60_000,
    quick: Quick = False,
) -> None:
    """Write passages.json."""
    torch.set_num_threads(1)
    name = model or str(pair.target_folder())
    target, tokenizer = (
        load.load_model(name, device="cpu", max_num_seqs=4, max_model_len=512, threads=1),
        load.load_tokenizer(name),
    )
    target.vocab_size = load.num_token_ids(tokenizer, target.vocab_size)
    texts = docstrings(20 if quick else 400) if corpus is None else [(corpus.name, corpus.read_text(encoding="utf-8"))]
    documents = [(source, load.encode(tokenizer, text[:400_000])) for source, text in texts]
    if corpus is not None:
        documents = [
            (f"{source} {i}", ids[b : b + 1000]) for source, ids in documents for i, b in enumerate(range(0, len(ids), 1000))
        ]
    border, tokens = len(documents) * 9 // 10, 4000 if quick else tokens
    stored, held_out, size = (
        list[tuple[str, list[int]]](),
        [ids[: WINDOW + 1] for _, ids in documents[border:] if len(ids) > WINDOW],
        0,
    )
    for source, ids in documents[:border]:
        stored += [(source, ids)] if size < tokens else []
        size += len(ids)
    held_out = held_out[: 2 if quick else 12]
    with TemporaryDirectory() as folder:
        store, began = Passages.create(Path(folder) / "passages", target, tokenizer), process_time()
        report: dict[str, Any] = {"passages": store.append(stored, target), "seconds": process_time() - began, "alphas": []}
        for alpha in (-0.2, 0.1, 0.3, 0.5, 0.7):
            rows = [of_rows(Nearest(store, target, alpha=alpha), ids) for ids in held_out]
            plain, mixture = (float(torch.cat([(row[0], row[1])[i] for row in rows]).mean().neg().exp()) for i in (0, 1))
            moved = sum(row[2] for row in rows) / len(rows)
            report["alphas"].append({"alpha": alpha, "plain": plain, "mixture": mixture, "deviation": moved})
            typer.echo(f"alpha {alpha}: perplexity {plain:.2f} plain, {mixture:.2f} mixed; relaxed test deviates by {moved:.3f}")
        prompts = [ids[:64] for ids in held_out[:4]]
        report["written"] = {
            how: written(target, store, prompts, how, 8 if quick else 64) for how in ("plain", "mixture", "spans", "relaxed")
        }
    write_json(report, out / "passages.json")


def written(target: Any, store: Passages, prompts: list[list[int]], how: str, count: int) -> dict[str, float]:
    """CPU milliseconds a token, tokens per step, and what share is quoted. Temperature 0.7, as the authors'; the second of two runs."""
    distribution = None if how == "plain" else Nearest(store, target, alpha=0.5)
    drafting: dict[str, Any] = {"drafter": "nest", "depth": 8} if how in ("spans", "relaxed") else {"drafter": None}
    engine = Engine.of(target, decoding=distribution, verifier="lenient" if how == "relaxed" else "auto", **drafting)
    for seed in (0, 1):
        began = process_time()
        results = engine.generate(prompts, SamplingParams(seed=seed, temperature=0.7, max_tokens=count, ignore_eos=True))
        seconds = process_time() - began
    emitted = sum(len(r.token_ids) for r in results)
    found = {
        "milliseconds": 1000 * seconds / emitted,
        "tokens_per_step": emitted / sum(r.stats.steps for r in results),
        "quoted": sum(q.end - q.start for r in results for q in r.sources) / emitted,
    }
    typer.echo(f"{how}: " + ", ".join(f"{value:.2f} {key}" for key, value in found.items()))
    return found


if __name__ == "__main__":
    typer.run(main)
