"""Test that every command with --memory runs in a control group of exactly that size without being killed."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnx
import pytest

from devices.lab.control_group import NoGroups
from edge.models import shapes, synth
from tests.support import ROOT
from tests.support.deployments import own_folders
from tests.support.groups import CountedGroup
from tests.support.helpers import TIMEOUT_S, edge_here
from tests.support.namespaces import need
from tests.support.onnx_graphs import mlp
from tests.support.thorough import some
from tests.support.workers import worker

MIB = 1 << 20
SIZES = {
    "chat": (150, 190, 260),
    "bench": (150, 190, 260),
    "evaluate": (200, 230, 330),
    "imatrix": (200, 230, 330),
    "plan": (330, 400, 500),
    "pareto": (330, 400, 500),
    "worker": (330, 400, 500),
}
MOST = some(1, 3)  # sizes of a command, from the smallest on
ONE_THREAD = ("--threads", "1")
SHORT = ("--prompt-tokens", "32", "--gen-tokens", "4", "--repeats", "1")
BRIEF = "tests.support.measuring"  # takes as much memory
TEXT = "edge/quantization/calibration.txt"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 60 MB, so that small budgets have to page."""
    path = tmp_path_factory.mktemp("model") / "model.gguf"
    shape = shapes.shape("llama", layers=8, embd=512, ff=2048, heads=8, kv=4, vocab=2048, context=1024)
    synth.synthesize(path, shape, "f16")
    return path


@contextmanager
def group_of(n_bytes: int) -> Iterator[CountedGroup]:
    """A control group of so much memory, in which nothing was killed in the end."""
    try:
        built = CountedGroup(f"edge-memory-test-{os.getpid()}", memory=n_bytes)
    except NoGroups as error:
        need(False, str(error))
        raise
    with built as group:
        yield group  # type: ignore[misc]
        report = group.memory_report()  # type: ignore[attr-defined]
        assert report["oom_kills"] == 0
        assert 0 < report["max_usage_bytes"] <= n_bytes


def in_group(
    group: CountedGroup, module: str, *words: str | Path, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a module as a command in a control group."""
    return subprocess.run(
        [sys.executable, "-m", module, *map(str, words)],
        cwd=ROOT,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        preexec_fn=group.add,
        check=False,
    )


def words(command: str, model: Path, folder: Path) -> list[str | Path]:
    """A command line without its budget, that does all it does, and little of it."""
    return {  # type: ignore[return-value]
        "chat": ["chat", model, "-p", "hello", "--max-tokens", "4", "--temperature", "0", *ONE_THREAD],
        "bench": ["bench", model, *SHORT, "--requests", "3", *ONE_THREAD],
        "evaluate": ["evaluate", model, model, "--tokens", "128", "--chunk-tokens", "128", *ONE_THREAD],
        "imatrix": ["imatrix", model, TEXT, "--chunks", "1", "--output", folder / "i.gguf", *ONE_THREAD],
        "plan": ["plan", model, "--fresh", *ONE_THREAD],
        "pareto": ["pareto", model, "--fresh", "--measure", "1", *ONE_THREAD],
    }[command]


@pytest.mark.parametrize(
    ("command", "mib"),
    [
        pytest.param(command, mib, marks=[pytest.mark.thorough] if command == "plan" else [])  # pareto plans, too
        for command in SIZES
        if command != "worker"
        for mib in SIZES[command][:MOST]
    ],
)
def test_a_command_lives_in_a_group_as_large_as_its_budget(tmp_path: Path, model: Path, command: str, mib: int) -> None:
    env = {f"XDG_{name}_HOME": str(tmp_path / name) for name in ("CACHE", "CONFIG", "STATE")}
    with group_of(mib * MIB) as group:
        line = [*words(command, model, tmp_path), "--memory", f"{mib}MiB"]
        line += ["--json"] if command in ("chat", "bench") else []
        module = BRIEF if command in ("pareto", "plan") else "apps.cli"
        done = in_group(group, module, *line, env={**os.environ, **env})
        assert done.returncode == 0, done.stderr
    if command == "bench":
        said = json.loads(done.stdout)
        assert 0 < said["peak_rss_bytes"] <= mib * MIB
        assert (said["paging"]["streamed_bytes"] > 0) == (mib == min(SIZES[command]))


@pytest.mark.usefixtures("measured_briefly")
@pytest.mark.parametrize("mib", SIZES["worker"][:MOST])
def test_a_worker_lives_in_a_group_as_large_as_its_limit_with_all_its_sessions(
    tmp_path: Path, model: Path, mib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_folders(monkeypatch, tmp_path)
    with (
        group_of(mib * MIB) as group,
        worker(tmp_path / "worker", "--memory", f"{mib}MiB", *ONE_THREAD, preexec=group.add) as first,
    ):
        workers = ("--workers", first.address, *ONE_THREAD)
        for line in (
            ("plan", model, "--fresh", *workers),
            ("bench", model, *SHORT, "--shares", "1,1", "--parallel", "pipeline", *workers),
        ):
            done = edge_here(*line)
            assert done.returncode == 0, done.stderr


def test_the_group_of_these_tests_kills() -> None:
    """Or they would prove nothing."""
    with pytest.raises(AssertionError, match="assert 1 == 0"), group_of(48 * MIB) as group:
        subprocess.run([sys.executable, "-c", "x = bytearray(96 << 20)"], preexec_fn=group.add, check=False)


def test_a_network_larger_than_its_budget(tmp_path: Path) -> None:
    """100 MB of weights, of which about 30 fit."""
    network = tmp_path / "network.onnx"
    onnx.save(mlp((1024,) * 25, batch=1), network)
    np.savez(tmp_path / "x.npz", x=np.ones((1, 1024), np.float32))
    line = ["--input", str(tmp_path / "x.npz"), "--memory", "150MiB", "--repeats", "2", *ONE_THREAD, "--json"]
    with group_of(150 * MIB) as group:
        done = in_group(group, "apps.cli", "run", network, *line)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["memory"]["total_bytes"] <= result["memory"]["budget_bytes"] == 150 * MIB
    assert result["paging"]["streamed_bytes"] > 40 * MIB
    assert result["latency_ms_median"] > 0
