"""What a running server's first tokens take behind a prompt that it knows, and what a joining prompt does to a stream: `python -m studies.serving URL`."""

import json
import sys
import threading
from itertools import pairwise
from statistics import median
from time import perf_counter, sleep, time_ns
from typing import Any

import httpx

RULES = [
    f"Rule {i}: answer briefly about topic number {i * 7 % 101} and cite section {i}." for i in range(60)
]


def ask(url: str, system: str, question: str) -> tuple[float, dict[str, Any]]:
    """Seconds to the first event of a chat, and its usage."""
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    body = {
        "messages": messages,
        "max_tokens": 4,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    began = perf_counter()
    first = 0.0
    usage = {}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=120) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                first = first or perf_counter() - began
                usage = json.loads(line[6:]).get("usage") or usage
    return first, usage


def arrivals(url: str, found: list[float]) -> None:
    """When each event of a stream of 400 tokens came."""
    body = {
        "prompt": "Once upon a time",
        "max_tokens": 400,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "logprobs": 0,
    }
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as answer:
        found += [perf_counter() for line in answer.iter_lines() if line.startswith("data: {")]


def told(gaps: list[float]) -> str:
    """Median and 99th percentile in milliseconds."""
    ordered = sorted(gaps) or [0.0]
    return (
        " / ".join(f"{1e3 * ordered[int(q * (len(ordered) - 1))]:.1f}" for q in (0.5, 0.99))
        + f" ms of {len(gaps)}"
    )


def main(url: str) -> None:
    """Both measurements."""
    cold = []
    warm = []
    for k in range(2):
        system = f"Set {k}-{time_ns()}. " + " ".join(RULES[k : k + 36])
        cold.append(ask(url, system, "What is rule 3?"))
        warm.append(ask(url, system, "Name another rule, please."))
    first = median(c[0] for c in cold)
    again = median(w[0] for w in warm)
    print(
        f"first token {first:.3f} s, behind a known prompt {again:.3f} s, {first / again:.1f}x; {warm[-1][1]['prompt_tokens_details']}"
    )
    found: list[float] = []
    stream = threading.Thread(target=arrivals, args=(url, found))
    stream.start()
    sleep(1.5)
    began = perf_counter()
    waited, usage = ask(url, f"Fresh {time_ns()}. " + " ".join(RULES[:44]), "Hi")
    stream.join()
    gaps = [(at, at - before) for before, at in pairwise(found[5:])]
    alone = [gap for at, gap in gaps if at < began or at > began + waited + 0.5]
    joining = [gap for at, gap in gaps if began <= at <= began + waited]
    print(
        f"between events alone {told(alone)}; while {usage['prompt_tokens']} tokens joined {told(joining)}; first token of these {waited:.2f} s"
    )


if __name__ == "__main__":
    main(sys.argv[1])
