"""An answer's text, in pieces of any length, as thoughts, content and calls: what every format of answers is made of."""

from collections.abc import Collection

from polydraft.core.thinking import Thinking
from polydraft.engine.output import StepOutput
from polydraft.server.reasoning import ReasoningParser
from polydraft.server.tools import CallFormat, CallParser, Piece, ToolCall


def is_cut(output: StepOutput) -> bool:
    """Whether an output is the last one of a text that was broken off."""
    return output.finished and output.sample.finish_reason == "length"


class PieceReader:
    """Of one choice. thinking: how its model thinks, None where thoughts stay in the text.  names: of the tools that may be called."""

    def __init__(self, thinking: Thinking | None, names: Collection[str], calls: CallFormat) -> None:
        self._thoughts = None if thinking is None else ReasoningParser(thinking)
        self._calls = CallParser(names, calls) if names else None

    @property
    def calls(self) -> list[ToolCall]:
        """Those that have begun."""
        return self._calls.calls if self._calls is not None else []

    @property
    def called(self) -> bool:
        """Whether a call is complete."""
        return any(call.complete for call in self.calls)

    def push(self, text: str, *, last: bool = False, cut: bool = False) -> list[Piece]:
        """What more text adds. last, cut: as of `CallParser.push`."""
        pieces = list[Piece]()
        if self._thoughts is not None:
            reasoning, text = self._thoughts.push(text, last=last)
            pieces += [Piece(reasoning=reasoning)] if reasoning else []
        if self._calls is not None:
            return [*pieces, *self._calls.push(text, last=last, cut=cut)]
        return [*pieces, Piece(content=text)] if text else pieces

    def read(self, output: StepOutput) -> list[Piece]:
        """What an output adds."""
        return self.push(output.text, last=output.finished, cut=is_cut(output))
