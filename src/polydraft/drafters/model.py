"""Drafts from a smaller causal model with the target's vocabulary.

    paths            K iid paths of equal length (K = 1: a chain)                    IID
    without_replacement   K distinct children of the root, then chains below each   WITHOUT_REPLACEMENT
    greedy_plus_one  the top K-1 children of the root and one drawn from the rest, then chains   GREEDY_PLUS_ONE
    top_k            the most probable nodes, grown best first (`best_first`)        POINT_MASS
    coupled          K smallest clock/q at the root, then the smallest one below     COUPLED
    listed           K paths, each the smallest clock/q of a race of its own         LISTED

Every token is drawn with the noise of its node from the very row that is reported, processed with the request's own
sampling parameters. Penalties that depend on the path are left out of q where the whole proposal is one compiled call:
the draft fits a little less and the output law does not change.
Depth, width, trunk and short paths are fixed before the first draw of a round; no drawn token is ever dropped. With a trunk the node
at its end branches instead of the root (`listed` and `top_k` know none). Only iid paths may be ragged, the first, drawn first at each depth, deeper than the others;
or any tree whose numbers of children are fixed by position.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import torch

from polydraft.core import (
    Budget,
    Draft,
    Method,
    Needs,
    NoiseKey,
    Outcome,
    Request,
    Scores,
    SiblingLaw,
    Target,
    TokenTree,
    TreeShape,
)
from polydraft.drafters.base import Parts, Snapshot
from polydraft.drafters.best_first import grow
from polydraft.drafters.model_growth import Growth, ModelState
from polydraft.errors import InvalidInputError, unknown_name
from polydraft.models import static_proposal
from polydraft.models.layout import Size, cut
from polydraft.models.llama import CompiledLlama
from polydraft.models.proposal import propose_paths
from polydraft.models.slots import Slots
from polydraft.models.static import StaticLlama

__all__ = ["ModelDrafter", "ModelState"]


def _method(kind: str, title: str, authors: str, year: int, arxiv: str, law: SiblingLaw, *shapes: TreeShape) -> Method:
    name = "model" if kind == "paths" else f"model:{kind}"
    on_request = frozenset({TreeShape.RAGGED, TreeShape.BY_POSITION} if kind == "paths" else ())
    ranked = kind == "top_k"
    return Method(name, title, authors, year, arxiv, frozenset({law}), frozenset(shapes), on_request=on_request, ranked=ranked)


KINDS: dict[str, Method] = {
    "paths": _method(
        "paths", "Smaller model, iid paths", "Sun et al.", 2023, "2310.15141", SiblingLaw.IID, TreeShape.CHAIN, TreeShape.PATHS
    ),
    "chain": _method(
        "chain", "Smaller model, one chain", "Leviathan et al.; Chen et al.", 2023, "2211.17192", SiblingLaw.IID, TreeShape.CHAIN
    ),
    "without_replacement": _method(
        "without_replacement",
        "Smaller model, distinct children",
        "Jeon et al.",
        2024,
        "2402.14160",
        SiblingLaw.WITHOUT_REPLACEMENT,
        TreeShape.CHAIN,
        TreeShape.PRODUCT,
    ),
    "greedy_plus_one": _method(
        "greedy_plus_one",
        "Smaller model, top children and one sampled",
        "Hu et al.",
        2025,
        "2502.18779",
        SiblingLaw.GREEDY_PLUS_ONE,
        TreeShape.CHAIN,
        TreeShape.PRODUCT,
    ),
    "top_k": _method(
        "top_k", "Smaller model, most probable tree", "Li et al.", 2024, "2406.16858", SiblingLaw.POINT_MASS, TreeShape.GROWN
    ),
    "coupled": _method(
        "coupled",
        "Smaller model, shared race",
        "Kobus & Gunduz",
        2025,
        "2504.15475",
        SiblingLaw.COUPLED,
        TreeShape.CHAIN,
        TreeShape.PRODUCT,
    ),
    "listed": _method(
        "listed",
        "Smaller model, a race for each path",
        "Rowan, Phan & Khisti",
        2025,
        "2506.05632",
        SiblingLaw.LISTED,
        TreeShape.CHAIN,
        TreeShape.PATHS,
    ),
}


class ModelDrafter:
    """A smaller causal model as a drafter.

    model: compiled or through transformers, with as many slots as requests run at once.  kind: see the module.
    stop_ids: end-of-sequence ids, which `min_tokens` masks.

    Raises:
        UnknownNameError: a kind that does not exist.

    Example:
        >>> ModelDrafter.methods[0].name
        'model'
    """

    methods = tuple(KINDS.values())
    needs: Needs = Needs()

    def __init__(self, model: Target, kind: str = "paths", *, stop_ids: Sequence[int] = ()) -> None:
        if kind not in KINDS:
            raise unknown_name("kind of model drafter", kind, KINDS)
        self.model, self.kind, self.info = model, kind, KINDS[kind]
        self._stop_ids = tuple(stop_ids)
        self.slots = Slots(model)
        """Equal for those that share them."""
        self._proposed: dict[
            int, tuple[TokenTree, int]
        ] = {}  # by slot: tree and row that the cache holds behind committed tokens
        self._compiled = isinstance(model, CompiledLlama) and kind in ("paths", "chain", "coupled")
        self._static = isinstance(model, StaticLlama) and kind in ("paths", "chain")

    @classmethod
    def build(cls, parts: Parts, *, kind: str = "paths") -> "ModelDrafter":
        """For the engine: draft with its draft model."""
        if parts.draft_model is None:
            raise InvalidInputError(
                "drafter 'model' was asked for without a draft model; give draft=..., or use drafter='ngram'."
            )
        return cls(parts.draft_model, kind, stop_ids=parts.eos_token_ids)

    def sibling(self, kind: str) -> "ModelDrafter":
        """Another kind of drafts from the same model and slots: what either starts, is told or releases is so for both."""
        other = type(self)(self.model, kind, stop_ids=self._stop_ids)
        other.slots, other._proposed = self.slots, self._proposed
        return other

    def start(self, requests: Sequence[Request]) -> list[ModelState]:
        """Read the prompts into free slots; see `core.Drafter.start`."""
        states: list[ModelState] = []
        with ExitStack() as held:
            for request in requests:
                slot, ids = self.slots.take(), request.prompt_token_ids
                held.callback(self.slots.give_back, slot)
                if len(ids) > 1 and len(ids) < self.model.max_model_len:
                    self.model.prefill([slot], [ids[:-1]])
                states.append(ModelState(request, slot, ids, ids[-1:]))
            held.pop_all()
        return states

    def release(self, states: Sequence[ModelState]) -> None:
        """Give the slots back."""
        for state in states:
            self._proposed.pop(state.slot, None)
            self.slots.give_back(state.slot)

    def _deepest(self, state: ModelState, budget: Budget) -> int:
        return max(min(budget.max_depth, self.model.max_model_len - len(state.context) - 1), 0)

    def _sizes(self, state: ModelState, budget: Budget) -> Size:
        """What fits into the budget and the model's context; depth 0 = no draft.

        A trunk below which nothing is left is a chain, and paths of which the first cannot be the longest are equal.
        """
        width = 1 if self.kind == "chain" else budget.width
        trunk = 0 if width == 1 or self.kind == "listed" else budget.trunk
        deepest = self._deepest(state, budget)
        asked = budget.asks_for if budget.asks_for in self.info.on_request else None
        if asked is TreeShape.BY_POSITION:
            return cut(budget.parents, deepest, budget.max_nodes)
        if asked is TreeShape.RAGGED:
            depth = min(deepest, budget.max_nodes - (width - 1) * budget.short)
            if depth > budget.short:
                return Size(width, depth, short=budget.short)
        depth = min(deepest, trunk + (budget.max_nodes - trunk) // width)
        return Size(width, depth, trunk) if depth > trunk or trunk == 0 else Size(1, min(deepest, budget.max_nodes))

    def propose(self, states: Sequence[ModelState], budgets: Sequence[Budget]) -> Draft:
        """One batched proposal; see `core.Drafter.propose`. Calling it again draws the same draft."""
        self._rewind(states)
        if self.info.ranked:
            return self._best_first(states, budgets)
        sizes = [self._sizes(s, g) for s, g in zip(states, budgets, strict=True)]
        keys = [s.request.seed for s in states], [s.request.sample for s in states], [len(s.context) for s in states]
        if max(depth for _, depth, *_ in sizes) == 0:
            return self._empty(states)
        draft = self._drawn(states, sizes, keys)
        for b, s in enumerate(states):
            if sizes[b][1]:
                self._proposed[s.slot] = draft.tree, b
        return draft

    def _best_first(self, states: Sequence[ModelState], budgets: Sequence[Budget]) -> Draft:
        limits = [replace(g, max_depth=self._deepest(s, g)) for s, g in zip(states, budgets, strict=True)]
        draft, scored = grow(self.model, states, limits, self._stop_ids)
        self._proposed |= {s.slot: (tree, 0) for s, tree in zip(states, scored, strict=True) if tree.num_nodes}
        return draft

    def _drawn(self, states: Sequence[ModelState], sizes: list[Size], keys: tuple[list[int], list[int], list[int]]) -> Draft:
        if self._compiled:
            return self._compiled_paths(states, sizes, keys)
        planned = any(size.parents for size in sizes)
        if (
            self._static
            and not planned
            and not any(s.request.params.has_penalties or s.request.params.min_tokens for s in states)
        ):
            return self._static_paths(states, sizes, NoiseKey.of(*keys))
        return self._grow(states, sizes, NoiseKey.of(*keys))

    def _rewind(self, states: Sequence[ModelState]) -> None:
        """Forget what an unobserved proposal left in the cache, so that proposing is repeatable."""
        for s in states:
            self._proposed.pop(s.slot, None)
            cached = len(s.context) - len(s.pending)
            if self.model.lengths[s.slot] > cached:
                self.model.lengths[s.slot] = cached

    def _empty(self, states: Sequence[ModelState]) -> Draft:
        bare = Draft.empty(torch.tensor([s.context[-1] for s in states]))
        (law,) = self.info.laws
        probs = torch.full((len(states), 1, self.model.vocab_size), 1 / self.model.vocab_size)
        return replace(bare, law=law, shape=self._shape([Size(1, 0)]), probs=probs)

    def _shape(self, sizes: Sequence[Size]) -> TreeShape:
        if any(size.parents for size in sizes):
            return TreeShape.BY_POSITION
        if any(size.short for size in sizes):
            return TreeShape.RAGGED
        if max(size.width for size in sizes) == 1:
            return TreeShape.CHAIN
        return TreeShape.PATHS if TreeShape.PATHS in self.info.shapes else TreeShape.PRODUCT

    def _compiled_paths(
        self, states: Sequence[ModelState], sizes: list[Size], keys: tuple[list[int], list[int], list[int]]
    ) -> Draft:
        assert isinstance(self.model, CompiledLlama)
        params = [s.request.params for s in states]
        law = [(g.temperature, max(g.top_k, 0), g.top_p, g.min_p) for g in params]
        bias = np.zeros((len(states), self.model.vocab_size if any(g.logit_bias for g in params) else 0), np.float32)
        for b, g in enumerate(params):
            for token, value in g.logit_bias.items():
                bias[b, token] = value
        slots, pending = [s.slot for s in states], [s.pending for s in states]
        coupled = self.kind == "coupled"
        tree, rows, probs = propose_paths(self.model, slots, pending, keys, sizes, law, bias, coupled=coupled)
        (siblings,) = self.info.laws
        return Draft(tree, siblings, self._shape(sizes), probs, rows, NoiseKey.of(*keys) if coupled else None)

    def _catch_up(self, states: Sequence[ModelState]) -> None:
        """Feed the committed tokens that the slots lack, but for the root."""
        behind = [s for s in states if len(s.pending) > 1]
        if behind:
            self.model.prefill([s.slot for s in behind], [s.pending[:-1] for s in behind])

    def _static_paths(self, states: Sequence[ModelState], sizes: list[Size], key: NoiseKey) -> Draft:
        """Without a look at what is drawn before all is drawn; rows with a draft, then all rows."""
        assert isinstance(self.model, StaticLlama)
        live = [b for b, (_, depth, *_) in enumerate(sizes) if depth]
        chosen = [states[b] for b in live]
        self._catch_up(chosen)
        some = NoiseKey(*(x[live] for x in (key.seed, key.sample, key.position)))
        shapes = [sizes[b] for b in live]
        paths = [(w, d, trunk, short) for w, d, trunk, short, _ in shapes]
        params, roots = [s.request.params for s in chosen], [s.context[-1] for s in chosen]
        tree, rows, probs = static_proposal.propose_paths(self.model, [s.slot for s in chosen], roots, some, paths, params)
        (law,) = self.info.laws
        if len(live) < len(states):
            index = torch.tensor(live)
            bare = TokenTree.roots(torch.tensor([s.context[-1] for s in states])).tokens
            tokens = torch.cat([bare, bare.new_zeros(len(states), tree.num_nodes - 1)], 1).index_copy(0, index, tree.tokens)
            unrooted = tokens.new_full(tokens.shape, -1)
            tree, rows = TokenTree(tokens, unrooted.index_copy(0, index, tree.parents)), unrooted.index_copy(0, index, rows)
            whole = probs.new_full((len(states), *probs.shape[1:]), 1 / probs.shape[2])
            probs = whole.index_copy(0, index.to(probs.device), probs)
        return Draft(tree, law, self._shape(shapes), probs, rows)

    def _grow(self, states: Sequence[ModelState], sizes: list[Size], key: NoiseKey) -> Draft:
        """Depth by depth through `score`: one pass for the whole batch and each depth."""
        self._catch_up([s for s, (_, depth, *_) in zip(states, sizes, strict=True) if depth])
        growth = Growth(self.model, self.kind, states, sizes, key, self._stop_ids)
        for depth in range(max(d for _, d, *_ in sizes)):
            growth.deepen(depth)
        (law,) = self.info.laws
        return growth.draft(law, self._shape(sizes))

    def observe(self, states: Sequence[ModelState], outcome: Outcome, scores: Scores) -> list[ModelState]:
        """Keep the cache rows of the proposal that agree with what was emitted; see `core.Drafter.observe`.

        The scored tree may be another than the one proposed, as in a mixture.
        """
        new: list[ModelState] = []
        for s, emitted in zip(states, outcome.emitted(scores.tree), strict=True):
            tokens = s.context + tuple(emitted)
            proposed = self._proposed.pop(s.slot, None)
            if proposed is None:
                pending = s.pending + tuple(emitted)
            else:
                fed = _fed_path(*proposed, emitted)
                self._keep(s, fed)
                pending = tokens[len(s.context) + len(fed) :]
            new.append(ModelState(s.request, s.slot, tokens, pending))
        return new

    def snapshot(self, state: ModelState) -> Snapshot:
        """The committed tokens; the cache is filled again from them."""
        return {"tokens": np.array(state.context)}

    def restore(self, request: Request, snapshot: Snapshot) -> ModelState:
        """The state that drafts as the one of the snapshot; see `base.Resumable`."""
        (state,) = self.start([replace(request, prompt_token_ids=tuple(snapshot["tokens"].tolist()))])
        return replace(state, request=request)

    def _keep(self, s: ModelState, fed: list[int]) -> None:
        root = len(s.context) - 1
        if isinstance(self.model, CompiledLlama):
            self.model.keep(s.slot, fed, root)
            return
        self.model.lengths[s.slot] = root
        self.model.commit([s.slot], Outcome.of(np.array([fed], np.int64), np.array([len(fed)]), np.array([0])))


def _fed_path(tree: TokenTree, b: int, emitted: Sequence[int]) -> list[int]:
    """Nodes of a proposal on the emitted path whose rows are in the cache: those that have children, each at its first copy.

    b: row of the tree.  emitted: the last token is the next root and is never among them.
    """
    tokens, parents = tree.lists[0][b], tree.lists[1][b]
    path, here = list[int](), {0}  # the copies of one node
    for token in emitted[:-1]:
        below = [n for n in range(1, len(tokens)) if parents[n] in here and tokens[n] == token]
        here = set(below)
        if not any(parent in here for parent in parents):
            break
        path.append(below[0])
    return path
