"""Test the process that serves pages for browsers: a busy port, a bridge that runs already, errors and ends."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from edge.errors import EdgeError, WorkerError
from edge.serve.devices import bridge as module
from edge.serve.devices.bridge import Bridge

# Prints the answer for a port, which its first argument has, and ends when its input ends.
CHILD = """
import json, sys
answers, request = json.loads(sys.argv[1]), json.loads(sys.stdin.readline())
answer = answers["" if request["port"] else "0"]
if answer == "end":
    sys.exit(3)
if answer is not None:
    print(json.dumps(answer), flush=True)
sys.stdin.read()
"""


def run(
    monkeypatch: pytest.MonkeyPatch, on_port: Any, elsewhere: Any, work: Callable[[Bridge, list[Any]], Awaitable[None]]
) -> None:
    """Let `work` use a bridge and the list of its processes. on_port, elsewhere: answers for PORT and another port."""
    start, processes = asyncio.create_subprocess_exec, list[Any]()

    async def started(*args: Any, **options: Any) -> Any:
        processes.append(await start(*args, **options))
        return processes[-1]

    answers = json.dumps({"": on_port, "0": elsewhere})
    monkeypatch.setattr(module, "module_command", lambda _: (sys.executable, "-S", "-I", "-c", CHILD, answers))
    monkeypatch.setattr(asyncio, "create_subprocess_exec", started)

    async def main() -> None:
        await asyncio.wait_for(work(Bridge("127.0.0.1"), processes), 60)
        assert None not in [process.returncode for process in processes]

    asyncio.run(main())


def test_busy_port_is_replaced_and_the_bridge_runs_until_it_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(bridge: Bridge, processes: list[Any]) -> None:
        assert await bridge.link("phone", 60, has_cluster=False) == "https://elsewhere"
        assert [process.returncode for process in processes] == [0, None]
        await bridge.close()

    run(monkeypatch, {"is_address": True, "error": "busy"}, {"serves": True, "link": "https://elsewhere"}, work)


def test_process_of_a_bridge_that_runs_already_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(bridge: Bridge, processes: list[Any]) -> None:
        assert await bridge.link("phone", 60, has_cluster=False) == "https://there"
        assert [process.returncode for process in processes] == [0]
        await bridge.close()

    run(monkeypatch, {"link": "https://there"}, None, work)


@pytest.mark.parametrize(
    ("answer", "error", "words"),
    [({"error": "no cluster"}, EdgeError, "no cluster"), ("end", WorkerError, "not served")],
)
def test_error_of_the_process_is_raised_and_the_process_ends(
    monkeypatch: pytest.MonkeyPatch, answer: Any, error: type[Exception], words: str
) -> None:
    async def work(bridge: Bridge, processes: list[Any]) -> None:
        with pytest.raises(error, match=words):
            await bridge.link("phone", 60, has_cluster=False)
        assert len(processes) == 1
        await bridge.close()

    run(monkeypatch, answer, None, work)


def test_silent_process_is_killed_if_the_client_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(bridge: Bridge, processes: list[Any]) -> None:
        task = asyncio.create_task(bridge.link("phone", 60, has_cluster=False))
        while not processes:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await processes[0].wait() != 0
        await bridge.close()

    run(monkeypatch, None, None, work)
