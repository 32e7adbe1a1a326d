"""Test the figures of links with a simulated clock: known trips and bytes, each in its own direction."""

from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from apps.commands import link as link_command
from devices.remembered import Remembered
from edge.cluster import diagnose, session
from edge.cluster.diagnose import LinkReport
from edge.errors import Interrupted
from edge.profiling import links
from tests.support import memory_link
from tests.support.clock import Clock
from transport import edge_pb2 as pb
from transport import link as link_module
from transport import measure as measuring
from transport.choice import choose
from transport.errors import LinkTimeout
from transport.frame import Frame, Kind, parse_header
from transport.link import Deadlines, Link
from transport.measure import LinkFigures, measure

ROUND_TRIP_S, SEND, RECEIVE = 0.002, 200e6, 50e6  # bytes a second


class Wire(Link):
    """A link with a peer that answers as `measure` wants it, by a clock of the tests."""

    def __init__(self, clock: Clock, late: int = 0) -> None:
        """late: every so many trips one takes five times as long."""
        super().__init__("peer")
        self._clock, self._answers, self._trips, self._late = clock, list[tuple[Kind, bytes, float]](), 0, late

    def _write(self, header: bytes, payload: memoryview, timeout_s: float) -> None:
        kind = parse_header(header, self._sent - 1).kind
        if kind is Kind.PING:
            self._trips += 1
            is_late = self._late and self._trips % self._late == 0
            self._answers.append((Kind.PONG, bytes(payload), ROUND_TRIP_S * (5 if is_late else 1)))
        elif kind is Kind.CONTROL:
            request, blocks = bytes(payload[:1]), int.from_bytes(payload[1:], "little")
            if request == b"s":
                self._answers.append((Kind.CONTROL, b"\0", ROUND_TRIP_S))
            else:
                for i in range(blocks):
                    n = 256 << 10
                    self._answers.append((Kind.DATA, bytes(n), n / RECEIVE + (0 if i else ROUND_TRIP_S)))
        else:
            self._clock.now += len(payload) / SEND

    def _read(self, timeout_s: float, max_bytes: int) -> Frame:
        kind, payload, seconds = self._answers.pop(0)
        self._clock.now += seconds
        return Frame(kind, memoryview(payload))

    def _end(self) -> None:
        pass


def test_a_link_is_what_its_trips_and_bytes_say(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock().install(monkeypatch, measuring, link_module)
    wire = Wire(clock)
    result = measure(wire, 0.4)
    trips = (result.round_trip_best_s, result.round_trip_median_s, result.round_trip_p99_s)
    assert trips == pytest.approx((ROUND_TRIP_S,) * 3)
    assert result.latency_s == pytest.approx(ROUND_TRIP_S / 2)
    assert result.send_bytes_per_s == pytest.approx(SEND)
    assert result.receive_bytes_per_s == pytest.approx(RECEIVE)
    assert clock.now < 1.0  # about as long as was asked


def test_late_messages_are_the_99th_percentile(monkeypatch: pytest.MonkeyPatch) -> None:
    result = measure(Wire(Clock().install(monkeypatch, measuring, link_module), late=40), 1.0)
    assert result.round_trip_median_s == pytest.approx(ROUND_TRIP_S)
    assert result.round_trip_p99_s == pytest.approx(5 * ROUND_TRIP_S)


def test_a_link_counts_what_it_sent_received_and_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock().install(monkeypatch, link_module)
    wire = Wire(clock)
    wire.send(bytes(5), Kind.PING)
    wire.receive()
    wire.send(bytes(100))
    wire._answers.append((Kind.DATA, bytes(30), 0.5))
    wire.receive_into(bytearray(30))
    assert (wire.sent_bytes, wire.received_bytes) == (105, 35)
    assert wire.receive_s == pytest.approx(ROUND_TRIP_S + 0.5)


MEASURED = pb.Measured(
    kind="tcp",
    round_trip_best_s=0.002,
    round_trip_median_s=0.004,
    round_trip_p99_s=0.010,
    send_bytes_per_s=125e6,
    receive_bytes_per_s=12.5e6,
)


class Session:
    """Says what was measured, and remembers what it was told."""

    def __init__(self, rank: int, device: str, *events: Any) -> None:
        self.rank, self.device, self.events = rank, device, list(events)
        self.reported: list[pb.Command] = []

    def tell(self, command: pb.Command) -> None:
        self.reported.append(command)

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_: object) -> None:
        pass


def test_a_plan_has_links_in_their_directions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """8 KiB there and back took no more than their latency and bytes; of two rounds the best of each counts."""
    worse = pb.Measured(round_trip_median_s=0.006, send_bytes_per_s=100e6, receive_bytes_per_s=12.4e6)
    rounds = iter((worse, MEASURED, worse, worse))
    monkeypatch.setattr(session, "answers", lambda _: iter([pb.Event(measured=next(rounds))]))
    monkeypatch.setattr(links, "Remembered", lambda name: Remembered(name, tmp_path))
    a, b = Session(0, "desk"), Session(1, "pi")
    state = pb.LinkState(rank=1, kind="tcp", round_trip_s=0.004)
    sessions: Any = [a, b]

    def between(state: pb.LinkState = state) -> list[tuple[str, str, float, float]]:
        result = links.measure_links(sessions, ["local", "pi:1"], [[state], []], pause=lambda _: None).between
        return [(*ends, way.latency_s, way.bytes_per_s) for ends, way in result.items()]

    expected = [("local", "pi:1", 0.002, 125e6), ("pi:1", "local", 0.002, 12.5e6)]
    assert between() == expected
    assert {item.measure.rank for item in a.reported} == {1}
    assert {item.answer.rank for item in b.reported} == {0}
    assert between() == expected  # remembered, the same way round: nobody is asked again
    assert len(a.reported) == 2
    over_grpc = pb.LinkState(rank=1, kind="grpc", round_trip_s=0.004)
    assert between(over_grpc) == [("local", "pi:1", 0.003, 100e6), ("pi:1", "local", 0.003, 12.4e6)]


