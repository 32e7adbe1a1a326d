"""Replicas on real workers: their answers are those of one device, also after the loss of a worker or a process."""

import asyncio
import json
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest

from edge.api.config import EngineConfig
from edge.errors import EngineGone
from edge.llm.options import EngineOptions
from edge.models.demo import MODEL_PATH
from edge.serve import engine_child
from edge.serve import replicas as module
from edge.serve.answer import ProcessAnswer
from edge.serve.client import EngineClient
from edge.serve.process import EngineProcess
from edge.serve.replicas import Replicas
from edge.serve.router import Router
from edge.serve.served import Generation
from partition.model.file import ModelFile
from partition.plan.arrange import make_plan
from partition.plan.plan import LOCAL, Plan
from partition.slices.gguf_slice import limits
from tests.support import joining_child
from tests.support.deployments import own_folders
from tests.support.workers import Worker, worker

T = TypeVar("T")
WAIT_S = 150.0
N_TOKENS = 40
PROMPTS = [f"Tell me {n}" for n in range(8)]
# The steps before an answer was moved do not change its tokens.
OPTIONS = EngineOptions(threads=1, context=512)
CONFIG = EngineConfig(str(MODEL_PATH), OPTIONS, prefix_cache=0, reproducible=True)


def question(prompt: str, n_tokens: int = N_TOKENS, client: str = "") -> Generation:
    sampling = {"temperature": 0.0, "ignore_eos": True}
    return Generation(prompt=prompt, max_tokens=n_tokens, sampling=sampling, client=client)


def copy_of(devices: list[str], shares: list[float]) -> Plan:
    return make_plan(limits(ModelFile.open(MODEL_PATH)), "demo", "", devices, "pipeline", shares)


def config_of(*plans: Plan) -> EngineConfig:
    return replace(CONFIG, plan=replace(plans[0], replicas=plans[1:]).to_json())


@pytest.fixture
def pi(tmp_path: Path) -> Iterator[Worker]:
    with worker(tmp_path / "pi", "--threads", "1") as daemon:
        yield daemon


def with_model(config: EngineConfig, work: Callable[[EngineClient], Awaitable[T]]) -> T:
    async def run() -> T:
        router = Router({"demo": config})
        try:
            return await asyncio.wait_for(work(await router.model(None)), WAIT_S)
        finally:
            await router.close()

    return asyncio.run(run())


async def tokens(answer: ProcessAnswer) -> list[int]:
    return [piece.token_id async for piece in answer if piece.token_id is not None]


async def answers(model: EngineClient, prompts: list[str] = PROMPTS) -> list[list[int]]:
    begun = await asyncio.gather(*(model.generate(question(prompt)) for prompt in prompts))
    return list(await asyncio.gather(*map(tokens, begun)))


async def all_loaded(replicas: Replicas) -> None:
    while not all(replica.is_loaded for replica in replicas._replicas):
        await asyncio.sleep(0.01)


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    return with_model(CONFIG, answers)


def test_answers_of_two_replicas_are_those_of_one_device(pi: Worker, alone: list[list[int]]) -> None:
    async def work(model: EngineClient) -> None:
        replicas = model.replicas
        assert await answers(model, PROMPTS[:1]) == alone[:1]  # the first copy answers before the other is loaded
        await all_loaded(replicas)
        used = [0, 0]
        running = [asyncio.create_task(answers(model)) for _ in range(2)]
        while not all(task.done() for task in running):
            for i, process in enumerate(replicas.processes):
                used[i] = max(used[i], len(process.answers))
            await asyncio.sleep(0)
        assert [task.result() for task in running] == [alone, alone]
        assert min(used) >= 2
        status = await model.status()
        assert status["model"]["sequences"] == (await model.about())["sequences"] == 2
        assert {device["replica"] for device in status["devices"]} == {0, 1}
        assert [copy.devices for copy in Plan.from_json(status["plan"]).copies] == [(LOCAL,), (LOCAL, pi.address)]
        # An answer may begin at one replica in the moment in which the other one takes it.
        n_twice = status["counters"]["generated_tokens"] - N_TOKENS * (1 + 2 * len(PROMPTS))
        assert 0 <= n_twice < len(PROMPTS)
        assert (status["waiting"], status["slots"], replicas.busy, replicas._dispatcher._prompts) == (0, [], False, {})

    with_model(config_of(copy_of([LOCAL], [1]), copy_of([LOCAL, pi.address], [0, 1])), work)


