"""/v1/embeddings: the mean of a model's last states, of length one, as OpenAI writes embeddings."""

from base64 import b64encode
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from fastapi import Request, Response
from fastapi.responses import JSONResponse
from jaxtyping import Float
from pydantic import Field

from polydraft.server.bodies import Requested, Texts
from polydraft.server.errors import ApiError
from polydraft.server.incoming import GONE, unless_gone
from polydraft.server.service import Service

Dimensions = Annotated[int, Field(ge=1)]


class EmbeddingRequest(Requested):
    """Of /v1/embeddings. dimensions: the first so many, of length one again.  add_special_tokens: texts begin with the token that texts begin with."""

    group: ClassVar[str] = "embeddings"

    model: str | None = None
    input: Texts
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Dimensions | None = None
    add_special_tokens: bool = True


async def embeddings(service: Service, request: Request, body: EmbeddingRequest) -> Response:
    """An embedding of each text."""
    texts = (
        [body.input] if isinstance(body.input, str) or isinstance(body.input[0], int) else list(body.input)
    )
    begins = body.add_special_tokens
    ids = [await service.encoded(text, parse_special=False, begins=begins) for text in texts]  # pyright: ignore[reportArgumentType]
    vectors = await unless_gone(request, service.embedded(ids))
    if vectors is None:
        return Response(status_code=GONE)
    written = [_written(shortened(vector, body.dimensions), body.encoding_format) for vector in vectors]
    data = [
        {"object": "embedding", "index": index, "embedding": vector} for index, vector in enumerate(written)
    ]
    count = sum(map(len, ids))
    usage = {"prompt_tokens": count, "total_tokens": count}
    return JSONResponse({"object": "list", "data": data, "model": service.name, "usage": usage})


def shortened(vector: Float[np.ndarray, " D"], dimensions: int | None) -> Float[np.ndarray, " d"]:
    """The first dimensions, of length one.

    Raises:
        ApiError: more than there are.

    Example:
        >>> shortened(np.array([3.0, 4.0, 12.0], np.float32), 2).tolist()
        [0.6000000238418579, 0.800000011920929]
    """
    if dimensions is not None and dimensions > len(vector):
        raise ApiError(
            400, f"dimensions={dimensions} was given; the model has {len(vector)}.", param="dimensions"
        )
    part = vector[:dimensions]
    return (part / max(float(np.linalg.norm(part)), 1e-12)).astype(np.float32)


def _written(vector: Float[np.ndarray, " d"], form: str) -> str | Sequence[Any]:
    return b64encode(vector.astype("<f4").tobytes()).decode() if form == "base64" else vector.tolist()
