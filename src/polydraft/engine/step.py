"""One step for a batch of running sequences: draft, score, verify, commit.

propose   a token tree for each sequence, within the policy's budget
score     every distinct prefix once, in one forward pass of the target
decoding  logits, each node with the context of its own path; a walk makes p of those that it visits
verify    the verdict of the verifier, then two draws: stop node and extra token
commit    the accepted path stays in the KV caches; the drafter learns what was accepted

All is on the host, where verifiers run: a target that computes on a device gives its rows over the vocabulary once a step.
"""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from math import inf
from time import perf_counter

import numpy as np
from jaxtyping import Bool, Float

from polydraft.core.batch import concat, scatter, select
from polydraft.core.budget import NOTHING, Budget
from polydraft.core.decodings import Decoding
from polydraft.core.drafts import Draft
from polydraft.core.geometry import Dedup, dedup, joined
from polydraft.core.methods import Drafter
from polydraft.core.outcomes import Outcome
from polydraft.core.params import SamplingParams
from polydraft.core.targets import Mixing, Scores, Target
from polydraft.core.trees import NoiseKey, TokenTree
from polydraft.engine import drafting, reading
from polydraft.engine.drafter_state import release
from polydraft.engine.exact_outputs import weigh
from polydraft.engine.output import StepResult
from polydraft.engine.reader import Pace, catch_up
from polydraft.engine.second import Second
from polydraft.engine.sequence import Sequence, slots_of
from polydraft.engine.speculation import Speculation
from polydraft.engine.stats import Stopwatch
from polydraft.engine.ties import rescored
from polydraft.models.slots import TREE_ROOM
from polydraft.policy.sizes import decided
from polydraft.sampling import processing as sampling
from polydraft.verifiers.deciding import Decider


