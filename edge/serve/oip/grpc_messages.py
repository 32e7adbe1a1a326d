"""Inference requests and responses over gRPC."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from struct import error as StructError
from typing import Any

from edge.serve.http.errors import BadRequest
from edge.serve.oip import inference_pb2 as pb
from edge.serve.oip.framing import InferRequest, InferResponse, check_parameters
from edge.serve.oip.tensors import BYTES, CODES, Tensor, check_shape, check_size, packed_parts

_MOST_INPUTS = 1000
# Field with the values of each datatype. FP16 has none.
_FIELDS = {
    "BOOL": "bool_contents", "INT8": "int_contents", "INT16": "int_contents", "INT32": "int_contents",
    "INT64": "int64_contents", "UINT8": "uint_contents", "UINT16": "uint_contents", "UINT32": "uint_contents",
    "UINT64": "uint64_contents", "FP32": "fp32_contents", "FP64": "fp64_contents", BYTES: "bytes_contents",
}  # fmt: skip


def request_of(message: pb.ModelInferRequest) -> InferRequest:
    """Return the request in a message. Raises BadRequest if a tensor is invalid."""
    raw = message.raw_input_contents
    if len(message.inputs) > _MOST_INPUTS or len(message.outputs) > _MOST_INPUTS:
        raise BadRequest(f"the request has more than {_MOST_INPUTS} inputs or outputs; send fewer", "inputs")
    if raw and len(raw) != len(message.inputs):
        raise BadRequest(
            f"the request has {len(message.inputs)} inputs and {len(raw)} raw_input_contents; send one for each",
            "inputs",
        )
    inputs = []
    for i, item in enumerate(message.inputs):
        check_parameters(_plain(item.parameters))
        check_shape(item.name, item.shape)
        if raw and item.HasField("contents"):
            raise BadRequest(f"input {item.name!r:.200} has contents and raw_input_contents; send one", "inputs")
        data = raw[i] if raw else _contents(item)
        tensor = Tensor(item.name, item.datatype, tuple(item.shape), data)
        check_size(tensor)
        inputs.append(tensor)
    for output in message.outputs:
        check_parameters(_plain(output.parameters))
    return InferRequest(tuple(inputs), tuple(output.name for output in message.outputs), message.id)


def message_of(response: InferResponse) -> pb.ModelInferResponse:
    """Return the message of a response, with raw tensors."""
    return pb.ModelInferResponse(
        model_name=response.model,
        model_version=response.version,
        id=response.id,
        outputs=[
            pb.ModelInferResponse.InferOutputTensor(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
            for tensor in response.outputs
        ],
        raw_output_contents=[bytes(tensor.data) for tensor in response.outputs],
    )


def _contents(item: Any) -> bytes:
    """Return the typed values of an input as raw bytes."""
    field = _FIELDS.get(item.datatype)
    if field is None:
        raise BadRequest(
            f"input {item.name!r:.200} has the datatype {item.datatype[:20]!r}; its values need raw_input_contents",
            "inputs",
        )
    values = getattr(item.contents, field)
    others = [name.name for name, _ in item.contents.ListFields() if name.name != field]
    if others:
        raise BadRequest(f"input {item.name!r:.200} has {others[0]}; {item.datatype} needs {field}", "inputs")
    if item.datatype == "BOOL":
        return bytes(values)
    if item.datatype == BYTES:
        return packed_parts(values)
    try:
        return array(CODES[item.datatype], values).tobytes()
    except (OverflowError, StructError):
        raise BadRequest(f"input {item.name!r:.200} has a value that is not {item.datatype}", "inputs") from None


def _plain(parameters: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: getattr(value, value.WhichOneof("parameter_choice") or "string_param")
        for name, value in parameters.items()
    }
