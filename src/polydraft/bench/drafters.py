"""Drafters that need no training, measured against each other at one node budget.

Three workloads, each in three ways:

    python   the middle of modules that neither the embedded target nor an index has seen
    edits    a function, then the same function with a name changed, to be copied
    chat     turns of a conversation about one subject

    written  the embedded target continues the prompt, at the given temperature
    paired   three texts that it so wrote on each prompt without drafts go on: the same texts for every drafter, so differences are
             those of the drafters and not of what happened to be written
    replayed the text itself goes on: a target that is certain of it (no pass of a model, so its milliseconds are the drafter's)

Stores that outlive a request (`+store`) start empty and see the requests of one workload one after the other: a session.
"""

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from time import perf_counter
from typing import Any

import numpy as np

from polydraft import registry
from polydraft.bench.record import provenance
from polydraft.bench.scripted_target import ScriptedTarget
from polydraft.bench.texts import library_texts
from polydraft.core import Budget, Drafter, Request, SamplingParams, Target
from polydraft.drafters.base import Parts
from polydraft.drafters.text.index_file import fingerprint
from polydraft.drafters.text.ngram import NgramDrafter
from polydraft.drafters.text.retrieval import RetrievalIndex
from polydraft.drafters.text.suffix import SuffixStore
from polydraft.drafters.text.suffix_tree import SuffixTree
from polydraft.drafters.text.trigram import TrigramStore, TrigramTable
from polydraft.engine.api import Engine
from polydraft.errors import InvalidInputError
from polydraft.models import load, pair
from polydraft.plan.plan import FixedPlan

__all__ = ["CONTENDERS", "LEARNERS", "MIXED", "TEXTS", "WAYS", "WORKLOADS", "Bench", "Contender", "Row", "Task", "compare"]

WORKLOADS = ("python", "edits", "chat")
WAYS = ("written", "paired", "replayed")
TEXTS = 3
"""Texts written on each prompt, for `paired`."""
MIXED = ("ngram", "suffix", "trigram", "retrieval")
"""Sources of the mixture of all."""

CHAT = """
How do I keep tomatoes from splitting? | Tomatoes split when they take up a lot of water after a dry spell. Water them a little every day instead of a lot once a week, and put straw around the plants so that the soil stays moist. | And what if it rains a lot? | When it rains a lot you cannot keep the soil from getting wet, but you can pick the tomatoes a little earlier. Tomatoes that are picked early do not split, and they go on to ripen on a window sill. | Which tomatoes split least? | Small tomatoes split less than large ones, and tomatoes with a thick skin split less than those with a thin skin.
What is the difference between a process and a thread? | A process has its own memory. A thread shares the memory of its process with the other threads of the process. It is cheap to start a thread and expensive to start a process. | When should I use a process? | Use a process when the work must not share memory, or when the interpreter lets only one thread run at a time. Use a thread when the work mostly waits, for a file or for the network. | Can a thread outlive its process? | No. When a process ends, all the threads of the process end with it.
Plan a weekend in a small town by the sea. | On Saturday morning walk along the beach to the lighthouse. At noon eat fish at the harbour. In the afternoon visit the museum, and in the evening listen to music at the harbour. | And on Sunday? | On Sunday morning take the boat to the island. At noon eat at the island. In the afternoon walk along the beach, and in the evening take the train home. | What if it rains? | If it rains on Saturday, visit the museum in the morning and the library in the afternoon. If it rains on Sunday, do not take the boat to the island; visit the lighthouse instead.
Explain compound interest to a child. | Imagine that you have ten coins. Each year the bank gives you one coin for every ten coins that you have. After one year you have eleven coins. After two years you have a little more than twelve coins, because the bank also gives you something for the coin that it gave you before. | Is it the same with twenty coins? | Yes. Each year the bank gives you one coin for every ten coins that you have, so after one year you have twenty-two coins. After two years you have a little more than twenty-four coins. | So what should I do? | Leave the coins at the bank, because the bank also gives you something for the coins that it gave you before.
How do I make bread? | Mix flour, water, salt and yeast. Knead the dough for ten minutes. Let the dough rest for an hour. Shape the dough, let it rest for half an hour and bake it for forty minutes. | Can I make it without yeast? | Yes. Mix flour, water, salt and baking soda. Do not knead the dough and do not let the dough rest. Shape the dough and bake it for forty minutes. | How do I know that it is done? | Knock on the bottom of the bread. If it sounds hollow, the bread is done. If it does not sound hollow, bake it for ten more minutes.
What does a compiler do? | A compiler reads a program in one language and writes the same program in another language. First it reads the text of the program, then it checks the meaning of the program, then it writes the program in the other language. | And an interpreter? | An interpreter reads a program and runs it. First it reads the text of the program, then it checks the meaning of the program, then it runs the program, line by line. | Which one is faster? | A program that a compiler wrote is faster than a program that an interpreter runs, because the compiler reads the text of the program only once.
"""
"""Conversations of our own, a line each, turns separated by |."""


