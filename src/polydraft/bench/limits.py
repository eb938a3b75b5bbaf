"""`polydraft limits`: how much every rule keeps on real text, against what any rule could keep.

nodes   one context, n drafts: acceptance of each rule and the optimum for each law of the draws, in closed form where there is one,
        else with draws sampled and the verification integrated
paths   K paths of L tokens: expected tokens per call, drafts sampled, verification integrated; all rules see the same drafts

Contexts are places in texts that neither model was trained on. Every number is a function of models, texts and seed.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polydraft import noise, registry, sampling
from polydraft import tree as trees
from polydraft.core import Budget, Draft, NoiseKey, Request, SamplingParams, Target, TokenTree, TreeShape
from polydraft.drafters.model import ModelDrafter
from polydraft.errors import InvalidInputError, unknown_name
from polydraft.models import load, pair
from polydraft.theory import acceptance, efficiency, rules
from polydraft.verifiers.block.multipath import picked_law
from polydraft.verifiers.list_race import path_numbers
from polydraft.verifiers.token import importance, recursive, transport

__all__ = ["Findings", "Limits", "Settings", "held_out_texts"]

HELD_OUT = ("argparse", "bisect", "graphlib", "heapq", "json.decoder", "json.encoder", "sched", "shutil", "textwrap")
"""Modules of the standard library that the embedded pair was not trained on."""
CONTEXT = 96
"""Tokens before each measured place."""
DRAWS = 16
"""Sampled draws a context, for rules without a closed form."""
TARGET_PATHS = 4
"""Texts drawn from the target at each context, for the bound."""
PROGRAMMES_UP_TO = 3
"""Most drafts for which linear programmes are solved."""


CHAIN_RULES = ("speculative", "block")
PATH_RULES: dict[str, tuple[str, ...]] = {
    "paths": (
        "single_with_spares",
        "recursive",
        "kseq",
        "max_ratio",
        "transport",
        "traversal",
        "multipath",
        "greedy_traversal",
    ),
    "without_replacement": ("recursive_wor", "traversal", "greedy_traversal_wor"),
    "greedy_plus_one": ("greedy_plus_one", "traversal"),
    "top_k": ("match",),
    "coupled": ("race",),
}
"""Kind of model drafter -> rules measured on its drafts."""
MEASURED = ("bound", *CHAIN_RULES, *dict.fromkeys(rule for names in PATH_RULES.values() for rule in names))
ALWAYS = ("block", "traversal")


@dataclass(frozen=True)
class Settings:
    """What is measured.

    contexts: places in the texts for paths.  node_contexts: for single nodes; 0 measures none.
    rules: path rules to measure, all of them where empty; block and traversal verification are measured anyway, to compare with.
    """

    contexts: int = 240
    node_contexts: int = 60
    temperature: float = 1.0
    temperatures: tuple[float, ...] = (0.2, 0.6, 1.0, 1.4)
    num_drafts: tuple[int, ...] = (1, 2, 3, 4, 6, 8)
    drafts_by_temperature: int = 4
    num_paths: tuple[int, ...] = (2, 3, 4)
    depths: tuple[int, ...] = (4, 6, 8)
    seed: int = 0
    rules: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if (
            self.contexts < 6
            or self.node_contexts in (1, -1)
            or min(self.num_paths) < 2
            or min(*self.temperatures, self.temperature) <= 0
        ):
            raise InvalidInputError(
                f"{self} was given; expected at least six contexts (two for each third), two for nodes or none, two paths and positive temperatures. "
                "One path is measured anyway; temperature 0 has nothing to measure, as only equal tokens are kept."
            )
        for name in self.rules:
            if name not in MEASURED:
                raise unknown_name("path rule", name, MEASURED)


@dataclass
class Findings:
    """Rows of plain data. nodes: one for each rule, number of drafts and temperature; paths: for each rule, K and L."""

    settings: Settings
    nodes: list[dict[str, Any]] = field(default_factory=list)
    paths: list[dict[str, Any]] = field(default_factory=list)
    by_overlap: list[dict[str, Any]] = field(default_factory=list)
    mean_overlap: float = 0.0


def held_out_texts() -> list[str]:
    """Sources of the standard library's held-out modules, as installed.

    Example:
        >>> any("class ArgumentParser" in text for text in held_out_texts())
        True
    """
    texts: list[str] = []
    for name in HELD_OUT:
        found = find_spec(name)
        if found is not None and found.origin is not None:
            texts.append(Path(found.origin).read_text(encoding="utf-8"))
    return texts


class Limits:
    """Two models and some texts, ready to be measured. target, draft: folders, the embedded pair by default."""

    def __init__(
        self,
        settings: Settings,
        *,
        target: str | None = None,
        draft: str | None = None,
        texts: Sequence[str] | None = None,
    ) -> None:
        if (target is None) != (draft is None):
            raise InvalidInputError("one model was given without the other; expected both a target and a draft, or neither.")
        folders = (target or str(pair.target_folder()), draft or str(pair.draft_folder()))
        self.settings = settings
        self.target, self.draft = (load.load_model(f, max_model_len=CONTEXT + 64, max_num_seqs=2) for f in folders)
        tokenizers = [load.load_tokenizer(f) for f in folders]
        load.check_same_vocabulary(*tokenizers, self.target.vocab_size, self.draft.vocab_size)
        self.documents = [load.encode(tokenizers[0], text) for text in (held_out_texts() if texts is None else texts)]
        if sum(max(len(ids) - CONTEXT, 0) for ids in self.documents) < 2 * max(settings.contexts, settings.node_contexts):
            raise InvalidInputError(
                f"texts of {sum(map(len, self.documents))} tokens were given for {settings.contexts} contexts; expected at least "
                f"{CONTEXT} tokens each and two for every context. Give longer texts, or fewer contexts."
            )

    def contexts(self, count: int) -> list[tuple[int, ...]]:
        """Windows of `CONTEXT` tokens that end at places spread evenly over the texts, shifted by the seed."""
        ends = [(d, e) for d, ids in enumerate(self.documents) for e in range(CONTEXT, len(ids))]
        u = noise.uniforms(NoiseKey.of([self.settings.seed], [0], [0]), noise.Stream.DRAFT, 1).item()
        chosen = [ends[int((i + u) * len(ends) / count) % len(ends)] for i in range(count)]
        return [tuple(self.documents[d][e - CONTEXT : e]) for d, e in chosen]

    @property
    def steps(self) -> int:
        """Calls of `progress` that `run` makes."""
        return self.settings.contexts + self.settings.node_contexts

    def run(self, progress: Callable[[], object] = lambda: None) -> Findings:
        """Measure it all."""
        found = Findings(self.settings)
        _Nodes(self, found).run(progress)
        _Paths(self, found).run(progress)
        return found


def _last_logits(model: Target, context: tuple[int, ...]) -> np.ndarray:
    model.release([1])
    return model.prefill([1], [context]).logits[0, -1].double().cpu().numpy()


def _law(logits: np.ndarray, temperature: float) -> np.ndarray:
    x = np.exp((logits - logits.max()) / temperature)
    return x / x.sum()


class _Nodes:
    """Acceptance at one node."""

    def __init__(self, limits: Limits, found: Findings) -> None:
        self.limits, self.found = limits, found
        self.values: dict[tuple[str, str, int, float], list[float]] = {}

    def run(self, progress: Callable[[], object]) -> None:
        s = self.limits.settings
        for index, context in enumerate(self.limits.contexts(s.node_contexts) if s.node_contexts else ()):
            rows = [_last_logits(model, context) for model in (self.limits.target, self.limits.draft)]
            for T in sorted({*s.temperatures, s.temperature}):
                p, q = (_law(row, T) for row in rows)
                counts = s.num_drafts if s.temperature == T else (s.drafts_by_temperature,)
                for (rule, law, n), value in _at_node(p, q, counts, s.seed, index):
                    self.values.setdefault((rule, law, n, T), []).append(value)
            progress()
        for (rule, law, n, T), values in self.values.items():
            e = efficiency.estimate(np.array(values))
            self.found.nodes.append(
                {
                    "rule": rule,
                    "law": law,
                    "drafts": n,
                    "temperature": T,
                    "acceptance": e.mean,
                    "standard_error": e.standard_error,
                }
            )


def _at_node(
    p: np.ndarray, q: np.ndarray, counts: Sequence[int], seed: int, index: int
) -> Iterator[tuple[tuple[str, str, int], float]]:
    """((rule, law of the draws, n), acceptance) at one context."""
    most, V = max(counts), len(p)
    key = NoiseKey.of([seed + i for i in range(DRAWS)], [1] * DRAWS, [index] * DRAWS)
    clocks = noise.clocks(key, most * V).numpy().reshape(DRAWS, most, V)
    with np.errstate(divide="ignore"):
        arrivals, wanted = clocks / q, clocks / p
    order = np.argsort(arrivals[:, 0], axis=1)[:, :most]  # first arrivals of one race: draws without replacement
    lists = arrivals.argmin(2)
    rows = torch.from_numpy(p).expand(DRAWS, -1), torch.from_numpy(q).expand(DRAWS, -1)
    for n in counts:
        yield ("optimum", "IID", n), acceptance.with_replacement(p, q, n).alpha
        yield ("optimum", "WITHOUT_REPLACEMENT", n), acceptance.without_replacement(p, q, n).alpha
        yield ("greedy_plus_one", "GREEDY_PLUS_ONE", n), acceptance.greedy_plus_one(p, q, n).alpha
        yield ("match", "POINT_MASS", n), acceptance.point_mass(p, acceptance.top(q, n)).alpha
        yield ("match", "IID", n), rules.target_sample(p, q, n)
        yield ("speculative", "IID", n), rules.single(p, q)
        yield ("single_with_spares", "IID", n), rules.single_with_spares(p, q, n)
        yield ("recursive", "IID", n), rules.recursive(p, q, n)
        yield ("kseq", "IID", n), rules.kseq(p, q, n)[1]
        yield ("max_ratio", "IID", n), max(rules.single(p, q), _overlap_of_highest(p, q, n))
        yield ("transport", "IID", n), max(rules.single(p, q), float(np.minimum(p, transport.select(p, q, n)[0]).sum()))
        if n <= PROGRAMMES_UP_TO:
            yield ("importance", "IID", n), _overlap_of_tournament(p, q, n)
        emitted = recursive.recursive_wor.emitted(*rows, torch.from_numpy(order[:, :n].copy()))
        drafted = emitted.gather(1, torch.from_numpy(order[:, :n].copy())).sum(1)
        yield ("recursive_wor", "WITHOUT_REPLACEMENT", n), float(drafted.mean())
        yield ("race", "COUPLED", n), float((order[:, :n] == wanted[:, 0].argmin(1)[:, None]).any(1).mean())
        first = wanted[:, :n].min(1).argmin(1)
        yield ("list_race", "LISTED", n), float((lists[:, :n] == first[:, None]).any(1).mean())


def _overlap_of_highest(p: np.ndarray, q: np.ndarray, n: int) -> float:
    chance = torch.zeros(1, n + 1, dtype=torch.float64)
    chance[0, n] = 1.0
    law, _, _ = picked_law(torch.from_numpy(p)[None], torch.from_numpy(q)[None], chance)
    return float(torch.minimum(torch.from_numpy(p), law[0]).sum())


def _overlap_of_tournament(p: np.ndarray, q: np.ndarray, n: int) -> float:
    wanted, drafted = (torch.from_numpy(x)[None] for x in (p, q))
    law = drafted
    for _ in range(n - 1):
        law = importance.select_pairs(wanted, law, drafted).law
    return float(torch.minimum(wanted, law).sum())


def restrict(draft: Draft, target_probs: Tensor, K: int, L: int) -> tuple[Draft, Tensor]:
    """The first K paths of a draft, cut to L tokens: what a drafter with a smaller budget would have drawn."""
    depth, number = trees.depths(draft.tree)[0], path_numbers(draft.tree)[0]
    keep = ((depth >= 0) & (depth <= L) & ((number < K) | (depth == 0))).nonzero()[:, 0]
    place = torch.full_like(depth, -1)
    place[keep] = torch.arange(len(keep))
    parents = draft.tree.parents[0, keep]
    moved = torch.where(parents >= 0, place[parents.clamp(min=0)], -1)
    smaller = TokenTree(draft.tree.tokens[:, keep], moved[None])
    shape = TreeShape.CHAIN if K == 1 else draft.shape
    return replace(draft, tree=smaller, rows=draft.rows[:, keep], shape=shape), target_probs[:, keep]


class _Paths:
    """Expected tokens per call of path rules."""

    def __init__(self, limits: Limits, found: Findings) -> None:
        self.limits, self.found = limits, found
        self.params = SamplingParams(temperature=limits.settings.temperature)
        asked = limits.settings.rules or MEASURED
        self.wanted = {*asked, *ALWAYS}
        others = {*asked} - {*ALWAYS}
        self.path_rules = {
            kind: tuple(rule for rule in names if rule in self.wanted)
            for kind, names in PATH_RULES.items()
            if kind == "paths" or others & {*names}
        }
        self.drafters = {kind: ModelDrafter(limits.draft, kind) for kind in (*PATH_RULES, "chain")}
        self.own = ModelDrafter(limits.target, "paths")
        self.rules = {name: registry.verifier(name) for name in MEASURED if name != "bound"}
        self.values: dict[tuple[str, str, int, int], list[float]] = {}
        self.overlaps: list[float] = []

    def _draw(self, drafter: ModelDrafter, request: Request, width: int, depth: int) -> Draft:
        states = drafter.start([request])
        draft = drafter.propose(states, [Budget(width * depth, depth, width)])
        drafter.release(states)
        return draft

    def _rows(self, model: Target, request: Request, tree: TokenTree) -> Tensor:
        """The model's law at every node of a tree."""
        once = trees.dedup(tree)
        model.release([1])
        model.prefill([1], [request.prompt_token_ids[:-1]])
        logits = model.score([1], once.tree).logits.cpu()
        length = len(request.prompt_token_ids)
        return once.expand(sampling.laws(logits, once.tree, [request.prompt_token_ids], [length], [self.params], ()))

    def _keep(self, key: tuple[str, str, int, int], draft: Draft, p: Tensor) -> None:
        value = efficiency.expected_tokens(draft, self.rules[key[0]](draft, p))
        self.values.setdefault(key, []).append(float(value[0]))

    def run(self, progress: Callable[[], object]) -> None:
        for index, context in enumerate(self.limits.contexts(self.limits.settings.contexts)):
            self._measure(Request(str(index), context, self.params, self.limits.settings.seed, index))
            progress()
        self._report()

    def _measure(self, request: Request) -> None:
        s = self.limits.settings
        most, deepest = max(s.num_paths), max(s.depths)
        for kind, names in self.path_rules.items():
            nested = kind in ("paths", "without_replacement", "coupled")  # fewer paths are the first of more
            sizes = [(most, deepest)] if nested else [(K, deepest) for K in s.num_paths]
            if kind == "top_k":
                sizes = [(K, L) for K in s.num_paths for L in s.depths]
            for width, depth in sizes:
                draft = self._draw(self.drafters[kind], request, width, depth)
                p = self._rows(self.limits.target, request, draft.tree)
                if kind == "paths":
                    q = draft.probs
                    assert q is not None
                    self.overlaps.append(float(torch.minimum(p[0, 0].double(), q[0, draft.rows[0, 1]].double()).sum()))
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
        draft = self._draw(self.drafters["chain"], request, 1, lengths[-1])
        p = self._rows(self.limits.target, request, draft.tree)
        for length in lengths:
            self._keep(("block", "chain of K L", 1, length), *restrict(draft, p, 1, length))

    def _bound(self, request: Request, depth: int) -> None:
        """1 + sum over depths of E[T(v) / p(v)], v drawn from the target: the bound for K iid paths without its V^L terms."""
        draft = self._draw(self.own, request, TARGET_PATHS, depth)
        q = self._rows(self.limits.draft, request, draft.tree)[0].double()
        assert draft.probs is not None
        number, tokens = path_numbers(draft.tree)[0], draft.tree.tokens[0]
        sums: dict[tuple[int, int], float] = {}
        for path in range(TARGET_PATHS):
            nodes = ((number == path) & (draft.tree.parents[0] >= 0)).nonzero()[:, 0]
            x = tokens[nodes]
            drafted = q[draft.tree.parents[0, nodes], x].numpy().cumprod()
            wanted = draft.probs[0].double()[draft.rows[0, nodes], x].numpy()
            for K in (1, *self.limits.settings.num_paths):
                reach, mass, total = 1.0, 1.0, 1.0
                for L, one in enumerate(wanted, 1):
                    mass *= one
                    reach = min(reach * one, -np.expm1(K * np.log1p(-min(drafted[L - 1], 1 - 1e-16))))
                    total += reach / mass
                    if L in self.limits.settings.depths:
                        sums[K, L] = sums.get((K, L), 0.0) + total / TARGET_PATHS
        for (K, L), value in sums.items():
            self.values.setdefault(("bound", "paths", K, L), []).append(value)

    def _report(self) -> None:
        def against(values: np.ndarray, key: tuple[str, str, int, int]) -> list[float] | None:
            if key not in self.values or key[0] == "bound":
                return None
            e = efficiency.paired(values, np.array(self.values[key]))
            return [e.mean, e.standard_error]

        for (rule, kind, K, L), found in self.values.items():
            values = np.array(found)
            e = efficiency.estimate(values)
            comparable = rule != "bound" and kind != "chain of K L"
            self.found.paths.append(
                {
                    "rule": rule,
                    "drafts": kind,
                    "paths": K,
                    "depth": L,
                    "nodes": K * L,
                    "tokens_per_call": e.mean,
                    "standard_error": e.standard_error,
                    "over_traversal": against(values, ("traversal", "paths", K, L)) if comparable else None,
                    "over_block": against(values, ("block", "chain", 1, L)) if comparable else None,
                }
            )
        self._by_overlap()

    def _by_overlap(self) -> None:
        """GBV, GTV and traversal over block verification, in thirds of the contexts by how well the draft fits at the root."""
        overlap, s = np.array(self.overlaps), self.limits.settings
        self.found.mean_overlap = float(overlap.mean())
        L = s.depths[len(s.depths) // 2]
        for third, at in enumerate(np.array_split(np.argsort(overlap, kind="stable"), 3)):
            block = np.array(self.values["block", "chain", 1, L])[at]
            for K in s.num_paths:
                for rule in ("traversal", "multipath", "greedy_traversal"):
                    if rule not in self.wanted:
                        continue
                    e = efficiency.paired(np.array(self.values[rule, "paths", K, L])[at], block)
                    self.found.by_overlap.append(
                        {
                            "third": third,
                            "overlap": float(overlap[at].mean()),
                            "rule": rule,
                            "paths": K,
                            "depth": L,
                            "over_block": e.mean,
                            "standard_error": e.standard_error,
                        }
                    )
