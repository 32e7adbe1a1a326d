"""Links that change between answers: on real ones, between this process and ranks on a real worker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from edge.cluster.deployment import Exchange
from edge.demo import MODEL_PATH
from edge.llm.chat import Chat
from edge.llm.engine import Engine
from edge.llm.interface import TextEngine
from edge.llm.sampler import SamplingParams
from edge.net import dialling
from edge.net.dialling import OTHER, USUAL, Dialled, Dialler
from edge.net.peers import Listener, Peer
from edge.net.prefer import ROUNDS, Preference
from edge.net.relink import Order, Relink, agree
from edge.parallel import link_watch
from tests.support import memory_link
from tests.support.deployments import OPTIONS, deployed, stages, tensor
from tests.support.workers import SECRET, Worker
from transport.collective import Group
from transport.errors import LinkClosed, ProtocolError, TransportError
from transport.frame import Kind
from transport.link import Deadlines
from transport.measure import LinkFigures

QUICK = Deadlines(connect_timeout_s=1.0, step_timeout_s=5.0, send_timeout_s=5.0)


@pytest.fixture
def noise(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Results of comparisons in this process: True for gRPC. The last one holds from then on."""
    verdicts = [True]

    def prefer(*_: Any) -> Preference:
        return Preference(verdicts.pop(0) if len(verdicts) > 1 else verdicts[0], ROUNDS, 940e-6, 700e-6)

    monkeypatch.setattr(dialling, "prefer", prefer)
    return verdicts


def answers(engine: TextEngine, n: int = 1) -> list[str]:
    chat = Chat(engine)
    greedy = SamplingParams(temperature=0)
    said = []
    for question in ["How many minutes are in 3 hours?", "What is 12 + 30?", "What is 27 plus 38?"][:n]:
        said.append("".join(piece.text for piece in chat.ask(question, greedy, max_tokens=24)))
    return said


def test_a_link_that_noise_chose_is_left_after_one_answer(
    one_worker: Worker, noise: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_watch, "_FITS", 0.0)  # as if tokens took far longer than was measured
    with deployed(one_worker, MODEL_PATH, tensor(1, 1)) as deployment, Engine(MODEL_PATH, OPTIONS) as single:
        engine = deployment.engine
        expected = answers(single, 3)
        assert engine.links == {1: OTHER}
        assert [state.usual for state in engine.rank_links.states] == [False]
        chat = Chat(engine)
        kinds = []
        for question, text in zip(("How many minutes are in 3 hours?", "What is 12 + 30?"), expected, strict=False):
            pieces = chat.ask(question, SamplingParams(temperature=0), max_tokens=24)
            assert "".join(piece.text for piece in pieces) == text
            kinds.append(engine.links[1])
            engine.rank_links.watch._seen_s[False] = 1e9  # whatever this machine did during the answer
        assert kinds == [OTHER, USUAL]
        [change] = engine.rank_links.watch.changes
        assert change.startswith("after answer 1: ")
        assert change.endswith("ranks 0 and 1 use tcp, no longer grpc (tcp, the usual way)")
        assert [state.kind for state in engine.rank_links.states] == [USUAL]


def test_all_ranks_change_their_links_in_step(one_worker: Worker, noise: list[bool]) -> None:
    """Three ranks, two of them in one stage: each pair has a link, and what they compute stays the same."""
    with deployed(one_worker, MODEL_PATH, stages(1, 2)) as deployment, Engine(MODEL_PATH, OPTIONS) as single:
        engine = deployment.engine
        [expected] = answers(single)
        assert engine.links == {1: OTHER, 2: OTHER}
        for order, kind in ((Order.USUAL, USUAL), (Order.COMPARED, OTHER), (Order.COMPARE, OTHER)):
            reports = engine.guarded(lambda: engine.rank_links.reports(order))  # noqa: B023
            assert engine.links == {1: kind, 2: kind}
            assert [[link.ranks for link in report.links] for report in reports] == [[(0, 1), (0, 2)], [(1, 2)], []]
            assert {link.kind for link in reports[0].links} == {kind}
            assert answers(engine) == [expected]
            engine.kv_clear()
        noise[:] = [False]
        engine.guarded(lambda: engine.rank_links.reports(Order.COMPARE))
        assert engine.links == {1: USUAL, 2: USUAL}
        assert answers(engine) == [expected]