@dataclass(frozen=True)
class Task:
    """A prompt and the text that goes on from it, as token ids."""

    prompt: list[int]
    rest: list[int]


@dataclass(frozen=True)
class Contender:
    """A drafter under a name. options: of its `build`, made anew for each session.  model: with the embedded draft model."""

    name: str
    drafter: str
    options: Callable[["Bench"], dict[str, Any]] = lambda bench: {}
    model: bool = False


@dataclass
class Row:
    """One contender on one workload in one way. steps[r]: tokens emitted by each step of request r.

    Milliseconds a step: own_ms in the drafter's own calls (propose, aux, observe); drafting_ms with the engine's budgets and checks
    of the draft; step_ms in all.
    """

    contender: str
    workload: str
    way: str
    steps: list[list[int]] = field(default_factory=list[list[int]])
    own_ms: float = 0.0
    drafting_ms: float = 0.0
    step_ms: float = 0.0
    accepted_by_source: dict[str, int] = field(default_factory=dict[str, int])
    store_bytes: int = 0

    @property
    def tokens_per_call(self) -> float:
        return float(sum(map(sum, self.steps)) / max(1, sum(map(len, self.steps))))

    def error(self, draws: int = 200) -> float:
        """Standard error of tokens per call, by drawing requests anew."""
        rng = np.random.default_rng(0)
        tokens, calls = np.array([sum(s) for s in self.steps]), np.array([len(s) for s in self.steps])
        picks = rng.integers(0, len(tokens), (draws, len(tokens)))
        return float((tokens[picks].sum(1) / calls[picks].sum(1)).std())

    def curve(self, window: int) -> list[float]:
        """Tokens per call in each window of emitted tokens of a request, all requests together."""
        tokens: dict[int, int] = {}
        calls: dict[int, int] = {}
        for steps in self.steps:
            for at, count in zip(np.cumsum([0, *steps[:-1]]).tolist(), steps, strict=True):
                tokens[at // window] = tokens.get(at // window, 0) + count
                calls[at // window] = calls.get(at // window, 0) + 1
        return [tokens[w] / calls[w] for w in sorted(calls)]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        made = {"tokens_per_call": self.tokens_per_call, "error": self.error(), "curve": self.curve(64)}
        by_request = [sum(s) / max(1, len(s)) for s in self.steps]
        return {k: v for k, v in asdict(self).items() if k != "steps"} | made | {"by_request": by_request}


CONTENDERS: tuple[Contender, ...] = (
    Contender("ngram", "ngram"),
    Contender("suffix", "suffix"),
    Contender("suffix+store", "suffix", lambda bench: {"store": SuffixStore()}),
    Contender("trigram static", "trigram", lambda bench: {"index": bench.trigrams, "bump": 0.0}),
    Contender("trigram", "trigram", lambda bench: {"index": bench.trigrams}),
    Contender("trigram c1=0", "trigram", lambda bench: {"index": bench.trigrams, "c1": 0.0}),
    Contender("trigram+store", "trigram", lambda bench: {"index": bench.trigrams, "store": TrigramStore(1 << 16)}),
    Contender("retrieval", "retrieval", lambda bench: {"index": bench.retrieval}),
    Contender("lookahead", "lookahead"),
    Contender("phrases", "phrases", model=True),
    Contender("model:top_k", "model:top_k", model=True),
    Contender("mixture suffix,trigram", "mixture", lambda bench: {"sources": ["suffix", bench.with_index("trigram")]}),
    Contender(
        "mixture of all",
        "mixture",
        lambda bench: {"sources": [bench.with_index(name) for name in MIXED]},
    ),
)

LEARNERS = ("ngram", "suffix", "trigram static", "trigram", "retrieval", "mixture of all")
"""Whose learning curve is drawn."""


@dataclass(kw_only=True)
class Bench:
    """The embedded target, indexes over the standard library without what is held out, and the workloads.

    nodes, depth, width: the budget of every draft.  num_tokens: of each continuation.  num_requests: of each workload.
    index_bytes: of the corpus of the indexes.
    """

    nodes: int = 16
    depth: int = 8
    width: int = 4
    num_tokens: int = 256
    num_requests: int = 8
    temperature: float = 1.0
    index_bytes: int = 2_000_000

    def __post_init__(self) -> None:
        self.settings = asdict(self)
        self.plan = FixedPlan(Budget.grown(self.nodes, self.depth, self.width))
        self._written: dict[str, list[Task]] = {}
        self.tokenizer = load.load_tokenizer(str(pair.target_folder()))
        self.target = load.load_model(str(pair.target_folder()), max_num_seqs=1)
        self.target.vocab_size = load.num_token_ids(self.tokenizer, self.target.vocab_size)

    def encode(self, text: str) -> list[int]:
        return load.encode(self.tokenizer, text)

    @cached_property
    def texts(self) -> tuple[list[str], list[str]]:
        """Of the standard library: what the indexes are made of, and what is held out."""
        return library_texts(self.index_bytes)

    @cached_property
    def documents(self) -> list[list[int]]:
        """Token ids of the files that the indexes are made of."""
        return [self.encode(text) for text in self.texts[0]]

    @cached_property
    def trigrams(self) -> TrigramTable:
        return TrigramTable.build(self.documents, self.target.vocab_size, tokens_of=fingerprint(self.tokenizer))

    @cached_property
    def retrieval(self) -> RetrievalIndex:
        return RetrievalIndex.build(self.documents, self.target.vocab_size, tokens_of=fingerprint(self.tokenizer))

    def with_index(self, name: str) -> tuple[str, dict[str, Any]]:
        """A source of a mixture, with its index if it reads one."""
        indexes = {"trigram": lambda: self.trigrams, "retrieval": lambda: self.retrieval}
        return name, {"index": indexes[name]()} if name in indexes else {}

    @cached_property
    def draft_model(self) -> Target:
        model = load.load_model(str(pair.draft_folder()), max_num_seqs=1)
        model.vocab_size = self.target.vocab_size
        return model

    def tasks(self, workload: str) -> list[Task]:
        """Prompts of this workload.

        Raises:
            InvalidInputError: no such workload.
        """
        made: dict[str, Callable[[], Iterator[Task]]] = {"python": self._python, "edits": self._edits, "chat": self._chat}
        if workload not in made:
            raise InvalidInputError(f"workload {workload!r} was given; expected one of {', '.join(WORKLOADS)}.")
        return list(made[workload]())[: self.num_requests]

    def written(self, workload: str) -> list[Task]:
        """What the target writes on the prompts of this workload without a drafter, `TEXTS` times each; made once."""
        if workload not in self._written:
            engine, made = Engine.of(self.target, drafter=None), []
            for task in self.tasks(workload):
                params = SamplingParams(
                    temperature=self.temperature, max_tokens=self.num_tokens, ignore_eos=True, seed=1000, n=TEXTS
                )
                made += [Task(task.prompt, list(s.token_ids)) for s in engine.generate([task.prompt], params)[0].samples]
            self._written[workload] = made
        return self._written[workload]

    def _texts(self) -> Iterator[list[int]]:
        """Held-out modules of the standard library, the longest first, then their later parts."""
        ids = sorted(map(self.encode, self.texts[1]), key=len, reverse=True)
        part = 256 + self.num_tokens
        for skip in range(0, 1 << 20, 2 * part):
            found = [x[skip : skip + part] for x in ids if len(x) >= skip + part]
            if not found:
                return
            yield from found

    def _python(self) -> Iterator[Task]:
        for ids in self._texts():
            yield Task(ids[:256], ids[256:])

    def _edits(self) -> Iterator[Task]:
        """A part of a module, and the part again with its commonest long name changed."""
        for ids in self._texts():
            text = self.tokenizer.decode(ids[: self.num_tokens])
            names = re.findall(r"\b[a-z_]{4,}\b", text)
            if names:
                name = max(sorted(set(names)), key=names.count)
                begin = self.encode(f"{text}\n\n# the same with {name} called {name}_2\n")
                again = self.encode(re.sub(rf"\b{name}\b", f"{name}_2", text))
                yield Task(begin + again[:16], again[16:][: self.num_tokens])

    def _chat(self) -> Iterator[Task]:
        for line in CHAT.strip().splitlines():
            turns = [f"{who}: {turn.strip()}\n" for who, turn in zip("QA" * 9, line.split("|"), strict=False)]
            ids, prompt = self.encode("".join(turns)), self.encode("".join(turns[:2]))
            yield Task(ids[: len(prompt)], ids[len(prompt) :][: self.num_tokens])

    def drafter(self, contender: Contender, target: Target) -> Drafter:
        """A fresh one, with fresh stores."""
        draft = self.draft_model if contender.model else None
        name, _, kind = contender.drafter.partition(":")
        given = {**contender.options(self), **({"kind": kind} if kind else {})}
        return registry.drafter(name).build(Parts(target, draft, self.tokenizer, ()), **given)

    def curve(self, contender: Contender, num_tokens: int, window: int) -> list[float]:
        """Tokens per call in each window of one long request: a held-out module, replayed from its 64th token on."""
        ids = max(map(self.encode, self.texts[1]), key=len)[: 64 + num_tokens]
        target, row = ScriptedTarget(self.target.vocab_size), Row(contender.name, "long", "replayed")
        engine = Engine.of(target, drafter=self.drafter(contender, target), plan=self.plan)
        self._play(engine, [Task(ids[:64], ids[64:])], row)
        return row.curve(window)

    def megabytes_per_million_tokens(self) -> dict[str, float]:
        """Of each structure, measured on the documents of the indexes; the requests' own on the first 100,000 tokens of them."""
        num_tokens = sum(map(len, self.documents))
        history = [t for d in self.documents for t in d][:100_000]
        request = Request("r", tuple(history), SamplingParams(), seed=0)
        (own,) = NgramDrafter().start([request])
        tree, store = SuffixTree(), SuffixStore(num_tokens)
        tree.extend(history)
        for document in self.documents:
            store.add(document)
        bytes_a_token = {
            "prompt lookup, of a request": own.num_bytes / own.num_tokens,
            "suffix tree, of a request": tree.num_bytes / len(history),
            "suffix store": store.num_bytes / store.num_tokens,
            "trigram table": self.trigrams.num_bytes / num_tokens,
            "suffix array": self.retrieval.num_bytes / num_tokens,
        }
        return bytes_a_token | {"trigram store, at its bound of 4,096 pairs (MB in all)": TrigramStore().num_bytes / 1e6}

    def run(self, contender: Contender, workload: str, way: str) -> Row:
        """One session: all requests of a workload, one after the other, after one to compile what is used."""
        target = self.target if way == "written" else ScriptedTarget(self.target.vocab_size)
        row, tasks = Row(contender.name, workload, way), self.written(workload) if way == "paired" else self.tasks(workload)
        self._play(Engine.of(target, drafter=self.drafter(contender, target), plan=self.plan), tasks[:1], Row("", "", way))
        drafter = self.drafter(contender, target)
        self._play(Engine.of(target, drafter=drafter, plan=self.plan), tasks, row)
        row.store_bytes = getattr(getattr(drafter, "store", None), "num_bytes", 0)
        return row

    def _play(self, engine: Engine, tasks: Sequence[Task], row: Row) -> None:
        seconds, drafting, calls, watch = 0.0, 0.0, 0, _Watch(engine.drafter)
        for seed, task in enumerate(tasks):
            if isinstance(engine.target, ScriptedTarget):
                engine.target.text = task.prompt + task.rest
            params = SamplingParams(
                temperature=self.temperature if row.way == "written" else 0.0,
                max_tokens=self.num_tokens if row.way == "written" else len(task.rest),
                ignore_eos=True,
                seed=seed,
            )
            steps, sample = [], None
            for output in engine.stream(task.prompt, params):
                sample = output.sample
                steps.append(len(output.token_ids))
                for origin in output.origins:
                    row.accepted_by_source[origin.source] = row.accepted_by_source.get(origin.source, 0) + 1
            if sample is None or sample.stats.drafter_error:
                raise RuntimeError(f"{row.contender} failed: {sample and sample.stats.drafter_error}")
            row.steps.append(steps)
            spent = sample.stats.seconds
            seconds += sum(spent.values()) - spent["prefill"]
            drafting += spent["drafting"]
            calls += sample.stats.target_calls
        row.own_ms, row.drafting_ms, row.step_ms = (1e3 * x / max(1, calls) for x in (watch.seconds, drafting, seconds))


def compare(
    bench: Bench,
    contenders: Sequence[Contender] = CONTENDERS,
    *,
    curve: tuple[int, int],
    program: str = "polydraft",
    progress: Callable[[int], object] = lambda total: None,
) -> dict[str, Any]:
    """Every contender on every workload in every way, as plain data.

    curve: (tokens, window) of the long request by which those among `LEARNERS` are followed.  program: how the run was called.
    progress: called after each session with the number of them all.
    """
    rows, curves, learners = list[dict[str, Any]](), dict[str, list[float]](), [c for c in contenders if c.name in LEARNERS]
    total = len(WAYS) * len(WORKLOADS) * len(contenders) + len(learners)
    for way, workload, contender in itertools.product(WAYS, WORKLOADS, contenders):
        rows.append(bench.run(contender, workload, way).to_dict())
        progress(total)
    for contender in learners:
        curves[contender.name] = bench.curve(contender, *curve)
        progress(total)
    return {
        **provenance(program),
        "settings": {**bench.settings, "index_tokens": sum(map(len, bench.documents)), "curve_window": curve[1]},
        "rows": rows,
        "curves": curves,
        "megabytes_per_million_tokens": bench.megabytes_per_million_tokens(),
    }


class _Watch:
    """Seconds that a drafter spends in its own calls, from now on."""

    def __init__(self, drafter: Drafter | None) -> None:
        self.seconds = 0.0
        for name in ("propose", "aux", "observe"):
            if hasattr(drafter, name):
                setattr(drafter, name, self._timed(getattr(drafter, name)))

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*given: Any) -> Any:
            start = perf_counter()
            found = call(*given)
            self.seconds += perf_counter() - start
            return found

        return timed
