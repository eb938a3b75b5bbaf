"""A model that says what a script answers, so that a client's requests are answered and its loop of tools closes, whatever a small model can do.

All probability of a node is on the next token of the script's answer to the conversation before it.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from polydraft import Engine
from polydraft.core import Needs, Outcome, Scores, Target, TokenTree
from polydraft.models import load, pair

HEAD = "\n# assistant:\n"
TEMPLATE = (
    "{% for t in tools or [] %}{{ 'TOOL ' ~ t | tojson ~ '\n' }}{% endfor %}"
    "{% for m in messages %}{{ '\n# ' ~ m.role ~ ':\n' ~ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ '\n<tool_call>\n' ~ c.function | tojson ~ '\n</tool_call>' }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '\n# assistant:\n' }}{% endif %}"
)
"""Blanks stand in strings: a line end behind a block of a template is dropped."""
TAIL = 2048
"""Tokens in which the head of the answer is looked for."""
CERTAIN = 40.0


class ScriptedModel(Target):
    """script: from a conversation, as the template writes it, to what is answered."""

    def __init__(
        self,
        tokenizer: Any,
        script: Callable[[str], str],
        *,
        max_model_len: int = 1 << 18,
        max_num_seqs: int = 4,
    ) -> None:
        self.tokenizer = tokenizer
        self.script = script
        self.name = "scripted"
        self.vocab_size = len(tokenizer)
        self.max_model_len = max_model_len
        self.max_num_seqs = max_num_seqs
        self.eos_token_ids = (tokenizer.eos_token_id,)
        self._texts: list[list[int]] = [[] for _ in range(max_num_seqs)]
        self._answers: dict[int, list[int]] = {}
        self._scored: dict[int, list[int]] = {}

    @property
    def offers(self) -> Needs:
        return Needs()

    @property
    def lengths(self) -> Any:
        return [len(text) for text in self._texts]

    def prefill(
        self, slots: Sequence[int], token_ids: Sequence[Sequence[int]], *, hidden: Sequence[int] = ()
    ) -> Scores:
        for slot, ids in zip(slots, token_ids, strict=True):
            self._texts[slot] += list(ids)
        roots = TokenTree.roots(np.array([ids[-1] for ids in token_ids], np.int64))
        return Scores(roots, np.stack([self._next(slot, []) for slot in slots])[:, None])

    def score(
        self,
        slots: Sequence[int],
        tree: TokenTree,
        *,
        hidden: Sequence[int] = (),
        since: int = 0,
    ) -> Scores:
        rows = list[np.ndarray]()
        for slot, tokens, parents in zip(slots, tree.tokens.tolist(), tree.parents.tolist(), strict=True):
            self._scored[slot] = tokens
            paths = list[list[int]]()
            for token, parent in zip(tokens, parents, strict=True):
                paths.append([*(paths[parent] if parent >= 0 else []), token])
            rows.append(np.stack([self._next(slot, path) for path in paths[since:]]))
        return Scores(TokenTree(tree.tokens[:, since:], tree.parents[:, since:]), np.stack(rows))

    def _next(self, slot: int, path: Sequence[int]) -> np.ndarray:
        ids = [*self._texts[slot], *path]
        _, head, written = self.tokenizer.decode(ids[-TAIL:]).rpartition(HEAD)
        if head and not written:
            conversation = self.tokenizer.decode(ids).rpartition(HEAD)[0]
            self._answers[slot] = self.tokenizer(self.script(conversation), add_special_tokens=False)[
                "input_ids"
            ]
        answer = self._answers.get(slot, [])
        texts = (self.tokenizer.decode(answer[:count]) for count in range(len(answer)))
        at = next((count for count, text in enumerate(texts) if text == written), None)
        row = np.zeros(self.vocab_size, np.float32)
        row[self.eos_token_ids[0] if at is None else answer[at]] = CERTAIN
        return row

    def commit(self, slots: Sequence[int], outcome: Outcome) -> None:
        for b, slot in enumerate(slots):
            nodes = [0, *outcome.path[b, : int(outcome.num_accepted[b])].tolist()]
            self._texts[slot] += [self._scored[slot][node] for node in nodes]

    def cut(self, slot: int, length: int) -> None:
        del self._texts[slot][length:]

    def copy(self, source: int, slot: int, length: int) -> None:
        self._texts[slot] = self._texts[source][:length]
        self._answers[slot] = self._answers.get(source, [])

    def release(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._texts[slot] = []


def scripted_engine(script: Callable[[str], str]) -> Engine:
    """An engine whose answers are the script's, with drafts from the text."""
    tokenizer = load.load_tokenizer(str(pair.draft_folder()))
    tokenizer.chat_template = TEMPLATE
    return Engine.of(
        ScriptedModel(tokenizer, script), tokenizer=tokenizer, drafter="ngram", depth=3, keep_prefixes=True
    )


def uses_a_shell(file: str = "note.txt", word: str = r"plum-\d+") -> Callable[[str], str]:
    """A script that reads a file with whatever tool runs commands or reads files, and then says the word that it found there."""

    def script(conversation: str) -> str:
        last = conversation[max(conversation.rfind(f"\n# {role}:\n") for role in ("user", "tool")) :]
        if last.startswith("\n# tool:"):
            found = re.search(word, last)
            return f"The note says {found[0]}." if found else "The tool gave no word."
        if (
            "file listing" in conversation and "plum-48" in conversation
        ):  # aider asks for files, and not for calls
            return f"{file}\n```\nThe word is plum-48.\n```\n"
        described = re.findall(r"^TOOL (.*)$", conversation, re.MULTILINE)
        tools = {
            tool["function"]["name"]: tool["function"].get("parameters") or {}
            for tool in map(json.loads, described)
        }
        if "Which word is it?" in last:  # asked for as JSON, or as the arguments of a tool
            answer = json.dumps({"word": "plum-47"})
            return (
                f'<tool_call>\n{{"name": "{next(iter(tools))}", "arguments": {answer}}}\n</tool_call>'
                if tools
                else answer
            )
        names = [
            name for name in tools if re.search(r"bash|shell|exec_command|read|note", name, re.IGNORECASE)
        ]
        if not names or "note" not in last:
            return "Ready."
        name = min(
            names, key=lambda name: (re.search(r"bash|shell|exec", name, re.IGNORECASE) is None, len(name))
        )
        call = {"name": name, "arguments": _arguments(tools[name], file)}
        return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"

    return script


def _arguments(schema: Mapping[str, Any], file: str) -> dict[str, Any]:
    """Those that a tool wants, by their names and types."""
    properties = schema.get("properties") or {}
    return {
        name: _argument(name, properties[name], file)
        for name in properties
        if name in (schema.get("required") or ())
    }


def _argument(name: str, schema: Mapping[str, Any], file: str) -> Any:
    if schema.get("type") == "array":
        return ["cat", file] if name == "command" else []
    if schema.get("type") == "boolean":
        return False
    if schema.get("type") in ("number", "integer"):
        return 1000
    if "path" in name.lower() or "file" in name.lower():
        return file
    return f"cat {file}" if name in ("command", "cmd") else "Read the note"
