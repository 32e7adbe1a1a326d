"""Test requests to several replicas while one replica, or each of them, is lost, without running processes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from edge.api.config import EngineConfig
from edge.errors import EngineGone
from edge.serve.answer import AnswersOwner, ProcessAnswer
from edge.serve.dispatch import Replica
from edge.serve.events import Events
from edge.serve.process import EngineProcess
from edge.serve.replicas import Replicas, _together
from edge.serve.served import Generation

WAIT_S = 60.0
ABOUT = {"sequences": 2, "chat_template": "x"}


class Process(EngineProcess):
    """An engine process whose states the test sets."""

    def __init__(self, owner: AnswersOwner) -> None:
        super().__init__("demo", EngineConfig("model.gguf"), say=print, owner=owner)
        self.n_refused = 0
        self.messages: list[Mapping[str, Any]] = []

    def tell(self, message: Mapping[str, Any]) -> None:
        self.messages.append(message)

    def load(self) -> None:
        self.about = ABOUT
        self._ready.set()

    def lose(self) -> None:
        self._give_up(EngineGone("pi was lost"))

    async def ask(self, what: str, arguments: Mapping[str, Any], *_: Any) -> Any:
        try:
            await self.until_ready()
        except EngineGone:
            self.n_refused += 1
            assert self.n_refused < 5, "the failed replica is asked again and again"
            raise
        return what


def two() -> tuple[Replicas, list[Process]]:
    """Two replicas whose models are not loaded yet."""
    replicas = Replicas("demo", EngineConfig("model.gguf"), lambda _, owner: Process(owner), Events("demo", print))
    processes: list[Any] = [*replicas.processes, Process(replicas._dispatcher)]
    replicas._replicas.append(Replica(EngineConfig("model.gguf"), processes[1]))
    return replicas, processes


@pytest.mark.parametrize("lost", [0, 1])
def test_requests_wait_for_a_replica_that_still_loads(lost: int) -> None:
    async def run() -> None:
        replicas, processes = two()
        processes[lost].lose()
        waiting = [asyncio.create_task(replicas.ask("tokenize", {})), asyncio.create_task(replicas.until_ready())]
        for _ in range(5):
            await asyncio.sleep(0)
        assert not any(task.done() for task in waiting)
        assert not replicas.is_ready
        processes[1 - lost].load()
        assert await asyncio.gather(*waiting) == ["tokenize", None]
        assert (replicas.is_ready, replicas.failed) == (True, None)

    asyncio.run(asyncio.wait_for(run(), WAIT_S))


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_requests_fail_once_the_last_replica_is_lost(order: tuple[int, int]) -> None:
    async def run() -> None:
        replicas, processes = two()
        waiting = [asyncio.create_task(replicas.ask("tokenize", {})), asyncio.create_task(replicas.until_ready())]
        for number in order:
            assert not any(task.done() for task in waiting)
            processes[number].lose()
            for _ in range(5):
                await asyncio.sleep(0)
        for result in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(result, EngineGone)
        with pytest.raises(EngineGone, match="pi was lost"):
            await replicas.until_ready()
        assert replicas.is_ready

    asyncio.run(asyncio.wait_for(run(), WAIT_S))


@pytest.mark.parametrize("lost", [0, 1])
def test_facts_about_the_model_stay_known_while_a_new_process_loads_a_lost_replica(lost: int) -> None:
    replicas, processes = two()
    assert replicas.about == {}
    for process in processes:
        process.load()
    assert replicas.about == {**ABOUT, "sequences": 4}
    processes[lost].lose()
    replicas._replicas[lost].process = Process(replicas._dispatcher)
    assert replicas.about == ABOUT


def test_figures_are_those_of_all_replicas() -> None:
    replicas, processes = two()
    for number, process in enumerate(processes, 1):
        process.load()
        process.restarts = number
    assert (replicas.restarts, replicas.busy, replicas.n_answers()) == (3, False, 0)
    processes[1].answers[1] = answer = ProcessAnswer(Generation(prompt="x"))
    assert (replicas.busy, replicas.n_answers(), replicas.n_answers(answer.client), replicas.n_answers("other")) == (
        True, 1, 1, 0,
    )  # fmt: skip
    del processes[1].answers[1]
    task: Any = object()
    replicas._dispatcher.moves.add(task)
    assert replicas.busy
    replicas.leave_out(["10.0.0.1:7070"])
    message = {"do": "leave_out", "addresses": ["10.0.0.1:7070"]}
    assert [process.messages for process in processes] == [[message], [message]]
    assert replicas._dispatcher.left_out == ["10.0.0.1:7070"]  # for processes that start later


def test_health_is_that_of_the_first_replica_that_works() -> None:
    replicas, processes = two()
    loading, works, failed = {"state": "loading"}, {"state": "ready"}, {"state": "failed", "reason": "lost"}
    for states, expected in (
        ((loading, works), works), ((failed, works), works), ((loading, failed), loading), ((works, failed), works),
    ):  # fmt: skip
        for process, state in zip(processes, states, strict=True):
            watch: Any = SimpleNamespace(to_json=lambda _, state=state: state)
            process._watch = watch
        assert replicas.health == expected


def test_status_of_several_replicas_has_sums_and_the_replica_of_each_part() -> None:
    def state(n: int) -> dict[str, Any]:
        return {
            "model": {"name": "x", "sequences": n}, "slots": [{"id": n}], "devices": [{"rank": 0}], "links": [n],
            "waiting": n, "tokens_per_s": n, "counters": {"steps": n}, "why": f"because of {n}",
        }  # fmt: skip

    assert _together([state(1)]) == state(1)
    assert _together([state(1), state(2)]) == {
        "model": {"name": "x", "sequences": 3}, "slots": [{"id": 1, "replica": 0}, {"id": 2, "replica": 1}],
        "devices": [{"rank": 0, "replica": 0}, {"rank": 0, "replica": 1}], "links": [1, 2],
        "waiting": 3, "tokens_per_s": 3, "counters": {"steps": 3}, "why": "because of 1",
    }  # fmt: skip
