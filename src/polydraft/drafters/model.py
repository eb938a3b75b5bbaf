"""Drafts from a smaller causal model with the target's vocabulary.

    paths            K iid paths of equal length (K = 1: a chain)                    IID
    without_replacement   K distinct children of the root, then chains below each   WITHOUT_REPLACEMENT
    greedy_plus_one  the top K-1 children of the root and one drawn from the rest, then chains   GREEDY_PLUS_ONE
    top_k            a beam of the K most probable continuations of each depth       POINT_MASS
    coupled          K smallest clock/q at the root, then the smallest one below     COUPLED

Every token is drawn with the noise of its node from the very row that is reported, processed with the request's own
sampling parameters. Penalties that depend on the path are left out of q where the whole proposal is one compiled call:
the draft fits a little less and the output law does not change.
Depth and width are fixed before the first draw of a round; no drawn token is ever dropped.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from polydraft import noise, sampling
from polydraft import tree as trees
from polydraft.core import Budget, Draft, Method, NoiseKey, Outcome, Request, Scores, SiblingLaw, Target, TokenTree, TreeShape
from polydraft.drafters.parts import Parts, Snapshot
from polydraft.errors import CapacityError, InvalidInputError, unknown_name
from polydraft.models.llama import CompiledLlama
from polydraft.models.proposal import propose_paths

__all__ = ["ModelDrafter", "ModelState"]


def _method(kind: str, title: str, authors: str, year: int, arxiv: str, law: SiblingLaw, *shapes: TreeShape) -> Method:
    name = "model" if kind == "paths" else f"model:{kind}"
    return Method(name, title, authors, year, arxiv, frozenset({law}), frozenset(shapes))


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
}


@dataclass(frozen=True)
class ModelState:
    """One request: its slot in the draft model, and the committed tokens that the slot lacks, the root last."""

    request: Request
    slot: int
    context: tuple[int, ...]
    pending: tuple[int, ...]


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
    needs: frozenset[str] = frozenset()

    def __init__(self, model: Target, kind: str = "paths", *, stop_ids: Sequence[int] = ()) -> None:
        if kind not in KINDS:
            raise unknown_name("kind of model drafter", kind, KINDS)
        self.model, self.kind, self.info = model, kind, KINDS[kind]
        self._stop_ids = tuple(stop_ids)
        self._free = list(range(model.max_num_seqs))[::-1]
        self._proposed: dict[int, TokenTree] = {}  # by slot: what the cache holds behind the committed tokens
        self._compiled = isinstance(model, CompiledLlama) and kind in ("paths", "chain", "coupled")

    @classmethod
    def build(cls, parts: Parts, *, kind: str = "paths") -> "ModelDrafter":
        """For the engine: draft with its draft model."""
        if parts.draft_model is None:
            raise InvalidInputError(
                "drafter 'model' was asked for without a draft model; give draft=..., or use drafter='ngram'."
            )
        return cls(parts.draft_model, kind, stop_ids=parts.eos_token_ids)

    def start(self, requests: Sequence[Request]) -> list[ModelState]:
        """Read the prompts into free slots; see `core.Drafter.start`."""
        states: list[ModelState] = []
        for request in requests:
            if not self._free:
                raise CapacityError(f"the draft model has {self.model.max_num_seqs} slots and all are taken; raise max_num_seqs.")
            slot, ids = self._free.pop(), request.prompt_token_ids
            self.model.release([slot])
            if len(ids) > 1 and len(ids) < self.model.max_model_len:
                self.model.prefill([slot], [ids[:-1]])
            states.append(ModelState(request, slot, ids, ids[-1:]))
        return states

    def release(self, states: Sequence[ModelState]) -> None:
        """Give the slots back."""
        for state in states:
            self._proposed.pop(state.slot, None)
            self.model.release([state.slot])
            self._free.append(state.slot)

    def _sizes(self, state: ModelState, budget: Budget) -> tuple[int, int]:
        """(width, depth) within the budget and the model's context; depth 0 = no draft."""
        width = 1 if self.kind == "chain" else budget.width
        depth = min(budget.max_depth, budget.max_nodes // width, self.model.max_model_len - len(state.context) - 1)
        return width, max(depth, 0)

    def propose(self, states: Sequence[ModelState], budgets: Sequence[Budget]) -> Draft:
        """One batched proposal; see `core.Drafter.propose`. Calling it again draws the same draft."""
        sizes = [self._sizes(s, g) for s, g in zip(states, budgets, strict=True)]
        self._rewind(states)
        key = NoiseKey.of([s.request.seed for s in states], [s.request.sample for s in states], [len(s.context) for s in states])
        if max(depth for _, depth in sizes) == 0:
            return self._empty(states)
        draft = self._compiled_paths(states, sizes, key) if self._compiled else self._grow(states, sizes, key)
        for b, s in enumerate(states):
            if sizes[b][1]:
                self._proposed[s.slot] = TokenTree(draft.tree.tokens[b : b + 1], draft.tree.parents[b : b + 1])
        return draft

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
        probs = (
            None
            if law is SiblingLaw.POINT_MASS
            else torch.full((len(states), 1, self.model.vocab_size), 1 / self.model.vocab_size)
        )
        return replace(bare, law=law, shape=self._shape(1), probs=probs)

    def _shape(self, width: int) -> TreeShape:
        if TreeShape.GROWN in self.info.shapes:
            return TreeShape.GROWN
        if width == 1:
            return TreeShape.CHAIN
        return TreeShape.PATHS if TreeShape.PATHS in self.info.shapes else TreeShape.PRODUCT

    def _compiled_paths(self, states: Sequence[ModelState], sizes: list[tuple[int, int]], key: NoiseKey) -> Draft:
        assert isinstance(self.model, CompiledLlama)
        params = [s.request.params for s in states]
        law = torch.tensor([[g.temperature, max(g.top_k, 0), g.top_p, g.min_p] for g in params], dtype=torch.float64)
        bias = torch.zeros(len(states), self.model.vocab_size if any(g.logit_bias for g in params) else 0)
        for b, g in enumerate(params):
            for token, value in g.logit_bias.items():
                bias[b, token] = value
        widths, depths = [w for w, _ in sizes], [d for _, d in sizes]
        slots, pending = [s.slot for s in states], [s.pending for s in states]
        coupled = self.kind == "coupled"
        tree, rows, probs = propose_paths(self.model, slots, pending, key, widths, depths, law, bias, coupled=coupled)
        (siblings,) = self.info.laws
        return Draft(tree, siblings, self._shape(max(widths)), probs, rows, key if coupled else None)

    def _grow(self, states: Sequence[ModelState], sizes: list[tuple[int, int]], key: NoiseKey) -> Draft:
        """Depth by depth through `score`: one pass for the whole batch and each depth."""
        live = [b for b, (_, depth) in enumerate(sizes) if depth]
        behind = [b for b in live if len(states[b].pending) > 1]
        if behind:
            self.model.prefill([states[b].slot for b in behind], [states[b].pending[:-1] for b in behind])
        growth = _Growth(self, states, sizes, key)
        for depth in range(max(d for _, d in sizes)):
            growth.deepen(depth)
        return growth.draft(self._shape(max(w for w, _ in sizes)))

    def observe(self, states: Sequence[ModelState], outcome: Outcome, scores: Scores) -> list[ModelState]:
        """Keep the cache rows of the proposal that agree with what was emitted; see `core.Drafter.observe`.

        The scored tree may be another than the one proposed, as in a mixture.
        """
        new: list[ModelState] = []
        for s, emitted in zip(states, outcome.emitted(scores.tree), strict=True):
            tokens = s.context + tuple(emitted)
            tree = self._proposed.pop(s.slot, None)
            if tree is None:
                new.append(replace(s, context=tokens, pending=s.pending + tuple(emitted)))
            else:
                fed = _fed_path(tree, emitted)
                self._keep(s, fed)
                new.append(replace(s, context=tokens, pending=tokens[len(s.context) + len(fed) :]))
        return new

    def snapshot(self, state: ModelState) -> Snapshot:
        """The committed tokens; the cache is filled again from them."""
        return {"tokens": np.array(state.context)}

    def restore(self, request: Request, snapshot: Snapshot) -> ModelState:
        """The state that drafts as the one of the snapshot; see `parts.Resumable`."""
        (state,) = self.start([replace(request, prompt_token_ids=tuple(snapshot["tokens"].tolist()))])
        return replace(state, request=request)

    def _keep(self, s: ModelState, fed: list[int]) -> None:
        root = len(s.context) - 1
        if isinstance(self.model, CompiledLlama):
            self.model.keep(s.slot, fed, root)
            return
        self.model.lengths[s.slot] = root
        path = torch.tensor([fed], dtype=torch.int64).reshape(1, len(fed))
        self.model.commit([s.slot], Outcome(path, torch.tensor([len(fed)]), torch.zeros(1, dtype=torch.int64)))


def _fed_path(tree: TokenTree, emitted: Sequence[int]) -> list[int]:
    """Nodes of a proposal on the emitted path whose rows are in the cache: those that have children, each at its first copy.

    tree: one row.  emitted: the last token is the next root and is never among them.
    """
    first, parents = trees.first_copies(tree)[0].tolist(), tree.parents[0].tolist()
    below = {(first[parents[n]], int(tree.tokens[0, n])): n for n in range(1, len(parents)) if parents[n] >= 0 and first[n] == n}
    inner = {first[parent] for parent in parents if parent > 0}
    path, node = [], 0
    for token in emitted[:-1]:
        node = below.get((node, token), -1)
        if node not in inner:
            break
        path.append(node)
    return path


class _Growth:
    """Trees being grown through a model's `score`, one depth for all rows at a time.

    Rows may differ in width and depth: nodes are kept per row, and a pass scores, for every row, the nodes that are new.
    """

    def __init__(self, drafter: ModelDrafter, states: Sequence[ModelState], sizes: list[tuple[int, int]], key: NoiseKey) -> None:
        self.drafter, self.states, self.sizes = drafter, states, sizes
        self.key = key
        self.uniforms = noise.uniforms(key, noise.Stream.DRAFT, 1 + max(w * d for w, d in sizes))
        self.tokens = [[s.context[-1]] for s in states]
        self.parents = [[-1] for _ in states]
        self.rows = [[-1] for _ in states]
        self.frontier = [[0] for _ in states]
        self.score = [{0: 0.0} for _ in states]
        self.laws: list[list[Float[Tensor, V]]] = [[] for _ in states]
        self.row_of: list[dict[int, int]] = [{} for _ in states]

    def deepen(self, depth: int) -> None:
        """Score the frontier, then draw its children."""
        live = [b for b, (_, deepest) in enumerate(self.sizes) if depth < deepest]
        groups: dict[tuple[int, int], list[int]] = {}
        for b in live:
            since = min(self.frontier[b])
            groups.setdefault((since, len(self.tokens[b])), []).append(b)
        for (since, _), batch in groups.items():
            tree = trees.pad([(self.tokens[b], self.parents[b]) for b in batch])
            scores = self.drafter.model.score([self.states[b].slot for b in batch], tree, since=since)
            whole = torch.zeros(len(batch), tree.num_nodes, scores.logits.shape[-1])
            whole[:, since:] = scores.logits.cpu()
            probs = sampling.laws(
                whole,
                tree,
                [self.states[b].context for b in batch],
                [len(self.states[b].request.prompt_token_ids) for b in batch],
                [self.states[b].request.params for b in batch],
                self.drafter._stop_ids,
            )
            first = trees.first_copies(tree)
            for i, b in enumerate(batch):
                self._branch(b, depth, probs[i], first[i].tolist())

    def _branch(self, b: int, depth: int, probs: Float[Tensor, "N V"], first: list[int]) -> None:
        frontier, self.frontier[b] = self.frontier[b], []
        for n in frontier:
            if first[n] == n:
                self.row_of[b][n] = len(self.laws[b])
                self.laws[b].append(probs[n])
        width = self.sizes[b][0]
        if self.drafter.kind == "top_k":
            self._beam(b, frontier, width)
            return
        for n in frontier:
            row = self.row_of[b][first[n]]
            for x in self._draw(b, self.laws[b][row], width if depth == 0 else 1, depth):
                self._add(b, n, x, row)

    def _add(self, b: int, parent: int, token: int, row: int) -> None:
        self.frontier[b].append(len(self.tokens[b]))
        self.tokens[b].append(token)
        self.parents[b].append(parent)
        self.rows[b].append(row)

    def _draw(self, b: int, q: Float[Tensor, "V"], count: int, depth: int) -> list[int]:
        """The children of one node, in draw order."""
        begin = len(self.tokens[b])

        def uniform(i: int) -> Tensor:
            return self.uniforms[b, begin + i : begin + i + 1]

        return _DRAWS[self.drafter.kind](self, b, q, count, depth, uniform)

    def _iid(self, b: int, q: Tensor, count: int, depth: int, uniform: Callable[[int], Tensor]) -> list[int]:
        return [int(noise.choose(q[None], uniform(i))) for i in range(count)]

    def _distinct(self, b: int, q: Tensor, count: int, depth: int, uniform: Callable[[int], Tensor]) -> list[int]:
        left, drawn = q.double().clone(), []
        for i in range(min(count, int((q > 0).sum()))):
            drawn.append(int(noise.choose(left[None], uniform(i))))
            left[drawn[-1]] = 0.0
        return drawn

    def _greedy_plus_one(self, b: int, q: Tensor, count: int, depth: int, uniform: Callable[[int], Tensor]) -> list[int]:
        top = torch.sort(q, descending=True, stable=True).indices[: count - 1].tolist()
        rest = q.double().clone()
        rest[top] = 0.0
        return [*top, int(noise.choose(rest[None], uniform(count - 1)))] if rest.sum() > 0 else top

    def _coupled(self, b: int, q: Tensor, count: int, depth: int, uniform: Callable[[int], Tensor]) -> list[int]:
        key = NoiseKey(*(x[b : b + 1] for x in (self.key.seed, self.key.sample, self.key.position)))
        clocks = noise.clocks(replace(key, position=key.position + depth), len(q))[0]
        return (q.double() / clocks).topk(min(count, int((q > 0).sum()))).indices.tolist()

    def _beam(self, b: int, frontier: list[int], width: int) -> None:
        """The `width` most probable continuations of the frontier, by the probability of their whole path."""
        logs = torch.stack([self.laws[b][self.row_of[b][n]].double().log() + self.score[b][n] for n in frontier])
        values, places = logs.flatten().topk(min(width, logs.numel()))
        for value, place in zip(values.tolist(), places.tolist(), strict=True):
            if value > -torch.inf:
                self._add(b, frontier[place // logs.shape[1]], place % logs.shape[1], -1)
                self.score[b][len(self.tokens[b]) - 1] = value

    def draft(self, shape: TreeShape) -> Draft:
        (law,) = self.drafter.info.laws
        tree = trees.pad(list(zip(self.tokens, self.parents, strict=True)))
        rows = torch.tensor([r + [-1] * (tree.num_nodes - len(r)) for r in self.rows])
        if law is SiblingLaw.POINT_MASS:
            return Draft(tree, law, shape, None, rows)
        V = self.drafter.model.vocab_size
        probs = torch.full((len(self.laws), max(1, *map(len, self.laws)), V), 1 / V)
        for b, found in enumerate(self.laws):
            for r, q in enumerate(found):
                probs[b, r] = q
        return Draft(tree, law, shape, probs, rows, self.key if law is SiblingLaw.COUPLED else None)


_DRAWS: dict[str, Callable[..., list[int]]] = {
    "paths": _Growth._iid,
    "chain": _Growth._iid,
    "without_replacement": _Growth._distinct,
    "greedy_plus_one": _Growth._greedy_plus_one,
    "coupled": _Growth._coupled,
}
