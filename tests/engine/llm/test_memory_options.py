"""Test the options of a memory budget: their effects, their messages, and refused values."""

import json
from pathlib import Path
from typing import Any

import pytest

from apps.cli import build_parser
from apps.engine_options import engine_options
from apps.errors import UsageError
from edge.llm.options import MAX_IO_CHUNK, MAX_IO_THREADS, EngineOptions
from edge.models import shapes, synth
from edge.models.demo import MODEL_PATH
from tests.support.helpers import assert_one_line_error, edge_here, run_edge

MIB = 1 << 20
ASKED = ("-p", "hello", "--temperature", "0", "--max-tokens", "4", "--context", "256", "--threads", "1")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 110 MB, most of them in a few large matrices."""
    path = tmp_path_factory.mktemp("model") / "model.gguf"
    synth.synthesize(path, shapes.shape("llama", layers=4, embd=1024, ff=4096, heads=8, kv=4, vocab=1024), "f16")
    return path


def parsed(*args: str) -> EngineOptions:
    return engine_options(build_parser().parse_args(["chat", *args]))


def chat(model: Path, *options: str) -> dict[str, Any]:
    done = run_edge("chat", str(model), *ASKED, "--json", *options)
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_every_option_reaches_the_engine() -> None:
    options = parsed(
        *(
            "--memory",
            "3GiB",
            "--window",
            "64MiB",
            "--io-threads",
            "3",
            "--io-chunk",
            "2MiB",
            "--verify",
            "--batch",
            "64",
        )
    )
    assert options.memory == 3 << 30
    assert (options.window, options.io_threads, options.io_chunk) == (64 * MIB, 3, 2 * MIB)
    assert options.verify
    assert options.batch == 64
    nothing = parsed()
    assert (nothing.memory, nothing.window, nothing.io_threads, nothing.io_chunk, nothing.batch) == (None,) * 5
    assert not nothing.verify


@pytest.mark.parametrize("option", [("--window", "1MiB"), ("--io-threads", "2"), ("--io-chunk", "1MiB"), ("--verify",)])
def test_they_are_about_a_budget(option: tuple[str, ...]) -> None:
    with pytest.raises(UsageError, match=rf"{option[0]} needs a memory limit: give one with --memory SIZE"):
        parsed(*option)


def test_a_budget_goes_with_layers_on_a_gpu_but_not_with_adapters_there() -> None:
    assert parsed("--memory", "1GiB", "--gpu-layers", "3").gpu_layers == 3
    assert parsed("--memory", "1GiB", "--gpu-memory", "1GiB").gpu_memory == 1 << 30
    assert parsed("--memory", "1GiB", "--gpu-layers", "0", "--lora", "a.gguf").memory == 1 << 30
    with pytest.raises(UsageError, match="--lora does not go with both --memory and --gpu-layers"):
        parsed("--memory", "1GiB", "--gpu-layers", "3", "--lora", "a.gguf")


@pytest.mark.parametrize(
    "option", [("--io-threads", "0"), ("--io-threads", f"{MAX_IO_THREADS + 1}"), ("--io-chunk", f"{MAX_IO_CHUNK + 1}B")]
)
def test_what_is_out_of_range_is_refused_in_one_line(option: tuple[str, str]) -> None:
    assert_one_line_error(edge_here("chat", *ASKED, "--memory", "1GiB", *option), 2, option[0])


def test_too_small_a_budget_is_refused_in_one_line_with_the_least() -> None:
    done = edge_here("chat", str(MODEL_PATH), *ASKED, "--memory", "20MiB")
    assert_one_line_error(done, 4, "at least", "runtime", "20 MiB were given")


def test_chat_within_a_budget(model: Path) -> None:
    paged = chat(
        model, "--memory", "180MiB", "--window", "17MiB", "--io-threads", "3", "--io-chunk", "64KiB", "--verify"
    )
    free = chat(model)
    assert paged["token_ids"] == free["token_ids"]
    assert free["memory"] is None
    assert free["paging"] is None
    memory, paging = paged["memory"], paged["paging"]
    assert memory["budget_bytes"] == 180 * MIB
    assert sum(memory["parts"].values()) == memory["total_bytes"] <= 180 * MIB
    assert paging["window_bytes"] == 17 * MIB
    assert paging["io_threads"] == 3
    assert paging["io_chunk_bytes"] == 64 << 10
    assert paging["streamed_bytes"] > 10 * MIB
    assert paging["decode"]["bytes_per_token"] == pytest.approx(paging["streamed_bytes"], rel=0.5)
    assert paging["decode"]["disk_gbps"] > 0
    assert paging["decode"]["hit_rate"] is None


def test_the_budget_is_said_part_by_part_before_the_answer(model: Path) -> None:
    done = run_edge("chat", str(model), *ASKED, "--memory", "180MiB")
    assert done.returncode == 0
    [line] = [line for line in done.stderr.splitlines() if line.startswith("edge chat: memory: ")]
    for part in ("runtime", "KV cache", "resident weights", "window", "of 180 MiB", "are read for every token"):
        assert part in line


def test_bench_says_what_was_read(model: Path) -> None:
    request = ("--prompt-tokens", "16", "--gen-tokens", "3", "--repeats", "1", "--threads", "1", "--memory", "180MiB")
    done = run_edge("bench", str(model), *request)
    assert done.returncode == 0, done.stderr
    assert "memory: " in done.stdout
    assert "read a token at" in done.stdout
    result = json.loads(run_edge("bench", str(model), *request, "--json").stdout)
    assert result["paging"]["prefill"]["bytes_per_token"] < result["paging"]["decode"]["bytes_per_token"] / 4
    assert result["peak_rss_bytes"] <= 180 * MIB
