"""The form of an answer begins behind what the model thinks: until then it is free, at every node of a drafted tree by the node's own path.

A form that may be anything at first leaves the thoughts as they are. Any other has to be reached: then nothing ends the output in its thoughts, and
the token that completes their last mark has no text of the answer in it. Up to MOST_BLANKS may stand between mark and form, as models write them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
from jaxtyping import Bool

from polydraft.core.params import Constraint, ConstraintSource
from polydraft.core.thinking import BLANKS, PhaseOfText, Thinking, characters
from polydraft.models.tokens.encoding import token_ids
from polydraft.models.tokens.spelling import Spelling

MOST_BLANKS = 4
"""Bytes of blanks between thoughts and form; `</think>\\n\\n` is what most models write."""


class TextTree:
    """A tree behind a text. Arguments as of `Constraint.allowed`; a node's position is that of its token in text and path together.

    Example:
        >>> tree = TextTree([7, 5], [5, 3, 4, 3], [-1, 0, 1, 0])
        >>> tree.positions, tree.above(2, 2), tree.above(2, 1)
        ([1, 2, 3, 2], 1, 0)
    """

    def __init__(self, context: Sequence[int], tokens: Sequence[int], parents: Sequence[int]) -> None:
        self.context = list(context)
        self.tokens = list(tokens)
        self.parents = list(parents)

    @cached_property
    def positions(self) -> list[int]:
        """Of each node; -1 of padding."""
        positions = [len(self.context) - 1]
        for parent in self.parents[1:]:
            above = positions[parent] if parent >= 0 else -1
            positions.append(above + 1 if above >= 0 else -1)
        return positions

    def above(self, node: int, position: int) -> int:
        """The node on a node's path that is at a position, or the root where that lies in the text."""
        while node and self.positions[node] > position:
            node = self.parents[node]
        return node

    def rows(self, constraint: Constraint, anchor: int) -> Bool[np.ndarray, "N V"]:
        """What a constraint allows behind a node and those below it; rows of others are read by nobody."""
        if anchor == 0:
            return constraint.allowed(self.context, self.tokens, self.parents)
        place = {anchor: 0}
        for node in range(anchor + 1, len(self.tokens)):
            if self.parents[node] in place:
                place[node] = len(place)
        tokens = [self.tokens[node] for node in place]
        parents = [-1, *(place[self.parents[node]] for node in list(place)[1:])]
        part = constraint.allowed([*self.context, *self._path(anchor)], tokens, parents)
        rows = np.ones((len(self.tokens), part.shape[1]), np.bool_)
        rows[list(place)] = part
        return rows

    def _path(self, node: int) -> list[int]:
        path = list[int]()
        while node:
            path.append(self.tokens[node])
            node = self.parents[node]
        return path[::-1]


class MarkTokens:
    """Tokens of a vocabulary that have to do with marks of thinking."""

    def __init__(self, tokenizer: Any, thinking: Thinking) -> None:
        spelling = Spelling.of(tokenizer)
        vocabulary = tokenizer.get_vocab()
        closing = thinking.of_bytes().closing
        self.opening = tokenizer.get_added_vocab().get(thinking.opening)
        """The token of the first mark, where it is one."""
        texts = {
            token: characters(spelling.bytes_of(token))
            for name, token in vocabulary.items()
            if _is_blank(name)
        }
        self.blanks = {token: len(text) for token, text in texts.items() if text and not text.strip(BLANKS)}
        """Bytes of each token of blanks."""
        ends = [token for name, token in vocabulary.items() if thinking.closing[-1] in name[:-1]]
        spelt = {token: characters(spelling.bytes_of(token)) for token in ends}
        self._beyond = {
            written: [token for token, text in spelt.items() if _goes_on(text, closing, written)]
            for written in range(len(closing))
        }
        self._closing = closing

    @classmethod
    def of(cls, tokenizer: Any, thinking: Thinking) -> "MarkTokens":
        """Those of a tokenizer and marks, which are found once."""
        made = _MARK_TOKENS.setdefault(tokenizer, {})
        marks = thinking.opening, thinking.closing
        if marks not in made:
            made[marks] = cls(tokenizer, thinking)
        return made[marks]

    def beyond(self, tail: str) -> list[int]:
        """Tokens that complete the last mark behind a tail and go on with text."""
        lengths = [n for n in range(len(self._closing)) if tail.endswith(self._closing[:n])]
        return [token for written in lengths for token in self._beyond[written]]


