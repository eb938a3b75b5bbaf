"""Outputs that follow a grammar: which tokens may come next, at every node of a drafted tree by the node's own path.

The distribution is the target's, over the tokens that may come next. Every distribution of `sampling` is, the draft's too where it is made a depth at a
time; so drafted tokens fit, and one that does not has no mass in the target's distribution: a rejected try like any other. A draft from text is
the same each time, so that what cannot be accepted is pruned before it is scored (`pruned`); to prune a sampled token would bias the distribution.

Grammars are compiled and followed by llguidance (https://github.com/guidance-ai/llguidance).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from time import thread_time
from typing import Any

import numpy as np
from jaxtyping import Bool, Int, UInt32

from polydraft.core import Draft, DraftSampling, SamplingParams, TokenTree
from polydraft.core.params import Constraint
from polydraft.engine.exact_outputs import ExactGrammar, Prefixes
from polydraft.engine.grammar_compile import said
from polydraft.errors import GrammarError, InvalidInputError

STEP_SECONDS = 0.1
"""Of CPU time of the masks of one output in one step, while others wait."""
MASK_SECONDS = 0.01
"""Of one mask where a tree has many; those of common grammars take less than 2 ms with 150,000 tokens."""
RENEWED_SECONDS = 0.1
"""Of compiling a grammar anew while others wait for the step."""


class Grammar:
    """A `params.Constraint`: the tokens with which one output stays within a grammar.

    source: of its grammar.  prompt_length: where the output begins.

    Example:
        >>> from polydraft import StructuredOutputs
        >>> from polydraft.models import load, pair
        >>> tokenizer = load.load_tokenizer(str(pair.target_folder()))
        >>> a, b, c = (tokenizer(x)["input_ids"][0] for x in "abc")
        >>> from polydraft.engine.structured import Grammars
        >>> grammars = Grammars(tokenizer, len(tokenizer), [0])
        >>> grammar = grammars.compiled(StructuredOutputs(regex="(a|b)c?")).constraint(prompt_length=1)
        >>> rows = grammar.allowed([5], [5, a, b], [-1, 0, -1])
        >>> rows[0, [a, b, c]].tolist(), rows[1, [a, c, 0]].tolist()
        ([True, True, False], [False, True, True])
    """

    def __init__(self, source: "CompiledGrammar", prompt_length: int) -> None:
        self._source = source
        self._start = prompt_length
        self._stop_ids = list(source.stop_ids)
        self._vocab_size = source.vocab_size
        self._alone = False
        """Whether the states of its grammar, of which there are only so many, are its own already: outputs share them at first."""
        self._begin()

    def _begin(self) -> None:
        self._seconds = 0.0
        self._num_masks = 0
        """Of the masks behind the output that it has read."""
        self._matcher = self._source.matcher.deep_copy()
        self._read = list[int]()
        """At the end of the output that it has read."""
        self._masks = dict[tuple[int, ...], UInt32[np.ndarray, " W"]]()
        self._ahead = dict[tuple[int, ...], Any]()
        """By drafted path behind that output: one bit for each token that may follow, and a matcher that is there."""
        self._failed = dict[tuple[int, ...], GrammarError]()

    def allowed(
        self, context: Sequence[int], tokens: Sequence[int], parents: Sequence[int]
    ) -> Bool[np.ndarray, "N V"]:
        """See `params.Constraint`. Behind the end of a text more of the same may follow: nothing else may, and something must.

        Raises:
            GrammarError: an output that the grammar does not have, or a grammar beyond the limits of what may be followed.
        """
        tree = list(context[self._start :]), list(tokens), list(parents)
        try:
            return self._rows(*tree)
        except GrammarError:
            if self._alone or not self._source.renew():
                raise
            self._alone = True
            self._begin()
            return self._rows(*tree)

    def following(self, path: tuple[int, ...]) -> list[int]:
        """The tokens that may come next behind these, each of which may be there, as the first of the output."""
        bits = self._mask(path).view(np.uint8)
        return np.flatnonzero(np.unpackbits(bits, bitorder="little")[: self._vocab_size]).tolist()

    def _rows(self, output: list[int], tokens: list[int], parents: list[int]) -> Bool[np.ndarray, "N V"]:
        rows = np.empty((len(tokens), self._vocab_size), np.bool_)
        is_over = not self._follow(output)
        paths: dict[int, tuple[int, ...]] = {0: ()}
        for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
            if node and parent in paths and rows[parent, token]:
                paths[node] = (*paths[parent], token)
            if node not in paths:
                rows[node] = True
            elif is_over or not set(self._stop_ids).isdisjoint(paths[node]):
                rows[node] = False
                rows[node, self._stop_ids] = True
            else:
                rows[node] = np.unpackbits(self._mask(paths[node]).view(np.uint8), bitorder="little")[
                    : self._vocab_size
                ]
        return rows

    def _follow(self, output: list[int]) -> bool:
        """Bring the matcher to the end of an output; False where that is over."""
        if output[: len(self._read)] != self._read:
            self._begin()
        for token in output[len(self._read) :]:
            if token in self._stop_ids:
                return False
            if not self._reads(self._matcher, [token]):
                raise InvalidInputError(
                    f"an output of a grammar has token {token} behind {len(self._read)} others, where it is not allowed."
                )
            self._read.append(token)
            self._seconds = 0.0
            self._num_masks = 0
            self._masks.clear()
            self._ahead.clear()
            self._failed.clear()
        return True

    def _mask(self, path: tuple[int, ...]) -> UInt32[np.ndarray, " W"]:
        """What may follow a path behind the output, each token of which may be there; what failed once is not tried again in a step."""
        if path in self._failed:
            raise self._failed[path]
        if path not in self._masks:
            try:
                self._masks[path] = self._computed(self._matched(path))
            except GrammarError as error:
                self._failed[path] = error
                raise
        return self._masks[path]

    def _matched(self, path: tuple[int, ...]) -> Any:
        """A matcher at the end of a path: its parent's where no sibling has taken that, else a copy of the output's own, which goes all the way.

        Never one that was rolled back: llguidance has the last mask of the place where it was computed, and a sibling may get it there.
        """
        if not path:
            return self._matcher
        matcher = self._ahead.pop(path[:-1], None)
        unread = path[-1:]
        if matcher is None:
            matcher = self._matcher.deep_copy()
            unread = path
        if not self._reads(matcher, unread):
            raise self._failure(said(matcher))
        self._ahead[path] = matcher
        return matcher

    def _reads(self, matcher: Any, tokens: Sequence[int]) -> bool:
        """Whether a matcher takes these tokens; where it is at its limits it takes none, and says so in its next mask only."""
        if matcher.try_consume_tokens(list(tokens)) == len(tokens):
            return True
        self._computed(matcher)
        return False

    def _computed(self, matcher: Any) -> UInt32[np.ndarray, " W"]:
        bits = np.zeros(-(-self._vocab_size // 32), np.uint32)
        began = thread_time()
        matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        self._seconds += thread_time() - began
        self._num_masks += 1
        if matcher.is_error():
            raise self._failure(said(matcher))
        if self._seconds > max(STEP_SECONDS, MASK_SECONDS * self._num_masks):
            self._alone = True
            raise self._failure(
                f"a step of theirs takes {1000 * self._seconds:.0f} ms, of {1000 * STEP_SECONDS:.0f} that it may"
            )
        return bits

    def _failure(self, reason: str) -> GrammarError:
        return GrammarError(
            f"structured_outputs cannot be followed beyond {len(self._read)} tokens of an output: {reason}. Make them simpler."
        )


@dataclass
class CompiledGrammar:
    """A `params.ConstraintSource`: one grammar, ready for any number of outputs.

    make: a matcher of llguidance, at the beginning.  matcher: one of those; outputs follow copies of it, which share its states.
    num_bytes: of its text.  stop_ids: that end an output, allowed where the grammar may end.
    memory: bytes that its trial took.  seconds: of CPU time that it took to compile there.
    is_worn: whether outputs have used up its states, and it takes too long to renew them in a step.
    """

    make: Callable[[], Any]
    num_bytes: int
    vocab_size: int
    stop_ids: tuple[int, ...]
    memory: int = 0
    seconds: float = 0.0
    is_worn: bool = False

    def __post_init__(self) -> None:
        self.matcher = self.make()

    def renew(self) -> bool:
        """Its matcher without the states that outputs have added; False where that takes too long."""
        if self.seconds > RENEWED_SECONDS:
            self.is_worn = True
        else:
            self.matcher = self.make()
        return not self.is_worn

    def constraint(self, prompt_length: int) -> Grammar:
        """Of one output, which begins behind so many tokens."""
        return Grammar(self, prompt_length)

    @cached_property
    def exact(self) -> ExactGrammar:
        """Its outputs as the target has them, given that it is one of them.

        Raises:
            InvalidInputError: a grammar with more of them than can be scored.
        """
        prefixes = Prefixes.of(self.constraint(0).following, self.stop_ids)
        return ExactGrammar(prefixes, self.stop_ids, self.vocab_size)


def pruned(draft: Draft, contexts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> Draft:
    """A draft from text without the nodes that constraints do not allow, and what hangs on them; any other as it is."""
    forms = [p.structured_outputs for p in params]
    bound = [(b, form) for b, form in enumerate(forms) if isinstance(form, Constraint)]
    if draft.sampling is not DraftSampling.POINT_MASS or not bound or draft.tree.num_nodes == 1:
        return draft
    tokens, parents = (x.copy() for x in draft.tree.host)
    confidence = None if draft.confidence is None else draft.confidence.copy()
    for b, constraint in bound:
        rows = constraint.allowed(contexts[b], tokens[b].tolist(), parents[b].tolist())
        nodes, new_parents = _allowed_nodes(rows, tokens[b], parents[b])
        num_removed = len(tokens[b]) - len(nodes)
        tokens[b] = np.pad(tokens[b, nodes], (0, num_removed))
        parents[b] = np.pad(new_parents, (0, num_removed), constant_values=-1)
        if confidence is not None:
            confidence[b, : len(nodes)] = confidence[b, nodes]
    return replace(draft, tree=TokenTree.of(tokens, parents), confidence=confidence)


def _allowed_nodes(
    rows: Bool[np.ndarray, "N V"], tokens: Int[np.ndarray, " N"], parents: Int[np.ndarray, " N"]
) -> tuple[list[int], list[int]]:
    """Nodes that may be there with all above them, and their parents among these. rows: tokens that are allowed behind each."""
    place = {0: 0}
    for n in range(1, len(parents)):
        above = int(parents[n])
        if above in place and rows[above, tokens[n]]:
            place[n] = len(place)
    nodes = list(place)
    return nodes, [place.get(int(parent), -1) for parent in parents[nodes]]
