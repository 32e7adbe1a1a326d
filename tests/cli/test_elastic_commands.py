"""Test commands on a file with several sizes: create, inspect, run in a memory range, and refused uses."""

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from edge.models import shapes, synth
from edge.models.demo import MODEL_PATH
from tests.cli.test_serve_command import served
from tests.cli.test_serve_models_command import configs_of
from tests.support.helpers import assert_one_line_error, run_edge, start_edge, until

HOW = ("--types", "q4_0,q8_0", "--sizes", "2", "--context", "256", "--minutes", "0.05", "--threads", "1")
WAIT_S = 240.0


@pytest.fixture(scope="module")
def elastic_file(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], str]:
    """The bundled model in two sizes, what the command said in JSON, and beside it."""
    out = tmp_path_factory.mktemp("elastic") / "elastic.gguf"
    refused = run_edge("quantize", MODEL_PATH, out, "--elastic", "1MiB..400MiB", *HOW, timeout=WAIT_S)
    assert_one_line_error(refused, 4, "the smallest file has")
    assert not out.exists()
    least = re.search(r"Take --fit (\d+)MiB", refused.stderr)
    assert least
    sizes = f"{least[1]}MiB..400MiB"  # with room for a process that is larger this time, and too little for q8_0
    done = run_edge("quantize", MODEL_PATH, out, "--elastic", sizes, *HOW, "--json", timeout=WAIT_S)
    assert done.returncode == 0, done.stderr
    return out, json.loads(done.stdout), done.stderr


def test_the_size_is_said_before_and_is_at_most_the_sum(elastic_file: tuple[Path, dict[str, Any], str]) -> None:
    out, said, baseline = elastic_file
    n_bytes = out.stat().st_size
    assert said["type"] == "elastic"
    assert said["predicted_bytes"] == said["size_bytes"] == n_bytes
    assert f"will have {n_bytes:,} bytes" in baseline
    large, small = said["sizes"]
    assert large["size_bytes"] > small["size_bytes"]
    assert n_bytes <= large["size_bytes"] + small["size_bytes"]
    assert large["measured_divergence"] < small["measured_divergence"]
    assert [path.name for path in out.parent.iterdir()] == [out.name]
    info = json.loads(run_edge("model", "info", out, "--json").stdout)
    assert [size["size_bytes"] for size in info["sizes"]] == [large["size_bytes"], small["size_bytes"]]


def test_a_chat_runs_in_a_range_with_the_answer_of_its_largest_size(
    elastic_file: tuple[Path, dict[str, Any], str],
) -> None:
    ask = ("chat", elastic_file[0], "-p", "What is 27 plus 38?", "--temperature", "0", "--json", "--prefix-cache", "0")
    options = ("--threads", "1", "--context", "256")
    ranged, whole = (run_edge(*ask, *options, "--memory", memory) for memory in ("250MiB..2GiB", "2GiB"))
    assert ranged.returncode == whole.returncode == 0, ranged.stderr
    assert json.loads(ranged.stdout)["text"] == json.loads(whole.stdout)["text"]
    assert json.loads(ranged.stdout)["memory"]["changes"] == []
    assert "memory: " in ranged.stderr


def test_a_server_runs_in_a_range(elastic_file: tuple[Path, dict[str, Any], str]) -> None:
    path, _, _ = elastic_file
    options = ("--memory", "250MiB..2GiB", "--prefer", "quality")
    with served(str(path), *options, "--context", "512", "--prefix-cache", "0") as server:
        answer = server.answer()
        assert answer
        server.process.send_signal(signal.SIGUSR1)  # the model is idle: it leaves
        until(lambda: server.get("/v1/memory")["models"] == {}, "its memory to be given back")
        assert server.get("/v1/memory")["target_bytes"] == 0
        server.process.send_signal(signal.SIGUSR2)
        until(lambda: server.get("/v1/memory")["target_bytes"] is None, "memory that nobody asks for")
        assert server.answer() == answer
        assert server.get("/v1/memory")["memory_bytes"] == 2 << 30


def test_a_chat_gives_memory_back_at_a_signal_and_its_answer_stays(tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    synth.synthesize(model, shapes.shape("llama", layers=5, embd=1024, ff=4096, heads=8, kv=4, vocab=1024), "f16")
    ask = ("chat", model, "-p", "hello", "--temperature", "0", "--max-tokens", "40", "--prefix-cache", "0")
    options = ("--threads", "1", "--context", "256", "--batch", "32", "--allow-repetition", "--draft", "off")
    command = (*ask, *options, "--memory", "200MiB..2GiB")
    alone = run_edge(*command)
    assert alone.returncode == 0, alone.stderr
    with start_edge(*command) as process:
        assert process.stdout is not None
        begun = os.read(process.stdout.fileno(), 1)  # `communicate` would not see what a buffer holds
        process.send_signal(signal.SIGUSR1)
        text, errors = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, errors
    assert (begun + text).decode() == alone.stdout
    assert b"read for every token" in errors
    assert "read for every token" not in alone.stderr


def test_a_server_has_the_range_and_the_preference(monkeypatch: pytest.MonkeyPatch) -> None:
    configs, _, _ = configs_of(monkeypatch, MODEL_PATH, "--memory", "1GiB..2GiB", "--prefer", "quality")
    options = configs[MODEL_PATH.stem].engine_options()
    assert (options.least_memory, options.memory, options.prefer) == (1 << 30, 2 << 30, "quality")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("worker", "--memory", "2GiB..1GiB"), "the smaller size first"),
        (("plan", "--memory", "1GiB..2GiB"), "--memory: needs a size such as 2GiB"),
        (("chat", "--memory", "3GiB..1GiB"), "the smaller size first"),
        (("chat", "--memory", "1GiB..x"), "needs a size such as"),
        (("chat", "--prefer", "quality", "-p", "x"), "needs a memory range"),
        (("chat", "--memory", "1GiB", "--prefer", "speed", "-p", "x"), "needs a memory range"),
        (("quantize", "a.gguf", "b.gguf", "--elastic", "2GiB"), "needs two sizes"),
        (("quantize", "a.gguf", "b.gguf", "--sizes", "3", "--size", "1GiB"), "is for --elastic"),
        (("quantize", "a.gguf", "b.gguf", "--elastic", "1GiB..2GiB", "--fit", "1GiB"), "contradict each other"),
        (("quantize", "a.gguf", "b.gguf", "--elastic", "1GiB..2GiB", "--report"), "largest size"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(arguments: tuple[str, ...], words: str) -> None:
    assert_one_line_error(run_edge(*arguments), 2, words)


def test_bits_that_change_are_not_reproducible() -> None:
    done = run_edge("chat", "--memory", "1GiB..2GiB", "--reproducible", "-p", "x")
    assert done.returncode != 0
    assert "one memory size" in done.stderr
