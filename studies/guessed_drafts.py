"""`python -m studies.guessed_drafts`: how many forward passes of a draft model guesses from n-grams would save, and what of a whole step that is.

A draft model's chain can be guessed from the text before it is drawn: one pass then reads the guessed tokens, too, and each drawn token that is
the guessed one has its row already. Tokens, and the q that they are drawn from, stay what they are, bit by bit. Steps are those of the default:
where it copies a repeat of the text, or drafts nothing, there is nothing to save. Its drafts are recorded, and walked anew with guesses.

    source    of a guess: a repeat of the last 8 .. 1 tokens of the text, the longest and then the latest, or a trigram of the other prompts' texts
    guesses   up to MOST of them, as many as pay by the share of right ones of each source in these very texts: no rule does better
    pass      CPU seconds of a proposal of one token that reads so many rows, medians by turns
    saved     share of all seconds of the answers, if the policy drafts what it does now; draws are held to cost nothing
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from time import process_time
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer

from polydraft import Engine, SamplingParams
from polydraft.bench.record import markdown_table
from polydraft.core import Budget, Draft, Request
from polydraft.core.geometry import chain
from polydraft.numerics.clock import clock
from studies.draft_vocabulary import prompts
from studies.options import Quick

__all__ = ["Chain", "Figures", "Guesser", "Recorder", "figures", "main", "row_seconds", "walked"]

MOST = 3
"""Guessed tokens of a pass: with the drawn one before them they fill a tile of four rows."""
LONGEST = 8
"""Tokens of a repeat, at most."""
TEMPERATURES = 0.0, 1.0
TRIGRAM = LONGEST + 1
"""The source behind repeats of one token and more."""


class Chain(NamedTuple):
    """A draft of the model. text: committed tokens before it.  tokens: drawn.  depth: most that would have been.  passes: of the model."""

    text: tuple[int, ...]
    tokens: tuple[int, ...]
    depth: int
    passes: int


class Recorder:
    """Notes each chain that a drafter draws with its model."""

    def __init__(self, drafter: Any) -> None:
        self.chains, self._model, self._propose = list[Chain](), drafter.model, drafter.propose
        drafter.propose = self

    def __call__(self, states: Sequence[Any], budgets: Sequence[Any]) -> Draft:
        before = self._model.passes
        draft = self._propose(states, budgets)
        (tokens,), (parents,) = draft.tree.lists
        drawn, node = list[int](), 0
        while node in parents:
            node = parents.index(node)
            drawn.append(tokens[node])
        if drawn:
            self.chains.append(Chain(tuple(states[0].context), tuple(drawn), budgets[0].max_depth, self._model.passes - before))
        return draft


class Guesser:
    """Guesses what follows a text. others: the texts whose trigrams are known."""

    def __init__(self, others: Sequence[Sequence[int]] = ()) -> None:
        successors: dict[tuple[int, int], Counter[int]] = {}
        for text in others:
            for a, b, c in zip(text, text[1:], text[2:], strict=False):
                successors.setdefault((a, b), Counter())[c] += 1
        self._following = {pair: counts.most_common(1)[0][0] for pair, counts in successors.items()}

    def next(self, text: Sequence[int]) -> tuple[int, int] | None:
        """A token, and its source: the length of the repeat, or TRIGRAM; None where nothing is known."""
        best, place = 0, -1
        for at in range(len(text) - 1, 0, -1):
            length = 0
            while length < min(LONGEST, at) and text[at - 1 - length] == text[len(text) - 1 - length]:
                length += 1
            if length > best:
                best, place = length, at
                if best == LONGEST:
                    break
        if best < 2 and (token := self._following.get(tuple(text[-2:]))) is not None:  # pyright: ignore[reportArgumentType]
            return token, TRIGRAM
        return (text[place], best) if best else None

    def guesses(self, text: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Of the next tokens, each behind the one before."""
        text = list(text)
        while (guess := self.next(text)) is not None:
            yield guess
            text.append(guess[0])


def _right(chains: Sequence[tuple[Guesser, Chain]]) -> dict[int, float]:
    """Share of right guesses by source, one for every drawn token."""
    tries, hits = Counter[int](), Counter[int]()
    for guesser, draft in chains:
        for k, token in enumerate(draft.tokens):
            if guess := guesser.next([*draft.text, *draft.tokens[:k]]):
                tries[guess[1]] += 1
                hits[guess[1]] += guess[0] == token
    return {source: hits[source] / count for source, count in tries.items()}


def walked(guesser: Guesser, draft: Chain, right: Mapping[int, float], seconds: Sequence[float]) -> list[int]:
    """Rows of each forward pass of a draft with guesses. seconds: of a pass of 1, 2 .. rows.

    Example:
        >>> draft = Chain((1, 2, 3, 1), (2, 3, 9, 4), 4, 4)
        >>> walked(Guesser(), draft, {1: 1.0, 2: 1.0, 3: 1.0}, [1.0, 1.0, 1.0, 1.0])
        [4, 1]
    """
    rows, at = list[int](), 0
    while at < len(draft.tokens):
        guessed, reach = list[int](), 1.0
        for token, source in guesser.guesses([*draft.text, *draft.tokens[:at]]):
            count = len(guessed)
            reach *= right.get(source, 0.0)
            # a row behind the last token of the draft is of no use
            if count == MOST or at + count + 1 >= draft.depth or reach * seconds[0] <= seconds[count + 1] - seconds[count]:
                break
            guessed.append(token)
        rows.append(1 + len(guessed))
        following = draft.tokens[at : at + len(guessed)]
        at += 1 + next((k for k, (a, b) in enumerate(zip(guessed, following, strict=False)) if a != b), len(following))
    return rows


