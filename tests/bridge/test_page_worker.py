"""Test the end of a page's worker daemons, with programs that end when the test says."""

import asyncio
import sys
from pathlib import Path

import pytest

from edge.bridge import page_worker
from edge.bridge.page_worker import PageWorker, WorkerPlace

# Ends with code 3 once a file exists.
DAEMON = "import sys, pathlib, time\nwhile not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.02)\nsys.exit(3)"


def test_end_of_a_replaced_daemon_leaves_the_next_one_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the end of the current daemon is reported."""
    files = [tmp_path / "first", tmp_path / "second"]
    commands = iter([sys.executable, "-c", DAEMON, str(file)] for file in files)
    monkeypatch.setattr(page_worker, "module_command", lambda _: next(commands))
    codes = list[int]()

    async def on_end(code: int) -> None:
        codes.append(code)

    async def run() -> None:
        place = WorkerPlace("127.0.0.1", lambda: 1, None, tmp_path)
        worker = PageWorker("phone", place, tmp_path, on_end)
        await worker.start(1)
        first = worker._following
        assert first is not None
        worker.end()
        starting = asyncio.create_task(worker.start(1))  # it waits for the first daemon, whose port it needs
        await asyncio.sleep(0.1)
        assert not worker.runs
        files[0].touch()
        await starting
        await first
        assert (worker.runs, codes) == (True, [])
        files[1].touch()
        assert worker._following is not None
        await worker._following
        assert (worker.runs, codes) == (False, [3])

    asyncio.run(asyncio.wait_for(run(), 60))
