"""The process that computes: a loaded model, and requests on it. It speaks JSON with the server, as messages.py says.

One thread drives the engine: it takes what arrived, makes a step, and tells what came of it. Others prepare requests
(templates, tokens, grammars), so that the engine waits for none. The process ends when the server does.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

from devices.processes.memory import give_back_memory
from edge.serve.config import EngineConfig
from edge.serve.loop import ServingLoop
from edge.serve.messages import MOST_LINE_BYTES, error_json
from edge.speculate.factory import speculation
from edge.tasks import ShowStep, Steps

_PREPARING = 4  # threads
_LARGE_BYTES = 1 << 20  # of what is asked: what preparing it took is given back to the system
_CONSTRAINING = 2  # threads for requests whose answers are constrained: compiling may take a second of a processor
_CONSTRAINTS = ("grammar", "json_schema", "regex", "lark")


class Control:
    """The socket to the server."""

    def __init__(self, its_socket: socket.socket) -> None:
        self._socket, self._lock = its_socket, threading.Lock()

    def send(self, *messages: Mapping[str, Any]) -> None:
        """Tell the server. A server that has gone is noticed by whoever reads."""
        data = json.dumps(messages).encode() + b"\n"
        with self._lock:
            try:
                self._socket.sendall(data)
            except OSError:
                return

    def lines(self) -> Iterator[dict[str, Any]]:
        """What the server says, until it goes: also where it leaves what it was told unread."""
        with suppress(ConnectionError), self._socket.makefile("rb") as stream:
            yield from map(_message, iter(partial(stream.readline, MOST_LINE_BYTES), b""))


def _message(line: bytes) -> dict[str, Any]:
    return {**json.loads(line), "is_large": len(line) > _LARGE_BYTES}


class _ToldSteps(Steps):
    """Loading, as the server shows it."""

    def __init__(self, control: Control) -> None:
        self._control = control

    @contextmanager
    def step(self, label: str, total: float | None = None, unit: str = "bytes") -> Iterator[ShowStep]:
        self._control.send({"say": label})
        yield lambda n, total=None, what="": None

    def say(self, line: str) -> None:
        self._control.send({"say": line})


def main() -> int:
    """Serve until the server goes; the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--control", type=int, required=True, help="file descriptor of a socket to the server")
    control = Control(socket.socket(fileno=parser.parse_args().control))
    messages = control.lines()
    steps = _ToldSteps(control)
    try:
        config = EngineConfig.from_json(next(messages)["config"]).with_draft(steps)
        with config.loaded(steps) as (engine, deployed), ExitStack() as stack:
            drafter = speculation(config.drafts, engine, stack.enter_context, steps)
            loop = ServingLoop(engine, deployed, control.send, drafter, reproducible=config.reproducible)
            control.send({"ready": loop.status()})
            threading.Thread(target=_read, args=(messages, loop, control), name="control", daemon=True).start()
            loop.run()
    except Exception as error:  # whatever it is, the server says so to whoever asked
        control.send({"fatal": error_json(error)})
        return 1
    return 0


def _read(messages: Iterator[dict[str, Any]], loop: ServingLoop, control: Control) -> None:
    """Hand over what the server asks; in threads where it takes time."""
    with (
        ThreadPoolExecutor(_PREPARING, thread_name_prefix="prepare") as pool,
        ThreadPoolExecutor(_CONSTRAINING, thread_name_prefix="constrain") as constraining,
    ):
        for message in messages:
            if message["do"] == "cancel":
                loop.cancel(message["id"])
            elif message["do"] == "beat":  # here, whatever all other threads do
                control.send({"id": message["id"], "result": loop.beat()})
            else:
                if message["do"] == "generate":
                    loop.expect(message["id"])
                threads = constraining if _is_constrained(message) else pool
                threads.submit(_answer, message, loop, control.send)
    loop.end()


def _is_constrained(message: Mapping[str, Any]) -> bool:
    sampling = message.get("with", {}).get("sampling", {})
    return any(sampling.get(name) is not None for name in _CONSTRAINTS)


def _answer(message: dict[str, Any], loop: ServingLoop, send: Callable[..., None]) -> None:
    number, what, arguments = message["id"], message["do"], message.pop("with", {})
    try:
        if what == "generate":
            loop.generate(number, **arguments)  # says itself that it was accepted, before anything comes of it
        else:
            send({"id": number, "result": loop.ask(what, arguments)})
    except Exception as error:
        send({"id": number, "error": error_json(error)})
    finally:
        if message["is_large"]:
            del arguments
            give_back_memory()


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # threads may wait for what nobody will say
