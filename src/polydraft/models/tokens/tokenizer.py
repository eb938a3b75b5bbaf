"""What the project uses of a tokenizer, and a tokenizer that has it without transformers: one of the `tokenizers` library."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from polydraft.models.tokens.chat_template import render, template_of

ROLES = ("bos_token", "eos_token", "unk_token", "pad_token")


class Tokenizer(Protocol):
    """A tokenizer as the engine uses it: those of transformers are such, and `BackendTokenizer`.

    bos_token, ...: tokens of these roles and their ids, None where there is none.  all_special_ids: of tokens that are no text.
    chat_template: Jinja source, several by name, or None; it may be set.  backend_tokenizer: of the `tokenizers` library; slow ones lack it.
    """

    bos_token: str | None
    eos_token: str | None
    unk_token: str | None
    pad_token: str | None
    bos_token_id: int | None
    eos_token_id: int | None
    unk_token_id: int | None
    pad_token_id: int | None
    chat_template: str | dict[str, str] | None

    @property
    def all_special_ids(self) -> list[int]: ...

    def __len__(self) -> int: ...
    def __call__(self, text: str, *, add_special_tokens: bool = True) -> Mapping[str, Any]: ...
    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str: ...
    def convert_ids_to_tokens(self, token_id: int) -> str | None: ...
    def convert_tokens_to_ids(self, token: str) -> int | None: ...
    def get_vocab(self) -> dict[str, int]: ...
    def get_added_vocab(self) -> dict[str, int]: ...
    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
    ) -> Any: ...
    def save_pretrained(self, folder: str | os.PathLike[str]) -> Any: ...


class BackendTokenizer:
    """A `Tokenizer` around one of the `tokenizers` library.

    backend: splits, merges and decodes; its special tokens are added to it.
    roles: token of each of `ROLES` that there is.  add_bos_token: the backend begins each text with it.

    Example:
        >>> from tokenizers import Tokenizer, models
        >>> words = BackendTokenizer(Tokenizer(models.BPE(vocab={"a": 0, "b": 1, "ab": 2}, merges=[("a", "b")])), {"eos_token": "b"})
        >>> words("aab")["input_ids"], words.eos_token_id, words.bos_token, len(words)
        ([0, 2], 1, None, 3)
    """

    def __init__(
        self,
        backend: Any,
        roles: Mapping[str, str],
        *,
        chat_template: str | dict[str, str] | None = None,
        add_bos_token: bool = False,
    ) -> None:
        self.backend_tokenizer = backend
        self.chat_template = chat_template
        self.add_bos_token = add_bos_token
        self.bos_token, self.eos_token, self.unk_token, self.pad_token = (roles.get(role) for role in ROLES)
        self.bos_token_id, self.eos_token_id, self.unk_token_id, self.pad_token_id = (
            None if role not in roles else backend.token_to_id(roles[role]) for role in ROLES
        )

    def __len__(self) -> int:
        return self.backend_tokenizer.get_vocab_size(with_added_tokens=True)

    def __call__(self, text: str, *, add_special_tokens: bool = True) -> dict[str, list[int]]:
        """`input_ids` of a text; add_special_tokens: begin it with BOS (and end it with EOS) where the model wants that."""
        (encoding,) = self.backend_tokenizer.encode_batch_fast(
            [text], add_special_tokens=add_special_tokens
        )  # lets other threads run
        return {"input_ids": encoding.ids}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The `input_ids` alone."""
        return self(text, add_special_tokens=add_special_tokens)["input_ids"]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of token ids."""
        return self.backend_tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def convert_ids_to_tokens(self, token_id: int) -> str | None:
        """A token as the vocabulary spells it; None where there is no such id."""
        return self.backend_tokenizer.id_to_token(token_id)

    def convert_tokens_to_ids(self, token: str) -> int | None:
        """Id of a token as the vocabulary spells it; None where there is no such token."""
        return self.backend_tokenizer.token_to_id(token)

    def get_vocab(self) -> dict[str, int]:
        """All tokens with their ids."""
        return self.backend_tokenizer.get_vocab(with_added_tokens=True)

    def get_added_vocab(self) -> dict[str, int]:
        """Tokens that are matched whole, before text is split, with their ids."""
        return {token.content: i for i, token in self.backend_tokenizer.get_added_tokens_decoder().items()}

    @property
    def all_special_ids(self) -> list[int]:
        """Ids of tokens that are no text, rising."""
        added = self.backend_tokenizer.get_added_tokens_decoder().items()
        roles = (self.bos_token_id, self.eos_token_id, self.unk_token_id, self.pad_token_id)
        return sorted({i for i, token in added if token.special} | {i for i in roles if i is not None})

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        **names: Any,
    ) -> Any:
        """A conversation as text, or its `input_ids`; names: what else the template sees, such as `tools`, for which there may be a template.

        Raises:
            ValueError: there is no template.
            jinja2.TemplateError: the template refuses these messages.
        """
        template = template_of(self.chat_template, tools=bool(names.get("tools")))
        if not template:
            raise ValueError("this tokenizer has no chat_template")
        tokens = {role: token for role in ROLES if (token := getattr(self, role)) is not None}
        text = render(template, messages, add_generation_prompt=add_generation_prompt, **tokens, **names)
        return self(text, add_special_tokens=False) if tokenize else text

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write `tokenizer.json`, `tokenizer_config.json` and the chat templates, which transformers reads."""
        place = Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        self.backend_tokenizer.save(str(place / "tokenizer.json"))
        settings = {role: getattr(self, role) for role in ROLES if getattr(self, role) is not None}
        settings |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        (place / "tokenizer_config.json").write_text(
            json.dumps(settings, indent=2, ensure_ascii=False), encoding="utf-8"
        )
        named = (
            {"default": self.chat_template}
            if isinstance(self.chat_template, str)
            else self.chat_template or {}
        )
        for name, template in named.items():
            file = place / (
                "chat_template.jinja" if name == "default" else f"additional_chat_templates/{name}.jinja"
            )
            file.parent.mkdir(exist_ok=True)
            file.write_text(template, encoding="utf-8")
