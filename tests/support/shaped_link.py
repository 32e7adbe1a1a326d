"""A link with the delay, jitter, bandwidth and faults of a worse link.

Both ends must be shaped, on one machine: a frame carries the time at which it may be seen, by this machine's clock, and
the receiver waits until then. That is exact to the clock and needs no thread. Frames travel inside frames of the link
below, so that what a fault damages is a whole frame, header and all.
"""

from __future__ import annotations

import math
import random
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from transport.errors import ProtocolError, TransportError
from transport.frame import HEADER_BYTES, MAX_PAYLOAD, MAX_REASON, Frame, Kind, parse_frame
from transport.link import Link
from transport.tcp_link import yield_cpu

_STAMP = struct.Struct("<dd")  # when the first bit may arrive; seconds on the wire
_NAP_EARLY_S = 150e-6  # a sleep may last this much longer than asked for; the rest is spent looking at the clock


@dataclass(frozen=True)
class Shape:
    """Delay and bandwidth of one direction of a link."""

    delay_s: float = 0.0  # one way
    jitter_s: float = 0.0  # up to so much more, evenly distributed; the order stays
    drop: float = 0.0  # probability that a frame never arrives
    truncate: float = 0.0  # that only its beginning arrives
    corrupt: float = 0.0  # that one of its bytes is another


class Nic:
    """Network card: what a device can send, and at the same time receive, over all its links together."""

    def __init__(self, bandwidth: float = float("inf")) -> None:
        """bandwidth: bytes/s each way."""
        self.bandwidth = bandwidth
        self.send_free = 0.0  # when the last bit of what was handed over will be out
        self.receive_free = 0.0
        self.lock = threading.Lock()  # links of several threads share it


class ShapedLink(Link):
    """`inner`, made worse. Closing it closes `inner`."""

    def __init__(
        self,
        inner: Link,
        shape: Shape = Shape(),
        nic: Nic | None = None,
        seed: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """nic: shared by all links of a device. seed: of jitter and faults, which happen to what is sent."""
        super().__init__(inner.peer, inner.deadlines)
        self.kind = inner.kind
        self.inner = inner
        self.shape = shape
        self._nic = nic or Nic()
        self._random = random.Random(seed)
        self._clock = clock
        self._last_due = 0.0

    def _write(self, header: bytes, payload: memoryview, timeout_s: float) -> None:
        frame = bytearray(header)
        frame += payload
        shape, chance = self.shape, self._random.random
        wire_s = len(frame) / self._nic.bandwidth
        with self._nic.lock:
            start = max(self._clock(), self._nic.send_free)
            self._nic.send_free = start + wire_s
        if chance() < shape.drop:
            return
        if chance() < shape.truncate:
            del frame[self._random.randrange(len(frame)) :]
        if frame and chance() < shape.corrupt:
            frame[self._random.randrange(len(frame))] ^= self._random.randrange(1, 256)
        # Never before the frame sent last: jitter delays, it does not reorder.
        self._last_due = max(self._last_due, start + shape.delay_s + chance() * shape.jitter_s)
        self.inner.send(_STAMP.pack(self._last_due, wire_s) + frame, Kind.SHAPED)

    def _read(self, timeout_s: float, max_bytes: int) -> Frame:
        deadline = self._clock() + timeout_s
        most = max(max_bytes, MAX_REASON) + HEADER_BYTES + _STAMP.size
        outer = self.inner.receive(timeout_s, min(most, MAX_PAYLOAD))
        data = memoryview(outer.payload)
        if outer.kind is not Kind.SHAPED or len(data) < _STAMP.size:
            raise ProtocolError(
                f"{self.peer} sent {len(data)} bytes of {outer.kind.name} over a shaped link; shape both of its ends"
            )
        arrives, wire_s = _STAMP.unpack_from(data)
        if not (math.isfinite(arrives) and math.isfinite(wire_s) and wire_s >= 0):
            raise ProtocolError(f"{self.peer} sent a frame that is due at {arrives} and takes {wire_s} s")
        # The first bit is taken as soon as we have no other to take; the frame is there with its last.
        with self._nic.lock:
            due = self._nic.receive_free = max(arrives, self._nic.receive_free) + wire_s
        _wait_until(min(due, deadline), self._clock)
        if due > deadline:
            raise self._timeout(timeout_s)
        frame = self._received.parsed(parse_frame, data[_STAMP.size :])
        self._received.limit(frame.kind, len(frame.payload), max_bytes)
        return frame

    def _end(self) -> None:
        with suppress(TransportError):
            self.inner.close()


def exact_sleep() -> None:
    """Let this process's sleeps end when asked, not up to 50 us later (Linux; elsewhere nothing)."""
    with suppress(OSError):
        Path("/proc/self/timerslack_ns").write_text("1000")


def _wait_until(due: float, clock: Callable[[], float]) -> None:
    while (left := due - clock()) > 0:
        if left > _NAP_EARLY_S:
            time.sleep(left - _NAP_EARLY_S)
        else:
            yield_cpu()
