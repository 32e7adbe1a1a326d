"""Test the calls of edge.proto: the compiled description is up to date, and messages and raw bytes are transferred."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import descriptor_pb2

from tests.support import ROOT
from tests.support.links import PATIENT
from transport import edge_pb2 as pb
from transport import grpc_link, rpc
from transport.link import Link


def plain(file: Any) -> Any:
    """A description without what only some compilers write."""
    file.ClearField("source_code_info")
    for message in file.message_type:
        for field in [*message.field, *(f for nested in message.nested_type for f in nested.field)]:
            field.ClearField("json_name")
    return file


def test_the_compiled_description_is_up_to_date(tmp_path: Path) -> None:
    """If not: python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. transport/edge.proto"""
    out = tmp_path / "edge.bin"
    compile_ = [sys.executable, "-m", "grpc_tools.protoc", "-I.", f"--descriptor_set_out={out}", "transport/edge.proto"]
    subprocess.run(compile_, cwd=ROOT, check=True, timeout=60)
    (fresh,) = descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes()).file
    current = descriptor_pb2.FileDescriptorProto()
    pb.DESCRIPTOR.CopyToProto(current)
    assert plain(current) == plain(fresh)


def test_types_of_the_compiled_description_are_up_to_date(tmp_path: Path) -> None:
    compile_ = [sys.executable, "-m", "grpc_tools.protoc", "-I.", f"--pyi_out={tmp_path}", "transport/edge.proto"]
    subprocess.run(compile_, cwd=ROOT, check=True, timeout=60)
    fresh = (tmp_path / "transport" / "edge_pb2.pyi").read_text()
    current = (ROOT / "transport" / "edge_pb2.pyi").read_text()
    assert [line for line in fresh.splitlines() if "class " in line] == [
        line for line in current.splitlines() if "class " in line
    ]


class Servicer:
    """Answers every method of the service with something that shows what came."""

    def Describe(self, _: Any, __: Any) -> Any:  # noqa: N802
        return pb.Description(name="pi", protocol=1)

    def Session(self, commands: Iterator[Any], _: Any) -> Iterator[Any]:  # noqa: N802
        for command in commands:
            yield pb.Event(opened=pb.Opened(session=f"rank {command.open.rank}"))

    def Link(self, _: Iterator[bytes], __: Any) -> grpc_link.Served:  # noqa: N802
        def serve(link: Link) -> None:
            link.send(bytes(link.receive().payload)[::-1])

        return serve, "the dialler", PATIENT

    def Offer(self, offer: Any, _: Any) -> Iterator[Any]:  # noqa: N802
        yield pb.SliceState(state=pb.SliceState.MISSING, held_bytes=offer.n_bytes)

    def Upload(self, pieces: Iterator[bytes], _: Any) -> Any:  # noqa: N802
        return pb.SliceState(state=pb.SliceState.READY, held_bytes=sum(map(len, pieces)))

    def __getattr__(self, name: str) -> Any:
        return lambda *_: pb.Installed(name=name)


def test_messages_and_raw_bytes_get_through() -> None:
    called = []

    def wrap(name: str, handler: rpc.Handler) -> rpc.Handler:
        called.append(name)
        return handler

    server = grpc.server(ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers((rpc.handlers(Servicer(), wrap),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            assert rpc.stub(channel, "Describe")(pb.DescribeRequest()).name == "pi"
            commands = iter([pb.Command(open=pb.Open(rank=i)) for i in range(3)])
            events = list(rpc.stub(channel, "Session")(commands))
            assert [event.opened.session for event in events] == ["rank 0", "rank 1", "rank 2"]
            with grpc_link.dial(channel, "b", "session", PATIENT) as link:
                link.send(b"abc")
                assert bytes(link.receive().payload) == b"cba"
            (state,) = rpc.stub(channel, "Offer")(pb.SliceOffer(n_bytes=7))
            assert state.held_bytes == 7
            assert rpc.stub(channel, "Upload")(iter([b"abc", b"defg"])).held_bytes == 7
    finally:
        server.stop(0).wait()
    methods = [method.name for method in pb.DESCRIPTOR.services_by_name["Worker"].methods]
    assert called == methods
    assert rpc.RAW.issubset(methods)
    assert rpc.STREAMED.issuperset({"Session", "Offer"})
    assert not {"Describe", "Upload"} & rpc.STREAMED


LATE = """
import transport.rpc

class Call:  # as a call of gRPC, part of a circle, and finalized under a lock
    def __init__(self, name):
        self.name, self.itself = name, self

    def __del__(self):
        print(self.name, flush=True)

Call("unused")
kept = Call("used")
"""


def test_no_call_is_finalized_after_the_threads_have_ended() -> None:
    """One of them may have ended with the lock that the finalizer waits for."""
    done = subprocess.run(
        [sys.executable, "-c", LATE], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "unused\n"
