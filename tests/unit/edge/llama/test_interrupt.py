"""Test interruption: a running decode ends at its next node, and Ctrl-C reaches it through a thread."""

import os
import signal
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from edge.errors import Interrupted
from edge.llama.hooks import Hook
from edge.llama.interrupt import PassStopped, StopFlag, interrupt_stops
from edge.llm.engine import Engine
from tests.conftest import OPTIONS, Synthetic

TOKENS = [5, 300, 17, 401]


def test_a_decode_that_is_stopped_ends_before_its_last_layer_and_the_next_one_is_right(synthetic: Synthetic) -> None:
    seen: list[str] = []
    stopping = True

    def run(node: object) -> None:
        seen.append(node.name)  # type: ignore[attr-defined]
        if stopping:
            engine.stop()

    path = synthetic("llama", "q8_0")
    with Engine(path, OPTIONS) as engine:
        expected = engine.decode(TOKENS, 0).copy()
    with Engine(path, OPTIONS, hooks=[Hook(lambda node: node.name.startswith("l_out-"), run)]) as engine:
        with pytest.raises(Interrupted):
            engine.decode(TOKENS, 0)
        assert seen == ["l_out-0"]
        stopping = False
        engine.resume()
        engine.kv_clear()
        np.testing.assert_array_equal(engine.decode(TOKENS, 0), expected)


class Recorder:
    """Something to stop that remembers who stopped it."""

    def __init__(self) -> None:
        self.stopped = threading.Event()
        self.by = ""

    def stop(self) -> None:
        self.by = threading.current_thread().name
        self.stopped.set()

    def resume(self) -> None:
        self.stopped.clear()


def interrupt_and_wait() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    threading.Event().wait(10)


def test_ctrl_c_stops_from_another_thread_and_a_second_one_interrupts() -> None:
    recorder = Recorder()
    with interrupt_stops(recorder):
        os.kill(os.getpid(), signal.SIGINT)
        assert recorder.stopped.wait(10)
        with pytest.raises(KeyboardInterrupt):
            interrupt_and_wait()
    assert recorder.by == "interrupt"
    assert not recorder.stopped.is_set()  # it may go on
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.set_wakeup_fd(-1) == -1
    assert "interrupt" not in [thread.name for thread in threading.enumerate()]


def test_a_stopped_engine_stays_stopped_until_it_is_resumed(llama: Engine) -> None:
    llama.stop()
    for _ in range(2):
        with pytest.raises(Interrupted):
            llama.decode(TOKENS, 0)
    llama.resume()
    llama.decode(TOKENS, 0)


def test_other_signals_and_other_threads_are_left_alone() -> None:
    recorder = Recorder()
    previous = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        with interrupt_stops(recorder):
            os.kill(os.getpid(), signal.SIGUSR1)
        assert recorder.by == ""
    finally:
        signal.signal(signal.SIGUSR1, previous)
    elsewhere = threading.Thread(target=lambda: interrupt_stops(recorder).__enter__())
    elsewhere.start()
    elsewhere.join(10)
    assert not elsewhere.is_alive()


def test_ctrl_c_in_a_callback_of_a_load_is_not_lost(synthetic: Synthetic) -> None:
    def interrupt(fraction: float) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        Engine(synthetic("llama"), OPTIONS, progress=interrupt)
    Engine(synthetic("llama"), OPTIONS).close()


def raise_exit(number: int, _: object) -> None:
    raise SystemExit(128 + number)


@pytest.fixture
def exits_at_sigterm() -> Iterator[None]:
    previous = signal.signal(signal.SIGTERM, raise_exit)
    yield
    assert signal.getsignal(signal.SIGTERM) is raise_exit
    signal.signal(signal.SIGTERM, previous)


@pytest.mark.usefixtures("exits_at_sigterm")
def test_sigterm_in_a_callback_of_a_graph_ends_it_at_the_next_node_and_is_not_lost(synthetic: Synthetic) -> None:
    seen: list[str] = []

    def run(node: object) -> None:
        seen.append(node.name)  # type: ignore[attr-defined]
        os.kill(os.getpid(), signal.SIGTERM)

    def decode_within(engine: Engine) -> None:
        with interrupt_stops(engine):
            with pytest.raises(Interrupted):
                engine.decode(TOKENS, 0)
            raise ValueError("what is in flight gives way")

    hooks = [Hook(lambda node: node.name.startswith("l_out-"), run)]
    with Engine(synthetic("llama"), OPTIONS, hooks=hooks) as engine, pytest.raises(SystemExit, match="143"):
        decode_within(engine)
    assert seen == ["l_out-0"]


@pytest.mark.usefixtures("exits_at_sigterm")
def test_sigterm_in_a_callback_of_a_load_is_not_lost(synthetic: Synthetic) -> None:
    with pytest.raises(SystemExit, match="143"):
        Engine(synthetic("llama"), OPTIONS, progress=lambda _: os.kill(os.getpid(), signal.SIGTERM))
    Engine(synthetic("llama"), OPTIONS).close()


class Flag:
    """A flag as native code has it; something happens once, when it is first lowered."""

    def __init__(self) -> None:
        self._value, self.lowered = b"", lambda: None

    @property
    def value(self) -> bytes:
        return self._value

    @value.setter
    def value(self, value: bytes) -> None:
        self._value = value
        if not value:
            lowered, self.lowered = self.lowered, lambda: None
            lowered()


@pytest.mark.parametrize("stopped", ["never", "before", "meanwhile"])
def test_a_pass_that_is_ended_runs_again_unless_all_is_stopped(stopped: str) -> None:
    flag = Flag()
    stopping = StopFlag(flag)
    stopping.end_pass()
    if stopped == "before":
        stopping.stop()
    elif stopped == "meanwhile":
        flag.lowered = stopping.stop
    assert isinstance(stopping.error(), PassStopped) == (stopped == "never")
    assert flag.value == (b"" if stopped == "never" else b"x")
    stopping.resume()
    assert flag.value == b""
