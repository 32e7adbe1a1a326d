"""Stopping: a running decode ends at its next node, and Ctrl-C reaches it through a thread."""

import os
import signal
import threading

import numpy as np
import pytest

from edge.engine import Engine
from edge.errors import Interrupted
from edge.hooks import Hook
from edge.interrupt import interrupt_stops
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
        engine.kv_clear()
        np.testing.assert_array_equal(engine.decode(TOKENS, 0), expected)


def test_ctrl_c_calls_stop_from_another_thread() -> None:
    called = threading.Event()
    by: list[str] = []

    def stop() -> None:
        by.append(threading.current_thread().name)
        called.set()

    before = signal.set_wakeup_fd(-1)
    try:
        with pytest.raises(KeyboardInterrupt), interrupt_stops(stop):
            os.kill(os.getpid(), signal.SIGINT)
            called.wait(10)
        assert called.is_set()
        assert by == ["interrupt"]
        assert signal.set_wakeup_fd(-1) == -1  # as it was
        assert "interrupt" not in [thread.name for thread in threading.enumerate()]
    finally:
        signal.set_wakeup_fd(before)


def test_other_signals_and_other_threads_are_left_alone() -> None:
    called: list[int] = []
    previous = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        with interrupt_stops(lambda: called.append(1)):
            os.kill(os.getpid(), signal.SIGUSR1)
        assert called == []
    finally:
        signal.signal(signal.SIGUSR1, previous)
    elsewhere = threading.Thread(target=lambda: interrupt_stops(lambda: None).__enter__())
    elsewhere.start()
    elsewhere.join(10)
    assert not elsewhere.is_alive()
