"""Outputs that follow a grammar: which tokens may come next, at every node of a drafted tree by the node's own path.

The distribution is the target's, over the tokens that may come next. Every distribution of `sampling` is, the draft's too where it is made a depth at a
time; so drafted tokens fit, and one that does not has no mass in the target's distribution: a rejected try like any other. A draft from text is
the same each time, so that what cannot be accepted is pruned before it is scored (`pruned`); to prune a sampled token would bias the distribution.

Grammars are compiled and followed by llguidance (https://github.com/guidance-ai/llguidance).
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property, partial
from hashlib import sha256
from time import thread_time
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, UInt32

from polydraft.core import Draft, DraftSampling, SamplingParams, TokenTree
from polydraft.core.params import Constraint, StructuredOutputs
from polydraft.engine import grammar_bounds as bounds
from polydraft.engine.exact_outputs import ExactGrammar, Prefixes
from polydraft.engine.grammar_compile import (
    LIMITS,
    Followed,
    deep,
    matcher_of,
    named,
    refusal,
    said,
    written,
)
from polydraft.engine.grammar_tokenizer import GrammarTokenizer, Vocabulary
from polydraft.engine.grammar_trial import shared_trial
from polydraft.errors import GrammarError, IncompatibleError, InvalidInputError, first_line

MISSING = (
    "structured_outputs need llguidance, which is not installed. Try: pip install 'llguidance>=1.7,<1.8'."
)
CACHED_GRAMMARS = 32
"""Compiled grammars that stay for requests to come; to compile one takes a millisecond, a large one 0.3 s."""
CACHED_BYTES = 1 << 19
"""Of their texts together."""
CACHED_MEMORY = 512 << 20
"""That they took in their trials."""
CACHED_VERDICTS = 256
"""Of forms that were tried."""
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
        >>> from polydraft.models import load, pair
        >>> tokenizer = load.load_tokenizer(str(pair.target_folder()))
        >>> a, b, c = (tokenizer(x)["input_ids"][0] for x in "abc")
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


class _Verdict(NamedTuple):
    """Of a trial. text: of the grammar, as llguidance takes it.  refusal: why there is none.  memory, seconds: see `CompiledGrammar`."""

    text: str = ""
    refusal: str | None = None
    memory: int = 0
    seconds: float = 0.0


class Grammars:
    """Grammars over one tokenizer; from any thread, in which they are compiled. stop_ids: that end a text.

    A grammar is tried in another process first, and then compiled here (see `grammar_trial`). Those used last stay, of at most CACHED_BYTES of
    text and CACHED_MEMORY together, and verdicts of more; a lock guards these lists and is never held while one is compiled.

    Raises:
        IncompatibleError: a tokenizer that is none of the `tokenizers` library, no end of text, or llguidance is not installed.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, stop_ids: Sequence[int]) -> None:
        try:
            from llguidance import LLTokenizer
        except ImportError as error:
            raise IncompatibleError(MISSING) from error
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None or not stop_ids:
            raise IncompatibleError(
                "structured_outputs need a tokenizer of the `tokenizers` library and a token that ends a text; this engine lacks one of them."
            )
        whole = copy(backend)
        whole.no_padding()
        whole.no_truncation()
        spelling: Any = GrammarTokenizer(whole, vocab_size, stop_ids)
        self._vocabulary = Vocabulary.of(spelling.tokens, spelling.special_token_ids, stop_ids)
        shared_trial().begin(self._vocabulary)
        self._followed = Followed(
            LLTokenizer(spelling, eos_token=list(stop_ids)), vocab_size, tuple(stop_ids)
        )
        self._cached: OrderedDict[str, CompiledGrammar] = OrderedDict()
        self._verdicts: OrderedDict[str, _Verdict] = OrderedDict()
        self._lock = threading.Lock()

    def compiled(self, wanted: StructuredOutputs, *, store: bool = True) -> CompiledGrammar | ExactGrammar:
        """The grammar of a form. store: among those used last.

        Raises:
            InvalidInputError: as of `grammar`; `exact` for a form that has too many outputs.
        """
        grammar = self.grammar(wanted, store=store)
        return grammar.exact if wanted.exact else grammar

    def grammar(self, wanted: StructuredOutputs, *, store: bool = True) -> CompiledGrammar:
        """That of a form, whose tokens are masked one by one.

        Raises:
            InvalidInputError: a schema, an expression or a grammar that is wrong, too large, asks for what llguidance does not have, or takes more
                time or memory than a grammar may; one that crashes the trial.
        """
        kind = wanted.kind
        value = _value(wanted)
        name = sha256(f"{kind} {value}".encode()).hexdigest()
        with self._lock:
            if name in self._cached and not self._cached[name].is_worn:
                self._cached.move_to_end(name)
                return self._cached[name]
        verdict = self._verdict(name, kind, value)
        if verdict.refusal is not None:
            raise InvalidInputError(verdict.refusal)
        make = partial(deep, partial(matcher_of, self._followed, kind, verdict.text, LIMITS))
        size = len(verdict.text.encode()), self._followed.vocab_size, self._followed.stop_ids
        grammar = CompiledGrammar(make, *size, memory=verdict.memory, seconds=verdict.seconds)
        with self._lock:
            if store:
                self._cached[name] = grammar
            while self._cached and not self._fits():
                self._cached.popitem(last=False)
        return grammar

    def _fits(self) -> bool:
        grammars = self._cached.values()
        return (
            len(grammars) <= CACHED_GRAMMARS
            and sum(grammar.num_bytes for grammar in grammars) <= CACHED_BYTES
            and sum(grammar.memory for grammar in grammars) <= CACHED_MEMORY
        )

    def _verdict(self, name: str, kind: str, value: Any) -> _Verdict:
        """Of a form, tried once."""
        with self._lock:
            if (cached := self._verdicts.get(name)) is not None:
                self._verdicts.move_to_end(name)
                return cached
        outcome = shared_trial().outcome(self._vocabulary, kind, value, LIMITS)
        if outcome is None:
            return _Verdict(written(kind, value))
        reason = outcome.get("refusal") or (
            str(refusal(kind, outcome["failure"])) if "failure" in outcome else None
        )
        verdict = _Verdict(
            outcome.get("text", ""), reason, outcome.get("bytes", 0), outcome.get("seconds", 0.0)
        )
        with self._lock:
            self._verdicts[name] = verdict
            while len(self._verdicts) > CACHED_VERDICTS:
                self._verdicts.popitem(last=False)
        return verdict


