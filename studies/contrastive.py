"""`python -m studies.contrastive`: contrastive decoding by alpha and beta: exactly, on rows of held-out Python; and what is generated.

    accepted    1 - TV(distribution, amateur's): the exact share of single drafts that the ratio test accepts
    moved       TV(distribution, expert's)       right    held-out tokens that are the distribution's likeliest
    repetition  share of four-grams of the output that it had before      perplexity   of the output, under the expert
    sums        exact answers to generated sums, greedily

Amateurs: the draft model of the embedded pair; of another model (`--model`) its own first layers (`--layers`) with its own norm and head, a
fixed function of the text; or its first layers and an exit that was trained behind them (`--exit`, a folder of `polydraft train early-exit`). (Rows
of an EAGLE head are none: they depend on how far ahead they were drafted.) Costs are CPU seconds.
"""

import random
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import process_time
from typing import Annotated, Any

import torch
import typer

from polydraft import Engine, SamplingParams, TokenTree
from polydraft.bench.record import csv_table, markdown_table, write_texts
from polydraft.decoding.contrastive import Contrastive, contrast
from polydraft.models import load, pair
from studies.embedded_pair.held_out import is_held_out, standard_library
from studies.options import Out, Quick, write_json

__all__ = ["first_layers", "main", "on_rows", "repetition", "written"]

ALPHAS, BETAS, WINDOW = (0.0, 0.1, 0.3), (0.0, 0.25, 0.5, 1.0), 192
SHOWN = ((0.0, 0.0), (0.0, 0.5), (0.1, 0.0), (0.1, 0.5), (0.1, 1.0))
"""Alpha and beta of the page's rows; the first one is the expert, the third min-p."""
COLUMNS = {
    "accepted": "accepted",
    "moved": "moved",
    "right": "held-out tokens right",
    "repetition": "repetition",
    "perplexity": "perplexity under the expert",
    "sums": "sums",
}


def first_layers(name: str, layers: int, folder: Path, exit_: Path | None = None) -> Path:
    """A model of the first layers of another one, written to a folder. exit_: a trained exit in the place of `layers`: one layer more, which attends to nothing."""
    from polydraft.models.loading.folder import load_module
    from polydraft.models.loading.hub import located
    from polydraft.papers.early_exit.network import ExitCheckpoint

    module = load_module(located(name), dtype="float32", device="cpu")
    if exit_ is not None:
        found = ExitCheckpoint.load(exit_)
        layers = found.layers[0] + 1
        last, tensors = module.model.layers[layers - 1], {key: x.float() for key, x in found.tensors.items()}
        with torch.no_grad():
            last.self_attn.o_proj.weight.zero_()
            last.post_attention_layernorm.weight.copy_(tensors["mlp_norm.weight"])
            module.model.norm.weight.copy_(tensors["norm.weight"])
            for part in ("gate_proj", "up_proj", "down_proj"):
                getattr(last.mlp, part).weight.copy_(tensors[f"mlp.{part}.weight"])
    module.model.layers = module.model.layers[:layers]
    module.config.num_hidden_layers = layers
    module.config.layer_types = getattr(module.config, "layer_types", [])[:layers] or None
    module.save_pretrained(folder)
    load.load_tokenizer(name).save_pretrained(folder)
    return folder


def rows(model: Any, ids: list[int]) -> torch.Tensor:
    """Logits after each token but the last."""
    try:
        return model.score([0], TokenTree.chain(torch.tensor([ids]))).logits[0, :-1].clone()
    finally:
        model.release([0])


def on_rows(found: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]], alpha: float, beta: float) -> dict[str, float]:
    """Means over texts: logits of expert and amateur, [M, V], and the tokens that followed, [M]."""
    each = list[tuple[float, ...]]()
    for expert, amateur, wanted in found:
        e, a = expert.double(), amateur.double()
        p, q = contrast(e, a, alpha, beta).softmax(-1), a.softmax(-1)
        moved, right = (p - e.softmax(-1)).abs().sum(-1) / 2, (p.argmax(-1) == wanted).double()
        each.append(tuple(float(x.mean()) for x in (torch.minimum(p, q).sum(-1), moved, right)))
    return dict(zip(("accepted", "moved", "right"), torch.tensor(each).mean(0).tolist(), strict=True))


