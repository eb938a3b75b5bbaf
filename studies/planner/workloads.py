"""What the planner is judged on: texts and temperatures, drafted for by an engine of each plan.

held-out Python     prompts of the package, temperature 1
repeated edits      a text with its own beginning again behind it, drafted by copying (n-grams), temperature 0
chat                questions and answers in English, which the embedded pair was not trained on, temperature 0.7
high temperature    temperature 1.8
random target       a target of random weights, which no draft fits
mixed batch         four sequences at a time: two greedy, two sampled

The embedded pair runs them as it is, or with layers appended to the target that cost and change nothing. A chat model answers the questions,
drafted for by its head, where it has one, and copies by n-grams where it is asked to repeat; Python and the random target are the pair's alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from polydraft import tree
from polydraft.bench.inflate import inflate
from polydraft.core import Budget, SamplingParams, Target
from polydraft.engine.api import Engine
from polydraft.engine.stats import clock
from polydraft.models import load, pair
from polydraft.models.compiled.llama import CompiledLlama
from polydraft.models.folder import load_module
from polydraft.plan.fixed import FixedPlan, Plan

__all__ = ["ANSWERS", "CHAT", "WORKLOADS", "Workload", "chat_workload", "workload"]

CHAT = (
    "User: How do I keep bread fresh for longer?\nAssistant:",
    "User: What is the difference between weather and climate?\nAssistant: Weather is what happens today, and climate",
    "User: Please write a short note to my landlord about a broken window.\nAssistant: Dear",
    "User: Explain to a child why the sky is blue.\nAssistant: When the light of the sun",
    "User: I want to learn to play chess. Where do I begin?\nAssistant: Begin with",
    "User: Which books about the sea would you recommend?\nAssistant:",
)
TEMPERATURES = {"repeated edits": (0.0,), "chat": (0.7,), "high temperature": (1.8,), "mixed batch": (0.0, 1.0, 0.0, 1.0)}
WORKLOADS = ("held-out Python", "repeated edits", "chat", "high temperature", "random target", "mixed batch")
ANSWERS = ("chat", "repeated edits", "high temperature", "mixed batch")
"""Those that a chat model runs."""


@dataclass(frozen=True)
class Workload:
    """engine, plain: with a plan, and without drafts.  batches: prompts of each round.  params: of the sequences of a batch, in turn."""

    engine: Callable[[Plan], Engine]
    plain: Callable[[], Engine]
    batches: list[list[list[int]]]
    params: Sequence[SamplingParams]


def _timed(made: Engine, target: Target, plan: Plan) -> Engine:
    return Engine(target, made.drafter, made.verifier, plan, tokenizer=made.tokenizer, clock=clock(target))


def _of(
    target: Target, built: Callable[..., Engine], drafter: str, ids: list[list[int]], name: str, count: int, max_tokens: int
) -> Workload:
    temperatures = TEMPERATURES.get(name, (1.0,))
    batch = len(temperatures)
    batches = [[ids[(batch * (i // 2) + j) % len(ids)] for j in range(batch)] for i in range(count)]
    params = [SamplingParams(temperature=t, max_tokens=max_tokens, ignore_eos=True) for t in temperatures]
    none = FixedPlan(Budget.fixed(tree.chain(1)))
    return Workload(
        lambda plan: _timed(built(drafter=drafter, plan=plan), target, plan),
        lambda: _timed(built(drafter=None), target, none),
        batches,
        params,
    )


def workload(name: str, count: int, max_tokens: int, *, layers: int = 0) -> Workload:
    """One of WORKLOADS for the embedded pair. count: rounds, two with each batch of prompts.  layers: appended to the target."""
    target_folder, draft_folder = str(pair.target_folder()), str(pair.draft_folder())
    tokenizer = load.load_tokenizer(target_folder)
    batch = len(TEMPERATURES.get(name, (1.0,)))
    target, draft = (load.load_model(f, max_num_seqs=batch) for f in (target_folder, draft_folder))
    if name == "random target":
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.manual_seed(0)
        target = CompiledLlama(
            AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(target_folder)).float().eval(), max_num_seqs=batch
        )
    elif layers:
        target = CompiledLlama(inflate(load_module(target_folder, device="cpu"), layers), max_num_seqs=batch)
    target.vocab_size = draft.vocab_size = load.num_token_ids(tokenizer, min(target.vocab_size, draft.vocab_size))
    texts = list(CHAT) if name == "chat" else [p.text for p in pair.prompts()]
    if name == "repeated edits":
        texts = [f"{t}\n\n{t[: len(t) // 4]}" for t in texts]
    ids = [load.encode(tokenizer, t) for t in texts]

    def built(**options: Any) -> Engine:
        return Engine.of(target, draft_model=None if options["drafter"] is None else draft, **options)

    return _of(target, built, "ngram" if name == "repeated edits" else "model", ids, name, count, max_tokens)


@cache
def _chat_model(folder: str) -> tuple[Target, Any]:
    return load.load_model(folder, max_num_seqs=4, threads=1), load.load_tokenizer(folder)


def chat_workload(folder: str, name: str, count: int, max_tokens: int) -> Workload:
    """One of ANSWERS for a chat model."""
    target, tokenizer = _chat_model(folder)
    target.vocab_size = load.num_token_ids(tokenizer, target.vocab_size)

    def built(**options: Any) -> Engine:
        return Engine.of(target, tokenizer=tokenizer, **options)

    asked = [text.removeprefix("User: ").partition("\n")[0] for text in CHAT]
    if name == "repeated edits":
        asked = [f"Repeat this text word for word, with 'the' for 'a':\n\n{p.text[:600]}" for p in pair.prompts()]
    plain = built(drafter=None)
    ids = [plain.encode_chat([{"role": "user", "content": text}]) for text in asked]
    return _of(target, built, "ngram" if name == "repeated edits" else "auto", ids, name, count, max_tokens)
