"""`python -m studies.equal_bits`: a real model in several formats of weights, each against peers of the same bits per weight, on chat prompts.

Ours in a format without drafts and with each drafter; llama.cpp on a file of the same bits with the settings that its users have,
plain and with its lookups of earlier text, and on its fastest format of about so many bits; transformers in bfloat16 and float32. The distribution of a format is that of its own rounded
weights: ours is judged by a plain pass over each text, llama.cpp's lookup by the tokens that llama.cpp writes without it.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import torch
import typer
from jaxtyping import Int
from torch import Tensor

from polydraft.bench import report as reports
from polydraft.bench.compare import Contender, Measurement, Prompts, engine_contender
from polydraft.bench.peers import transformers_contender
from polydraft.bench.record import csv_table, markdown_table, write_texts
from polydraft.bench.suite import Bench
from polydraft.bench.ways import Way
from polydraft.check.texts import check_distribution
from polydraft.cli.files import read_lines
from polydraft.cli.start import use_threads
from polydraft.engine.api import Engine
from polydraft.errors import unknown_name
from polydraft.models import load
from polydraft.models.compiled.model import CompiledModel
from polydraft.models.loading import checkpoint
from polydraft.models.loading.gguf import GgufWeights
from polydraft.models.store.gguf_parts import is_gguf
from polydraft.models.store.hub import located
from polydraft.models.torch.module import load_module
from studies.options import Quick

FORMATS = {"bfloat16": "BF16", "int8": "Q8_0", "int4": "Q4_1"}
"""Our format -> llama.cpp's of about the same bits; of four bits it is the file itself where the model is one."""
FASTEST = {"int4": "Q4_0"}
"""Our format -> llama.cpp's fastest one of so many bits, which it packs anew for dot products; written from the same weights."""
DRAFTERS = ("none", "ngram", "suffix", "mixture", "eagle")
LOOKUPS = ("NGRAM_SIMPLE", "NGRAM_MAP_K")
"""Of llama.cpp's types of speculation without a draft."""
LEFT_OUT = (
    "quartiles",
    "over its fastest",
    "over transformers",
    "between ms p50",
    "p99",
    "memory MiB",
    "prepared s",
)
"""Columns that are in the CSV file alone."""
QUESTIONS = (
    "What is the capital of France, and what is it known for?",
    "Write a short poem about the sea.",
    "Explain in simple words why the sky is blue.",
    "Write a Python function that adds two numbers, and one that multiplies them.",
    "Give three tips for learning a new language.",
    "Write a polite email that asks a colleague to move a meeting to Friday.",
)


class OwnDistribution:
    """A compiled model as a judge of texts, see `check_distribution`: its logits after every token, by one plain pass in its last slot."""

    device = torch.device("cpu")

    def __init__(self, model: CompiledModel) -> None:
        self._model = model
        self._slot = model.max_num_seqs - 1

    def __call__(self, ids: Int[Tensor, "1 T"]) -> Any:
        last = len(self._model.weights.attention_norm)
        self._model.release([self._slot])
        states = self._model.prefill([self._slot], ids.tolist(), hidden=(last,)).hidden[last]
        self._model.release([self._slot])
        return SimpleNamespace(logits=torch.from_numpy(self._model.head(states)))


def bits_per_weight(path: Path) -> float:
    """Of the matrices of a GGUF file."""
    import gguf

    matrices = [t for t in gguf.GGUFReader(path).tensors if len(t.shape) > 1]
    return 8 * sum(int(t.n_bytes) for t in matrices) / sum(int(t.n_elements) for t in matrices)


