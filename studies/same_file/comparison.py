"""A GGUF file in this library, in llama.cpp and in transformers, on the same prompts: every mode by turns, each engine in a process of its own.

modes     polydraft plain, auto and fixed chains; llama.cpp plain, with the same draft model, and with its own n-gram lookups,
          from its wheel, or with `--llama-server` from a build for this processor (`python -m studies.peers`), whose prompts are twice as fast;
          ik_llama.cpp in the same modes with `--ik-server`, a build of the same command; OpenVINO GenAI with `--openvino`, where it is installed and reads the file;
          with `--transformers` its `generate`, plain and assisted by the same draft model, of the file's weights in bfloat16
speed     tokens after those of the first step, over the seconds since then, of all prompts together
interval  95%, bootstrap over prompts

Every continuation is appended to a file as soon as it ends: the same call goes on where an earlier one was cut off.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from polydraft.errors import IncompatibleError, InvalidInputError
from polydraft.models import load
from polydraft.models.store.catalogue import default_draft
from polydraft.models.store.hub import located
from studies.question_files import Question
from studies.same_file.engines import (
    answered,
    ik_llama_cpp,
    llama_cpp,
    openvino,
    ours,
    transformers_generate,
    worker,
)
from studies.same_file.records import (
    IK,
    OPENVINO,
    OPENVINO_MODES,
    OURS,
    PEER,
    PEER_MODES,
    TRANSFORMERS,
    Continuation,
    Job,
    Start,
)

WARM_UP_TOKENS = 8
Progress = Callable[[int, int], object]


class FileComparison:
    """Modes of all engines on one file.

    model, draft: names as of `hub.located`; without a draft model, that of the file's entry in `polydraft models list`.
    chains: lengths of fixed chains of drafts.  peer_modes: of `PEER_MODES`.  transformers: whether its modes run, too.
    server: program of a llama.cpp that was built for this processor; None is the wheel.  ik_server: of ik_llama.cpp, whose modes are `peer_modes`, too.
    openvino: whether its modes run.  results: file of continuations; those that are in it are not measured again.

    Raises:
        IncompatibleError: llama.cpp, or OpenVINO GenAI, is not installed.
        InvalidInputError: a file of other settings.
    """

    def __init__(
        self,
        model: str,
        draft: str | None = None,
        *,
        chains: Sequence[int] = (3,),
        peer_modes: Sequence[str] = PEER_MODES[:3],
        transformers: bool = False,
        server: Path | None = None,
        ik_server: Path | None = None,
        openvino: bool = False,
        num_tokens: int = 64,
        results: Path | None = None,
    ) -> None:
        if server is None and find_spec("xllamacpp") is None:
            raise IncompatibleError("llama.cpp is not installed. Install polydraft[bench].")
        if openvino and find_spec("openvino_genai") is None:
            raise IncompatibleError("OpenVINO GenAI is not installed. Install openvino-genai.")
        draft = draft or default_draft(model)
        self.file = located(model)
        self.draft = located(draft) if draft else None
        self.num_tokens = num_tokens
        self._results = results
        self.server = server
        self.ik_server = ik_server
        ours = ["plain", "auto", *(f"chain of {n}" for n in chains if self.draft)]
        peers = [mode for mode in peer_modes if mode != "draft" or self.draft]
        of_openvino = [mode for mode in OPENVINO_MODES if mode != "draft" or self.draft] if openvino else []
        assisted = ["plain", *(["assisted"] if self.draft else [])] if transformers else []
        by_engine = {
            OURS: ours,
            PEER: peers,
            IK: peers if ik_server else [],
            OPENVINO: of_openvino,
            TRANSFORMERS: assisted,
        }
        self.modes = [f"{engine}, {mode}" for engine, modes in by_engine.items() for mode in modes]
        self.settings = {
            "file": self.file.name,
            "draft": self.draft and self.draft.name,
            "tokens": num_tokens,
            "llama.cpp": server and server.name,
        }
        if ik_server or openvino:
            self.settings["modes"] = self.modes
        self.continuations = list[Continuation]()
        self.starts = list[Start]()
        self._read_results()
        self.tokenizer = load.load_tokenizer(str(self.file))

    def _read_results(self) -> None:
        if self._results is None:
            return
        if not self._results.exists():
            self._append({"settings": self.settings})
            return
        first, *lines = map(json.loads, self._results.read_text(encoding="utf-8").splitlines())
        if first != {"settings": self.settings}:
            raise InvalidInputError(
                f"{str(self._results)!r} holds continuations of {first.get('settings')}; expected those of {self.settings}. Name another file, or delete it."
            )
        for line in lines:
            if "engine" in line:
                self.starts.append(Start(**line))
            else:
                self.continuations.append(Continuation(**line))

    def _append(self, line: Mapping[str, Any]) -> None:
        if self._results is not None:
            self._results.parent.mkdir(parents=True, exist_ok=True)
            with self._results.open("a", encoding="utf-8") as out:
                out.write(json.dumps(line) + "\n")

    def run(
        self,
        questions: Sequence[Question],
        *,
        threads: Sequence[int] = (1,),
        temperatures: Sequence[float] = (0.0, 1.0),
        repetitions: int = 1,
        say: Callable[[str], object] = lambda line: None,
        progress: Progress | None = None,
    ) -> None:
        """Measure what is missing, prompt by prompt. say: is told how long it will take, after each engine's first answer."""
        prompts = [_prompt_ids(self.tokenizer, question.text) for question in questions]
        measured = {continuation.cell for continuation in self.continuations}
        cells = [
            (mode, count, T, number, repetition)
            for count in threads
            for repetition in range(repetitions)
            for number in range(len(questions))
            for T in temperatures
            for mode in self._turned(number)
        ]
        missing = [cell for cell in cells if cell not in measured]
        done = len(cells) - len(missing)
        for count in threads:
            part = [cell for cell in missing if cell[1] == count]
            if not part:
                continue
            with self._workers(count) as workers:
                self._estimate(workers, part, missing, prompts, say)
                for mode, _, T, number, repetition in part:
                    job = Job(mode.partition(", ")[2], prompts[number], self.num_tokens, T, repetition)
                    first, seconds, first_tokens = workers[mode](job)
                    where = mode, count, T, questions[number].category, number, repetition
                    continuation = Continuation(*where, first, seconds, first_tokens, self.num_tokens)
                    self.continuations.append(continuation)
                    self._append(asdict(continuation))
                    done += 1
                    if progress:
                        progress(len(cells), done)

    def _turned(self, number: int) -> list[str]:
        """The modes, another one first for each prompt."""
        turn = number % len(self.modes)
        return self.modes[turn:] + self.modes[:turn]

    def _estimate(
        self,
        workers: Mapping[str, Callable[[Job], tuple[float, float, int]]],
        cells: Sequence[tuple[str, int, float, int, int]],
        missing: Sequence[Any],
        prompts: Sequence[list[int]],
        say: Callable[[str], object],
    ) -> None:
        """A short answer of every mode, which warms up, and what all cells will take at that speed."""
        total = 0.0
        shortest = min(prompts, key=len)
        for mode in dict.fromkeys(cell[0] for cell in cells):
            job = Job(mode.partition(", ")[2], shortest, WARM_UP_TOKENS, 1.0, 0)
            workers[mode](job)
            first, seconds, first_tokens = workers[mode](job)
            token = seconds / max(WARM_UP_TOKENS - first_tokens, 1)
            lengths = [len(prompts[cell[3]]) for cell in cells if cell[0] == mode]
            total += len(lengths) * self.num_tokens * token + first / len(shortest) * sum(lengths)
        total *= len(missing) / len(cells)
        say(
            f"{len(missing)} continuations of {self.num_tokens} tokens: about {max(total / 60, 1):.0f} minutes"
        )

    @contextmanager
    def _workers(self, threads: int) -> Iterator[dict[str, Callable[[Job], tuple[float, float, int]]]]:
        """By mode, what answers jobs: one process of this library for all of its modes, one of transformers, one of a peer for each of its own."""
        options = (str(self.file), threads, self.draft)
        names = [mode.partition(", ") for mode in self.modes]
        engines: dict[str, tuple[Any, ...]] = {
            OURS: (ours, *options, [mode for engine, _, mode in names if engine == OURS])
        }
        for engine, _, mode in names:
            if engine == PEER:
                engines[f"{engine}, {mode}"] = (llama_cpp, *options, mode, self.server)
            elif engine == IK:
                engines[f"{engine}, {mode}"] = (ik_llama_cpp, *options, mode, self.ik_server)
            elif engine == OPENVINO:
                engines[f"{engine}, {mode}"] = (openvino, *options, mode)
            elif engine == TRANSFORMERS:
                engines[engine] = (transformers_generate, *options)
        with ExitStack() as stack:
            pipes = {name: stack.enter_context(worker(threads, *engine)) for name, engine in engines.items()}
            of_mode = {mode: pipes.get(mode) or pipes[mode.partition(", ")[0]] for mode in self.modes}
            yield {mode: lambda job, pipe=pipe: answered(pipe, job) for mode, (pipe, _) in of_mode.items()}
            for name, (pipe, seconds) in pipes.items():
                pipe.send(None)
                start = Start(name, threads, seconds, pipe.recv())
                self.starts.append(start)
                self._append(asdict(start))


def _prompt_ids(tokenizer: Any, text: str) -> list[int]:
    """A question as the model's chat template puts it, where it has one."""
    if not getattr(tokenizer, "chat_template", None):
        return load.encode(tokenizer, text)
    turn = [{"role": "user", "content": text}]
    whole = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(whole, add_special_tokens=False)["input_ids"])
