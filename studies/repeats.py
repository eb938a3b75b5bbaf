"""Repeats of agents: transcripts of file edits, replayed by drafters from text and by `state-lookup`. Tokens per step.

    python -m studies.repeats --model FILE [--count 3] [--out docs/results]

A transcript edits two files as two commits of this repository did: a user's message, a call that reads the file, the file, a call that writes it whole, a
call that runs tests, an answer. What the assistant says is replayed: the text itself goes on, as by a target that is certain of it. States are those of
the model, from one forward pass over the transcript.
"""

import argparse
import json
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from polydraft.bench.record import csv_table, markdown_table, write_texts
from polydraft.core import Budget, Request, SamplingParams
from polydraft.drafters.text.ngram import NgramDrafter
from polydraft.drafters.text.state_lookup import StateLookupDrafter
from polydraft.drafters.text.suffix import SuffixDrafter
from polydraft.models import load

ROOT = Path(__file__).parents[1]
BUDGETS = {"chain of 8": Budget.grown(8, 8, 1), "tree of 16": Budget.grown(16, 8, 4)}
MOST_CHANGED = 12
"""Lines that a commit adds to or takes from a file, at most."""
LENGTHS = range(800, 2200)
"""Of a file, in characters."""
MOST_TOKENS = 2600


class Part(NamedTuple):
    """Of a transcript. said: by the assistant."""

    text: str
    said: bool


def git(*given: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *given], capture_output=True, text=True, check=False)
    return done.stdout


def edits() -> Iterator[tuple[str, str, str, str]]:
    """(path, old text, new text, message) of small commits, a file once."""
    seen = set[str]()
    for commit in git("log", "--no-merges", "--format=%H", "-400").split():
        for line in git("show", "--numstat", "--format=", commit).splitlines():
            added, taken, path = line.split("\t")[:3]
            if not path.endswith(".py") or "=>" in path or path in seen:
                continue
            if not (1 <= int(added) <= MOST_CHANGED and int(taken) <= MOST_CHANGED):
                continue
            old = git("show", f"{commit}~1:{path}")
            if len(old) in LENGTHS:
                seen.add(path)
                yield (
                    path,
                    old,
                    git("show", f"{commit}:{path}"),
                    git("log", "-1", "--format=%s", commit).strip(),
                )
                break


def call(name: str, **arguments: str) -> Part:
    written = json.dumps({"name": name, "arguments": arguments})
    return Part(f"<tool_call>{written}</tool_call><|im_end|>\n", said=True)


def heard(role: str, text: str) -> Part:
    return Part(f"<|im_start|>{role}\n{text}<|im_end|>\n<|im_start|>assistant\n", said=False)


def transcript(files: Sequence[tuple[str, str, str, str]]) -> Iterator[Part]:
    """Two turns or more, a file each."""
    for path, old, new, message in files:
        yield heard("user", f"{message}: {path}")
        yield call("read_file", path=path)
        yield heard("tool", old)
        yield call("write_file", path=path, content=new)
        yield heard("tool", "written")
        yield call("run", command=f"pytest -q {path}")
        yield heard("tool", "3 passed in 0.4s")
        yield Part(f"The file {path} is changed and its tests pass.<|im_end|>\n", said=True)


class Replay:
    """One drafter along a transcript. states: [T, D] of its tokens for one that is keyed by them."""

    def __init__(self, drafter: Any, tokens: Sequence[int], start: int, states: np.ndarray | None) -> None:
        self.drafter = drafter
        self.tokens = tokens
        self.states = states
        request = Request("r", tuple(tokens[:start]), SamplingParams(), seed=0)
        (self.state,) = drafter.start([request])
        if states is not None:
            self.state.tell(0, states[: start - 1])

    def go_on(self, begin: int, end: int) -> None:
        """The text goes on by tokens begin to end."""
        if self.states is not None:
            self.state.tell(begin - 1, self.states[begin - 1 : end - 1])
        self.state.extend(self.tokens[begin:end])

    def accepted(self, begin: int, end: int, budget: Budget) -> int:
        """Drafted tokens that the text has, up to `end`."""
        tree = self.drafter.propose([self.state], [budget]).tree
        children = {
            (int(tree.parents[0, n]), int(tree.tokens[0, n])): n
            for n in range(1, tree.num_nodes)
            if tree.parents[0, n] >= 0
        }
        node = 0
        count = 0
        while begin + count < end and (node, self.tokens[begin + count]) in children:
            node = children[node, self.tokens[begin + count]]
            count += 1
        return count


