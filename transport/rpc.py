"""The calls of edge.proto as Python: what a server registers and a client calls, read from the compiled description.

Two methods carry raw bytes in place of messages (RAW): protobuf around a tensor would only copy it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
from google.protobuf import message_factory

from transport import edge_pb2
from transport.grpc_link import answering

Handler = Callable[[Any, grpc.ServicerContext], Any]  # (request or requests, context) -> response or responses

SERVICE = "edge.Worker"
RAW = frozenset({"Link", "Upload"})  # their requests; Link's responses too
# Metadata of an upload: what is sent, and from where on.
SLICE_KEY, SLICE_BYTES_KEY, OFFSET_KEY = "edge-slice", "edge-slice-bytes", "edge-offset"
ERROR_KEY = "edge-error"  # trailing metadata of a failed call: the class of the error
_DESCRIPTION = edge_pb2.DESCRIPTOR.services_by_name["Worker"]
LINK = "Link"
STREAMED = frozenset(method.name for method in _DESCRIPTION.methods if method.server_streaming and method.name != LINK)


def _types(method: Any) -> tuple[Any, Any]:
    """(request class, response class); None for raw bytes."""
    request, response = (message_factory.GetMessageClass(t) for t in (method.input_type, method.output_type))
    return (
        None if method.name in RAW else request,
        None if method.output_type.name == "Raw" else response,
    )


def handlers(servicer: object, wrap: Callable[[str, Handler], Handler]) -> grpc.GenericRpcHandler:
    """What a server registers: every method of the service, answered by the servicer's method of the same name. Its
    `Link` is what `answering` takes.

    `wrap(name, handler)` puts around each what all have in common: who may call, what errors become.
    """
    table = {}
    for method in _DESCRIPTION.methods:
        request, response = _types(method)
        handler = wrap(method.name, getattr(servicer, method.name))
        make: Callable[..., Any] = getattr(grpc, f"{_shape(method)}_rpc_method_handler")
        table[method.name] = make(
            answering(handler) if method.name == LINK else handler,
            request_deserializer=request.FromString if request else None,
            response_serializer=response.SerializeToString if response else None,
        )
    return grpc.method_handlers_generic_handler(SERVICE, table)


def stub(channel: grpc.Channel, method: str) -> Any:
    """The client's side of one method, as gRPC's own callable."""
    found = _DESCRIPTION.methods_by_name[method]
    request, response = _types(found)
    make: Callable[..., Any] = getattr(channel, _shape(found))
    return make(
        f"/{SERVICE}/{method}",
        request_serializer=request.SerializeToString if request else None,
        response_deserializer=response.FromString if response else None,
    )


def _shape(method: Any) -> str:
    """gRPC's word for what streams: unary_unary, stream_stream, ..."""
    return "_".join("stream" if streams else "unary" for streams in (method.client_streaming, method.server_streaming))