def _value(wanted: StructuredOutputs) -> Any:
    """What a form is made of, as text or a list of texts.

    Raises:
        InvalidInputError: a schema that is no JSON; too much of it.
    """
    value = getattr(wanted, wanted.kind)
    if isinstance(value, (str, bool)):
        text = value
    elif wanted.kind == "choice":
        value = list(value)
        text = json.dumps(value)
    else:
        try:
            text = value = json.dumps(value)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidInputError(
                f"structured_outputs.json was given, which is no JSON: {error}. Expected a schema."
            ) from error
    try:
        bounds.check_text(str(text))
    except InvalidInputError as error:
        raise named(wanted.kind, error) from error
    return value


def lark_of(gbnf: str) -> str:
    """llama.cpp's notation of a grammar as Lark's, by llguidance, to whose lexer a character class with a repetition is a longest match.

    Raises:
        InvalidInputError: a grammar that is wrong, too large or too deep.
        IncompatibleError: llguidance is not installed.

    Example:
        >>> lark_of('root ::= "a" [0-9]+').split("\\n\\n")[1].strip()
        'start: "a" /[0-9]/+'
    """
    bounds.check_gbnf(gbnf)
    try:
        from llguidance.gbnf_to_lark import gbnf_to_lark
    except ImportError as error:
        raise IncompatibleError(MISSING) from error
    try:
        return gbnf_to_lark(gbnf)
    except Exception as error:
        raise InvalidInputError(
            f"a grammar was given that cannot be read: {first_line(error)[:300]}. Expected GBNF."
        ) from error


def pruned(draft: Draft, contexts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> Draft:
    """A draft from text without the nodes that constraints do not allow, and what hangs on them; any other as it is."""
    forms = [(b, p.structured_outputs) for b, p in enumerate(params) if p.structured_outputs is not None]
    bound = [(b, form) for b, form in forms if isinstance(form, Constraint)]
    if draft.sampling is not DraftSampling.POINT_MASS or not bound or draft.tree.num_nodes == 1:
        return draft
    tokens, parents = (x.copy() for x in draft.tree.host)
    confidence = None if draft.confidence is None else draft.confidence.copy()
    for b, constraint in bound:
        rows = constraint.allowed(contexts[b], tokens[b].tolist(), parents[b].tolist())
        place = {0: 0}
        for n in range(1, len(parents[b])):
            above = int(parents[b, n])
            if above in place and rows[above, tokens[b, n]]:
                place[n] = len(place)
        allowed_nodes = list(place)
        tokens[b], parents[b] = (
            np.pad(tokens[b, allowed_nodes], (0, len(tokens[b]) - len(allowed_nodes))),
            np.pad(
                [place.get(int(p), -1) for p in parents[b, allowed_nodes]],
                (0, len(tokens[b]) - len(allowed_nodes)),
                constant_values=-1,
            ),
        )
        if confidence is not None:
            confidence[b, : len(allowed_nodes)] = confidence[b, allowed_nodes]
    return replace(draft, tree=TokenTree.of(tokens, parents), confidence=confidence)
