"""Each format over a vocabulary of a dozen tokens: two tools, the calls that may be written, and what may follow by those texts alone.

The tools "a" and "b" take an integer, "a" 1 or 2 and "b" 2 or 3: what may be written behind a name depends on the name. One token joins a
name with what ends it, another begins a value that no tool takes.
"""

from dataclasses import replace
from functools import cache, cached_property
from itertools import takewhile

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from polydraft import Engine
from polydraft.engine.structured import Grammars
from polydraft.models.tokens.spelling import byte_alphabet
from polydraft.server.formats import named
from polydraft.server.formats.form import Call, Format, filled, written
from tests.engine.tables import TableModel
from tests.server.constraints import calls_of

GEMMA = Format("keyed", head="<|tool_call>call:{name}", tail="<tool_call|>", coding="keyed", quote='<|"|>')
"""The coding that no named format has."""
FORMATS = {**named.FORMATS, "keyed": GEMMA}
VALUES = {"a": (1, 2), "b": (2, 3)}
ID = "call00001"
PROMPT = [0, 0]


def tool(name):
    """A tool that takes one of its values."""
    value = {"type": "integer", "enum": list(VALUES[name])}
    schema = {"type": "object", "properties": {"x": value}, "required": ["x"], "additionalProperties": False}
    return {"name": name, "parameters": schema}


def common_prefix(texts):
    letters = zip(*texts, strict=False)
    return "".join(column[0] for column in takewhile(lambda column: len({*column}) == 1, letters))


def common_suffix(texts):
    return common_prefix([text[::-1] for text in texts])[::-1]


class TinyFormat:
    """A format over its own few tokens. words: what they spell, the last one the end.

    Nothing leads to a call, and its number and identifier are always the same: a grammar that forces a part of a token finds none for it in so few.

    before: tokens up to the name of a call.  names: of tools, by name.  behind: from a name to a value.
    """

    def __init__(self, form: Format) -> None:
        self.form = replace(form, lead="", head=filled(form.head, id=ID, index="1"))
        self.texts = {name: [self._text(name, value) for value in values] for name, values in VALUES.items()}
        every = [text for texts in self.texts.values() for text in texts]
        first = common_prefix(every)
        heads = {name: common_prefix(texts)[len(first) :] for name, texts in self.texts.items()}
        tail = common_suffix(every).removesuffix(form.closing)
        begun = {name: self._begun(name) - len(first) for name in VALUES}
        ends = {name: head[len(name) : begun[name]] for name, head in heads.items()}
        keys = {name: head[begun[name] :] for name, head in heads.items()}
        values = ["1", "2", "3", "4"]
        joined = ["a" + ends["a"]]
        first_pieces = first.partition(ID)
        pieces = [
            *first_pieces,
            *VALUES,
            *ends.values(),
            *keys.values(),
            *values,
            *joined,
            tail,
            form.closing,
        ]
        self.words = [*dict.fromkeys(piece for piece in pieces if piece), "<end>"]
        self.before = [token for piece in first_pieces for token in self.ids(piece)]
        self.joined = self.ids(joined[0])
        self.behind = {name: [*self.ids(ends[name]), *self.ids(keys[name])] for name in VALUES}

    def _text(self, name: str, value: int) -> str:
        text = written(self.form, [Call(name, {"x": value}, ID)])
        return text.removeprefix(self.form.preset)

    def _begun(self, name: str) -> int:
        """Where the arguments begin, behind a brace that all have."""
        head = self.form.opening + self.form.call_head(name, ID, 0)
        braces = self.form.coding in ("json", "keyed")
        return len(head.removeprefix(self.form.preset)) + braces

    @property
    def end(self) -> int:
        return len(self.words) - 1

    def ids(self, text: str) -> list[int]:
        """Of a text that is one word, or of none."""
        return [self.words.index(text)] if text else []

    def spelt(self, path) -> str:
        return "".join(self.words[token] for token in path if token != self.end)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        """Its words, spelt in bytes."""
        letters = {byte: letter for letter, byte in byte_alphabet().items()}
        spelt = ["".join(letters[byte] for byte in word.encode()) for word in self.words]
        vocabulary = {word: number for number, word in enumerate(spelt)}
        made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>")

    @cached_property
    def grammars(self) -> Grammars:
        return Grammars(self.tokenizer, len(self.words), [self.end])

    def source(self, functions=None, **options):
        """The constraint of answers that have to call one of the tools."""
        functions = functions or [tool(name) for name in VALUES]
        options = {"required": True, "parallel": False, "calls": self.form, **options}
        return calls_of(self.tokenizer, self.grammars, functions, **options)

    def may_follow(self, path) -> set[int]:
        """By the texts alone: behind the end the end, and what goes on with one of them."""
        return {self.end} if self.end in path else self._may_follow(self.spelt(path))

    @cache  # noqa: B019  a few texts of a format that stays
    def _may_follow(self, text: str) -> set[int]:
        whole = [x for texts in self.texts.values() for x in texts]
        words = range(self.end)
        allowed = {t for t in words if any(x.startswith(text + self.words[t]) for x in whole)}
        return allowed | ({self.end} if text in whole else set())

    def fits(self, path) -> bool:
        return all(token in self.may_follow(path[:place]) for place, token in enumerate(path))

    def outputs(self) -> list[tuple[int, ...]]:
        """All that may be written, found by trying every token."""
        found = list[tuple[int, ...]]()
        open_ = [()]
        while open_:
            path = open_.pop()
            for token in self.may_follow(path):
                (found if token == self.end else open_).append((*path, token))
        return found

    def distribution(self, target: TableModel) -> dict[tuple[int, ...], float]:
        """Probability of every output: the product of the target's rows over what may follow."""
        chances = {}
        for path in self.outputs():
            text = list(PROMPT)
            chance = 1.0
            for place, token in enumerate(path):
                row = np.exp(target.logits[text[-2], text[-1]].astype(np.float64))
                chance *= float(row[token] / row[sorted(self.may_follow(path[:place]))].sum())
                text.append(token)
            chances[path] = chance
        return chances

    def engine(self, seed: int = 0, **options) -> Engine:
        """A target and a draft model that are tables, by default with two paths of drafts."""
        size = len(self.words)
        target = TableModel(size, seed, max_num_seqs=64, dtype=np.float32)
        small = TableModel(size, seed + 1, 1.0, max_num_seqs=64, dtype=np.float32)
        drafts = {"draft_model": small, "drafter": "model:paths", "depth": 3, "num_paths": 2}
        return Engine.of(target, tokenizer=self.tokenizer, eos_token_ids=[self.end], **{**drafts, **options})
