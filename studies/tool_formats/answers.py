"""What comes back of an answer: by the parser, and to a client of a server whose model says just that."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from fastapi.testclient import TestClient
from tokenizers import AddedToken

from polydraft import AsyncEngine, Engine
from polydraft.config import ServerConfig
from polydraft.models import load, pair
from polydraft.server.app import create_app
from polydraft.server.formats.derive import format_of
from polydraft.server.formats.named import thinking_of
from polydraft.server.formats.parser import AnswerParser
from polydraft.server.formats.reader import ToolCall
from polydraft.server.pool import ModelPool
from studies.clients.scripted import CERTAIN, ScriptedModel
from studies.tool_formats.cases import QUESTION, SCHEMAS, Case
from studies.tool_formats.templates import Template

MARK = re.compile(r"\]<\]\w+\[>\[|<[^<>\s'\"{}%]{2,40}>|\[/?[A-Z_]{3,30}\]")
"""What templates have as control tokens."""


class Answer(NamedTuple):
    """What a client gets."""

    content: str
    thoughts: str
    calls: tuple[tuple[str, Any], ...]


def wanted_of(case: Case) -> Answer:
    """What it should get."""
    content = "\n".join(part for part in (case.content, case.behind) if part)
    return Answer(content, case.thoughts, case.calls)


def parsed(template: Template, prompt: str, text: str, tokenizer: Any, size: int) -> Answer:
    """An answer in pieces of a size, by the parser."""
    form = format_of(template.text)
    thinking = thinking_of(tokenizer, form, tokenizer(prompt, add_special_tokens=False)["input_ids"])
    parser = AnswerParser(SCHEMAS, form, thinking)
    pieces = [piece for at in range(0, len(text), size) for piece in parser.push(text[at : at + size])]
    pieces += parser.push("", last=True)
    calls = tuple((call.name, call.input) for call in parser.calls if call.complete)
    content, thoughts = ("".join(getattr(p, kind) for p in pieces) for kind in ("content", "reasoning"))
    return Answer(content.strip(), thoughts.strip(), calls)


class Says(ScriptedModel):
    """A model that says one text behind any prompt."""

    answer: Sequence[int] = ()

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer, lambda conversation: "")
        self._prompts = [0] * self.max_num_seqs

    def prefill(self, slots: Sequence[int], token_ids: Sequence[Sequence[int]], **more: Any) -> Any:
        for slot, ids in zip(slots, token_ids, strict=True):
            self._prompts[slot] = len(self._texts[slot]) + len(ids) + 1  # the last one is scored
        return super().prefill(slots, token_ids, **more)

    def _next(self, slot: int, path: Sequence[int]) -> Any:
        written = [*self._texts[slot], *path][self._prompts[slot] :]
        row = np.zeros(self.vocab_size, np.float32)
        follows = list(self.answer[: len(written)]) == written and len(written) < len(self.answer)
        row[self.answer[len(written)] if follows else self.eos_token_ids[0]] = CERTAIN
        return row


def said_by(template: Template) -> Any:
    """A tokenizer whose control tokens are the marks of a template."""
    tokenizer: Any = load.load_tokenizer(str(pair.draft_folder()))
    marks = [mark for mark in dict.fromkeys(MARK.findall(template.text)) if mark not in template.tokens]
    tokenizer.backend_tokenizer.add_special_tokens(
        [AddedToken(mark, special=True, normalized=False) for mark in marks]
    )
    tokenizer.chat_template = template.text
    return tokenizer


@contextmanager
def served(template: Template) -> Iterator[tuple[TestClient, Says]]:
    """A server of a model with the template, and the model."""
    model = Says(said_by(template))
    engine = Engine.of(model, tokenizer=model.tokenizer, drafter=None)
    config = ServerConfig(served_model_name="said")
    pool = ModelPool.of(AsyncEngine(engine), config)
    with TestClient(create_app(pool, config)) as client:
        yield client, model


def asked(client: TestClient, template: Template, **more: Any) -> dict[str, Any]:
    """The answer to the question."""
    body = {
        "model": "said",
        "messages": [QUESTION],
        "temperature": 0,
        "chat_template_kwargs": template.options,
    }
    answer = client.post("/v1/chat/completions", json={**body, **more})
    return answer.json() if answer.status_code == 200 else {"error": answer.text}


def told(client: TestClient, model: Says, template: Template, text: str, **more: Any) -> Answer | str:
    """What a client gets of an answer."""
    model.answer = model.tokenizer(text, add_special_tokens=False)["input_ids"]
    found = asked(client, template, max_tokens=len(model.answer) + 8, **more)
    if "error" in found:
        return found["error"]
    message = found["choices"][0]["message"]
    calls = tuple(
        (call["function"]["name"], ToolCall("", call["function"]["arguments"], True).input)
        for call in message.get("tool_calls") or ()
    )
    return Answer((message["content"] or "").strip(), (message.get("reasoning_content") or "").strip(), calls)
