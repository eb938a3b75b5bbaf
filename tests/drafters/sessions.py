"""Drafters by their registered names, driven round by round over a table target."""

import json
from dataclasses import replace

import numpy as np
import torch
from safetensors.torch import save_file

from polydraft.core import (
    Draft,
    DraftSampling,
    Method,
    Needs,
    NoiseKey,
    Offers,
    Request,
    SamplingParams,
    Scores,
    TreeShape,
)
from polydraft.core import geometry as trees
from polydraft.drafters.base import Parts
from polydraft.drafters.model.by_depth import ModelState
from polydraft.drafters.text.text_index import TextIndex
from polydraft.heads.peagle.network import PeagleHead
from polydraft.heads.recipe import Material, fresh_config
from polydraft.methods import registry
from polydraft.papers.mask_query.network import MaskQueries, QuerySizes
from polydraft.papers.trigram.table import TrigramTable
from polydraft.policy.sizes import drawable
from polydraft.sampling import processing as sampling
from tests.engine.tables import TableModel

V = 5


def trigram_table(documents, vocab_size, **options):
    """A table counted from documents."""
    return TrigramTable.of(TextIndex.build(documents, vocab_size), **options)


def retrieval_index(folder, V):
    """An index of a random corpus in which every pair of tokens occurs."""
    corpus = np.random.default_rng(0).integers(0, V, 60 * V)
    TextIndex.build([corpus, [t % V for t in (1, 2, 3, 4, 1, 2, 3, 4)]], V).save(folder / "retrieval")
    return {"index": folder / "retrieval"}


def another_model(folder, V):
    """A second draft model, unlike the first."""
    return {"models": [TableModel(V, seed=2, max_num_seqs=128)]}


def trained(kind):
    """A drafter of a kind that is trained, with random weights over all tokens but one."""

    def weights(folder, V):
        target = TableModel(V)
        recipe = registry.recipe(kind)
        ids = np.arange(V - 1)
        layers = (0, 1)[-len(recipe.layers(12)) :]
        torch.manual_seed(0)
        rows = torch.from_numpy(target.embed(np.arange(V))).bfloat16()
        output = torch.eye(V - 1, target.width).bfloat16()
        material = Material(target, layers, ids, rows, output, recipe.sizes)
        network = recipe.fresh(material)
        for matrix in network.parameters():
            if matrix.ndim == 2:
                torch.nn.init.normal_(matrix)
        recipe.export(network, material, folder / kind)
        return {"weights": folder / kind}

    return weights


def peagle(folder, V):
    """A P-EAGLE head with random weights over all tokens but one."""
    target = TableModel(V)
    ids = np.arange(V - 1)
    config = fresh_config(TableModel(V).width, model_type="llama", vocab_size=V)
    torch.manual_seed(0)
    rows = torch.from_numpy(target.embed(np.arange(V)))
    material = Material(target, (0, 1), ids, rows, torch.empty(0), {})
    tensors = PeagleHead(config, material).state_dict() | {"d2t": torch.zeros(V - 1, dtype=torch.int64)}
    said = vars(config) | {"speculators_model_type": "peagle", "mask_token_id": 0, "draft_vocab_size": V - 1}
    (folder / "peagle").mkdir(exist_ok=True)
    named = {
        name.replace("midlayer.", "layers.0."): torch.randn_like(x)
        if x.ndim > 1 and x.is_floating_point()
        else x
        for name, x in tensors.items()
    }
    save_file(named, folder / "peagle" / "model.safetensors")
    (folder / "peagle" / "config.json").write_text(
        json.dumps(said | {"eagle_aux_hidden_state_layer_ids": [0, 1]})
    )
    return {"weights": folder / "peagle"}


def settled(folder, V):
    """Every pass waits for all that it may take, so that drafts do not depend on the clock."""
    return {"lead_cap": 8, "min_lead": 8}


def mask_queries(folder, V):
    """A Spec-Drafter with random weights, of more queries than a round asks for."""
    torch.manual_seed(0)
    MaskQueries.like(QuerySizes(vocab_size=V, width=8, heads=2, queries=12)).save(folder / "mask-query")
    return {"weights": folder / "mask-query"}


OPTIONS = {
    "amusd": settled,
    "mask-query": mask_queries,
    "peagle": peagle,
    "retrieval": retrieval_index,
    "several": another_model,
} | {kind: trained(kind) for kind in registry.names("recipe") if kind != "model"}
"""What a drafter cannot be built or compared without, by name: a function of a folder to write into."""


