"""Drafters by their registered names, driven round by round over a table target."""

from dataclasses import replace

import numpy as np
import torch

from polydraft import registry, sampling
from polydraft import tree as trees
from polydraft.core import NoiseKey, Request, SamplingParams, Scores
from polydraft.drafters.base import Parts
from polydraft.drafters.text.retrieval import RetrievalIndex
from tests.engine.tables import TableModel

V = 5


def retrieval_index(folder, V):
    """An index of a random corpus in which every pair of tokens occurs."""
    corpus = np.random.default_rng(0).integers(0, V, 60 * V)
    RetrievalIndex.build([corpus, [t % V for t in (1, 2, 3, 4, 1, 2, 3, 4)]], V).save(folder / "retrieval")
    return {"index": folder / "retrieval"}


def another_model(folder, V):
    """A second draft model, unlike the first."""
    return {"models": [TableModel(V, seed=2, max_num_seqs=128)]}


OPTIONS = {"retrieval": retrieval_index, "several": another_model}
"""What a drafter cannot be built without, by name: a function of a folder to write into."""


def kinds():
    """Every kind of draft of every registered drafter."""
    elsewhere = {"tli", "slem"}  # they need two tokenizers: test_vocabularies.py plays them
    names = [name for name in registry.names("drafter") if name not in elsewhere]
    return [info.name for name in names for info in registry.drafter(name).methods]


def models(V=V, seqs=4, **options):
    """A target and a draft model that resembles it."""
    target, small = (TableModel(V, seed=s, max_num_seqs=seqs, **options) for s in (0, 1))
    small.logits = 0.7 * target.logits + 0.3 * small.logits
    return target, small


def build(name, target, small, folder, eos=(), **options):
    """A drafter of this kind, as an engine would build it."""
    name, _, kind = name.partition(":")
    given = {
        **(OPTIONS[name](folder, target.vocab_size) if name in OPTIONS else {}),
        **({"kind": kind} if kind else {}),
        **options,
    }
    return registry.drafter(name).build(Parts(target, small, None, eos), **given)


def requests(*prompts, **params):
    return [Request(str(i), tuple(p), SamplingParams(**params), seed=i) for i, p in enumerate(prompts)]


def laws(target, draft, texts):
    """The table's laws at every node, and the scores they come from."""
    for slot, text in enumerate(texts):
        target.release([slot])
        if len(text) > 1:
            target.prefill([slot], [text[:-1]])
    unique = trees.dedup(draft.tree)
    scored = target.score(range(len(texts)), unique.tree)
    logits = unique.expand(scored.logits)
    params = [SamplingParams()] * len(texts)
    return sampling.laws(logits, draft.tree, texts, [1] * len(texts), params), Scores(draft.tree, logits)


def play(drafter, states, texts, target, budgets, rounds, verifier="match"):
    """Rounds of propose, verify and observe; returns the states and the texts after them."""
    for _ in range(rounds):
        draft = drafter.propose(states, budgets)
        p, scores = laws(target, draft, texts)
        key = NoiseKey.of(range(len(texts)), [0] * len(texts), map(len, texts))
        outcome = registry.verifier(verifier)(replace(draft, noise=key), p).sample(key)
        states = drafter.observe(states, outcome, scores)
        texts = [[*text, *new] for text, new in zip(texts, outcome.emitted(draft.tree), strict=True)]
    return states, texts


def same(a, b):
    """Whether two drafts are equal, drawn rows included."""
    equal = torch.equal(a.tree.tokens, b.tree.tokens) and torch.equal(a.tree.parents, b.tree.parents)
    return equal and (a.probs is b.probs or torch.equal(a.probs, b.probs))


__all__ = ["OPTIONS", "V", "build", "kinds", "laws", "models", "play", "requests", "same"]
