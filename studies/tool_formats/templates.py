"""What a chat template writes by Jinja2 alone: prompts, and an assistant's answers behind them."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import SandboxedEnvironment

from studies.tool_formats.cases import NEXT, QUESTION, TEXT, TOOLS, Arguments, Case

ENDS = (
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|call|>", "<|return|>", "</s>", "<|end|>", "<|end_of_text|>", "<end_of_turn>", "<turn|>", "<|eot|>",
    "<|user|>", "<|observation|>", "<|END_OF_TURN_TOKEN|>", "<｜end▁of▁sentence｜>", "<|endoftext|>", "<|end_of_msg|>", "[e~[", "<|tool_response>",
    "<seed:eos>", "<|message_sep|>", "<SPECIAL_12>",  "<|eom|>", "<|assistant_end|>", "<|im_sep|>", "<|role_end|>", "<sep>", "<|user_sep|>", "</assistant>", "<｜hy_eos:opensource｜>", "<end_of_sentence>", "<|CHATBOT_TOKEN|>", "<|START_OF_TURN_TOKEN|>", "<｜Assistant｜>",
    "<|start_header_id|>assistant<|end_header_id|>",
)  # fmt: skip
"""What ends an answer: models stop there, and the server tells no client of it."""
TURNS = ("<SPECIAL_12>", "<｜end▁of▁sentence｜>")
"""Ends of turns: what has one inside is no answer."""
SEGMENT = re.compile(r"<[^<>\n]*>|\[/?[A-Z_]+\]|\w+|.", re.DOTALL)
OPENED = {"<think>": "</think>", "<seed:think>": "</seed:think>", "[THINK]": "[/THINK]", "<mm:think>": "</mm:think>", "<|START_THINKING|>": "<|END_THINKING|>", "<|think|>": "<|end|>", "Here are my reasoning steps:": "[BEGIN FINAL RESPONSE]"}  # fmt: skip
"""Marks of thoughts that prompts open, with what closes them."""


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _dumped(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False) -> str:  # fmt: skip
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


@lru_cache(maxsize=4)
def compiled(template: str) -> Any:
    """A template as transformers compiles it, but that it may change its own lists."""
    environment = SandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = _dumped
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", template))


@dataclass(frozen=True)
class Template:
    """One of a folder. tokens: texts of the special tokens that it may name."""

    name: str
    text: str
    tokens: Mapping[str, str] = field(hash=False)

    def write(self, messages: Sequence[Mapping[str, Any]], **names: Any) -> str | None:
        """A conversation; None where the template refuses it."""
        try:
            return compiled(self.text).render(messages=messages, **{**self.tokens, **self.options, **names})
        except Exception:  # a template is a program, and this is how it refuses
            return None

    @property
    def options(self) -> dict[str, Any]:
        """That let it think, and the rest that it wants, where it knows them."""
        known = {"enable_thinking": True, "thinking": True, "reasoning_effort": "high", "datetime": "today"}
        return {
            name: known[name]
            for name in known
            if re.search(rf"(?<![.'\"\w<>:]){name}\b(?!['\">])", self.text)
        }

    @property
    def tools_name(self) -> str | None:
        """What it calls the tools; None where it writes none."""
        for name in ("tools", "xml_tools", "functions"):
            text = self.prompt(**{name: self.told(name)})
            if text is not None and "search_all" in text:
                return name
        return None

    @staticmethod
    def told(name: str) -> Any:
        """The tools under a name: `functions` is a text."""
        return json.dumps([tool["function"] for tool in TOOLS], indent=4) if name == "functions" else TOOLS

    def prompt(self, **names: Any) -> str | None:
        """Before an answer."""
        return self.write([QUESTION], add_generation_prompt=True, **names)

    def answer(self, case: Case, **names: Any) -> str | None:
        """What the assistant says behind the prompt; None where the template writes no such answer.

        Some write the last answer as one that goes on, so that of a conversation which goes on is taken where the last one has an end in it.
        """
        prompt = self.prompt(**names)
        wholes = [
            self.write([QUESTION, message, *more], **names)
            for more in ([], [NEXT])
            for message in _messages(self.text, case)
        ]
        texts = [self._ended(_behind(prompt, whole), **names) for whole in wholes if whole and prompt]
        text = next((text for text in texts if _has_all(text, case)), None)
        return f"{text}\n{case.behind}" if text and case.behind else text

    def _ended(self, text: str, **names: Any) -> str:
        """An answer without what ends it, which stands at the end of all conversations or before a question that follows."""
        said = {"role": "assistant", "content": TEXT}
        goes_on = self.write([QUESTION, said, NEXT], **names) or ""
        between = goes_on.rpartition(TEXT)[2].partition(NEXT["content"])[0].rstrip()
        text = text.split(NEXT["content"])[0].rstrip().removesuffix(between)
        first, second = (SEGMENT.findall(t)[::-1] for t in (self.write([QUESTION], **names) or "", text))
        text = "".join(second[_same(first, second) :][::-1]).rstrip()
        ends = (*ENDS, *(token for token in self.tokens.values() if token))
        while (end := next((end for end in ends if text.endswith(end)), None)) is not None:
            text = text.removesuffix(end).rstrip()
        return text


def _messages(template: str, case: Case) -> Iterator[dict[str, Any]]:
    """An assistant's message as templates take it, by the names that they have for thoughts."""
    plain = {"role": "assistant", "content": case.content}
    if case.calls:
        for code in (dict, json.dumps):
            yield from _thinking(template, case, {**plain, "tool_calls": _called(case, code)})
    else:
        yield from _thinking(template, case, plain)


