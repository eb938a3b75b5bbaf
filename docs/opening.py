"""The example at the top of the README: the run of median speed-up of the default method on the embedded pair.

    python docs/opening.py [REPETITIONS] [PROFILE]      prints every prompt's speed-up, then the example

Every short held-out prompt is continued REPETITIONS times with different seeds at temperature 1, with drafts and without, in turn.
PROFILE: what `polydraft tune --save` wrote; without it the engine learns what rounds cost as it goes, from nothing.
Speeds are tokens per second of processor time, as others may use the machine meanwhile; everything runs on one thread.
"""

import os
import sys
from statistics import median
from tempfile import TemporaryDirectory

import torch

from polydraft import Engine
from polydraft.bench.compare import Run, engine_contender, measure
from polydraft.bench.record import processor
from polydraft.models import pair

MAX_TOKENS = 64
MARK = "│"
"""Ends a pass; not the `|` that texts hold."""


def rate(run: Run) -> float:
    return run.num_tokens / run.cpu_seconds


class Watched(Engine):
    """An engine that keeps the pieces of text that its steps emitted, a list for each request."""

    def step(self):
        outputs = super().step()
        for o in outputs:
            self.pieces[-1].append(o.text)
            if o.finished:
                self.pieces.append([])
        return outputs


def main(repetitions: int, profile: str | None = None, num_prompts: int | None = None) -> None:
    torch.set_num_threads(1)
    with TemporaryDirectory() as nothing:
        os.environ["POLYDRAFT_CACHE"] = nothing
        compare(repetitions, profile, num_prompts)


def compare(repetitions: int, profile: str | None, num_prompts: int | None) -> None:
    engine, plain = Watched.embedded(max_num_seqs=1, profile=profile), Engine.embedded(max_num_seqs=1, drafter=None)
    engine.pieces = [[]]
    texts = {p.name: p.text for p in pair.prompts() if not p.name.endswith("-long")}
    names = list(texts)[:num_prompts]
    prompts = {name: engine.encode(texts[name]) for name in names}
    contenders = [engine_contender("without drafts", plain, 1.0), engine_contender("with drafts", engine, 1.0)]
    measure(contenders, [prompts[names[0]]] * 2, max_tokens=MAX_TOKENS, repetitions=1)  # compiles
    engine.pieces = [[]]
    without, drafted = measure(contenders, list(prompts.values()), max_tokens=MAX_TOKENS, repetitions=repetitions)
    runs = list(zip(without.runs, drafted.runs, strict=True))
    ratios = [rate(b) / rate(a) for a, b in runs]
    for i, name in enumerate(names):
        print(f"{name:20} {median(ratios[i :: len(names)]):.2f}x")
    number = sorted(range(len(runs)), key=ratios.__getitem__)[len(runs) // 2]
    name, (slow, fast) = names[number % len(names)], runs[number]
    print(
        f"\n{name}, seed {number}: median of {len(runs)} runs, {ratios[number]:.2f}x, from {min(ratios):.2f}x to {max(ratios):.2f}x"
    )
    for title, run in (("without drafts", slow), ("with drafts", fast)):
        print(f"{title}: {run.stats[0].target_calls} passes, {rate(run):.0f} tokens/s")
    print(f"{processor()}; drafter {engine.drafter and engine.drafter.info.name}, verifier {engine.verifier.info.name}\n")
    print(*texts[name].splitlines()[-1:], MARK.join(engine.pieces[number]), sep="\n")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5, sys.argv[2] if len(sys.argv) > 2 else None)