def repetition(tokens: list[int], n: int = 4) -> float:
    """Share of the n-grams that came before.

    Example:
        >>> repetition([1, 2, 1, 2, 1], n=2)
        0.5
    """
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return 1 - len({*grams}) / len(grams) if grams else 0.0


def written(engine: Engine, prompts: list[list[int]], params: SamplingParams) -> dict[str, float]:
    """Repetition, perplexity under the expert, tokens per step and CPU seconds per token of what an engine writes."""
    began = process_time()
    samples = [result.samples[0] for result in engine.generate(prompts, params.with_(logprobs=0))]
    seconds, emitted = process_time() - began, sum(len(s.token_ids) for s in samples)
    said = [t.logprob for s in samples for t in s.logprobs or ()]
    return {
        "repetition": sum(repetition(s.token_ids) for s in samples) / len(samples),
        "perplexity": float(torch.tensor(said).neg().mean().exp()),
        "tokens_per_step": emitted / max(sum(s.stats.steps for s in samples), 1),
        "milliseconds": 1000 * seconds / emitted,
    }


def sums(engine: Engine, count: int) -> float:
    """Share of sums of two numbers below 50 that are answered exactly, greedily; three examples stand before each."""
    draw, right = random.Random(0), 0
    asked = [(draw.randrange(50), draw.randrange(50)) for _ in range(count)]
    prompts = [f"3 + 4 = 7\n21 + 5 = 26\n30 + 12 = 42\n{a} + {b} =" for a, b in asked]
    for (a, b), result in zip(asked, engine.generate(prompts, SamplingParams(temperature=0, max_tokens=6)), strict=True):
        right += result.text.split("\n")[0].strip() == str(a + b)
    return right / count


def main(
    out: Out = Path("build/contrastive"),
    model: Annotated[str | None, typer.Option(help="An expert; the embedded pair without it.")] = None,
    layers: Annotated[int, typer.Option(help="Of the expert, that are the amateur; only with --model.")] = 12,
    exit_: Annotated[Path | None, typer.Option("--exit", help="A trained exit behind its first layers, in their place.")] = None,
    tokens: Annotated[int, typer.Option(help="Of each continuation.")] = 96,
    quick: Quick = False,
) -> None:
    """Sweep alpha and beta; write contrastive.json, .csv, .md and .png."""
    torch.set_num_threads(1)
    with TemporaryDirectory() as folder:
        small_name = str(pair.draft_folder()) if model is None else str(first_layers(model, layers, Path(folder), exit_))
        name = model or str(pair.target_folder())
        sizes: dict[str, Any] = {"device": "cpu", "max_num_seqs": 8, "max_model_len": 512, "threads": 1}
        expert, amateur = load.load_model(name, **sizes), load.load_model(small_name, **sizes)
    tokenizer = load.load_tokenizer(name)
    expert.vocab_size = amateur.vocab_size = load.num_token_ids(tokenizer, expert.vocab_size)
    prompts = [load.encode(tokenizer, p.text)[:64] for p in pair.prompts()[: 2 if quick else 6]]
    held_out = [d.text for d in standard_library() if is_held_out(d.path) and len(d.text) > 4000]
    texts = [load.encode(tokenizer, text[2000:4000])[:WINDOW] for text in held_out[: 1 if quick else 6]]
    found = [(rows(expert, ids), rows(amateur, ids), torch.tensor(ids[1:])) for ids in texts]
    tokens = 16 if quick else tokens
    params, parts = SamplingParams(seed=1, max_tokens=tokens, ignore_eos=True), {"tokenizer": tokenizer, "draft_model": amateur}
    table: list[dict[str, Any]] = []
    for alpha in ALPHAS:
        for beta in BETAS[:: 3 if quick else 1]:
            engine = Engine.of(expert, **parts, drafter=None, decoding=Contrastive(amateur, alpha, beta))
            row = {"alpha": alpha, "beta": beta, **on_rows(found, alpha, beta), **written(engine, prompts, params)}
            table.append({**row, "sums": sums(engine, 4 if quick else 24)})
            typer.echo(" ".join(f"{key} {value:.3f}" for key, value in table[-1].items()))
    report = {
        "rows": sum(map(len, texts)) - len(texts),
        "prompts": len(prompts),
        "table": table,
        "speed": speed(expert, amateur, parts, prompts, params),
    }
    write_json(report, out / "contrastive.json")
    texts_by_file = {
        out / "contrastive.csv": csv_table(list(table[0]), ([f"{x:.4g}" for x in row.values()] for row in table)),
        out / "contrastive.md": markdown(table),
    }
    write_texts(texts_by_file)
    picture(table, out / "contrastive.png")


