"""Test the end of engine processes: no thread waits forever, even if the caller gives up or a message is incomplete."""

import asyncio
import gc
import os
import signal
import socket
from contextlib import suppress
from typing import Any

import pytest

from edge.errors import EngineGone
from edge.serve import engine_child
from edge.serve.engine.child import Control
from edge.serve.router import Router
from tests.serve.test_engine_process import ENDLESS, running_child, text, with_router


def test_an_end_that_is_given_up_leaves_no_request_without_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that does not end by itself is killed later."""
    monkeypatch.setattr(engine_child, "EXIT_S", 0.5)

    async def work(router: Router) -> None:
        model = await router.model(None)
        child = running_child(model)
        answer = await model.generate(ENDLESS)
        os.kill(child.process.pid, signal.SIGSTOP)
        try:
            tokenizing = asyncio.create_task(model.tokenize("Hello"))
            while not child._pending:
                await asyncio.sleep(0)
            closing = asyncio.create_task(model.replicas.close("it is closed"))
            while not child._is_ending:
                await asyncio.sleep(0)
            closing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await closing
            for request in (text(answer), tokenizing, model.tokenize("later")):
                with pytest.raises(EngineGone, match="it is closed"):
                    await request
            await child.listening
            assert await child.process.wait() == -signal.SIGKILL
        finally:
            with suppress(ProcessLookupError):
                child.process.kill()

    with_router(work)


def test_a_request_that_is_cancelled_as_its_process_ends_leaves_no_complaint() -> None:
    async def work(router: Router) -> None:
        child, complaints = running_child(await router.model(None)), list[dict[str, Any]]()
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context))
        os.kill(child.process.pid, signal.SIGSTOP)
        try:
            asking = asyncio.create_task(child.ask(1 << 40, "status", {}))
            while 1 << 40 not in child._pending:
                await asyncio.sleep(0)
            child._fail_pending(EngineGone("it ended"))
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
        finally:
            os.kill(child.process.pid, signal.SIGCONT)
        del asking
        await asyncio.sleep(0)  # the event loop lets go of the last callback
        gc.collect()
        assert complaints == []

    with_router(work)


def test_a_process_whose_end_nobody_waits_for_leaves_its_memory_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(router: Router) -> None:
        model = await router.model(None)
        child, left, waits, ended = running_child(model), list[bool](), asyncio.Event(), asyncio.Event()
        monkeypatch.setattr(child, "_leave", lambda: left.append(True))

        async def code(process: asyncio.subprocess.Process) -> int:
            """Return at once to who ends it; the task that listens has to wait."""
            if asyncio.current_task() is child.listening:
                waits.set()
                await ended.wait()
            return await process.wait()

        monkeypatch.setattr(engine_child, "exit_code", code)
        ending = asyncio.create_task(child.end(EngineGone("it is closed")))
        await waits.wait()
        await child.process.wait()
        for _ in range(10):  # now it waits for that task
            await asyncio.sleep(0)
        ending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await ending
        ended.set()
        await child.listening
        assert left == [True]

    with_router(work)


@pytest.mark.parametrize("rest", [b"", b'{"do": "cancel", "id'])
def test_a_message_that_ends_in_the_middle_is_none(rest: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(b'{"do": "cancel", "id": 3}\n' + rest)
        ours.shutdown(socket.SHUT_WR)
        assert list(Control(theirs).lines()) == [{"do": "cancel", "id": 3, "is_large": False}]
