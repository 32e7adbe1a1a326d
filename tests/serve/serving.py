"""Run a server in a thread, on a free port of loopback."""

import asyncio
import json
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette

from edge.serve.options import ServeOptions
from edge.serve.server import uvicorn_config

START_S = 60.0
END_S = 60.0
PLAIN = ServeOptions()


@contextmanager
def serving(
    app: Starlette, at_end: Callable[[], Awaitable[None]] | None = None, options: ServeOptions = PLAIN
) -> Iterator[str]:
    """Its address, "http://127.0.0.1:PORT". It ends with the block, and with it what it answers. at_end: then done in
    the server's loop."""

    async def serve() -> None:
        try:
            await server.serve([listening])
        finally:
            if at_end is not None:
                await at_end()

    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn_config(app, options))
    thread = threading.Thread(target=lambda: asyncio.run(serve()), name="server")
    thread.start()
    try:
        waited = threading.Event()
        for _ in range(int(START_S / 0.05)):
            if server.started or not thread.is_alive():
                break
            waited.wait(0.05)
        assert server.started, "the server did not start"
        yield f"{'https' if options.tls_cert else 'http'}://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(END_S)
        listening.close()
        assert not thread.is_alive(), "the server did not end"


def events_of(text: str) -> list[dict[str, Any]]:
    """The JSON of each event in a stream of server-sent events."""
    data = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(item) for item in data if item != "[DONE]"]
