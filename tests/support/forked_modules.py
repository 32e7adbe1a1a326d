"""Run modules of this project as processes that are forked from one that has imported them: for tests of their output,
which would otherwise import the same modules hundreds of times.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import IO, Any

import psutil
import pytest

from devices.processes.forking import ForkedProcess
from edge.serve.messages import MOST_LINE_BYTES
from tests.support import FORKED_COMMAND, MODULE, MOST_OF_A_NAME
from tests.support.helpers import fork_server

_MODULE = 3  # the place of its name in a command of `interpreter.module_command`


def fork_modules(patch: pytest.MonkeyPatch) -> None:
    """Let what renders templates, follows constraints, encodes pictures or quantizes, and engine processes of servers
    of this process be forked."""
    forked = type("subprocess", (), {**vars(subprocess), "Popen": forked_module})
    patch.setattr("edge.text.templates.process.subprocess", forked)
    patch.setattr("edge.quantization.gguf.subprocess", forked)
    patch.setattr("edge.text.constraints.process.subprocess", forked)
    patch.setattr("edge.media.encoder.subprocess", forked)
    patch.setattr("edge.serve.engine_child.spawn", _spawn)


def _start(module: str, arguments: Sequence[str], descriptors: Sequence[int]) -> ForkedProcess:
    environment = json.dumps({**os.environ})
    return fork_server.start([environment, MODULE, os.getcwd(), module, *arguments], descriptors)


def forked_module(
    command: Sequence[str],
    *,
    stdin: Any,
    stdout: Any,
    stderr: Any,
    start_new_session: bool,
    pass_fds: Sequence[int] = (),
) -> Any:
    """Return what subprocess.Popen returns for a command of `module_command`, as far as it is used. pass_fds: what the
    last arguments of the command name."""
    assert start_new_session
    arguments = command[_MODULE + 1 : len(command) - len(pass_fds)]
    with open(os.devnull, "r+b") as nothing:
        stdin, stdout, stderr = (nothing.fileno() if s == subprocess.DEVNULL else s for s in (stdin, stdout, stderr))
        to_process, from_process = _pipe(stdin, os.O_WRONLY), _pipe(stdout, os.O_RDONLY)
        errors = stderr if isinstance(stderr, int) else stderr.fileno()
        process: Any = _start(command[_MODULE], arguments, [to_process[0], from_process[0], errors, *pass_fds])
    for theirs, ours in (to_process, from_process):
        if ours is not None:
            os.close(theirs)
    process.stdin, process.stdout = to_process[1], from_process[1]
    return process


def _pipe(stream: int, flags: int) -> tuple[int, IO[bytes] | None]:
    """The descriptor for the process, and the other end where a pipe is asked for."""
    if stream != subprocess.PIPE:
        return stream, None
    read, write = os.pipe()
    return (read, os.fdopen(write, "wb")) if flags == os.O_WRONLY else (write, os.fdopen(read, "rb"))


def running(module: str) -> list[psutil.Process]:
    """The processes of this one that run a module, forked or not."""
    parents = [psutil.Process(), *(child for child in psutil.Process().children() if FORKED_COMMAND in child.cmdline())]
    processes = []
    for child in (child for parent in parents for child in parent.children()):
        with suppress(psutil.NoSuchProcess):  # it has just ended
            if runs(child, module):
                processes.append(child)
    return processes


def runs(process: psutil.Process, module: str) -> bool:
    """Return whether a process runs a module, forked or not."""
    return process.name() == module[-MOST_OF_A_NAME:] or module in process.cmdline()


class _AsyncProcess:
    """The used part of asyncio.subprocess.Process."""

    def __init__(self, process: ForkedProcess) -> None:
        self._process, self.pid = process, process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.poll()

    def kill(self) -> None:
        self._process.kill()

    async def wait(self) -> int:
        if sys.platform == "linux":
            with suppress(ProcessLookupError):  # it has ended already
                handle = os.pidfd_open(self.pid)
                loop, ended = asyncio.get_running_loop(), asyncio.Event()
                loop.add_reader(handle, ended.set)
                try:
                    await ended.wait()
                finally:
                    loop.remove_reader(handle)
                    os.close(handle)
        return self._process.wait()


async def _spawn(module: str) -> tuple[_AsyncProcess, asyncio.StreamReader, asyncio.StreamWriter]:
    """As `edge.serve.engine_child.spawn`."""
    ours, theirs = socket.socketpair()
    with theirs, open(os.devnull) as nothing, ExitStack() as stack:
        stack.callback(ours.close)
        reader, writer = await asyncio.open_connection(sock=ours, limit=MOST_LINE_BYTES)
        process = _start(module, ["--control"], [nothing.fileno(), 1, 2, theirs.fileno()])
        stack.pop_all()
    return _AsyncProcess(process), reader, writer
