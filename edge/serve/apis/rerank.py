"""/v1/rerank in the form of Jina's API and llama.cpp's server."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from edge.serve.apis.fields import MAX_BATCH, Fields, Items
from edge.serve.http.errors import BadRequest
from edge.serve.served import ServedModel


class Document(Fields):
    text: str


class RerankRequest(Fields):
    model: str | None = Field(None, description="default: the first of /v1/models")
    query: str = Field(min_length=1)
    documents: Annotated[Items[str | Document], Field(min_length=1, max_length=MAX_BATCH)]
    top_n: int | None = Field(None, ge=1, description="maximum number of results; default: all documents")
    return_documents: bool | None = Field(None, description="return the texts of the documents")


async def rerank(request: RerankRequest, model: ServedModel) -> dict[str, Any]:
    """Return the scores of the documents, best first. Raises BadRequest if the model is not a reranker."""
    if not (await model.about())["reranks"]:
        raise BadRequest(
            f"{model.name} does not rank documents: that takes a model with a ranking head (a pooling_type of 4, as"
            " bge-reranker or Qwen3-Reranker have it), served on one device and without --memory",
            "model",
        )
    texts = [document if isinstance(document, str) else document.text for document in request.documents]
    scores, tokens = await model.rerank(request.query, texts)
    best = sorted(range(len(texts)), key=lambda index: -scores[index])[: request.top_n]
    results = [
        {
            "index": index,
            "relevance_score": scores[index],
            **({"document": {"text": texts[index]}} if request.return_documents else {}),
        }
        for index in best
    ]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "model": model.name, "results": results, "usage": usage}