class Head:
    """What a draft head is: the next state guessed from the last one and the token behind it, here by random weights; greedy chains."""

    info = Method(
        "head", "A head", "", 2026, "", frozenset({DraftSampling.POINT_MASS}), frozenset({TreeShape.CHAIN})
    )
    methods = (info,)
    needs = Needs(hidden=(1,), embeddings=True, head=True)

    def __init__(self, target, ends):
        self.target = target
        self.ends = ends
        self.weights = np.random.default_rng(0).standard_normal((2 * target.width, target.width))

    @classmethod
    def build(cls, parts):
        return cls(parts.target, parts.eos_token_ids)

    @property
    def offers(self):
        return Offers(read=self.read)

    def start(self, requests):
        return [
            (request.prompt_token_ids, None) for request in requests
        ]  # the text, and the state before its last token

    def read(self, states, scores):
        return [(text, scores.hidden[1][b, -1]) for b, (text, _) in enumerate(states)]

    def propose(self, states, budgets):
        rows = []
        for (text, state), budget in zip(states, budgets, strict=True):
            tokens = [text[-1]]
            while (
                state is not None
                and len(tokens) <= min(budget.max_depth, budget.max_nodes)
                and tokens[-1] not in self.ends
            ):
                state = np.concatenate([state, self.target.embed(tokens[-1])]) @ self.weights
                tokens.append(int(self.target.head(state).argmax()))
            rows.append((tokens, list(range(-1, len(tokens) - 1))))
        tree = trees.pad(rows)
        return Draft(tree, DraftSampling.POINT_MASS, TreeShape.CHAIN, None, np.full_like(tree.tokens, -1))

    def observe(self, states, outcome, scores):
        last = [path[-1] if path else 0 for path in outcome.lists.paths]
        emitted = zip(states, outcome.emitted(scores.tree), strict=True)
        return [((*text, *new), scores.hidden[1][b, last[b]]) for b, ((text, _), new) in enumerate(emitted)]

    def release(self, states):
        """Nothing is held."""


def kinds():
    """Every kind of draft of every registered drafter, and those of a head."""
    elsewhere = {
        "tli",
        "slem",
        "early-exit",
        "hidden-transfer",
        "nest",
        "assistant",
    }  # of two tokenizers, in a target's layers or cache, or of a distribution: they have files of their own
    names = [name for name in registry.names("drafter") if name not in elsewhere]
    return [*(info.name for name in names for info in registry.drafter(name).methods), Head.info.name]


def begin(drafter, requests):
    """States of a drafter that was given what it needs of the prompts, as an engine gives it."""
    states = drafter.start(requests)
    for i, request in enumerate(requests):
        if drafter.needs.hidden and request.prompt_token_ids[:-1]:
            target = getattr(drafter, "target", None) or drafter.model.target
            read = TableModel(target.vocab_size, dtype=target.logits.dtype)
            read.logits = target.logits
            scores = read.prefill([0], [list(request.prompt_token_ids[:-1])], hidden=drafter.needs.hidden)
            states[i : i + 1] = drafter.read(states[i : i + 1], scores)
    return states


def told(drafter, tree):
    """Scores of a pass whose logits say nothing, with the states that a drafter needs."""
    nothing = np.zeros((*tree.tokens.shape, V), np.float64)
    return Scores(
        tree,
        nothing,
        dict.fromkeys(drafter.needs.hidden, np.zeros((*tree.tokens.shape, 8), np.float64)),
    )


def models(V=V, seqs=4, **options):
    """A target and a draft model that resembles it."""
    target, small = (TableModel(V, seed=s, max_num_seqs=seqs, **options) for s in (0, 1))
    small.logits = 0.7 * target.logits + 0.3 * small.logits
    return target, small


def build(name, target, small, folder, eos=(), **options):
    """A drafter of this kind, as an engine would build it."""
    name, kind = registry.name_and_kind(name)
    family = name.partition(":")[0]
    given = {
        **(OPTIONS[family](folder, target.vocab_size) if family in OPTIONS else {}),
        **({"kind": kind} if kind else {}),
        **options,
    }
    made = Head if name == Head.info.name else registry.drafter(name)
    return made.build(Parts(target, small, None, eos), **given)


def requests(*prompts, **params):
    return [Request(str(i), tuple(p), SamplingParams(**params), seed=i) for i, p in enumerate(prompts)]


def distributions(target, draft, texts):
    """The table's distributions at every node, and the scores they come from."""
    for slot, text in enumerate(texts):
        target.release([slot])
        if len(text) > 1:
            target.prefill([slot], [text[:-1]])
    unique = trees.dedup(draft.tree)
    scored = target.score(range(len(texts)), unique.tree, hidden=target.offers.hidden)
    logits = unique.expand(scored.logits)
    hidden = {layer: unique.expand(x) for layer, x in scored.hidden.items()}
    params = [SamplingParams()] * len(texts)
    return sampling.distributions(logits, draft.tree, texts, [1] * len(texts), params), Scores(
        draft.tree, logits, hidden
    )


def proposed(drafter, states, budgets):
    """A draft of these budgets as the drafter draws them: see `policy.sizes`."""
    texts = [
        (s.request.params, len(s.context)) if isinstance(s, ModelState) else (SamplingParams(), 0)
        for s in states
    ]
    return drafter.propose(states, drawable(budgets, texts, drafter.info, drafter.offers))


def play(drafter, states, texts, target, budgets, rounds, verifier="match"):
    """Rounds of propose, verify and observe; returns the states and the texts after them."""
    for _ in range(rounds):
        draft = proposed(drafter, states, budgets)
        p, scores = distributions(target, draft, texts)
        key = NoiseKey.of(range(len(texts)), [0] * len(texts), map(len, texts))
        outcome = registry.verifier(verifier)(replace(draft, noise=key), p).sample(key)
        states = drafter.observe(states, outcome, scores)
        texts = [[*text, *new] for text, new in zip(texts, outcome.emitted(draft.tree), strict=True)]
    return states, texts


def same(a, b):
    """Whether two drafts are equal, drawn rows included."""
    equal = np.array_equal(a.tree.tokens, b.tree.tokens) and np.array_equal(a.tree.parents, b.tree.parents)
    return equal and (a.probs is b.probs or np.array_equal(a.probs, b.probs))
