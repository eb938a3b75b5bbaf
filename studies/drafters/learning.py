"""What is told beyond the tables: learning in a long request, memory, the mixture against its best source."""

import statistics
from typing import Any

import numpy as np

from polydraft.bench.record import markdown_table
from polydraft.core import Request, SamplingParams
from polydraft.drafters.text.growing_text import GrowingText
from polydraft.drafters.text.ngram import NgramDrafter
from polydraft.drafters.text.suffix import SuffixStore
from polydraft.engine.api import Engine
from polydraft.papers.trigram.drafter import TrigramStore, TrigramTable
from studies.drafters.comparison import CONTENDERS, MIXED, WAYS, WORKLOADS, Contender, DrafterBench, Row, Task
from studies.drafters.scripted_target import ScriptedTarget

LEARNERS = ("ngram", "suffix", "trigram static", "trigram", "retrieval", "mixture of all")
"""Whose learning curve is drawn."""


def by_window(row: Row, window: int) -> list[float]:
    """Tokens per step in each window of emitted tokens of a request, all requests together."""
    tokens: dict[int, int] = {}
    calls: dict[int, int] = {}
    for steps in row.steps:
        for at, count in zip(np.cumsum([0, *steps[:-1]]).tolist(), steps, strict=True):
            tokens[at // window] = tokens.get(at // window, 0) + count
            calls[at // window] = calls.get(at // window, 0) + 1
    return [tokens[w] / calls[w] for w in sorted(calls)]


def curve(bench: DrafterBench, contender: Contender, num_tokens: int, window: int) -> list[float]:
    """Tokens per step in each window of one long request: a held-out module, replayed from its 64th token on."""
    ids = max(map(bench.encode, bench.texts[1]), key=len)[: 64 + num_tokens]
    target = ScriptedTarget(bench.target.vocab_size)
    row = Row(contender.name, "long", "replayed")
    engine = Engine.of(target, drafter=bench.drafter(contender, target), policy=bench.policy)
    bench.play(engine, [Task(ids[:64], ids[64:])], row)
    return by_window(row, window)


def megabytes_per_million_tokens(bench: DrafterBench) -> dict[str, float]:
    """Of each structure, measured on the documents of the indexes; the requests' own on the first 100,000 tokens of them."""
    num_tokens = sum(map(len, bench.documents))
    history = [t for d in bench.documents for t in d][:100_000]
    (own,) = NgramDrafter().start([Request("r", tuple(history), SamplingParams(), seed=0)])
    text = GrowingText()
    store = SuffixStore(num_tokens)
    text.extend(history)
    for document in bench.documents:
        store.add(document)
    bytes_a_token = {
        "prompt lookup, of a request": own.num_bytes / own.num_tokens,
        "suffix array, of a request": text.num_bytes / len(history),
        "suffix store": store.num_bytes / store.num_tokens,
        "trigram table": TrigramTable.of(bench.index).num_bytes / num_tokens,
        "text index": bench.index.num_bytes / num_tokens,
    }
    return bytes_a_token | {
        "trigram store, at its bound of 4,096 pairs (MB in all)": TrigramStore().num_bytes / 1e6
    }


def further(bench: DrafterBench, num_tokens: int, window: int) -> dict[str, Any]:
    """What the study adds to the report: curves over so many tokens, and memory."""
    learners = [c for c in CONTENDERS if c.name in LEARNERS]
    return {
        "curve_window": window,
        "curves": {c.name: curve(bench, c, num_tokens, window) for c in learners},
        "megabytes_per_million_tokens": megabytes_per_million_tokens(bench),
    }


def markdown(report: dict[str, Any]) -> str:
    """Its tables."""
    sizes = report["megabytes_per_million_tokens"].items()
    memory = markdown_table(["structure", "MB"], [(name, f"{size:.0f}") for name, size in sizes])
    lines = [
        *_against_best(report["rows"]),
        "",
        "Memory per million tokens of history or corpus:",
        "",
        memory,
    ]
    return "\n".join(lines) + "\n"


def _against_best(rows: list[dict[str, Any]]) -> list[str]:
    """The mixture of all against its best source, request by request on the same texts."""
    found = {(r["contender"], r["way"], r["workload"]): r for r in rows}
    lines = [
        "",
        "The mixture of all less the best of its sources, tokens per step, mean of the requests' differences:",
        "",
    ]
    table: list[list[str]] = []
    for way in WAYS[1:]:
        for workload in WORKLOADS:
            best = max(MIXED, key=lambda name: found[name, way, workload]["tokens_per_step"])
            ours, theirs = (found[name, way, workload]["by_request"] for name in ("mixture of all", best))
            gains = [a - b for a, b in zip(ours, theirs, strict=True)]
            error = statistics.stdev(gains) / len(gains) ** 0.5 if len(gains) > 1 else float("nan")
            table.append([f"{way} {workload}", best, f"{statistics.mean(gains):+.2f} ± {error:.2f}"])
    return [*lines, markdown_table(["texts", "best source", "difference"], table)]
