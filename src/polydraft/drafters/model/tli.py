"""Drafts from a model with another vocabulary, restricted to the common tokens: token-level intersection.

Timor et al. 2025, "Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for Heterogeneous Vocabularies"
(arXiv 2502.05202), TLI.

    I  tokens of both vocabularies        q(x) = q'(x) / q'(I) for x in I, else 0

The draft model's logits outside I become -inf, so the softmax over our ids is the restricted, renormalised distribution: tokens are drawn
from it and it is what is reported. Tokens of the context that the model lacks are read as several of its own. It looks like a model of the
target's vocabulary, so all kinds of `drafters.model.paths` and all verifiers for them serve unchanged.
Trap: the row without renormalising, or a draw from q' that is dropped where it falls outside I, biases the ratio test.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from polydraft.core import DraftSampling, Outcome, Scores, Target, TokenTree, TreeShape
from polydraft.drafters.base import Parts
from polydraft.drafters.model.paths import ModelDrafter
from polydraft.errors import IncompatibleError, InvalidInputError
from polydraft.methods.papers import method
from polydraft.models.slot_pool import Slots
from polydraft.models.tokens.vocabulary import Translation


class TranslatedModel(Target):
    """`inner` behind the vocabulary of `translation.ours`; see `core.Target`.

    ends: for each slot, the inner model's length after each of our committed tokens, from 0 on.
    """

    def __init__(self, inner: Target, translation: Translation, vocab_size: int) -> None:
        self.inner = inner
        self.translation = translation
        self.vocab_size = vocab_size
        self.max_model_len = inner.max_model_len
        self.max_num_seqs = inner.max_num_seqs
        self.weight_bytes = inner.weight_bytes
        self.ends: list[list[int]] = [[0] for _ in range(inner.max_num_seqs)]
        self._ours = translation.ours
        self._theirs = translation.theirs
        self._last = np.array([pieces[-1] for pieces in translation.pieces], np.int64)

    def _logits(self, logits: np.ndarray) -> np.ndarray:
        out = np.full((*logits.shape[:-1], self.vocab_size), -np.inf, logits.dtype)
        out[..., self._ours] = logits[..., self._theirs]
        return out

    def _append(self, slot: int, token_ids: Sequence[int]) -> None:
        for token in token_ids:
            self.ends[slot].append(self.ends[slot][-1] + len(self.translation.pieces[token]))

    def prefill(
        self, slots: Sequence[int], token_ids: Sequence[Sequence[int]], *, hidden: Sequence[int] = ()
    ) -> Scores:
        """Append committed tokens; logits after the last of each, in our ids."""
        assert not hidden, "it offers none"
        self._rewind(slots)
        scores = self.inner.prefill(slots, [self.translation.expand(ids) for ids in token_ids])
        for slot, ids in zip(slots, token_ids, strict=True):
            self._append(slot, ids)
        return Scores(
            TokenTree.roots(np.array([ids[-1] for ids in token_ids], np.int64)), self._logits(scores.logits)
        )

    def _rewind(self, slots: Sequence[int]) -> None:
        """Forget what a root of several pieces left in the inner cache."""
        for slot in slots:
            if self.inner.lengths[slot] > self.ends[slot][-1]:
                self.inner.cut(slot, self.ends[slot][-1])

    def score(
        self, slots: Sequence[int], tree: TokenTree, *, hidden: Sequence[int] = (), since: int = 0
    ) -> Scores:
        """Logits of the nodes; all but the root must be common tokens, as all drafts of this model are.

        Raises:
            IncompatibleError: hidden states.
        """
        if hidden:
            raise IncompatibleError("hidden states were asked of a translated model, which has logits only.")
        if since == 0:
            self._rewind(slots)
            leading = {
                slot: pieces[:-1]
                for slot, root in zip(slots, tree.tokens[:, 0].tolist(), strict=True)
                if len(pieces := self.translation.pieces[root]) > 1
            }
            if leading:
                self.inner.prefill(list(leading), list(leading.values()))
            self._roots = dict(zip(slots, tree.tokens[:, 0].tolist(), strict=True))
        scores = self.inner.score(
            slots, TokenTree.of(self._last[tree.host.tokens], tree.host.parents), since=since
        )
        return Scores(tree.nodes_from(since), self._logits(scores.logits))

    def commit(self, slots: Sequence[int], outcome: Outcome) -> None:
        """Roll back all but the root and the path."""
        self.inner.commit(slots, outcome)
        for slot, num_accepted in zip(slots, outcome.num_accepted.tolist(), strict=True):
            self._append(slot, [self._roots[slot]])
            end = self.ends[slot][-1]
            self.ends[slot] += range(end + 1, end + 1 + num_accepted)

    @property
    def lengths(self) -> np.ndarray:
        """[slots] committed tokens of ours."""
        return np.array([len(text_ends) - 1 for text_ends in self.ends])

    def cut(self, slot: int, length: int) -> None:
        """Forget all committed tokens but the first `length`."""
        del self.ends[slot][length + 1 :]
        self._rewind([slot])

    def copy(self, source: int, slot: int, length: int) -> None:
        """The first `length` committed tokens of a slot into an empty one."""
        self.inner.copy(source, slot, self.ends[source][length])
        self.ends[slot] = self.ends[source][: length + 1]

    def release(self, slots: Sequence[int]) -> None:
        """Empty the slots."""
        self.inner.release(slots)
        for slot in slots:
            self.ends[slot] = [0]


class TliDrafter(ModelDrafter):
    """A smaller model of another tokenizer as a drafter; kinds and errors as for `ModelDrafter`.

    Example:
        >>> TliDrafter.methods[0].arxiv
        '2502.05202'
    """

    methods = (
        method(
            "tli",
            "Smaller model of another vocabulary, common tokens",
            "2502.05202",
            {DraftSampling.IID},
            {TreeShape.CHAIN, TreeShape.PATHS},
            own_vocabulary=True,
        ),
    )

    def __init__(
        self, model: Target, kind: str = "paths", *, stop_ids: Any = (), slots: Slots | None = None
    ) -> None:
        super().__init__(model, kind, stop_ids=stop_ids, slots=slots)
        name = "tli" if kind == "paths" else f"tli:{kind}"
        general = self.info
        same = {"draft_sampling": general.draft_sampling, "shapes": general.shapes, "ranked": general.ranked}
        self.info = replace(self.methods[0], name=name, **same)

    @classmethod
    def build(cls, parts: Parts, *, kind: str = "paths") -> "TliDrafter":
        """For the engine: translate between its tokenizer and the draft's.

        Raises:
            InvalidInputError: a draft model or one of the tokenizers is missing.
            IncompatibleError: no token in common.
        """
        check_parts(parts, "tli")
        assert parts.draft_model is not None
        V = parts.target.vocab_size
        translation = Translation.of(parts.tokenizer, parts.draft_tokenizer, V, parts.draft_model.vocab_size)
        model = TranslatedModel(parts.draft_model, translation, V)
        return cls(model, kind, stop_ids=parts.eos_token_ids, slots=parts.draft_slots)


def check_parts(parts: Parts, name: str) -> None:
    """Refuse to go from one vocabulary to another without a draft model and both tokenizers."""
    needed = {
        "a draft model": parts.draft_model,
        "a tokenizer": parts.tokenizer,
        "a draft_tokenizer": parts.draft_tokenizer,
    }
    missing = [what for what, part in needed.items() if part is None]
    if missing:
        raise InvalidInputError(
            f"drafter {name!r} was asked for without {' and '.join(missing)}; expected a draft model and both tokenizers. "
            "Build the engine with from_pretrained(target, draft_model=...), or give them to Engine.of."
        )
