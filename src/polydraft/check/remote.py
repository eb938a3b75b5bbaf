"""Completions of any OpenAI-compatible server as token ids, with log-probabilities where it sends them."""

import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request

from polydraft.errors import IncompatibleError, InvalidInputError
from polydraft.files.urls import opened
from polydraft.models.tokens.spelling import Spelling

UNCUT: Mapping[str, Any] = {"top_p": 1, "top_k": 0, "min_p": 0}
"""Sampling by temperature alone, in the words of vLLM, llama.cpp and this project."""
FURTHER: Sequence[Mapping[str, Any]] = (
    {**UNCUT, "logprobs": 1, "return_token_ids": True},
    {**UNCUT, "logprobs": 1},
    {"top_p": 1, "logprobs": 1},
    {"top_p": 1},
)
"""What is asked for beside the temperature, the most first: a server that refuses one is asked for the next."""
SECONDS = 600
"""In which a server has to answer a request."""


@dataclass(frozen=True)
class RemoteText:
    """What followed a prompt. logprobs: of each token at temperature 1, None where the server does not tell.  stopped: at an end of text.

    guessed: the ids are those that the tokenizer makes of the text, which need not be the sampled ones.
    """

    prompt: Sequence[int]
    token_ids: list[int]
    logprobs: list[float] | None
    stopped: bool
    guessed: bool


class Completions:
    """Of a server. url: its address, with or without /v1.  tokenizer: of the model.  name: of it, where the server has several.

    Raises:
        InvalidInputError: nothing answers there, or not as such a server does.
    """

    def __init__(self, url: str, tokenizer: Any, name: str | None = None, key: str | None = None) -> None:
        self._url = url.rstrip("/").removesuffix("/v1")
        self._tokenizer = tokenizer
        self._key = key
        served = [model["id"] for model in self._asked("/v1/models")["data"]]
        if name is not None and name not in served:
            raise InvalidInputError(f"the model {name!r} was given; the server has {', '.join(served)}.")
        self.name = name or served[0]
        self._further = list(FURTHER)
        self._ids = dict[str, int]()

    def texts(
        self, prompts: Sequence[Sequence[int]], temperature: float, max_tokens: int, seeds: Sequence[int]
    ) -> Iterator[RemoteText]:
        """One text of each prompt, with a seed of its own."""
        sampling = {"model": self.name, "temperature": temperature, "max_tokens": max_tokens}
        first, *rest = (
            {**sampling, "prompt": list(prompt), "seed": seed}
            for prompt, seed in zip(prompts, seeds, strict=True)
        )
        yield self._text(first)  # alone, as it finds out what the server takes
        with ThreadPoolExecutor(4) as pool:  # drafts behave as they do under load
            yield from pool.map(self._text, rest)

    def _text(self, body: Mapping[str, Any]) -> RemoteText:
        while True:
            try:
                answer = self._asked("/v1/completions", {**body, **self._further[0]})
                break
            except HTTPError as error:
                if error.code not in (400, 422) or len(self._further) == 1:
                    message = error.read().decode(errors="replace")[:300]
                    raise InvalidInputError(
                        f"the server refused a completion with status {error.code}: {message}"
                    ) from error
                self._further.pop(0)
        (choice,) = answer["choices"]
        reported = choice.get("logprobs") or {}
        listed = reported.get("content")  # llama.cpp's, with ids
        logprobs = [token["logprob"] for token in listed] if listed else reported.get("token_logprobs")
        ids = choice.get("token_ids")
        guessed = False
        if not ids and listed and "id" in listed[0]:
            ids = [token["id"] for token in listed]
        if not ids and reported.get("tokens"):
            ids = [self._id(text) for text in reported["tokens"]]
        if not ids:
            ids = self._tokenizer(choice["text"], add_special_tokens=False)["input_ids"]
            guessed = True
            logprobs = None
        return RemoteText(body["prompt"], ids, logprobs, choice.get("finish_reason") == "stop", guessed)

    def _id(self, text: str) -> int:
        """A token by its text, or by its bytes as OpenAI writes those that are no text."""
        if not self._ids:
            spelling = Spelling.of(self._tokenizer)
            for token in reversed(range(len(self._tokenizer))):
                self._ids[
                    _spelled(spelling.bytes_of(token)) if spelling.spells else self._tokenizer.decode([token])
                ] = token
        if text not in self._ids:
            raise IncompatibleError(
                f"the server has the token {text!r}, which the model's vocabulary has not. Give the model that it serves."
            )
        return self._ids[text]

    def _asked(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        headers = {"Content-Type": "application/json"} | (
            {"Authorization": f"Bearer {self._key}"} if self._key else {}
        )
        data = None if body is None else json.dumps(body).encode()
        try:
            with opened(Request(self._url + path, data, headers), SECONDS) as response:
                return json.load(response)
        except HTTPError as error:
            if body is None:
                raise InvalidInputError(
                    f"{self._url} was given, which answers with status {error.code} to {path}."
                ) from error
            raise
        except (URLError, OSError, ValueError) as error:
            raise InvalidInputError(
                f"{self._url} was given, where no server of models answers: {error}. Start it, or give its address."
            ) from error


def _spelled(parts: bytes) -> str:
    try:
        return parts.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{part:02x}" for part in parts)
