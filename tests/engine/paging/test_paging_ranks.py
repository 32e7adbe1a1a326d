"""Test two devices with budgets of their own, as processes: each stays within its own, and the answer is unchanged."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from edge.models import shapes, synth
from tests.support.deployments import ONE_THREAD, own_folders
from tests.support.helpers import run_edge
from tests.support.workers import worker

MIB = 1 << 20
HERE, THERE = 180 * MIB, 260 * MIB  # budgets that less than half of the weights fit into; there is a daemon, too
TELL = ("-p", "hello", "--temperature", "0", "--max-tokens", "6", "--context", "256", "--batch", "64", *ONE_THREAD)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 170 MB, most of them in a few large matrices."""
    path = tmp_path_factory.mktemp("model") / "model.gguf"
    synth.synthesize(path, shapes.shape("llama", layers=5, embd=1024, ff=4096, heads=8, kv=4, vocab=1024), "f16")
    return path


@contextmanager
def most_held(pid: int) -> Iterator[list[int]]:
    """The most bytes that a process and its children held together inside the block, looked at again and again: pages
    that several share are counted once."""
    current, done = [0], threading.Event()

    def look() -> None:
        while not done.wait(0.05):  # the kernel walks all pages for it, and holds up who takes more
            try:
                first = psutil.Process(pid)
                current[0] = max(
                    current[0], sum(p.memory_full_info().pss for p in (first, *first.children(recursive=True)))
                )
            except psutil.Error:
                pass  # one has ended between two questions

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield current
    finally:
        done.set()
        thread.join()


def chat(model: Path, *options: str) -> dict[str, Any]:
    done = run_edge("chat", str(model), *TELL, "--json", *options)
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


@pytest.mark.parametrize("parallel", ["tensor", "pipeline"])
def test_two_ranks_within_their_budgets(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parallel: str
) -> None:
    own_folders(monkeypatch, tmp_path / "own")
    plan = str(tmp_path / "plan.json")
    with worker(tmp_path / "free", "--name", "free", *ONE_THREAD) as free:
        several = ("--parallel", parallel, "--shares", "1,1", "--save-plan", plan)
        resident = chat(model, "--workers", free.address, *several)
    with (
        worker(tmp_path / "small", "--name", "small", "--memory", f"{THERE}B", *ONE_THREAD) as small,
        most_held(small.process.pid) as current,
    ):
        text = Path(plan).read_text().replace(free.address, small.address)
        Path(plan).write_text(text)
        paged = chat(model, "--plan", plan, "--memory", f"{HERE}B")
    assert paged["token_ids"] == resident["token_ids"]
    if parallel == "pipeline":  # a tensor-parallel sum adds in another order than one device does
        assert paged["token_ids"] == chat(model)["token_ids"]
    assert paged["paging"]["streamed_bytes"] > 10 * MIB
    assert paged["memory"]["total_bytes"] <= HERE
    assert 100 * MIB < current[0] <= THERE
    assert resident["memory"] is None


def test_a_plan_gives_each_shard_a_budget(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_folders(monkeypatch, tmp_path / "own")
    plan = tmp_path / "plan.json"
    with worker(tmp_path / "w", "--name", "w", *ONE_THREAD) as first:
        chat(model, "--workers", first.address, "--shares", "1,1", "--parallel", "tensor", "--save-plan", str(plan))
        values = json.loads(plan.read_text())
        for shard in values["stages"][0]["shards"]:
            shard["memory"] = HERE
        plan.write_text(json.dumps(values))
        with most_held(first.process.pid) as current:
            paged = chat(model, "--plan", str(plan))
    assert paged["memory"]["budget_bytes"] == HERE
    assert paged["paging"]["streamed_bytes"] > 0
    assert 100 * MIB < current[0] <= THERE
