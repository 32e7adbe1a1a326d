"""Model of one direction of a network link: when each packet arrives, or that it is lost.

It computes with times and sizes only. A packet waits for earlier packets, passes in its size divided by the bandwidth,
travels for the delay and up to the jitter, and may be lost. Jitter delays packets but does not reorder them.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

LEAST_QUEUE_BYTES = 128 << 10
QUEUE_S = 0.25  # a queue holds at least this time of the bandwidth, like queues of home routers
JUMBO_MTU = 65520  # largest packet, with the fewest packets for the most bytes
USUAL_MTU = 1500
PACKET_S = 0.005  # longest time of one packet on a link with limited bandwidth


@dataclass(frozen=True)
class Shape:
    """Properties of one direction of a link."""

    delay_s: float = 0.0  # one way
    jitter_s: float = 0.0  # largest additional delay, uniformly distributed
    bytes_per_s: float | None = None  # None means no limit
    loss: float = 0.0  # probability that a packet never arrives

    def queue_bytes(self) -> float:
        """Return how many bytes may queue before the link; packets beyond are dropped. Infinite without a bandwidth.

        It is twice the bytes in flight during a round trip, so that TCP keeps the link busy after a loss.
        """
        if self.bytes_per_s is None:
            return float("inf")
        on_the_way = self.bytes_per_s * 2 * (self.delay_s + self.jitter_s)
        return max(2 * on_the_way, QUEUE_S * self.bytes_per_s, LEAST_QUEUE_BYTES)

    def mtu(self) -> int:
        """Return the largest packet in bytes. With losses it is the usual size, because whole packets are lost."""
        if self.loss:
            return USUAL_MTU
        if self.bytes_per_s is None:
            return JUMBO_MTU
        return int(min(JUMBO_MTU, max(USUAL_MTU, self.bytes_per_s * PACKET_S)))


class Port:
    """One direction of a device's own interface. Packets of all of its links pass it one after the other."""

    def __init__(self, bytes_per_s: float) -> None:
        self._rate = bytes_per_s
        self._most_s = Shape(bytes_per_s=bytes_per_s).queue_bytes() / bytes_per_s
        self._free = 0.0  # time when the last bit of all packets so far has passed

    def send(self, now: float, n_bytes: int) -> float | None:
        """Return the time (s) when the first bit of a packet leaves the device, or None if the queue is full."""
        start = max(now, self._free)
        if start - now + n_bytes / self._rate > self._most_s:
            return None
        self._free = start + n_bytes / self._rate
        return start

    def receive(self, arrival: float, n_bytes: int) -> float:
        """Return the time when the last bit of a packet is received.

        arrival: when a link delivers it.

        The result is `arrival` unless other packets arrive at the same time.
        """
        self._free = max(arrival, self._free + n_bytes / self._rate)
        return self._free


class Shaper:
    """One direction of a link, with the packets in flight."""

    def __init__(self, shape: Shape, seed: int = 0) -> None:
        """seed: seed of jitter and losses."""
        self.shape = shape
        self._most = shape.queue_bytes()
        self._random = random.Random(seed).random
        self._free = 0.0  # time when the last bit of all queued packets has been sent
        self._last = 0.0  # arrival of the previous packet

    def arrival(self, now: float, n_bytes: int) -> float | None:
        """Return the time (s) when a packet sent at `now` arrives, or None if the queue is full or it gets lost."""
        shape, rate = self.shape, self.shape.bytes_per_s
        start = now
        if rate is not None:
            start = max(now, self._free)
            if (start - now) * rate + n_bytes > self._most:
                return None
            start = self._free = start + n_bytes / rate
        if shape.loss and self._random() < shape.loss:
            return None
        due = start + shape.delay_s
        if shape.jitter_s:
            due += shape.jitter_s * self._random()
        self._last = due = max(due, self._last)
        return due
