"""Engine process of the server: loads a model and computes requests. messages.py describes its messages.

The engine thread admits requests, runs steps and sends the results. Other threads prepare requests (templates, tokens,
grammars), so that the engine thread never waits for preparation. The process ends when the server does.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any

from devices.files import remove_temporary
from devices.processes.limits import give_back_memory
from edge.api.config import EngineConfig, media_encoder
from edge.deployment.deployed import DeployedModel
from edge.deployment.kinds import OtherCopies
from edge.errors import EngineError, ReplicaLost
from edge.serve.engine.loop import ServingLoop
from edge.serve.engine.memory import follow_share
from edge.serve.engine.threads import POOLED, Threads
from edge.serve.messages import MOST_LINE_BYTES, error_json
from edge.serve.remote_steps import RemoteSteps
from edge.speculate.factory import speculation
from edge.weights.elastic.signals import ignore_memory_signals
from partition.plan.plan import Plan

# Size of a large request. Memory used to prepare such a request is returned to the system.
_LARGE_BYTES = 1 << 20
_END_S = 30.0  # maximum wait for the end of other replicas, whose devices another plan needs


class Control:
    """Socket to the server."""

    def __init__(self, its_socket: socket.socket) -> None:
        self._socket, self._lock = its_socket, threading.Lock()

    def send(self, *messages: Mapping[str, Any]) -> None:
        """Send messages to the server. Errors are ignored, because `lines` detects the end of the server."""
        data = json.dumps(messages).encode() + b"\n"
        with self._lock:
            try:
                self._socket.sendall(data)
            except OSError:
                return

    def lines(self) -> Iterator[dict[str, Any]]:
        """Yield the server's messages until the connection closes.

        It may close in the middle of a message, or be reset with unread messages.
        """
        with suppress(ConnectionError), self._socket.makefile("rb") as stream:
            while (line := stream.readline(MOST_LINE_BYTES)).endswith(b"\n"):
                yield _message(line)


class ReplicaPlans(OtherCopies[Plan]):
    """Plans of the other replicas of the model, whose processes the server runs."""

    def __init__(self, send: Callable[..., None]) -> None:
        """send: sends messages to the server."""
        self._send, self._ended = send, threading.Event()

    def run(self, plan: Plan, others: Sequence[Plan]) -> None:
        self._send({"plan": plan.to_json(), "replicas": [copy.to_json() for copy in others]})

    def end_all_but(self, others: Sequence[Plan]) -> None:
        self._ended.clear()
        self._send({"replicas": [copy.to_json() for copy in others]})
        if not self._ended.wait(_END_S):
            raise EngineError(f"other replicas of the model have not ended in {_END_S:g} s")

    def ended(self) -> None:
        """Note that the server runs only the replicas of the last message."""
        self._ended.set()


def _message(line: bytes) -> dict[str, Any]:
    return {**json.loads(line), "is_large": len(line) > _LARGE_BYTES}


def main() -> int:
    """Serve until the server ends. Return the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--control", type=int, required=True, help="file descriptor of a socket to the server")
    ignore_memory_signals()
    control = Control(socket.socket(fileno=parser.parse_args().control))
    messages = control.lines()
    steps = RemoteSteps(control.send)
    try:
        first = next(messages)
        config = EngineConfig.from_json(first["config"])
        if first["shares_memory"]:
            messages = follow_share(config.options, control.send, messages)
        others = ReplicaPlans(control.send)
        how = {name: first[name] for name in ("resumes", "left_out")}
        loading = config.loaded(steps, **how, other_copies=others)
        with loading as (engine, deployed, draft), ExitStack() as stack:
            drafter = speculation(draft, engine, stack.enter_context, steps)
            encoder = stack.enter_context(media_encoder(config, engine, steps))
            loop = ServingLoop(config, engine, deployed, control.send, drafter, encoder)
            replicas = [plan.to_json() for plan in deployed.replicas] if deployed else []
            control.send({"ready": {**loop.status(), "replicas": replicas}})
            args = (messages, loop, control, deployed, others)
            threading.Thread(target=_read, args=args, name="control", daemon=True).start()
            loop.run()
    except Exception as error:
        control.send({"fatal": error_json(error)})  # the server passes the error on to waiting clients
        return 1
    return 0


def _read(
    messages: Iterator[dict[str, Any]],
    loop: ServingLoop,
    control: Control,
    deployed: DeployedModel | None,
    others: ReplicaPlans,
) -> None:
    """Handle the server's messages. Messages that take time are handled in other threads."""
    with Threads() as threads:
        for message in messages:
            if message["do"] == "cancel":
                loop.cancel(message["id"])
            elif message["do"] == "replicas ended":
                others.ended()
            elif message["do"] == "heartbeat":  # answered by this thread, so that busy threads do not delay it
                control.send({"id": message["id"], "result": loop.heartbeat()})
            elif message["do"] == "leave_out":  # does not wait for a status request, which waits for a lost device
                if deployed is not None:
                    _leave_out(message["addresses"], deployed, loop, control)
            else:
                if message["do"] in ("generate", *POOLED):
                    loop.expect(message["id"])
                threads.submit(message, _answer, message, loop, control.send)
    loop.end()


def _leave_out(addresses: Sequence[str], deployed: DeployedModel, loop: ServingLoop, control: Control) -> None:
    """Go on without these workers. A replica that cannot reports that it is lost, and ends."""
    try:
        deployed.leave_out(addresses)
    except ReplicaLost as error:
        control.send({"fatal": error_json(error)})
        loop.end()


def _answer(message: dict[str, Any], loop: ServingLoop, send: Callable[..., None]) -> None:
    number, what, arguments = message["id"], message["do"], message.pop("with", {})
    try:
        if what == "generate":
            loop.generate(number, **arguments)  # reports the acceptance itself, before the first piece
        else:
            result = loop.pool(number, what, arguments) if what in POOLED else loop.ask(what, arguments)
            send({"id": number, "result": result})
    except Exception as error:
        if not loop.has_ended:  # otherwise the process ends, and the server sends the request to another one
            send({"id": number, "error": error_json(error)})
    finally:
        if message["is_large"]:
            del arguments
            give_back_memory()


if __name__ == "__main__":
    code = main()
    remove_temporary()
    os._exit(code)  # skip waiting for threads that wait for messages
