"""Test bodies of the Open Inference Protocol: JSON with tensors in binary behind it."""

from __future__ import annotations

import contextlib
import json
import struct
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from edge.serve.http.errors import BadRequest
from edge.serve.oip.framing import InferRequest, InferResponse, encoded, parse
from edge.serve.oip.messages import HEAD, frame, message_of, tensors_of
from edge.serve.oip.tensors import NUMPY, Tensor, packed, packed_texts, unpacked

SHAPES = st.sampled_from([(), (1,), (3,), (2, 2), (1, 3, 1)])


@st.composite
def tensors(draw: st.DrawFn, name: str = "x") -> Tensor:
    shape = draw(SHAPES)
    datatype = draw(st.sampled_from([*NUMPY, "BYTES"]))
    if datatype == "BYTES":
        return Tensor(name, datatype, shape, packed_texts([draw(st.text(max_size=5))] * prod(shape)))
    n_bytes = prod(shape) * np.dtype(NUMPY[datatype]).itemsize
    data = draw(st.binary(min_size=n_bytes, max_size=n_bytes))
    return Tensor(name, datatype, shape, bytes(byte & 1 for byte in data) if datatype == "BOOL" else data)


requests = st.lists(tensors(), min_size=1, max_size=4).map(
    lambda several: [Tensor(f"x{i}", item.datatype, item.shape, item.data) for i, item in enumerate(several)]
)


def body_of(inputs: list[Tensor], **more: Any) -> tuple[bytes, int]:
    """Return a body with all inputs in binary, and the length of its JSON."""
    rows = [
        {
            "name": tensor.name,
            "shape": list(tensor.shape),
            "datatype": tensor.datatype,
            "parameters": {"binary_data_size": len(tensor.data)},
        }
        for tensor in inputs
    ]
    text = json.dumps({"inputs": rows, **more}).encode()
    return text + b"".join(bytes(tensor.data) for tensor in inputs), len(text)


def body_with(**changes: Any) -> bytes:
    """Return a JSON body with one input, which has these changes."""
    return json.dumps({"inputs": [{"name": "x", "shape": [2], "datatype": "FP32", "data": [1, 2], **changes}]}).encode()


@given(requests)
def test_binary_inputs_arrive_unchanged(inputs: list[Tensor]) -> None:
    body, length = body_of(inputs, id="7", outputs=[{"name": "y", "parameters": {"binary_data": True}}])
    request = parse(body, str(length))
    assert [(t.name, t.datatype, t.shape, bytes(t.data)) for t in request.inputs] == [
        (t.name, t.datatype, t.shape, bytes(t.data)) for t in inputs
    ]
    assert (request.id, request.outputs, request.binary) == ("7", ("y",), {"y": True})


