"""A path from each of several smaller models, or of a head and such models: draft j is drawn from a distribution q_j of its own.

Khisti et al. 2024 (importance selection with different drafts, arXiv 2410.18234); multi-draft verification of unequal drafts:
Miao et al. 2023 (SpecInfer, 2305.09781).

    path j is a chain that model j draws alone; the K paths hang on the root, all of one length
    INDEPENDENT: draws are independent, and node n's row is the distribution that its own model drew it from

Member j draws with noise of its own, a function of the request's seed and j: with the same noise two members would tend to
draw the same token, and the distribution of a pair would not be the product q_i q_j that every verifier for such drafts takes for granted.
Which members draft (the first `width`) and how deep is settled before the first draw.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Any

import numpy as np

from polydraft.core import (
    Budget,
    Draft,
    Drafter,
    DraftSampling,
    Offers,
    Outcome,
    Request,
    Scores,
    Target,
    TokenTree,
    TreeShape,
    Verifier,
)
from polydraft.core import geometry as tree
from polydraft.drafters.base import Parts
from polydraft.drafters.model.paths import ModelDrafter
from polydraft.errors import IncompatibleError, InvalidInputError
from polydraft.heads.folder import kind_of
from polydraft.methods import registry
from polydraft.methods.papers import method
from polydraft.models import load
from polydraft.models.loading.matching import check_same_context
from polydraft.models.slot_pool import Slots
from polydraft.papers.members import Cursors, release_each, start_each

State = tuple[Any, ...]
"""One request in every member."""


def _own(request: Request, member: int) -> Request:
    """The request with the member's noise; the first member has the request's own."""
    # seeds of 63 bits, at steps of their golden section: those of neighbouring requests do not meet
    return (
        replace(request, seed=(request.seed + member * 0x1E3779B97F4A7C15) & (1 << 63) - 1)
        if member
        else request
    )


class SeveralDrafter:
    """Several smaller models of the target's vocabulary as one drafter.

    models: the one that fits best first, each with as many slots as requests run at once.
    head: a drafter of chains that reads the target's states, which draws the first path.
    stop_ids: end-of-sequence ids, which `min_tokens` masks.  slots: the first model's, where others run requests in it, too.

    Raises:
        InvalidInputError: fewer than two of them together.

    Example:
        >>> SeveralDrafter.methods[0].draft_sampling == {DraftSampling.INDEPENDENT}
        True
    """

    methods = (
        method(
            "several",
            "Several smaller models, a path each",
            "2410.18234",
            {DraftSampling.INDEPENDENT},
            {TreeShape.CHAIN, TreeShape.PATHS},
        ),
    )
    info = methods[0]

    def __init__(
        self,
        models: Sequence[Target],
        *,
        head: ModelDrafter | None = None,
        stop_ids: Sequence[int] = (),
        slots: Slots | None = None,
    ) -> None:
        heads = () if head is None else (head,)
        if len(models) + len(heads) < 2:
            raise InvalidInputError(
                f"{len(models) + len(heads)} draft model was given to the drafter 'several'; expected two or more. Give several "
                "(--draft-model A --draft-model B, in Python further_draft_models), or drafter_options={'head': FOLDER}, or use drafter='model'."
            )
        self.members = (
            *heads,
            *(
                ModelDrafter(model, "chain", stop_ids=stop_ids, slots=None if j else slots)
                for j, model in enumerate(models)
            ),
        )
        self.needs = reduce(or_, (member.needs for member in self.members))

    @property
    def offers(self) -> Offers:
        """See `core.Drafter`."""
        return Offers(read=self.read, cursor=self.cursor)

    @classmethod
    def build(
        cls, parts: Parts, *, models: Sequence[Target | str] = (), head: str | None = None
    ) -> "SeveralDrafter":
        """For the engine: its draft model, and further ones.

        models: objects, or folders to load with the target's sizes.  head: folder of a head that drafts chains, `eagle` or `mtp`.

        Raises:
            IncompatibleError: a folder with another vocabulary, or a shorter context.
        """
        first = () if parts.draft_model is None else (parts.draft_model,)
        every = [*first, *(_loaded(m, parts) if isinstance(m, str) else m for m in models)]
        head_drafter = (
            None
            if head is None
            else registry.build_drafter(f"{kind_of(Path(head))}:chain", parts, {"weights": head})
        )
        slots = None if parts.draft_model is None else parts.draft_slots
        return cls(every, head=head_drafter, stop_ids=parts.eos_token_ids, slots=slots)

    @classmethod
    def of_folders(cls, heads: Mapping[str, Path], members: Sequence[str]) -> dict[str, Any]:
        """Its options for `polydraft bench --way several:NAME,NAME`: a path of each. heads: folders by name, of a head and of models."""
        models = [member for member in members if kind_of(heads[member]) == "model"]
        weights = [str(heads[member]) for member in members if member not in models]
        drafter_options = {
            "models": [load.load_model(str(heads[member]), max_num_seqs=1) for member in models]
        }
        return {**drafter_options, "head": weights[-1]} if weights else drafter_options

    def start(self, requests: Sequence[Request]) -> list[State]:
        """Read the prompts into free slots of every member; see `core.Drafter.start`."""
        started = start_each((m, [_own(r, j) for r in requests]) for j, m in enumerate(self.members))
        return list(zip(*started, strict=True))

    def cursor(self, state: State) -> Cursors:
        """Those of all members."""
        cursors = [member.cursor(own) for member, own in zip(self.members, state, strict=True)]
        return Cursors(cursors, cursors[:1] if self.needs.hidden else ())

    def read(self, states: Sequence[State], scores: Scores, start: int = 0) -> list[State]:
        """Tell the head the target's states."""
        read = self.members[0].offers.read
        if read is None:
            return list(states)
        head_states = read([s[0] for s in states], scores, start)
        return [(first, *rest) for first, (_, *rest) in zip(head_states, states, strict=True)]

    def release(self, states: Sequence[State]) -> None:
        """Give the slots back."""
        release_each(zip(self.members, self._by_member(states), strict=True))

    def _by_member(self, states: Sequence[State]) -> list[list[Any]]:
        return [[state[j] for state in states] for j in range(len(self.members))]

    def _size(self, state: State, budget: Budget) -> tuple[int, int]:
        """(paths, depth): equal paths of the first members, as deep as every member's context allows."""
        width = min(budget.width, len(self.members), max(budget.max_nodes, 1))
        room = min(m.model.max_model_len for m in self.members[:width]) - len(state[0].context) - 1
        return width, max(min(budget.max_depth, budget.max_nodes // width, room), 0)

    def propose(self, states: Sequence[State], budgets: Sequence[Budget]) -> Draft:
        """One proposal a member, joined at the roots; see `core.Drafter.propose`. Calling it again draws the same draft."""
        sizes = [self._size(s, g) for s, g in zip(states, budgets, strict=True)]
        widest = max(width for width, _ in sizes)
        drafts: list[Draft] = []
        for j, member_states in enumerate(self._by_member(states)[:widest]):
            depths = [depth if j < width else 0 for width, depth in sizes]
            drafts.append(
                self.members[j].propose(member_states, [Budget.fixed(tree.chain(d)) for d in depths])
            )
        return _joined(drafts, sizes)

    def observe(self, states: Sequence[State], outcome: Outcome, scores: Scores) -> list[State]:
        """In every member what of its own path was emitted stays cached; see `core.Drafter.observe`."""
        by_member = zip(self.members, self._by_member(states), strict=True)
        return list(zip(*(member.observe(s, outcome, scores) for member, s in by_member), strict=True))


def several_models(named: str | Drafter | None, verifier: str | Verifier) -> str:
    """The drafter of several draft models, in place of the one that was asked for: what the option `further_draft_models` means.

    Raises:
        IncompatibleError: one of a single draft model.

    Example:
        >>> several_models("auto", "auto")
        'several'
    """
    if named not in ("auto", "several"):
        raise IncompatibleError(
            f"several draft models were given with drafter={named!r}; expected 'several', which draws a path of each. Give one draft model, or leave the "
            "drafter out."
        )
    return "several"


def _loaded(folder: str, parts: Parts) -> Target:
    model = load.load_model(
        folder, max_model_len=parts.target.max_model_len, max_num_seqs=parts.target.max_num_seqs
    )
    check_same_context(parts.target.max_model_len, model.max_model_len)
    if parts.tokenizer is not None:
        theirs = load.load_tokenizer(folder)
        load.take_vocabulary(
            model,
            theirs,
            load.check_same_vocabulary(parts.tokenizer, theirs, parts.target.vocab_size, model.vocab_size),
        )
    return model


def _joined(drafts: Sequence[Draft], sizes: Sequence[tuple[int, int]]) -> Draft:
    """Chains side by side: node 1 + d K + j is token d of path j; its row is the one of chain j, behind those of earlier chains."""
    B = len(sizes)
    N = 1 + max(width * depth for width, depth in sizes)
    tokens = np.zeros((B, N), np.int64)
    parents = np.full((B, N), -1)
    rows = np.full((B, N), -1)
    every = [d.probs for d in drafts if d.probs is not None]
    first_rows = [0]
    for probs in every:
        first_rows.append(first_rows[-1] + probs.shape[1])
    tokens[:, 0] = drafts[0].tree.tokens[:, 0]
    for b, (width, depth) in enumerate(sizes):
        for j in range(width):
            nodes = np.arange(depth) * width + j + 1
            tokens[b, nodes] = drafts[j].tree.tokens[b, 1 : depth + 1]
            parents[b, nodes] = np.maximum(nodes - width, 0)
            rows[b, nodes] = drafts[j].rows[b, 1 : depth + 1] + first_rows[j]
    shape = TreeShape.PATHS if max(width for width, _ in sizes) > 1 else TreeShape.CHAIN
    return Draft(
        TokenTree(tokens, parents),
        DraftSampling.INDEPENDENT,
        shape,
        np.concatenate(every, 1),
        rows,
    )
