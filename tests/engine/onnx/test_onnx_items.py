"""Test items on a link: they arrive unchanged, and wrong items are refused before memory is reserved."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from edge.onnx import wire as onnx_items
from edge.onnx.samples import TYPES, Array
from edge.onnx.wire import MOST_TENSOR_BYTES, Boundary, Item, Op, Receiver, Tensor, send
from tests.support import memory_link
from tests.support.helpers import TIMEOUT_S
from tests.support.links import start, tcp_sockets
from transport.errors import LinkClosed, ProtocolError
from transport.frame import Kind
from transport.link import PART_BYTES, Deadlines, Link
from transport.tcp_link import TcpLink

QUICK = Deadlines(step_timeout_s=5.0, send_timeout_s=5.0)
HEAD = struct.Struct("<BBHI")
VECTOR = Boundary((Tensor("h", "float32", (4,), (0,)),), inner=True)


@contextmanager
def ends(kind: str = "memory") -> Iterator[tuple[Link, Link]]:
    a: Link
    b: Link
    if kind == "memory":
        a, b = memory_link.pair(deadlines=QUICK)
    else:
        ours, theirs = tcp_sockets()
        a, b = TcpLink(ours, "b", QUICK), TcpLink(theirs, "a", QUICK)
    with a, b:
        yield a, b


def crossed(
    boundary: Boundary,
    item: Item,
    tensors: dict[str, Array],
    current: dict[str, Array] | None = None,
    kind: str = "memory",
) -> tuple[Item, dict[str, Array]]:
    """Return the item and its tensors as they come out of a link."""
    current = {} if current is None else current
    with ends(kind) as (a, b):
        sending = start(send, a, boundary, item, tensors)
        receiver = Receiver(b, boundary)
        result, shapes = receiver.item(5)
        receiver.tensors(result, shapes, current)
        sending.result(TIMEOUT_S)
    return result, current


def error_of(wire: str, x: Array) -> float:
    """The most that one value may change on its way."""
    most = float(np.abs(x).max(initial=0))
    return {"f32": 0.0, "f16": most * 2**-11 + 1e-7, "q8": most / 254 * 1.008 + 1e-7}[wire]


@st.composite
def some(draw: st.DrawFn) -> tuple[Boundary, dict[str, Array]]:
    """Tensors of any types and shapes."""
    tensors, values = [], {}
    for i in range(draw(st.integers(0, 4))):
        dtype = np.dtype(draw(st.sampled_from(sorted(TYPES.values()))))
        shape = draw(arrays.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5))
        finite = {"elements": {"allow_nan": False, "allow_infinity": False, "min_value": -1000, "max_value": 1000}}
        array = draw(arrays.arrays(dtype, shape, **finite if dtype.kind == "f" else {}))  # type: ignore[call-overload]
        if draw(st.booleans()):
            array = np.array(array, order="F")
        any_rank = draw(st.booleans())
        tensors.append(Tensor(f"t{i}", dtype.name, (2, 3) if any_rank else shape, any_rank=any_rank))
        values[f"t{i}"] = array
    return Boundary(tuple(tensors), draw(st.booleans()), draw(st.integers(0, 5))), values


@settings(max_examples=80)
@given(some(), st.integers(0, 2**32 - 1), st.sampled_from(["f32", "f16", "q8"]), st.data())
def test_what_goes_in_comes_out(
    given_: tuple[Boundary, dict[str, Array]], number: int, wire: str, data: st.DataObject
) -> None:
    boundary, values = given_
    seconds = st.lists(st.floats(0, 1e6, width=32), min_size=boundary.passed, max_size=boundary.passed)
    item = Item(Op.RUN, number, wire, tuple(data.draw(seconds)))
    result, came = crossed(boundary, item, values)
    assert result == item
    assert list(came) == list(values)
    for name, array in values.items():
        assert (came[name].dtype, came[name].shape) == (array.dtype, array.shape)
        if boundary.inner and array.dtype == np.float32:
            off = np.abs(came[name].astype(np.float64) - array.astype(np.float64)).max(initial=0)
            assert off <= error_of(wire, array)
        else:
            assert came[name].tobytes() == array.tobytes()


@pytest.mark.parametrize("wire", ["f32", "f16", "q8"])
@pytest.mark.parametrize("extra", [-1, 0, 1, 33])
@pytest.mark.parametrize("kind", ["memory", "tcp"])
def test_tensors_of_several_parts(wire: str, extra: int, kind: str) -> None:
    n = 2 * PART_BYTES // 4 + extra
    x = np.random.default_rng(0).standard_normal(n, dtype=np.float32)
    _, came = crossed(Boundary((Tensor("h", "float32", (n,)),), True), Item(Op.RUN, 0, wire), {"h": x}, kind=kind)
    off = float(np.abs(came["h"] - x).max())
    assert off <= error_of(wire, x)
    assert (off > 0) == (wire != "f32")


def test_buffers_are_used_again_where_the_shape_is_the_same() -> None:
    current: dict[str, Array] = {}
    crossed(VECTOR, Item(Op.RUN), {"h": np.arange(4, dtype=np.float32)}, current)
    first = current["h"]
    crossed(VECTOR, Item(Op.RUN), {"h": np.ones(4, np.float32)}, current)
    assert current["h"] is first
    assert first.tolist() == [1] * 4
    for n in (7, 1, 0):
        crossed(VECTOR, Item(Op.RUN), {"h": np.ones(n, np.float32)}, current)
        assert current["h"].shape == (n,)
    assert first.tolist() == [1] * 4


def test_no_more_than_the_wire_says_crosses() -> None:
    tensors = (Tensor("h", "float32", (64,)), Tensor("ids", "int64", (3,)))
    values: dict[str, Array] = {"h": np.ones(64, np.float32), "ids": np.arange(3)}
    for inner, wire, expected in ((True, "f16", 128), (True, "q8", 72), (True, "f32", 256), (False, "q8", 256)):
        with ends() as (a, _):
            send(a, Boundary(tensors, inner), Item(Op.RUN, 0, wire), values)
            assert a.sent_bytes == HEAD.size + 4 * 2 + expected + 24


def test_values_that_are_no_numbers_cross() -> None:
    x = np.array([np.nan, np.inf, -np.inf, -0.0], np.float32)
    _, came = crossed(VECTOR, Item(Op.RUN), {"h": x})
    assert came["h"].tobytes() == x.tobytes()
    assert np.isnan(crossed(VECTOR, Item(Op.RUN, 0, "q8"), {"h": x})[1]["h"]).all()


def test_the_end_has_no_tensors() -> None:
    assert crossed(Boundary((), True), Item(Op.END), {}) == (Item(Op.END), {})
    with ends() as (a, b):
        send(a, VECTOR, Item(Op.END), {})
        assert Receiver(b, VECTOR).item(1) == (Item(Op.END), [])


# ------------------------------------------------------------------------------------------------------------- lies


def head(op: int = 1, wire: int = 0, zero: int = 0, number: int = 0) -> bytes:
    """The first 8 bytes of an item."""
    return HEAD.pack(op, wire, zero, number)


def dims(*sizes: int) -> bytes:
    return struct.pack(f"<{len(sizes)}I", *sizes)


PICTURE = Boundary((Tensor("h", "float32", (1, 3, 8), (0,)), Tensor("n", "int64", ())), inner=True)


@pytest.mark.parametrize(
    ("frame", "kind", "words"),
    [
        (b"", Kind.CONTROL, "should have sent 20 bytes of CONTROL, but sent 0 of CONTROL"),
        (head()[:7], Kind.CONTROL, "but sent 7 of CONTROL"),
        (head() + dims(1, 3, 8), Kind.DATA, "but sent 20 of DATA"),
        (head() + dims(1, 3, 8), Kind.PING, "but sent 20 of PING"),
        (head(op=0) + dims(1, 3, 8), Kind.CONTROL, "sent operation 0"),
        (head(op=3) + dims(1, 3, 8), Kind.CONTROL, "sent operation 3"),
        (head(wire=4) + dims(1, 3, 8), Kind.CONTROL, "wire type 4"),
        (head(wire=2) + dims(1, 3, 8), Kind.CONTROL, "wire type 2"),  # q8 as it was
        (head(zero=1) + dims(1, 3, 8), Kind.CONTROL, "sent operation 1 in wire type 0"),
        (head() + dims(1, 3), Kind.CONTROL, "but sent 16 of CONTROL"),
        (head() + dims(1, 3, 8, 1), Kind.CONTROL, "24 bytes of CONTROL where at most 20"),
        (head(op=2) + dims(1), Kind.CONTROL, "but sent 12 of CONTROL"),
        (head() + dims(1, 4, 8), Kind.CONTROL, "sent 'h' of shape [1, 4, 8]; it is cut for (1, 3, 8)"),
        (head() + dims(1, 0, 8), Kind.CONTROL, "of shape [1, 0, 8]"),
        (head() + dims(2**32 - 1, 3, 8), Kind.CONTROL, "of shape [4294967295, 3, 8]"),
        (head() + dims(MOST_TENSOR_BYTES // 96 + 1, 3, 8), Kind.CONTROL, "sent 'h' of shape"),
        (head() + bytes(2000), Kind.CONTROL, "2008 bytes of CONTROL where at most"),
    ],
)
def test_headers_that_lie(frame: bytes, kind: Kind, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def reserved(*_: Any) -> None:
        raise AssertionError("memory was reserved")

    monkeypatch.setattr(onnx_items.np, "empty", reserved)  # type: ignore[attr-defined]
    with ends() as (a, b):
        a.send(frame, kind)
        with pytest.raises(ProtocolError) as raised:
            Receiver(b, PICTURE).item(1)
        assert words in str(raised.value)
        assert "\n" not in str(raised.value)


@settings(max_examples=150)
@given(st.binary(max_size=40) | st.binary(min_size=12, max_size=12), st.booleans())
def test_any_bytes_are_an_item_or_refused(data: bytes, begun: bool) -> None:
    data = head() + data if begun else data
    with ends() as (a, b):
        a.send(data, Kind.CONTROL)
        try:
            item, shapes = Receiver(b, PICTURE).item(1)
        except ProtocolError:
            return
        assert len(shapes) == (2 if item.op is Op.RUN else 0)
        assert len(data) == 20
        assert all(tensor.takes(shape) for tensor, shape in zip(PICTURE.tensors, shapes, strict=False))


@pytest.mark.parametrize(
    ("payload", "kind", "words"),
    [
        (bytes(15), Kind.DATA, "should have sent 16 bytes of DATA, but sent 15 of DATA"),
        (bytes(17), Kind.DATA, "17 bytes of DATA where at most 16"),
        (b"", Kind.DATA, "but sent 0 of DATA"),
        (bytes(16), Kind.CONTROL, "but sent 16 of CONTROL"),
    ],
)
def test_tensors_of_another_length(payload: bytes, kind: Kind, words: str) -> None:
    with ends() as (a, b):
        a.send(head() + dims(4), Kind.CONTROL)
        a.send(payload, kind)
        receiver = Receiver(b, VECTOR)
        item, shapes = receiver.item(1)
        with pytest.raises(ProtocolError) as raised:
            receiver.tensors(item, shapes, {})
        assert words in str(raised.value)
        with pytest.raises(LinkClosed):
            receiver.item(1)


# ------------------------------------------------------------------------------------------------- what may not cross


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("h", "bfloat16", (1,)), "tensor 'h' is of type 'bfloat16', which cannot be sent"),
        (("h", "complex64", (1,)), "complex64"),
        (("h", "object", (1,)), "object"),
        (("h", "float32", (-1,)), "has the shape [-1]; expected sizes of 0 or more"),
        (("h", "float32", (0, 1 << 30)), "at most 1,073,741,824 can be sent"),
        (("h", "float32", (-1, 2)), "has the shape [-1, 2]"),
        (("h", "float32", (2,), (1,)), "has the shape [2]"),
        (("h", "float32", (2,), (-1,)), "has the shape [2]"),
    ],
)
def test_tensors_that_cannot_cross(args: tuple[Any, ...], words: str) -> None:
    with pytest.raises(ValueError, match="tensor 'h'") as raised:
        Tensor(*args)
    assert words in str(raised.value)


@given(st.lists(st.integers(1, 9), max_size=3), st.lists(st.integers(0, 2**33), max_size=4), st.data())
def test_shapes_that_are_taken(shape: list[int], other: list[int], data: st.DataObject) -> None:
    open_ = data.draw(st.sets(st.integers(0, len(shape) - 1))) if shape else set()
    tensor = Tensor("h", "float32", tuple(shape), tuple(open_))
    assert tensor.n_bytes == 4 * math.prod(shape)
    assert tensor.takes(shape)
    used = [data.draw(st.integers(0, 9)) if i in open_ else dim for i, dim in enumerate(shape)]
    assert tensor.takes(used)
    assume(
        len(other) != len(shape)
        or any(o != s for i, (o, s) in enumerate(zip(other, shape, strict=False)) if i not in open_)
    )
    assert not tensor.takes(other)