@given(requests, st.data())
def test_damaged_bodies_are_refused_or_read(inputs: list[Tensor], data: st.DataObject) -> None:
    body, length = body_of(inputs)
    damaged = bytearray(body)
    for _ in range(data.draw(st.integers(0, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(damaged[: data.draw(st.integers(0, len(damaged)))])
    claimed = data.draw(st.sampled_from([str(length), str(length - 1), str(len(cut)), "-1", "", "9" * 30, None]))
    with contextlib.suppress(BadRequest, ValidationError):
        parse(cut, claimed)


@given(tensors(), st.booleans())
def test_outputs_are_returned_in_json_or_in_binary(tensor: Tensor, binary: bool) -> None:
    request = InferRequest((), (), "id", {"x": binary}, all_binary=not binary)
    body, length = encoded(request, InferResponse("net", "1", "id", [tensor]))
    response = json.loads(body[:length])
    row = response["outputs"][0]
    assert (response["model_name"], response["id"], row["shape"]) == ("net", "id", list(tensor.shape))
    if binary:
        assert length is not None
        assert body[length:] == tensor.data
        assert row["parameters"] == {"binary_data_size": len(tensor.data)}
    else:
        assert length is None
        again = parse(json.dumps({"inputs": [row]}).encode(), None).inputs[0]
        assert _same(again, tensor)


def _same(first: Tensor, second: Tensor) -> bool:
    if first.datatype == "BYTES":
        return bytes(first.data) == bytes(second.data)
    array, other = (np.frombuffer(tensor.data, NUMPY[tensor.datatype]) for tensor in (first, second))
    return np.array_equal(array, other, equal_nan=array.dtype.kind == "f")


@given(st.lists(tensors(), max_size=4))
def test_messages_to_the_process_carry_tensors_unchanged(several: list[Tensor]) -> None:
    data = b"".join(map(bytes, frame({"id": 1}, several, "inputs")))
    n_text, n_data = HEAD.unpack_from(data)
    message = message_of(data[HEAD.size : HEAD.size + n_text])
    assert len(data) == HEAD.size + n_text + n_data
    received = tensors_of(message["inputs"], data[HEAD.size + n_text :])
    assert [(t.name, t.shape, bytes(t.data)) for t in received] == [(t.name, t.shape, bytes(t.data)) for t in several]


@pytest.mark.parametrize("datatype", [name for name in NUMPY if name != "BOOL"])
def test_numbers_in_json_equal_numpy(datatype: str) -> None:
    values = [[0, 1, 2], [3, 4, 100]]
    data = packed("x", datatype, values)
    assert data == np.array(values, NUMPY[datatype]).tobytes()
    assert unpacked(Tensor("x", datatype, (2, 3), data)) == [0, 1, 2, 3, 4, 100]


def test_texts_and_booleans_in_json() -> None:
    assert packed("x", "BYTES", ["ä", ""]) == struct.pack("<I", 2) + "ä".encode() + struct.pack("<I", 0)
    assert packed("x", "BOOL", [[True], [False]]) == b"\1\0"
    assert unpacked(Tensor("x", "BYTES", (2,), packed("x", "BYTES", ["ä", ""]))) == ["ä", ""]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data": [1, 2, 3]}, "has 12 bytes; FP32 of shape [2] has 8"),
        ({"data": [1, "2"]}, "a value that is not FP32"),
        ({"data": [1, True]}, "a value that is not FP32"),
        ({"data": [1, 1e300]}, "a value that is not FP32"),
        ({"data": [1, [2]]}, "not nested like a tensor"),
        ({"data": [{}, 1]}, "a value that is not FP32"),
        ({"datatype": "INT8", "data": [1, 128]}, "a value that is not INT8"),
        ({"datatype": "UINT8", "data": [1, -1]}, "a value that is not UINT8"),
        ({"datatype": "INT32", "data": [1, 1.5]}, "a value that is not INT32"),
        ({"datatype": "BOOL", "data": [1, True]}, "a value that is not BOOL"),
        ({"datatype": "FP16", "data": [1, 70000]}, "a value that is not FP16"),
        ({"datatype": "BYTES", "data": [1, "a"]}, "a value that is not BYTES"),
        ({"datatype": "FP8"}, "has the datatype 'FP8'; there are BOOL"),
        ({"shape": [-2]}, "has the shape [-2]; each size must be at least 1"),
        ({"shape": [0]}, "has the shape [0]; each size must be at least 1"),
        ({"shape": [1] * 65}, "has 65 dimensions"),
        ({"shape": [2**62, 2**62]}, "has 8 bytes"),
        ({"data": None}, "neither data nor binary_data_size"),
        ({"parameters": {"binary_data_size": 8}}, "has data and binary_data_size"),
        ({"parameters": {"binary_data_size": 8}, "data": None}, "ends at byte 8 behind the JSON"),
        ({"parameters": {"binary_data_size": -8}, "data": None}, "binary_data_size must be a number of bytes"),
        ({"parameters": {"binary_data_size": 1.5}, "data": None}, "binary_data_size must be a number of bytes"),
        ({"parameters": {"shared_memory_region": "r"}}, "'shared_memory_region' is not supported"),
    ],
)
def test_invalid_inputs_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(BadRequest) as error:
        parse(body_with(**changes), None)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("length", "words"),
    [
        ("0", "must be a number from 1 to"),
        ("x", "must be a number from 1 to"),
        ("99999", "must be a number from 1 to"),
        ("²", "must be a number from 1 to"),
    ],
)
def test_an_invalid_length_of_json_is_refused(length: str, words: str) -> None:
    with pytest.raises(BadRequest, match=words):
        parse(body_with(), length)


def test_bytes_behind_the_json_without_an_input_are_refused() -> None:
    body = body_with()
    with pytest.raises(BadRequest, match="4 bytes follow the JSON, but the inputs have 0"):
        parse(body + b"1234", str(len(body)))


@pytest.mark.parametrize("data", [b"\1\0\0\0ab", b"\2\0\0\0a", b"\1\0\0", b"\1\0\0\0a" * 2])
def test_texts_whose_lengths_do_not_fit_are_refused(data: bytes) -> None:
    body, length = body_of([Tensor("x", "BYTES", (1,), data)])
    with pytest.raises(BadRequest, match="needs 1 elements of BYTES"):
        parse(body, str(length))


def test_a_boolean_byte_of_2_is_refused() -> None:
    body, length = body_of([Tensor("x", "BOOL", (1,), b"\2")])
    with pytest.raises(BadRequest, match="neither 0 nor 1"):
        parse(body, str(length))
