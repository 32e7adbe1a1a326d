"""Test that the formats of this version equal the recorded ones, and that devices of different versions report it."""

import numpy as np
import pytest

from devices.profile import describe
from edge.cluster.client import Remote
from edge.cluster.fleet import check_versions
from edge.errors import WorkerError
from edge.llama.llama import Batch
from edge.net.channel import open_channel
from edge.net.peers import HELLO
from edge.parallel import masks
from edge.parallel.steps import unpack
from edge.version import version
from edge.worker import draft_queries
from edge.worker.messages import profile_message
from quant.wire import Q8
from tests.support import wire_bytes
from tests.support.fake_worker import description, fake_worker
from tests.support.wire_bytes import (
    BOUNDARY,
    DECODE,
    DRAFT_QUERY,
    FLOATS,
    ITEM,
    KEEP,
    LOAD,
    MASKED,
    OPEN,
    SECRET,
    TENSORS,
    bytes_now,
    recorded,
)
from transport import edge_pb2 as pb
from transport.errors import ProtocolError, Refused
from transport.frame import HEADER_BYTES, VERSION, Header, Kind, parse_frame, parse_header

RAISE = "a format changed: raise VERSION in transport/frame.py, then run python -m tests.support.wire_bytes"
NAMES = (
    "header",
    "hello",
    "decode step",
    "masked step",
    "keep step",
    "onnx item",
    "q8 floats",
    "guess",
    "open",
    "load",
)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_sent_is_what_was_recorded(name: str) -> None:
    assert bytes_now()[name].hex() == recorded()[name].hex(), RAISE


def test_all_that_was_recorded_is_compared() -> None:
    assert set(NAMES) == set(bytes_now()) == set(recorded())


def test_recorded_frames_are_read() -> None:
    bytes_ = recorded()
    assert parse_header(bytes_["header"], 4711) == Header(Kind.DATA, 8192, 4711)
    hello = parse_frame(memoryview(bytes_["hello"]), 0)
    assert hello.kind is Kind.HELLO
    assert HELLO.unpack(hello.payload) == (SECRET, 0, 2)


def test_recorded_steps_are_read() -> None:
    rows, expected = Batch(4), wire_bytes.rows()
    for sent, there in (("decode step", DECODE), ("masked step", MASKED)):
        step = parse_frame(memoryview(recorded()[sent]), 0)
        assert step.kind is Kind.CONTROL
        assert unpack(step.payload, rows) == there
        for name in ("positions", "sequences", "outputs"):
            assert np.array_equal(getattr(rows, name), getattr(expected, name))
    (mask,) = masks.unpack(MASKED.masks, 1, 1, 0, 40)
    assert mask is not None
    assert np.flatnonzero(mask).tolist() == [*range(0, 40, 3)]
    assert unpack(recorded()["keep step"], rows) == KEEP


def test_a_recorded_item_is_read() -> None:
    item, tensors = wire_bytes.item_on(wire_bytes.on_link(recorded()["onnx item"]))
    assert item == ITEM
    assert all(np.array_equal(tensors[tensor.name], TENSORS[tensor.name]) for tensor in BOUNDARY.tensors)


def test_recorded_floats_are_read() -> None:
    x = np.empty(FLOATS.size, np.float32)
    Q8().decode(np.frombuffer(recorded()["q8 floats"], np.uint8), x)
    assert np.abs(x - FLOATS).max() <= 4 / 252


def test_a_recorded_draft_is_read() -> None:
    request = parse_frame(memoryview(recorded()["guess"]), 0)
    assert request.kind is Kind.CONTROL
    assert draft_queries.unpack(request.payload) == DRAFT_QUERY


@pytest.mark.parametrize(("name", "message"), [("open", OPEN), ("load", LOAD)])
def test_recorded_messages_are_read(name: str, message: pb.Command) -> None:
    assert pb.Command.FromString(recorded()[name]) == message


def test_bytes_of_a_version_are_not_recorded_twice() -> None:
    before = (wire_bytes.FOLDER / f"version-{VERSION}.json").read_bytes()
    with pytest.raises(FileExistsError):
        wire_bytes.record()
    assert (wire_bytes.FOLDER / f"version-{VERSION}.json").read_bytes() == before


# What people read where versions differ: both versions, and what to do.


@pytest.mark.parametrize("other", [VERSION - 1, VERSION + 1, 255])
def test_a_frame_of_another_version_names_both(other: int) -> None:
    header = bytearray(recorded()["header"][:HEADER_BYTES])
    header[4] = other
    with pytest.raises(ProtocolError) as error:
        parse_header(header, 4711)
    assert f"version {other} of the protocol" in str(error.value)
    assert f"this is version {VERSION}; update both" in str(error.value)


@pytest.mark.parametrize("old", range(1, VERSION))
def test_steps_of_older_versions_are_refused(old: int) -> None:
    for name in ("header", "decode step"):
        with pytest.raises(
            ProtocolError, match=f"version {old} of the protocol, this is version {VERSION}; update both"
        ):
            parse_header(recorded(old)[name][:HEADER_BYTES], 0)


def test_a_worker_of_another_protocol_names_both() -> None:
    profile = profile_message(describe("fake", threads=1, runtime="9.9.1", llama_cpp="0"))
    with fake_worker() as fake:
        fake.description = description(protocol=VERSION + 1, profile=profile)
        host, _, port = fake.address.partition(":")
        remote = Remote(open_channel(host, int(port), None, 10.0)[0], host, int(port), None)
        with remote, pytest.raises(Refused) as error:
            remote.describe()
    here = version("edge-runtime")
    assert f"speaks version {VERSION + 1} of the protocol (edge 9.9.1)" in str(error.value)
    assert f"this device version {VERSION} (edge {here}); update both to the same version" in str(error.value)


@pytest.mark.parametrize("what", ["edge", "llama-cpp-python"])
def test_a_worker_of_another_release_names_both(what: str) -> None:
    here = {name: version(name) for name in ("edge-runtime", "llama-cpp-python")}
    there = here | {"edge-runtime" if what == "edge" else what: "9.9.1"}
    profile = describe("pi", threads=1, runtime=there["edge-runtime"], llama_cpp=there["llama-cpp-python"])
    with pytest.raises(WorkerError) as error:
        check_versions("pi", profile)
    own = here["edge-runtime" if what == "edge" else what]
    assert str(error.value) == f"pi runs {what} 9.9.1, this device {own}; install the same version on both"