@dataclass(frozen=True)
class Stepper:
    """The parts of a step. `stop_ids`: ids that `min_tokens` masks. `tie_margin`: see `ties`.
    `decoding`: what is sampled, where it is not each request's sampling parameters alone; `second`: the second sequences that it reads.
    `pace`: of reading long texts for drafts; None leaves no sequence out of a step."""

    target: Target
    speculation: Speculation
    stop_ids: frozenset[int]
    tie_margin: float | None = None
    decoding: Decoding | None = None
    second: Second | None = None
    clock: Callable[[], float] = perf_counter
    pace: Pace | None = None

    def __call__(
        self, sequences: Seq[Sequence], riding: Mapping[Sequence, int] | None = None, spare: float = inf
    ) -> StepResult:
        """One step; target cache and drafter states move on, the sequences' tokens are the caller's to extend.

        riding: so many tokens of new sequences are read in its forward pass, see `reader`.  spare: seconds that a drafter may read texts for.
        Sequences whose drafter has to read more before their first draft have no part in it.
        """
        riding = riding or {}
        watch = Stopwatch(self.clock)
        resting = self.speculation.drafter is not None and self.speculation.policy.rests(sequences)
        with watch.phase("scoring"):
            weigh(self.target, sequences)
        with watch.phase("drafting"):
            budgets = [] if resting else self._budgets(sequences)
        if budgets:
            with watch.phase("prefill"):
                sequences, budgets = self._ready(sequences, budgets, spare)
        if not sequences:
            with watch.phase("scoring"):
                self._read(riding)
            return replace(self._without_rows(), seconds=watch.stop())
        return self._taken(sequences, budgets, riding, watch, resting=resting)

    def _taken(
        self,
        sequences: Seq[Sequence],
        budgets: Seq[Budget],
        riding: Mapping[Sequence, int],
        watch: Stopwatch,
        *,
        resting: bool,
    ) -> StepResult:
        """The step of those that have a part in it."""
        key = _noise_of(sequences)
        with watch.phase("drafting"):
            draft, extra = self._drafted(sequences, budgets, key)
        with watch.phase("scoring"):
            unique = dedup(draft.tree)
            scored = self._score(sequences, draft, unique, extra, riding)
        num_scored = len(sequences) + int((unique.tree.host.parents >= 0).sum())
        with watch.phase("verifying"):
            done, unique = self._decide(sequences, draft, unique, scored, key)
        if done.sequences:
            self._move_on(done, unique, watch, drafted=bool(budgets), resting=resting)
        return replace(done, num_scored=num_scored, seconds=watch.stop())

    def _ready(
        self, sequences: Seq[Sequence], budgets: Seq[Budget], spare: float
    ) -> tuple[list[Sequence], list[Budget]]:
        """The sequences that have a part in this step, with their budgets: all whose drafter need not read more before it."""
        drafter = self.speculation.drafter
        assert drafter is not None  # else there are no budgets
        budgets, late = self._caught_up(drafter, sequences, budgets, spare)
        rows = [(s, budget) for s, budget in zip(sequences, budgets, strict=True) if s not in late]
        return [s for s, _ in rows], [budget for _, budget in rows]

    def _drafted(
        self, sequences: Seq[Sequence], budgets: Seq[Budget], key: NoiseKey
    ) -> tuple[Draft, TokenTree | None]:
        """The draft, and nodes that are scored beside it without being part of it."""
        draft = self._propose(sequences, budgets)
        if self.speculation.verifier.info.shared_noise:
            draft = replace(draft, noise=key)
        if not budgets:
            return draft, None
        room = TREE_ROOM - draft.tree.num_nodes
        return draft, drafting.extra_nodes(self.speculation, sequences, room)

    def _move_on(
        self, done: StepResult, unique: Dedup, watch: Stopwatch, *, drafted: bool, resting: bool
    ) -> None:
        """Caches and drafter states go on behind what was accepted, and the policy learns from it."""
        drafter = self.speculation.drafter
        with watch.phase("scoring"):
            self.target.commit(slots_of(done.sequences), unique.outcome(done.outcome))
            if self.second is not None:
                self.second.commit(done.sequences, done.draft, unique, done.outcome)
        with watch.phase("drafting"):
            if drafter is not None and (drafted or self._follows(drafter, done.sequences)):
                drafting.observe(drafter, done.sequences, done.outcome, done.scores)
        if not resting:
            self.speculation.policy.learn(done.sequences, done.draft, lambda: done.probs, done.outcome)
        self._record(done)

    def _caught_up(
        self, drafter: Drafter, sequences: Seq[Sequence], budgets: Seq[Budget], spare: float
    ) -> tuple[list[Budget], list[Sequence]]:
        """Budgets, none for a text of which the drafter has read a piece and no more, and the sequences that wait for that."""
        to_draft = [
            s for s, budget in zip(sequences, budgets, strict=True) if budget.max_depth and not budget.copied
        ]
        behind = catch_up(drafter, to_draft, self.pace, spare)
        caught_up = [NOTHING if s in behind else budget for s, budget in zip(sequences, budgets, strict=True)]
        return caught_up, [s for s in behind if s.follows_drafts]

    def _without_rows(self) -> StepResult:
        """A step of no sequence."""
        draft = Draft.bare(np.empty(0, np.int64))
        logits = np.empty((0, 1, self.target.vocab_size), np.float32)
        return StepResult([], draft, Scores(draft.tree, logits), logits, Outcome.of_paths([]))

    @property
    def _softened(self) -> bool:
        return self.decoding is not None and not self.decoding.gives_logits

    def _layers(self, sequences: Seq[Sequence]) -> tuple[int, ...]:
        """Whose states the decoding method needs, and the drafter where it drafts for any of these."""
        drafter = self.speculation.drafter
        parts = self.decoding, drafter if drafter is not None and self._follows(drafter, sequences) else None
        return tuple(sorted({layer for part in parts if part is not None for layer in part.needs.hidden}))

    def _follows(self, drafter: Drafter, sequences: Seq[Sequence]) -> bool:
        """Whether a drafter is told of each step of one of these, or of its states."""
        return drafter.needs.each_step and any(s.has_drafter for s in sequences)

    def _read(self, riding: Mapping[Sequence, int]) -> None:
        """Read so many tokens of new sequences."""
        for s, count in riding.items():
            reading.read_on(s, count)

    def _score(
        self,
        sequences: Seq[Sequence],
        draft: Draft,
        unique: Dedup,
        extra: TokenTree | None,
        riding: Mapping[Sequence, int],
    ) -> Scores:
        """One forward pass, with pieces of new sequences in it where the target can; equal logits are told apart where a margin is set."""
        layers = self._layers(sequences)
        tree = unique.tree if extra is None else joined(unique.tree, extra)
        if riding and isinstance(self.target, Mixing):
            scored = reading.score_mixed(self.target, sequences, tree, layers, riding)
        else:
            self._read(riding)  # in forward passes of their own
            scored = (
                self.target.score(slots_of(sequences), tree, hidden=layers)
                if self.second is None
                else self.second.score(sequences, draft, unique, tree, hidden=layers)
            )
        if extra is not None:
            scored = _without_extra(scored, unique.tree)
        if self.tie_margin is None:
            return scored
        return rescored(self.target, scored, sequences, self.tie_margin, tuple(self.stop_ids))

    def _budgets(self, sequences: Seq[Sequence]) -> list[Budget]:
        """One each; none where nothing is to be drafted."""
        drafter = self.speculation.drafter
        if drafter is None:
            return []
        budgets = decided(
            self.speculation.policy,
            sequences,
            drafter.info,
            self.speculation.offers,
            self.target.max_model_len,
            chains=self._softened,
        )
        for s in sequences:
            if s.stopped and s.state is not None:
                release(drafter, [s])
        return budgets if any(g.max_depth for g in budgets) else []

    def _propose(self, sequences: Seq[Sequence], budgets: Seq[Budget]) -> Draft:
        roots = np.array([s.token_ids[-1] for s in sequences], np.int64)
        for s in sequences:
            s.copying = False
        drafter = self.speculation.drafter
        verifier = self.speculation.verifier
        if drafter is None or not budgets:
            return Draft.bare(roots)
        return drafting.propose(drafter, verifier, sequences, budgets, roots, self.target.vocab_size)

    def _decide(
        self, sequences: Seq[Sequence], draft: Draft, unique: Dedup, scored: Scores, key: NoiseKey
    ) -> tuple[StepResult, Dedup]:
        """What is accepted of each sequence, and the scored trees of those that have a row.

        Where the batch fails, each sequence is decided alone, from the same draft and the same scores: neighbours get the same tokens.
        One that fails alone is decided with flat rows in place of the faulty ones, by the same draws, and the accepted path ends where a token would be
        drawn from one of these: the text is that of plain decoding, which ends there. One whose root is faulty, or that fails again, has failed.
        Trap: to emit another token because a row failed, which depends on what was drafted and drawn, biases the output.
        """
        try:
            outcome, logits = self._verify(sequences, draft, unique, scored, key)
            scores = _of_draft(scored, unique, draft)
            return StepResult(sequences, draft, scores, logits, outcome, self._softened), unique
        except Exception:
            pass
        scores = _of_draft(scored, unique, draft)
        done = dict[int, StepResult]()
        failed = list[tuple[Sequence, Exception]]()
        for b, s in enumerate(sequences):
            try:
                done[b] = self._decide_alone(s, *select((draft, scores, key), [b]))
            except Exception as error:
                failed.append((s, error))
        whole = concat(list(done.values()) or [self._without_rows()])
        whole = replace(whole, sequences=[sequences[b] for b in done], failed=failed)
        return whole, select(unique, list(done))

    def _decide_alone(self, s: Sequence, draft: Draft, scores: Scores, key: NoiseKey) -> StepResult:
        row = [s], draft, Dedup(draft.tree), scores, key
        try:
            outcome, logits = self._verify(*row)
        except Exception:
            outcome, logits = self._verify(*row, beyond_faults=True)
        return StepResult([s], draft, scores, logits, outcome, self._softened)

    def _verify(
        self,
        sequences: Seq[Sequence],
        draft: Draft,
        unique: Dedup,
        scored: Scores,
        key: NoiseKey,
        *,
        beyond_faults: bool = False,
    ) -> tuple[Outcome, Float[np.ndarray, "B N V"]]:
        """What is accepted, and the logits that were decoded; rows that are decided alike together, see `verifiers.deciding`.

        beyond_faults: of one sequence, with flat rows in place of faulty ones, up to the first of them that it draws from.
        """
        params = [s.request.params for s in sequences]
        if self.decoding is not None:
            contexts = [s.token_ids for s in sequences]
            scored = replace(scored, logits=self.decoding(scored, scored.tree, contexts, scored.second))
        if self._softened:
            probs = unique.expand(scored.logits)
            with np.errstate(divide="ignore"):
                return self.speculation.verifier(draft, probs).sample(key), np.log(probs)
        decoded = self._in_context(sequences, scored)
        faulty = None
        if beyond_faults:
            faulty = ~np.isfinite(decoded.max(-1))
            decoded = _flat_where(faulty, decoded, draft.tree, params)
        logits = unique.expand(decoded)

        def distributions(rows: Seq[int]) -> np.ndarray:
            return unique.expand(sampling.distributions_of(decoded, scored.tree, params))[rows]

        groups = self._alike(sequences, draft)
        outcome = _decided(groups, (draft, logits, key), params, distributions)
        return outcome if faulty is None else _until(faulty, draft.tree, outcome), logits

    def _in_context(self, sequences: Seq[Sequence], scored: Scores) -> Float[np.ndarray, "B N V"]:
        """Logits with what the texts before each node change in them."""
        contexts = [s.token_ids for s in sequences]
        prompts = [s.num_prompt_tokens for s in sequences]
        params = [s.request.params for s in sequences]
        return sampling.in_context(
            scored.logits, scored.tree, contexts, prompts, params, tuple(self.stop_ids)
        )

    def _alike(self, sequences: Seq[Sequence], draft: Draft) -> dict[Decider, list[int]]:
        """The rows that each way to decide has."""
        groups = dict[Decider, list[int]]()
        bare = draft.tree.num_nodes == 1
        for b, s in enumerate(sequences):
            decider = self.speculation.deciders.of_row(s.request.params, copied=s.copying, bare=bare)
            groups.setdefault(decider, []).append(b)
        return groups

    def _record(self, done: StepResult) -> None:
        for s, parents, path in zip(done.sequences, done.parents, done.outcome.lists.paths, strict=True):
            deep = [0]
            for parent in parents[1:]:
                if parent >= 0:
                    deep.append(deep[parent] + 1)
            s.sample.stats.record(num_nodes=len(deep) - 1, depth=max(deep), num_accepted=len(path))


