"""A model that says what a test tells it to, as far as it may, and that thinks as the template says."""

from functools import cache
from typing import Any
from zlib import crc32

import torch
from tokenizers import AddedToken

from polydraft import Engine
from polydraft.models import load, pair
from studies.clients.scripted import ScriptedModel

MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
HEAD = "\n# assistant:\n"
HISTORY = (
    "{% for t in tools or [] %}{{ 'TOOL <tool_call> ' ~ t.function.name ~ '\n' }}{% endfor %}"
    "{% for m in messages %}{{ '\n# ' ~ m.role ~ ':\n' }}"
    "{% if m.reasoning_content %}{{ '<think>\n' ~ m.reasoning_content ~ '\n</think>\n' }}{% endif %}{{ m.content }}{% endfor %}"
)
OPENS = HISTORY + "{% if add_generation_prompt %}{{ '\n# assistant:\n<think>\n' }}{% endif %}"
"""Opens the thoughts of each answer."""
OFFERS = (
    HISTORY
    + "{% if add_generation_prompt %}{{ '\n# assistant:\n' ~ ('<think>\n</think>\n' if enable_thinking == false else '') }}{% endif %}"
)
"""Leaves it to the model whether it thinks."""


class Thinker(ScriptedModel):
    """answer: what it says. Where it may not, it says what a noise of the text so far has it say."""

    def __init__(self, tokenizer, answer, noise=0, max_model_len=512):
        super().__init__(tokenizer, lambda conversation: answer, max_model_len=max_model_len)
        self.answer = answer
        self.noise = noise
        self._ids = tokenizer(answer, add_special_tokens=False)["input_ids"]
        self._places = {tokenizer.decode(self._ids[:count]): count for count in range(len(self._ids) + 1)}

    def _next(self, slot, path):
        written = self.tokenizer.decode([*self._texts[slot], *path]).rpartition(HEAD)[2]
        for opened in ("<think>\n</think>\n", "<think>\n"):
            if written.startswith(opened) and not self.answer.startswith("<think>"):
                written = written.removeprefix(opened)
                break
        row = torch.randn(
            self.vocab_size, generator=torch.Generator().manual_seed(crc32(written.encode()) + self.noise)
        ).numpy()
        at = self._places.get(written)
        if at is not None:
            row[self._ids[at] if at < len(self._ids) else self.eos_token_ids[0]] += 40.0
        return row


@cache
def tokenizer(special=False):
    """The embedded pair's with marks, which are control tokens or not."""
    made = load.load_tokenizer(str(pair.draft_folder()))
    added = [AddedToken(mark, special=special, normalized=False) for mark in MARKS]
    (made.backend_tokenizer.add_special_tokens if special else made.backend_tokenizer.add_tokens)(added)
    return made


def thinker(answer, template=OPENS, *, special=False, drafts=False, max_model_len=512):
    """An engine of it. drafts: of a draft model that knows half of the answer."""
    words = tokenizer(special)
    words.chat_template = template
    options: dict[str, Any] = {"drafter": None}
    if drafts:
        options = {
            "draft_model": Thinker(words, answer[: len(answer) // 2], 1),
            "drafter": "model:paths",
            "depth": 3,
            "num_paths": 2,
        }
    return Engine.of(Thinker(words, answer, max_model_len=max_model_len), tokenizer=words, **options)
