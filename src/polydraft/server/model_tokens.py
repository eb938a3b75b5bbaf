"""Texts and conversations as token ids of a served model, and back."""

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from fastapi import Request

from polydraft.config import ServerConfig
from polydraft.engine.asynchronous import AsyncEngine
from polydraft.errors import IncompatibleError
from polydraft.models.tokens.chat_template import template_of
from polydraft.models.tokens.encoding import token_ids
from polydraft.models.tokens.spelling import Spelling
from polydraft.server.answer_tokens import token_text
from polydraft.server.conversation import Message, Tools
from polydraft.server.errors import ApiError
from polydraft.server.fill_in import FillForm
from polydraft.server.formats.derive import format_of
from polydraft.server.formats.form import Format
from polydraft.server.formats.history import prepared
from polydraft.server.messages import CountRequest
from polydraft.server.protocol import ChatRequest, DetokenizeRequest, TokenizeRequest
from polydraft.server.responses import ResponsesRequest

IDS_AT_ONCE = 16_384
"""That are turned into text before others are answered."""


class ModelTokens:
    """Of one model, by its name in requests."""

    engine: AsyncEngine
    name: str
    config: ServerConfig

    @property
    def tokenizer(self) -> Any:
        """The model's."""
        return self.engine.engine.tokenizer

    def template(self, *, tools: bool = False) -> str:
        """That a conversation is written by."""
        return template_of(getattr(self.tokenizer, "chat_template", None), tools=tools) or ""

    def format(self, *, tools: bool = True) -> Format:
        """How the model writes calls and thoughts: by the options, else as its template shows. tools: by the template for tools, where it has one."""
        return format_of(self.template(tools=tools), self.config.tool_format, self.config.reasoning_format)

    async def encoded(
        self, prompt: str | list[int], parse_special: bool, *, begins: bool = True
    ) -> list[int]:
        """Token ids of a text. begins: with the token that texts begin with, where it has none of its own."""
        encode = self.engine.engine.encode if begins else self._encode_bare
        return await asyncio.to_thread(encode, prompt, parse_special=parse_special)

    def _encode_bare(self, prompt: str | list[int], *, parse_special: bool) -> list[int]:
        ids = self.engine.engine.encode(prompt, parse_special=parse_special)
        if not isinstance(prompt, str):
            return ids
        return token_ids(self.tokenizer, prompt) if parse_special else self.without_first(ids)

    def decoded(self, ids: Sequence[int]) -> str:
        """Text of token ids."""
        self._check_ids(ids)
        return self.tokenizer.decode(list(ids))

    def _check_ids(self, ids: Sequence[int]) -> None:
        most = self.engine.engine.target.vocab_size
        bad = next((token for token in ids if not 0 <= token < most), None)
        if bad is not None:
            raise ApiError(400, f"token id {bad} was given; expected 0 <= id < {most}.", param="tokens")

    def without_first(self, ids: list[int]) -> list[int]:
        """Without the token that texts begin with."""
        return ids[ids[:1] == [getattr(self.tokenizer, "bos_token_id", None)] :]

    async def first_ids(self) -> list[int]:
        """The token that texts begin with, where they begin with one."""
        whole = await self.encoded("x", parse_special=False)
        return whole[: len(whole) - len(self.without_first(whole))]

    async def middle(self, text: str) -> list[int]:
        """Token ids of a text in the middle of a prompt."""
        return self.without_first(await self.encoded(text, parse_special=False)) if text else []

    async def files(self, form: FillForm, extra: Sequence[tuple[str, str]]) -> list[int]:
        """What stands before a prefix: the first token, and further files by their names and texts."""
        ids = list(await self.first_ids())
        if extra and form.repository is not None:
            ids += [form.repository, *await self.middle("myproject\n")]
        for name, text in extra:
            if form.file is None:
                ids += await self.middle("\n\n--- snippet ---\n\n")
            else:
                ids += [form.file, *await self.middle(f"{name}\n")]
            ids += await self.middle(text)
        if extra and form.file is not None:
            ids += [form.file, *await self.middle("filename\n")]
        return ids

    async def conversation(
        self, body: ChatRequest | ResponsesRequest | CountRequest, messages: Sequence[Message], param: str
    ) -> list[int]:
        """Token ids of what an answer follows. param: where the messages stand in the request."""
        options = {
            "tools": body.offered_tools(),
            "options": body.template_options(),
            "continued": body.continues(),
        }
        options |= {"opened": body.opens()}
        ids = await self._encoded_chat(messages, body.parse_special, param=param, **options)
        begins = isinstance(body, ChatRequest) and body.add_special_tokens
        return [*(await self.first_ids()), *ids] if begins else ids

    async def _encoded_chat(
        self,
        messages: Sequence[Message],
        parse_special: bool,
        *,
        tools: Tools | None = None,
        options: Mapping[str, Any] | None = None,
        continued: bool = False,
        opened: bool = True,
        param: str = "messages",
    ) -> list[int]:
        plain = [message.plain() for message in messages]
        more = dict(options or {})
        if reserved := more.keys() & {
            "messages",
            "conversation",
            "tools",
            "tokenize",
            "add_generation_prompt",
            "continue_final_message",
            "continued",
            "opened",
            "parse_special",
        }:
            raise ApiError(
                400,
                f"chat_template_kwargs has {min(reserved)!r}, which is not for it.",
                param="chat_template_kwargs",
            )
        offered = [function.described() for function in tools.functions] if tools else []
        plain, of_tools = prepared(plain, offered, self.format(tools=bool(offered)))
        more |= of_tools
        try:
            turns = {"continued": continued, "opened": opened}
            encode = partial(
                self.engine.engine.encode_chat, plain, parse_special=parse_special, **turns, **more
            )
            return await asyncio.to_thread(encode)
        except IncompatibleError as error:  # it names the model by its path
            message = str(error).replace(str(self.engine.engine.summary()["target"]), self.name)
            raise ApiError(400, message, param=param) from error

    async def count_tokens(self, request: Request, body: CountRequest) -> dict[str, Any]:
        """Tokens of a conversation in Anthropic's format."""
        return {"input_tokens": len(await self.conversation(body, body.conversation(), "messages"))}

    async def count_input(self, request: Request, body: ResponsesRequest) -> dict[str, Any]:
        """Tokens of what a response would answer."""
        ids = await self.conversation(body, body.messages(), "input")
        return {"object": "response.input_tokens", "input_tokens": len(ids)}

    async def tokenize(self, request: Request, body: TokenizeRequest) -> dict[str, Any]:
        """Token ids of a text or a conversation."""
        if sum(value is not None for value in (body.prompt, body.content, body.messages)) != 1:
            raise ApiError(400, "expected one of prompt, content and messages.", param="prompt")
        if body.messages is not None:
            chat = body.chat()
            ids = await self.conversation(chat, chat.messages, "messages")
        else:
            begins = (
                body.add_special_tokens
                if body.add_special_tokens is not None
                else bool(body.prompt) or body.add_special
            )
            ids = await self.encoded(
                body.prompt or body.content or "", body.parse_special is not False, begins=begins
            )
        tokens = [self._piece(token) for token in ids] if body.with_pieces else ids
        texts = (
            {"token_strs": [token_text(self.tokenizer, token)[0] for token in ids]}
            if body.return_token_strs
            else {}
        )
        return {
            "tokens": tokens,
            "count": len(ids),
            "max_model_len": self.engine.engine.target.max_model_len,
            **texts,
        }

    def _piece(self, token: int) -> dict[str, Any]:
        """A token's text, or its bytes where they are part of a character."""
        text, parts = token_text(self.tokenizer, token)
        return {"id": token, "piece": parts if text.startswith("bytes:") and parts else text}

    def tokenizer_info(self) -> dict[str, Any]:
        """What clients ask that tokenize themselves, such as evaluations: special tokens and the template."""
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        special = {
            name: None if (token := getattr(self.tokenizer, name, None)) is None else str(token)
            for name in names
        }
        more = {
            "model_max_length": self.engine.engine.target.max_model_len,
            "chat_template": self.template() or None,
        }
        return {"tokenizer_class": type(self.tokenizer).__name__, **special, **more}

    async def detokenize(self, request: Request, body: DetokenizeRequest) -> dict[str, Any]:
        """Text of token ids."""
        spelling = Spelling.of(self.tokenizer)
        ids = body.tokens
        if body.skip_special_tokens:
            ids = [token for token in ids if token not in spelling.special]
        if len(ids) <= IDS_AT_ONCE:
            text = self.decoded(ids)
        elif not spelling.spells:
            self._check_ids(ids)
            text = await asyncio.to_thread(_decoded_beside, self.tokenizer, ids)
        else:  # in pieces, between which others are answered
            self._check_ids(ids)
            parts = list[bytes]()
            for start in range(0, len(ids), IDS_AT_ONCE):
                parts.append(b"".join(map(spelling.bytes_of, ids[start : start + IDS_AT_ONCE])))
                await asyncio.sleep(0)
            text = b"".join(parts).decode("utf-8", spelling.errors)
            text = text.removeprefix(" ") if spelling.strips else text
        return {"prompt": text, "content": text}


def _decoded_beside(tokenizer: Any, ids: Sequence[int]) -> str:
    """Text of token ids, while other threads run: the `tokenizers` library lets them where it decodes a batch."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return (
        tokenizer.decode(ids)
        if backend is None
        else backend.decode_batch([ids], skip_special_tokens=False)[0]
    )