def _noise_of(sequences: Seq[Sequence]) -> NoiseKey:
    """Of the next step of each."""
    seeds = [s.request.seed for s in sequences]
    samples = [s.request.sample for s in sequences]
    positions = [len(s.token_ids) for s in sequences]
    return NoiseKey.of(seeds, samples, positions)


def _without_extra(scored: Scores, tree: TokenTree) -> Scores:
    """The scores of a tree, and those of the nodes behind it by themselves."""
    N = tree.num_nodes
    hidden = {layer: states[:, :N] for layer, states in scored.hidden.items()}
    return replace(
        scored, tree=tree, logits=scored.logits[:, :N], hidden=hidden, extra_logits=scored.logits[:, N:]
    )


def _of_draft(scored: Scores, unique: Dedup, draft: Draft) -> Scores:
    """The same scores in terms of the drafted tree's nodes."""
    if unique.same:
        return scored
    hidden = {k: unique.expand(h) for k, h in scored.hidden.items()}
    second = None if scored.second is None else _of_draft(scored.second, unique, draft)
    return Scores(draft.tree, unique.expand(scored.logits), hidden, scored.extra_logits, second)


def _flat_where(
    faulty: Bool[np.ndarray, "1 N"],
    logits: Float[np.ndarray, "1 N V"],
    tree: TokenTree,
    params: Seq[SamplingParams],
) -> Float[np.ndarray, "1 N V"]:
    """Logits of one sequence, all 0 at faulty nodes.

    Raises:
        InvalidInputError: a faulty root, by what is wrong with it.
    """
    sampling.distributions_of(logits[:, :1], TokenTree.roots(tree.tokens[:, 0]), params)
    return np.where(faulty[..., None], np.float32(0.0), logits)


def _decided(
    groups: Mapping[Decider, list[int]],
    parts: tuple[Draft, Float[np.ndarray, "B N V"], NoiseKey],
    params: Seq[SamplingParams],
    distributions: Callable[[Seq[int]], Float[np.ndarray, "B N V"]],
) -> Outcome:
    """What is accepted of each row. groups: rows that are decided alike.  parts: draft, logits, noise.  distributions: of some rows, where the logits do not do."""
    if len(groups) == 1:
        ((decide, rows),) = groups.items()
        return decide(*parts, params, lambda: distributions(rows))
    outcomes = [
        decide(*select(parts, rows), [params[b] for b in rows], lambda rows=rows: distributions(rows))
        for decide, rows in groups.items()
    ]
    return scatter(list(groups.values()), outcomes)


def _until(faulty: Bool[np.ndarray, "1 N"], tree: TokenTree, outcome: Outcome) -> Outcome:
    """What one sequence accepts before a token is drawn from a faulty row: the token of the first faulty node is its last one."""
    (path,), _ = outcome.lists
    first = next((i for i, node in enumerate(path) if faulty[0, node]), None)
    if first is None:
        return outcome
    return Outcome.of_paths([path[:first]], tree.tokens[:, path[first]].tolist())
