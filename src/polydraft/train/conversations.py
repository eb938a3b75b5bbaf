"""Text that a target writes itself, to train its drafters on: shards of token ids, each a function of the seed and its number.

    chat models    the template's user turn is left open, so that the model asks itself a question; then it answers
    others         from the beginning of a text, and from the beginnings of given ones

A drafter is trained for what it will be asked to draft: the target's own words, at the temperatures that are served.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from jaxtyping import Int

from polydraft.core import SamplingParams
from polydraft.engine.api import Engine
from polydraft.errors import InvalidInputError, ModelLoadError
from polydraft.files.atomic import replacing

TEMPERATURES = (0.0, 0.7, 1.0, 1.0)
"""Of which each answer of a chat model has one."""
OPENINGS = (
    "",
    "",
    "",
    "How ",
    "What ",
    "Write ",
    "Explain ",
    "Can you ",
    "Calculate ",
    "Summarize ",
    "Translate ",
    "If ",
    "Why ",
    "Give ",
)
"""Questions begin with nothing, or so that they differ."""
QUESTION = 140
ANSWER = 400
"""Most tokens."""
_MARK = "\x1a"


@dataclass(frozen=True)
class TrainingText:
    """tokens: ids.  prompt_length: how many of them, at the beginning, the target did not write."""

    tokens: Int[np.ndarray, " T"]
    prompt_length: int


def write_shard(
    engine: Engine, number: int, *, seed: int, count: int, earlier: set[str]
) -> list[TrainingText]:
    """About so many texts of the target, the same for the same (seed, number) and engine.

    earlier: questions that were asked before, which are not asked again; grows by this shard's.
    """
    rng = Random(f"{seed}/{number}")
    noise = 2 * (seed * 1_000_003 + number)
    chat = getattr(engine.tokenizer, "chat_template", None)
    questions = _questions(engine, rng, noise, count, earlier) if chat else None
    prompts = [[_begin(engine)]] * count if questions is None else questions
    params = [
        SamplingParams(
            temperature=rng.choice(TEMPERATURES if chat else (1.0,)), max_tokens=ANSWER, seed=noise + 1
        )
        for _ in prompts
    ]
    answers = engine.generate(prompts, params)
    return [
        TrainingText(np.array([*p, *a.token_ids]), _written_from(engine) if chat else 1)
        for p, a in zip(prompts, answers, strict=True)
    ]


def _begin(engine: Engine) -> int:
    """The token that begins a text."""
    begin = engine.target.bos_token_id
    return begin if begin is not None else [*engine.target.eos_token_ids, 0][0]


def _opening(engine: Engine) -> str:
    """The chat template up to where the user's words begin."""
    rendered = engine.tokenizer.apply_chat_template([{"role": "user", "content": _MARK}], tokenize=False)
    return rendered.partition(_MARK)[0]


def _written_from(engine: Engine) -> int:
    return len(engine.tokenizer(_opening(engine), add_special_tokens=False)["input_ids"])


def _questions(engine: Engine, rng: Random, seed: int, count: int, earlier: set[str]) -> list[list[int]]:
    """Questions that the model asks itself, each a prompt to answer; unfinished, short and repeated ones are left out."""
    opening = _opening(engine)
    begun = [rng.choice(OPENINGS) for _ in range(count)]
    params = SamplingParams(temperature=1.0, max_tokens=QUESTION, seed=seed)
    ids = [engine.tokenizer(opening + begin, add_special_tokens=False)["input_ids"] for begin in begun]
    prompts = list[list[int]]()
    for begin, result in zip(begun, engine.generate(ids, params), strict=True):
        question = (begin + result.text).strip()
        if (
            result.samples[0].finish_reason == "stop"
            and len(question.split()) >= 3
            and question not in earlier
        ):
            earlier.add(question)
            prompts.append(engine.encode_chat([{"role": "user", "content": question}]))
    return prompts


def read_text(path: Path) -> str:
    """A file's text.

    Raises:
        OSError: it cannot be read.
        ValueError: why it is no text.
    """
    with path.open("rb") as file:
        data = file.read(8192)
        data += b"" if b"\0" in data else file.read()  # the rest of a large binary file is not read
    if b"\0" in data:
        raise ValueError(f"byte 0x00 at offset {data.index(0)} is in no text")
    try:
        return data.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise ValueError(f"byte 0x{data[error.start]:02x} at offset {error.start} is not UTF-8") from None


