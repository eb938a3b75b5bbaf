"""Chat templates: the Jinja program in a model's files that writes a conversation as the text which the model was trained on.

A template is code that someone else wrote, so it runs in Jinja's sandbox and sees plain JSON values only. The names that templates of
the Hugging Face hub expect are there: `messages`, `tools`, `documents`, `add_generation_prompt`, the special tokens, `raise_exception`,
`strftime_now` and a `tojson` that does not escape HTML.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any


def template_of(templates: str | Mapping[str, str] | None, *, tools: bool) -> str | None:
    """The one of a model's templates that writes a conversation: with tools that of their name, else the default; None where there is none.

    templates: one alone, or by name.

    Example:
        >>> template_of({"default": "a", "tool_use": "b"}, tools=True), template_of({"rag": "c", "default": "a"}, tools=True)
        ('b', 'a')
    """
    if templates is None or isinstance(templates, str):
        return templates
    names = (*(["tool_use"] if tools else []), "default", *templates)
    return next((templates[name] for name in names if name in templates), None)


def render(template: str, messages: Sequence[Mapping[str, Any]], **names: Any) -> str:
    """A conversation as text. names: what else the template sees; of JSON types, as the messages are.

    Raises:
        jinja2.TemplateError: the template is wrong, leaves the sandbox or refuses these messages.
        TypeError: a message that JSON cannot hold.

    Example:
        >>> render("{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}", [{"role": "user", "content": "Hi"}])
        'user: Hi'
    """
    plain = json.loads(json.dumps({**_defaults(), **names}))
    return _compiled(template).render(messages=json.loads(json.dumps(messages)), **plain)


def _defaults() -> dict[str, Any]:
    """What templates expect that nobody gives."""
    now = _now("%Y-%m-%d %H:%M:%S")
    return {"tools": None, "documents": None, "add_generation_prompt": False, "datetime": now}


@lru_cache(maxsize=8)
def _compiled(template: str) -> Any:
    from jinja2.sandbox import SandboxedEnvironment

    environment = SandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _generation()]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _raise, "strftime_now": _now}
    return environment.from_string(template)


@lru_cache(maxsize=1)
def _generation() -> Any:
    """`{% generation %}` marks what an assistant says, for training; here its content is rendered as it stands."""
    from jinja2 import nodes
    from jinja2.ext import Extension

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012, as Jinja reads it

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            return nodes.Scope(
                parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line
            )

    return Generation


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)
