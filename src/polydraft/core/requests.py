"""One sequence to generate, as a user asks for it."""

import reprlib
from dataclasses import dataclass
from numbers import Integral
from operator import index
from typing import Any

from polydraft.core.budget import Budget
from polydraft.core.params import SamplingParams
from polydraft.errors import InvalidInputError


@dataclass(frozen=True)
class Request:
    """One sequence to generate.

    seed, sample: its noise, never shared by two requests that run together: policies look at the whole batch, and would couple them.
    `seed` is resolved (never None); `sample` is in [0, 2**32): sample j of prompt i of a call is number 65,536 i + j.
    slot: of the target, which holds all tokens but the last, for drafters that share its cache; None where nobody says.
    second_slot: the same of the second sequence that a decoding method reads, in its own model.
    budget: of each of its drafts, in place of the engine's policy; max_depth 0 decodes it plainly.
    drafter, verifier: by name, in place of the engine's: one of those that it was built with, and a verifier that is exact for it.
    prediction_token_ids: what the output may be, as its sender guesses; drafters from text look it up, and nothing else reads it.
    source_token_ids: what the encoder of an encoder-decoder reads; the prompt then is how every output begins, see `EncoderDecoder`.
    """

    id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    sample: int = 0
    slot: int | None = None
    second_slot: int | None = None
    budget: Budget | None = None
    drafter: str | None = None
    verifier: str | None = None
    source_token_ids: tuple[int, ...] = ()
    prediction_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("prompt_token_ids", "source_token_ids", "prediction_token_ids"):
            object.__setattr__(self, name, _token_ids(name, getattr(self, name)))
        if not self.prompt_token_ids:
            raise InvalidInputError(
                "an empty prompt was given; expected at least one token. Give some text, or the model's BOS token."
            )
        for name, valid, expected in (
            ("id", isinstance(self.id, str), "a string"),
            (
                "params",
                isinstance(self.params, SamplingParams),
                "a SamplingParams, such as SamplingParams(max_tokens=64)",
            ),
            ("seed", _is_whole(self.seed, 1 << 63), "a whole number in [0, 2**63)"),
            ("sample", _is_whole(self.sample, 1 << 32), "a whole number in [0, 2**32)"),
        ):
            if not valid:
                raise InvalidInputError(
                    f"{name}={getattr(self, name)!r} was given in a request; expected {expected}."
                )


def _is_whole(value: object, end: int) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and 0 <= int(value) < end


def _token_ids(name: str, ids: Any) -> tuple[int, ...]:
    """Token ids of a request as Python's integers.

    Raises:
        InvalidInputError: not a sequence of whole numbers.
    """
    if type(ids) is tuple and all(type(token) is int for token in ids):
        return ids
    try:
        return tuple(index(token) for token in ids)
    except TypeError as error:
        raise InvalidInputError(
            f"{name}={reprlib.repr(ids)} was given in a request; expected whole numbers: token ids."
        ) from error
