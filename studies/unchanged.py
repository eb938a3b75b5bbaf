"""`python -m studies.unchanged`: whether a change of the house left models, drafts and texts as they were, bit for bit.

    python -m studies.unchanged record before.json        # on the checkout before
    python -m studies.unchanged compare before.json       # on the one after: what differs, by name
    python -m studies.unchanged speed OTHER_CHECKOUT      # tokens per second of both, by turns

weights  digest of all arrays that a model computes with, and of the logits of a text: tiny files of llama.cpp's converter, the embedded
         pair as a folder and as a module, further models by `--model`; each in its own format, in int8 and in int4
texts    token ids of seeded requests of many kinds, alone and side by side
drafts   the trees of each step by seed, of drafters and heads with a fixed shape
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from hashlib import sha256
from pathlib import Path
from random import Random
from statistics import median
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table

from polydraft import Engine, SamplingParams
from polydraft.core.params import StructuredOutputs
from polydraft.core.targets import Target
from polydraft.models import pair
from polydraft.models.compiled.model import CompiledModel
from polydraft.models.load import load_model
from studies.options import Quick

ROOT = Path(__file__).resolve().parent.parent
GOLDEN_FILES = ROOT / "tests" / "models" / "oracle_gguf"
QUANTIZATIONS = (None, "int8", "int4")
PROBE = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3]
"""Token ids that every vocabulary has."""
ADDRESSES = {"product", "output"}
"""Fields of a packed matrix that name compiled functions: they differ from process to process."""
SHAPES: dict[str, dict[str, Any]] = {
    "model:chain": {"depth": 3},
    "model:paths": {"depth": 3, "num_paths": 2},
    "model:without_replacement": {"depth": 2, "num_paths": 3},
    "model:top_k": {"depth": 3, "num_paths": 2},
    "ngram": {"depth": 4},
    "suffix": {"depth": 4},
    "trigram": {"depth": 4},
}
"""Drafters of the embedded pair, and the shape of their drafts."""
FORMS = (
    None,
    StructuredOutputs(regex="[a-z]{3,12}( [a-z]{3,12}){1,3}"),
    StructuredOutputs(choice=("import os", "return None", "pass")),
)

Findings = dict[str, dict[str, str]]
"""kind -> case -> digest; a model that is refused has the reason in place of its digest."""


def digest(*parts: object) -> str:
    """Of values whose text says all of them."""
    return sha256(repr(parts).encode()).hexdigest()[:24]


def arrays_of(value: Any) -> Iterator[np.ndarray]:
    """All arrays and tensors within named tuples, mappings, lists and objects with slots of their own."""
    if isinstance(value, torch.Tensor):
        value = value.detach().numpy()
    if isinstance(value, np.ndarray) and value.dtype.names:
        yield from (value[name] for name in value.dtype.names if name not in ADDRESSES)
    elif isinstance(value, np.ndarray):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from arrays_of(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from arrays_of(each)


def weights_digest(model: CompiledModel) -> str:
    """Of the contents of all weights, whatever they are called and however they are arranged, and of the logits of a text."""
    contents = sorted(sha256(array.tobytes()).hexdigest() for array in arrays_of(model.weights) if array.size)
    model.prefill([0], [PROBE[:8]])
    logits = model.prefill([0], [PROBE[8:]]).logits
    return digest(contents, logits.tobytes())


def model_cases(names: list[str], quick: bool) -> Iterator[tuple[str, Callable[[str | None], CompiledModel]]]:
    """Each model, and what loads it in a format."""

    def loading(name: str) -> Callable[[str | None], Any]:
        return lambda kind: load_model(
            name, quantization=kind, max_num_seqs=1, max_model_len=64, threads=1, backend="compiled"
        )

    def compiling(folder: Path) -> Callable[[str | None], CompiledModel]:
        from transformers import AutoModelForCausalLM

        module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        return lambda kind: CompiledModel(
            module, quantization=kind, max_num_seqs=1, max_model_len=64, cache_dtype="float32"
        )

    files = sorted(GOLDEN_FILES.glob("*.gguf"))
    for file in files[:2] if quick else files:
        yield f"{file.stem} (file)", loading(str(file))
    for folder in (pair.target_folder(), pair.draft_folder()):
        yield f"embedded {folder.name} (folder)", loading(str(folder))
        yield f"embedded {folder.name} (module)", compiling(folder)
    for name in names:
        yield name, loading(name)


def module_digest(model: Target) -> str:
    """Of the contents of all tensors of a module of transformers, and of the logits of a text."""
    tensors = model.model.state_dict().values()  # pyright: ignore[reportAttributeAccessIssue]
    contents = sorted(sha256(tensor.contiguous().numpy().tobytes()).hexdigest() for tensor in tensors)
    logits = model.prefill([0], [PROBE]).logits
    return digest(contents, logits.tobytes())


def finding(compute: Callable[[], str]) -> str:
    """A digest; or the reason why there is none, whose class must not change either."""
    try:
        return compute()
    except Exception as reason:
        return f"{type(reason).__name__}: {reason}".replace(str(ROOT), "")


def weights(names: list[str], quick: bool) -> dict[str, str]:
    """The digest of each model in each format; of golden files as modules of transformers, too."""
    digests = dict[str, str]()
    for name, load in model_cases(names, quick):
        for quantization in QUANTIZATIONS[:1] if quick else QUANTIZATIONS:
            case = f"{name}, {quantization or 'as stored'}"
            digests[case] = finding(lambda load=load, kind=quantization: weights_digest(load(kind)))
    files = sorted(GOLDEN_FILES.glob("*.gguf"))
    for file in files[:1] if quick else files:
        load = partial(load_model, str(file), max_num_seqs=1, max_model_len=64, backend="transformers")
        digests[f"{file.stem} (transformers)"] = finding(lambda load=load: module_digest(load()))
    return digests


def drawn_params(number: int) -> SamplingParams:
    """Sampling parameters of the request of this number; every third is greedy."""
    draw = Random(number)
    form = draw.choice(FORMS) if number % 5 == 0 else None
    penalized = number % 7 == 0
    return SamplingParams(
        temperature=(0, 0.7, 1.0)[number % 3],
        top_p=draw.choice((1.0, 0.95, 0.8)),
        top_k=draw.choice((0, 0, 40)),
        min_p=draw.choice((0.0, 0.0, 0.05)),
        repetition_penalty=1.1 if penalized else 1.0,
        frequency_penalty=0.2 if penalized else 0.0,
        stop=("\n\n",) if number % 4 == 0 else (),
        max_tokens=draw.randrange(4, 40),
        n=2 if number % 11 == 0 else 1,
        seed=number,
        structured_outputs=form,
    )


def texts(count: int) -> dict[str, str]:
    """Token ids of seeded requests: half of them alone, half side by side, with drafts of fixed shapes and plainly."""
    prompts = [prompt.text for prompt in pair.prompts()]
    digests = dict[str, str]()
    ways: list[dict[str, Any]] = [
        {"drafter": None},
        *({"drafter": name, **shape} for name, shape in SHAPES.items()),
    ]
    for number, way in enumerate(ways):
        engine = Engine.embedded(**way)
        own = range(number * 1000, number * 1000 + count // len(ways))
        for batch in [[seed] for seed in own[::2]] + [own[1::2]]:
            chosen = [drawn_params(seed) for seed in batch]
            results = engine.generate([prompts[seed % len(prompts)] for seed in batch], chosen)
            for seed, result in zip(batch, results, strict=True):
                ids = [sample.token_ids for sample in result.samples]
                digests[f"{way['drafter']} {seed}"] = digest(ids, result.text)
    return digests


def trees_of(engine: Engine, prompts: list[Any], temperature: float) -> str:
    """The trees of each step of some texts, with what was accepted of them."""
    steps = list[object]()
    for seed, prompt in enumerate(prompts):
        params = SamplingParams(temperature=temperature, max_tokens=24, seed=seed, ignore_eos=True)
        for output in engine.stream(prompt, params):
            tree = output.tree
            steps.append(None if tree is None else (tree.token_ids, tree.parents, tree.path))
    return digest(steps)


def drafts(quick: bool) -> dict[str, str]:
    """Trees by drafter and temperature: of the embedded pair, and of published heads on tiny targets."""
    from tests.heads import oracle

    digests = dict[str, str]()
    prompts: list[Any] = [prompt.text for prompt in pair.prompts()[: 2 if quick else 6]]
    for name, shape in SHAPES.items():
        engine = Engine.embedded(drafter=name, **shape)
        for temperature in (0.0, 1.0):
            digests[f"{name}, T = {temperature:g}"] = trees_of(engine, prompts, temperature)
    heads = sorted(path.name for path in oracle.KEPT.iterdir() if not path.name.startswith("target"))
    for kind in heads[:1] if quick else heads:
        try:
            head_engine = Engine.of(oracle.target(kind, "compiled"), head=str(oracle.folder(kind)), depth=3)
        except Exception as reason:  # as in `finding`
            digests[kind] = f"{type(reason).__name__}: {reason}".replace(str(ROOT), "")
            continue
        for temperature in (0.0, 1.0):
            digests[f"{kind}, T = {temperature:g}"] = trees_of(head_engine, [PROBE], temperature)
    return digests


def findings(models: list[str], count: int, quick: bool) -> Findings:
    """All of them."""
    return {"weights": weights(models, quick), "texts": texts(count), "drafts": drafts(quick)}


ERROR = re.compile(r"(?<=Error: ).*", re.DOTALL)
"""The words of an error."""


def differences(before: Findings, after: Findings) -> list[tuple[str, str, str]]:
    """(kind, case, what is different) of each case that both have or one lacks; an error may say the same in other words."""
    different = list[tuple[str, str, str]]()
    for kind in before:
        for case in sorted({*before[kind], *after[kind]}):
            old = before[kind].get(case, "absent")
            new = after[kind].get(case, "absent")
            if ERROR.sub("", old) != ERROR.sub("", new):
                different.append((kind, case, f"{old} -> {new}"))
    return different


app = typer.Typer(help="Whether models, drafts and texts are as they were.")
Models = Annotated[
    list[str] | None,
    typer.Option("--model", help="Further model, as of `polydraft generate`; may be repeated."),
]
Count = Annotated[int, typer.Option(min=16, help="Number of seeded requests.")]


@app.command()
def record(file: Path, model: Models = None, count: Count = 1000, quick: Quick = False) -> None:
    """Write what holds now."""
    found = findings(model or [], 32 if quick else count, quick)
    file.write_text(
        json.dumps({"models": model or [], "count": count, "quick": quick, **found}, indent=1),
        encoding="utf-8",
    )
    typer.echo(f"wrote {file}: " + ", ".join(f"{len(found[kind])} {kind}" for kind in found), err=True)


@app.command()
def compare(file: Path) -> None:
    """Compare what holds now with what was recorded; the exit status is 1 where something differs."""
    before = json.loads(file.read_text(encoding="utf-8"))
    quick = before.pop("quick")
    count = before.pop("count")
    after = findings(before.pop("models"), 32 if quick else count, quick)
    different = differences(before, after)
    rows = Table("what", "case", "before and after", box=None)
    for row in different:
        rows.add_row(*row)
    Console().print(rows)
    total = sum(map(len, before.values()))
    typer.echo(f"{total - len(different)} of {total} are as they were", err=True)
    raise typer.Exit(bool(different))


MEASURED = """
import sys, time
from polydraft import Engine, SamplingParams
engine = Engine.from_pretrained(sys.argv[1] or None, threads=int(sys.argv[2]))
prompts = ["def quicksort(items):", "The weather today is", "import os", "A story begins with"]
params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
engine.generate(prompts[:2], params)
began = time.process_time()
results = [engine.generate(prompt, params)[0] for prompt in prompts for _ in range(3)]
print(sum(len(result.samples[0].token_ids) for result in results) / (time.process_time() - began))
"""
"""Tokens per second of processor time, of a model and a number of threads."""


@app.command()
def speed(
    other: Annotated[Path, typer.Argument(exists=True, file_okay=False, help="The checkout before.")],
    model: Models = None,
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    threads: Annotated[int, typer.Option(min=1)] = 1,
) -> None:
    """Tokens per second of processor time of this checkout and another, by turns; the median ratio of neighbouring runs."""
    rows = Table("model", "before", "after", "after over before", box=None)
    for name in model or [""]:
        figures = {checkout: list[float]() for checkout in (other.resolve(), ROOT)}
        for _ in range(rounds):
            for checkout, speeds in figures.items():
                environment = {**os.environ, "PYTHONPATH": str(checkout / "src")}
                command = [sys.executable, "-c", MEASURED, name, str(threads)]
                done = subprocess.run(
                    command, cwd=checkout, env=environment, capture_output=True, text=True, check=True
                )
                speeds.append(float(done.stdout))
        before, after = figures.values()
        ratio = median(new / old for old, new in zip(before, after, strict=True))
        rows.add_row(name or "embedded", f"{median(before):.1f}", f"{median(after):.1f}", f"{ratio:.3f}")
    Console().print(rows)


if __name__ == "__main__":
    app()
