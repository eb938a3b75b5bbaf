"""The plug-in inside vLLM itself, each engine in a process of its own: `make vllm` installs it and runs these tests.

The distribution of a few tokens is enumerated with transformers: `top_k` leaves few sequences, so that counts tell distributions apart. The targets are the
embedded one and the real chat model, which is fetched once; where it cannot be, its tests say so.
"""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from polydraft.errors import IncompatibleError
from polydraft.integrations.vllm import VERIFIER
from polydraft.integrations.vllm.drafters import OPTIONS
from polydraft.models import pair
from studies.inside_vllm.engine import VLLM

pytestmark = pytest.mark.skipif(
    find_spec("vllm") is None, reason="vLLM is not installed here: `make vllm` runs these tests"
)

PROMPT = "def add(a, b):\n    return a + b\n\ndef add(a, b):\n    return"
LENGTH = 4
TOP_K = 3
TEMPERATURE = 0.7
SAMPLES = 2000
SUFFIX = {
    "method": "custom_class",
    "model": "polydraft.integrations.vllm.drafters.suffix",
    "num_speculative_tokens": 3,
}
DRAFT_MODEL = {
    "method": "draft_model",
    "model": str(pair.draft_folder()),
    "num_speculative_tokens": 3,
    "draft_sample_method": "probabilistic",
}


@contextmanager
def engine(
    speculative: dict[str, Any] | None,
    rule: str | None = None,
    folder: Path | None = None,
    **environment: str,
) -> Iterator[VLLM]:
    """vLLM with the embedded target, or that of a folder."""
    options = {} if speculative is None else {"speculative_config": speculative}
    made = VLLM(
        folder or pair.target_folder(),
        environment={"VLLM_CPU_OMP_THREADS_BIND": "0", VERIFIER: rule or "", **environment},
        dtype="float32",
        max_model_len=256,
        max_num_seqs=64,
        **options,
    )
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def ids() -> list[int]:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(pair.target_folder()).encode(PROMPT)


def texts_that_follow(
    ids: list[int], length: int, *, top_k: int, truncated: bool = False, folder: Path | None = None
) -> dict[tuple[int, ...], float]:
    """Texts of the likeliest tokens, and the probability of each. truncated: whether sampling is, to these tokens."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder or pair.target_folder(), dtype=torch.float64).eval()
    texts: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        with torch.no_grad():
            logits = model(torch.tensor([[*ids, *text] for text in texts])).logits[:, -1] / TEMPERATURE
        best, at = logits.topk(top_k)
        distributions = best.softmax(-1) if truncated else logits.softmax(-1).gather(1, at)
        texts = {
            (*text, token): p * q
            for (text, p), row, likely in zip(texts.items(), at.tolist(), distributions.tolist(), strict=True)
            for token, q in zip(row, likely, strict=True)
        }
    return texts


@pytest.fixture(scope="module")
def distribution(ids: list[int]) -> dict[tuple[int, ...], float]:
    """Every text of LENGTH tokens that can follow, and its probability."""
    return texts_that_follow(ids, LENGTH, top_k=TOP_K, truncated=True)


def sample(served: VLLM, ids: list[int], count: int = SAMPLES, **params: Any) -> dict[str, Any]:
    return served.generate(
        [ids] * count, **{"temperature": TEMPERATURE, "top_k": TOP_K, "max_tokens": LENGTH, **params}
    )


def p_value(distribution: dict[tuple[int, ...], float], outputs: list[list[int]]) -> float:
    """Of a chi-square test; texts that are expected fewer than five times, and those that cannot be, are one cell."""
    counts = Counter(map(tuple, outputs))
    often = [text for text, p in distribution.items() if p * len(outputs) >= 5]
    found = np.array([counts[text] for text in often] + [len(outputs) - sum(counts[text] for text in often)])
    expected = np.array(
        [distribution[text] for text in often] + [1 - sum(distribution[text] for text in often)]
    ) * len(outputs)
    return float(chisquare(found[expected > 0], expected[expected > 0] * found.sum() / expected.sum()).pvalue)


GREEDY = {"temperature": 0, "top_k": 0, "max_tokens": 24}


@pytest.fixture(scope="module")
def plain(ids: list[int]) -> list[list[int]]:
    """Greedy texts of vLLM alone."""
    with engine(None) as served:
        return sample(served, ids, 8, **GREEDY)["outputs"]


@pytest.mark.parametrize(
    ("rule", "speculative"),
    [("match", SUFFIX), ("block", DRAFT_MODEL), ("race", SUFFIX)],
    ids=["match", "block", "race"],
)
def test_texts_follow_the_targets_distribution(
    rule: str,
    speculative: dict[str, Any],
    ids: list[int],
    distribution: dict[tuple[int, ...], float],
    plain: list[list[int]],
) -> None:
    with engine(speculative, rule) as served:
        found = sample(served, ids)
        assert sum(found["accepted"]) > SAMPLES / 4
        assert p_value(distribution, found["outputs"]) > 1e-3
        assert sample(served, ids, 8, **GREEDY)["outputs"] == plain


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real chat model as a folder, its shipped head below it."""
    folder = tmp_path_factory.mktemp("chat") / "model"
    command = [
        sys.executable,
        "-m",
        "polydraft",
        "models",
        "export",
        "smollm2-135m-instruct",
        "--head",
        "shipped",
        "--out",
        str(folder),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"the chat model could not be fetched: {done.stderr[-200:]}")
    return folder


