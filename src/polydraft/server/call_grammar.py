"""The grammar of answers that may call tools, which grows with the answer: a tool's schema is part of it once the tool's name is written.

A tool's arguments follow its schema at every drafted token. Agents have up to hundreds of tools, of which an answer calls few; the others are
heads of calls alone. What may follow a node of a tree is decided by the names on its own path, so it depends on no draft.
"""

import json
import logging
import re
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool

from polydraft.core.params import Constraint, ConstraintSource, StructuredOutputs
from polydraft.engine.json_schema import exact
from polydraft.engine.structured import WRITTEN
from polydraft.errors import GrammarError, InvalidInputError
from polydraft.models.tokens.spelling import Spelling
from polydraft.server.tools import HERMES, CallFormat

__all__ = ["CallSource", "SchemaVerdict", "Schemas", "call_grammar"]

log = logging.getLogger("polydraft.server")
NAMED = re.compile(rb'"(?=([a-zA-Z0-9_.-]{1,256})")|(?<![a-zA-Z0-9_.-])([a-zA-Z0-9_.-]{1,256})(?=\[ARGS\])')
"""Where an output may have the name of a tool."""
WINDOW = 272
"""Bytes before a token with which it may complete a name."""
HEAVY_SECONDS = 0.1
"""Of compiling a schema, beyond which that is done before the request runs, and not while others wait for its step."""
Compile = Callable[[StructuredOutputs], ConstraintSource]


def call_grammar(
    functions: Sequence[Mapping[str, Any]],
    tokenizer: Any,
    *,
    required: bool,
    parallel: bool,
    text: StructuredOutputs | None = None,
    calls: CallFormat = HERMES,
    named: Collection[int] | None = None,
) -> StructuredOutputs:
    """What an answer with tools may be: text or calls, whose arguments follow the schemas; required: calls alone.

    functions: those that may be called, each with "name" and "parameters".  parallel: several calls are allowed.
    text: the form of an answer that is none of calls, a JSON schema.  calls: how they are written.
    named: those whose schemas are part of it, by number; default all. A call of another one ends where its arguments begin.
    """
    named = range(len(functions)) if named is None else named
    tokens = {mark: token for mark, token in tokenizer.get_added_vocab().items() if mark in calls.marks}
    arguments = [f"%json {json.dumps(_schema(f.get('parameters')))}" if i in named else '"{"' for i, f in enumerate(functions)]
    heads = [_terms(calls.call_head(function["name"]), tokens) for function in functions]
    rules = [f"f{i}: {head} {arguments[i]} {_terms(calls.tail, tokens)}" for i, head in enumerate(heads)]
    rules += [f"call: {' | '.join(f'f{number}' for number in range(len(functions)))}", r"TEXT: /(.|\n)+/"]
    separator, closing = _terms(calls.separator, tokens), _terms(calls.closing, tokens)
    opening, marked = _terms(calls.opening, tokens), calls.written_head is not None
    reopened = f"TEXT? {opening}"
    if marked and calls.begin not in tokens:
        reopened = f"opened {_terms(calls.opening.removeprefix(calls.begin), tokens)}"
        rules.append(rf"opened[lazy]: /(.|\n)*/ {json.dumps(calls.begin)}")
    goes_on = parallel and marked
    several = f"({separator} call)*" if parallel and (calls.lists or not marked) else ""
    rules.append(f"calls: call {several} {closing} {'after?' if goes_on else ''}")
    if goes_on:  # behind a call a text may go on as it likes: one that may only end, or call again, calls for ever
        rules.append(f"after: TEXT | {reopened} calls")
    if required:
        start = f"start: {opening} calls"
    elif text is not None:
        start = f"start: {opening} calls | %json {json.dumps(_schema({'type': 'object'} if text.json_object else text.json))}"
    else:
        rules += [_bare(number, functions[number]) for number in sorted(named)]
        start = " | ".join(["start: TEXT?", *(f"b{number}" for number in sorted(named))])
        if marked:
            start += f" | {reopened} calls"
        else:
            start += f" | <[{tokens[calls.begin]}]> calls" if calls.begin in tokens else ""
    return StructuredOutputs(grammar="\n".join([start, *rules]))


def _terms(text: str, tokens: Mapping[str, int]) -> str:
    """A text as terms of a grammar, in which marks that are tokens stand for themselves.

    Example:
        >>> _terms("[A]\\nx", {"[A]": 7})
        '<[7]> "\\\\nx"'
    """
    pieces = re.split("(" + "|".join(map(re.escape, tokens)) + ")", text) if tokens else [text]
    return " ".join(f"<[{tokens[piece]}]>" if piece in tokens else json.dumps(piece) for piece in pieces if piece)


def _bare(number: int, function: Mapping[str, Any]) -> str:
    """Productions of a call without marks, behind any text."""
    name = re.escape(function["name"])
    opening = rf'/(.|\n)*\{{\s*"name"\s*:\s*"{name}"\s*,\s*"(arguments|parameters)"\s*:/'
    # a call without marks is written as the model likes
    schema = json.dumps(_schema(function.get("parameters")) | {"x-guidance": {"whitespace_pattern": r"[ \n]{0,40}"}})
    closing = r"/[ \n]{0,40}\}([ \n]{0,4}```)?\n?/"
    return f"o{number}[lazy]: {opening}\nb{number}: o{number} /[ \\n]{{0,40}}/ %json {schema} {closing}"


def _schema(schema: Any) -> dict[str, Any]:
    parsed = json.loads(schema) if isinstance(schema, str) else schema or {"properties": {}, "additionalProperties": False}
    return {**({"type": "object"} if "properties" in parsed or not parsed else {}), **exact(parsed), "x-guidance": WRITTEN}


