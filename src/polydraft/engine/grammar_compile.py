"""From a form of outputs to a matcher of llguidance, in the process of the engine and in one that tries it first (see `grammar_trial`).

It imports llguidance alone, so that the other process is there at once.
"""

import json
import random
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from time import thread_time
from typing import Any, TypeVar

from polydraft.engine import grammar_bounds as bounds
from polydraft.engine.json_schema import exact
from polydraft.errors import InvalidInputError, first_line

T = TypeVar("T")
LIMITS: Any = {
    "max_grammar_size": 50_000,
    "max_lexer_states": 50_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 20_000,
    "verbose_errors": False,
}
"""Of one grammar in llguidance: symbols, of some 400 bytes each, and states, of some 100; of one mask, 10 ms and 50 ms; messages without its state."""
REASONS = {
    "NoExtensionBias": "no text fits it",
    "NoExtension": "no text fits it",
    "ParserTooComplex": "it is too complex",
}
"""Messages of llguidance that say nothing to others."""
WRITTEN: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""How JSON is written: as `json.dumps` does. Where blanks are free, a sampled text may go on in blanks for ever."""
STACK_BYTES = 16 << 20
"""Of a thread that compiles: seven times what `grammar_bounds.MOST_LEVELS` take, whatever the platform gives a thread."""
WALKED_TOKENS = 24
"""Of an output that a trial follows."""


@dataclass(frozen=True)
class Followed:
    """A vocabulary as llguidance has it. stop_ids: that end an output."""

    tokenizer: Any
    vocab_size: int
    stop_ids: tuple[int, ...]

    def allowed(self, matcher: Any) -> int:
        """What may come next, a bit for each token."""
        return int.from_bytes(matcher.compute_bitmask(), "little") & ((1 << self.vocab_size) - 1)

    def words(self, allowed: int) -> int:
        """The same without what ends an output."""
        for token in self.stop_ids:
            allowed &= ~(1 << token)
        return allowed


def refusal(kind: str, reason: str) -> InvalidInputError:
    """Of a form. reason: in a line."""
    return InvalidInputError(
        f"structured_outputs.{kind} was given, which cannot be followed: {reason}. Change it."
    )


def said(matcher: Any) -> str:
    """What is wrong, in a line without the state of the library."""
    message = " ".join(
        re.split(r"\n?<|\nstack backtrace", matcher.get_error() if matcher.is_error() else "")[0].split()
    )
    return REASONS.get(message, message[:300].rstrip(".")) or "it is too complex"


def deep(work: Callable[[], T], num_bytes: int = STACK_BYTES) -> T:
    """What is returned by work in a thread of a stack of its own, which raises as it does."""
    outcome = list[T]()
    raised = list[BaseException]()

    def run() -> None:
        try:
            outcome.append(work())
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, name="polydraft-grammar-stack", daemon=True)
    with _STACKS:
        before = threading.stack_size(num_bytes)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    if raised:
        raise raised[0]
    return outcome[0]


_STACKS = threading.Lock()


def written(kind: str, value: Any) -> str:
    """A form as llguidance takes it. kind: of `StructuredOutputs`.

    Raises:
        InvalidInputError: a schema that is no JSON object, or anything beyond what `grammar_bounds` and `json_schema` allow.
    """
    try:
        text = _written(kind, value)
        bounds.check_text(text)
    except InvalidInputError as error:
        raise named(kind, error) from error
    return text


def named(kind: str, error: InvalidInputError) -> InvalidInputError:
    """An error that says of which form it is."""
    message = str(error)
    return (
        error
        if message.startswith("structured_outputs")
        else InvalidInputError(f"structured_outputs.{kind}: {message}")
    )


def _written(kind: str, value: Any) -> str:
    from llguidance import LLMatcher

    if kind == "regex":
        bounds.check_text(value)
        bounds.check_regex(value)
        return LLMatcher.grammar_from_regex(value)
    if kind == "grammar":
        bounds.check_text(value)
        return _listed(value) if value.lstrip().startswith("{") else bounds.check_lark(value, _schema)
    if kind == "choice":  # as one terminal: a rule has at most 2,000 alternatives
        return "start: CHOICE\nCHOICE: " + " | ".join(json.dumps(text) for text in value)
    schema: Any = {"type": "object"} if kind == "json_object" else value
    try:
        parsed = json.loads(schema) if isinstance(schema, str) else json.loads(json.dumps(schema))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidInputError(
            f"structured_outputs.json was given, which is no JSON: {error}. Expected a schema."
        ) from error
    if not isinstance(parsed, dict):
        raise InvalidInputError(
            f"structured_outputs.json={str(parsed)[:200]} was given; expected a schema, such as {{'type': 'object'}}."
        )
    bounds.check_nesting(parsed)
    try:
        return LLMatcher.grammar_from_json_schema(json.dumps(_schema(parsed)), overrides=WRITTEN)
    except InvalidInputError:
        raise
    except ValueError as error:
        raise refusal(kind, first_line(error)) from error


def _listed(text: str) -> str:
    """Several grammars, as llguidance lists them in JSON."""
    try:
        listed = json.loads(text)
        bounds.check_nesting(listed)
        for grammar in listed["grammars"]:
            if grammar.get("json_schema") is not None:
                grammar["json_schema"] = _schema(grammar["json_schema"])
            if grammar.get("lark_grammar") is not None:
                grammar["lark_grammar"] = bounds.check_lark(grammar["lark_grammar"], _schema)
    except InvalidInputError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise refusal("grammar", f"no list of grammars in JSON ({first_line(error)[:100]})") from error
    return json.dumps(listed)


def _schema(schema: Any) -> Any:
    """A schema with what llguidance keeps, within bounds; not nested deeply."""
    rewritten = exact(schema)
    bounds.check_json(rewritten)
    return rewritten


def matcher_of(followed: Followed, kind: str, text: str, limits: Any) -> Any:
    """A matcher of a form that is `written`, with the mask of its beginning, where some mistakes show first, that can take a step.

    Raises:
        InvalidInputError: what llguidance refuses.
    """
    from llguidance import LLMatcher, LLParserLimits

    matcher = LLMatcher(followed.tokenizer, text, log_level=0, limits=LLParserLimits(**limits))
    allowed = 0 if matcher.is_error() else followed.allowed(matcher)
    if not matcher.is_error():
        step = followed.words(allowed)
        trial = matcher.deep_copy()
        if not allowed or (step and trial.try_consume_tokens([_first(step)]) != 1):
            raise refusal(kind, said(trial))
    if matcher.is_error():
        raise refusal(kind, said(matcher))
    return matcher


def _first(allowed: int) -> int:
    return (allowed & -allowed).bit_length() - 1


def walk(followed: Followed, matcher: Any) -> float:
    """Follow one output for a while, and return the longest CPU seconds of a step behind the first; a matcher at its limits ends that."""
    longest = 0.0
    draw = random.Random(0)
    allowed = followed.words(followed.allowed(matcher))
    for _ in range(WALKED_TOKENS):
        behind = allowed >> (start := draw.randrange(followed.vocab_size))
        if not allowed:
            break
        began = thread_time()
        if matcher.try_consume_tokens([start + _first(behind) if behind else _first(allowed)]) != 1:
            break
        allowed = followed.words(followed.allowed(matcher))
        longest = max(longest, thread_time() - began)
        if matcher.is_error():
            break
    return longest