class Figures(NamedTuple):
    """Of some texts: steps, those with drafts of the model, passes of such a step without guesses and with, rows of a pass with guesses, shares."""

    steps: int
    drafting: int
    passes: float
    with_guesses: float
    rows: float
    share_of_drafts: float
    saved: float


def row_seconds(drafter: Any, text: Sequence[int], repetitions: int) -> np.ndarray:
    """[repetitions, MOST + 1] CPU seconds of a draft of one token that reads so many rows, by turns; the drafter is idle."""
    begin, seconds = len(text) - MOST - 1, np.zeros((repetitions, MOST + 1))
    (state,) = drafter.start([Request("rows", tuple(text[: begin + 1]), SamplingParams(temperature=1.0), 0)])
    for repetition in range(repetitions):
        for rows in range(1, MOST + 2):
            pending = tuple(text[begin : begin + rows])
            state = replace(state, context=(*text[:begin], *pending), pending=pending)
            start = process_time()
            drafter.propose([state], [Budget.fixed(chain(1))])
            seconds[repetition, rows - 1] = process_time() - start
    drafter.release([state])
    return seconds


def figures(
    chains: Sequence[tuple[Guesser, Chain]], seconds: Sequence[float], totals: Mapping[str, float], steps: int
) -> Figures:
    """totals: seconds of the answers by phase."""
    right = _right(chains)
    rows = [walked(guesser, draft, right, seconds) for guesser, draft in chains]
    passes, guessed = sum(draft.passes for _, draft in chains), sum(map(len, rows))
    ends = sum(draft.passes - len(draft.tokens) for _, draft in chains)  # passes whose token is not part of the chain stay
    plain = passes * seconds[0]
    cheaper = sum(seconds[count - 1] for each in rows for count in each) + ends * seconds[0]
    whole, count = sum(totals.values()), max(len(chains), 1)
    mean_rows = sum(map(sum, rows)) / max(guessed, 1)
    return Figures(
        steps,
        len(chains),
        passes / count,
        (guessed + ends) / count,
        mean_rows,
        totals["drafting"] / whole,
        (plain - cheaper) / max(plain, 1e-12) * totals["drafting"] / whole,
    )


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
    engine = Engine.from_pretrained(model, threads=1, max_num_seqs=1, max_model_len=2048)
    engine._clock = clock(engine.target)
    engine.measure()
    drafter: Any = engine.drafter
    recorder, lines = Recorder(drafter), list[list[str]]()
    texts = prompts(code, chat, 2 if quick else count)
    for temperature in TEMPERATURES:  # what is compiled for them is no part of any answer
        engine.generate(["import os\n"], SamplingParams(temperature=temperature, max_tokens=16, ignore_eos=True))
    for kind in ("code", "chat"):
        encoded = [engine.encode_chat([{"role": "user", "content": text}]) for text in texts[kind]]
        for temperature in TEMPERATURES:
            params = SamplingParams(temperature=temperature, max_tokens=16 if quick else max_tokens)
            drafted, answers = list[list[Chain]](), list[list[int]]()
            totals, steps, seconds = Counter[str](), 0, list[np.ndarray]()
            for number, ids in enumerate(encoded):
                recorder.chains = []
                sample = engine.add_request(Request(f"{kind}-{temperature}-{number}", tuple(ids), params, number))
                while engine.has_unfinished_requests:
                    engine.step()
                drafted.append(list(recorder.chains))
                answers.append([*ids, *sample.token_ids])
                steps += sample.stats.steps
                totals.update({phase: s for phase, s in sample.stats.seconds.items() if phase != "prefill"})
                seconds.append(row_seconds(drafter, answers[-1], 3))
            guessers = [Guesser([text for n, text in enumerate(answers) if n != number]) for number in range(len(answers))]
            chains = [(guesser, draft) for guesser, each in zip(guessers, drafted, strict=True) for draft in each]
            median = np.median(np.concatenate(seconds), 0)
            row = figures(chains, median.tolist(), totals, steps)
            costs = " ".join(f"{x / median[0]:.2f}" for x in median)
            means = f"{row.passes:.2f}", f"{row.with_guesses:.2f}", f"{row.rows:.2f}"
            shares = f"{row.share_of_drafts:.0%}", f"{row.saved:.1%}"
            lines.append([kind, f"{temperature:g}", str(row.steps), str(row.drafting), *means, costs, *shares])
            typer.echo(str(lines[-1]), err=True)
    head = ["text", "T", "steps", "with the model's drafts", "its passes a draft", "with guesses", "rows of each"]
    typer.echo(markdown_table([*head, "cost of 1 .. 4 rows", "drafts' share of time", "saved of all"], lines))


if __name__ == "__main__":
    typer.run(main)
