"""`python -m studies.guessed_drafts`: what guessed tokens in the forward passes of a draft model save, see `polydraft.models.compiled.guesses`.

Each prompt is answered with guesses and without, by turns, with the same seed. Tokens and q are the same bits; the policy's choices depend on
measured seconds, so that texts above temperature 0 may differ.

    passes    of the draft model, for each step that it drafts in
    drafts    CPU seconds of drafting for each token of the answers, with guesses over without
    whole     CPU seconds for each token, prompts left out, with guesses over without
"""

from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer

from polydraft import Engine, SamplingParams
from polydraft.bench.record import markdown_table
from polydraft.core import Request
from polydraft.models.compiled.proposals import CompiledProposals
from polydraft.numerics.clock import clock
from studies.draft_vocabulary import prompts
from studies.options import Quick

__all__ = ["answered", "main"]

TEMPERATURES = 0.0, 1.0


def answered(engine: Any, prompt: tuple[int, ...], params: SamplingParams, seed: int, *, guesses: bool) -> Counter[str]:
    """Answer a prompt; returns seconds by phase, and numbers of `tokens`, `passes` of the draft model and `drafts`, steps with some."""
    model, drafter = engine.drafter.model, engine.drafter
    texts, propose, totals = model.read_texts, drafter.propose, Counter[str]()

    def counted(states: Any, budgets: Any) -> Any:
        before = model.passes
        draft = propose(states, budgets)
        totals.update(passes=model.passes - before, drafts=model.passes > before)
        return draft

    model.read_texts, drafter.propose = texts if guesses else CompiledProposals.read_texts, counted
    try:
        sample = engine.add_request(Request(f"{seed}-{params.temperature}-{guesses}", prompt, params, seed))
        while engine.has_unfinished_requests:
            engine.step()
    finally:
        model.read_texts, drafter.propose = texts, propose
    totals.update({phase: seconds for phase, seconds in sample.stats.seconds.items() if phase != "prefill"})
    totals["tokens"] = len(sample.token_ids)
    return totals


def main(
    model: Annotated[
        str, typer.Option(help="Model as of `polydraft generate`, with a draft model.")
    ] = "qwen2.5-coder-1.5b-instruct",
    code: Annotated[Path, typer.Option(help="HumanEval.jsonl.gz.")] = Path("HumanEval.jsonl.gz"),
    chat: Annotated[Path, typer.Option(help="Questions of Spec-Bench.")] = Path("spec_bench.jsonl"),
    count: Annotated[int, typer.Option(min=2, help="Prompts of a kind.")] = 20,
    max_tokens: Annotated[int, typer.Option(min=2)] = 96,
    quick: Quick = False,
) -> None:
    """Print the table."""
    engine: Any = Engine.from_pretrained(model, threads=1, max_num_seqs=1, max_model_len=2048)
    engine._clock = clock(engine.target)
    engine.measure()
    texts, lines = prompts(code, chat, 2 if quick else count), list[list[str]]()
    for temperature in TEMPERATURES:  # what is compiled for them is no part of any answer
        engine.generate(["import os\n"], SamplingParams(temperature=temperature, max_tokens=16, ignore_eos=True))
    for kind in ("code", "chat"):
        for temperature in TEMPERATURES:
            params = SamplingParams(temperature=temperature, max_tokens=16 if quick else max_tokens)
            totals = {True: Counter[str](), False: Counter[str]()}
            for number, text in enumerate(texts[kind]):
                ids = tuple(engine.encode_chat([{"role": "user", "content": text}]))
                for guesses in (True, False) if number % 2 else (False, True):
                    totals[guesses].update(answered(engine, ids, params, number, guesses=guesses))
            some, none = totals[True], totals[False]
            whole = [
                sum(s for phase, s in t.items() if phase not in ("tokens", "passes", "drafts")) / t["tokens"]
                for t in (some, none)
            ]
            drafting = [t["drafting"] / t["tokens"] for t in (some, none)]
            passes = [f"{t['passes'] / max(t['drafts'], 1):.2f}" for t in (none, some)]
            lines.append([kind, f"{temperature:g}", *passes, f"{drafting[0] / drafting[1]:.2f}", f"{whole[0] / whole[1]:.3f}"])
            typer.echo(str(lines[-1]), err=True)
    head = ["text", "T", "passes a draft", "with guesses", "drafts", "whole"]
    typer.echo(markdown_table(head, lines))


if __name__ == "__main__":
    typer.run(main)
