"""/v1/prefixes: clients announce prefixes of future prompts."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from edge.serve.apis.chat import CHAT, ChatMessage, ChatRequest, Tool
from edge.serve.apis.fields import Fields, Items
from edge.serve.apis.tokens import template_of
from edge.serve.http.errors import BadRequest, NotThere
from edge.serve.served import ServedModels
from edge.serve.warming.turns import PLACEHOLDERS


class PrefixRequest(Fields):
    model: str | None = None
    messages: Annotated[Items[ChatMessage], Field(min_length=1)] | None = Field(
        None, description="messages that begin a chat; a last user message may continue"
    )
    tools: Items[Tool] | None = None
    prompt: str | None = Field(None, min_length=1, description="beginning of a text, instead of messages")


async def announce(request: PrefixRequest, models: ServedModels, namespace: str) -> dict[str, Any]:
    """Announce a prefix and return its description.

    Raises BadRequest unless it has either messages or a prompt, or if prefix warming is off; the errors of a chat; and
    Overloaded.
    """
    if (request.messages is None) == (request.prompt is None):
        raise BadRequest("a prefix needs either messages or a prompt", "messages")
    request.model = models.resolve(request.model)
    model = await models.model(request.model)
    arguments: dict[str, Any] = {"prompts": None, "text": request.prompt, "tools": (), "namespace": namespace}
    if request.messages is not None:
        values = request.model_dump(include={"model", "messages", "tools"}, exclude_none=True)
        chat = ChatRequest.model_validate(values)
        parsed = CHAT.parse(chat, await template_of(model))
        if parsed.generations[0].media:
            raise BadRequest("a prefix can only have text: pictures and sounds are not computed ahead", "messages")
        talk = parsed.conversation
        assert talk is not None, "it is a chat"
        messages, last = talk.messages, talk.messages[-1]
        arguments["tools"] = talk.tools
        arguments["prompts"] = [
            [*messages[:-1], {**last, "content": f"{last['content']}{placeholder}"}]
            if last["role"] == "user"
            else [*messages, {"role": "user", "content": placeholder}]
            for placeholder in PLACEHOLDERS
        ]
    arguments["adapters"] = models.adapters(request.model).scales(request.model) or None
    prefix = await model.prefixes("announce", arguments)
    if prefix is None:
        raise BadRequest("prefix warming is off; serve with --prefix-warming on")
    return {**prefix, "model": model.name}


async def announced(models: ServedModels, namespace: str) -> dict[str, Any]:
    """Return the prefixes that were announced with the same key, for all loaded models."""
    data = [
        {**prefix, "model": model.name}
        for model in await models.loaded()
        for prefix in await model.prefixes("announced", {"namespace": namespace}) or ()
    ]
    return {"object": "list", "data": data}


async def forget(prefix_id: str, models: ServedModels, namespace: str) -> dict[str, Any]:
    """Delete an announced prefix. Raises NotThere."""
    for model in await models.loaded():
        if await model.prefixes("forget", {"prefix_id": prefix_id, "namespace": namespace}):
            return {"id": prefix_id, "object": "prefix", "deleted": True}
    raise NotThere(f"no prefix {prefix_id[:100]!r} was announced with this key")
