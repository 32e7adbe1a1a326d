"""A worker in this process, on loopback without TLS, that gives a test's answers: wrong, late, or none."""

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc

from devices.profile import describe
from edge.worker.messages import profile_message
from transport import edge_pb2 as pb
from transport import frame, rpc
from transport.grpc_link import CHANNEL_OPTIONS


def description(**changes: Any) -> pb.Description:
    """Return a worker's description of itself, but for `changes`."""
    profile = profile_message(describe("fake", threads=1, runtime="0", llama_cpp="0"))
    return pb.Description(**{"name": "fake", "profile": profile, "protocol": frame.VERSION, **changes})


class FakeWorker:
    """A worker whose behaviour can be set; `commands` are those it was given. By default links work as well as can
    be."""

    def __init__(self) -> None:
        self.address = ""
        self.description = description()
        self.states = [pb.LinkState(rank=1, kind="tcp", why="tcp 20 us")]
        self.measured = pb.Measured(
            kind="tcp",
            round_trip_median_s=2e-4,
            round_trip_p99_s=4e-4,
            round_trip_best_s=1e-4,
            send_bytes_per_s=1e8,
            receive_bytes_per_s=1e8,
        )
        self.allreduced = pb.Allreduced(algorithm="mesh", median_s=1e-4)
        self.error: str | None = None  # of every call
        self.commands: list[pb.Command] = []
        self.failing: str | None = None  # this command of a session fails
        self.mute: str | None = None  # this call, or command of a session, is never answered
        self.ended = threading.Event()

    def answer(self, command: pb.Command) -> pb.Event:
        """Return a session's answer to a command."""
        if command.WhichOneof("command") == self.failing:
            return pb.Event(failed=pb.Failed(error="EdgeError", message="not today"))
        return {
            "open": pb.Event(opened=pb.Opened(session="s", tcp_port=1, pid=1)),
            "connect": pb.Event(connected=pb.Connected(links=self.states)),
            "answer": pb.Event(answered=pb.Answered()),
            "measure": pb.Event(measured=self.measured),
            "allreduce": pb.Event(allreduced=self.allreduced),
        }[command.WhichOneof("command")]

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """The calls that are not defined here."""
        if name not in ("Link", "Offer", "Upload", "Enroll", "Install", "UpdateRevoked"):
            raise AttributeError(name)
        return lambda *_: iter(()) if name in rpc.STREAMED else None

    def Describe(self, _: pb.DescribeRequest, context: grpc.ServicerContext) -> pb.Description:  # noqa: N802
        self._first("Describe", context)
        return self.description

    def Session(self, commands: Iterator[pb.Command], context: grpc.ServicerContext) -> Iterator[pb.Event]:  # noqa: N802
        self._first("Session", context)
        for command in commands:
            self.commands.append(command)
            self._first(command.WhichOneof("command"), context)
            yield self.answer(command)

    def _first(self, name: str, context: grpc.ServicerContext) -> None:
        if self.error is not None:
            context.set_trailing_metadata(((rpc.ERROR_KEY, "EngineError"),))
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, self.error)
        if name == self.mute:
            self.ended.wait(60)


@contextmanager
def deaf_port() -> Iterator[int]:
    """A port of loopback on which nothing listens, and nothing else can, until the end of the block."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield int(bound.getsockname()[1])


@contextmanager
def fake_worker() -> Iterator[FakeWorker]:
    """A fake that serves until the end of the block; its `address` is HOST:PORT."""
    fake = FakeWorker()
    server = grpc.server(ThreadPoolExecutor(8), options=CHANNEL_OPTIONS)
    server.add_generic_rpc_handlers((rpc.handlers(fake, lambda _, handler: handler),))
    fake.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield fake
    finally:
        fake.ended.set()
        server.stop(None).wait()
