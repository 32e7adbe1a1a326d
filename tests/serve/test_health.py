"""Test the health of a model: the server reports it, and restarts an engine process that does not answer."""

import asyncio
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from edge.api.config import EngineConfig
from edge.errors import EngineGone
from edge.llm.options import EngineOptions
from edge.models.demo import MODEL_PATH
from edge.serve.answer import ProcessAnswer
from edge.serve.app import create_app
from edge.serve.options import ServeOptions
from edge.serve.process import EngineProcess
from edge.serve.served import Generation
from edge.serve.watch import RESTARTING, Deadlines, Watch
from tests.serve.scripted import ScriptedModels
from tests.serve.serving import serving
from tests.support.workers import Worker, worker

# With these options, passes of one token and of several give the same logits.
OPTIONS = EngineOptions(threads=1, sequences=3, context=512, kv_type="f32", flash_attention="off")
CONFIG = EngineConfig(str(MODEL_PATH), OPTIONS, prefix_cache=0)
ASKED = Generation(prompt="Tell me", max_tokens=300, sampling={"temperature": 0.0, "logit_bias": {4: -100.0}})
SOON = Deadlines(ask_s=0.25, silent_s=0.5, stuck_s=2.0)
WAIT_S = 90.0


async def begin(process: EngineProcess) -> ProcessAnswer:
    answer = ProcessAnswer(ASKED)
    await process.generate(answer)
    return answer


async def until(process: EngineProcess, *states: str) -> list[Mapping[str, Any]]:
    """All that is told of a process until it was in each of these states, one after the other."""
    response = [process.health]
    for state in states:
        while response[-1]["state"] != state:
            await asyncio.sleep(0.01)
            if process.health != response[-1]:
                response.append(process.health)
    return response  # type: ignore[return-value]


def test_a_process_that_says_nothing_is_told_ended_and_its_answers_go_on() -> None:
    said: list[str] = []

    async def run() -> None:
        process = EngineProcess("demo", CONFIG, say=said.append, deadlines=SOON)
        assert process.health == {"state": "loading"}
        try:
            await process.start()
            alone = [piece.token_id async for piece in await begin(process)]
            answer = await begin(process)
            tokens = [(await anext(aiter(answer))).token_id]
            assert process._child is not None
            os.kill(process._child.process.pid, signal.SIGSTOP)
            response = await until(process, "silent", "restarting", "waiting")
            silent = next(item for item in response if item["state"] == "silent")
            assert "has said nothing for 0.5 s" in silent["reason"]
            restarting = next(item for item in response if item["state"] == "restarting")
            assert restarting["reason"] == RESTARTING
            assert not any("demo" in item.get("reason", "") for item in response)
            tokens += [piece.token_id async for piece in answer]
            assert tokens == alone
            assert process.restarts == 1
        finally:
            await process.close()

    asyncio.run(asyncio.wait_for(run(), WAIT_S))
    assert any("said nothing for 2 s, and was killed; starting it again" in line for line in said)
    assert not [child for child in psutil.Process().children() if child.status() == psutil.STATUS_STOPPED]


def test_a_step_may_take_long_and_not_for_ever() -> None:
    """By a process that is always there, and computes ever longer at one step."""
    ended: list[str] = []
    states: list[Mapping[str, Any]] = []

    async def run() -> None:
        watch, beats = Watch(Deadlines(ask_s=0.01, step_s=600.0)), iter([None, 1.5, 599.0, 0.1, 600.0, 600.5, None])

        async def beat() -> Mapping[str, Any]:
            states.append(watch.to_json())
            return {"busy_s": next(beats)}

        watch.begin(beat, ended.append)
        while not ended:
            await asyncio.sleep(0)
        watch.leave("so it ended")
        assert watch.to_json() == {"state": "restarting", "reason": "so it ended"}

    asyncio.run(asyncio.wait_for(run(), WAIT_S))
    assert ended == ["one step takes more than 600 s"]
    waiting: Mapping[str, Any] = {"state": "waiting"}
    computing = [{"state": "computing", "busy_s": busy_s} for busy_s in (1.5, 599.0, 0.1, 600.0)]
    assert states == [waiting, waiting, *computing]


def test_a_process_that_answers_late_now_and_then_is_left_alone() -> None:
    response: list[Mapping[str, Any]] = []

    async def run() -> None:
        watch = Watch(Deadlines(ask_s=0.01, silent_s=0.01, stuck_s=0.03))

        async def beat() -> Mapping[str, Any]:
            response.append(watch.to_json())
            if len(response) % 2:
                await asyncio.Event().wait()
            return {"busy_s": None}

        watch.begin(beat, pytest.fail)
        while len(response) < 20:
            await asyncio.sleep(0.01)
        watch.leave(None)

    asyncio.run(asyncio.wait_for(run(), WAIT_S))
    assert [item["state"] for item in response] == ["waiting", "silent"] * 10


def test_a_process_that_ended_is_not_ended_again() -> None:
    async def run() -> None:
        watch = Watch(Deadlines(ask_s=0.01))

        async def gone() -> Mapping[str, Any]:
            raise EngineGone("it ended")

        watch.begin(gone, pytest.fail)
        for _ in range(10):
            await asyncio.sleep(0)

    asyncio.run(run())


def test_who_asks_hears_503_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    models = ScriptedModels()
    answers = {"state": "computing", "busy_s": 80.0}
    silent = {"state": "silent", "reason": "an engine process has said nothing for 10 s"}
    with serving(create_app(models, ServeOptions(api_keys=("sk",)))) as url:
        for response in ([answers, {"state": "loading"}], [answers, silent]):
            monkeypatch.setattr(models, "health", lambda response=response: response)
            for path in ("/health", "/v1/health"):
                said = httpx.get(url + path)
                if silent in response:
                    assert said.status_code == 503
                    assert said.json() == {"status": "error", "reason": silent["reason"], "models": response}
                else:
                    assert (said.status_code, said.json()) == (200, {"status": "ok", "models": response})


@pytest.mark.parametrize("n_left", [1, 0])
def test_engine_and_workers_that_end_together_cost_no_answer(tmp_path: Path, n_left: int) -> None:
    """The next process goes on over the devices that answer, and with all of them once they are there again."""
    said: list[str] = []

    async def run(workers: Sequence[Worker]) -> None:
        addresses = tuple(worker.address for worker in workers)
        config = replace(CONFIG, workers=addresses, parallel="pipeline", shares=(1.0, 1.0, 1.0), insecure=True)
        process = EngineProcess("demo", config, say=said.append)
        try:
            await process.start()
            alone = [piece.token_id async for piece in await begin(process)]
            answer = await begin(process)
            tokens = [(await anext(aiter(answer))).token_id]
            assert process._child is not None
            for worker in workers[n_left:]:
                worker.kill()
            os.kill(process._child.process.pid, signal.SIGKILL)
            tokens += [piece.token_id async for piece in answer]
            assert tokens == alone
            assert (process.failed, process.restarts) == (None, 1)
        finally:
            await process.close()

    with ExitStack() as stack:
        names = ("a", "b")
        asyncio.run(run([stack.enter_context(worker(tmp_path / name, "--threads", "1")) for name in names]))
        assert any("cannot be reached: going on without" in line for line in said), said