def _called(case: Case, code: Callable[[Arguments], Any]) -> list[dict[str, Any]]:
    """Calls as messages have them. code: of their arguments."""
    functions = [{"name": name, "arguments": code(arguments)} for name, arguments in case.calls]
    return [
        {"id": f"call0000{number}", "type": "function", "function": function}
        for number, function in enumerate(functions, 1)
    ]


def _thinking(template: str, case: Case, plain: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if not case.thoughts:
        yield plain
        return
    for name in ("reasoning_content", "reasoning", "thinking", "thought"):
        yield {**plain, name: case.thoughts}
    if "thinking" in template:
        text = [{"type": "text", "text": case.content}] if case.content else []
        yield {**plain, "content": [{"type": "thinking", "thinking": case.thoughts}, *text]}
    if "</think>" in template:
        yield {**plain, "content": f"<think>\n{case.thoughts}\n</think>\n\n{case.content}"}


def _has_all(text: str, case: Case) -> bool:
    wanted = (case.content, case.thoughts, *(name for name, _ in case.calls))
    is_listed = re.search(r"""['"]type['"]: ['"]thinking""", text)
    is_twice = text.count("</think>") > 1
    is_over = any(turn in text for turn in TURNS)
    return not (is_listed or is_twice or is_over) and all(
        text.count(part) >= wanted.count(part) for part in wanted if part
    )


def _behind(prompt: str, whole: str) -> str:
    """The answer of a conversation behind a prompt, which may have opened thoughts that the conversation leaves out."""
    first, second = map(SEGMENT.findall, (prompt, whole))
    rest = "".join(second[_same(first, second) :]).removeprefix(first[-1])
    mark = next((mark for mark in OPENED if prompt.rstrip().endswith(mark)), None)
    if mark is None:
        return rest
    rest = rest.lstrip().removeprefix(mark)
    return rest if OPENED[mark] in rest else f"\n{OPENED[mark]}\n\n{rest}"


def _same(first: Sequence[str], second: Sequence[str]) -> int:
    """Pieces with which two texts begin alike."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((at for at, (x, y) in pairs if x != y), min(len(first), len(second)))