@pytest.mark.parametrize(("rule", "drafter"), [("match", "suffix"), ("block", "head"), ("race", "suffix")])
def test_texts_of_the_chat_model_follow_its_distribution(rule: str, drafter: str, chat: Path) -> None:
    from transformers import AutoTokenizer

    count = 1000
    length = 3
    ids = AutoTokenizer.from_pretrained(chat).encode("one two three one two three one two")
    head = {
        "method": "eagle3",
        "model": str(chat / "head"),
        "num_speculative_tokens": 2,
        "draft_sample_method": "probabilistic",
    }
    with engine(SUFFIX if drafter == "suffix" else head, rule, chat) as served:
        found = sample(served, ids, count, max_tokens=length)
    assert sum(found["accepted"]) > count / 20
    distribution = texts_that_follow(ids, length, top_k=TOP_K, truncated=True, folder=chat)
    assert p_value(distribution, found["outputs"]) > 1e-3


def test_vllms_own_rejection_sampler_is_caught_without_a_gpu(ids: list[int]) -> None:
    ngram = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 4, "num_speculative_tokens": 3}
    distribution = texts_that_follow(
        ids, 2, top_k=64
    )  # so many first tokens, each with as many; the rest is one cell
    found = {}
    for name, speculative, rule in (("vLLM", ngram, None), ("ours", SUFFIX, "match")):
        with engine(speculative, rule) as served:
            outputs = sample(served, ids, top_k=0)["outputs"]
        found[name] = p_value(distribution, [text[:2] for text in outputs])
    assert found["vLLM"] < 1e-6 < 1e-3 < found["ours"]


def test_seeded_races_give_the_same_texts_with_and_without_drafts(ids: list[int]) -> None:
    def texts(speculative: dict[str, Any] | None) -> list[list[int]]:
        with engine(speculative, "race") as served:
            return served.generate([ids] * 32, seeds=list(range(32)), temperature=1.0, max_tokens=24)[
                "outputs"
            ]

    with_drafts = texts(SUFFIX)
    assert with_drafts == texts(None) and len({*map(tuple, with_drafts)}) > 16


def test_a_store_drafts_from_what_earlier_requests_ended_with(ids: list[int]) -> None:
    with engine(SUFFIX, "match", **{OPTIONS: '{"store": true}'}) as served:
        first, again = (served.generate([ids[:8]], temperature=0, max_tokens=32) for _ in range(2))
    assert first["outputs"] == again["outputs"] and sum(again["accepted"]) > sum(first["accepted"])


def test_a_drafter_that_reads_the_target_is_refused() -> None:
    heads = {**SUFFIX, "model": "polydraft.integrations.vllm.drafters.phrases"}
    with pytest.raises(IncompatibleError, match="texts alone"), engine(heads, "match"):
        pass


def test_the_study_measures_every_contender_on_the_same_prompts(tmp_path: Path) -> None:
    asked = ["--quick", "--only", "suffix, match", "--out", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "studies.inside_vllm", str(pair.target_folder()), *asked],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads((tmp_path / "inside_vllm.json").read_text())["rows"]
    assert {row["contender"] for row in rows} == {"without drafts", "suffix, match"}
    assert all(row["same_texts"] == 1 for row in rows if row["temperature"] == 0)
