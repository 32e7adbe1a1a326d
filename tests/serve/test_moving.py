"""Test moving a served model to another plan: requests before and during the move, and failures of the move."""

import asyncio
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from edge.errors import EngineGone
from edge.models.demo import MODEL_PATH
from edge.serve.answer import ProcessAnswer
from edge.serve.client import EngineClient
from edge.serve.process import RESTARTS_IN_A_ROW, EngineProcess
from edge.serve.router import Router
from partition.plan.arrange import make_plan
from partition.plan.plan import LOCAL
from partition.slices.gguf_slice import limits
from quant.errors import ModelFileError
from quant.gguf.file import GgufFile
from tests.serve.test_engine_process import CONFIG, ENDLESS, WAIT_S, question, running_child, text, with_router
from tests.support.forked_modules import running

MOVED = replace(CONFIG, options=replace(CONFIG.options, context=700))


async def context(model: EngineClient) -> int:
    return int((await model.about())["context"])


def engines() -> int:
    """Engine processes of this one."""
    return len(running("edge.serve.engine.child"))


def test_what_is_asked_meanwhile_waits_and_is_nobodys_failure() -> None:
    async def work(router: Router) -> tuple[list[str], list[int]]:
        model = await router.model(None)
        answers: list[ProcessAnswer] = []
        ends: list[int] = []

        async def ask_it(i: int) -> str:
            answers.append(await model.generate(question(i)))
            ends.append(answers[-1].case.ends)  # before its first token
            return await text(answers[-1])

        response = []
        for turn, config in enumerate((MOVED, CONFIG, MOVED)):  # more often than a request may fail
            under_way = await model.generate(ENDLESS)
            preparing = asyncio.create_task(ask_it(turn))
            while not running_child(model)._pending:  # it is requested, and not accepted
                await asyncio.sleep(0)
            move = asyncio.create_task(model.replicas.use(config))
            while model.replicas.is_ready:
                await asyncio.sleep(0)
            tokens, later = asyncio.create_task(model.tokenize("Hello")), asyncio.create_task(ask_it(turn + 3))
            with pytest.raises(EngineGone, match="being loaded"):
                await model.status()
            assert model.replicas.busy
            assert await tokens
            response += [await preparing, await later]
            await move
            assert await context(model) == config.options.context
            before = len(under_way.tokens)
            async for _ in under_way:
                if len(under_way.tokens) > before + 1:
                    break
            under_way.cancel()
        assert (model.replicas.restarts, model.replicas.processes[0]._ended_in_a_row, engines()) == (0, 0, 1)
        return response, ends

    response, ends = with_router(work)
    assert sorted(response) == [f"{i} plus 2 is {i + 2}." for i in range(6)]
    assert ends == [0] * 6


@pytest.mark.parametrize("noticed", [False, True])
def test_a_move_of_a_process_that_has_just_ended_leaves_one(noticed: bool) -> None:
    async def work(router: Router) -> str:
        model = await router.model(None)
        model.replicas.processes[0]._ended_in_a_row = RESTARTS_IN_A_ROW - 1
        answers = [await model.generate(question(i)) for i in range(5)]  # two of them wait
        child = running_child(model)
        os.kill(child.process.pid, signal.SIGKILL)
        if noticed:
            await child.listening  # it is about to be started again
        await model.replicas.use(MOVED)
        assert await asyncio.gather(*map(text, answers)) == [f"{i} plus 2 is {i + 2}." for i in range(5)]
        assert model.replicas.failed is None
        assert (await context(model), engines(), model.replicas.processes[0]._ended_in_a_row) == (700, 1, 0)
        return await text(await model.generate(question(7)))

    assert with_router(work) == "7 plus 2 is 9."


def test_a_move_that_fails_leaves_all_as_it_was(tmp_path: Path) -> None:
    bad, there = tmp_path / "bad.gguf", tmp_path / "there.gguf"
    bad.write_bytes(b"GGUF" + bytes(100))
    shutil.copy(MODEL_PATH, there)

    async def work(router: Router) -> None:
        model = await router.model(None)
        under_way, waits = await model.generate(question(4)), await model.generate(ENDLESS)
        move = asyncio.create_task(model.replicas.use(replace(CONFIG, path=str(bad))))
        while model.replicas.is_ready:
            await asyncio.sleep(0)
        later = asyncio.create_task(model.tokenize("Hello"))
        with pytest.raises(ModelFileError, match="bad"):
            await move
        assert await later  # is not told of it
        assert await text(under_way) == "4 plus 2 is 6."
        assert (model.replicas.config.path, model.replicas.failed, engines()) == (str(there), None, 1)
        there.unlink()
        with pytest.raises(EngineGone, match=r"could not be moved.*and it does not run as before"):
            await model.replicas.use(replace(CONFIG, path=str(bad)))
        with pytest.raises(EngineGone, match="could not be moved"):
            await text(waits)
        assert model.replicas.failed is not None
        assert engines() == 0

    with_router(work, replace(CONFIG, path=str(there)))


def test_a_move_concerns_its_model_alone_and_goes_on_where_who_asked_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan(limits(GgufFile.open(MODEL_PATH)), MODEL_PATH.stem, "", [LOCAL], stages_of=(1,)).to_json()
    use = EngineProcess.use

    async def run() -> None:
        may_move, moves = asyncio.Event(), asyncio.Event()

        async def slowly(process: EngineProcess, config: Any) -> None:
            async with process._starting:
                moves.set()
                await may_move.wait()
            await use(process, config)

        monkeypatch.setattr(EngineProcess, "use", slowly)
        monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": 1 << 20}))
        router = Router({"first": CONFIG, "second": CONFIG})
        try:
            request = asyncio.create_task(router.use_plan("first", plan))  # which is not loaded
            await moves.wait()
            request.cancel()
            second = await router.model("second")  # there is room for one, and the other is not idle
            assert await text(await second.generate(question(2))) == "2 plus 2 is 4."
            assert {model.name for model in await router.loaded()} == {"first", "second"}
            may_move.set()
            await asyncio.gather(*router._moves)
            first = await router.model("first")
            assert (await first.status())["plan"] is None  # on this device alone the model needs no plan
            assert await text(await first.generate(question(3))) == "3 plus 2 is 5."
        finally:
            await router.close()

    asyncio.run(asyncio.wait_for(run(), WAIT_S))
