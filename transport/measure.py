"""Link measurements between two ends: round-trip times and bandwidth.

One end calls `measure`, the other `answer` at the same time.
"""

from __future__ import annotations

import math
import struct
import time
from dataclasses import dataclass

from transport.errors import ProtocolError
from transport.frame import Kind
from transport.link import Link

SMALL_BYTES = 8  # a message whose time is only latency
TENSOR_BYTES = 8 << 10  # one row of 2,048 floats, as exchanged in decode
_BLOCK_BYTES = 256 << 10
_MOST_BLOCKS = 1 << 20  # limit of one request
_LEAST_ROUND_TRIPS, _MOST_ROUND_TRIPS = 20, 2000
_FAR_S = 0.02  # longer round trips need few samples; TCP needs some of them to find the capacity of the path
_FAR_ROUND_TRIPS = 3
_FASTER = 1.25  # a speed-up by this factor means that TCP has not yet found the capacity
_SAMPLES = 4  # samples spread over a measurement, so that a short loss of the processor spoils only one
Flood = tuple[int, float]  # (bytes, seconds including the request)
_FLOOD = struct.Struct("<cI")  # b"s": I send n blocks; b"r": you send n blocks; b"e": the end


@dataclass(frozen=True)
class LinkFigures:
    """Results of a measurement. Round trips are of 8 bytes, in seconds; half of one is the one-way latency.

    The median and the bandwidths are those of the best sample; best and p99 are those of all samples.
    """

    round_trip_median_s: float
    round_trip_p99_s: float
    round_trip_best_s: float
    send_bytes_per_s: float
    receive_bytes_per_s: float

    @property
    def latency_s(self) -> float:
        """Median one-way latency in seconds."""
        return self.round_trip_median_s / 2


def measure(link: Link, seconds: float = 1.0) -> LinkFigures:
    """Measure for about `seconds`, alternating between round trips and bandwidth.

    The other end must call `answer`.
    """
    result = measure_once(link, seconds)
    finish(link)
    return result


def measure_once(link: Link, seconds: float) -> LinkFigures:
    """Measure as `measure` does, but let the other end continue to answer."""
    trips: list[float] = []
    median_s = math.inf
    sent: list[Flood] = []
    received: list[Flood] = []
    samples, sample_s = _SAMPLES, seconds / _SAMPLES
    while samples:
        times = round_trips(link, SMALL_BYTES, sample_s / 2)
        if times[0] > _FAR_S:  # TCP needs a long time to find the capacity of a long path, so take one sample
            samples, sample_s = 1, seconds
        trips += times
        median_s = min(median_s, times[len(times) // 2])
        sent += _floods(link, b"s", sample_s / 4, times[0])
        received += _floods(link, b"r", sample_s / 4, times[0])
        samples -= 1
    trips.sort()
    p99_s = trips[min(len(trips) - 1, len(trips) * 99 // 100)]
    return LinkFigures(median_s, p99_s, trips[0], _bandwidth(sent, trips[0]), _bandwidth(received, trips[0]))


def round_trips(link: Link, n_bytes: int, seconds: float, most: int = _MOST_ROUND_TRIPS) -> list[float]:
    """Return sorted round-trip times in seconds of messages of `n_bytes`. The first few are warm-up."""
    payload, back = bytes(n_bytes), bytearray(n_bytes)
    times: list[float] = []
    warm_up, end = 3, time.monotonic() + seconds
    least = _LEAST_ROUND_TRIPS
    while len(times) < least or (len(times) < most and time.monotonic() < end):
        began = time.perf_counter()
        link.send(payload, Kind.PING)
        link.receive_into(back, kind=Kind.PONG)
        elapsed_s = time.perf_counter() - began
        if elapsed_s > _FAR_S:
            warm_up, least = min(warm_up, 1), _FAR_ROUND_TRIPS
        if warm_up:
            warm_up -= 1
        else:
            times.append(elapsed_s)
    return sorted(times)


def finish(link: Link) -> None:
    """End the other end's `answer`. No measurement can follow."""
    link.send(_FLOOD.pack(b"e", 0), Kind.CONTROL)


def _floods(link: Link, direction: bytes, seconds: float, round_trip_s: float) -> list[Flood]:
    """Send runs of large frames in one direction, each run longer. Return the runs that took long enough."""
    blocks, best = 4, 0.0
    counted: list[Flood] = []
    while True:
        began = time.perf_counter()
        link.send(_FLOOD.pack(direction, blocks), Kind.CONTROL)
        if direction == b"s":
            for _ in range(blocks):
                link.send(_BLOCK)
            link.receive_into(bytearray(1), kind=Kind.CONTROL)
        else:
            _drain(link, blocks)
        flood = blocks * _BLOCK_BYTES, time.perf_counter() - began
        if flood[1] - round_trip_s > seconds / 2 or blocks >= _MOST_BLOCKS // 16:
            counted.append(flood)
            before, best = best, _bandwidth(counted, round_trip_s)
            if round_trip_s < _FAR_S or best < _FASTER * before:
                return counted
            continue
        # The first run predicts badly, so the number grows at most 16-fold.
        blocks = int(blocks * min(16, max(2, 0.9 * seconds / max(flood[1] - round_trip_s, 1e-9))))


def _bandwidth(floods: list[Flood], round_trip_s: float) -> float:
    """Return the bytes per second of the fastest run, without the round trip of the request."""
    return max(n_bytes / max(took_s - round_trip_s, 1e-9) for n_bytes, took_s in floods)


def answer(link: Link) -> None:
    """Serve the other end's `measure` or `round_trips` until it calls `finish`."""
    while True:
        frame = link.receive(max_bytes=TENSOR_BYTES)
        if frame.kind is Kind.PING:
            link.send(frame.payload, Kind.PONG)
        elif frame.kind is Kind.CONTROL and len(frame.payload) == _FLOOD.size:
            direction, blocks = _FLOOD.unpack(frame.payload)
            if blocks > _MOST_BLOCKS or direction not in (b"s", b"r", b"e"):
                raise ProtocolError(f"{link.peer} asked for {blocks} blocks of {direction!r} to measure with")
            if direction == b"s":
                _drain(link, blocks)
                link.send(b"\0", Kind.CONTROL)
            elif direction == b"r":
                for _ in range(blocks):
                    link.send(_BLOCK)
            else:
                return
        else:
            raise ProtocolError(
                f"{link.peer} should have measured, but sent {len(frame.payload)} bytes of {frame.kind.name}"
            )


def _drain(link: Link, blocks: int) -> None:
    into = bytearray(_BLOCK_BYTES)
    for _ in range(blocks):
        link.receive_into(into)


_BLOCK = bytes(_BLOCK_BYTES)
