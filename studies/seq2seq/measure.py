"""What drafts gain on an encoder-decoder: plain, lossless and relaxed, by rank beta and tolerance tau."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from polydraft import Engine, SamplingParams
from polydraft.methods import registry
from polydraft.models.torch.seq2seq import Seq2SeqTarget
from polydraft.papers.mask_query import MaskQueryDrafter
from polydraft.papers.mask_query.network import MaskQueries
from polydraft.papers.relaxed.top_beta import TopBeta
from studies.seq2seq.corpus import Pair

SWEEP = [(beta, tau) for beta in (3, 5) for tau in (0.5, 1.5, 3.0)]
GREEDY = SamplingParams(temperature=0, max_tokens=56, seed=0)


def measured(
    model: Any,
    tokenizer: Any,
    network: MaskQueries,
    pairs: Sequence[Pair],
    sweep: Sequence[tuple[int, float]] = SWEEP,
) -> list[dict[str, Any]]:
    """One row a contender: quality, tokens per step, tokens per second of processor time over plain decoding. One text at a time.

    Contenders take turns, text by text, so that a slow moment hits all; each first writes one text that does not count.
    """
    ends = [model.config.eos_token_id]
    target = Seq2SeqTarget(model, max_num_seqs=2)
    info = registry.verifier("top_beta").info
    deep = network.sizes.queries

    def engine(drafter: Any, verifier: Any) -> Engine:
        depth = None if drafter is None else deep
        return Engine.of(
            target, tokenizer=tokenizer, drafter=drafter, verifier=verifier, depth=depth, eos_token_ids=ends
        )

    drafter = MaskQueryDrafter(network, stop_ids=ends)
    contenders: dict[str, tuple[Engine, SamplingParams]] = {
        "plain": (engine(None, "auto"), GREEDY),
        "lossless, n-gram": (engine("ngram", "match"), GREEDY),
        "lossless, mask queries": (engine(drafter, "match"), GREEDY),
    }
    for beta, tau in [(1, 0.0), *sweep]:
        rule = TopBeta(info, beta, tau)
        contenders[f"beta {beta}, tau {tau:g}"] = engine(drafter, rule), GREEDY.with_(temperature=1.0)
    texts: dict[str, list[str]] = {name: [] for name in contenders}
    calls, tokens, seconds = ({name: [0.0] * len(pairs) for name in contenders} for _ in range(3))
    for one, params in contenders.values():
        one.generate(pairs[0].source, params)
    for i, pair in enumerate(pairs):
        for name, (one, params) in contenders.items():
            began = time.process_time()
            (result,) = one.generate(pair.source, params)
            seconds[name][i] = time.process_time() - began
            texts[name].append(result.text)
            calls[name][i], tokens[name][i] = result.stats.steps, len(result.token_ids)
    return [
        row
        for task in dict.fromkeys(p.task for p in pairs)
        for row in _rows(task, pairs, texts, calls, tokens, seconds)
    ]


def _rows(
    task: str, pairs: Sequence[Pair], texts: Any, calls: Any, tokens: Any, seconds: Any
) -> list[dict[str, Any]]:
    from sacrebleu import corpus_bleu  # pyright: ignore[reportMissingImports] - of the extra "translation"

    here = [i for i, p in enumerate(pairs) if p.task == task]
    references = [pairs[i].reference for i in here]
    plain = [texts["plain"][i] for i in here]
    speed = {name: sum(tokens[name][i] for i in here) / sum(seconds[name][i] for i in here) for name in texts}
    return [
        {
            "task": task,
            "contender": name,
            "bleu": corpus_bleu(written, [references]).score,
            "exact": sum(a == b for a, b in zip(written, references, strict=True)) / len(here),
            "as_plain": sum(a == b for a, b in zip(written, plain, strict=True)) / len(here),
            "tokens_per_step": sum(tokens[name][i] for i in here) / sum(calls[name][i] for i in here),
            "speed_up": speed[name] / speed["plain"],
        }
        for name, found in texts.items()
        for written in [[found[i] for i in here]]
    ]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """In Markdown.

    Example:
        >>> row = dict(task="made", contender="plain", bleu=90.0, exact=0.5, as_plain=1.0, tokens_per_step=1.0, speed_up=1.0)
        >>> print(table([row]).splitlines()[-1])
        | made | plain | 90.0 | 50% | 100% | 1.00 | 1.00x |
    """
    lines = [
        "| pairs | contender | BLEU | as the reference | as plain | tokens per step | speed |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        shares = f"{r['exact']:.0%} | {r['as_plain']:.0%}"
        lines.append(
            f"| {r['task']} | {r['contender']} | {r['bleu']:.1f} | {shares} | {r['tokens_per_step']:.2f} | {r['speed_up']:.2f}x |"
        )
    return "\n".join(lines)


def picture(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """BLEU against tokens per step, a curve for each beta along its tolerances."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    tasks = list(dict.fromkeys(r["task"] for r in rows))
    figure, axes = plt.subplots(
        1, len(tasks), figsize=(4.6 * len(tasks), 3.6), layout="constrained", squeeze=False
    )
    for axis, task in zip(axes[0], tasks, strict=True):
        here = [r for r in rows if r["task"] == task]
        for beta in dict.fromkeys(
            r["contender"].partition(",")[0] for r in here if r["contender"].startswith("beta")
        ):
            curve = [r for r in here if r["contender"].startswith(beta + ",")]
            axis.plot(
                [r["tokens_per_step"] for r in curve], [r["bleu"] for r in curve], marker="o", label=beta
            )
            for r in curve if beta == "beta 5" else ():
                axis.annotate(
                    r["contender"].rpartition(" ")[2],
                    (r["tokens_per_step"], r["bleu"]),
                    xytext=(4, 5),
                    textcoords="offset points",
                    fontsize=8,
                )
        for name, mark in (("plain", "s"), ("lossless, n-gram", "^"), ("lossless, mask queries", "*")):
            row = next(r for r in here if r["contender"] == name)
            axis.plot(row["tokens_per_step"], row["bleu"], mark, color="0.3", markersize=9, label=name)
        axis.set(title=f"{task} pairs", xlabel="tokens per step", ylabel="BLEU")
        axis.grid(alpha=0.3)
    axes[0][0].legend(fontsize=8)
    figure.suptitle("Spec-Verification, numbers: tau at beta 5", fontsize=10)
    figure.savefig(path, dpi=130)
    plt.close(figure)
