"""Test that `edge chat` and `edge.deploy` start a model in the same way, and act alike after a loss, a return, and if a
device is slow.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import edge
from apps.commands import chat
from apps.show.answer import LoadedChat
from apps.show.progress import ShownSteps
from edge.llm.engine import Engine
from edge.llm.interface import TextEngine
from edge.models.demo import MODEL_PATH
from edge.profiling.straggler_watch import LEAST_STEPS
from tests.support.commands import main
from tests.support.deployments import OPTIONS, Heard, greedy_answers, own_folders
from tests.support.helpers import until
from tests.support.network import Network
from tests.support.workers import Worker

pytestmark = pytest.mark.usefixtures("measured_briefly")

ONE, TWO = 1e-4, 1e-2  # seconds of a layer: this device takes far longer, and shares none
SLOWED = 500.0  # times: then the second worker is the faster one
QUESTIONS = ("My name is Ada.", "What is my name?")

Use = Callable[[TextEngine], None]
Route = Callable[[list[Worker], Heard, Use, pytest.MonkeyPatch], None]


def by_command(workers: list[Worker], heard: Heard, use: Use, patch: pytest.MonkeyPatch) -> None:
    """`edge chat`, up to where it answers."""

    def answered(_: object, loaded: LoadedChat, *__: object) -> int:
        use(loaded.chat.engine)
        return 0

    patch.setattr(chat, "_answer_once", answered)
    patch.setattr(ShownSteps, "say", lambda _, line: heard.say(line))
    there = ",".join(worker.address for worker in workers)
    options = ("--threads", "1", "--context", "512", "--draft", "off", "--prefix-cache", "0")
    assert main("plan", "--workers", there, "--threads", "1") == 0  # measures; chat would estimate
    assert main("chat", "-p", "Hi", "--workers", there, *options) == 0


def by_program(workers: list[Worker], heard: Heard, use: Use, patch: pytest.MonkeyPatch) -> None:
    """`edge.plan` and `edge.deploy`."""
    options = edge.PlanOptions(context=512, concurrency=1, threads=1)
    with edge.Cluster([worker.address for worker in workers]) as cluster:
        choice = edge.plan(None, cluster, options=options)
        with edge.deploy(choice, cluster, steps=heard) as model:
            use(model.engine)


@pytest.fixture
def network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Network]:
    own_folders(monkeypatch, tmp_path / "own")
    built = Network(tmp_path, monkeypatch, is_shared=False)
    with built.stack:
        yield built


@pytest.fixture(scope="module")
def undisturbed() -> list[str]:
    with Engine(MODEL_PATH, OPTIONS) as single:
        return greedy_answers(single, QUESTIONS, 16, {})


@pytest.mark.parametrize("route", [by_command, by_program])
def test_a_loss_a_return_and_a_slow_device(
    route: Route, network: Network, undisturbed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, two = network.start("one", ONE), network.start("two", TWO)
    in_use: dict[str, float] = {}
    network.times_in_use(in_use)
    heard = Heard()

    def use(engine: TextEngine) -> None:
        assert greedy_answers(engine, QUESTIONS, 16, {3: first.kill}) == undisturbed  # on the faster worker, then lost
        [lost] = heard.lines
        assert re.fullmatch(r"(one|a device) was lost \(.+\): going on with this device and two", lost)

        network.start("one", ONE, listen=first.address)
        until(lambda: len(heard.lines) > 1, "the worker that is back")
        assert heard.lines[1:] == ["one is there again: going on with this device and one"]
        assert greedy_answers(engine, QUESTIONS, 16, {}) == undisturbed

        in_use[first.address] = SLOWED

        def is_reported() -> bool:
            engine.kv_clear()
            for position in range(LEAST_STEPS):
                engine.decode([5], position)
            return len(heard.lines) > 2

        until(is_reported, "word of the slow device")
        [slow] = heard.lines[2:]
        assert re.fullmatch(r"one computes \d+\.\d times as long as it did: going on with this device and two", slow)
        assert greedy_answers(engine, QUESTIONS, 16, {}) == undisturbed

    route([first, two], heard, use, monkeypatch)
    assert len(heard.lines) == 3