def steps(replay: Replay, spans: Sequence[tuple[int, int, bool]], budget: Budget) -> tuple[int, int]:
    """(tokens, steps) of what is said. spans: (begin, end, said) behind the first part."""
    num_tokens = 0
    num_steps = 0
    for begin, end, said in spans:
        if not said:
            replay.go_on(begin, end)
            continue
        at = begin
        while at < end:
            stop = min(at + replay.accepted(at, end, budget) + 1, end)
            replay.go_on(at, stop)
            at = stop
            num_steps += 1
        num_tokens += end - begin
    return num_tokens, num_steps


def measured(target: Any, tokenizer: Any, parts: Sequence[Part]) -> Iterator[tuple[str, str, int, int]]:
    """(budget, drafter, tokens, steps) of one transcript."""
    tokens = list[int]()
    spans = list[tuple[int, int, bool]]()
    for part in parts:
        ids = tokenizer(part.text, add_special_tokens=False)["input_ids"][: MOST_TOKENS - len(tokens)]
        spans.append((len(tokens), len(tokens) + len(ids), part.said))
        tokens += ids
    offered = sorted(target.offers.hidden)
    layers = sorted({offered[len(offered) // 3], offered[len(offered) * 2 // 3], offered[-2], offered[-1]})
    target.release([0])
    hidden = target.prefill([0], [tokens], hidden=tuple(layers)).hidden
    start = spans[0][1]
    for name, budget in BUDGETS.items():
        ways: dict[str, tuple[Any, np.ndarray | None]] = {
            "ngram": (NgramDrafter(), None),
            "suffix": (SuffixDrafter(), None),
        }
        for layer in layers:
            keyed = StateLookupDrafter(target, layer=layer)
            ways[f"state-lookup, layer {layer} of {offered[-1]}"] = keyed, hidden[layer][0]
        for way, (drafter, states) in ways.items():
            yield name, way, *steps(Replay(drafter, tokens, start, states), spans[1:], budget)


COLUMNS = ("draft", "drafter", "tokens", "steps", "tokens_per_step")


def page(rows: Sequence[Sequence[Any]], count: int, model: str) -> str:
    """docs/results/agent-repeats.md."""
    lines = [
        "# Repeats of agents",
        "",
        f"`python -m studies.repeats`: {count} transcripts of an agent that edits two files each as commits of this repository did, replayed. Tokens of the",
        f"assistant per step; states of {model}. A replayed text goes on as by a target that is certain of it: what drafts are worth for a target that writes so.",
        "",
        markdown_table([name.replace("_", " ") for name in COLUMNS], rows),
        "",
        "`state-lookup` is ahead of `ngram` here. It is no default: it has the target hand out states at every step, and other text is not measured.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m studies.repeats")
    parser.add_argument("--model", required=True, help="a model whose tokenizer has <|im_start|>")
    parser.add_argument("--count", type=int, default=3)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results")
    given = parser.parse_args()
    tokenizer = load.load_tokenizer(given.model)
    target = load.load_model(given.model, max_num_seqs=1, max_model_len=4096)
    files = edits()
    totals = dict[tuple[str, str], np.ndarray]()
    for number in range(given.count):
        parts = list(transcript([next(files), next(files)]))
        for draft, way, num_tokens, num_steps in measured(target, tokenizer, parts):
            before = totals.get((draft, way), np.zeros(2, np.int64))
            totals[draft, way] = before + np.array([num_tokens, num_steps])
        print(number + 1, {key: round(a / b, 3) for key, (a, b) in totals.items()}, flush=True)
    rows = [(*key, int(a), int(b), f"{a / b:.2f}") for key, (a, b) in totals.items()]
    text = page(rows, given.count, Path(given.model).stem)
    file = given.out / "agent-repeats.md"
    write_texts({file: text, file.with_suffix(".csv"): csv_table(COLUMNS, rows)})


if __name__ == "__main__":
    main()
