"""Drafters from text as vLLM's proposers: `{"method": "custom_class", "model": "polydraft.integrations.vllm.drafters.suffix"}`.

Every drafter of `polydraft methods` that asks nothing of the target is an attribute of this module: ngram, suffix, trigram, retrieval and
mixture. Drafts are chains of `num_speculative_tokens` at most, without probabilities.

vLLM calls a proposer with the texts of the batch's rows and does not say which request a row holds. So a row's state lives as long as
its text goes on, one that moved to another row is found by its text, and one whose text is gone has ended.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from polydraft.config import SpeculationConfig, from_environment, settings
from polydraft.core import Budget, Drafter, Needs, Request
from polydraft.core.params import SamplingParams
from polydraft.drafters.base import Parts, as_one_step, teach_each
from polydraft.errors import IncompatibleError, InvalidInputError
from polydraft.methods import registry

OPTIONS = settings(SpeculationConfig)["drafter_options"].variable
OPENING = 32
"""Tokens at the beginning of a text by which a state that changed its row is looked for before whole texts are compared."""


def options_of(text: str) -> dict[str, Any]:
    """Options of a drafter as they stand in the environment: an object of JSON.

    Raises:
        InvalidInputError: anything else.

    Example:
        >>> options_of('{"depth": 32, "store": true}')
        {'depth': 32, 'store': True}
    """
    try:
        options = json.loads(text or "{}")
    except json.JSONDecodeError as error:
        raise InvalidInputError(
            f"{OPTIONS}={text!r} was set, which is no JSON ({error}); expected an object of options."
        ) from error
    if not isinstance(options, dict):
        raise InvalidInputError(
            f'{OPTIONS}={text!r} was set; expected an object of options, such as {{"depth": 32}}.'
        )
    return options


@dataclass
class FollowedRow:
    """A request as far as it is known. tokens: its text when it was last seen."""

    state: Any
    tokens: np.ndarray
    num_prompt_tokens: int


class Proposer:
    """A drafter of polydraft behind vLLM's interface for proposers.

    drafter: by name, as registered.  vllm_config: as vLLM gives it.

    Raises:
        InvalidInputError: options that the drafter does not have.
        IncompatibleError: a drafter that needs the target's states or a draft model.
    """

    def __init__(self, vllm_config: Any, drafter: str) -> None:
        model = vllm_config.model_config
        self._depth = vllm_config.speculative_config.num_speculative_tokens
        self._max_model_len = model.max_model_len
        self._drafter = _build(drafter, model)
        self._rows: list[FollowedRow | None] = []

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """No model to load."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Chains for the rows of the batch, empty where a prompt is still being read or nothing is known.

        sampled_token_ids: what the last forward pass gave each row.  num_tokens_no_spec: [B] length of each text.  token_ids_cpu: [B, L] texts.
        """
        before = self._rows
        self._rows = [None for _ in sampled_token_ids]
        live = [b for b, emitted in enumerate(sampled_token_ids) if len(emitted)]
        texts = {b: np.array(token_ids_cpu[b, : num_tokens_no_spec[b]]) for b in live}
        for b in live:
            if b < len(before) and _goes_on(before[b], texts[b]):
                self._rows[b] = before[b]
                before[b] = None
        for b in live:
            if self._rows[b] is None:
                self._rows[b] = _followed(before, texts[b]) or self._begin(
                    texts[b], len(sampled_token_ids[b])
                )
        for gone in filter(None, before):
            self._drafter.release([gone.state])
            teach_each([self._drafter], gone.tokens[gone.num_prompt_tokens :].tolist())
        return [self._chain(b, texts[b]) if b in texts else [] for b in range(len(sampled_token_ids))]

    def _begin(self, text: np.ndarray, num_emitted: int) -> FollowedRow:
        prompt = text[: len(text) - num_emitted]
        (state,) = self._drafter.start([Request("row", tuple(prompt.tolist()), SamplingParams(), seed=0)])
        return FollowedRow(state, prompt, len(prompt))

    def _chain(self, b: int, text: np.ndarray) -> list[int]:
        row = self._rows[b]
        assert row is not None
        if len(text) > len(row.tokens):
            read = as_one_step([int(row.tokens[-1])], [text[len(row.tokens) :].tolist()])
            (row.state,) = self._drafter.observe([row.state], *read)
            row.tokens = text
        depth = min(self._depth, self._max_model_len - len(text) - 1)
        if depth < 1:
            return []
        tree = self._drafter.propose([row.state], [Budget.grown(depth, depth, 1)]).tree
        tokens, parents = (x[0] for x in tree.lists)
        return [token for token, parent in zip(tokens[1:], parents[1:], strict=True) if parent >= 0]


def _goes_on(row: FollowedRow | None, text: np.ndarray) -> bool:
    return (
        row is not None
        and len(row.tokens) <= len(text)
        and np.array_equal(row.tokens, text[: len(row.tokens)])
    )


def _followed(states: list[FollowedRow | None], text: np.ndarray) -> FollowedRow | None:
    """A state whose text goes on as this one, no longer another row's; of several the longest."""
    fitting = [b for b, row in enumerate(states) if row is not None and _alike(row, text)]
    if not fitting:
        return None
    best = max(fitting, key=lambda b: len(states[b].tokens))  # pyright: ignore[reportOptionalMemberAccess]
    state = states[best]
    states[best] = None
    return state


def _alike(row: FollowedRow, text: np.ndarray) -> bool:
    return np.array_equal(row.tokens[:OPENING], text[: min(OPENING, len(row.tokens))]) and _goes_on(row, text)


def _end_ids(model: Any) -> tuple[int, ...]:
    """End-of-text ids of a model, as its configuration has them."""
    ids = getattr(model.hf_config, "eos_token_id", None)
    return tuple(ids) if isinstance(ids, (list, tuple)) else () if ids is None else (ids,)


def _build(name: str, model: Any) -> Drafter:
    """The drafter for vLLM's model. store: true in its options shares what requests finish with those that come later."""
    kind = registry.drafter(name)
    if not getattr(kind, "reads_text_alone", False) or getattr(kind, "needs", Needs()) != Needs():
        raise IncompatibleError(
            f"the drafter {name!r} was asked for, which reads the target's forward passes or a draft model; a proposer of vLLM is shown texts alone. "
            "Expected ngram, suffix, trigram, retrieval or mixture. For a trained EAGLE-3 head use vLLM's own method eagle3."
        )
    options = options_of(from_environment(SpeculationConfig).get("drafter_options", ""))
    if (stored := options.pop("store", None)) is not None:
        store_class = getattr(kind, "store_class", None)
        if store_class is None or stored is not True:
            raise InvalidInputError(
                f"{OPTIONS} has store={stored!r} for the drafter {name!r}; expected true, for one that learns from outputs, such as suffix."
            )
        options["store"] = store_class()
    tokenizer = AutoTokenizer.from_pretrained(model.tokenizer) if "index" in options else None
    parts = Parts(SimpleNamespace(vocab_size=model.get_vocab_size()), None, tokenizer, _end_ids(model))  # pyright: ignore[reportArgumentType]
    return registry.build_drafter(name, parts, options)


def __getattr__(name: str) -> Any:
    """A proposer by the name of its drafter, as vLLM looks it up."""
    if name.startswith("_") or name not in registry.names("drafter"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return partial(Proposer, drafter=name)
