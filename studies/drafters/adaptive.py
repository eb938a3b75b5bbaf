"""`python -m studies.drafters.adaptive --prompts FILE`: what ADED and Ouroboros gain by learning while they draft, on questions.

static, adaptive   ADED's table as counted from the corpus, and with updates in a store of the request's own
explored           ADED by its weight c1 of exploration; 0 follows what was drafted before
equal memory       a static table of as many bytes as a smaller one and the store of updates have together
learned            Ouroboros with phrases of the text and of corrections, kept for a request or for the session, beside its small model alone

The embedded target writes three answers to each question without drafts; every drafter then replays these texts. Requests come one after the other.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from polydraft.bench.record import csv_table, write_texts
from polydraft.cli.files import say_written
from polydraft.cli.progress import bars
from polydraft.drafters.text.index_file import fingerprint
from polydraft.drafters.text.text_index import TextIndex
from polydraft.papers.lookahead.phrase_pool import PhrasePool
from polydraft.papers.trigram.drafter import TrigramStore
from polydraft.papers.trigram.table import TrigramTable
from studies.drafters.comparison import Contender, DrafterBench, Row, Task
from studies.options import Out, Quick
from studies.question_files import Question, questions

HEAD = ("drafter", "tokens_per_step", "standard_error", "bytes")
STORE_PAIRS = 4096
EXPLORATION = (0.0, 8.0, 32.0, 128.0)


@dataclass(kw_only=True)
class QuestionBench(DrafterBench):
    """The bench of drafters, whose one workload are questions. asked: by turns of their categories."""

    asked: tuple[Question, ...]

    def tasks(self, workload: str) -> list[Task]:
        """The questions; nothing is known to go on from them."""
        return [Task(self.encode(question.text + "\n"), []) for question in self.asked]

    def index_of(self, num_documents: int) -> TextIndex:
        """Over the first documents of the corpus."""
        documents = self.documents[:num_documents]
        return TextIndex.build(documents, self.target.vocab_size, tokens_of=fingerprint(self.tokenizer))

    def smaller_index(self) -> TextIndex:
        """The longest beginning of the corpus whose table leaves room for a store of updates in the bytes of the whole one."""
        room = TrigramTable.of(self.index).num_bytes - TrigramStore(STORE_PAIRS).num_bytes
        least = 0
        most = len(self.documents)
        while most - least > 1:
            middle = (least + most) // 2
            if TrigramTable.of(self.index_of(middle)).num_bytes <= room:
                least = middle
            else:
                most = middle
        return self.index_of(least)


def contenders(bench: QuestionBench) -> list[Contender]:
    """What is set beside what, see the module."""
    smaller = bench.smaller_index()
    explored = [
        Contender(f"trigram, c1 = {c1:g}", "trigram", lambda bench, c1=c1: {"index": bench.index, "c1": c1})
        for c1 in EXPLORATION
    ]
    return [
        Contender("trigram, static", "trigram", lambda bench: {"index": bench.index, "bump": 0.0}),
        Contender("trigram, adaptive", "trigram", lambda bench: {"index": bench.index}),
        Contender("trigram, adaptive, equal memory", "trigram", lambda bench: {"index": smaller}),
        Contender(
            "trigram, adaptive, one store for the session",
            "trigram",
            lambda bench: {"index": bench.index, "store": TrigramStore(STORE_PAIRS)},
        ),
        *explored,
        Contender("ngram", "ngram"),
        Contender("model:top_k", "model:top_k", model=True),
        Contender("phrases", "phrases", model=True),
        Contender(
            "phrases, one pool for the session", "phrases", lambda bench: {"pool": PhrasePool(3)}, model=True
        ),
        Contender("phrases, none at the end", "phrases", lambda bench: {"length": bench.depth}, model=True),
    ]


def size(bench: QuestionBench, contender: Contender) -> int:
    """Bytes of what a contender learnt or is given; 0 where it has but the text."""
    drafter: Any = bench.drafter(contender, bench.target)
    known = getattr(drafter, "table", None)
    learnt = getattr(drafter, "store", None) or getattr(drafter, "pool", None)
    if known is not None and learnt is None and contender.options(bench).get("bump") != 0.0:
        learnt = TrigramStore(drafter.max_pairs)
    return sum(part.num_bytes for part in (known, learnt) if part is not None)


def line(bench: QuestionBench, row: Row, contender: Contender) -> list[str]:
    """A line of the table."""
    return [
        contender.name,
        f"{row.tokens_per_step:.3f}",
        f"{row.error():.3f}",
        str(size(bench, contender)),
    ]


def main(
    prompts: Annotated[list[Path], typer.Option(help="File of questions, .jsonl; may be repeated.")],
    category: Annotated[list[str] | None, typer.Option(help="Category of the questions.")] = None,
    count: Annotated[int, typer.Option(help="Number of questions of each category.")] = 3,
    out: Out = Path("build/drafters"),
    quick: Quick = False,
) -> None:
    """Write adaptive.csv."""
    asked = questions(prompts, 1 if quick else count, category or ())
    small: dict[str, Any] = {"num_tokens": 24, "index_bytes": 200_000} if quick else {"num_tokens": 96}
    bench = QuestionBench(asked=tuple(asked[:2] if quick else asked), **small)
    lines = list[list[str]]()
    every = contenders(bench)
    with bars("measuring") as step:
        for contender in every:
            row = bench.run(contender, "questions", "paired")
            lines.append(line(bench, row, contender))
            step(len(every))
    out.mkdir(parents=True, exist_ok=True)
    say_written(write_texts({out / "adaptive.csv": csv_table(HEAD, lines)}))


if __name__ == "__main__":
    typer.run(main)