class AtEqualBits(Bench):
    """formats: of FORMATS; the others as of `Bench`. ways: drafters with rule and size, DRAFTERS without any; "none" is plain."""

    def __init__(self, *, target: str, formats: Sequence[str] = tuple(FORMATS), **options: Any) -> None:
        for name in formats:
            if name not in FORMATS:
                raise unknown_name("format of this benchmark", name, FORMATS)
        self._name = target
        self._formats = formats
        self._judges: dict[str, OwnDistribution] = {}
        self._same_tokens: dict[str, str] = {}
        super().__init__(target=target, **options)
        self.settings["formats"] = list(formats)

    def _add_own(self, ways: Sequence[str]) -> None:
        for kind in self._formats:
            try:
                of_file = kind == "int4" and is_gguf(
                    located(self._name)
                )  # its blocks as they are; else rounded from float32
                model = CompiledModel(
                    checkpoint.of_file(GgufWeights.of(located(self._name))) if of_file else self.judge,
                    quantization=None if of_file else kind,
                    max_num_seqs=self.batch_size + 1,
                    threads=self._threads,
                    cache_dtype="float32",
                )
            except Exception as error:
                self.absent[kind] = str(error)
                continue
            model.vocab_size = load.num_token_ids(self.tokenizer, model.vocab_size)
            for text in ways or DRAFTERS:
                self._try(f"{kind} {text}", partial(self._in_format, model, kind, text))

    def _in_format(self, model: CompiledModel, kind: str, text: str) -> Contender:
        way = Way.parse(text)
        engine = Engine.of(model, tokenizer=self.tokenizer, draft_model=self._draft, **vars(way))
        name = f"{kind} {'plain' if way.drafter == 'none' else text}"
        self._judges[name] = OwnDistribution(model)
        return self._of_bits(
            engine_contender(name, engine, self.temperature),
            kind,
            8 * model.weight_bytes / self._num_weights,
            f"{kind} plain",
        )

    @property
    def _num_weights(self) -> int:
        """In matrices that a pass multiplies with."""
        untied = not self.judge.config.tie_word_embeddings
        return sum(
            p.numel()
            for name, p in self.judge.named_parameters()
            if p.dim() == 2 and not (untied and "embed_tokens" in name)
        )

    def _of_bits(self, contender: Contender, kind: str, bits: float, plain: str) -> Contender:
        compared = {
            "own plain": plain,
            "llama.cpp": f"llama.cpp {self._file_kind(kind)}",
            "its fastest": f"llama.cpp {FASTEST.get(kind, self._file_kind(kind))}",
            "transformers": "transformers bfloat16",
        }
        return replace(contender, bits=bits, compared=compared)

    def _file_kind(self, kind: str) -> str:
        return "of the file" if kind == "int4" and is_gguf(located(self._name)) else FORMATS[kind]

    def _add_transformers(self) -> None:
        self._try(
            "transformers",
            lambda: self._of_bits(transformers_contender(self.judge, self.temperature), "int8", 32, ""),
        )
        halved = load_module(self._name, device="cpu", dtype="bfloat16")
        name = "transformers bfloat16"
        self._try(
            name,
            lambda: self._of_bits(
                transformers_contender(halved, self.temperature, name=name), "int8", 16, ""
            ),
        )

    def _add_llama_cpp(self) -> None:
        if find_spec("xllamacpp") is None or self.batch_size > 1:
            self.absent["llama.cpp"] = (
                "xllamacpp is not installed (pip install polydraft[bench]), or there is more than one sequence"
            )
            return
        for kind in self._formats:
            for lookup in (None, *LOOKUPS):
                self._try(
                    f"llama.cpp {kind} {lookup}",
                    partial(self._llama_cpp, kind, self._file_kind(kind), lookup),
                )
            if kind in FASTEST:
                self._try(f"llama.cpp {FASTEST[kind]}", partial(self._llama_cpp, kind, FASTEST[kind], None))

    def _llama_cpp(self, kind: str, written: str, lookup: str | None) -> Contender:
        from polydraft.bench.llama_cpp import LlamaCpp, write_gguf

        file = located(self._name) if written == "of the file" else Path(self._files.name) / f"{written}.gguf"
        if not file.exists():
            write_gguf(self.judge, self.tokenizer, file, written)
        plain = f"llama.cpp {written}"
        name = plain if lookup is None else f"{plain} {lookup.lower().replace('_', '-')}"
        server = LlamaCpp(file, lookup=lookup, exact=False, num_threads=self._threads)
        if lookup is not None:
            self._same_tokens[name] = plain
        return self._of_bits(server.contender(name, self.temperature), kind, bits_per_weight(file), plain)

    def prompts(self, count: int) -> list[list[int]]:
        return self.encoded(QUESTIONS[:count])

    def encoded(self, texts: Sequence[str]) -> list[list[int]]:
        """Prompts as the model's chat template puts them, where it has one."""
        if not getattr(self.tokenizer, "chat_template", None):
            return super().encoded(texts)
        turns = ([{"role": "user", "content": text}] for text in texts)
        rendered = (
            self.tokenizer.apply_chat_template(t, tokenize=False, add_generation_prompt=True) for t in turns
        )
        return [list(self.tokenizer(text, add_special_tokens=False)["input_ids"]) for text in rendered]

    def check(
        self, measured: Measurement, prompts: Prompts, measurements: Sequence[Measurement]
    ) -> dict[str, Any]:
        name = measured.contender.name
        if name == "transformers" or name in self._judges:
            checked = check_distribution(
                self._judges.get(name, self.judge), self.temperature, measured.texts(prompts, self.batch_size)
            )
            return checked | ({"to": " to its own weights'"} if name in self._judges else {})
        plain = next((m.runs for m in measurements if m.contender.name == self._same_tokens.get(name)), None)
        if plain is None or self.temperature:
            return {"passed": True, "kind": "own"}
        wrong = sum(a.outputs != b.outputs for a, b in zip(measured.runs, plain, strict=True))
        return {"passed": not wrong, "kind": "texts", "wrong": wrong, "texts": len(plain)}


