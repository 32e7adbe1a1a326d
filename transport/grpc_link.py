"""Link over a gRPC bidirectional stream with one frame per message. It is used if TCP cannot reach the peer.

gRPC's Python interface pulls the messages of a client out of an iterator, and blocks in `next` until a message comes.
So a client sends through a queue, and one thread for all links of the process cancels streams that wait too long.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from transport.errors import LinkClosed, LinkTimeout, ProtocolError, Refused, TransportError
from transport.frame import HEADER_BYTES, Frame, parse_frame
from transport.link import DEFAULTS, Deadlines, Link
from transport.received import printable

METHOD = "/edge.Worker/Link"
SESSION_KEY = "edge-session"  # metadata key of a call: the session of the worker that is dialled

# The largest payload of a message. gRPC reads a whole message before our code can check it, so this is far below
# MAX_PAYLOAD. Only recipes of slices exceed 1 MiB.
MAX_MESSAGE = 4 << 20

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE + HEADER_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE + HEADER_BYTES),
    # A peer that vanished silently is noticed after about time + timeout.
    ("grpc.keepalive_time_ms", 2000),
    ("grpc.keepalive_timeout_ms", 3000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1000),
    ("grpc.http2.min_ping_interval_without_data_ms", 1000),
    ("grpc.enable_http_proxy", 0),  # devices at home are not behind the proxy in the environment
    (
        "grpc.use_local_subchannel_pool",
        1,
    ),  # do not share connections, because the next channel may have other credentials
)

_QUEUED = 64  # messages that may wait for gRPC; then the sender waits
_QUEUED_BYTES = 4 << 20  # limit of their bytes, far more than collectives send ahead
_QUEUE_LOOK_S = 0.0005
_WATCH_S = 0.05  # time between two checks of the deadlines
_LAST_WORD_S = 0.2  # time for the last frame to leave before a waiting receiver is released


class SendQueue:
    """Send queue of a client: gRPC iterates over `messages` and takes them one by one."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self.messages: Iterator[bytes] = iter(self._queue.get, None)
        self.over = False  # gRPC takes no more messages, because the call or our side has ended
        self.until = 0.0  # always 0: the watch needs no deadline for it
        self.expired = False  # gRPC did not take a message in time

    def put(self, data: bytes, timeout_s: float) -> bool:
        """Add one message; return False if there was no room within `timeout_s`, or the stream is over."""
        room = min(_QUEUED, max(1, _QUEUED_BYTES // len(data)))
        if self._queue.qsize() >= room and not self._wait(room, timeout_s):
            return False
        self._queue.put(data)
        return True

    def _wait(self, room: int, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while self._queue.qsize() >= room:
            self.expired = time.monotonic() > deadline
            if self.over or self.expired:
                return False
            time.sleep(_QUEUE_LOOK_S)
        return True

    def end(self) -> None:
        """Half-close the stream: no messages follow the queued ones."""
        self.over = True
        self._queue.put(None)


class DirectSender:
    """Direct sending of a server: `put` returns once gRPC has taken the message."""

    def __init__(self, send: Callable[[bytes | None], None]) -> None:
        self._send = send
        self._ended = False
        self.over = False
        self.until = 0.0  # deadline of a waiting send, for the watch; 0 if none waits
        self.expired = False

    def put(self, data: bytes, timeout_s: float) -> bool:
        """Send one message; return False if the watch ended the call because it took too long."""
        self.until = time.monotonic() + timeout_s
        try:
            self._send(data)
        finally:
            self.until = 0.0
        return not self.expired

    def end(self) -> None:
        """End the stream after the messages that were sent."""
        if not self._ended:
            self._ended = True
            self._send(None)

    def end_of_call(self) -> None:
        """Stop sending when gRPC ends the call."""
        self.over = True


Serve = Callable[["GrpcLink"], None]
Served = tuple[Serve, str, Deadlines]  # function that serves the link, name of its peer, its deadlines


class GrpcLink(Link):
    """Frames over one stream. `dial` and `answering` make them."""

    kind = "grpc"

    def __init__(
        self,
        peer: str,
        incoming: Iterator[bytes],
        cancel: Callable[[], Any],
        deadlines: Deadlines,
        outgoing: SendQueue | DirectSender,
    ) -> None:
        super().__init__(peer, deadlines)
        self.outgoing = outgoing
        self._incoming = incoming
        self._cancel = cancel
        self.wait_until = 0.0  # deadline of a waiting receive, for the watch; 0 if none waits
        self.expired = False
        _watch.add(self)

    def _write(self, header: bytes, payload: memoryview, timeout_s: float) -> None:
        if len(payload) > MAX_MESSAGE:
            raise ProtocolError(f"a gRPC link sends at most {MAX_MESSAGE} bytes at once, not {len(payload)}")
        if self.outgoing.over:
            raise self._over()
        if not self.outgoing.put(header + payload, timeout_s):
            if self.outgoing.expired:
                raise self._send_timeout()
            raise self._gone() if self.broken is not None else self._over()

    def _read(self, timeout_s: float, max_bytes: int) -> Frame:
        self.wait_until = time.monotonic() + timeout_s
        try:
            if self.broken is not None:  # another thread broke the link, and may not have noticed this wait
                raise self._gone()
            data = next(self._incoming)
        except StopIteration:
            if self.expired:  # a server's iterator may just end when its call is cancelled
                raise self._timeout(timeout_s) from None
            raise self._gone("it ended the stream without giving a reason") from None
        except grpc.RpcError as error:
            if self.expired:
                raise self._timeout(timeout_s) from error
            # A server's request iterator raises one without a code when the call was cancelled.
            raise rpc_failed(error, self.peer) if isinstance(error, grpc.Call) else self._gone() from error
        finally:
            self.wait_until = 0.0
        frame = self._received.parsed(parse_frame, memoryview(data))
        self._received.limit(frame.kind, len(frame.payload), max_bytes)
        return frame

    def _over(self) -> TransportError:
        """Return the error of a stream that ended before we could send, with the peer's reason if it gave one."""
        call = self._incoming
        if isinstance(call, grpc.Call) and call.code() is not grpc.StatusCode.OK:
            return rpc_failed(call, self.peer)
        return self._gone("it ended the stream")

    def check_deadlines(self, now: float) -> None:
        """End the stream if a receive or a send exceeds its deadline. The watch calls this."""
        if 0 < self.wait_until < now:
            self.expired, self.wait_until = True, 0.0
            self._cancel()
        elif 0 < self.outgoing.until < now:
            self.outgoing.expired, self.outgoing.until = True, 0.0
            self._cancel()

    def _end(self) -> None:
        # The peer ends the stream when it has read all queued messages, which ends a wait here. Otherwise the watch
        # ends that wait.
        self.outgoing.end()
        if self.wait_until:
            self.wait_until = time.monotonic() + _LAST_WORD_S
        if self.outgoing.until:
            self.outgoing.until = time.monotonic() + _LAST_WORD_S


def dial(
    channel: grpc.Channel,
    peer: str,
    session: str,
    deadlines: Deadlines = DEFAULTS,
    on_end: Callable[[], object] | None = None,
) -> GrpcLink:
    """Dial a session of the worker behind `channel`. Errors of the connection show at the first receive.

    on_end: called, in a thread of gRPC, once the stream has ended.
    """
    outgoing = SendQueue()
    call = channel.stream_stream(METHOD)(outgoing.messages, metadata=((SESSION_KEY, session),))
    for ended in (outgoing.end, on_end):
        if ended is not None and not call.add_callback(ended):
            ended()  # the call is over already
    return GrpcLink(peer, call, call.cancel, deadlines, outgoing)


def answering(accept: Callable[[Iterator[bytes], grpc.ServicerContext], Served]) -> Callable[..., None]:
    """Return the handler of a method whose streams are links. A link ends when its server returns.

    accept: inspects a call and returns its server, the peer's name and the deadlines, or ends the call with
        `context.abort`.

    gRPC usually iterates over the messages to send. This needs a thread for each stream and a wake-up for each message.
    The handler sends from the thread that has the message instead (gRPC: experimental_non_blocking).
    """

    def handler(requests: Iterator[bytes], context: grpc.ServicerContext, send: Callable[[bytes | None], None]) -> None:
        serve, peer, deadlines = accept(requests, context)
        outgoing = DirectSender(send)
        link = GrpcLink(peer, requests, context.cancel, deadlines, outgoing)

        def run() -> None:
            try:
                serve(link)
            finally:
                link.close()

        if not context.add_callback(outgoing.end_of_call):
            outgoing.end_of_call()
        threading.Thread(target=run, name=f"link to {peer}", daemon=True).start()

    handler.experimental_non_blocking = True  # type: ignore[attr-defined]
    return handler


def rpc_failed(error: grpc.Call, peer: str) -> TransportError:
    """Translate a failed call into one of our errors."""
    code, details = error.code(), error.details() or ""
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return LinkTimeout(f"{peer} gave no answer in time")
    if code is grpc.StatusCode.UNAVAILABLE:
        return LinkClosed(f"{peer} cannot be reached: {_plain(details)}")
    if code is grpc.StatusCode.CANCELLED:
        return LinkClosed(f"{peer} went away")
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "message larger than max" in details:
        return ProtocolError(f"{peer} sent a message larger than any frame: {printable(details)}")
    return Refused(f"{peer}: {printable(details) or code}")


def _plain(details: str) -> str:
    """Describe a failed connection without gRPC's own terms."""
    for mark, meaning in (
        ("Connection refused", "nothing listens there"),
        ("Socket closed", "the connection was closed"),
        ("CERTIFICATE_VERIFY_FAILED", "its certificate is not of our cluster"),
        ("Handshake", "the handshake failed: encrypted and plain do not go together, or it is of another cluster"),
        ("Timeout", "no connection in time"),
        ("keepalive", "it no longer answers"),
    ):
        if mark.lower() in details.lower():
            return meaning
    return printable(details)[:200] if details else "no reason was given"


class _Watch:
    """Ends waits that exceed their deadlines. One thread checks all links, so no frame needs a timer of its own."""

    def __init__(self) -> None:
        self._links: weakref.WeakSet[GrpcLink] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def add(self, link: GrpcLink) -> None:
        with self._lock:
            self._links.add(link)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="deadlines", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while True:
            time.sleep(_WATCH_S)
            now = time.monotonic()
            with self._lock:
                links = [link for link in self._links if link.broken is None or link.wait_until or link.outgoing.until]
                if not links:
                    self._thread = None
                    return
            for link in links:
                link.check_deadlines(now)


_watch = _Watch()
