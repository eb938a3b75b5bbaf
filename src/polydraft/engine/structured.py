"""Outputs that follow a grammar: which tokens may come next, at every node of a drafted tree by the node's own path.

The law is the target's, over the tokens that may come next. Every law of `sampling` is, the draft's too where it is made a depth at a
time; so drafted tokens fit, and one that does not has no mass in the target's law: a rejected try like any other. A draft from text is
the same each time, so that what cannot be kept is pruned before it is scored (`pruned`); to prune a sampled token would bias the law.

Grammars are compiled and followed by llguidance (https://github.com/guidance-ai/llguidance).
"""

import json
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from jaxtyping import Bool

from polydraft.core import Draft, SamplingParams, SiblingLaw, TokenTree
from polydraft.errors import IncompatibleError, InvalidInputError
from polydraft.models.slots import common_length
from polydraft.params import Constraint, StructuredOutputs

__all__ = ["Grammar", "Grammars", "pruned"]

MOST_KEPT = 64
"""Compiled grammars that are kept for requests to come."""
WRITTEN: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""How JSON is written: as `json.dumps` does. Where blanks are free, a sampled text may go on in blanks for ever."""


class Grammar:
    """A `params.Constraint`: the tokens that keep one output within a grammar.

    matcher: of llguidance, at the beginning.  prompt_length: where the output begins.  stop_ids: that end it, allowed where the grammar may end.

    Example:
        >>> from polydraft.models import load, pair
        >>> tokenizer = load.load_tokenizer(str(pair.target_folder()))
        >>> a, b, c = (tokenizer(x)["input_ids"][0] for x in "abc")
        >>> grammars = Grammars(tokenizer, len(tokenizer), [0])
        >>> grammar = grammars.grammar(StructuredOutputs(regex="(a|b)c?"), prompt_length=1)
        >>> rows = grammar.allowed([5], [5, a, b], [-1, 0, -1])
        >>> rows[0, [a, b, c]].tolist(), rows[1, [a, c, 0]].tolist()
        ([True, True, False], [False, True, True])
    """

    def __init__(self, matcher: Any, vocab_size: int, prompt_length: int, stop_ids: Sequence[int]) -> None:
        self._matcher, self._start, self._stop_ids = matcher, prompt_length, list(stop_ids)
        self._vocab_size, self._bits = vocab_size, np.zeros(-(-vocab_size // 32), np.uint32)
        self._read: list[int] = []
        """Output that the matcher has read."""
        self._last: tuple[Any, Bool[np.ndarray, "N V"]] | None = None

    def allowed(self, context: Sequence[int], tokens: Sequence[int], parents: Sequence[int]) -> Bool[np.ndarray, "N V"]:
        """See `params.Constraint`. Behind the end of a text more of the same may follow: nothing else may, and something must.

        Raises:
            InvalidInputError: an output that the grammar does not have, or a grammar beyond the limits of what may be followed.
        """
        asked = len(context), list(context[self._start :]), list(tokens), list(parents)
        if self._last is not None and self._last[0] == asked:
            return self._last[1]
        rows = np.ones((len(tokens), self._vocab_size), np.bool_)
        if self._follow(asked[1]):
            self._visit(0, tokens, parents, rows)
        else:
            self._close(0, tokens, parents, rows)
        self._last = asked, rows
        return rows

    def _follow(self, output: list[int]) -> bool:
        """Bring the matcher to the end of an output; False where that is over."""
        same = len(self._read) if output[: len(self._read)] == self._read else common_length(self._read, output)
        if same < len(self._read):
            self._matcher.rollback(len(self._read) - same)
            del self._read[same:]
        for token in output[same:]:
            if token in self._stop_ids:
                return False
            if self._matcher.try_consume_tokens([token]) != 1:
                raise InvalidInputError(
                    f"token {token} follows {len(self._read)} others in an output of the grammar, which does not have it. {self._error()}"
                )
            self._read.append(token)
        return True

    def _error(self) -> str:
        return self._matcher.get_error() if self._matcher.is_error() else ""

    def _close(self, node: int, tokens: Sequence[int], parents: Sequence[int], rows: Bool[np.ndarray, "N V"]) -> None:
        """The rows of a node behind the end and of all below it that may be there."""
        rows[node] = False
        rows[node, self._stop_ids] = True
        for child in range(node + 1, len(tokens)):
            if parents[child] == node and tokens[child] in self._stop_ids:
                self._close(child, tokens, parents, rows)

    def _visit(self, node: int, tokens: Sequence[int], parents: Sequence[int], rows: Bool[np.ndarray, "N V"]) -> None:
        """The rows of a node, at which the matcher is, and of all below it that may be there."""
        self._bits[:] = 0
        self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        if self._matcher.is_error():
            raise InvalidInputError(f"the grammar of structured_outputs cannot be followed: {self._error()}. Make it simpler.")
        rows[node] = np.unpackbits(self._bits.view(np.uint8), bitorder="little")[: self._vocab_size]
        for child in range(node + 1, len(tokens)):
            token = tokens[child]
            if parents[child] != node or not rows[node, token]:
                continue
            if token in self._stop_ids:
                self._close(child, tokens, parents, rows)
            elif self._matcher.try_consume_tokens([token]) == 1:
                self._visit(child, tokens, parents, rows)
                self._matcher.rollback(1)


class Grammars:
    """Grammars over one tokenizer, compiled once; from any thread. stop_ids: that end a text.

    Raises:
        IncompatibleError: a tokenizer that is none of the `tokenizers` library, no end of text, or llguidance is not installed.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, stop_ids: Sequence[int]) -> None:
        try:
            from llguidance.hf import from_tokenizer
        except ImportError as error:
            raise IncompatibleError(
                "structured_outputs need llguidance, which is not installed; install the extra: pip install 'polydraft[structured]'."
            ) from error
        if getattr(tokenizer, "backend_tokenizer", None) is None or not stop_ids:
            raise IncompatibleError(
                "structured_outputs need a tokenizer of the `tokenizers` library and a token that ends a text; this engine lacks one of them."
            )
        self._tokenizer = from_tokenizer(tokenizer, n_vocab=vocab_size, eos_token=list(stop_ids))
        self._vocab_size, self._stop_ids = vocab_size, tuple(stop_ids)
        self._compiled: dict[str, Any] = {}
        self._lock = threading.Lock()

    def grammar(self, wanted: StructuredOutputs, prompt_length: int) -> Grammar:
        """Of one output.

        Raises:
            InvalidInputError: a schema, an expression or a grammar that is wrong, or asks for what llguidance does not have.
        """
        written = _written(wanted)
        with self._lock:
            matcher = self._compiled.get(written) or self._compile(wanted, written)
            return Grammar(matcher.deep_copy(), self._vocab_size, prompt_length, self._stop_ids)

    def _compile(self, wanted: StructuredOutputs, written: str) -> Any:
        from llguidance import LLMatcher

        said = LLMatcher.validate_grammar(written, self._tokenizer)
        matcher = None if said else LLMatcher(self._tokenizer, written, log_level=0)
        if matcher is None or matcher.is_error():
            said = said or (matcher.get_error() if matcher else "")
            raise InvalidInputError(
                f"structured_outputs.{wanted.kind} was given, which cannot be followed: {' '.join(said.split())[:300]}. Change it."
            )
        if len(self._compiled) >= MOST_KEPT:
            del self._compiled[next(iter(self._compiled))]
        self._compiled[written] = matcher
        return matcher


