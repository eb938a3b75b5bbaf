"""Every registered drafter under a plan that learns, against plain decoding.

random target   as the embedded target, of random weights, which no draft fits: what remains is what asking and pausing cost
chat            a chat model's answers (`--model FOLDER`), where most drafters fit now and then

Drafters that need a model get the embedded draft beside the random target (heads are untrained there), and beside a chat model its own first layers (`tli` and `slem`,
which bridge two tokenizers, the embedded draft). Indexes are of the standard library. Both engines answer every prompt in turn, after one that
does not count; rates are tokens per second of decoding without the prefill, in CPU seconds on one thread. Nothing is measured beforehand: what the
plan learns it learns in the rounds that are counted, and goes on from prompt to prompt as in an engine that serves.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch

from polydraft import registry, tree
from polydraft.bench.drafters import MIXED, Bench
from polydraft.core import Budget, SamplingParams, Target
from polydraft.drafters.text.index_file import fingerprint
from polydraft.drafters.text.retrieval import RetrievalIndex
from polydraft.drafters.text.trigram import TrigramTable
from polydraft.engine.api import Engine
from polydraft.engine.stats import clock
from polydraft.models import load, pair
from polydraft.models.compiled.llama import CompiledLlama
from polydraft.models.folder import load_module
from polydraft.plan.fixed import FixedPlan
from polydraft.plan.plan import AdaptivePlan
from polydraft.train.run import untrained
from studies.planner.workloads import CHAT

__all__ = ["AgainstPlain", "against_plain", "markdown"]

FIRST_LAYERS = 2
"""Of a chat model, that draft for it."""
OTHER_TOKENIZER = ("tli", "slem")
WITH_MODEL = ("model", "several", "phrases")


@dataclass
class AgainstPlain:
    """One drafter: tokens and seconds of each prompt, plainly and with it; tokens drafted in all, and passes."""

    drafter: str
    plain: list[tuple[int, float]]
    adaptive: list[tuple[int, float]]
    drafted: int = 0
    calls: int = 0

    @staticmethod
    def _speed(runs: Sequence[tuple[int, float]]) -> float:
        return sum(tokens for tokens, _ in runs) / sum(seconds for _, seconds in runs)

    @property
    def speeds(self) -> tuple[float, float]:
        """Tokens per second, plainly and with drafts."""
        return self._speed(self.plain), self._speed(self.adaptive)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self) | dict(zip(("plain_speed", "adaptive_speed"), self.speeds, strict=True))


class _Parts:
    """A target, its prompts, and what drafters for it are built with."""

    def __init__(self, chat: str | None) -> None:
        self.bench, self.folder = Bench(index_bytes=300_000, num_requests=1), chat
        self.tokenizer = self.bench.tokenizer if chat is None else load.load_tokenizer(chat)
        self.target: Target = self._random() if chat is None else load.load_model(chat, max_num_seqs=1, threads=1)
        self.target.vocab_size = load.num_token_ids(self.tokenizer, self.target.vocab_size)

    def _random(self) -> Target:
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.manual_seed(0)
        module = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(str(pair.target_folder()))).float().eval()
        return CompiledLlama(module, max_num_seqs=1)

    @cached_property
    def prompts(self) -> list[list[int]]:
        if self.folder is None:
            return [load.encode(self.tokenizer, p.text) for p in pair.prompts() if not p.name.endswith("-long")]
        asked = [text.removeprefix("User: ").partition("\n")[0] for text in CHAT]
        return [
            Engine.of(self.target, tokenizer=self.tokenizer, drafter=None).encode_chat([{"role": "user", "content": t}])
            for t in asked
        ]

    def draft(self, *, other: bool = False) -> Target:
        """A draft model: one of its own vocabulary, or of another tokenizer."""
        if self.folder is None or other:
            model: Target = load.load_model(str(pair.draft_folder()), max_num_seqs=1)
            if self.folder is None:
                model.vocab_size = self.target.vocab_size
            return model
        module = load_module(self.folder, dtype=torch.float32, device="cpu")
        module.model.layers = module.model.layers[:FIRST_LAYERS]
        module.config.num_hidden_layers = FIRST_LAYERS
        model = CompiledLlama(module, max_num_seqs=1)
        model.vocab_size = self.target.vocab_size
        return model

    @cached_property
    def _indexes(self) -> dict[str, Any]:
        texts, tokens_of = self.bench.texts[0], fingerprint(self.tokenizer)
        documents = [load.encode(self.tokenizer, text) for text in texts]
        kinds = {"trigram": TrigramTable, "retrieval": RetrievalIndex}
        return {name: kind.build(documents, self.target.vocab_size, tokens_of=tokens_of) for name, kind in kinds.items()}

    def engine(self, drafter: str) -> Engine:
        """With this drafter, and all that it needs."""
        reads = drafter in ("trigram", "retrieval", "mixture")
        indexed = {name: {"index": index} for name, index in self._indexes.items()} if reads else {}
        options = {
            **indexed,
            "several": {"models": [self.draft()]} if drafter == "several" else {},
            "mixture": {"sources": [(name, indexed.get(name, {})) for name in MIXED]},
        }
        if self.folder is None and drafter in registry.RECIPES and drafter not in WITH_MODEL:
            options[drafter] = {"weights": untrained(drafter, self.target, Path(mkdtemp()))}
        other = drafter in OTHER_TOKENIZER
        made = Engine.of(
            self.target,
            tokenizer=self.tokenizer,
            draft_model=self.draft(other=other) if other or drafter in WITH_MODEL else None,
            draft_tokenizer=self.bench.tokenizer if other else None,
            drafter=drafter,
            drafter_options=options.get(drafter, {}),
        )
        return Engine(self.target, made.drafter, made.verifier, AdaptivePlan(), clock=clock(self.target))

    def plain(self) -> Engine:
        """Without drafts."""
        made = Engine.of(self.target, drafter=None)
        return Engine(self.target, None, made.verifier, FixedPlan(Budget.fixed(tree.chain(1))), clock=clock(self.target))


def against_plain(
    chat: str | None = None,
    *,
    drafters: Sequence[str] = (),
    count: int = 24,
    max_tokens: int = 96,
    temperature: float = 1.0,
    progress: Callable[[str], None] = lambda drafter: None,
) -> Iterator[AgainstPlain]:
    """Run every registered drafter, or some, on `count` prompts. chat: the folder of a chat model; None for the random target."""
    parts = _Parts(chat)
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens, ignore_eos=True)
    plain = parts.plain()
    for name in drafters or registry.names("drafter"):
        fast, found = parts.engine(name), AgainstPlain(name, [], [])
        for number in range(-1, count):
            prompt, seeded = parts.prompts[number % len(parts.prompts)], replace(params, seed=number + 1)
            for engine, runs in ((plain, found.plain), (fast, found.adaptive))[:: 1 if number % 2 else -1]:
                stats = engine.generate([prompt], seeded)[0].stats
                if number >= 0:
                    runs.append((stats.emitted, stats.total_seconds - stats.seconds["prefill"]))
                    found.drafted += stats.drafted
                    found.calls += stats.target_calls * (engine is fast)
        progress(name)
        yield found


def markdown(rows: Sequence[AgainstPlain]) -> str:
    """The table."""
    lines = ["| drafter | plain | adaptive | drafted a call | adaptive / plain |", "|---|---|---|---|---|"]
    for row in rows:
        plain, adaptive = row.speeds
        lines.append(f"| {row.drafter} | {plain:.0f} | {adaptive:.0f} | {row.drafted / row.calls:.2f} | {adaptive / plain:.3f} |")
    return "\n".join(lines)
