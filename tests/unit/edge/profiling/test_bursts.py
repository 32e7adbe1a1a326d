"""Test measurements while the processor is unavailable for short times, with a simulated clock."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edge.cluster.session import EngineSession
from edge.onnx.bench import full_window
from edge.onnx.pipeline import Result
from edge.profiling.links import measure_links
from tests.support import memory_link
from tests.support.deployments import own_folders
from transport import edge_pb2 as pb
from transport import measure as measuring
from transport.frame import Kind
from transport.link import Deadlines
from transport.measure import measure


class Clock:
    """Time that passes only where the test lets it. While `gone` says so, everything takes so much longer."""

    def __init__(self, gone: Callable[[float], float] = lambda now: 0.0) -> None:
        self.now = 0.0
        self._gone = gone

    def time(self) -> float:
        return self.now

    def spend(self, seconds: float) -> None:
        self.now += seconds + self._gone(self.now)


class Modelled(memory_link.MemoryLink):
    """A link to a peer that answers measurements at once; what crosses takes its time on the test's clock."""

    def __init__(self, clock: Clock, latency_s: float, bytes_per_s: float) -> None:
        here, there = memory_link._Pipe(), memory_link._Pipe()
        super().__init__("b", here, there, Deadlines())
        self.clock, self.latency_s, self.bytes_per_s = clock, latency_s, bytes_per_s

    def send(self, payload: Any = b"", kind: Kind = Kind.DATA, timeout_s: float | None = None) -> None:
        self.clock.spend(self.latency_s * (kind is not Kind.DATA) + len(payload) / self.bytes_per_s)

    def receive_into(self, buffer: Any, timeout_s: float | None = None, kind: Kind = Kind.DATA) -> None:
        self.clock.spend(self.latency_s * (kind is not Kind.DATA) + len(buffer) / self.bytes_per_s)


def clocked(patch: pytest.MonkeyPatch, clock: Clock) -> None:
    patch.setattr(measuring, "time", SimpleNamespace(perf_counter=clock.time, monotonic=clock.time))


@pytest.mark.parametrize("begins", [0.0, 0.3, 0.5, 0.8])
def test_one_burst_changes_no_figure_but_p99(begins: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """5 ms are gone from every message for a quarter of the measurement."""
    results = []
    for gone in (lambda now: 0.0, lambda now: 0.005 if begins <= now < begins + 0.25 else 0.0):
        clock = Clock(gone)
        clocked(monkeypatch, clock)
        results.append(measure(Modelled(clock, 1e-4, 1e9), 1.0))
    quiet, burst = results
    assert quiet.latency_s == pytest.approx(1e-4, rel=0.01)
    assert quiet.send_bytes_per_s == pytest.approx(1e9, rel=0.05)
    assert quiet.receive_bytes_per_s == pytest.approx(1e9, rel=0.05)
    assert burst.latency_s == pytest.approx(quiet.latency_s)
    assert burst.round_trip_best_s == pytest.approx(quiet.round_trip_best_s)
    for rate in ("send_bytes_per_s", "receive_bytes_per_s"):
        assert getattr(burst, rate) == pytest.approx(getattr(quiet, rate), rel=0.05)


class Reported(EngineSession):
    """A session with the events of a test."""

    def __init__(self, rank: int, events: Sequence[pb.Event]) -> None:
        super().__init__(f"d{rank}", rank)
        self.commands: list[pb.Command] = []
        for event in events:
            self._events.put(event)

    def close(self) -> None:
        pass

    def _send(self, command: pb.Command) -> None:
        self.commands.append(command)


def test_links_are_surveyed_twice_and_the_best_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_folders(monkeypatch, tmp_path)

    def measured(trip_s: float, there: float, back: float) -> pb.Event:
        figures = {"round_trip_median_s": trip_s, "send_bytes_per_s": there, "receive_bytes_per_s": back}
        return pb.Event(measured=pb.Measured(kind="tcp", **figures))

    answered = pb.Event(answered=pb.Answered())
    state = pb.LinkState(rank=1, kind="tcp", round_trip_s=2e-4)
    a = Reported(0, [measured(2e-2, 1e6, 9e8), measured(2e-4, 1e9, 3e8)])
    b = Reported(1, [answered, answered])
    clock, pauses, pairs = Clock(), list[float](), list[int]()
    how: dict[str, Any] = {"clock": clock.time, "pause": pauses.append}
    links = measure_links([a, b], ["local", "x"], [[state], []], lambda: pairs.append(1), **how)
    assert links.between["local", "x"].latency_s == pytest.approx(1e-4)
    assert links.between["local", "x"].bytes_per_s == 1e9
    assert links.between["x", "local"].bytes_per_s == 9e8
    assert len(a.commands) == 2
    assert pauses == [pytest.approx(0.6)]  # longer than a burst of half a second
    again = measure_links([a, b], ["local", "x"], [[state], []], lambda: pairs.append(1), **how)
    assert len(a.commands) == 2  # remembered
    assert again.between["local", "x"].bytes_per_s == 1e9
    assert len(pairs) == 2


def test_a_burst_does_not_make_a_window_look_full() -> None:
    """Two stages of 10 ms behind links of 100: it takes 22 inputs in flight to keep them busy."""

    def windows(hit: set[int]) -> int:
        calls: list[int] = []

        def flow(feeds: Any, window: int) -> Iterator[Result]:
            calls.append(window)
            late = 0.5 if len(calls) in hit else 0.0
            for i in range(2 * window):
                ended = 0.22 + i * max(0.22 / window, 0.01) + late * (i == 2 * window - 1)
                yield Result({}, 0.0, ended, (0.01, 0.01))

        return full_window(flow, {}, Result({}, 0.0, 0.22, (0.01, 0.01)))

    assert [windows(hit) for hit in (set[int](), {1}, {1, 2}, {2, 4})] == [48, 48, 48, 48]
