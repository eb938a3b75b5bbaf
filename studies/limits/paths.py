"""Expected tokens per step of path rules: drafts sampled, verification integrated; all rules see the same drafts."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from polydraft.core import Budget, Draft, Request, SamplingParams, Scores, Target, TokenTree, TreeShape
from polydraft.core import geometry as trees
from polydraft.drafters.model.paths import ModelDrafter
from polydraft.methods import registry
from polydraft.sampling import processing as sampling
from polydraft.verifiers.list_race import path_numbers
from studies.limits.contexts import ALWAYS, CHAIN_RULES, MEASURED, PATH_RULES, Pair
from studies.theory import efficiency

TARGET_PATHS = 4
"""Texts drawn from the target at each context, for the bound."""


def restrict(draft: Draft, target_probs: np.ndarray, K: int, L: int) -> tuple[Draft, np.ndarray]:
    """The first K paths of a draft, cut to L tokens: what a drafter with a smaller budget would have drawn."""
    depth = trees.depths(draft.tree)[0]
    number = path_numbers(draft.tree)[0]
    keep = np.flatnonzero((depth >= 0) & (depth <= L) & ((number < K) | (depth == 0)))
    place = np.full_like(depth, -1)
    place[keep] = np.arange(len(keep))
    parents = draft.tree.parents[0, keep]
    moved = np.where(parents >= 0, place[np.maximum(parents, 0)], -1)
    smaller = TokenTree(draft.tree.tokens[:, keep], moved[None])
    shape = TreeShape.CHAIN if K == 1 else draft.shape
    return replace(draft, tree=smaller, rows=draft.rows[:, keep], shape=shape, confidence=None), target_probs[
        :, keep
    ]


class Paths:
    """Expected tokens per step of path rules."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.params = SamplingParams(temperature=pair.settings.temperature, top_p=pair.settings.top_p)
        verifiers = pair.settings.rules or tuple(
            rule for rule in MEASURED if rule != "bound" or pair.draft is not None
        )
        self.wanted = {*verifiers, *ALWAYS} - ({"bound"} if not pair.settings.bounded else set())
        others = {*verifiers} - {*ALWAYS}
        self.path_rules = {
            kind: tuple(rule for rule in names if rule in self.wanted)
            for kind, names in PATH_RULES.items()
            if kind == "paths" or others & {*names}
        }
        self.drafters = {kind: pair.drafter.sibling(kind) for kind in (*PATH_RULES, "chain")}
        self.own = ModelDrafter(pair.target, "paths")
        self.rules = {name: registry.verifier(name) for name in MEASURED if name != "bound"}
        self.values: dict[tuple[str, str, int, int], list[float]] = {}
        self.overlaps: list[float] = []
        """One of each context, the mean over its drafts."""
        self._here: dict[tuple[str, str, int, int], list[float]] = {}
        self._overlaps_here: list[float] = []
        self._read: dict[int, tuple[tuple[int, ...], Scores]] = {}

    def draw(self, drafter: Any, request: Request, tree: tuple[int, ...]) -> Draft:
        """A draft of these parents behind a context."""
        states = drafter.start([request])
        if drafter.needs.hidden:
            states = drafter.read(states, self.prefilled(self.pair.target, request))
        draft = drafter.propose(states, [Budget.fixed(tree)])
        drafter.release(states)
        return draft

    def prefilled(self, model: Target, request: Request) -> Scores:
        """What was read of the context, once: trees are scored behind it and never committed."""
        ids, read = self._read.get(id(model), ((), None))
        if read is None or ids != request.prompt_token_ids:
            model.release([1])
            layers = self.pair.drafter.needs.hidden if model is self.pair.target else ()
            read = model.prefill([1], [request.prompt_token_ids[:-1]], hidden=layers)
            self._read[id(model)] = request.prompt_token_ids, read
        return read

    def rows_at(self, model: Target, request: Request, tree: TokenTree) -> np.ndarray:
        """The model's distribution at every node of a tree."""
        once = trees.dedup(tree)
        self.prefilled(model, request)
        logits = model.score([1], once.tree).logits
        length = len(request.prompt_token_ids)
        return once.expand(
            sampling.distributions(logits, once.tree, [request.prompt_token_ids], [length], [self.params], ())
        )

    def _keep(self, key: tuple[str, str, int, int], draft: Draft, p: np.ndarray) -> None:
        value = efficiency.expected_tokens(draft, self.rules[key[0]](draft, p))
        self._here.setdefault(key, []).append(float(value[0]))

    @property
    def mean_overlap(self) -> float:
        """Of target and draft at the root."""
        return float(np.mean(self.overlaps))

    def run(self, progress: Callable[[], object]) -> None:
        """Measure at every context."""
        for index, context in enumerate(self.pair.contexts(self.pair.settings.contexts)):
            for turn in range(self.pair.settings.drafts):
                self._measure(
                    Request(str(index), context, self.params, self.pair.settings.seed + turn, index)
                )
            for key, values in self._here.items():
                self.values.setdefault(key, []).append(float(np.mean(values)))
            self.overlaps.append(float(np.mean(self._overlaps_here)))
            self._here = {}
            self._overlaps_here = []
            progress()

    def _measure(self, request: Request) -> None:
        s = self.pair.settings
        most = max(s.num_paths)
        deepest = max(s.depths)
        for kind, names in self.path_rules.items():
            nested = kind in (
                "paths",
                "without_replacement",
                "coupled",
                "listed",
            )  # fewer paths are the first of more
            sizes = [(most, deepest)] if nested else [(K, deepest) for K in s.num_paths]
            if kind == "top_k":
                sizes = [(K, L) for K in s.num_paths for L in s.depths]
            for width, depth in sizes:
                draft = self.draw(self.drafters[kind], request, trees.paths(width, depth))
                p = self.rows_at(self.pair.target, request, draft.tree)
                if kind == "paths":
                    q = draft.probs
                    assert q is not None
                    self._overlaps_here.append(
                        float(np.minimum(p[0, 0], q[0, draft.rows[0, 1]], dtype=np.float64).sum())
                    )
                    for L in s.depths:
                        for name in CHAIN_RULES:
                            if name in self.wanted:
                                self._keep((name, "chain", 1, L), *restrict(draft, p, 1, L))
                for K in s.num_paths if nested else [width]:
                    for L in [depth] if kind == "top_k" else s.depths:
                        part = (draft, p) if kind == "top_k" else restrict(draft, p, K, L)
                        for name in names:
                            self._keep((name, kind, K, L), *part)
        if "bound" in self.wanted:
            self._bound(request, deepest)
        if s.rules and "block" not in s.rules:
            return
        lengths = sorted({K * L for K in s.num_paths for L in s.depths})
        draft = self.draw(self.drafters["chain"], request, trees.paths(1, lengths[-1]))
        p = self.rows_at(self.pair.target, request, draft.tree)
        for length in lengths:
            self._keep(("block", "chain of K L", 1, length), *restrict(draft, p, 1, length))

    def _bound(self, request: Request, depth: int) -> None:
        """1 + sum over depths of E[T(v) / p(v)], v drawn from the target: the bound for K iid paths without its V^L terms."""
        draft = self.draw(self.own, request, trees.paths(TARGET_PATHS, depth))
        q = self.rows_at(self.pair.draft, request, draft.tree)[0].astype(np.float64)
        assert draft.probs is not None
        number = path_numbers(draft.tree)[0]
        tokens = draft.tree.tokens[0]
        sums: dict[tuple[int, int], float] = {}
        for path in range(TARGET_PATHS):
            nodes = np.flatnonzero((number == path) & (draft.tree.parents[0] >= 0))
            x = tokens[nodes]
            drafted = q[draft.tree.parents[0, nodes], x].cumprod()
            draft_probs = draft.probs[0].astype(np.float64)[draft.rows[0, nodes], x]
            for K in (1, *self.pair.settings.num_paths):
                reach = 1.0
                mass = 1.0
                total = 1.0
                for L, draft_prob in enumerate(draft_probs, 1):
                    mass *= draft_prob
                    reach = min(reach * draft_prob, -np.expm1(K * np.log1p(-min(drafted[L - 1], 1 - 1e-16))))
                    total += reach / mass
                    if L in self.pair.settings.depths:
                        sums[K, L] = sums.get((K, L), 0.0) + total / TARGET_PATHS
        for (K, L), value in sums.items():
            self._here.setdefault(("bound", "paths", K, L), []).append(value)

    def rows(self) -> list[dict[str, Any]]:
        """Tokens per step of each rule, K and L, over traversal, greedy traversal and block verification too."""
        rows: list[dict[str, Any]] = []
        for key, values in self.values.items():
            rule, kind, K, L = key
            comparable = rule != "bound" and kind != "chain of K L"
            row = {"rule": rule, "drafts": kind, "paths": K, "depth": L, "nodes": K * L}
            row |= efficiency.estimate(np.array(values)).to_dict("tokens_per_step")
            others = {name: (name, "paths", K, L) for name in ("traversal", "greedy_traversal")} | {
                "block": ("block", "chain", 1, L)
            }
            for name, other_tokens in others.items():
                e = (
                    efficiency.paired(np.array(values), np.array(self.values[other_tokens]))
                    if comparable and other_tokens in self.values
                    else None
                )
                row[f"over_{name}"] = None if e is None else [e.mean, e.standard_error]
            rows.append(row)
        return rows
