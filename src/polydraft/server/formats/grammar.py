"""The grammar of calls by a format and the schemas of their tools, in the notation of llguidance."""

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from polydraft.core.params import StructuredOutputs
from polydraft.engine.grammar_compile import WRITTEN
from polydraft.engine.json_schema import exact
from polydraft.server.formats.form import SLOT, Format, as_json, filled, type_of
from polydraft.server.formats.named import HERMES
from polydraft.server.formats.values import is_text, properties_of, types_of

BOOLEAN = '("true" | "false" | "True" | "False")'
"""As templates write it that print values as Python does, too."""
SINGLE = r"/'([^'\\]|\\(.|\n)|'\s*[^\s',:)\]}\\])*'/"
"""A text of Python: a quote inside, which templates do not escape, ends nothing unless a value may end there."""
LIST = '", "'
IN_LINES = {"whitespace_pattern": r"[ \n]{0,40}"}
"""Of objects that are written over several lines."""
NUMBER = r"/-?[0-9]+(\.[0-9]+)?/"
IDENTIFIER = "/[a-zA-Z0-9_.-]{1,40}/"


class CallWriting(NamedTuple):
    """What answers with tools may be. functions: those that may be called, each with "name" and "parameters".  required: calls alone.

    parallel: several calls are allowed.  text: the form of an answer that is none of calls, a JSON schema.  calls: how they are written.
    tokens: of the marks that the vocabulary has.  end: the token that ends an answer.
    """

    functions: Sequence[Mapping[str, Any]]
    required: bool
    parallel: bool
    tokens: Mapping[str, int]
    end: int
    text: StructuredOutputs | None = None
    calls: Format = HERMES

    @property
    def has_form(self) -> bool:
        """Whether an answer is held to something from its first token on."""
        return self.is_held or bool(self.calls.preset)

    @property
    def is_held(self) -> bool:
        """Whether what is no call has a form, too, or may not be."""
        return self.required or self.text is not None

    @property
    def goes_on(self) -> bool:
        """Whether behind a call a text may go on as it likes: one that may only end, or call again, calls for ever."""
        return self.parallel and self.calls.begin in (self.calls.opening + self.calls.head)

    def first(self, named: Collection[int]) -> StructuredOutputs:
        """The grammar of an answer that has a form. named: tools whose schemas are part of it, by number; a call of another ends where its
        arguments begin."""
        form = self.calls
        lead = f"({self._terms(form.lead)})?" if form.lead else ""
        preset = form.preset if not form.opening and form.head.startswith(form.preset) else ""
        start = f"start: {lead} {self._terms(form.opening)} calls"
        if self.text is not None and not self.required:
            schema = {"type": "object"} if self.text.json_object else self.text.json
            start += f" | {lead} {self._terms(form.before_text)} %json {json.dumps(_schema(schema))}"
        elif not self.required:
            start += self._others(form.preset)
        return self._grammar(start, named, preset)

    def marked(self, named: Collection[int]) -> StructuredOutputs:
        """The grammar of calls whose mark stands in their first tokens, perhaps behind the end of a text."""
        form = self.calls
        begin = form.begin
        marks = [self._terms(begin)] if any(token in begin for token in self.tokens) else []
        fixed = form.opening + form.head
        end = fixed.index(begin) + len(begin) if begin in fixed else 0
        rest = form.opening[end:].strip() if end else ""
        cut = form.head[: max(end - len(form.opening), 0)]
        opened = f"{self._terms(rest)} BLANK?" if rest else ""
        begun = f"({opened} calls{self._others(begin)})"
        start = f"start: mark BLANK? {begun}\nmark: {' | '.join([*marks, 'spelt'])}"
        return self._grammar(
            rf"""{start}
spelt[lazy]: /(.|\n)*/ {json.dumps(begin)}
BLANK: /[ \n]{{1,8}}/""",
            named,
            cut,
        )

    def _others(self, begin: str) -> str:
        """What else than a call may follow a mark, and then a text: alternatives."""
        others = (other.removeprefix(begin) for other in self.calls.others if other.startswith(begin))
        return "".join(f" | {self._terms(other)} TEXT?" for other in others)

    def bare(self, number: int) -> StructuredOutputs:
        """The grammar of a call without marks of one tool, behind any text; it is written as the model likes."""
        function = self.functions[number]
        head = rf'\{{\s*"name"\s*:\s*"{re.escape(function["name"])}"\s*,\s*"(arguments|parameters)"\s*:'
        schema = json.dumps(_schema(function.get("parameters")) | {"x-guidance": IN_LINES})
        closing = r"/[ \n]{0,40}\}([ \n]{0,4}```)?\n?/"
        return StructuredOutputs(
            grammar=rf"""start: opened /[ \n]{{0,40}}/ %json {schema} {closing}
opened[lazy]: /(.|\n)*{head}/"""
        )

    def _grammar(self, start: str, named: Collection[int], cut: str) -> StructuredOutputs:
        """cut: what of the first head is written already."""
        form = self.calls
        several = self.parallel and form.parallel and (form.opening or not self.goes_on)
        more = f"({self._terms(form.separator)} call)*" if several else ""
        behind = "TEXT?" if self.goes_on else ""
        rules = [f"calls: first_call {more} {self._terms(form.closing)} {behind}", r"TEXT: /(.|\n)+/"]
        numbers = range(len(self.functions))
        rules.append(f"first_call: {' | '.join(f'first{number}' for number in numbers)}")
        if several:
            rules.append(f"call: {' | '.join(f'call{number}' for number in numbers)}")
        for number, function in enumerate(self.functions):
            head = filled(form.head, name=function["name"])
            rules.append(f"first{number}: {self._slots(head.removeprefix(cut))} body{number}")
            if several:
                rules.append(f"call{number}: {self._slots(head)} body{number}")
            if number in named:
                rules += self._body(number, function.get("parameters"))
            else:
                rules.append(f"body{number}: {self._begun()} <[{self.end}]>")
        return StructuredOutputs(grammar="\n".join([start, *rules]))

    def _slots(self, text: str) -> str:
        length = self.calls.id_length
        identifier = IDENTIFIER if length is None else f"/[a-zA-Z0-9]{{{length}}}/"
        slots = {"id": identifier, "index": "/[0-9]{1,3}/"}
        parts = SLOT.split(text)
        return " ".join(
            slots.get(part, "") if number % 2 else self._terms(part) for number, part in enumerate(parts)
        )

    def _body(self, number: int, parameters: Any) -> list[str]:
        """Rules of a call behind its head."""
        schema = _schema(parameters)
        rules = list[str]()
        arguments = Arguments(self.calls, self.tokens, f"v{number}", rules).of(schema)
        body = f"{arguments} {self._slots(self.calls.tail)}"
        tail = self.calls.tail.lstrip()
        if self.calls.parameter and tail != self.calls.tail and not schema.get("required"):
            body += f" | {self._slots(tail)}"  # of no arguments
        return [f"body{number}: {body}", *rules]

    def _terms(self, text: str) -> str:
        return terms(text, self.tokens)

    def _begun(self) -> str:
        """What stands in the place of arguments whose tool is not known to be named yet: what ends its name.

        The end of the answer, which is part of no other token, follows it: a token that completes a head goes no further.
        """
        form = self.calls
        if form.coding in ("json", "keyed"):
            return '"{"'
        if form.parameter is None or not form.head.endswith("{name}"):
            return '""'
        behind = (SLOT.split(form.parameter.opening)[0], form.tail)
        return f"({' | '.join(self._terms(text.lstrip()) for text in behind)})"


