"""The Open Inference Protocol over gRPC, in the event loop of the server."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf import json_format, message_factory
from google.protobuf.message import DecodeError

from devices.names import join_address
from edge.errors import EdgeError
from edge.serve.caller import CALLER
from edge.serve.http.errors import failure
from edge.serve.keys import NEEDED, Keys
from edge.serve.oip import inference_pb2 as pb
from edge.serve.oip.grpc_messages import message_of, request_of
from edge.serve.oip.networks import Networks
from edge.serve.options import ServeOptions

SERVICE = "inference.GRPCInferenceService"
_OPEN = ("ServerLive", "ServerReady")  # methods that need no key
_MOST_CALLS = 64  # calls at the same time; each has a message of up to `ServeOptions.max_body_bytes`
_LOG = logging.getLogger(__name__)
_END_S = 1.0  # time for calls to report the end of the server
_METHODS = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods
_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
}
_OPTIONS = (
    ("grpc.so_reuseport", 0),  # another server may have the port
    ("grpc.max_send_message_length", -1),
    # Clients that vanished silently are noticed.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
)

Call = Callable[[Any], Awaitable[Any]]


class GrpcServer:
    """Answers calls about networks."""

    def __init__(self, networks: Networks, options: ServeOptions) -> None:
        self._networks, self._options, self._keys = networks, options, Keys(options)
        self._calls: dict[str, Call] = {
            "ServerLive": self._live,
            "ServerReady": self._ready,
            "ModelReady": self._model_ready,
            "ServerMetadata": self._server_metadata,
            "ModelMetadata": self._model_metadata,
            "ModelInfer": self._infer,
            "ModelStatistics": self._statistics,
            "RepositoryIndex": self._index,
        }
        self._server = grpc.aio.server(
            handlers=[_Handlers(self._handler)],
            options=[*_OPTIONS, ("grpc.max_receive_message_length", options.max_body_bytes)],
            maximum_concurrent_rpcs=_MOST_CALLS,
        )

    def bind(self, host: str, port: int) -> str:
        """Bind an address and return it as HOST:PORT. port: 0 for any free port. Raises OSError."""
        address = join_address(host, port)
        tls = self._options.tls_cert, self._options.tls_key
        try:
            if tls[0] is None or tls[1] is None:
                bound = self._server.add_insecure_port(address)
            else:
                pair = (tls[1].read_bytes(), tls[0].read_bytes())
                bound = self._server.add_secure_port(address, grpc.ssl_server_credentials([pair]))
        except RuntimeError:
            bound = 0
        if not bound:
            raise OSError(
                f"cannot listen on {address} for gRPC; give another port, or end the program that has this one"
            )
        return join_address(host, bound)

    async def start(self) -> None:
        """Answer calls."""
        await self._server.start()

    async def close(self) -> None:
        """End the server."""
        await self._server.stop(_END_S)

    def _handler(self, method: str, metadata: dict[str, str]) -> Any:
        """Return the handler of a call."""
        owner = self._keys.owner(
            metadata.get("authorization", ""), metadata.get("x-api-key", ""), metadata.get("api-key", "")
        )
        if owner is None and method not in _OPEN:
            return _refusal(grpc.StatusCode.UNAUTHENTICATED, NEEDED)
        call = self._calls.get(method)
        if call is None:
            there = ", ".join(self._calls)
            return _refusal(grpc.StatusCode.UNIMPLEMENTED, f"edge does not have {method[:80]}; it has {there}")

        description = next(item for item in _METHODS if item.name == method)
        request_class = message_factory.GetMessageClass(description.input_type)

        async def answer(content: bytes, context: Any) -> Any:
            CALLER.set(self._keys.caller(owner or "", context.peer().rpartition(":")[0]))
            try:
                return (await call(request_class.FromString(content))).SerializeToString()
            except DecodeError as error:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"the message is not a {method}Request: {error}")
            except Exception as error:
                failed = failure(error)
                if not isinstance(error, EdgeError):
                    _LOG.error("unexpected error in %s", method, exc_info=error)
                await context.abort(_CODES.get(failed.status, grpc.StatusCode.INTERNAL), failed.message)

        return grpc.unary_unary_rpc_method_handler(answer)  # without a deserializer, which would log a traceback

    async def _live(self, _request: pb.ServerLiveRequest) -> pb.ServerLiveResponse:
        return pb.ServerLiveResponse(live=True)

    async def _ready(self, _request: pb.ServerReadyRequest) -> pb.ServerReadyResponse:
        return pb.ServerReadyResponse(ready=self._networks.is_ready)

    async def _model_ready(self, request: pb.ModelReadyRequest) -> pb.ModelReadyResponse:
        network = self._networks.network(request.name, request.version)
        return pb.ModelReadyResponse(ready=network.process.is_ready)

    async def _server_metadata(self, _request: pb.ServerMetadataRequest) -> pb.ServerMetadataResponse:
        return pb.ServerMetadataResponse(**self._networks.metadata())

    async def _model_metadata(self, request: pb.ModelMetadataRequest) -> Any:
        network = self._networks.network(request.name, request.version)
        await network.loaded()
        return json_format.ParseDict(network.metadata(), pb.ModelMetadataResponse())

    async def _infer(self, request: pb.ModelInferRequest) -> pb.ModelInferResponse:
        name = request.model_name, request.model_version
        self._networks.network(*name)
        return message_of(await self._networks.infer(*name, request_of(request)))

    async def _statistics(self, request: pb.ModelStatisticsRequest) -> Any:
        values = self._networks.statistics(request.name, request.version)
        return json_format.ParseDict(values, pb.ModelStatisticsResponse())

    async def _index(self, request: pb.RepositoryIndexRequest) -> Any:
        return json_format.ParseDict(
            {"models": self._networks.index(ready=request.ready)}, pb.RepositoryIndexResponse()
        )


class _Handlers(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Finds the handler of a call before its message is read."""

    def __init__(self, handler: Callable[[str, dict[str, str]], Any]) -> None:
        self._handler = handler

    def service(self, handler_call_details: Any) -> Any:
        """Return the handler of a call, or None for another service."""
        service, _, method = handler_call_details.method.strip("/").partition("/")
        metadata = {key: value for key, value in handler_call_details.invocation_metadata if isinstance(value, str)}
        return self._handler(method, metadata) if service == SERVICE else None


def _refusal(code: grpc.StatusCode, message: str) -> Any:
    """Return a handler that refuses a call without reading its message."""

    async def refuse(_requests: Any, context: Any) -> None:
        await context.abort(code, message)

    return grpc.stream_unary_rpc_method_handler(refuse)
