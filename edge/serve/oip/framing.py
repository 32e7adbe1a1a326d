"""Bodies of inference requests and responses over HTTP: JSON, followed by tensors in binary.

The header Inference-Header-Content-Length gives the length of the JSON. Each input whose parameters have
`binary_data_size` has that many bytes behind the JSON, in the order of the inputs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import BaseModel, Field

from edge.serve.http.bodies import check_values, utf8
from edge.serve.http.errors import BadRequest
from edge.serve.oip.tensors import Tensor, check_shape, check_size, packed, unpacked

HEADER = "Inference-Header-Content-Length"  # HTTP header with the length of the JSON
_UNSUPPORTED = ("classification", "shared_memory_region", "shared_memory_offset", "shared_memory_byte_size")
_ENCODER = json.JSONEncoder(check_circular=False, separators=(",", ":"))  # writes NaN and Infinity, as Triton does
_Name = Annotated[str, Field(max_length=10_000)]
_Size = Annotated[int, Field(ge=-(2**63), lt=2**63)]


@dataclass(frozen=True)
class InferRequest:
    """An inference request, independent of its protocol."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[str, ...] = ()  # names of the requested outputs; empty: all
    id: str = ""
    binary: Mapping[str, bool] = field(default_factory=dict)  # whether an output is sent in binary, by name
    all_binary: bool = False  # whether other outputs are sent in binary

    def is_binary(self, output: str) -> bool:
        """Return True if an output is sent in binary."""
        return self.binary.get(output, self.all_binary)


@dataclass(frozen=True)
class InferResponse:
    """Outputs of a request."""

    model: str
    version: str
    id: str
    outputs: Sequence[Tensor]


class _Input(BaseModel):
    name: _Name
    shape: list[_Size] = Field(max_length=1000)
    datatype: _Name
    parameters: dict[str, Any] = {}
    data: list[Any] | None = None


class _Output(BaseModel):
    name: _Name
    parameters: dict[str, Any] = {}


class _Request(BaseModel):
    id: _Name = ""
    parameters: dict[str, Any] = {}
    inputs: list[_Input] = Field(max_length=1000)
    outputs: list[_Output] = Field([], max_length=1000)


def parse(body: bytes, json_length: str | None) -> InferRequest:
    """Return the request in a body.

    json_length: value of the HTTP header with the length of the JSON; None: the whole body is JSON.
    Raises BadRequest or ValidationError.
    """
    length = len(body) if json_length is None else _length(json_length, len(body))
    text = utf8(body[:length])
    check_values(text)
    request = _Request.model_validate_json(text)
    rest, at = memoryview(body)[length:], 0
    inputs = []
    for given_input in request.inputs:
        check_parameters(given_input.parameters)
        check_shape(given_input.name, given_input.shape)
        n_bytes = _count(given_input.parameters, "binary_data_size", given_input.name)
        data: bytes | memoryview
        if n_bytes is None:
            if given_input.data is None:
                raise BadRequest(f"input {given_input.name!r:.200} has neither data nor binary_data_size", "inputs")
            data = packed(given_input.name, given_input.datatype, given_input.data)
        elif given_input.data is not None:
            raise BadRequest(f"input {given_input.name!r:.200} has data and binary_data_size; send one", "inputs")
        else:
            data = rest[at : at + n_bytes]
            at += n_bytes
            if at > len(rest):
                raise BadRequest(
                    f"input {given_input.name!r:.200} ends at byte {at} behind the JSON, which is followed by"
                    f" {len(rest)} bytes",
                    "inputs",
                )
        tensor = Tensor(given_input.name, given_input.datatype, tuple(given_input.shape), data)
        check_size(tensor)
        inputs.append(tensor)
    if at != len(rest):
        raise BadRequest(
            f"{len(rest)} bytes follow the JSON, but the inputs have {at}; check binary_data_size and {HEADER}",
            "inputs",
        )
    for output in request.outputs:
        check_parameters(output.parameters)
    return InferRequest(
        tuple(inputs),
        tuple(output.name for output in request.outputs),
        request.id,
        {
            output.name: _flag(output.parameters, "binary_data")
            for output in request.outputs
            if "binary_data" in output.parameters
        },
        _flag(request.parameters, "binary_data_output"),
    )


def encoded(request: InferRequest, response: InferResponse) -> tuple[bytes, int | None]:
    """Return the body of a response, and the length of its JSON if tensors in binary follow."""
    rows, binary = [], []
    for output in response.outputs:
        row: dict[str, Any] = {"name": output.name, "datatype": output.datatype, "shape": list(output.shape)}
        if request.is_binary(output.name):
            row["parameters"] = {"binary_data_size": len(output.data)}
            binary.append(output.data)
        else:
            row["data"] = unpacked(output)
        rows.append(row)
    values = {"model_name": response.model, "model_version": response.version, "outputs": rows}
    text = _ENCODER.encode({"id": response.id, **values} if response.id else values).encode()
    return b"".join((text, *binary)), len(text) if binary else None


def check_parameters(parameters: Mapping[str, Any]) -> None:
    """Raise BadRequest for parameters of extensions that the server does not have."""
    for name in _UNSUPPORTED:
        if name in parameters and parameters[name] not in (0, "", None):
            raise BadRequest(f"the parameter {name!r} is not supported; leave it out", "parameters")


def _length(text: str, n_bytes: int) -> int:
    length = int(text) if text.isdecimal() and len(text) < 20 else -1
    if not 0 < length <= n_bytes:
        raise BadRequest(f"{HEADER} is {text[:40]!r}; it must be a number from 1 to the body's {n_bytes} bytes")
    return length


def _count(parameters: Mapping[str, Any], key: str, name: str) -> int | None:
    value = parameters.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
        raise BadRequest(f"{name!r:.200}: {key} must be a number of bytes, got {value!r:.40}", "inputs")
    return value


def _flag(parameters: Mapping[str, Any], key: str) -> bool:
    value = parameters.get(key, False)
    if not isinstance(value, bool):
        raise BadRequest(f"{key} must be true or false, got {value!r:.40}", "parameters")
    return value
