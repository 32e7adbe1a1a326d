"""A planning process, seen from the server: its job, its progress, and its end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any

from edge.errors import EngineGone, Interrupted
from edge.serve.engine_child import exit_code, spawn
from edge.serve.messages import error_of

Progress = Callable[[Mapping[str, Any]], None]


async def planned(
    do: str, arguments: Mapping[str, Any], limit_s: float, progress: Progress = lambda values: None
) -> dict[str, Any]:
    """Return the result of a job in a process of its own, see `edge.serve.planning.child`.

    The process ends with this call, also if the call is cancelled.
    progress: called with `status`, and `completed` and `total` if they are known.
    Raises the error of the job, Interrupted if it takes more than `limit_s` seconds, and EngineGone if it crashes.
    """
    process, reader, writer = await spawn("edge.serve.planning.child")
    try:
        writer.write(json.dumps({"do": do, "with": arguments}).encode() + b"\n")
        return await asyncio.wait_for(_result(reader, progress), limit_s)
    except asyncio.TimeoutError:
        raise Interrupted(
            f"planning took more than {limit_s:g} s and was ended; try again with fewer devices"
        ) from None
    except ConnectionError:
        raise EngineGone("the planning process ended before it began; try again") from None
    except asyncio.IncompleteReadError:
        raise EngineGone(f"the planning process ended with exit code {await exit_code(process)}; try again") from None
    finally:
        writer.close()
        await exit_code(process)


async def _result(reader: asyncio.StreamReader, progress: Progress) -> dict[str, Any]:
    while True:
        message = json.loads(await reader.readuntil(b"\n"))
        if "fatal" in message:
            raise error_of(message["fatal"])
        if "result" in message:
            result: dict[str, Any] = message["result"]
            return result
        progress(message["progress"])
