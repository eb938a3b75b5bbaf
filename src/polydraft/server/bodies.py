"""How bodies are read: known fields are checked, the rest is left out. What would change the answer and is not there is refused by name.

Clients send more than any one server knows, and more with every release: `fields` says what becomes of it. A name that is nearly one of ours is
taken for a slip.
"""

import logging
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import cache, lru_cache, partial
from typing import Annotated, Any, ClassVar, TypeVar, get_args

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import InitErrorDetails, PydanticCustomError
from typing_extensions import Self

from polydraft.server.fields import is_like_sampling, refusal, why_ignored

log = logging.getLogger("polydraft.server")
T = TypeVar("T")


@lru_cache(maxsize=1024)  # what was noted before is not noted again
def note(what: str) -> None:
    """Tell the log at debug level, once."""
    log.debug("%s is not used here", what)


class Body(BaseModel):
    """Fields that are null are as if they were not given; those that are not known are left out."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, ser_json_inf_nan="null")

    @model_validator(mode="wrap")
    @classmethod
    def _of_known_fields(cls, body: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if not isinstance(body, dict):
            return handler(body)
        parsed = handler({name: value for name, value in body.items() if value is not None})
        if parsed.model_config.get("extra") == "ignore":
            for name in body.keys() - cls._names():
                note(f"the field {str(name)[:64]!r} of {cls.__name__}")
        return parsed

    @classmethod
    @cache
    def _names(cls) -> frozenset[str]:
        """Of all fields that it reads."""
        return frozenset(
            name for field_name, field in cls.model_fields.items() for name in _given_names(field_name, field)
        )


def _given_names(name: str, field: FieldInfo) -> Sequence[str]:
    """By which clients may give a field."""
    other = field.validation_alias
    return (
        [str(choice) for choice in other.choices]
        if isinstance(other, AliasChoices)
        else [field.alias or name]
    )


def _unserved(value: Any) -> None:
    if value not in (None, False, "", [], {}):
        raise PydanticCustomError("unserved", "this would change the answer, and is not there. Leave it out.")


Unserved = Annotated[None, BeforeValidator(_unserved)]
"""A part of a message that would change the answer; values that ask for nothing are taken."""


class Requested(Body):
    """A request, or an object in it. group: what it is called in `fields`."""

    group: ClassVar[str] = ""

    @model_validator(mode="before")
    @classmethod
    def _without_others(cls, body: Any) -> Any:
        """Refuse what would change the answer and is not served, and what is meant for a field of ours."""
        if not isinstance(body, dict):
            return body
        unread = [str(name) for name in body if name not in cls._names()]
        problems = [(name, problem) for name in unread if (problem := cls._problem(name, body.get(name)))]
        if problems:
            details = [
                InitErrorDetails(
                    type=PydanticCustomError("unserved", "{reason}", {"reason": reason}),
                    loc=(name[:64],),
                    input=None,
                )
                for name, reason in problems
            ]
            raise ValidationError.from_exception_data(cls.__name__, details)
        return body

    @classmethod
    def _problem(cls, name: str, value: Any) -> str | None:
        """Why a field that is not read is refused."""
        refused = refusal(cls.group, name)
        if refused is not None:
            return refused.reason if refused.asks(value) else None
        if why_ignored(cls.group, name) is not None:
            return None
        if meant := get_close_matches(name[:64], cls._names(), 1, 0.9):  # misspelt
            return f"there is no such field; did you mean {meant[0]!r}?"
        if is_like_sampling(name) and value not in (None, False, "", [], {}):
            return "there is no such field, and it would change the answer by its name. Leave it out."
        return None


def also(*names: str) -> Any:
    """Other names of a field, as other servers have them; the first of them is ours."""
    return Field(validation_alias=AliasChoices(*names))


def _seed(value: Any) -> Any:
    """A whole number in the range of seeds; -1 draws one."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if value == -1:
        return None
    return value % 2**63 if isinstance(value, int) and not isinstance(value, bool) else value


def _stops(value: Any) -> Any:
    """Without empty ones."""
    if isinstance(value, list):
        return [stop for stop in value if stop != ""] or None
    return value if value != "" else None


Seed = Annotated[int | None, BeforeValidator(_seed)]
TopP = Annotated[
    float, AfterValidator(lambda value: value or 1e-9)
]  # top-p 0 leaves the most likely token, as this does
Stops = BeforeValidator(_stops)


PICTURES = (
    "image",
    "image_url",
    "input_image",
    "audio",
    "input_audio",
    "video_url",
    "file",
    "input_file",
    "document",
)
"""Types of parts that are no text."""


def _text_alone(content: Any) -> Any:
    for part in content if isinstance(content, list) else ():
        if isinstance(part, dict) and part.get("type") in PICTURES:
            raise PydanticCustomError("picture", "a part of the type {kind} was given; expected text: pictures, sound and files are not read here.", {"kind": repr(part["type"])})  # fmt: skip
    return content


TextAlone = BeforeValidator(_text_alone)
"""Of contents in parts."""


def by_type(*kinds: type[Body], default: type[Body] | None = None) -> BeforeValidator:
    """Of an object that may be of several kinds: it is read as the one that its `type` names, so that an error names a field of that one.

    default: where no type is given.
    """
    by_name = {name: kind for kind in kinds for name in get_args(kind.model_fields["type"].annotation)}
    expected = ", ".join(map(repr, by_name))

    def read(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        name = value.get("type")
        kind = default if name is None else by_name.get(str(name))
        if kind is not None:
            return kind.model_validate(value)
        problem = "missing" if name is None else PydanticCustomError("type", "{given} was given; expected one of {expected}.", {"given": repr(name)[:64], "expected": expected})  # fmt: skip
        raise ValidationError.from_exception_data(
            "type", [InitErrorDetails(type=problem, loc=("type",), input=value)]
        )

    return BeforeValidator(read)


Text = Annotated[str, Field(min_length=1)]
Ids = Annotated[list[int], Field(min_length=1)]
TextList = Annotated[list[Text], Field(min_length=1)]
IdsList = Annotated[list[Ids], Field(min_length=1)]
_LISTS: Mapping[type, TypeAdapter[Any]] = {
    int: TypeAdapter(Ids),
    str: TypeAdapter(TextList),
    list: TypeAdapter(IdsList),
}


def _as_its_first(value: Any) -> Any:
    adapter = _LISTS.get(type(value[0])) if isinstance(value, list) and value else None
    return value if adapter is None else adapter.validate_python(value, strict=True)


Texts = Annotated[Text | Ids | TextList | IdsList, BeforeValidator(_as_its_first)]
"""A text, its token ids, or several of either: what the first of a list is, all of them have to be."""


def _without_hosted(tools: Any, kinds: Sequence[str]) -> Any:
    """Tools without those that a host of models would run itself, or that are called with text: this server has none."""
    if not isinstance(tools, list):
        return tools

    def is_other(tool: Any) -> bool:
        return isinstance(tool, dict) and isinstance(tool.get("type"), str) and tool["type"] not in kinds

    for tool in filter(is_other, tools):
        note(f"a tool of the type {tool['type'][:64]!r}, which is left out,")
    return [tool for tool in tools if not is_other(tool)]


def hosted_left_out(kind: str) -> BeforeValidator:
    """Of a list of tools: those of this kind stay."""
    return BeforeValidator(partial(_without_hosted, kinds=(kind,)))
