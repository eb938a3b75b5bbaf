"""Samplers of other projects by `polydraft.conformance`, each with its verdict and the smallest rows that show it: all outcomes are enumerated.

    python -m studies.audited [--only PART OF A NAME]

Writes docs/results/samplers.csv and samplers.md. Servers from outside are `studies.audits`.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from polydraft import conformance
from polydraft.bench.record import csv_table, markdown_table, write_texts
from polydraft.conformance import Report, with_uniforms
from polydraft.conformance.steps import DraftSetting, blocks_of_step, text_probs
from polydraft.core import DraftSampling
from polydraft.testing import Path as Tokens
from studies.audited import called, published

RESULTS = Path(__file__).parents[2] / "docs" / "results"
FIELDS: Sequence[str] = (
    "project",
    "version",
    "sampler",
    "setting",
    "how",
    "status",
    "total_variation",
    "mistake",
    "example",
)
IID = DraftSampling.IID
POINT_MASS = DraftSampling.POINT_MASS
CHAIN = (-1, 0, 1)
TREE = (-1, 0, 0, 1, 1)
VLLM = "0.32.0"
BY_POSITION = "rejection_sampler_utils, uniforms by seed and position, two steps"


@dataclass(frozen=True)
class Audited:
    """One sampler under one setting. called: the shipped function ran; else it is re-stated from its public text.

    stated: what the project itself says of a setting that is not lossless.
    """

    project: str
    version: str
    sampler: str
    setting: str
    check: Callable[[], Report]
    called: bool = False
    stated: str = ""

    def row(self) -> dict[str, Any]:
        """What the conformance suite says of it."""
        report = self.check()
        return {
            "project": self.project,
            "version": self.version,
            "sampler": self.sampler,
            "setting": self.setting,
            "how": "called" if self.called else "re-stated",
            "status": report.status,
            "total_variation": f"{report.error:.3g}",
            "mistake": self.stated if report.status == "failed" and self.stated else report.mistake or "",
            "example": str(report.example or ""),
        }


def uniforms(sampler: Any, parents: Sequence[int], sampling: DraftSampling) -> Callable[[], Report]:
    """Of a function of a source of uniforms."""
    return partial(conformance.of_uniforms, sampler, parents=parents, sampling=sampling)


def tensors(sampler: Any) -> Callable[[], Report]:
    """Of a function of tensors that draws by torch itself; in float64."""
    return partial(conformance.of_uniforms, with_uniforms(sampler), parents=CHAIN, arrays=torch.from_numpy)


def several(rule: published.Rule, *, by_position: bool) -> Callable[[], Report]:
    """A text of three tokens, two drafts a step: the second step may verify a position again."""
    step = published.several_steps(rule, 2, 3, by_position=by_position)
    return partial(conformance.of_steps, step, parents=CHAIN)


def audits() -> Iterator[Audited]:
    """All of them."""
    of_transformers = partial(
        Audited,
        "transformers",
        version("transformers"),
        "generation.utils._speculative_sampling",
        called=True,
    )
    yield of_transformers("assisted generation, two sampled drafts", tensors(called.transformers()))
    yield of_transformers(
        "assistant_ensemble_weight=0.7",
        tensors(called.transformers(weight=0.7)),
        stated="documented: the ensemble relaxes the target (arXiv 2604.07622)",
    )
    of_batch = partial(Audited, "vLLM", VLLM, "v1.sample.rejection_sampler")
    yield of_batch("chain, drafts sampled", uniforms(published.vllm, CHAIN, IID))
    yield of_batch(
        "chain, draft_probs=None, drafts certain",
        uniforms(published.vllm_without_probabilities, CHAIN, POINT_MASS),
    )
    yield of_batch(
        "chain, draft_probs=None, drafts sampled", uniforms(published.vllm_without_probabilities, CHAIN, IID)
    )
    of_kernels = partial(Audited, "vLLM", VLLM, BY_POSITION)
    yield of_kernels("standard rejection", several(published.token_by_position, by_position=True))
    yield of_kernels("block verification", several(published.block_by_position, by_position=True))
    yield of_kernels(
        "block verification, mended: uniforms of each step are new",
        several(published.block_by_position, by_position=False),
    )
    of_sglang = partial(Audited, "SGLang", "120affb9", "TreeSpeculativeSamplingTargetOnly")
    tree = DraftSetting(TREE, POINT_MASS)
    yield of_sglang("tree of top tokens, thresholds 1", uniforms(published.sglang(tree), TREE, POINT_MASS))
    lossy = "documented: thresholds below 1 accept more"
    yield of_sglang(
        "tree of top tokens, accept-threshold-single 0.5",
        uniforms(published.sglang(tree, single=0.5), TREE, POINT_MASS),
        stated=lossy,
    )
    yield of_sglang(
        "tree of top tokens, accept-threshold-acc 0.8",
        uniforms(published.sglang(tree, accumulated=0.8), TREE, POINT_MASS),
        stated=lossy,
    )
    yield Audited(
        "TensorRT-LLM",
        "28edbcdb",
        "get_rejected_indices, sample_rejected",
        "chain, drafts sampled",
        uniforms(published.tensorrt_llm, CHAIN, IID),
    )
    of_llama_cpp = partial(Audited, "llama.cpp", "3b3f5fed", "common_sampler_sample_and_accept_n")
    for name, sampling in (("drafts certain", POINT_MASS), ("drafts sampled", IID)):
        yield of_llama_cpp(f"draft-simple, {name}", uniforms(published.llama_cpp, CHAIN, sampling))


class FairCoin:
    """Two tokens, both with probability 1/2, and a draft that is always token 0."""

    V = 2

    def row(self, name: str, path: Tokens) -> np.ndarray:
        return np.array([0.5, 0.5] if name == "p" else [1.0, 0.0])


def of_fair_coin() -> np.ndarray:
    """Probability of each text of three tokens that block verification by position makes of it, [2, 2, 2]."""
    step = published.several_steps(published.block_by_position, 2, 3, by_position=True)
    case = FairCoin()
    return text_probs(case, blocks_of_step(case, step), 3)


def page(rows: Sequence[dict[str, Any]]) -> str:
    """docs/results/samplers.md."""
    lines = [
        "# Samplers of other projects",
        "",
        "`python -m studies.audited` checks samplers of other projects with [`polydraft.conformance`](../reference/conformance.md). All drafts and all outcomes",
        "of a sampler's comparisons are enumerated on eight pairs of small distributions, so a verdict is exact. *Called*: the shipped function ran.",
        "*Re-stated*: the program does not run here, and its algorithm was written again from its public text, named in `studies/audited/published.py`.",
        "A re-stated sampler says something of the algorithm, and nothing of its kernels. [Rows that show a fault](samplers.csv);",
        "[servers, tested from outside](audits.md).",
        "",
    ]
    shown = ("project", "version", "sampler", "setting", "how", "status")
    head = [*shown[:-1], "verdict", "total variation", "why"]
    cells = list[list[Any]]()
    for row in rows:
        distance = row["total_variation"] if row["status"] == "failed" else "0"
        cells.append([*(row[name] for name in shown), distance, row["mistake"]])
    (biased,) = (
        row for row in rows if row["setting"] == "block verification" and row["sampler"] == BY_POSITION
    )
    return "\n".join([*lines, markdown_table(head, cells), *finding(biased)]) + "\n"


def finding(row: dict[str, Any]) -> list[str]:
    """What is reported of vLLM's block verification."""
    coin = of_fair_coin()
    texts = ", ".join(f"{a}{b}{c}: {coin[a, b, c]:.4f}" for a, b, c in np.ndindex(2, 2, 2))
    return [
        "",
        "## A finding to report: block verification and uniforms by position",
        "",
        f"vLLM {row['version']}, `vllm/v1/worker/gpu/spec_decode/rejection_sampler_utils.py`, `_rejection_kernel` with `USE_BLOCK_VERIFICATION`.",
        "",
        "**What happens.** The kernel draws `u = tl_rand32(seed, pos)`: one uniform for each position of a request. Standard rejection looks at uniforms up to",
        "the first rejection, and no position behind it has been looked at. Block verification looks at *all* positions of the draft, since a later position can",
        "accept what an earlier one refused. After a rejection at position i the uniforms of i + 1, ... are known to be large: otherwise more would have been accepted.",
        "The next step verifies these positions again with the same uniforms. They are no longer uniform, so the next tokens are biased.",
        "",
        f"**How much.** Two drafts a step, texts of three tokens: total variation {row['total_variation']}. With new uniforms for each step the same rule is exact (the row below).",
        "",
        "**Smallest example.** The target is a fair coin, p = (1/2, 1/2), and the draft always token 0. Two drafts a step give h = 1/3 and 1/4. Both are refused",
        "where u1 > 1/3 and u2 > 1/4; token 1 is emitted, and position 2 meets u2 again, now above 1/4. It is accepted with probability 1/9 instead of 1/3.",
        f"Texts of three tokens, 1/8 each if lossless, are {texts}: a total variation of {np.abs(coin - 1 / 8).sum() / 2:.4f}.",
        f"After token 1 comes token 0 with probability {coin[1, 0].sum() / coin[1].sum():.4f}.",
        "",
        "**What mends it.** Key the uniforms by the position at which the step begins and the index within it, or by the number of the step.",
        "",
        "**How to see it.** `python -m studies.audited --only 'block verification'`; the rule stands in `block_by_position`.",
    ]


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m studies.audited")
    parser.add_argument(
        "--only", default="", help="part of a project's, a sampler's or a setting's name: printed alone"
    )
    chosen = parser.parse_args()
    rows = list[dict[str, Any]]()
    for audited in audits():
        if chosen.only in f"{audited.project} {audited.sampler} {audited.setting}":
            rows.append(audited.row())
            print(rows[-1], flush=True)
    if chosen.only:
        return
    table = csv_table(FIELDS, ([row.get(name) for name in FIELDS] for row in rows))
    write_texts({RESULTS / "samplers.csv": table, RESULTS / "samplers.md": page(rows)})


if __name__ == "__main__":
    main()
