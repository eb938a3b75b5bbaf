"""The Spec-Drafter: an encoder of its own, and a decoder whose mask queries name the next k tokens in one forward pass.

Xia et al. 2022 (SpecDec, arXiv 2203.16487). Its verifier is an encoder-decoder, whose source it reads; for a causal target it reads the
prompt in the place of a source.

    k  queries that were trained: the longest draft

The draft is a chain of the queries' most likely tokens, cut behind the first end token: POINT_MASS, exact with `match`, relaxed with
`top_beta`. It is a function of source and committed tokens; nothing outlives a request. Beyond the `window` last committed tokens it
reads none, at their true positions.

It is no `block` head, which reads the target's states: it reads none, but source and output with an encoder and a cross-attention of its
own, and its files are of that form. A `block` head drafts for encoder-decoders too, but `polydraft train` makes none for them: its texts have no source.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from polydraft.core import Budget, Draft, DraftSampling, Needs, Offers, Outcome, Request, Scores, TreeShape
from polydraft.core import geometry as trees
from polydraft.drafters.base import Parts
from polydraft.errors import IncompatibleError, InvalidInputError, PolydraftError
from polydraft.methods.papers import method
from polydraft.papers.mask_query.network import MaskQueries

__all__ = ["MaskQueryDrafter"]


@dataclass
class MaskQueryState:
    """tokens: committed, start token included.  memory: what the encoder made of the source, [S, D]."""

    tokens: list[int]
    memory: Tensor


class MaskQueryDrafter:
    """See the module. network: as training left it.  queries: of them those that are used; default all.

    Raises:
        InvalidInputError: more queries than were trained, or none.

    Example:
        >>> from polydraft.papers.mask_query.network import MaskQueries, QuerySizes
        >>> made = MaskQueryDrafter(MaskQueries.like(QuerySizes(vocab_size=9, width=8, heads=2, queries=3)))
        >>> made.info.draft_sampling == {DraftSampling.POINT_MASS}
        True
    """

    info = method(
        "mask-query",
        "Mask queries at once (Spec-Drafter)",
        "2203.16487",
        {DraftSampling.POINT_MASS},
        {TreeShape.CHAIN},
    )
    methods = (info,)
    needs: Needs = Needs()
    offers: Offers = Offers()

    def __init__(
        self, network: MaskQueries, *, queries: int | None = None, stop_ids: Sequence[int] = ()
    ) -> None:
        self.network = network.eval()
        self._ends = frozenset(stop_ids)
        self.queries = network.sizes.queries if queries is None else queries
        if not 1 <= self.queries <= network.sizes.queries:
            raise InvalidInputError(
                f"queries={queries} was given; the network was trained with {network.sizes.queries}. Give at most that, or train more queries."
            )

    @classmethod
    def build(
        cls, parts: Parts, *, weights: str | Path | None = None, queries: int | None = None
    ) -> "MaskQueryDrafter":
        """For the engine. weights: a folder of `MaskQueries.save`.

        Raises:
            InvalidInputError: no folder.
            ModelLoadError, IncompatibleError: a folder that is none, or of another vocabulary.
        """
        if weights is None:
            raise InvalidInputError(
                "the drafter 'mask-query' was asked for without weights; expected weights=FOLDER (--head FOLDER). `python -m studies.seq2seq` trains one."
            )
        network = MaskQueries.load(weights)
        if network.sizes.vocab_size < parts.target.vocab_size:
            raise IncompatibleError(
                f"the drafter in {str(weights)!r} knows {network.sizes.vocab_size} tokens and the target {parts.target.vocab_size}; expected one "
                "vocabulary. Use the drafter of this target."
            )
        return cls(network, queries=queries, stop_ids=parts.eos_token_ids)

    @torch.inference_mode()
    def start(self, requests: Sequence[Request]) -> list[MaskQueryState]:
        """Read the sources, each once."""
        read = [list(request.source_token_ids or request.prompt_token_ids) for request in requests]
        source = pad_sequence([torch.tensor(ids) for ids in read], batch_first=True)
        is_token = torch.arange(source.shape[1]) < torch.tensor([[len(ids)] for ids in read])
        memory, _ = self.network.read(source, is_token)
        return [
            MaskQueryState(list(r.prompt_token_ids), memory[b, : len(ids)])
            for b, (r, ids) in enumerate(zip(requests, read, strict=True))
        ]

    @torch.inference_mode()
    def propose(self, states: Sequence[MaskQueryState], budgets: Sequence[Budget]) -> Draft:
        """One forward pass for all; a draft is as long as its budget is deep, and no longer than the queries."""
        tokens = self._guesses(states)
        texts = list[list[int]]()
        for state, guessed, budget in zip(states, tokens, budgets, strict=True):
            chain = guessed[: min(budget.chain_length, self.queries)]
            end = next((i + 1 for i, token in enumerate(chain) if token in self._ends), len(chain))
            texts.append([state.tokens[-1], *chain[:end]])
        return Draft.point_mass(trees.chains(texts))

    def _guesses(self, states: Sequence[MaskQueryState]) -> list[list[int]]:
        """The most likely token of every query.

        Raises:
            PolydraftError: logits that are no numbers.
        """
        memory = pad_sequence([s.memory for s in states], batch_first=True)
        hidden = torch.arange(memory.shape[1]) >= torch.tensor([[len(s.memory)] for s in states])
        recent = [torch.tensor(s.tokens[-self.network.sizes.window :]) for s in states]
        lengths = torch.tensor([len(ids) for ids in recent])
        offsets = torch.tensor([len(s.tokens) for s in states]) - lengths
        logits = self.network(
            memory, hidden, pad_sequence(recent, batch_first=True), lengths, offsets=offsets
        )
        if not logits.isfinite().all():
            raise PolydraftError(
                "the drafter 'mask-query' has logits that are not finite; its weights are damaged. Train or copy it again."
            )
        return logits.argmax(-1).tolist()

    def observe(
        self, states: Sequence[MaskQueryState], outcome: Outcome, scores: Scores
    ) -> list[MaskQueryState]:
        """Go on with what was emitted."""
        emitted = outcome.emitted(scores.tree)
        return [
            MaskQueryState([*state.tokens, *tokens], state.memory)
            for state, tokens in zip(states, emitted, strict=True)
        ]

    def release(self, states: Sequence[MaskQueryState]) -> None:
        """Nothing to give back."""
