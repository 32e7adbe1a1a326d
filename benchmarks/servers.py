"""Servers of one model as processes: `edge serve`, llama.cpp's llama-server, llama-cpp-python's own."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from benchmarks.harness import EDGE, ROOT
from benchmarks.lent_device import end_with_parent
from benchmarks.serve_clients import get

EDGE_SERVE, LLAMA_SERVER, LLAMA_CPP_PYTHON = "edge serve", "llama-server", "llama-cpp-python's server"
BEFORE = "edge serve before"  # of another checkout
START_S = 180.0  # until a server answers
END_S = 30.0  # until it has ended by itself
HOST = "127.0.0.1"


class Server:
    """A server that can be started again and again. `command` gets the port that it is to listen on."""

    def __init__(self, name: str, command: Callable[[int], Sequence[str]], log: Path) -> None:
        self.name = name
        self.address = (HOST, 0)
        self.model = ""  # as requests name it
        self._command, self._log = command, log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> float:
        """Start it; seconds until it answers and has its model. SystemExit where it does not."""
        began = time.monotonic()
        self.address = (HOST, free_port())
        with self._log.open("wb") as out:
            self._process = subprocess.Popen(
                list(self._command(self.address[1])),
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                preexec_fn=end_with_parent,
            )
        asyncio.run(self._answer())
        return time.monotonic() - began

    async def _answer(self) -> None:
        deadline = time.monotonic() + START_S
        assert self._process is not None
        while time.monotonic() < deadline and self._process.poll() is None:
            with suppress(OSError, EOFError, ValueError, asyncio.TimeoutError):
                # llama-server lists its model before it has loaded it; llama-cpp-python's has no /health.
                status, body = await get(self.address, "/v1/models")
                if status in (200, 401) and (await get(self.address, "/health"))[0] in (200, 404):
                    self.model = json.loads(body)["data"][0]["id"] if status == 200 else ""  # requests need a key
                    return
            await asyncio.sleep(0.02)
        raise SystemExit(f"{self.name} does not answer; it said: {self._log.read_text(errors='replace')[-800:]}")

    def stop(self) -> None:
        """Ask it to end, and see that nothing is left of it."""
        if self._process is None:
            return
        processes = self.processes()
        self._process.terminate()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            print(f"{self.name} did not end within {END_S:g} s: it was killed", file=sys.stderr)
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()
        self._process = None

    def processes(self) -> list[psutil.Process]:
        """It and all that it started."""
        with suppress(psutil.NoSuchProcess):
            if self._process is not None:
                own = psutil.Process(self._process.pid)
                return [own, *own.children(recursive=True)]
        return []


@contextmanager
def running(servers: Mapping[str, Server]) -> Iterator[None]:
    """All of them, for the time of a block."""
    try:
        for server in servers.values():
            server.start()
        yield
    finally:
        for server in servers.values():
            server.stop()


def free_port() -> int:
    """A port that nothing listens on now."""
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        port: int = listener.getsockname()[1]
        return port


def edge_serve(
    model: Path, folder: Path, *, context: int, requests: int, threads: int, more: Sequence[str] = (), tree: Path = ROOT
) -> Server:
    """Return `edge serve` of this checkout, or of another one. context: tokens that each request may have."""
    options = ("--context", str(context * requests), "--requests", str(requests), "--threads", str(threads), *more)
    begin = [*EDGE] if tree == ROOT else ["env", "-C", str(tree), *EDGE]  # Python imports from its current folder first
    return Server(
        EDGE_SERVE if tree == ROOT else BEFORE,
        lambda port: [*begin, "serve", str(model.resolve()), "--host", HOST, "--port", str(port), *options],
        folder / f"edge-serve{'' if tree == ROOT else '-before'}.log",
    )


def llama_server(program: Path, model: Path, folder: Path, *, context: int, requests: int, threads: int) -> Server:
    """llama.cpp's own server, with its defaults otherwise."""
    options = ("-c", str(context * requests), "-np", str(requests), "-t", str(threads))
    return Server(
        LLAMA_SERVER,
        lambda port: [str(program), "-m", str(model), "--host", HOST, "--port", str(port), *options],
        folder / "llama-server.log",
    )


def llama_cpp_python(python: Path, model: Path, folder: Path, *, context: int, threads: int) -> Server:
    """llama-cpp-python's server. It answers one request at a time."""
    # By default it breaks off the one that it answers when another one comes.
    options = ["--interrupt_requests", "false", "--n_ctx", str(context)]
    options += ["--n_threads", str(threads), "--n_threads_batch", str(threads)]
    command = (str(python), "-m", "llama_cpp.server", "--model", str(model))
    return Server(
        LLAMA_CPP_PYTHON,
        lambda port: [*command, "--host", HOST, "--port", str(port), *options],
        folder / "llama-cpp-python.log",
    )


def has_server(python: Path) -> bool:
    """Return whether that Python has what llama-cpp-python's server needs."""
    done = subprocess.run([str(python), "-c", "import llama_cpp.server.app"], capture_output=True, check=False)
    return done.returncode == 0
