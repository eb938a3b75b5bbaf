"""The grammar of the calls that an answer may make, and the tools whose arguments it does not hold to their schemas."""

import logging
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

from polydraft.core.params import StructuredOutputs
from polydraft.engine.asynchronous import AsyncEngine
from polydraft.errors import InvalidInputError
from polydraft.server.conversation import Tools
from polydraft.server.errors import ApiError
from polydraft.server.formats.calls import HEAVY_SECONDS, CallSource, Schemas, SchemaVerdict
from polydraft.server.formats.form import Format

log = logging.getLogger("polydraft.server")


class ToolGrammars:
    """Of one model, which remember what is known of schemas."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._schemas = Schemas(partial(engine.engine.compile_grammar, store=False))

    async def source(
        self, tools: Tools, text: StructuredOutputs | None, calls: Format
    ) -> tuple[CallSource, list[str]]:
        """The grammar, and the names of tools whose arguments are any JSON object. text: the form of what is no call.  calls: how the model writes them.

        Raises:
            ApiError: a schema that cannot be followed, of a tool that has to be called, by its place.
        """
        functions = [function.model_dump() for function in tools.callable]
        schemas = [function["parameters"] for function in functions]
        verdicts = await self._engine.compiling(partial(self._schemas.verdicts, schemas))
        free = _freed(functions, verdicts, tools)
        engine = self._engine.engine
        compiled = partial(
            CallSource.of,
            functions,
            engine.tokenizer,
            engine.compile_grammar,
            required=tools.required,
            parallel=tools.parallel,
            text=text,
            calls=calls,
            early=[i for i, v in enumerate(verdicts) if v.refusal is None and v.seconds > HEAVY_SECONDS],
            vocab_size=engine.target.vocab_size,
            stop_ids=engine.eos_token_ids,
        )
        try:
            return await self._engine.compiling(compiled), free
        except InvalidInputError as error:
            raise ApiError(400, str(error), param="tools") from error


def _freed(functions: Sequence[dict[str, Any]], verdicts: Sequence[SchemaVerdict], tools: Tools) -> list[str]:
    """Names of the functions whose schemas cannot be followed; their arguments become any JSON object.

    Raises:
        ApiError: a call is required, or a function is strict, by the place of the schema.
    """
    names = [function.name for function in tools.functions]
    free = list[str]()
    for function, verdict in zip(functions, verdicts, strict=True):
        if verdict.refusal is None:
            continue
        name = function["name"]
        if tools.required or function.get("strict"):
            place = tools.place.format(names.index(name))
            raise ApiError(400, f"{place}: {verdict.refusal}", param=place)
        free.append(name)
        _tell(name, verdict.refusal)
        function["parameters"] = {"type": "object"}
    return free


@lru_cache(maxsize=1024)  # once
def _tell(tool: str, refusal: str) -> None:
    log.warning("calls of the tool %r are served with any JSON object as arguments: %s", tool, refusal)