_MARK_TOKENS: WeakKeyDictionary[Any, dict[tuple[str, str], MarkTokens]] = WeakKeyDictionary()
"""By tokenizer and marks."""


def _is_blank(name: str) -> bool:
    """Whether a token may be one of blanks, by how vocabularies write them."""
    return not name.strip(BLANKS + "ĠĊĉč▁") or name in ("<0x20>", "<0x09>", "<0x0A>", "<0x0D>")


def _goes_on(text: str, closing: str, written: int) -> bool:
    """Whether a token's text completes a mark of which so much is written and has more than blanks behind it."""
    at = 0 if written else text.find(closing)
    rest = closing[written:]
    return at >= 0 and text.startswith(rest, at) and bool(text[at + len(rest) :].strip(BLANKS))


class State(NamedTuple):
    """At the end of a path. begin: position of the form's first token, where the answer is reached.  blanks: that may still come before it."""

    place: PhaseOfText
    begin: int
    blanks: int = 0


@dataclass(frozen=True)
class BehindThoughts:
    """A `params.ConstraintSource` that puts another behind the thoughts. stop_ids: that end an output."""

    form: ConstraintSource
    thinking: Thinking
    tokenizer: Any
    vocab_size: int
    stop_ids: Sequence[int]

    def constraint(self, prompt_length: int) -> "FormBehindThoughts":
        """Of one output."""
        return FormBehindThoughts(self, prompt_length)


class FormBehindThoughts:
    """A `params.Constraint` of one output. start: where that begins."""

    def __init__(self, source: BehindThoughts, start: int) -> None:
        self._source = source
        self._start = start
        self._thinking = source.thinking.of_bytes()
        self._spelling = Spelling.of(source.tokenizer)
        self._marks = MarkTokens.of(source.tokenizer, source.thinking)
        self._forms = dict[int, Constraint]()
        """By the position where they begin."""
        self._is_free = False
        """Whether the form lets anything follow at first."""
        self._read = list[int]()
        self._state: State | None = None

    def _first(self, prompt: Sequence[int]) -> State:
        """A model that is not known to think answers at once, unless its form leaves it the marks."""
        thinking = self._thinking
        self._is_free = bool(self._form(self._start).allowed(prompt, prompt[-1:], [-1]).all())
        place = (
            thinking.begin()
            if thinking.opened or thinking.offered or self._is_free
            else PhaseOfText("answer")
        )
        return State(place, self._start)

    def _form(self, begin: int) -> Constraint:
        if begin not in self._forms:
            self._forms[begin] = self._source.form.constraint(begin)
        return self._forms[begin]

    def allowed(
        self, context: Sequence[int], tokens: Sequence[int], parents: Sequence[int]
    ) -> Bool[np.ndarray, "N V"]:
        """See `params.Constraint`."""
        end = self._follow(list(context))
        tree = TextTree(context, tokens, parents)
        forms = dict[tuple[int, int], np.ndarray]()
        states = list[State | None]()
        rows = np.ones((len(tree.tokens), self._source.vocab_size), np.bool_)
        for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
            above = states[parent] if node and parent >= 0 else None
            state = end if node == 0 else above and self._after(above, token, tree.positions[node])
            states.append(state)
            if state is not None and state.place.phase == "thoughts":
                self._keep_in_thoughts(rows[node], state.place)
            elif state is not None:
                rows[node] = self._row(tree, node, state, forms)
        return rows

    def _row(
        self, tree: TextTree, node: int, state: State, forms: dict[tuple[int, int], np.ndarray]
    ) -> np.ndarray:
        """What may follow where the form has begun, or may. forms: rows of those that were asked for, by where they begin."""
        key = state.begin, tree.above(node, state.begin - 1)
        if key not in forms:
            forms[key] = tree.rows(self._form(state.begin), key[1])
        row = forms[key][node].copy()
        if (
            state.place.phase == "start"
            and not state.place.tail
            and self._thinking.offered
            and self._marks.opening is not None
        ):
            row[self._marks.opening] = True
        row[[token for token, length in self._marks.blanks.items() if length <= state.blanks]] = True
        return row

    def _keep_in_thoughts(self, row: np.ndarray, place: PhaseOfText) -> None:
        if not self._is_free:
            row[list(self._source.stop_ids)] = False
            row[self._marks.beyond(place.tail)] = False

    def _follow(self, context: list[int]) -> State:
        """Bring the state to the end of a text."""
        output = context[self._start :]
        state = self._state
        if state is None or output[: len(self._read)] != self._read:
            self._read, state = [], self._first(context[: self._start])
        for token in output[len(self._read) :]:
            state = self._after(state, token, self._start + len(self._read))
            self._read.append(token)
        self._state = state
        return state

    def _after(self, state: State, token: int, position: int) -> State:
        """Behind one more token, which is at a position."""
        if state.place.phase == "answer":
            blanks = self._marks.blanks.get(token, MOST_BLANKS + 1)
            return (
                State(state.place, position + 1, state.blanks - blanks)
                if blanks <= state.blanks
                else state._replace(blanks=0)
            )
        place = self._thinking.after(state.place, characters(self._spelling.bytes_of(token)))
        if state.place.phase == "thoughts" and place.phase == "answer":
            return State(place, position + 1, MOST_BLANKS)
        return State(place, self._start)