@pytest.mark.parametrize("way", ["rank", "worker", "process"])
def test_answers_of_a_lost_replica_go_on_and_it_is_taken_back(
    tmp_path: Path, alone: list[list[int]], monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.setattr(module, "RETRY_S", 0.2)

    async def work(model: EngineClient, daemon: Worker, again: ExitStack) -> None:
        replicas = model.replicas
        await all_loaded(replicas)
        own, far = replicas._replicas
        begun = await asyncio.gather(*(model.generate(question(prompt)) for prompt in PROMPTS))
        while not any(len(answer.tokens) > 2 for answer in far.process.answers.values()):
            await asyncio.sleep(0)
        before = far.process
        if way == "rank":
            daemon.children()[0].kill()
        elif way == "worker":
            daemon.kill()
        else:
            assert far.process._child is not None
            os.kill(far.process._child.process.pid, signal.SIGKILL)
        assert await asyncio.gather(*map(tokens, begun)) == alone
        if way == "worker":
            assert (far.is_loaded, own.is_loaded, replicas.failed) == (False, True, None)
            assert await answers(model) == alone
            again.enter_context(worker(tmp_path / "again", "--threads", "1", listen=daemon.address))
        await all_loaded(replicas)
        assert (far.process is before) == (way == "process")
        assert await answers(model) == alone
        assert (replicas.busy, replicas._dispatcher._prompts, replicas.failed) == (False, {}, None)

    with ExitStack() as again, worker(tmp_path / "pi", "--threads", "1") as daemon:
        config = config_of(copy_of([LOCAL], [1]), copy_of([LOCAL, daemon.address], [0, 1]))
        with_model(config, lambda model: work(model, daemon, again))


@pytest.mark.parametrize("way", ["rank", "worker"])
def test_losing_all_replicas_is_an_error_that_names_the_loss(tmp_path: Path, way: str) -> None:
    async def work(model: EngineClient, daemon: Worker) -> None:
        begun = await asyncio.gather(*(model.generate(question(prompt, 400)) for prompt in PROMPTS[:3]))
        # Any of them may begin first, and only one runs at a time: the others have not ended when it has two tokens.
        while not any(len(answer.tokens) > 1 for answer in begun):
            await asyncio.sleep(0)
        if way == "rank":
            daemon.children()[0].kill()
        else:
            daemon.kill()
        for answer in begun:
            with pytest.raises(EngineGone, match="was lost"):
                await tokens(answer)
        with pytest.raises(EngineGone, match="was lost"):
            await model.generate(question("Hello"))
        assert isinstance(model.replicas.failed, EngineGone)
        assert model.replicas.health["state"] == "failed"

    with worker(tmp_path / "pi", "--threads", "1") as daemon:
        plan = copy_of([LOCAL, daemon.address], [0, 1])
        with_model(replace(CONFIG, plan=plan.to_json(), is_replica=True), lambda model: work(model, daemon))


def test_a_conversation_stays_at_its_replica(pi: Worker) -> None:
    async def work(model: EngineClient) -> None:
        replicas = model.replicas
        await all_loaded(replicas)
        texts = ["Tell me of a fox. " * 30, "Tell me of a dog. " * 30]
        stayed, n_turns = 0, 0
        places: dict[int, int] = {}
        for _ in range(6):
            for number, text in enumerate(texts):
                answer = await model.generate(question(text, 8))
                place = next(i for i, process in enumerate(replicas.processes) if answer in process.answers.values())
                stayed += places.get(number, place) == place
                n_turns += 1
                places[number] = place
                texts[number] = text + "And then? "
                await tokens(answer)
        assert stayed == n_turns

    with_model(config_of(copy_of([LOCAL], [1]), copy_of([LOCAL, pi.address], [0, 1])), work)


def test_a_plan_without_replicas_ends_the_others_and_their_answers_go_on(pi: Worker, alone: list[list[int]]) -> None:
    config = config_of(copy_of([LOCAL], [1]), copy_of([LOCAL, pi.address], [0, 1]))

    async def work(model: EngineClient) -> None:
        replicas = model.replicas
        await all_loaded(replicas)
        begun = await asyncio.gather(*(model.generate(question(prompt)) for prompt in PROMPTS))
        while not all(process.answers for process in replicas.processes):
            await asyncio.sleep(0)
        await replicas.use(CONFIG)
        assert await asyncio.gather(*map(tokens, begun)) == alone
        assert len(replicas.processes) == 1
        assert not pi.children()
        await replicas.use(config)
        await all_loaded(replicas)
        assert len(replicas.processes) == 2
        assert await answers(model) == alone

    with_model(config, work)


def test_a_joining_worker_becomes_a_replica_and_comes_back_after_a_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RETRY_S", 0.2)
    own_folders(monkeypatch, tmp_path / "own")
    spawn, announced = engine_child.spawn, tmp_path / "announced"
    monkeypatch.setattr(engine_child, "spawn", lambda _: spawn(joining_child.MODULE))
    announced.write_text("")
    monkeypatch.setenv(joining_child.WORKERS, str(announced))
    monkeypatch.setenv(joining_child.SECONDS, json.dumps({"slow": 1.0}))

    async def work(model: EngineClient, life: ExitStack) -> None:
        replicas = model.replicas

        async def processes(n: int) -> list[EngineProcess]:
            """Wait for n replicas, and return their processes, which all answer."""
            while len(replicas.processes) != n or not all(replica.is_loaded for replica in replicas._replicas):
                await asyncio.sleep(0.01)
            idle = set(replicas.processes)
            while idle:  # a replica that was slow beside other programs may get no answer at first
                begun = await asyncio.gather(*(model.generate(question(prompt)) for prompt in PROMPTS))
                idle -= {process for process in replicas.processes if process.answers}
                assert [len(own) for own in await asyncio.gather(*map(tokens, begun))] == [N_TOKENS] * len(PROMPTS)
            return replicas.processes

        alone = await processes(1)
        pi = life.enter_context(worker(tmp_path / "pi", "--threads", "1", "--name", "pi"))
        announced.write_text(pi.address)
        two = await processes(2)
        pi.kill()
        while replicas._replicas[1].is_loaded:  # a request finds the loss, and goes on elsewhere
            assert [len(own) for own in await answers(model)] == [N_TOKENS] * len(PROMPTS)
        life.enter_context(worker(tmp_path / "pi", "--threads", "1", "--name", "pi", listen=pi.address))
        assert (await processes(2))[0] is two[0] is alone[0]  # it was not loaded again

    with ExitStack() as life, worker(tmp_path / "slow", "--threads", "1", "--name", "slow") as slow:
        config = EngineConfig(
            str(MODEL_PATH),
            replace(OPTIONS, sequences=2),  # so that the slow worker is of no use
            prefix_cache=0,
            workers=(slow.address,),
            joining=True,
            objective="throughput",
        )
        with_model(config, lambda model: work(model, life))
