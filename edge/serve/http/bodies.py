"""Reading of requests and JSON responses; work is cancelled when its client goes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from typing import Any, TypeVar

import anyio
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

BODY_S = 60.0  # for a whole request to arrive
R = TypeVar("R", bound=BaseModel)
T = TypeVar("T")


class Json(Response):
    """JSON in ASCII: no reader takes one of its characters for the end of a line."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return to_json(content).encode()


_ENCODER = json.JSONEncoder(allow_nan=False, check_circular=False, separators=(",", ":"))


def to_json(value: Any) -> str:
    """Return compact JSON in ASCII."""
    return _ENCODER.encode(value)


async def read(request: Request, model: type[R]) -> R:
    """Return the validated body. ValidationError for errors in it, HTTPException if it does not arrive."""
    try:
        with anyio.fail_after(BODY_S):
            body = await request.body()
    except TimeoutError:
        raise HTTPException(408, f"the request did not come within {BODY_S:.0f} s", {"Connection": "close"}) from None
    return model.model_validate_json(body)


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of the work; cancel it and raise ClientDisconnect if the client goes. The body must have been
    read."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        gone.cancel()
        task.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
