"""What answers that may call tools are held to: nothing before a call begins, then the grammar of the call, and nothing again behind it.

So every token is allowed in a text, control tokens of the model's own format too, unless a call has to be made: then the grammar is there from the first.
A tool's arguments follow its schema at every drafted token. Agents have up to hundreds of tools, of which an answer calls few: a grammar grows with
the names that are written, and the others are heads of calls alone. What may follow a node of a tree is decided by its own path, so it depends on no draft.
"""

import json
import logging
import re
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from time import perf_counter
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Bool

from polydraft.core.params import Constraint, ConstraintSource, StructuredOutputs
from polydraft.engine.thoughts import TextTree
from polydraft.errors import GrammarError, InvalidInputError
from polydraft.models.tokens.spelling import Spelling
from polydraft.server.formats.form import Format
from polydraft.server.formats.grammar import CallWriting
from polydraft.server.formats.named import HERMES

log = logging.getLogger("polydraft.server")
WORD = re.compile(rb"[a-zA-Z0-9_.-]{1,256}(?=[^a-zA-Z0-9_.-])")
"""What may end with the name of a tool."""
BARE = re.compile(rb'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:')
"""What begins a call without marks."""
WINDOW = 400
"""Bytes before a token with which it may complete a name, or the beginning of a call."""
HEAVY_SECONDS = 0.1
"""Of compiling a schema, beyond which that is done before the request runs, and not while others wait for its step."""
Compile = Callable[[StructuredOutputs], ConstraintSource]


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
        self._compiled = compiled
        self._lock = Lock()
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
        start = perf_counter()
        refusal = None
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

    compiled: makes a grammar.  writing: what answers may be.  numbers: of the tools by name.  spelling: what tokens stand for.
    stop_ids: that end an output.  early: tools whose schemas are part of every grammar from the beginning.
    """

    compiled: Compile
    writing: CallWriting
    numbers: Mapping[str, int]
    spelling: Spelling
    vocab_size: int
    stop_ids: Sequence[int]
    early: frozenset[int] = frozenset()

    @classmethod
    def of(
        cls,
        functions: Sequence[Mapping[str, Any]],
        tokenizer: Any,
        compiled: Compile,
        *,
        vocab_size: int,
        stop_ids: Sequence[int],
        early: Collection[int] = (),
        calls: Format = HERMES,
        **options: Any,
    ) -> "CallSource":
        """Of tools; what it begins with is compiled. options: of `Writing`.

        Raises:
            InvalidInputError: it cannot be.
        """
        texts = calls.written_parts
        vocabulary = tokenizer.get_added_vocab().items()
        tokens = {mark: token for mark, token in vocabulary if any(mark in text for text in texts)}
        writing = CallWriting(functions, tokens=tokens, end=stop_ids[0], calls=calls, **options)
        compiled((writing.first if writing.has_form else writing.marked)(early))
        numbers = {function["name"]: number for number, function in enumerate(functions)}
        return cls(
            compiled, writing, numbers, Spelling.of(tokenizer), vocab_size, tuple(stop_ids), frozenset(early)
        )

    def constraint(self, prompt_length: int) -> "Calls":
        """Of one output."""
        return Calls(self, prompt_length)


class Section(NamedTuple):
    """A part of an output that follows a grammar. begin: position of its first token.  kind: of `Writing`.  tool: of a bare call."""

    begin: int
    kind: Literal["first", "marked", "bare"]
    tool: int | None = None


class Path(NamedTuple):
    """At the end of a path. pieces: bytes of its last tokens.  named: the tools that it names.  section: None where it is free.

    head: the first bytes of a section that begins the output.
    """

    pieces: tuple[bytes, ...]
    named: frozenset[int]
    section: Section | None
    head: bytes = b""


class Calls:
    """A `params.Constraint`: an output is free until it begins a call, then within the grammar of the tools that it names, and free behind that."""

    def __init__(self, source: CallSource, prompt_length: int) -> None:
        self._source = source
        self._start = prompt_length
        self._grammars: dict[tuple[Section, frozenset[int]], Constraint | None] = {}
        """By the tools that were named; None where a schema is followed no more."""
        self._begin_mark = source.writing.calls.begin.encode()
        calls = source.writing.calls
        ends = (calls.closing.strip() or calls.tail.strip() or "}", "}", *calls.others)
        self._last_characters = frozenset(end.encode()[-1] for end in ends)
        self._read, self._end = list[int](), self._first()

    def _first(self) -> Path:
        section = Section(self._start, "first") if self._source.writing.has_form else None
        return Path((), self._source.early, section)

    def allowed(
        self, context: Sequence[int], tokens: Sequence[int], parents: Sequence[int]
    ) -> Bool[np.ndarray, "N V"]:
        """See `params.Constraint`."""
        self._follow(list(context))
        look = Look(TextTree(context, tokens, parents), {})
        rows = np.ones((len(tokens), self._source.vocab_size), np.bool_)
        paths: list[Path | None] = [self._end]
        for node in range(1, len(tokens)):
            above = paths[parents[node]] if parents[node] >= 0 else None
            paths.append(None if above is None else self._behind(above, look, node))
        for node, path in enumerate(paths):
            if path is not None and path.section is not None:
                rows[node] = self._rows(path, look, node)[node]
        return rows

    def _follow(self, context: list[int]) -> None:
        """Bring what is known to the end of a text."""
        output = context[self._start :]
        if output[: len(self._read)] != self._read:
            self._read, self._end = [], self._first()
        for position in range(self._start + len(self._read), len(context)):
            look = Look(TextTree(context[:position], [context[position - 1], context[position]], [-1, 0]), {})
            self._end = self._behind(self._end, look, 1)
        self._read = output

    def _behind(self, path: Path, look: "Look", node: int) -> Path:
        """A path with one more token, which is a node's."""
        piece = self._source.spelling.bytes_of(look.tree.tokens[node])
        pieces = _last((*path.pieces, piece))
        path = path._replace(pieces=pieces, named=self._named(path.named, pieces))
        if path.section is None:
            return path._replace(section=self._begun(pieces, look.tree.positions[node]))
        if path.section.kind == "first" and len(path.head) < 4 * len(self._begin_mark):
            path = path._replace(head=path.head + piece)
        if not self._last_characters.isdisjoint(piece) and self._is_over(path, look, node):
            text = b"".join(pieces)
            rest = text[max(text.rfind(last) for last in self._last_characters) + 1 :]
            return path._replace(pieces=(rest[-len(piece) :],) if rest else (), section=None)
        return path

    def _named(self, named: frozenset[int], pieces: tuple[bytes, ...]) -> frozenset[int]:
        words = {match[0].decode() for match in WORD.finditer(b"".join(pieces))}
        names = words | {word[at + 1 :] for word in words for at, letter in enumerate(word) if letter == "."}
        return named | {self._source.numbers[name] for name in names if name in self._source.numbers}

    def _begun(self, pieces: tuple[bytes, ...], position: int) -> Section | None:
        """The call that the last of these pieces begins for certain, the last one at a position."""
        text = b"".join(pieces)
        at = text.find(self._begin_mark) if self._begin_mark else -1
        kind = "marked"
        tool = None
        if at < 0 and (bare := next(self._bare_calls(text), None)) is not None:
            at = bare.start()
            kind = "bare"
            tool = self._source.numbers[json.loads(bare[1])]
        if at < 0:
            return None
        ends = np.cumsum([len(piece) for piece in pieces])
        num_before = int(np.searchsorted(ends, at, side="right"))
        return Section(position - len(pieces) + 1 + num_before, kind, tool)

    def _bare_calls(self, text: bytes) -> Iterator[re.Match[bytes]]:
        return (match for match in BARE.finditer(text) if _name(match[1]) in self._source.numbers)

    def _is_over(self, path: Path, look: "Look", node: int) -> bool:
        """Whether the calls of a section are complete, and the text is free again."""
        assert path.section is not None
        writing = self._source.writing
        kind = path.section.kind
        begun = kind != "first" or self._begin_mark in path.head or not writing.is_held
        goes_on = writing.parallel if kind == "bare" else writing.goes_on
        if not (begun and goes_on):
            return False
        return bool(self._rows(path, look, node)[node, self._source.stop_ids[0]])

    def _rows(self, path: Path, look: "Look", node: int) -> Bool[np.ndarray, "N V"]:
        """Of the grammar that a node's path follows."""
        section = path.section
        assert section is not None
        key = section, path.named, look.tree.above(node, section.begin - 1)
        if key not in look.rows:
            look.rows[key] = self._computed(section, path.named, look.tree, key[2])
        return look.rows[key]

    def _computed(
        self, section: Section, named: frozenset[int], tree: TextTree, anchor: int
    ) -> Bool[np.ndarray, "N V"]:
        try:
            if (section, named) not in self._grammars:
                self._grammars[section, named] = self._grammar(section, named)
            if (grammar := self._grammars[section, named]) is not None:
                return tree.rows(grammar, anchor)
        except GrammarError:
            raise
        except InvalidInputError as error:  # such as schemas that are too large together
            self._go_free(named, error)
            self._grammars[section, named] = None
        return np.ones((len(tree.tokens), self._source.vocab_size), np.bool_)

    def _go_free(self, named: frozenset[int], error: InvalidInputError) -> None:
        """Tell that the schemas of these tools are followed no more.

        Raises:
            GrammarError: a call is required, or one of them is strict.
        """
        writing = self._source.writing
        functions = [writing.functions[number] for number in sorted(named)]
        names = ", ".join(function["name"] for function in functions)[:300]
        reason = f"the schemas of the tools {names} cannot be followed in one answer: {error}"
        if writing.required or any(function.get("strict") for function in functions):
            raise GrammarError(reason) from error
        log.warning("%s", reason)

    def _grammar(self, section: Section, named: frozenset[int]) -> Constraint:
        writing = self._source.writing
        if section.tool is not None:
            wanted = writing.bare(section.tool)
        else:
            wanted = (writing.first if section.kind == "first" else writing.marked)(named)
        return self._source.compiled(wanted).constraint(section.begin)


class Look(NamedTuple):
    """One look at a drafted tree. rows: of the grammars that its nodes follow."""

    tree: TextTree
    rows: dict[Any, Bool[np.ndarray, "N V"]]


def _last(pieces: tuple[bytes, ...]) -> tuple[bytes, ...]:
    """The last pieces, of WINDOW bytes together or a little more."""
    size = sum(map(len, pieces))
    while len(pieces) > 1 and size - len(pieces[0]) >= WINDOW:
        size -= len(pieces[0])
        pieces = pieces[1:]
    return pieces


def _name(written: bytes) -> str | None:
    """A name in JSON; None where it is none."""
    try:
        return json.loads(written)
    except ValueError:
        return None
