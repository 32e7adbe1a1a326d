"""Test `edge chat` on several devices after the loss of one and after Ctrl-C: its output, and no leftovers."""

import json
import re
import signal
import threading
from pathlib import Path

import psutil
import pytest

from edge.parallel.engine import DistributedEngine
from tests.support.commands import ASKED, Run, Two, ask, assert_refused, own_folder, run_command, shared_two, workers  # noqa: F401 (fixtures)
from tests.support.helpers import ENDLESS, TIMEOUT_S, Terminal, start_edge, until
from tests.support.workers import Worker, gone, worker
from transport.errors import LinkClosed


@pytest.mark.parametrize("what", ["engine", "daemon"])
def test_a_worker_that_dies_while_it_loads(run: Run, tmp_path: Path, what: str) -> None:
    with worker(tmp_path, "--name", "lost") as first:
        killed: list[int] = []

        def kill() -> None:
            child = stopped(first)
            killed.append(child.pid)
            if what == "daemon":
                first.process.kill()
                child.send_signal(signal.SIGCONT)
            else:
                child.kill()

        killer = threading.Thread(target=kill)
        killer.start()
        answer = run("chat", *ASKED, "--workers", first.address, "--parallel", "tensor", "--shares", "1,1")
        killer.join()
        assert_refused(answer, 7, "lost", *(["killed by SIGKILL"] if what == "engine" else []))
        until(lambda: gone(killed[0]), "the end of the engine process")


def test_ctrl_c_while_a_worker_loads(two: Two) -> None:
    how = ("--workers", two[0].address, "--parallel", "tensor", "--shares", "1,1")
    with start_edge("chat", *ASKED, *how) as chat:
        child = stopped(two[0])
        chat.send_signal(signal.SIGINT)
        out, error = chat.communicate(timeout=TIMEOUT_S)
        assert (chat.returncode, out) == (130, b"")
        assert all(line.startswith(b"Loading ") for line in error.splitlines())  # progress, after some seconds
        until(lambda: gone(child.pid), "the end of the session")


def stopped(item: Worker) -> psutil.Process:
    """The next engine process of a worker, stopped before it is ready."""
    until(lambda: bool(item.children()), "an engine process")
    child = item.children()[0]
    child.send_signal(signal.SIGSTOP)
    return child


def test_a_conversation_on_several_devices(two: Two, tmp_path: Path) -> None:
    grammar = tmp_path / "endless"
    grammar.write_text(ENDLESS)
    how = ("--workers", workers(*two), "--parallel", "tensor", "--shares", "2,1,1")
    terminal = Terminal(*how, "--grammar", grammar, "--max-tokens", "6000", "--context", "8192", state=tmp_path)
    try:
        plan = re.escape("this device heads 0-3, ff 0-383; one heads 4-5, ff 384-575; two heads 6-7, ff 576-767")
        terminal.sees(rf"\x1b\[2m{plan} \(tensor, with shares as given\)\x1b")
        terminal.ready()
        terminal.enter("one")
        terminal.sees("[a-z]{10}")
        terminal.type("\x03")
        terminal.sees("stopped  .* tokens/s")
        terminal.ready()
        terminal.enter("/stats")
        shown = terminal.sees("Stalls are waits for other ranks")
        for row in ("0 .* this device .* decode", "1 .* one .* prefill", "2 .* two .* decode"):
            assert re.search(rf"│ {row} ", shown), shown
        terminal.ready()
        terminal.enter("go on")
        terminal.sees("[a-z]{10}")
        two[1].children()[0].kill()
        shown = terminal.sees("two was lost .the engine process was killed by SIGKILL.*going on with")
        assert "Traceback" not in shown
        terminal.sees("[a-z]{10}")
        terminal.type("\x03")
        terminal.sees("stopped  .* tokens/s")
        terminal.ready()
        terminal.enter(f"/save {tmp_path / 'saved'}")
        terminal.sees("saved 4 messages")
        terminal.ready()
        terminal.enter("/exit")
        assert terminal.ends() == 0
        messages = json.loads((tmp_path / "saved").read_text())["messages"]
        assert [message["content"] for message in messages[::2]] == ["one", "go on"]
    finally:
        terminal.close()
    until(lambda: not any(item.children() for item in two), "the end of all sessions")


def test_a_rank_that_is_lost_after_the_answer(run: Run, two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    def times(_: DistributedEngine, *, clear: bool = False, last: int = 0) -> None:
        raise LinkClosed("rank 1 (one) went away")

    monkeypatch.setattr(DistributedEngine, "times", times)
    how = ("--workers", two[0].address, "--parallel", "pipeline", "--shares", "1,1")
    code, out, error = run("chat", *ASKED, *how)
    assert (code, error.splitlines()[-1]) == (7, "edge chat: rank 1 (one) went away")  # slow loads are told before
    said = json.loads(out)
    assert said["text"]
    assert [(rank["rank"], rank["decode"], rank["prefill"]) for rank in said["ranks"]] == [
        (0, None, None),
        (1, None, None),
    ]