def markdown(table: list[dict[str, Any]]) -> str:
    """The rows of `SHOWN` as a table of the page."""
    shown = [row for row in table if (row["alpha"], row["beta"]) in SHOWN]
    lines = [[f"{row['alpha']:g}", f"{row['beta']:g}", *(f"{row[name]:.3g}" for name in COLUMNS)] for row in shown]
    return f"{markdown_table(['alpha', 'beta', *COLUMNS.values()], lines)}\n\n[Every alpha and beta](contrastive.csv).\n"


def speed(expert: Any, amateur: Any, parts: dict[str, Any], prompts: list[list[int]], params: SamplingParams) -> dict[str, Any]:
    """Plain and drafted, of the expert's distribution and of the contrastive one at its defaults; the median of three turns behind one that does not count."""
    distributions, found = {"expert": None, "contrastive": "contrastive"}, dict[str, Any]()
    size = {"depth": 3, "num_paths": 1}
    options: dict[str, dict[str, Any]] = {"plain": {"drafter": None}, "drafted": {"drafter": "model:chain", **size}}
    engines = {
        (w, h): Engine.of(expert, **parts, decoding=distribution, **given)
        for w, distribution in distributions.items()
        for h, given in options.items()
    }
    turns = [{way: written(engine, prompts, params) for way, engine in engines.items()} for _ in range(4)][1:]
    for distribution, how in engines:
        each = [turn[distribution, how] for turn in turns]
        found[f"{distribution}, {how}"] = {key: median(one[key] for one in each) for key in each[0]}
    for way, figures in found.items():
        typer.echo(f"{way}: {figures['milliseconds']:.2f} ms a token, {figures['tokens_per_step']:.2f} tokens per step")
    return found


def picture(table: list[dict[str, Any]], file: Path) -> None:
    """Six figures by beta, a line for each alpha."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = {
        "accepted": "drafts accepted (exact)",
        "moved": "total variation from the expert (exact)",
        "right": "held-out tokens predicted",
        "repetition": "repetition",
        "perplexity": "perplexity under the expert",
        "sums": "sums answered",
    }
    figure, places = pyplot.subplots(2, 3, figsize=(10, 5.2), layout="constrained")
    for axes, (name, title) in zip(places.flat, names.items(), strict=True):
        for alpha in ALPHAS:
            line = [(row["beta"], row[name]) for row in table if row["alpha"] == alpha]
            axes.plot(*zip(*line, strict=True), marker="o", label=f"alpha {alpha}")
        axes.set(title=title, xlabel="beta")
        if name == "perplexity":
            axes.set(yscale="log", yticks=[2, 5, 10, 20, 50])
            axes.get_yaxis().set_major_formatter("{x:g}")
            axes.minorticks_off()
    places.flat[0].legend()
    figure.savefig(file, dpi=90)
    typer.echo(f"wrote {file}", err=True)


if __name__ == "__main__":
    typer.run(main)
