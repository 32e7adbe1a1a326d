"""RPC methods of edge.proto in Python: handlers for a server and stubs for a client, from the compiled description.

Two methods carry raw bytes instead of messages (RAW), because protobuf around a tensor would only copy it.
"""

from __future__ import annotations

import atexit
import functools
import gc
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf import message_factory

from transport import edge_pb2
from transport.grpc_link import answering

Handler = Callable[[Any, grpc.ServicerContext], Any]  # (request or requests, context) -> response or responses

OPEN_S = 10.0  # time for the first message of a call, which blocks a thread until it arrives
# Limit of calls that wait for their request. Each blocks a thread, and then takes up to MAX_MESSAGE bytes.
AWAITED = 8
AWAITED_OTHERS = 4  # the same for all callers that do not own the cluster
AWAITED_EACH = 2  # the same for each of these callers

SERVICE = "edge.Worker"
RAW = frozenset({"Link", "Upload"})  # methods with raw requests; Link has raw responses, too
# Metadata of an upload: the slice, its size, and the byte with which it continues.
SLICE_KEY, SLICE_BYTES_KEY, OFFSET_KEY = "edge-slice", "edge-slice-bytes", "edge-offset"
ERROR_KEY = "edge-error"  # trailing metadata of a failed call: the class of the error
_DESCRIPTION = edge_pb2.DESCRIPTOR.services_by_name["Worker"]
LINK = "Link"
STREAMED = frozenset(method.name for method in _DESCRIPTION.methods if method.server_streaming and method.name != LINK)


def _types(method: Any) -> tuple[Any, Any]:
    """Return (request class, response class) of a method; None means raw bytes."""
    request, response = (message_factory.GetMessageClass(t) for t in (method.input_type, method.output_type))
    return (
        None if method.name in RAW else request,
        None if method.output_type.name == "Raw" else response,
    )


@atexit.register
def _finalize_early() -> None:
    """Finalize unused calls before the interpreter ends, and no calls later.

    The finalizer of a gRPC call waits for a lock. The end of the interpreter stops daemon threads, such as those of
    gRPC, even while they hold that lock, and the program would then never end.
    """
    gc.collect()
    gc.freeze()


def handlers(servicer: object, wrap: Callable[[str, Handler], Handler]) -> grpc.GenericRpcHandler:
    """Return the handlers that a server registers.

    servicer: object whose methods answer the service's methods of the same name. Its `Link` is the `accept` of
        `answering`.
    wrap: function `wrap(name, handler)` that adds the common parts to a handler: admission and conversion of errors.
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


@dataclass(frozen=True)
class Caller:
    """Identity of the device that makes a call."""

    name: str
    owner: bool  # may command the worker: the cluster's owner, or any caller if the worker is in no cluster


class Admission(grpc.ServerInterceptor):  # type: ignore[misc]
    """Identifies the caller with `admit("/service/method", context)` before it waits for a call's request.

    gRPC itself waits for the request first, so a caller without one would block a thread without being identified. Only
    a few calls may wait for their requests at a time, and most of these places are the owner's. A call without a place
    is refused. If its method is in `brief`, it is answered as if its request were empty.
    """

    def __init__(self, admit: Callable[[str, grpc.ServicerContext], Caller], brief: Collection[str] = ()) -> None:
        self._admit = admit
        self._brief = brief
        self._awaited: Counter[Caller] = Counter()
        self._lock = threading.Lock()

    def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
        """Wrap the handler of a call with admission."""
        handler = continuation(details)
        if handler is None:
            return None
        answers = "stream" if handler.response_streaming else "unary"
        takes = "stream" if handler.request_streaming else "unary"
        behaviour = getattr(handler, f"{takes}_{answers}")

        @functools.wraps(behaviour)  # copies its attributes, which state whether it blocks
        def admitted(requests: Iterator[Any], context: grpc.ServicerContext, *send: Any) -> Any:
            caller = self._admit(details.method, context)
            if handler.request_streaming:
                return behaviour(requests, context, *send)
            with self._place(caller) as free:
                if not free and details.method not in self._brief:
                    context.abort(
                        grpc.StatusCode.RESOURCE_EXHAUSTED,
                        f"{caller.name} makes too many calls at a time that send no request; try again",
                    )
                request = _first(requests if free else iter([b""]), context, handler.request_deserializer)
            return behaviour(request, context, *send)

        read = handler.request_deserializer if handler.request_streaming else None
        make: Callable[..., Any] = getattr(grpc, f"stream_{answers}_rpc_method_handler")
        return make(admitted, request_deserializer=read, response_serializer=handler.response_serializer)

    @contextmanager
    def _place(self, caller: Caller) -> Iterator[bool]:
        """Reserve a place for this caller's request during the block; yield False if none is free."""
        with self._lock:
            others = sum(n for waiting, n in self._awaited.items() if not waiting.owner)
            free = self._awaited.total() < AWAITED
            if not caller.owner:
                free = others < AWAITED_OTHERS and self._awaited[caller] < AWAITED_EACH
            self._awaited[caller] += free
        try:
            yield free
        finally:
            with self._lock:
                self._awaited[caller] -= free
                if not self._awaited[caller]:
                    del self._awaited[caller]


def _first(requests: Iterator[bytes], context: grpc.ServicerContext, read: Callable[[Any], Any] | None) -> Any:
    """Return the only request of a call. Abort the call if there is none or it is not valid."""
    with call_deadline(context, OPEN_S):
        request = next(requests, None)
    try:
        return read(request) if read else request
    except Exception:  # the request is missing or not valid
        # The error that `abort` raises keeps this frame alive after its place is free, so it must not hold the request.
        request = None
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the call's request is missing, or cannot be read")


@contextmanager
def call_deadline(context: grpc.ServicerContext, seconds: float) -> Iterator[Callable[[], None]]:
    """Cancel a call that stays in the block longer than `seconds`. Yield a function that restarts the time."""
    until = time.monotonic() + seconds
    over = threading.Event()

    def again() -> None:
        nonlocal until
        until = time.monotonic() + seconds

    def watch() -> None:
        while not over.wait(max(0.0, until - time.monotonic())):
            if time.monotonic() >= until:
                context.cancel()
                return

    threading.Thread(target=watch, daemon=True, name="impatience").start()
    try:
        yield again
    finally:
        over.set()


def stub(channel: grpc.Channel, method: str) -> Any:
    """Return gRPC's callable of one method for a client."""
    description = _DESCRIPTION.methods_by_name[method]
    request, response = _types(description)
    make: Callable[..., Any] = getattr(channel, _shape(description))
    return make(
        f"/{SERVICE}/{method}",
        request_serializer=request.SerializeToString if request else None,
        response_deserializer=response.FromString if response else None,
    )


def _shape(method: Any) -> str:
    """Return gRPC's name for a method's shape: unary_unary, stream_stream, ..."""
    return "_".join("stream" if streams else "unary" for streams in (method.client_streaming, method.server_streaming))
