"""An engine that answers rows: what a Ray actor holds. Nothing here knows Ray.

A row is a mapping with `prompt` (a text), `messages` (a conversation) or `prompt_token_ids`, and maybe `params`, sampling parameters of its own.
What came in goes out again, with `text`, `token_ids` and `finish_reason`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from polydraft.config import EngineConfig
from polydraft.core import SamplingParams
from polydraft.core.params import MOST_SAMPLES
from polydraft.engine.api import Engine
from polydraft.errors import InvalidInputError, PolydraftError

Row = Mapping[str, Any]
FORMS = ("prompt", "messages", "prompt_token_ids")


class Outputs(Protocol):
    """What other workers' requests ended with."""

    def exchange(self, mine: Sequence[Sequence[int]], since: int) -> tuple[list[list[int]], int]: ...


class EngineWorker:
    """An engine, built once, and the rows that it is given.

    model: None is the embedded pair.  options: of `config.EngineConfig`.  params: of all rows, as `SamplingParams`.
    seed: of the call; a row's noise is a function of it and of the row's number, wherever it is answered.
    store: whether the suffix drafter learns from finished rows; see `share`.

    Example:
        >>> worker = EngineWorker(None, params={"temperature": 0, "max_tokens": 4})
        >>> (answer,) = worker.answer([(0, {"id": "a", "prompt": "import os"})])
        >>> sorted(answer)
        ['finish_reason', 'id', 'prompt', 'text', 'token_ids']
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        params: Mapping[str, Any] | None = None,
        seed: int = 0,
        store: bool = False,
        **options: Any,
    ) -> None:
        if store:
            from polydraft.drafters.text.suffix import SuffixStore

            self._store = SuffixStore()
            options |= {"drafter": "suffix", "drafter_options": {"store": self._store}}
        self._engine = Engine.from_config(EngineConfig.of(model=model, **options))
        SamplingParams(**(params or {}))  # refused before the first row
        self._params = dict(params or {})
        self._seed = seed
        self._seen = 0

    def answer(self, rows: Sequence[tuple[int, Row]]) -> list[dict[str, Any]]:
        """The rows, each with its number, answered as one batch; a bad row has `error` alone beside its own keys."""
        waiting = list[tuple[Row, Any]]()
        for number, row in rows:
            try:
                waiting.append((row, self._submit(number, row)))
            except (PolydraftError, TypeError, ValueError, KeyError) as error:
                waiting.append((row, " ".join(str(error).split()) or repr(error)))
        while self._engine.has_unfinished_requests:
            self._engine.step()
        return [dict(row) | _as_row(result) for row, result in waiting]

    def _submit(self, number: int, row: Row) -> Any:
        forms = [form for form in FORMS if row.get(form) is not None]
        if len(forms) != 1:
            raise InvalidInputError(
                f"the row has {forms or 'no prompt'}; expected one of {', '.join(FORMS)}."
            )
        prompt = row[forms[0]]
        if forms[0] == "messages":
            prompt = self._engine.encode_chat(prompt)
        defaults = self._engine.default_params(chat=forms[0] == "messages")
        params = defaults.with_(**self._params).with_(**(row.get("params") or {}))
        if params.seed is None:
            params = params.with_(seed=self._seed + number // MOST_SAMPLES)
        return self._engine.submit(prompt, params, number % MOST_SAMPLES)

    def share(self, outputs: Outputs, answered: Sequence[Row]) -> None:
        """Hand in what these rows ended with, and learn what others' did."""
        news, self._seen = outputs.exchange(
            [row["token_ids"] for row in answered if row.get("token_ids")], self._seen
        )
        for token_ids in news:
            self._store.add(token_ids)


def _as_row(result: Any) -> dict[str, Any]:
    if isinstance(result, str):
        return {"error": result}
    if result.samples[0].error:
        return {"error": result.samples[0].error}
    return {"text": result.text, "token_ids": result.token_ids, "finish_reason": result.finish_reason}