def test_what_cannot_be_dialled_changes_nothing_and_is_not_tried_again(
    one_worker: Worker, noise: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    with deployed(one_worker, MODEL_PATH, tensor(1, 1)) as deployment:
        engine = deployment.engine
        [before] = answers(engine)
        tried = []

        def connect(self: Dialler, kind: str, peer: Peer) -> Any:
            tried.append(kind)
            raise LinkClosed("nothing listens there")

        monkeypatch.setattr(Dialler, "connect", connect)
        for _ in range(2):
            [report, _] = engine.guarded(lambda: engine.rank_links.reports(Order.USUAL))
            assert engine.links == {1: OTHER}
            assert report.links[0].why.endswith("; tcp failed: nothing listens there")
            assert report.links[0].usual  # the only one
        assert tried == [USUAL]
        engine.kv_clear()
        assert answers(engine) == [before]


def test_a_comparison_that_failed_once_may_be_made_again(
    one: Worker, noise: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    noise[:] = [False]
    with deployed(one, MODEL_PATH, tensor(1, 1)) as deployment:
        engine = deployment.engine
        answers(engine)

        def connect(self: Dialler, kind: str, peer: Peer) -> Any:
            raise LinkClosed("nothing listens there")

        with monkeypatch.context() as patch:
            patch.setattr(Dialler, "connect", connect)
            [report, _] = engine.guarded(lambda: engine.rank_links.reports(Order.COMPARE))
        assert report.links[0].usual
        assert report.links[0].why.endswith("; grpc failed: nothing listens there")
        noise[:] = [True]
        engine.guarded(lambda: engine.rank_links.reports(Order.COMPARE))
        assert engine.links == {1: OTHER}


@pytest.mark.parametrize("transport", ["tcp", "grpc"])
def test_a_way_that_was_asked_for_stays(one_worker: Worker, transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_watch, "_FITS", 0.0)
    with deployed(one_worker, MODEL_PATH, tensor(1, 1), exchange=Exchange(transport)) as deployment:
        answers(deployment.engine, 3)
        assert deployment.engine.links == {1: transport}
        assert not deployment.engine.rank_links.watch.changes


def test_a_listener_takes_whom_it_expects(tmp_path: Path) -> None:
    """A rank that computes leaves strangers in the kernel's queue."""
    listener = Listener("127.0.0.1", tmp_path / "door", 2, SECRET, QUICK, None, 0)
    peer = Peer(2, "pi", "127.0.0.1", 0, listener.tcp_port, "")
    dial = [Dialler(rank, SECRET, QUICK, None, 0, USUAL).dial for rank in (0, 1)]
    links = [item(peer).link for item in dial]
    try:
        links += listener.wait_for({0: "a", 1: "b"}, 5).values()
        with pytest.raises(TransportError):  # no answer, or none that it would like
            dial[0](peer)
        listener.expect(1)
        links.append(dial[1](peer).link)
        with pytest.raises(TransportError, match="rank 0 has a link already"):
            dial[0](peer)
        links += listener.wait_for({1: "b"}, 5).values()
        assert links[-1].peer == "rank 1"
    finally:
        listener.close()
        for link in links:
            link.close()


def figures(round_trip_s: float, send: float, receive: float) -> LinkFigures:
    return LinkFigures(round_trip_s, round_trip_s, round_trip_s, send, receive)


def test_a_group_plans_for_its_worst_link() -> None:
    agreed: list[tuple[float, float]] = []

    class Agrees:
        def agree(self, latency_s: float, bandwidth: float) -> None:
            agreed.append((latency_s, bandwidth))

    link, _ = memory_link.pair()
    dialled = [
        Dialled(link, 0.0, 0.0, total, "", (USUAL,)) for total in (figures(1e-3, 5e6, 9e6), figures(4e-3, 8e6, 7e6))
    ]
    agree(Agrees(), dict(enumerate(dialled, 1)))  # type: ignore[arg-type]
    assert agreed == [(2e-3, 5e6)]


def test_a_link_that_loses_a_comparison_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    here, _ = memory_link.pair()
    fresh, _ = memory_link.pair()
    dialler = Dialler(0, SECRET, QUICK, None, 0, "auto")
    now = Dialled(here, 0.0, 0.0, figures(1e-3, 1e6, 1e6), "", (USUAL, OTHER))
    peer = Peer(1, "pi", "127.0.0.1", 0, 0, "")
    monkeypatch.setattr(Dialler, "connect", lambda *_: fresh)
    monkeypatch.setattr(Dialler, "compare", lambda *_: (here.kind, "it is faster"))
    monkeypatch.setattr(Dialler, "figures", lambda *_: now.figures)
    stays = Relink(dialler, [peer], {}, {1: now}, None)._dialled(peer, now, here, OTHER, Order.COMPARE)
    assert stays.link is here
    assert fresh.broken is not None
    assert here.broken is None


class Door:
    """A listener that nobody dials: it says what it was told."""

    def __init__(self) -> None:
        self.reported: list[str] = []

    def expect(self, rank: int) -> None:
        self.reported.append(f"expect {rank}")

    def pause(self) -> None:
        self.reported.append("pause")


@pytest.mark.parametrize("word", [b"keep", b"nonsense"])
def test_a_door_is_shut_again_whatever_becomes_of_a_change(word: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    lower, higher = memory_link.pair()
    monkeypatch.setattr("edge.net.relink.answer", lambda link: None)  # nothing is measured
    door: Any = Door()
    relink = Relink(Dialler(1, SECRET, QUICK, None, 0, "auto"), [], {0: "desk"}, {}, door)
    for said in (b"other", word):
        lower.send(said, Kind.CONTROL)
    group = Group(1, {0: higher})
    if word == b"keep":
        relink._serve(group, 0)
    else:
        with pytest.raises(ProtocolError, match="was to keep or change its link"):
            relink._serve(group, 0)
    assert door.reported == ["expect 0", "pause"]
