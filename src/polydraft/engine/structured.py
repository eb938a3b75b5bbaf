"""Grammars over a tokenizer: a form is tried in another process, compiled, and kept for requests that ask for it again.

Grammars are compiled and followed by llguidance (https://github.com/guidance-ai/llguidance); `grammar` follows one.
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from copy import copy
from functools import partial
from hashlib import sha256
from typing import Any, NamedTuple

from polydraft.core.params import StructuredOutputs
from polydraft.engine import grammar_bounds as bounds
from polydraft.engine.exact_outputs import ExactGrammar
from polydraft.engine.grammar import CompiledGrammar
from polydraft.engine.grammar_compile import (
    LIMITS,
    Followed,
    deep,
    matcher_of,
    named,
    refusal,
    written,
)
from polydraft.engine.grammar_tokenizer import GrammarTokenizer, Vocabulary
from polydraft.engine.grammar_trial import shared_trial
from polydraft.errors import IncompatibleError, InvalidInputError, first_line

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
