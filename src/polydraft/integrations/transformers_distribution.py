"""The distribution that transformers' `generate` samples at every node of a tree: its own logits processors, row by row."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessorList,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

from polydraft.core import Needs, Scores, TokenTree
from polydraft.core import geometry as trees
from polydraft.errors import IncompatibleError, InvalidInputError
from polydraft.models.torch.door import inward, outward

REFUSED_PROCESSORS = {
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": "guidance_scale",
    "SynthIDTextWatermarkLogitsProcessor": "watermarking_config (SynthID)",
    "EncoderRepetitionPenaltyLogitsProcessor": "encoder_repetition_penalty",
    "EncoderNoRepeatNGramLogitsProcessor": "encoder_no_repeat_ngram_size",
}
"""Processors with state from call to call, or that hold the whole batch: name -> the option that makes them."""


def refused(option: str, value: object, advice: str) -> IncompatibleError:
    """The error for an option of `generate` that cannot be honoured."""
    return IncompatibleError(
        f"{option}={value!r} was given to generate with polydraft's custom_generate. {advice}"
    )


class ByRow:
    """The prepared logits processors, for single rows of text."""

    def __init__(
        self, processors: LogitsProcessorList, input_ids: Int[Tensor, "B L"], vocab_size: int
    ) -> None:
        for processor in processors:
            name = type(processor).__name__
            if name in REFUSED_PROCESSORS:
                advice = f"{name} cannot be applied to single nodes of a tree. Leave it out."
                raise refused(REFUSED_PROCESSORS[name], "...", advice)
        self._rows = [[_for_row(processor, b) for processor in processors] for b in range(len(input_ids))]
        scores = torch.linspace(-3, 3, vocab_size, device=input_ids.device).expand(len(input_ids), -1)
        for number, processor in enumerate(processors):
            if not isinstance(processor, PrefixConstrainedLogitsProcessor):
                self._check(number, processor, input_ids, scores)

    def _check(
        self, number: int, processor: Any, input_ids: Int[Tensor, "B L"], scores: Float[Tensor, "B V"]
    ) -> None:
        """Whole batch and row by row: the answers must agree."""
        whole = processor(input_ids, scores.clone())
        for b in range(min(len(input_ids), 8)):  # the first rows are enough
            alone = self._rows[b][number](input_ids[b : b + 1], scores[b : b + 1].clone())
            if not torch.equal(whole[b].nan_to_num(), alone[0].nan_to_num()):
                raise IncompatibleError(
                    f"the logits processor {type(processor).__name__} gives a row another answer alone than in its batch, or when "
                    "it is asked again; expected a function of the row's own text and scores. Leave it out, or call generate "
                    "without custom_generate."
                )

    def __call__(
        self, b: int, input_ids: Int[Tensor, "M L"], scores: Float[Tensor, "M V"]
    ) -> Float[Tensor, "M V"]:
        """Processed scores of M texts that all continue row b."""
        for processor in self._rows[b]:
            scores = processor(input_ids, scores)
        return scores


def _for_row(processor: Any, b: int) -> Any:
    """A processor of the batch as one for texts that all continue row b."""
    if isinstance(processor, PrefixConstrainedLogitsProcessor):
        allowed = processor._prefix_allowed_tokens_fn
        return PrefixConstrainedLogitsProcessor(lambda _, sent: allowed(b, sent), 1)
    ignored = getattr(processor, "prompt_ignore_length", None)
    if isinstance(processor, RepetitionPenaltyLogitsProcessor) and isinstance(ignored, Tensor):
        return RepetitionPenaltyLogitsProcessor(processor.penalty, prompt_ignore_length=int(ignored[b]))
    return processor


class ProcessedDistribution:
    """From logits to the distribution that `generate` would sample at every node that can be reached.

    device: of the processors.  live: numbers of the rows that the next step's batch consists of.  padding: what stands before each row's text.
    What failed once fails again: one call of `generate` fails as a whole.
    """

    needs = Needs()
    gives_logits = False

    def __init__(
        self, by_row: ByRow, padding: Sequence[list[int]], do_sample: bool, device: torch.device
    ) -> None:
        self.device = device
        self._by_row = by_row
        self._padding = padding
        self._do_sample = do_sample
        self.live: list[int] = []
        self._processed: Tensor = torch.empty(0)
        self._tree = TokenTree.roots(np.zeros(1, np.int64))
        self._failed: Exception | None = None

    def __call__(
        self, scores: Scores, tree: TokenTree, contexts: Sequence[Sequence[int]], second: Scores | None = None
    ) -> Float[np.ndarray, "B N V"]:
        if self._failed is not None:
            raise self._failed
        logits = inward(scores.logits, self, torch.float32)
        self._processed = torch.full_like(logits, -torch.inf)
        self._tree = tree
        p = torch.full_like(
            logits, 1 / logits.shape[-1]
        )  # of nodes behind a token that cannot be: no verifier gets there
        try:
            for b, context in enumerate(contexts):
                self._fill(
                    b, logits[b], trees.subtree(tree, b), [*self._padding[self.live[b]], *context], p[b]
                )
        except Exception as error:
            self._failed = error
            raise
        return outward(p)

    def _fill(
        self, b: int, logits: Float[Tensor, "N V"], tree: TokenTree, text: list[int], p: Float[Tensor, "N V"]
    ) -> None:
        tokens = tree.tokens[0].tolist()
        parents = tree.parents[0].tolist()
        path = {0: text}
        level = [0]
        while level:
            rows = self._processed_rows(b, [path[n] for n in level], logits[level])
            self._processed[b, level] = rows
            best = rows.argmax(-1, keepdim=True)
            p[level] = rows.softmax(-1) if self._do_sample else torch.zeros_like(rows).scatter_(-1, best, 1.0)
            above = set(level)
            level = []
            for n in range(1, len(tokens)):
                if n not in path and parents[n] in above and p[parents[n], tokens[n]] > 0:
                    path[n] = [*path[parents[n]], tokens[n]]
                    level.append(n)

    def _processed_rows(
        self, b: int, texts: list[list[int]], logits: Float[Tensor, "M V"]
    ) -> Float[Tensor, "M V"]:
        """Scores of some nodes of a row, behind texts of one length, after the processors."""
        ids = torch.tensor(texts, device=logits.device)
        rows = self._by_row(self.live[b], ids, logits)
        if (rows.amax(-1) == -torch.inf).any() or rows.isnan().any():
            raise InvalidInputError(
                f"the logits processors leave no token for row {self.live[b]} after {ids.shape[1]} tokens, or make NaN; "
                "expected at least one finite score. Check the constraints."
            )
        return rows

    def scores_of(self, b: int, tokens: Sequence[int]) -> list[Float[Tensor, " V"]]:
        """Processed scores that the tokens of a block were drawn from, in the last step."""
        drafted = self._tree.tokens[b].tolist()
        parents = self._tree.parents[b].tolist()
        nodes = [0]
        for token in tokens[:-1]:
            nodes.append(
                next(n for n in range(1, len(drafted)) if parents[n] == nodes[-1] and drafted[n] == token)
            )
        return [self._processed[b, n].clone() for n in nodes]
