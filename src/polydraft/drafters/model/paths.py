"""Drafts from a smaller causal model with the target's vocabulary.

    paths            iid draws, K paths for one; at temperature 0 as top_k where the budget grows   IID
    without_replacement   distinct children of every node                                   WITHOUT_REPLACEMENT
    greedy_plus_one  all children of a node but its last the top of q, that one drawn from the rest   GREEDY_PLUS_ONE
    top_k            the most probable nodes, grown best first (`best_first`)               POINT_MASS
    coupled          the children of a node its smallest clock/q                            COUPLED
    listed           K paths, each the smallest clock/q of a race of its own                LISTED
    systematic       the paths through a context go on at equal steps of one uniform        SYSTEMATIC

Every token is drawn with the noise of its node from the very row that is reported, processed with the request's own
sampling parameters. Penalties that depend on the path are left out of q where the whole proposal is one compiled call:
the draft fits a little less and the output distribution does not change.
But for `top_k` the tree is fixed by its budget before the first draw of a step, or ends earlier by its nodes' own paths (`budget.Stop`); no drawn token is ever dropped.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from polydraft.core import geometry as tree
from polydraft.core.budget import Budget, TreeShape
from polydraft.core.cursor import Cursor
from polydraft.core.drafts import Draft, DraftSampling
from polydraft.core.methods import Drawing, Method, Offers
from polydraft.core.outcomes import Outcome
from polydraft.core.requests import Request
from polydraft.core.targets import EncoderDecoder, Needs, Proposing, Scores, Target
from polydraft.core.trees import NoiseKey, TokenTree
from polydraft.drafters.base import Parts, is_bound, named_kind, read_source
from polydraft.drafters.model.best_first import grow
from polydraft.drafters.model.by_depth import CachedNodes, Growth, ModelState
from polydraft.drafters.model.kinds import KINDS, METHODS
from polydraft.errors import CapacityError, IncompatibleError, InvalidInputError
from polydraft.models.growing.proposals import Keys, Proposal
from polydraft.models.slot_pool import Slots, given_back_on_error

ProposePaths = Callable[..., Proposal | None]


class ModelDrafter:
    """A smaller causal model as a drafter.

    model: compiled or through transformers, with as many slots as requests run at once.  kind: see the module.
    stop_ids: end-of-sequence ids, which `min_tokens` masks.  slots: the model's, where others run requests in it, too.

    Raises:
        UnknownNameError: a kind that does not exist.

    Example:
        >>> ModelDrafter.methods[0].name
        'model'
    """

    methods = METHODS
    needs: Needs = Needs()
    scores_leaves = False
    """Whether a draft comes with the model's logits after all of its nodes."""

    def __init__(
        self, model: Target, kind: str = "paths", *, stop_ids: Sequence[int] = (), slots: Slots | None = None
    ) -> None:
        self.model = model
        self.kind = kind
        self.info = ModelDrafter.of_kind(kind)
        self._stop_ids = tuple(stop_ids)
        self.slots = Slots(model) if slots is None else slots
        """Equal for those that share them."""
        self._proposed: dict[int, CachedNodes] = {}
        """By slot: what the cache holds behind committed tokens."""
        offered = kind in ("paths", "chain", "without_replacement", "coupled", "systematic")
        self._propose_paths: ProposePaths | None = None
        if offered and isinstance(model, Proposing):
            self._propose_paths = partial(model.propose_paths, leaves=self.scores_leaves)

    @classmethod
    def of_kind(cls, kind: str = "paths") -> Method:
        """What it declares.

        Raises:
            UnknownNameError: a kind that does not exist.
        """
        return named_kind(KINDS, kind, "model")

    @property
    def draws(self) -> Drawing:
        """See `core.Offers`."""
        confident = not self.scores_leaves
        return Drawing(self.room, confident=confident, branches=confident and self.kind == "paths")

    @property
    def offers(self) -> Offers:
        """See `core.Drafter`."""
        return Offers(slots=self.slots, sibling=self.sibling, draws=self.draws, cursor=self.cursor)

    @classmethod
    def build(cls, parts: Parts, *, kind: str = "paths") -> "ModelDrafter":
        """For the engine: draft with its draft model."""
        if parts.draft_model is None:
            raise InvalidInputError(
                "drafter 'model' was asked for without a draft model; give draft_model=..., or use drafter='ngram'."
            )
        drafter_class = AmateurDrafter if parts.draft_model is parts.second_model else cls
        return drafter_class(parts.draft_model, kind, stop_ids=parts.eos_token_ids, slots=parts.draft_slots)

    def sibling(self, kind: str) -> "ModelDrafter":
        """Another kind of drafts from the same model and slots: what either starts, is told or releases is so for both."""
        drafter = type(self)(self.model, kind, stop_ids=self._stop_ids, slots=self.slots)
        drafter._proposed = self._proposed
        return drafter

    def start(self, requests: Sequence[Request]) -> list[ModelState]:
        """Take slots, those that have cached most of the prompts; what is not cached is read by the cursors, or with the first draft."""
        states: list[ModelState] = []
        with given_back_on_error():
            for request in requests:
                ids = request.prompt_token_ids
                shared_ids = self._shared(ids[:-1]) if self._fits(ids) else ()
                slot = self.slots.take(shared_ids)
                self.slots.holds(slot, shared_ids)
                read_source(self.model, slot, request)
                states.append(ModelState(request, Cursor(self.model, slot, len(ids) - 1), ids))
        return states

    def _fits(self, token_ids: Sequence[int]) -> bool:
        """Whether the model's context holds a text and a token behind it."""
        return len(token_ids) < self.model.max_model_len

    def cursor(self, state: Any) -> Cursor | None:
        """See `core.Offers`; nothing is read of a text that does not fit."""
        return state.cursor if self._fits(state.context) else None

    def release(self, states: Sequence[ModelState]) -> None:
        """Give the slots back; what each has read stays cached for texts that begin alike."""
        for state in states:
            self._proposed.pop(state.slot, None)
            self.slots.give_back(state.slot, self._shared(state.context[: state.cursor.length]))

    def _shared(self, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        """What texts that begin alike can share: nothing where the KV cache depends on a source, too."""
        return () if isinstance(self.model, EncoderDecoder) else token_ids

    def room(self, num_tokens: int) -> int:
        """What the model's context leaves; see `core.Drawing`."""
        return max(self.model.max_model_len - num_tokens - 1, 0)

    def _grown(self, states: Sequence[ModelState], budgets: Sequence[Budget]) -> list[bool]:
        """Which rows are most probable trees; a greedy row without a draft goes with the trees there are."""
        branches = self.draws.branches
        greedy = [branches and s.request.params.greedy for s in states]
        grows = [cold and not g.parents and g.max_depth > 0 for cold, g in zip(greedy, budgets, strict=True)]
        bare = [cold and any(grows) and g.max_depth == 0 for cold, g in zip(greedy, budgets, strict=True)]
        return [self.info.ranked or grow or empty for grow, empty in zip(grows, bare, strict=True)]

    def propose(self, states: Sequence[ModelState], budgets: Sequence[Budget]) -> Draft:
        """One batched proposal of these very budgets, see `policy.sizes`; calling it again draws the same draft.

        Where the form of an output is given, a depth at a time, with distributions of what may come next, none where the model drafts none of it;
        others are drawn as they are without it. See `core.Drawing` for what is grown.
        """
        self._check_room(states, budgets)
        grown = self._grown(states, budgets)
        groups: dict[tuple[bool, bool], list[int]] = {}
        for b, s in enumerate(states):
            groups.setdefault((grown[b], is_bound(s.request.params, self.model.draft_ids)), []).append(b)
        drafts = [
            self._drafted([states[b] for b in rows], [budgets[b] for b in rows], *form)
            for form, rows in groups.items()
        ]
        return drafts[0] if len(drafts) == 1 else Draft.scatter(list(groups.values()), drafts)

    def _drafted(
        self, states: Sequence[ModelState], budgets: list[Budget], grows: bool, bound: bool
    ) -> Draft:
        """A proposal of rows that are drafted alike. bound: see `base.is_bound`."""
        self._begin(states)
        if grows:
            draft, scored = grow(self.model, states, budgets, self._stop_ids, compiled=not bound)
            self._proposed |= {s.slot: nodes for s, nodes in zip(states, scored, strict=True) if nodes.tokens}
            return draft
        keys = (
            [s.request.seed for s in states],
            [s.request.sample for s in states],
            [len(s.context) for s in states],
        )
        if max(g.max_depth for g in budgets) == 0:
            return self._empty(states, budgets)
        draft, cached = self._drawn(states, budgets, keys, None if bound else self._propose_paths)
        for b, s in enumerate(states):
            if budgets[b].max_depth:
                self._proposed[s.slot] = CachedNodes(cached.lists.tokens[b], cached.lists.parents[b])
        return draft

    def _check_room(self, states: Sequence[ModelState], budgets: Sequence[Budget]) -> None:
        """Raise CapacityError for a draft that the model's context does not hold."""
        for s, budget in zip(states, budgets, strict=True):
            if budget.max_depth > (room := self.room(len(s.context))):
                raise CapacityError(
                    f"a draft of depth {budget.max_depth} was asked of drafter {self.info.name!r} behind {len(s.context)} tokens; expected at most {room}. "
                    "Cut the budget: `budget.within(depth)`."
                )

    def _drawn(
        self,
        states: Sequence[ModelState],
        fixed: list[Budget],
        keys: Keys,
        propose_paths: ProposePaths | None,
    ) -> tuple[Draft, TokenTree]:
        """By the model's own proposal where it offers one for this, else depth by depth through `score`; and the tree as the model's cache holds it."""
        draft_sampling = self._sampling(fixed)
        proposal = None
        if propose_paths is not None:
            slots = [s.slot for s in states]
            pending = [s.pending for s in states]
            params = [s.request.params for s in states]
            proposal = propose_paths(slots, pending, keys, fixed, params, draft_sampling=draft_sampling)
        out_of_order = (
            self.scores_leaves and proposal is not None and _has_gaps(proposal.tree)
        )  # others commit this cache by node
        if proposal is None or out_of_order:
            self._begin(states)
            draft = self._grow(states, fixed, NoiseKey.of(*keys))
            return draft, draft.tree
        noise = NoiseKey.of(*keys) if draft_sampling is DraftSampling.COUPLED else None
        drawn = proposal.tree
        rows = proposal.rows
        confidence = proposal.confidence
        shape = shape_of(fixed)
        if shape is not TreeShape.CHAIN and _has_gaps(proposal.tree):
            drawn, rows, confidence = _packed(proposal)
        return Draft(
            drawn, draft_sampling, shape, proposal.probs, rows, noise, proposal.logits, confidence
        ), proposal.tree

    def _begin(self, states: Sequence[ModelState]) -> None:
        """Forget a proposal that was not observed; where the next one begins is the cursor's matter."""
        for s in states:
            self._proposed.pop(s.slot, None)

    def _sampling(self, budgets: Sequence[Budget]) -> DraftSampling:
        """How siblings are drawn; of chains any says the same."""
        (draft_sampling,) = self.info.draft_sampling
        return (
            DraftSampling.WITHOUT_REPLACEMENT
            if self.draws.branches and any(g.has_spares for g in budgets)
            else draft_sampling
        )

    def _empty(self, states: Sequence[ModelState], budgets: Sequence[Budget] = ()) -> Draft:
        bare = Draft.bare(np.array([s.context[-1] for s in states], np.int64))
        probs = np.full((len(states), 1, self.model.vocab_size), 1 / self.model.vocab_size, np.float32)
        return replace(bare, sampling=self._sampling(budgets), probs=probs)

    def _grow(self, states: Sequence[ModelState], fixed: list[Budget], key: NoiseKey) -> Draft:
        """Depth by depth through `score`, once the slots have all committed tokens but the root: one forward pass a depth for the whole batch."""
        behind = [s for s, g in zip(states, fixed, strict=True) if g.max_depth and len(s.pending) > 1]
        if behind:
            self.model.prefill([s.slot for s in behind], [s.pending[:-1] for s in behind])
        growth = Growth(self.model, self.kind, states, fixed, key, self._stop_ids, leaves=self.scores_leaves)
        growth.grow()
        return growth.draft(self._sampling(fixed), shape_of(fixed))

    def observe(self, states: Sequence[ModelState], outcome: Outcome, scores: Scores) -> list[ModelState]:
        """KV cache entries of the proposal stay where they agree with what was emitted; see `core.Drafter.observe`.

        The scored tree may be another than the one proposed, as in a mixture.
        """
        new: list[ModelState] = []
        for s, emitted in zip(states, outcome.emitted(scores.tree), strict=True):
            proposed = self._proposed.pop(s.slot, None)
            if proposed is not None:
                self.model.commit([s.slot], Outcome.of_paths([proposed.path(emitted)]))
            new.append(replace(s, context=s.context + tuple(emitted)))
        return new


class Filled(Cursor):
    """One whose slot somebody else fills."""

    def unread(self, text: tuple[int, ...]) -> tuple[int, ...]:
        """The root alone."""
        return text[-1:]


class Guest(ModelDrafter):
    """A drafter in slots that somebody else fills, commits and empties: nothing is read twice. `place` names them, a field of `core.Request`."""

    place = "slot"

    @property
    def offers(self) -> Offers:
        """See `core.Drafter`; nothing is to be read."""
        return replace(super().offers, cursor=None)

    def start(self, requests: Sequence[Request]) -> list[ModelState]:
        """Nothing is read: whose slots they are did.

        Raises:
            IncompatibleError: requests of which nobody says where they are.
        """
        slots = slots_of(self.info.name, requests, self.place)
        return [
            ModelState(r, Filled(self.model, slot), r.prompt_token_ids)
            for r, slot in zip(requests, slots, strict=True)
        ]

    def release(self, states: Sequence[ModelState]) -> None:
        """The slots are somebody else's."""

    def observe(self, states: Sequence[ModelState], outcome: Outcome, scores: Scores) -> list[ModelState]:
        """Nothing stays to be done: the columns are those of the text by now."""
        emitted = zip(states, outcome.emitted(scores.tree), strict=True)
        return [replace(s, context=s.context + tuple(new)) for s, new in emitted]


class AmateurDrafter(Guest):
    """A decoding method's second model drafts in the slots of its second sequences; the logits after every node come with the draft, but for ranked trees.

    Yuan et al. 2023, speculative contrastive decoding (arXiv 2311.08981).
    """

    place = "second_slot"
    scores_leaves = True


def slots_of(name: str, requests: Sequence[Request], place: str = "slot") -> list[int]:
    """Where the models hold these texts. name: the drafter's.

    Raises:
        IncompatibleError: nobody says so.
    """
    slots = [slot for request in requests if (slot := getattr(request, place)) is not None]
    if len(slots) < len(requests):
        raise IncompatibleError(
            f"the drafter {name!r} shares a cache that is not its own and was not told its slot; expected requests with `{place}`. "
            "Use it through `Engine`."
        )
    return slots


def _has_gaps(tree: TokenTree) -> bool:
    """Whether a node is left out before others."""
    drawn = tree.host.parents[:, 1:] >= 0
    return bool((drawn[:, 1:] > drawn[:, :-1]).any())


def _packed(proposal: Proposal) -> tuple[TokenTree, np.ndarray, np.ndarray | None]:
    """Tree, rows and confidence of a proposal without the nodes that were left out; padding last."""
    drawn = proposal.tree.host.parents >= 0
    drawn[:, 0] = True
    packed, places = tree.packed(proposal.tree, drawn)
    confidence = proposal.confidence
    return (
        packed,
        np.take_along_axis(proposal.rows, places, 1),
        None if confidence is None else np.take_along_axis(confidence, places, 1),
    )


def shape_of(fixed: Sequence[Budget]) -> TreeShape:
    """Of a batch's budgets."""
    return fixed[0].shape if len(fixed) == 1 else TreeShape.of_batch(g.shape for g in fixed)