def check_file(path: Path) -> None:
    """Refuse a file of texts that cannot be one, without a model.

    Raises:
        InvalidInputError, ModelLoadError: as of `from_file`.
    """
    if path.suffix == ".npz":
        read_shard(path)
    elif not any(
        isinstance(record, Mapping) and ("text" in record or "messages" in record) for record in _said(path)
    ):
        raise _unusable(path)


def _unusable(path: Path) -> InvalidInputError:
    return InvalidInputError(
        f"{str(path)!r} has no usable line; expected plain text, or .jsonl or .parquet whose lines have 'text' or 'messages'. Give another file."
    )


def from_file(path: Path, engine: Engine) -> list[TrainingText]:
    """Texts of a file: a shard, jsonl or parquet (conversations under "messages", or "text"), or plain text; cut into pieces that fit the context.

    Raises:
        InvalidInputError: a file without a usable line or that is no text, or parquet without pyarrow.
    """
    most = engine.target.max_model_len
    if path.suffix == ".npz":
        return [TrainingText(t.tokens[:most], t.prompt_length) for t in read_shard(path)]
    texts = list[TrainingText]()
    for record in _said(path):
        try:
            messages = record.get("messages")
            ids = engine.encode(record["text"]) if messages is None else engine.tokenizer(
                engine.tokenizer.apply_chat_template(list(messages), tokenize=False), add_special_tokens=False
            )["input_ids"]  # fmt: skip
        except (ValueError, KeyError, AttributeError, TypeError):
            continue
        texts += [
            TrainingText(np.array(ids[i : i + most]), 1)
            for i in range(0, len(ids), most)
            if len(ids) - i > 16
        ]
    if not texts:
        raise _unusable(path)
    return texts


def _said(path: Path) -> Iterator[Any]:
    """Lines of a file as they were read; a plain text is one."""
    if path.suffix == ".parquet":
        try:
            from pyarrow.parquet import ParquetFile
        except ImportError as error:
            raise InvalidInputError(
                f"{str(path)!r} was given and pyarrow is not installed; install the extra: pip install 'polydraft[parquet]'."
            ) from error
        try:
            for batch in ParquetFile(path).iter_batches():
                yield from batch.to_pylist()
        except (OSError, ValueError) as error:  # pyarrow's are among them
            raise InvalidInputError(
                f"{str(path)!r} cannot be read as parquet ({error}). Give another file."
            ) from error
    elif path.suffix == ".jsonl":
        for line in path.read_text(encoding="utf-8-sig", errors="replace").split("\n"):  # U+2028 ends no line
            with suppress(ValueError):
                yield json.loads(line)
    else:
        try:
            yield {"text": read_text(path)}
        except (OSError, ValueError) as error:
            raise InvalidInputError(
                f"{str(path)!r} was given as plain text and is none: {error}. Give text, .jsonl, .parquet or shards of .npz."
            ) from error


def save_shard(path: Path, texts: Sequence[TrainingText]) -> None:
    """Write texts as uint16 or uint32, whole or not at all."""
    flat = np.concatenate([t.tokens for t in texts])
    with replacing(path) as file:
        np.savez_compressed(
            file,
            tokens=flat.astype(np.uint16 if flat.max(initial=0) < 1 << 16 else np.uint32),
            lengths=np.array([len(t.tokens) for t in texts], np.int32),
            given=np.array([t.prompt_length for t in texts], np.int32),
        )


def read_shard(path: Path) -> list[TrainingText]:
    """Texts as `save_shard` wrote them.

    Raises:
        ModelLoadError: a file that is none.
    """
    try:
        with np.load(path, allow_pickle=False) as arrays:
            tokens, lengths, prompt_lengths = (arrays[name] for name in ("tokens", "lengths", "given"))
        if (
            lengths.sum() != len(tokens)
            or len(lengths) != len(prompt_lengths)
            or (lengths < 1).any()
            or (prompt_lengths < 0).any()
        ):
            raise ValueError("its lengths do not fit")
    except Exception as error:  # whatever the file holds
        raise ModelLoadError(
            f"{str(path)!r} is no shard of texts: {error}. Delete it; it is written again."
        ) from error
    cuts = np.cumsum(lengths)[:-1]
    return [
        TrainingText(t.astype(np.int64), int(g))
        for t, g in zip(np.split(tokens, cuts), prompt_lengths, strict=True)
    ]
