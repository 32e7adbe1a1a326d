"""/v1/embeddings of OpenAI's API."""

from __future__ import annotations

import base64
import struct
from typing import Any, ClassVar, Literal

from pydantic import Field

from edge.serve.apis.completions import Tokens, prompts_of
from edge.serve.apis.fields import MAX_BATCH, Fields, Items
from edge.serve.apis.other_fields import Refused
from edge.serve.http.errors import BadRequest
from edge.serve.served import ServedModel


class EmbeddingsRequest(Fields):
    model: str | None = Field(None, description="default: the first of /v1/models")
    input: str | Tokens | Items[str] | Items[Tokens] = Field(description="a text, its tokens, or several of either")
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(None, ge=1, description="must equal the dimensions of the model")

    refused: ClassVar[Refused] = {"embd_normalize": (2,)}  # vectors are normalized to length 1 in the L2 norm (2)
    ignored = frozenset({"user"})


async def embeddings(request: EmbeddingsRequest, model: ServedModel) -> dict[str, Any]:
    """Return the embedding of each text.

    Raises BadRequest if the model makes no embeddings or has another number of dimensions.
    """
    texts = prompts_of(request.input, "input")
    if len(texts) > MAX_BATCH:
        raise BadRequest(f"{len(texts)} texts, at most {MAX_BATCH} are allowed", "input")
    if not (await model.about())["embeds"]:
        raise BadRequest(f"{model.name} makes no embeddings", "model")
    vectors, tokens = await model.embed(texts)
    if request.dimensions is not None and request.dimensions != len(vectors[0]):
        raise BadRequest(f"{model.name} has {len(vectors[0])} dimensions, not {request.dimensions}", "dimensions")
    is_base64 = request.encoding_format == "base64"
    data = [
        {"object": "embedding", "index": index, "embedding": _base64(vector) if is_base64 else vector}
        for index, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "data": data, "model": model.name, "usage": usage}


def _base64(vector: list[float]) -> str:
    """Return the vector as little-endian 32-bit floats in base64."""
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