def _written(wanted: StructuredOutputs) -> str:
    """As llguidance takes it.

    Raises:
        InvalidInputError: a schema that is no JSON object.
    """
    from llguidance import LLMatcher

    if wanted.regex is not None:
        return LLMatcher.grammar_from_regex(wanted.regex)
    if wanted.grammar is not None:
        return LLMatcher.grammar_from_lark(wanted.grammar)
    if wanted.choice is not None:
        return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(text) for text in wanted.choice))
    schema: Any = {"type": "object"} if wanted.json_object else wanted.json
    try:
        given = json.loads(schema) if isinstance(schema, str) else json.loads(json.dumps(schema))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidInputError(f"structured_outputs.json was given, which is no JSON: {error}. Expected a schema.") from error
    if not isinstance(given, dict):
        raise InvalidInputError(f"structured_outputs.json={given!r} was given; expected a schema, such as {{'type': 'object'}}.")
    return LLMatcher.grammar_from_json_schema(json.dumps(given), overrides=WRITTEN)


def pruned(draft: Draft, contexts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> Draft:
    """A draft from text without the nodes that constraints do not allow, and what hangs on them; any other as it is."""
    bound = [(b, p.structured_outputs) for b, p in enumerate(params) if isinstance(p.structured_outputs, Constraint)]
    if draft.law is not SiblingLaw.POINT_MASS or not bound or draft.tree.num_nodes == 1:
        return draft
    tokens, parents = (x.copy() for x in draft.tree.host)
    for b, constraint in bound:
        rows = constraint.allowed(contexts[b], tokens[b].tolist(), parents[b].tolist())
        place = {0: 0}
        for n in range(1, len(parents[b])):
            above = int(parents[b, n])
            if above in place and rows[above, tokens[b, n]]:
                place[n] = len(place)
        kept = list(place)
        tokens[b], parents[b] = (
            np.pad(tokens[b, kept], (0, len(tokens[b]) - len(kept))),
            np.pad([place.get(int(p), -1) for p in parents[b, kept]], (0, len(tokens[b]) - len(kept)), constant_values=-1),
        )
    return replace(draft, tree=TokenTree.of(tokens, parents))
