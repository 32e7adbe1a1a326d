"""Test that the whole process stays within its budget: by its peak, and in a memory group that kills it otherwise."""

import functools
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.engine.paging.conftest import MakeModel
from tests.support import ROOT
from tests.support.paging import MIB
from tests.support.thorough import thorough


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Processes put weights that they laid out here."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


_CHILD = """
import json, sys
from devices.probe import peak_rss
from edge.llm.engine import Engine
from edge.llm.options import EngineOptions
from edge.errors import NotEnoughMemory
path, memory = sys.argv[1], int(sys.argv[2])
options = EngineOptions(threads=1, context=512, memory=memory)
try:
    with Engine(path, options) as engine:
        tokens = [5 + i % 500 for i in range(100)]
        step = min(engine.batch, int(sys.argv[3]))
        for start in range(0, 100, step):
            logits = engine.decode(tokens[start : start + step], start)
        chosen = []
        for i in range(100, 104):
            chosen.append(int(logits.argmax()))
            logits = engine.decode(chosen[-1:], i)
        streamed = engine.paging.plan.streamed_bytes + engine.paging.plan.expert_room
        found = {"peak": peak_rss(), "total": engine.memory.total, "chosen": chosen, "streamed": streamed, "step": step}
        print(json.dumps(found))
except NotEnoughMemory as error:
    print(json.dumps({"error": str(error)}))
"""


def child(path: Path, memory: int, group: Path | None = None, step: int = 100) -> dict[str, Any]:
    """Return what a process of its own says, in a memory group if there is one."""
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, str(path), str(memory), str(step)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        preexec_fn=(lambda: (group / "cgroup.procs").write_text(str(os.getpid())) and None) if group else None,
        check=False,
    )
    assert done.returncode == 0, (done.returncode, done.stderr)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


# At q4_0 65 MB: as much again as a process holds beside weights.
LARGE = {"layers": 9, "embd": 1024, "ff": 3072, "heads": 8, "vocab": 8192}
LARGE_EXPERTS = {"layers": 4, "embd": 1024, "experts": 16, "expert_ff": 512, "vocab": 4096}


def large(built: MakeModel, arch: str) -> Path:
    return built(arch, "q4_0", **(LARGE if arch == "llama" else LARGE_EXPERTS))


@functools.cache
def child_least(path: Path) -> int:
    """Return the least budget by the error of a process, and a little: processes are not the same to the page."""
    result = re.search(r"at least ([\d,]+) MiB", child(path, 64 * MIB)["error"])
    assert result
    return (int(result[1].replace(",", "")) + 4) * MIB


@pytest.mark.parametrize("arch", ["llama", *thorough("qwen3moe")])
def test_a_process_stays_within_its_budget(make_model: MakeModel, arch: str) -> None:
    path = large(make_model, arch)
    assert path.stat().st_size > 50 * MIB
    memory = child_least(path)
    result = child(path, memory)
    assert result["streamed"] > 0
    assert result["total"] <= memory
    assert result["peak"] <= memory
    assert result["chosen"] == child(path, 1 << 30, step=result["step"])["chosen"]


@pytest.fixture
def memory_group() -> Iterator[Callable[[int], Path]]:
    """`memory_group(bytes)`: a control group that kills what asks for more, without swap."""
    folder = Path("/sys/fs/cgroup/memory", f"edge-test-{os.getpid()}")
    if not (folder.parent / "memory.limit_in_bytes").exists():
        pytest.skip("this machine has no memory groups of version 1")

    def make(n_bytes: int) -> Path:
        try:
            folder.mkdir()
            (folder / "memory.limit_in_bytes").write_text(str(n_bytes))
        except OSError as error:
            pytest.skip(f"no memory group can be made here: {error.strerror}")
        with suppress(OSError):  # not every kernel counts swap
            (folder / "memory.memsw.limit_in_bytes").write_text(str(n_bytes))
        return folder

    yield make
    if folder.exists():
        with suppress(OSError):
            (folder / "memory.force_empty").write_text("0")
        folder.rmdir()


@pytest.mark.parametrize("arch", [*thorough("llama"), "qwen3moe"])
def test_a_process_is_never_killed_in_a_group_as_large_as_its_budget(
    make_model: MakeModel, memory_group: Callable[[int], Path], arch: str
) -> None:
    path = large(make_model, arch)
    memory = child_least(path)
    group = memory_group(memory)
    result = child(path, memory, group)
    assert result["streamed"] > 0
    most = int((group / "memory.max_usage_in_bytes").read_text())
    assert memory // 4 < most <= memory
    assert "oom_kill 0" in (group / "memory.oom_control").read_text()


def test_the_group_of_that_test_kills(memory_group: Callable[[int], Path]) -> None:
    """Or it would prove nothing."""
    group = memory_group(32 * MIB)
    done = subprocess.run(
        [sys.executable, "-c", "x = bytearray(64 << 20)"],
        preexec_fn=lambda: (group / "cgroup.procs").write_text(str(os.getpid())) and None,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