class SchemaVerdict(NamedTuple):
    """refusal: why arguments cannot be held to a schema, or None.  seconds: that compiling it took."""

    refusal: str | None
    seconds: float


class Schemas:
    """Which schemas of tools can be followed; from any thread. compiled: makes a grammar.

    Example:
        >>> from polydraft import Engine
        >>> schemas = Schemas(Engine.embedded().compile_grammar)
        >>> [v.refusal is None for v in schemas.verdicts([{"type": "object"}, {"not": {}}])]
        [True, False]
    """

    def __init__(self, compiled: Compile) -> None:
        self._compiled, self._lock = compiled, Lock()
        self._known: OrderedDict[str, SchemaVerdict] = OrderedDict()

    def verdicts(self, schemas: Sequence[Mapping[str, Any] | None]) -> list[SchemaVerdict]:
        """One each; those that are not known yet are compiled."""
        return [self._verdict(schema or {"type": "object"}) for schema in schemas]

    def _verdict(self, schema: Mapping[str, Any]) -> SchemaVerdict:
        text = json.dumps(schema)
        with self._lock:
            if (cached := self._known.get(text)) is not None:
                self._known.move_to_end(text)
                return cached
        start, refusal = perf_counter(), None
        try:
            self._compiled(StructuredOutputs(json=text))
        except InvalidInputError as error:
            refusal = str(error)
        verdict = SchemaVerdict(refusal, perf_counter() - start)
        with self._lock:
            self._known[text] = verdict
            while len(self._known) > 4096:
                self._known.popitem(last=False)
        return verdict


@dataclass(frozen=True)
class CallSource:
    """A `params.ConstraintSource` of answers that may call tools.

    compiled: makes a grammar.  write: the form of an answer in which tools of these numbers were named, see `call_grammar`.
    numbers: of the tools by name.  spelling: what tokens stand for.  early: tools whose schemas are part of it from the beginning.
    """

    compiled: Compile
    write: Callable[[Collection[int]], StructuredOutputs]
    numbers: Mapping[str, int]
    spelling: Spelling
    vocab_size: int
    early: frozenset[int] = frozenset()

    @classmethod
    def of(
        cls,
        functions: Sequence[Mapping[str, Any]],
        tokenizer: Any,
        compiled: Compile,
        *,
        vocab_size: int,
        early: Collection[int] = (),
        **options: Any,
    ) -> "CallSource":
        """Of tools; what it begins with is compiled. options: of `call_grammar`.

        Raises:
            InvalidInputError: it cannot be.
        """

        def write(named: Collection[int]) -> StructuredOutputs:
            return call_grammar(functions, tokenizer, named=named, **options)

        numbers = {function["name"]: number for number, function in enumerate(functions)}
        compiled(write(early))
        return cls(compiled, write, numbers, Spelling.of(tokenizer), vocab_size, frozenset(early))

    def constraint(self, prompt_length: int) -> "Calls":
        """Of one output."""
        return Calls(self, prompt_length)


class Calls:
    """A `params.Constraint`: the tokens with which one output stays within the grammar of the tools that it names."""

    def __init__(self, source: CallSource, prompt_length: int) -> None:
        self._source, self._start = source, prompt_length
        self._grammars: dict[frozenset[int], Constraint | None] = {}
        """By the tools that were named; None where a schema is followed no more."""
        self._read, self._tail, self._named = list[int](), b"", source.early

    def allowed(self, context: Sequence[int], tokens: Sequence[int], parents: Sequence[int]) -> Bool[np.ndarray, "N V"]:
        """See `params.Constraint`."""
        self._follow(list(context[self._start :]))
        places: list[tuple[bytes, frozenset[int]] | None] = [(self._tail, self._named)]
        for token, parent in zip(tokens[1:], parents[1:], strict=True):
            above = places[parent] if parent >= 0 else None
            places.append(None if above is None else self._behind(*above, token))
        sets = [None if place is None else place[1] for place in places]
        rows_of = {named: self._rows(named, context, tokens, parents) for named in dict.fromkeys(sets) if named is not None}
        rows = rows_of[self._named]
        for node, named in enumerate(sets):
            if named is not None and named != self._named:
                rows[node] = rows_of[named][node]
        return rows

    def _follow(self, output: list[int]) -> None:
        if output[: len(self._read)] != self._read:
            self._read, self._tail, self._named = [], b"", self._source.early
        for token in output[len(self._read) :]:
            self._tail, self._named = self._behind(self._tail, self._named, token)
        self._read = output

    def _behind(self, tail: bytes, named: frozenset[int], token: int) -> tuple[bytes, frozenset[int]]:
        """The end of the text, and what it names, behind one more token."""
        piece = self._source.spelling.bytes_of(token)
        text = tail + piece
        if b'"' in piece or b"]" in piece:
            names = {(match[1] or match[2]).decode() for match in NAMED.finditer(text)}
            named = named | {self._source.numbers[name] for name in names if name in self._source.numbers}
        return text[-WINDOW:], named

    def _rows(
        self, named: frozenset[int], context: Sequence[int], tokens: Sequence[int], parents: Sequence[int]
    ) -> Bool[np.ndarray, "N V"]:
        source = self._source
        try:
            if named not in self._grammars:
                self._grammars[named] = source.compiled(source.write(named)).constraint(self._start)
            if (grammar := self._grammars[named]) is not None:
                return grammar.allowed(context, tokens, parents)
        except GrammarError:
            raise
        except InvalidInputError as error:  # such as a token that ends a name and begins arguments of another form
            log.warning("the schemas of %s are not followed in an answer: %s", sorted(named), error)
            self._grammars[named] = None
        return np.ones((len(tokens), source.vocab_size), np.bool_)
