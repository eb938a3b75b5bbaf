"""Everything that a run may call is called once, on the embedded pair, so that numba has compiled it for later runs."""

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from inspect import Parameter, signature
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from polydraft import registry, tree
from polydraft.core import Budget, Method, SamplingParams, Target
from polydraft.drafters.text.retrieval import RetrievalIndex
from polydraft.drafters.text.suffix import SuffixStore
from polydraft.drafters.text.trigram import TrigramTable
from polydraft.engine.api import Engine
from polydraft.errors import DrafterWarning
from polydraft.models import checkpoint, load, pair
from polydraft.models.compiled.llama import CompiledLlama
from polydraft.plan.acceptance import DEPTHS
from polydraft.plan.plan import FixedPlan
from polydraft.plan.profile import Profile
from polydraft.train.run import untrained
from polydraft.verifiers import pairing

GREEDY = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
SAMPLED = GREEDY.with_(temperature=1.0, seed=1)
FILTERED = SAMPLED.with_(top_p=0.9, top_k=20, min_p=0.01, repetition_penalty=1.1, logprobs=2)
PLANS = tuple(FixedPlan(Budget.fixed(parents)) for parents in (tree.chain(3), tree.paths(2, 2), (-1, 0, 0, 1)))
PROFILES = (Profile.assumed(), replace(Profile.assumed(), acceptance=(0.0,) * DEPTHS))
"""One that drafts, and one that pauses and probes."""


def compile_all(drafters: Mapping[str, Any] | None = None) -> None:
    """Generate a few tokens with every drafter, every rule that fits it, every kind of draft and every format of weights.

    drafters: only these names of `polydraft methods`, with their options; default all.
    """
    folder = str(pair.target_folder())
    tokenizer = load.load_tokenizer(folder)
    prompts = [load.encode(tokenizer, p.text)[:40] for p in pair.prompts()[:2]]
    prompts = [ids + ids for ids in prompts]  # those that copy then find something
    with TemporaryDirectory() as place, warnings.catch_warnings():
        warnings.simplefilter("ignore", DrafterWarning)
        models = [_model(name, "auto") for name in ("target", "draft")]
        chosen = _options(Path(place), prompts, tokenizer) if drafters is None else drafters
        run = partial(_generate, tokenizer, prompts)
        for kind, options in chosen.items():
            for rule in _rules(_info(kind)):
                run(models, kind, rule, options)
        if "suffix" in chosen:
            run(models, "suffix", "match", {"store": SuffixStore()})
        for stored in ("float32", "int8", "transformers"):
            others = [_model(name, stored) for name in ("target", "draft")]
            for kind in chosen.keys() & {"model", "model:top_k", "model:coupled", "lookahead"}:
                run(others, kind, pairing.best_for(_info(kind)), chosen[kind])


def _options(folder: Path, texts: list[list[int]], tokenizer: Any) -> dict[str, dict[str, Any]]:
    """Every kind of every drafter, with what it cannot be built without."""
    TrigramTable.build(texts, len(tokenizer)).save(folder / "trigram")
    RetrievalIndex.build(texts, len(tokenizer)).save(folder / "retrieval")
    needed = {
        "trigram": {"index": folder / "trigram"},
        "retrieval": {"index": folder / "retrieval"},
        "several": {"models": [_model("draft", "auto")]},
    }
    target = _model("target", "auto")
    heads = {name: {"weights": untrained(name, target, folder / name)} for name in registry.names("drafter") if _is_head(name)}
    return {info.name: (needed | heads).get(info.name.partition(":")[0], {}) for info in _infos()}


def _is_head(drafter: str) -> bool:
    """Whether a drafter is a network of its own for each target."""
    return drafter in registry.RECIPES and "weights" in signature(registry.drafter(drafter).build).parameters


def _infos() -> Iterator[Method]:
    """Of all drafters but those that want of the user what nobody else has, such as a head's weights."""
    for name in registry.names("drafter"):
        made = registry.drafter(name)
        asked = signature(made.build).parameters.values()
        if not any(p.kind is Parameter.KEYWORD_ONLY and p.default is Parameter.empty for p in asked):
            yield from made.methods


def _info(kind: str) -> Method:
    return next(info for info in _infos() if info.name == kind)


def _rules(drafter: Method) -> list[str]:
    """Those that are exact for it, and those that are nobody's exactly."""
    relaxed = [name for name in registry.names("verifier") if not registry.verifier(name).info.lossless]
    fits = [n for n in relaxed if drafter.laws <= (v := registry.verifier(n).info).laws and drafter.shapes <= v.shapes]
    return [*pairing.fitting(drafter), *fits]


def _model(name: str, stored: str) -> Target:
    folder = str(pair.target_folder() if name == "target" else pair.draft_folder())
    if stored == "transformers":
        return load.load_model(folder, device="cpu", backend="transformers", max_num_seqs=2)
    files = checkpoint.of_folder(folder)
    assert files is not None
    if stored == "float32":  # weights that bfloat16 cannot hold
        read = files.read
        finer = {n: torch.empty_like(w, dtype=torch.float32) for n, w in files.outlines.items()}
        files = replace(files, outlines=finer, read=lambda n: read(n).float() * 1.001)
    return CompiledLlama(files, max_num_seqs=2, quantization="int8" if stored == "int8" else None)


def _generate(
    tokenizer: Any, prompts: list[list[int]], models: list[Target], kind: str, rule: str, options: Mapping[str, Any]
) -> None:
    """A few tokens with drafts of every shape that drafter and rule take."""
    asked = [plan for plan in PLANS if pairing.allowed([plan.budget], _info(kind), registry.verifier(rule).info)]
    sizes = [*({"plan": plan} for plan in asked), *({"profile": profile} for profile in PROFILES)]
    parts = {"tokenizer": tokenizer, "draft_model": models[1], "draft_tokenizer": tokenizer}
    engines = [Engine.of(models[0], **parts, drafter=kind, verifier=rule, drafter_options=options, **size) for size in sizes]
    for engine in engines:
        engine.generate(prompts, GREEDY)
        engine.generate(prompts, [SAMPLED, FILTERED])