class Spent(NamedTuple):
    """At the end of a path. num_tokens: of the thoughts.  forced: those that have to follow."""

    place: PhaseOfText
    num_tokens: int = 0
    forced: tuple[int, ...] = ()


@dataclass(frozen=True)
class BudgetOfThoughts:
    """A `params.ConstraintSource`: thoughts have at most `thinking.budget` tokens, then its message and their last mark follow.

    The distribution behind the budget's last token has all its mass on the next token of these, for draft and target alike. form: that holds beside it.
    """

    form: ConstraintSource | None
    thinking: Thinking
    tokenizer: Any
    vocab_size: int

    def constraint(self, prompt_length: int) -> "BudgetedThoughts":
        """Of one output."""
        return BudgetedThoughts(self, prompt_length)


class BudgetedThoughts:
    """A `params.Constraint` of one output. start: where that begins."""

    def __init__(self, source: BudgetOfThoughts, start: int) -> None:
        self._source = source
        self._start = start
        self._thinking = source.thinking.of_bytes()
        self._spelling = Spelling.of(source.tokenizer)
        self._form = None if source.form is None else source.form.constraint(start)
        self._begin()

    def _begin(self) -> None:
        self._read = list[int]()
        self._state = self._spent(self._thinking.begin(), 0)

    def allowed(
        self, context: Sequence[int], tokens: Sequence[int], parents: Sequence[int]
    ) -> Bool[np.ndarray, "N V"]:
        """See `params.Constraint`."""
        self._follow(list(context[self._start :]))
        shape = len(tokens), self._source.vocab_size
        free = np.ones(shape, np.bool_)
        rows = free if self._form is None else self._form.allowed(context, tokens, parents)
        states = list[Spent | None]()
        for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
            above = states[parent] if node and parent >= 0 else None
            state = self._state if node == 0 else above and self._after(above, token)
            states.append(state)
            if state is not None and state.forced:
                rows[node] = False
                rows[node, state.forced[0]] = True
        return rows

    def _follow(self, output: list[int]) -> None:
        """Bring the state to the end of an output."""
        if output[: len(self._read)] != self._read:
            self._begin()
        for token in output[len(self._read) :]:
            self._state = self._after(self._state, token)
        self._read = output

    def _after(self, state: Spent, token: int) -> Spent:
        place = self._thinking.after(state.place, characters(self._spelling.bytes_of(token)))
        if place.phase != "thoughts":
            return Spent(place)
        if state.forced:
            return Spent(place, state.num_tokens, state.forced[1:] if token == state.forced[0] else ())
        count = state.num_tokens + 1 if state.place.phase == "thoughts" else 0
        return self._spent(place, count)

    def _spent(self, place: PhaseOfText, count: int) -> Spent:
        """With the tokens that have to follow where the budget is spent."""
        budget = self._source.thinking.budget
        if budget is None or place.phase != "thoughts" or count < budget:
            return Spent(place, count)
        return Spent(place, count, self._ending(place.tail))

    def _ending(self, tail: str) -> tuple[int, ...]:
        """The message and the last mark, of which the thoughts may end in a part."""
        thinking = self._source.thinking
        closing = self._thinking.closing
        written = next((n for n in range(len(closing) - 1, 0, -1) if tail.endswith(closing[:n])), 0)
        rest = closing[written:].encode("latin-1").decode(errors="ignore")
        text = thinking.message + thinking.closing if thinking.message else rest
        return tuple(token_ids(self._source.tokenizer, text))
