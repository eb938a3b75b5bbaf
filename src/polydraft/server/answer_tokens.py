"""The tokens of an answer: the text, place and log-probability of each, and where it comes from. A `SampleReader` knows how far a sample was read.

Outputs share a sample that goes on filling in the engine's thread, so a chunk is made of the output's own tokens and of the log-probabilities at their
positions, which are there before it is given.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, NamedTuple

from polydraft.core.thinking import Thinking
from polydraft.engine.detokenizer import Detokenizer
from polydraft.engine.output import StepOutput
from polydraft.engine.sequence import TokenLogprob
from polydraft.models.tokens.spelling import REPLACEMENT, Spelling
from polydraft.server.formats.form import Format
from polydraft.server.formats.parser import AnswerParser
from polydraft.server.formats.reader import Piece, ToolCall


class PieceReader:
    """Of one choice. thinking: how its model thinks, None where thoughts stay in the text.  tools: parameters of those that may be called, by name."""

    def __init__(self, thinking: Thinking | None, tools: Mapping[str, Any], form: Format) -> None:
        self._parser = AnswerParser(tools, form, thinking)

    @property
    def calls(self) -> list[ToolCall]:
        """Those that have begun."""
        return self._parser.calls

    @property
    def called(self) -> bool:
        """Whether a call is complete."""
        return any(call.complete for call in self.calls)

    def push(self, text: str, *, last: bool = False) -> list[Piece]:
        """What more text adds. last: nothing follows."""
        return self._parser.push(text, last=last)

    def read(self, output: StepOutput) -> list[Piece]:
        """What an output adds."""
        return self.push(output.text, last=output.finished)


def token_text(tokenizer: Any, token_id: int) -> tuple[str, list[int] | None]:
    """A token's text and its UTF-8 bytes, which may be part of a character; None where the tokenizer does not tell them.

    Example:
        >>> from polydraft.models import load, pair
        >>> tokenizer = load.load_tokenizer(str(pair.target_folder()))
        >>> token_text(tokenizer, tokenizer("é")["input_ids"][0])
        ('bytes:\\\\xc3', [195])
    """
    spelling = Spelling.of(tokenizer)
    if not spelling.spells:
        text = tokenizer.decode([token_id])
        return text, None if REPLACEMENT in text else list(text.encode())
    parts = spelling.bytes_of(token_id)
    try:
        return parts.decode(), list(parts)
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{part:02x}" for part in parts), list(parts)


class AnswerToken(NamedTuple):
    """A token of a choice: the text that it completes, how many characters are before that, and its log-probability where there is one."""

    text: str
    offset: int
    logprob: TokenLogprob | None


@dataclass
class SampleReader:
    """What was told of one sample. detokenizer: where tokens are told one by one.  offset: characters before the next token's text.

    tells_stop: whether the token that ended the text is a part of it.
    """

    detokenizer: Detokenizer | None
    offset: int = 0
    tells_stop: bool = False
    num_tokens: int = 0

    def read(self, output: StepOutput) -> list[AnswerToken]:
        """The output's tokens, which count as told; none where only texts are told."""
        first = self.num_tokens
        self.num_tokens += len(output.token_ids)
        if self.detokenizer is None:
            return []
        logprobs = output.sample.logprobs
        told_tokens = list[AnswerToken]()
        for number, token in enumerate(output.token_ids, first):
            is_stop = (
                output.finished
                and number == len(output.sample.token_ids) - 1
                and token == output.sample.stop_reason
            )
            text = "" if is_stop and not self.tells_stop else self.detokenizer.push(token)
            told_tokens.append(AnswerToken(text, self.offset, None if logprobs is None else logprobs[number]))
            self.offset += len(text)
        return told_tokens


def traced(tokenizer: Any, output: StepOutput, records: Seq[AnswerToken]) -> dict[str, Any]:
    """One step: each token's text, origin and depth below the last committed one, and the tree that it comes from.

    A tree's node n hangs on `parents[n]`; node 0 is the last token before the step. `path`: the accepted nodes.
    """
    tree = output.tree
    tokens = list[dict[str, Any]]()
    for depth, (token, origin, (text, _, logprob)) in enumerate(
        zip(output.token_ids, output.origins, records, strict=True), 1
    ):
        entry = {"id": token, "text": text, "source": origin.source, "branch": origin.branch, "depth": depth}
        tokens.append(entry | ({} if logprob is None else {"logprob": finite(logprob.logprob)}))
    if tree is None:
        return {"tokens": tokens, "tree": None}
    nodes = [n for n, parent in enumerate(tree.parents) if n == 0 or parent >= 0]
    texts = [tokenizer.decode([tree.token_ids[n]]) for n in nodes]
    return {
        "tokens": tokens,
        "tree": {"texts": texts, "parents": [tree.parents[n] for n in nodes], "path": tree.path},
    }


def finite(logprob: float) -> float:
    """As JSON can have it, which does not have -inf."""
    return max(logprob, -9999.0)
