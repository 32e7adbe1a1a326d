"""Test a device that freezes during a request: this is reported within seconds, as is its return."""

import os
import re
import signal
import threading
from itertools import product
from pathlib import Path
from typing import Any, cast

import pytest

from edge.cluster import liveness
from edge.cluster.liveness import LivenessMonitor
from edge.cluster.session import EngineSession
from edge.net.peers import HEARTBEAT_S
from tests.support.helpers import ENDLESS, stand_still, start_edge, until
from tests.support.workers import SECRET, sessions, worker
from transport import edge_pb2 as pb
from transport.errors import LinkClosed

HANG_S = 120.0  # for a command on a busy machine


class Quiet:
    """A session that was heard so long ago."""

    silent_s: float | None = 0.0

    def __init__(self, device: str) -> None:
        self.device, self.leaving = device, False


def test_what_is_said_and_when(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    busy, pi, nas = [True], Quiet("pi"), Quiet("nas")
    first = LivenessMonitor(lambda: cast(Any, [pi, nas]), said.append, lambda: busy[0])
    first.close()  # this test looks
    silence_s = (0.9, 2.4, 2.6, 3.1, 5.1, 5.3, 11.0, 11.5, 0.2, 0.7)
    for pi.silent_s in silence_s:
        first.look()
    assert said == [
        *(f"waiting for pi: no answer for {seconds} s" for seconds in (3, 5, 11)),
        "pi answers again",
    ]
    said.clear()
    busy[0], nas.silent_s = False, 40.0
    first.look()
    assert said == []  # at the prompt nobody waits
    busy[0] = True
    first.look()
    assert said == ["waiting for nas: no answer for 40 s"]


def test_when_it_is_given_up() -> None:
    """Not by the looks after this process has stood still itself: what was said meanwhile is heard a moment later."""
    pi, nas = Quiet("pi"), Quiet("nas")
    lost: list[Any] = []
    first = LivenessMonitor(lambda: cast(Any, [pi, nas]), lambda line: None, lost=lost.append)
    first.close()  # this test looks
    checks = round(liveness.LOST_S / (HEARTBEAT_S / 2))
    for pi.silent_s in (60.0, 60.1, 0.0, *(0.1 * i for i in range(1, checks))):
        first.look()
    assert lost == []
    pi.silent_s = liveness.LOST_S
    first.look()
    assert lost == [pi]
    idle = LivenessMonitor(lambda: cast(Any, [nas]), lambda line: None, lambda: False, lost.append)
    idle.close()
    for nas.silent_s in range(1, 3 * checks):
        idle.look()
    assert lost == [pi]  # nobody waits for nas


def test_a_device_that_is_lost_does_not_answer_again() -> None:
    """Not when its session has ended, nor when it is given up and heard later."""
    said: list[str] = []
    pi, lost, checks = Quiet("pi"), [], round(liveness.LOST_S / (HEARTBEAT_S / 2))
    monitor = LivenessMonitor(lambda: cast(Any, [pi]), said.append)
    monitor.close()  # this test looks
    for pi.silent_s in (3.0, None, 0.2):
        monitor.look()
    assert said == ["waiting for pi: no answer for 3 s"]
    giving_up = LivenessMonitor(lambda: cast(Any, [pi]), said.append, lost=lost.append)
    giving_up.close()
    for pi.silent_s in (*(3.0 + 0.1 * i for i in range(checks)), 0.2):
        giving_up.look()
    assert lost == [pi]
    assert said == ["waiting for pi: no answer for 3 s"] * 2


def test_a_device_that_stays_silent_is_given_up_once_in_a_while() -> None:
    """Not at every look: what follows takes longer than that."""
    pi, lost, checks = Quiet("pi"), [], round(liveness.LOST_S / (HEARTBEAT_S / 2))
    first = LivenessMonitor(lambda: cast(Any, [pi]), lambda line: None, lost=lost.append)
    first.close()  # this test looks
    for i in range(1, 3 * checks + 1):
        pi.silent_s = float(i)
        first.look()
    assert lost == [pi] * 3


def plain_session() -> EngineSession:
    """A session without a process."""
    return cast(Any, type("Plain", (EngineSession,), {"close": lambda _: None, "_send": lambda *_: None}))("pi", 1)


@pytest.mark.parametrize("announcements", list(product([False, True], repeat=3)))
def test_device_that_announced_its_leaving_still_leaves_after_a_heartbeat(announcements: tuple[bool, ...]) -> None:
    session = plain_session()
    for i, leaving in enumerate(announcements, 1):
        session._hear(pb.Event(alive=pb.Alive(leaving=leaving)))
        assert session.leaving == any(announcements[:i])


def test_a_session_that_is_over_is_not_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [100.0]
    monkeypatch.setattr("edge.cluster.session.time.monotonic", lambda: now_s[0])
    session = plain_session()
    assert session.silent_s is None  # it has yet to start
    session._hear(pb.Event(opened=pb.Opened()))
    now_s[0] += 3
    assert session.silent_s == 3.0
    session._hear(pb.Event(alive=pb.Alive()))
    assert session.silent_s == 0.0
    assert session.answer().WhichOneof("event") == "opened"  # and that it lives answers nothing
    session._hear(LinkClosed("pi went away"))
    now_s[0] += 9
    assert session.silent_s is None
    with pytest.raises(LinkClosed):
        session.answer()


def test_a_process_that_is_stopped_is_heard_no_more_and_then_again(tmp_path: Path) -> None:
    with (
        worker(tmp_path, "--threads", "1") as first,
        first.remote() as remote,
        sessions([remote], 1, secret=SECRET) as current,
    ):
        (session,) = current
        stand_still(session.pid)
        until(lambda: session.silent_s > liveness.SILENT_S, "silence")
        os.kill(session.pid, signal.SIGCONT)
        until(lambda: 0 < session.silent_s < liveness.SILENT_S, "a word")
        session.unload()


@pytest.mark.parametrize("command", ["chat", "bench"])
def test_a_person_is_told(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CACHE", "CONFIG", "STATE"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name))
    grammar = tmp_path / "endless.gbnf"
    grammar.write_text(ENDLESS)
    options = {
        "chat": ("-p", "Hello", "--grammar", grammar, "--context", "4096"),
        "bench": ("--prompt-tokens", "8", "--gen-tokens", "200", "--repeats", "1000"),
    }[command]
    with worker(tmp_path / "w", "--name", "pi", "--threads", "1") as first:
        how = ("--threads", "1", "--parallel", "pipeline", "--shares", "1,1")
        process = start_edge(command, *options, "--workers", first.address, *how)
        hang = threading.Timer(HANG_S, process.kill)  # what says nothing of it goes on for ever
        try:
            assert process.stderr is not None
            until(lambda: len(first.children()) == 1, "the rank's process")
            if command == "chat":
                assert process.stdout is not None
                assert process.stdout.read(1)  # it answers
            else:
                until(lambda: first.children()[0].cpu_times().user > 0.5, "a rank that computes")
            first.children()[0].suspend()
            lines = iter(process.stderr.readline, b"")
            said = {
                "chat": rb"edge[ a-z]*: pi was lost \(stood still for 1.5 s\): going on with this device.*\n",
                "bench": rb"edge bench: pi stood still for 1.5 s\n",  # figures of two plans would mean nothing
            }[command]
            hang.start()
            assert any(re.fullmatch(said, line) for line in lines)
        finally:
            hang.cancel()
            process.kill()
            process.communicate()
        until(lambda: not first.children(), "the end of the rank")
