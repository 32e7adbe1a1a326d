"""Python processes that exchange messages with this one over a socket: start and end."""

from __future__ import annotations

import asyncio
import signal
import socket

from devices.processes.interpreter import module_command
from edge.serve.messages import MOST_LINE_BYTES

EXIT_S = 10.0  # for a process to end by itself


async def spawn(module: str) -> tuple[asyncio.subprocess.Process, asyncio.StreamReader, asyncio.StreamWriter]:
    """Start a process that runs a module with `--control` and its end of a socket; return it and the other end.
    OSError."""
    ours, theirs = socket.socketpair()
    try:
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *module_command(module, "--control", str(theirs.fileno())),
                pass_fds=[theirs.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
                start_new_session=True,
            )
        return process, *await asyncio.open_connection(sock=ours, limit=MOST_LINE_BYTES)
    except BaseException:
        ours.close()
        raise


async def exit_code(process: asyncio.subprocess.Process) -> int:
    """Wait for the end of a process and return its exit code; kill it if it does not end within EXIT_S."""
    try:
        return await asyncio.wait_for(process.wait(), EXIT_S)
    except asyncio.TimeoutError:
        process.kill()
        return await process.wait()


def how_ended(name: str, code: int) -> str:
    """Return for people how the engine process of a model ended."""
    if code >= 0:
        return f"the engine process of {name} ended with exit code {code}"
    hint = " (out of memory is the usual cause)" if -code == signal.SIGKILL else ""
    return f"the engine process of {name} was killed by {signal.Signals(-code).name}{hint}"
