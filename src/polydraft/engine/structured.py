"""Outputs that follow a grammar: which tokens may come next, at every node of a drafted tree by the node's own path.

The distribution is the target's, over the tokens that may come next. Every distribution of `sampling` is, the draft's too where it is made a depth at a
time; so drafted tokens fit, and one that does not has no mass in the target's distribution: a rejected try like any other. A draft from text is
the same each time, so that what cannot be accepted is pruned before it is scored (`pruned`); to prune a sampled token would bias the distribution.

Grammars are compiled and followed by llguidance (https://github.com/guidance-ai/llguidance).
"""

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from jaxtyping import Bool, UInt32

from polydraft.core import Draft, DraftSampling, SamplingParams, TokenTree
from polydraft.core.params import Constraint, StructuredOutputs
from polydraft.engine.grammar_tokenizer import GrammarTokenizer
from polydraft.engine.json_schema import exact
from polydraft.errors import GrammarError, IncompatibleError, InvalidInputError, first_line

__all__ = ["CompiledGrammar", "Grammar", "Grammars", "lark_of", "pruned"]

MISSING = "structured_outputs need llguidance, which is not installed. Try: pip install 'llguidance>=1.7,<1.8'."
GRAMMAR_BYTES = 1 << 17
"""Text of a grammar, at most."""
CACHED_GRAMMARS = 32
"""Compiled grammars that stay for requests to come; to compile one takes a millisecond, a large one 0.3 s."""
CACHED_BYTES = 1 << 19
"""Of their texts together."""
LIMITS: Any = {"max_grammar_size": 50_000, "max_lexer_states": 50_000, "verbose_errors": False}
"""Of one grammar in llguidance: symbols, of some 400 bytes each, and states, of some 100; messages without its state."""
REASONS = {"NoExtensionBias": "no text fits it", "NoExtension": "no text fits it", "ParserTooComplex": "it is too complex"}
"""Messages of llguidance that say nothing to others."""
WRITTEN: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""How JSON is written: as `json.dumps` does. Where blanks are free, a sampled text may go on in blanks for ever."""


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
        self._source, self._start = source, prompt_length
        self._stop_ids, self._vocab_size = list(source.stop_ids), source.vocab_size
        self._alone = False
        """Whether the states of its grammar, of which there are only so many, are its own already: outputs share them at first."""
        self._begin()

    def _begin(self) -> None:
        self._matcher, self._read = self._source.matcher.deep_copy(), list[int]()
        """At the end of the output that it has read."""
        self._masks, self._ahead = dict[tuple[int, ...], UInt32[np.ndarray, " W"]](), dict[tuple[int, ...], Any]()
        """By drafted path behind that output: one bit for each token that may follow, and a matcher that is there."""

    def allowed(self, context: Sequence[int], tokens: Sequence[int], parents: Sequence[int]) -> Bool[np.ndarray, "N V"]:
        """See `params.Constraint`. Behind the end of a text more of the same may follow: nothing else may, and something must.

        Raises:
            GrammarError: an output that the grammar does not have, or a grammar beyond the limits of what may be followed.
        """
        tree = list(context[self._start :]), list(tokens), list(parents)
        try:
            return self._rows(*tree)
        except GrammarError:
            if self._alone:
                raise
            self._alone = True
            self._source.renew()
            self._begin()
            return self._rows(*tree)

    def _rows(self, output: list[int], tokens: list[int], parents: list[int]) -> Bool[np.ndarray, "N V"]:
        rows, is_over = np.empty((len(tokens), self._vocab_size), np.bool_), not self._follow(output)
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
                rows[node] = np.unpackbits(self._mask(paths[node]).view(np.uint8), bitorder="little")[: self._vocab_size]
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
            self._masks.clear()
            self._ahead.clear()
        return True

    def _mask(self, path: tuple[int, ...]) -> UInt32[np.ndarray, " W"]:
        """What may follow a path behind the output, each token of which may be there."""
        if path not in self._masks:
            self._masks[path] = self._computed(self._matched(path))
        return self._masks[path]

    def _matched(self, path: tuple[int, ...]) -> Any:
        """A matcher at the end of a path: its parent's where no sibling has taken that, else a copy of the output's own, which goes all the way.

        Never one that was rolled back: llguidance has the last mask of the place where it was computed, and a sibling may get it there.
        """
        if not path:
            return self._matcher
        matcher, unread = self._ahead.pop(path[:-1], None), path[-1:]
        if matcher is None:
            matcher, unread = self._matcher.deep_copy(), path
        if not self._reads(matcher, unread):
            raise self._failure(matcher)
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
        matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        if matcher.is_error():
            raise self._failure(matcher)
        return bits

    def _failure(self, matcher: Any) -> GrammarError:
        return GrammarError(
            f"structured_outputs cannot be followed beyond {len(self._read)} tokens of an output: {_said(matcher)}. Make them simpler."
        )


@dataclass
class CompiledGrammar:
    """A `params.ConstraintSource`: one grammar, ready for any number of outputs.

    make: a matcher of llguidance, at the beginning.  matcher: one of those; outputs follow copies of it, which share its states.
    num_bytes: of its text.  stop_ids: that end an output, allowed where the grammar may end.
    """

    make: Callable[[], Any]
    num_bytes: int
    vocab_size: int
    stop_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        self.matcher = self.make()

    def renew(self) -> None:
        """Its matcher without the states that outputs have added."""
        self.matcher = self.make()

    def constraint(self, prompt_length: int) -> Grammar:
        """Of one output, which begins behind so many tokens."""
        return Grammar(self, prompt_length)


class Grammars:
    """Grammars over one tokenizer; from any thread, in which they are compiled. stop_ids: that end a text.

    Those used last stay, of at most CACHED_BYTES of text together; a lock guards this list and is never held while one is compiled.

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
        self._tokenizer = LLTokenizer(spelling, eos_token=list(stop_ids))
        self._vocab_size, self._stop_ids = vocab_size, tuple(stop_ids)
        self._cached: OrderedDict[str, CompiledGrammar] = OrderedDict()
        self._lock = threading.Lock()

    def compiled(self, wanted: StructuredOutputs, *, store: bool = True) -> CompiledGrammar:
        """The grammar of a form. store: among those used last.

        Raises:
            InvalidInputError: a schema, an expression or a grammar that is wrong, too large, or asks for what llguidance does not have.
        """
        grammar_text = _written(wanted)
        num_bytes = len(grammar_text.encode())
        if num_bytes > GRAMMAR_BYTES:
            raise InvalidInputError(
                f"structured_outputs.{wanted.kind} was given, which makes a grammar of {num_bytes} bytes; "
                f"expected at most {GRAMMAR_BYTES}. Make it smaller."
            )
        with self._lock:
            if grammar_text in self._cached:
                self._cached.move_to_end(grammar_text)
                return self._cached[grammar_text]
        make = partial(self._compile, wanted.kind, grammar_text)
        grammar = CompiledGrammar(make, num_bytes, self._vocab_size, self._stop_ids)
        with self._lock:
            if store:
                self._cached[grammar_text] = grammar
            while len(self._cached) > CACHED_GRAMMARS or sum(g.num_bytes for g in self._cached.values()) > CACHED_BYTES:
                self._cached.popitem(last=False)
        return grammar

    def _compile(self, kind: str, grammar_text: str) -> Any:
        """A matcher with the mask of its beginning, where some mistakes show first, that can take a step."""
        from llguidance import LLMatcher, LLParserLimits

        matcher = LLMatcher(self._tokenizer, grammar_text, log_level=0, limits=LLParserLimits(**LIMITS))
        bits = np.zeros(-(-self._vocab_size // 32), np.uint32)
        if not matcher.is_error():
            matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        if not matcher.is_error():
            allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")[: self._vocab_size])
            step = next((int(token) for token in allowed if token not in self._stop_ids), None)
            trial = matcher.deep_copy()
            if not len(allowed) or (step is not None and trial.try_consume_tokens([step]) != 1):
                raise _refusal(kind, _said(trial))
        if matcher.is_error():
            raise _refusal(kind, _said(matcher))
        return matcher


def lark_of(gbnf: str) -> str:
    """llama.cpp's notation of a grammar as Lark's, by llguidance, to whose lexer a character class with a repetition is a longest match.

    Raises:
        InvalidInputError: a grammar that is wrong.
        IncompatibleError: llguidance is not installed.

    Example:
        >>> lark_of('root ::= "a" [0-9]+').split("\\n\\n")[1].strip()
        'start: "a" /[0-9]/+'
    """
    try:
        from llguidance.gbnf_to_lark import gbnf_to_lark
    except ImportError as error:
        raise IncompatibleError(MISSING) from error
    try:
        return gbnf_to_lark(gbnf)
    except Exception as error:
        raise InvalidInputError(f"a grammar was given that cannot be read: {first_line(error)[:300]}. Expected GBNF.") from error


def _refusal(kind: str, reason: str) -> InvalidInputError:
    return InvalidInputError(f"structured_outputs.{kind} was given, which cannot be followed: {reason}. Change it.")


def _said(matcher: Any) -> str:
    """What is wrong, in a line without the state of the library."""
    message = " ".join(re.split(r"\n?<|\nstack backtrace", matcher.get_error() if matcher.is_error() else "")[0].split())
    return REASONS.get(message, message[:300].rstrip(".")) or "it is too complex"


def _written(wanted: StructuredOutputs) -> str:
    """As llguidance takes it.

    Raises:
        InvalidInputError: a schema that is no JSON object, or is nested too deeply.
    """
    from llguidance import LLMatcher

    if wanted.regex is not None:
        return LLMatcher.grammar_from_regex(wanted.regex)
    if wanted.grammar is not None:
        return LLMatcher.grammar_from_lark(wanted.grammar)
    if wanted.choice is not None:  # as one terminal: a rule has at most 2,000 alternatives
        return LLMatcher.grammar_from_lark("start: CHOICE\nCHOICE: " + " | ".join(json.dumps(text) for text in wanted.choice))
    schema: Any = {"type": "object"} if wanted.json_object else wanted.json
    try:
        parsed = json.loads(schema) if isinstance(schema, str) else json.loads(json.dumps(schema))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidInputError(f"structured_outputs.json was given, which is no JSON: {error}. Expected a schema.") from error
    if not isinstance(parsed, dict):
        raise InvalidInputError(f"structured_outputs.json={parsed!r} was given; expected a schema, such as {{'type': 'object'}}.")
    try:
        return LLMatcher.grammar_from_json_schema(json.dumps(exact(parsed)), overrides=WRITTEN)
    except (ValueError, RecursionError) as error:
        raise _refusal(wanted.kind, first_line(error)) from error


def pruned(draft: Draft, contexts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> Draft:
    """A draft from text without the nodes that constraints do not allow, and what hangs on them; any other as it is."""
    forms = [(b, p.structured_outputs) for b, p in enumerate(params) if p.structured_outputs is not None]
    bound = [(b, form) for b, form in forms if isinstance(form, Constraint)]
    if draft.sampling is not DraftSampling.POINT_MASS or not bound or draft.tree.num_nodes == 1:
        return draft
    tokens, parents = (x.copy() for x in draft.tree.host)
    confidence = None if draft.confidence is None else draft.confidence.clone()
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
