"""Ouroboros: phrases that the target has written or corrected speed a small model up and lengthen its draft.

Zhao, Huang, Han, Xiao, Liu & Sun 2024, "Ouroboros" (arXiv 2402.13720, EMNLP 2024).

    pool  token -> the latest phrases of L tokens after it      gamma  tokens of the small model's draft      K  phrases at its end

1. Draft by phrases: the small model scores its last token with the pool's phrases behind it in one forward pass, follows its own argmaxes
   through them, and so may draft several tokens a forward pass.
2. Lengthen: the K latest phrases of the last drafted token hang on it; each sees the text and the draft, not the others.
3. Learn from the verification: for each discarded node, the target's argmaxes from there on, as far as they agree with the nodes
   below it, and one further; the phrases tested, rewritten with the target's argmaxes; and the text itself.

Only tokens that are committed or that the target put there enter the pool. Phrases of fewer than L tokens are not stored.
Lossless: all is decided before the forward pass that verifies it; the tree is POINT_MASS.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from polydraft.core import Budget, Draft, Needs, Offers, Outcome, Request, Scores, Target
from polydraft.core.cursor import Cursor
from polydraft.drafters.base import Parts, read_source
from polydraft.drafters.grown_tree import GrownTree, point_mass
from polydraft.drafters.text.base import TextDrafter, TextState, text_method
from polydraft.errors import InvalidInputError
from polydraft.models.slot_pool import Slots, given_back_on_error
from polydraft.numerics.compiled_code import njit
from polydraft.papers.lookahead.phrase_pool import PhrasePool, add_phrase, most_likely, read_text


@dataclass
class PhraseState(TextState):
    """One request: its text and the pool that it uses, and how far the small model has read.

    drafted: tokens of the last draft behind the committed ones in the slot.  block: what is to be learnt of the last step.
    """

    pool: PhrasePool
    cursor: Cursor
    drafted: tuple[int, ...] = ()
    block: tuple[Any, ...] | None = None


class PhraseDrafter(TextDrafter[PhraseState]):
    """Ouroboros.

    model: a smaller one with as many slots as requests run at once.  length: L.  per_token: phrases stored of a token.
    gamma: tokens of the small model's draft; without it, the depth of the budget less a phrase.
    num_phrases: K, and the phrases that the small model tests in a forward pass.
    pool: shared by all requests, if they may learn from each other.  eos_token_ids: nothing is drafted behind one.

    Raises:
        InvalidInputError: counts below 1, or a pool of phrases of another length.

    Example:
        >>> from polydraft.core import SamplingParams
        >>> from polydraft.models import load, pair
        >>> drafter = PhraseDrafter(load.load_model(str(pair.draft_folder()), max_num_seqs=1), length=2)
        >>> states = drafter.start([Request("r", (5, 5, 5, 5, 5), SamplingParams(), seed=0)])
        >>> drafter.propose(states, [Budget.grown(4, 4)]).tree.num_nodes
        5
    """

    info = text_method("phrases", "Phrases that the target corrected", "2402.13720")
    needs = Needs(logits=True)

    def __init__(
        self,
        model: Target,
        *,
        length: int = 3,
        per_token: int = 20,
        num_phrases: int = 3,
        gamma: int | None = None,
        pool: PhrasePool | None = None,
        eos_token_ids: Sequence[int] = (),
        slots: Slots | None = None,
    ) -> None:
        if min(length, per_token, num_phrases, 1 if gamma is None else gamma) < 1:
            raise InvalidInputError(
                f"length={length}, per_token={per_token}, num_phrases={num_phrases} and gamma={gamma} were given; expected at least 1 each."
            )
        if pool is not None and pool.length != length:
            raise InvalidInputError(
                f"a pool of phrases of {pool.length} was given; expected length={length}."
            )
        super().__init__(eos_token_ids)
        self.model = model
        self.length = length
        self.per_token = per_token
        self.num_phrases = num_phrases
        self.pool = pool
        self.gamma = gamma
        self.slots = Slots(model) if slots is None else slots

    @property
    def offers(self) -> Offers:
        """See `core.Drafter`."""
        return Offers(slots=self.slots)

    @classmethod
    def build(cls, parts: Parts, **options: Any) -> "PhraseDrafter":
        """For the engine: with its draft model. Options as the constructor.

        Raises:
            InvalidInputError: there is none.
        """
        if parts.draft_model is None:
            raise InvalidInputError(
                "drafter 'phrases' was asked for without a draft model; give draft_model=..., or use drafter='lookahead', which stores phrases too."
            )
        return cls(parts.draft_model, eos_token_ids=parts.eos_token_ids, slots=parts.draft_slots, **options)

    def start(self, requests: Sequence[Request]) -> list[PhraseState]:
        """Read the prompts.

        Raises:
            CapacityError: more requests at a time than the small model has slots.
        """
        with given_back_on_error():
            return [self.begin(request, request.prompt_token_ids) for request in requests]

    def begin(self, request: Request, tokens: Sequence[int] | np.ndarray) -> PhraseState:
        """Take a slot; the text's phrases enter the pool."""
        text = list(map(int, tokens))
        pool = PhrasePool(self.length, self.per_token) if self.pool is None else self.pool
        pool.read(text)
        slot = self.slots.take()
        read_source(self.model, slot, request)
        return PhraseState(text, pool, Cursor(self.model, slot))

    def release(self, states: Sequence[PhraseState]) -> None:
        """Give the slots back."""
        for state in states:
            self.slots.give_back(state.cursor.slot)

    def _draft(self, state: PhraseState, gamma: int) -> list[int]:
        """Step 1: gamma tokens or more that the small model would write greedily, several a forward pass where a phrase is right."""
        model = self.model
        slots = [state.cursor.slot]
        state.cursor.cut(len(state.tokens) - 1)  # of a draft that was not verified
        if num_unread := state.cursor.num_unread(state.tokens):
            state.cursor.read(state.tokens, num_unread)
        drafted: list[int] = []
        while len(drafted) < gamma and not (drafted and drafted[-1] in self._eos):
            tested = self._tested(state, drafted[-1] if drafted else state.tokens[-1], gamma - len(drafted))
            draft = point_mass([tested])
            best = model.score(slots, draft.tree).logits[0].argmax(-1).tolist()
            path = list[int]()
            node = 0
            while (child := tested.child(node, best[node])) > 0:
                path.append(child)
                node = child
            model.commit(slots, Outcome.of_paths([path]))
            drafted += [*(tested.tokens[n] for n in path), best[node]]
        return drafted

    def _tested(self, state: PhraseState, last: int, most: int) -> GrownTree:
        """The small model's next tree: its last token with the pool's phrases behind it."""
        tree = GrownTree.rooted(
            last, Budget.grown(self.num_phrases * self.length, most, self.num_phrases), self._eos
        )
        state.pool.hang(tree, 0, self.num_phrases)
        return tree

    def continuations(self, state: PhraseState, budget: Budget) -> GrownTree:
        """The small model's chain with the pool's phrases at its end."""
        self._learn_block(state)
        grown = GrownTree.rooted(state.tokens[-1], budget, self._eos)
        most = budget.chain_length
        if most:
            room = min(self.length, budget.max_depth // 2)
            chain = self._draft(
                state, max(1, min(most, budget.max_depth - room if self.gamma is None else self.gamma))
            )
            state.drafted = tuple(chain)
            self._lengthen(state, grown, grown.add_path(chain))
        return grown

    def _lengthen(self, state: PhraseState, grown: GrownTree, end: int) -> None:
        """Step 2."""
        state.pool.hang(grown, end, self.num_phrases)

    def propose(self, states: Sequence[PhraseState], budgets: Sequence[Budget]) -> Draft:
        """A chain with phrases for each row; all rows' last blocks are learnt before."""
        for state in states:
            self._learn_block(state)
        return super().propose(states, budgets)

    def observe(self, states: Sequence[PhraseState], outcome: Outcome, scores: Scores) -> list[PhraseState]:
        """Learn from the target's argmaxes and from the text; what is right of the small model's cache stays."""
        tree = scores.tree
        num_nodes = scores.tree.num_nodes
        learn = num_nodes > 1 and scores.logits.shape[-1] > 0  # of steps that were missed there are no logits
        best = most_likely(scores.logits) if learn else np.zeros((len(states), num_nodes), np.int64)
        tokens, parents = tree.host
        paths = outcome.host.path
        for b, (state, new) in enumerate(zip(states, outcome.emitted(tree), strict=True)):
            num_accepted = 0
            while (
                num_accepted < min(len(new), len(state.drafted)) - 1
                and new[num_accepted] == state.drafted[num_accepted]
            ):
                num_accepted += 1
            state.cursor.cut(len(state.tokens) + num_accepted)
            state.drafted = ()
            state.extend(new)
            text = np.array(state.tokens[-len(new) - self.length :])
            self._learn_block(state)
            state.block = tokens[b].copy(), parents[b].copy(), best[b], paths[b].copy(), learn, text
        return list(states)

    def _learn_block(self, state: PhraseState) -> None:
        """Step 3 for the last block, when another one follows: it may be the one that goes on behind a stop."""
        if state.block is not None:
            with state.pool.lock:
                _learn(state.pool.arrays, self.length, *state.block)
            state.block = None


@njit(cache=True)
def _learn(pool, length, tokens, parents, best, path, corrected, text):
    """Step 3 for one row. best: the target's argmax behind each node.  path: the accepted nodes.  text: its new end."""
    is_new = np.zeros(len(tokens), np.bool_)
    for n in path:
        if n > 0:
            is_new[n] = True
    phrase = np.empty(length, np.int64)
    for n in range(1, len(tokens) if corrected else 0):
        if parents[n] < 0 or is_new[n]:
            continue
        at = n
        num = 0
        while at >= 0 and num < length:
            phrase[num] = best[at]
            num += 1
            below = -1
            for c in range(at + 1, len(tokens)):
                if parents[c] == at and tokens[c] == best[at]:
                    below = c
            at = below
        add_phrase(pool, length, tokens[n], phrase[:num])
        up = n
        num = 0  # the last `length` nodes above and at n, each replaced by the argmax before it
        while parents[up] >= 0 and num < length:
            up = parents[up]
            num += 1
            phrase[length - num] = best[up]
        add_phrase(pool, length, tokens[up], phrase[length - num :])
    read_text(pool, length, text)