def test_links_measured_before_an_interruption_are_not_measured_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(session, "answers", lambda _: iter([pb.Event(measured=MEASURED)]))
    monkeypatch.setattr(links, "Remembered", lambda name: Remembered(name, tmp_path))
    sessions: Any = [Session(rank, name) for rank, name in enumerate(("desk", "pi", "nas"))]
    to = [pb.LinkState(rank=rank, kind="tcp", round_trip_s=0.004) for rank in range(3)]

    def measure(on_pair: Any) -> list[int]:
        """Return the ranks that the first session measured links to."""
        before = len(sessions[0].reported)
        with suppress(Interrupted):
            links.measure_links(
                sessions, ["local", "pi:1", "nas:1"], [to[1:], to[2:], []], on_pair, pause=lambda _: None
            )
        return [item.measure.rank for item in sessions[0].reported[before:]]

    def interrupted() -> None:
        raise Interrupted("an answer began")

    assert measure(interrupted) == [1, 2, 1]  # two rounds, the second one up to the first link
    assert measure(lambda: None) == [2, 2]
    assert measure(lambda: None) == []


def test_a_row_that_takes_longer_than_a_message_is_the_latency(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "answers", lambda sessions: iter(pb.Event(measured=MEASURED) for _ in sessions))
    sessions: Any = (Session(0, "desk"), Session(1, "pi"))
    bytes_s = 8192 / 12.5e6
    for trip_s, latency_s in ((0.007, 0.0035 - bytes_s), (0.001, 0.002), (1.0, 0.006)):
        there, back = links._measured(*sessions, trip_s)  # type: ignore[call-arg]
        assert (there.latency_s, back.latency_s) == pytest.approx((latency_s, latency_s))


def test_edge_link_says_one_way_and_bits(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    summed = [pb.Event(allreduced=pb.Allreduced(median_s=seconds)) for seconds in (0.0004, 0.0003)]
    first, second = Session(0, "desk"), Session(1, "pi")
    monkeypatch.setattr(diagnose, "_first", lambda *_: first)
    monkeypatch.setattr(diagnose, "RemoteSession", lambda *_: second)
    monkeypatch.setattr(session, "answers", lambda _: iter([pb.Event(measured=MEASURED), pb.Event()]))
    monkeypatch.setattr(diagnose, "answers", lambda _: iter(summed))
    monkeypatch.setattr(diagnose, "connect_all", lambda *_: [[SimpleNamespace(why="tcp it is")], []])
    pi: Any = SimpleNamespace(name="pi", label="pi", host="10.0.0.2", port=7070, secure=False)
    report: LinkReport = diagnose.measure_link(None, pi)
    said = report.to_json()
    known = {
        "a": "desk",
        "b": "pi",
        "latency_best_s": 0.001,
        "latency_median_s": 0.002,
        "latency_p99_s": 0.005,
        "bandwidth_ab_gbps": 1.0,
        "bandwidth_ba_gbps": 0.1,
        "allreduce_8k_s": 0.0004,  # of the slower end
    }
    assert {name: said[name] for name in known} == pytest.approx(known)
    assert report.choices == {n: choose(n, n, 2, 0.002, 12.5e6) for n in diagnose.PAYLOADS}
    link_command.show(report)
    shown = capsys.readouterr().out
    for words in ("2.00 ms median, 5.00 ms p99, 1.00 ms best", "1.00 Gbit/s there, 100 Mbit/s back", "400 us measured"):
        assert words in shown


def test_a_deadline_is_told_by_its_name() -> None:
    """Whoever must change one finds it: a peer that takes nothing, and one that sends nothing."""
    a, _ = memory_link.pair(deadlines=Deadlines(5.0, 6.0, 0.01))
    with pytest.raises(LinkTimeout, match=r"b took no more data for 0.01 s \(send_timeout_s\)"):
        all(a.send(b"") is None for _ in range(1000))  # more than such a link has room for
    a, _ = memory_link.pair(deadlines=Deadlines(5.0, 0.01, 6.0))
    with pytest.raises(LinkTimeout, match=r"b sent nothing for 0.01 s \(step_timeout_s\)"):
        a.receive()


def test_the_mesh_takes_the_latency_and_its_bytes() -> None:
    """Two ranks, 100 Mbit/s, 1 ms one way: the mesh takes that and 80 us a kilobyte."""
    result = choose(12_500, 12_500, 2, 0.001, 12.5e6)
    assert result.seconds["mesh"] == pytest.approx(0.002)


def test_half_a_round_trip_is_the_latency() -> None:
    assert LinkFigures(0.004, 0.010, 0.002, 1.0, 1.0).latency_s == 0.002
