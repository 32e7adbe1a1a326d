"""Model of one direction of a network link: when each packet arrives, or that it is lost.

Pure arithmetic on times and sizes. A packet waits for those before it, takes its size divided by the bandwidth to pass,
travels for the delay and up to the jitter, and may be lost. The order stays: jitter delays, it does not reorder.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

LEAST_QUEUE_BYTES = 128 << 10
QUEUE_S = 0.25  # a queue holds so much of a link's bandwidth, as those of home routers do, or more
JUMBO_MTU = 65520  # the largest packet: fewest packets for the most bytes
USUAL_MTU = 1500
PACKET_S = 0.005  # where bandwidth is limited, a packet takes no longer than this


@dataclass(frozen=True)
class Shape:
    """Properties of one direction of a link."""

    delay_s: float = 0.0  # one way
    jitter_s: float = 0.0  # up to so much more, evenly distributed
    bytes_per_s: float | None = None  # None: no limit
    loss: float = 0.0  # probability that a packet never arrives

    def queue_bytes(self) -> float:
        """Return how many bytes may queue before the link; packets beyond are dropped. Infinite for a link without a
        limit.

        Twice the bytes in flight during a round trip, so that TCP keeps the link busy after a loss.
        """
        if self.bytes_per_s is None:
            return float("inf")
        on_the_way = self.bytes_per_s * 2 * (self.delay_s + self.jitter_s)
        return max(2 * on_the_way, QUEUE_S * self.bytes_per_s, LEAST_QUEUE_BYTES)

    def mtu(self) -> int:
        """The largest packet, bytes. With losses the usual one, since what is lost is a packet."""
        if self.loss:
            return USUAL_MTU
        if self.bytes_per_s is None:
            return JUMBO_MTU
        return int(min(JUMBO_MTU, max(USUAL_MTU, self.bytes_per_s * PACKET_S)))


class Port:
    """One direction of a device's own interface, which packets of all of its links pass one after the other."""

    def __init__(self, bytes_per_s: float) -> None:
        self._rate = bytes_per_s
        self._most_s = Shape(bytes_per_s=bytes_per_s).queue_bytes() / bytes_per_s
        self._free = 0.0  # when the last bit of what came so far has passed

    def send(self, now: float, n_bytes: int) -> float | None:
        """Return when the first bit of a packet leaves the device (s); None if the queue is full."""
        start = max(now, self._free)
        if start - now + n_bytes / self._rate > self._most_s:
            return None
        self._free = start + n_bytes / self._rate
        return start

    def receive(self, arrival: float, n_bytes: int) -> float:
        """Return when the last bit of a packet is in the device, where a link brings it at `arrival`: then, if nothing
        else came at the same time."""
        self._free = max(arrival, self._free + n_bytes / self._rate)
        return self._free


class Shaper:
    """One direction of a link, with the packets in flight."""

    def __init__(self, shape: Shape, seed: int = 0) -> None:
        """seed: of jitter and losses."""
        self.shape = shape
        self._most = shape.queue_bytes()
        self._random = random.Random(seed).random
        self._free = 0.0  # when the last bit of what waits will be on its way
        self._last = 0.0  # when the packet before arrives

    def arrival(self, now: float, n_bytes: int) -> float | None:
        """Return when a packet sent at `now` (s) arrives; None if the queue is full, or it is lost on the way."""
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
