"""What an engine offers to a drafter that is made by name, and what several drafters do together."""

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polydraft.core.budget import TreeShape
from polydraft.core.decodings import Decoding, SecondSequenceDecoding
from polydraft.core.drafts import Draft, DraftSampling
from polydraft.core.methods import Drafter
from polydraft.core.outcomes import Outcome
from polydraft.core.requests import Request
from polydraft.core.targets import EncoderDecoder, Scores, Target
from polydraft.core.trees import NoiseKey, TokenTree
from polydraft.models.slots import Slots


@dataclass(frozen=True)
class Parts:
    """The engine's parts at the time a drafter is built; a drafter class takes what it needs in `build(parts, **options)`.

    target: the model that is accelerated.  draft_model: a smaller one, or None.  tokenizer: the target's, or None.
    draft_tokenizer: the draft model's where it is another one.  decoding: what is sampled, or None.
    """

    target: Target
    draft_model: Target | None
    tokenizer: Any
    eos_token_ids: Sequence[int]
    draft_tokenizer: Any = None
    decoding: Decoding | None = None

    @property
    def second_model(self) -> Target | None:
        """Of the decoding method's second sequences, where it is not the target."""
        return self.decoding.second_model if isinstance(self.decoding, SecondSequenceDecoding) else None

    @cached_property
    def draft_slots(self) -> Slots:
        """Of the draft model, for every drafter that runs requests in it: no two of them write to one slot."""
        assert self.draft_model is not None
        return Slots(self.draft_model)


def interleaved(rows: Sequence[Sequence[int]], drafts: Sequence[Draft]) -> Draft:
    """Drafts of some rows each, as the draft of all: of one sampling, beside which some may be point masses, whose nodes have no row.

    Chains lie beside chains with spare siblings, too, which are drawn without replacement.

    Example:
        >>> roots = [Draft.empty(torch.tensor(tokens)) for tokens in ([5], [6, 7])]
        >>> interleaved([[1], [0, 2]], roots).tree.tokens.tolist()
        [[6], [5], [7]]
    """
    order = torch.tensor([b for group in rows for b in group]).argsort()

    def placed(parts: Sequence[Tensor], width: int, fill: float) -> Tensor:
        wide = [torch.cat([x, x.new_full((len(x), width - x.shape[1], *x.shape[2:]), fill)], 1) for x in parts]
        return torch.cat(wide)[order]

    N = max(d.tree.num_nodes for d in drafts)
    drawn = [d for d in drafts if d.probs is not None] or list(drafts)
    tree = TokenTree(placed([d.tree.tokens for d in drafts], N, 0), placed([d.tree.parents for d in drafts], N, -1))
    probs = None
    if drawn[0].probs is not None:
        V = drawn[0].probs.shape[2]
        draft_probs = [torch.full((len(d.rows), 1, V), 1 / V) if d.probs is None else d.probs for d in drafts]
        probs = placed(draft_probs, max(x.shape[1] for x in draft_probs), 1 / V)
    keys, noise = [d.noise for d in drafts if d.noise is not None], None
    if len(keys) == len(drafts):
        noise = NoiseKey(*(torch.cat([getattr(key, name) for key in keys])[order] for name in ("seed", "sample", "position")))
    shape = drawn[0].shape if len({d.shape for d in drawn}) == 1 else TreeShape.of_batch([d.shape for d in drawn])
    scored = [d.logits for d in drafts if d.logits is not None]
    logits = placed(scored, N, 0) if len(scored) == len(drafts) else None
    distinct = any(d.sampling is DraftSampling.WITHOUT_REPLACEMENT for d in drawn)
    draft_sampling = DraftSampling.WITHOUT_REPLACEMENT if distinct else drawn[0].sampling
    drawn_nothing = [d.confidence is None and d.tree.num_nodes == 1 for d in drafts]
    said = [torch.ones(d.rows.shape) if bare else d.confidence for d, bare in zip(drafts, drawn_nothing, strict=True)]
    sure = [x for x in said if x is not None]
    confidence = placed(sure, N, 1.0) if len(sure) == len(drafts) else None
    return Draft(tree, draft_sampling, shape, probs, placed([d.rows for d in drafts], N, -1), noise, logits, confidence)


def read_source(model: Target, slot: int, request: Request) -> None:
    """Where a draft model is an encoder-decoder, it reads the source of a request that has taken a slot of it."""
    if isinstance(model, EncoderDecoder):
        model.encode([slot], [request.source_token_ids])


def start_each(asked: Iterable[tuple[Drafter, Sequence[Request]]]) -> list[list[Any]]:
    """States from each of several drafters; where one fails, the others' are released."""
    with ExitStack() as held:
        started: list[list[Any]] = []
        for drafter, requests in asked:
            started.append(drafter.start(requests))
            held.callback(drafter.release, started[-1])
        held.pop_all()
    return started


def release_each(held: Iterable[tuple[Drafter, Sequence[Any]]]) -> None:
    """Release the states of several drafters, all of them even where one fails; its error is raised afterwards."""
    with ExitStack() as every:
        for drafter, states in held:
            every.callback(drafter.release, states)


def teach_each(drafters: Iterable[Drafter], token_ids: Sequence[int]) -> None:
    """Tell a finished output to those of several drafters that learn from it."""
    for drafter in drafters:
        if (learn := drafter.offers.learn_output) is not None:
            learn(token_ids)


def as_one_round(last: Sequence[int], missed: Sequence[Sequence[int]]) -> tuple[Outcome, Scores]:
    """What `observe` takes, for tokens of several rounds at once: a round whose draft was right; without logits.

    last: the last token before, of every row.  missed: what each row emitted since, at least one token.

    Example:
        >>> outcome, scores = as_one_round([7], [[1, 2, 3]])
        >>> outcome.emitted(scores.tree), scores.tree.tokens.tolist()
        ([[1, 2, 3]], [[7, 1, 2]])
    """
    size = max(map(len, missed))
    tokens, parents, path = (
        np.zeros((len(last), size), np.int64),
        np.full((len(last), size), -1),
        np.full((len(last), size - 1), -1),
    )
    for b, (root, ids) in enumerate(zip(last, missed, strict=True)):
        n = len(ids)
        tokens[b, :n], parents[b, 1:n], path[b, : n - 1] = [root, *ids[:-1]], np.arange(n - 1), np.arange(1, n)
    outcome = Outcome.of(path, np.array([len(ids) - 1 for ids in missed]), np.array([ids[-1] for ids in missed]))
    return outcome, Scores(TokenTree.of(tokens, parents), torch.empty(len(last), size, 0))