def shown_rows(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those of the page: of each format ours plain and fastest, llama.cpp's fastest, and transformers; by processor time."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row["compared"].get("own plain", ""), []).append(row)
    shown = groups.pop("", [])
    for plain, group in groups.items():
        fastest = max(group, key=lambda row: row["tokens_per_cpu_second"])
        is_ours = not plain.startswith("llama.cpp")
        shown += [row for row in group if row is fastest or (is_ours and row["contender"] == plain)]
    return shown


def write(report: dict[str, Any], json_file: Path) -> None:
    """All figures, and beside them every contender as CSV and a page of those that matter."""
    csv_file = json_file.with_suffix(".csv")
    head, rows = reports.table({**report, "rows": shown_rows(report["rows"])})
    shown = [i for i, name in enumerate(head) if name not in LEFT_OUT]
    table = markdown_table([head[i] for i in shown], ([row[i] for i in shown] for row in rows))
    beside = (
        f"[Every contender and column]({csv_file.name}), lookups of llama.cpp and slower drafters among them."
    )
    page = f"{reports.heading(report)}\n\n{table}\n\n{beside}\n"
    write_texts(
        {
            json_file: json.dumps(report, indent=1) + "\n",
            csv_file: csv_table(*reports.table(report)),
            json_file.with_suffix(".md"): page,
        }
    )


def main(
    model: Annotated[
        str, typer.Option(help="A chat model: a folder, FILE.gguf or a name.")
    ] = "smollm2-135m-instruct",
    draft_model: Annotated[str | None, typer.Option(help="Draft model.")] = None,
    formats: Annotated[
        list[str] | None,
        typer.Option("--format", help="bfloat16, int8 or int4; may be repeated. Default: all."),
    ] = None,
    way: Annotated[
        list[str] | None,
        typer.Option(
            help="DRAFTER[+VERIFIER][@PATHSxDEPTH]; may be repeated. Default: drafters without training."
        ),
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="Questions, one a line, or .jsonl with a prompt key.")
    ] = None,
    temperature: Annotated[float, typer.Option(min=0)] = 1.0,
    max_tokens: Annotated[int, typer.Option(min=1)] = 64,
    repetitions: Annotated[int, typer.Option(min=1)] = 2,
    threads: Annotated[int, typer.Option(min=1)] = 1,
    json_file: Annotated[
        Path | None,
        typer.Option(
            "--json",
            help="File for all figures; beside it a .csv of all contenders and a page of those that matter.",
        ),
    ] = None,
    quick: Quick = False,
) -> None:
    """Print the table."""
    use_threads(threads)
    options: dict[str, Any] = {
        "draft": draft_model,
        "ways": way or (),
        "temperature": temperature,
        "num_threads": threads,
    }
    suite = AtEqualBits(target=model, formats=tuple(formats or FORMATS), **options)
    ids = suite.prompts(6) if prompts is None else suite.encoded(read_lines("--prompts", prompts))
    if quick:
        ids = ids[:2]
        max_tokens = 8
        repetitions = 1
    report = reports.as_dict(suite.run(ids, max_tokens=max_tokens, repetitions=repetitions))
    suite.close()
    typer.echo(reports.markdown(report))
    if json_file is not None:
        write(report, json_file)


if __name__ == "__main__":
    typer.run(main)