class Arguments:
    """Rules of one tool's arguments by the coding of a format. name: that rules' names begin with.  rules: to which more are added."""

    def __init__(self, form: Format, tokens: Mapping[str, int], name: str, rules: list[str]) -> None:
        self._form = form
        self._tokens = tokens
        self._name = name
        self._rules = rules
        self._defs: Mapping[str, Any] = {}

    def of(self, schema: Mapping[str, Any]) -> str:
        """Terms of arguments."""
        self._defs = schema
        if self._form.coding == "json":
            in_lines = "\n" in self._form.head.partition("{")[2]
            return f"%json {json.dumps({**schema, **({'x-guidance': IN_LINES} if in_lines else {})})}"
        if self._form.coding == "keyed":
            return self._keyed_object(schema, 0)
        separator = {"python": '", "', "nested": ""}.get(self._form.coding)
        if separator is None:
            assert self._form.parameter is not None
            separator = self._terms(self._form.parameter.separator)
        return self._listed(list(self._fields(schema, 0)), separator)

    def _rule(self, terms: str, options: str = "") -> str:
        name = f"{self._name}_{len(self._rules)}"
        self._rules.append(f"{name}{options}: {terms}")
        return name

    def _fields(self, schema: Mapping[str, Any], depth: int) -> Iterator[tuple[str, bool]]:
        """Terms of each parameter, and whether it is required."""
        required = schema.get("required", ())
        for key, inner in properties_of(schema).items():
            yield self._field(key, inner if isinstance(inner, Mapping) else {}, depth), key in required

    def _listed(self, fields: Sequence[tuple[str, bool]], separator: str) -> str:
        """Fields in their order, those that are not required perhaps, with a separator between."""
        if not fields:
            return '""'
        behind = '""'
        started = '""'
        for terms_of_field, required in reversed(fields):
            field = self._rule(terms_of_field)
            with_more = self._rule(
                f"{separator} {field} {behind}" if required else f"({separator} {field})? {behind}"
            )
            begins = f"{field} {behind}"
            started = self._rule(begins if required else f"{begins} | {started}")
            behind = with_more
        return started

    def _field(self, key: str, schema: Mapping[str, Any], depth: int) -> str:
        form = self._form
        if form.coding == "python":
            return f"{json.dumps(key + '=')} {self._literal(schema)}"
        if form.coding == "nested":
            return self._element(key, schema, depth)
        parameter = form.parameter
        assert parameter is not None
        kinds = types_of(schema)
        texts = is_text(schema)
        options = list[str]()
        if "string" in kinds or not kinds:
            constants = schema.get("enum") if texts else None
            value = (
                self._choice(constants, parameter.closing)
                if constants
                else self._text(parameter.closing, parameter.quoted)
            )
            options.append(self._opened(key, "string", value))
        if not texts:
            kind = next(iter(sorted(kinds - {"string"})), "object")
            shown = "number" if kind == "integer" else kind
            json_value = f"%json {json.dumps(self._with_definitions(schema))}"
            is_boolean = kinds == {"boolean"} and schema.keys().isdisjoint(("enum", "const"))
            written = BOOLEAN if is_boolean else self._literal(schema) if parameter.python else json_value
            value = f"{written} {self._terms(parameter.closing)}"
            options.append(self._opened(key, shown, value))
        return " | ".join(options)

    def _opened(self, key: str, kind: str, value: str) -> str:
        assert self._form.parameter is not None
        text = json.dumps(kind == "string")
        opening = filled(self._form.parameter.opening, key=key, type=kind, string=text)
        return f"{self._terms(opening)} {value}"

    def _with_definitions(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        shared = {name: self._defs[name] for name in ("$defs", "definitions") if name in self._defs}
        return {**shared, **schema, "x-guidance": WRITTEN}

    def _choice(self, constants: Sequence[Any], closing: str) -> str:
        values = [json.dumps(value if isinstance(value, str) else as_json(value)) for value in constants]
        return f"({' | '.join(values)}) {self._terms(closing)}"

    def _text(self, closing: str, quoted: bool = False) -> str:
        """A text up to the mark behind it."""
        if quoted:
            return f'%json {{"type": "string"}} {self._terms(closing)}'
        token = next((name for name in self._tokens if closing.strip().startswith(name)), None)
        spelt = self._rule(rf"/(.|\n)*/ {json.dumps(closing)}", "[lazy]")
        if token is None:
            return spelt
        return f"({spelt} | {self._rule(f'/(.|{chr(92)}n)*/')} {self._terms(closing.lstrip())})"  # blanks are the text's

    def _literal(self, schema: Any, depth: int = 0) -> str:
        """A value as Python or JSON writes it."""
        json_value = f"%json {json.dumps(self._with_definitions(schema))}"
        kinds = types_of(schema)
        if is_text(schema):
            constants = schema.get("enum")
            quoted = " | ".join(json.dumps(f"'{value}'") for value in constants) if constants else SINGLE
            return f"({quoted} | {json_value})"
        if "enum" in schema or "const" in schema or depth > 8:
            return json_value
        if kinds == {"boolean"}:
            return BOOLEAN
        if kinds == {"array"}:
            item = self._rule(self._literal(schema.get("items", {}), depth + 1))
            return f'({json_value} | "[" ({item} ("," " "? {item})*)? "]")'
        if kinds == {"object"} and properties_of(schema):
            fields = [
                (
                    f"{json.dumps(repr(key) + ': ')} {self._literal(inner, depth + 1)}",
                    key in schema.get("required", ()),
                )
                for key, inner in properties_of(schema).items()
            ]
            return f'({json_value} | "{{" {self._listed(fields, LIST)} "}}")'
        if kinds <= {"integer", "number"} and kinds:
            return json_value
        return f"({json_value} | {self._any_literal()})"

    def _any_literal(self) -> str:
        """Some value of Python."""
        single = f'{SINGLE} | %json {{"type": "string"}} | {NUMBER} | {BOOLEAN} | "None" | "null"'
        return self._nested("python", single, key=f'{SINGLE} ": "', comma='"," " "?')

    def _nested(self, kind: str, single: str, *, key: str, comma: str) -> str:
        """A rule of values: single ones, lists of values, and values behind keys; written once for a call."""
        name = f"{self._name}_{kind}"
        if not any(rule.startswith(f"{name}:") for rule in self._rules):
            listed = f'"[" ({name} ({comma} {name})*)? "]"'
            keyed = f'"{{" ({key} {name} ({comma} {key} {name})*)? "}}"'
            self._rules.append(f"{name}: {single} | {listed} | {keyed}")
        return name

    def _keyed_object(self, schema: Mapping[str, Any], depth: int) -> str:
        """By the order of the alphabet, in which Gemma's template writes them."""
        fields = [
            (f"{json.dumps(key + ':')} {self._keyed(inner, depth + 1)}", key in schema.get("required", ()))
            for key, inner in sorted(properties_of(schema).items(), key=lambda item: item[0].lower())
        ]
        return f'"{{" {self._listed(fields, chr(34) + "," + chr(34))} "}}"'

    def _keyed(self, schema: Any, depth: int) -> str:
        """A value of Gemma's coding."""
        kinds = types_of(schema)
        quote = self._terms(self._form.quote)
        if "enum" in schema:
            return f"({' | '.join(self._keyed_constant(value) for value in schema['enum'])})"
        text = f"{quote} {self._text(self._form.quote)}"
        if kinds == {"string"}:
            return text
        if kinds == {"object"} and properties_of(schema) and depth < 8:
            return self._keyed_object(schema, depth)
        if kinds == {"array"} and depth < 8:
            item = self._rule(self._keyed(schema.get("items", {}), depth + 1))
            return f'"[" ({item} ("," {item})*)? "]"'
        if kinds and kinds <= {"integer", "number", "boolean", "null"}:
            return f"%json {json.dumps(self._with_definitions(schema))}"
        return f"({self._any_keyed(text)})"

    def _keyed_constant(self, value: Any) -> str:
        if type_of(value) != "string":
            return json.dumps(as_json(value))
        return f"{self._terms(self._form.quote)} {json.dumps(value)} {self._terms(self._form.quote)}"

    def _any_keyed(self, text: str) -> str:
        """Some value of Gemma's coding. text: what its texts are."""
        single = f'{text} | {NUMBER} | "true" | "false" | "null"'
        return self._nested("any", single, key='/[a-zA-Z0-9_-]+/ ":"', comma='","')

    def _element(self, key: str, schema: Mapping[str, Any], depth: int) -> str:
        """An element of nested ones."""
        prefix = self._form.prefix
        opening = self._terms(f"{prefix}<{key}>")
        closing = f"{prefix}</{key}>"
        kinds = types_of(schema)
        if kinds == {"object"} and properties_of(schema) and depth < 8:
            return (
                f"{opening} {self._listed(list(self._fields(schema, depth + 1)), '')} {self._terms(closing)}"
            )
        if kinds == {"array"} and depth < 8:
            item = self._rule(self._element("item", schema.get("items", {}), depth + 1))
            return f"{opening} {item}* {self._terms(closing)}"
        if kinds and "string" not in kinds and kinds.isdisjoint(("object", "array")):
            return f"{opening} %json {json.dumps(self._with_definitions(schema))} {self._terms(closing)}"
        constants = schema.get("enum")
        return f"{opening} {self._choice(constants, closing) if constants else self._text(closing)}"

    def _terms(self, text: str) -> str:
        return terms(text, self._tokens)


def terms(text: str, tokens: Mapping[str, int]) -> str:
    """A text as terms of a grammar, in which marks that are tokens stand for themselves.

    Blanks before a text are a term of their own: a lexer that looks for the longest term would take them for the beginning of that text alone.

    Example:
        >>> terms("[A]\\nx", {"[A]": 7})
        '<[7]> "\\\\n" "x"'
    """
    pieces = re.split("(" + "|".join(map(re.escape, tokens)) + ")", text) if tokens else [text]
    found = list[str]()
    for piece in pieces:
        if piece in tokens:
            found.append(f"<[{tokens[piece]}]>")
            continue
        text_behind = piece.lstrip()
        blanks = piece[: len(piece) - len(text_behind)]
        found += [json.dumps(part) for part in (blanks, text_behind) if part]
    return " ".join(found)


def _schema(schema: Any) -> dict[str, Any]:
    parsed = (
        json.loads(schema)
        if isinstance(schema, str)
        else schema or {"properties": {}, "additionalProperties": False}
    )
    return {
        **({"type": "object"} if "properties" in parsed or not parsed else {}),
        **exact(parsed),
        "x-guidance": WRITTEN,
    }
