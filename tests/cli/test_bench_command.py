"""`edge bench`: its table, its JSON, what each option does, and bad input."""

import compileall
import json
import os
import re
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from apps.cli import build_parser
from apps.commands.bench import run
from devices.energy import EnergyMeter
from edge.llm.options import EngineOptions
from edge.models.demo import MODEL_PATH
from tests.conftest import Synthetic
from tests.support import ROOT
from tests.support.helpers import assert_one_line_error, edge_here, run_edge

QUICK = ("--threads", "1", "--prompt-tokens", "16", "--gen-tokens", "4", "--repeats", "2")
KEYS = {
    "model": str,
    "architecture": str,
    "weight_bytes": int,
    "threads": int,
    "prompt_tokens": int,
    "gen_tokens": int,
    "repeats": int,
    "prefill_tokens_per_s": float,
    "prefill_tokens_per_s_deviation": float,
    "prefill_tokens_per_s_median": float,
    "decode_tokens_per_s": float,
    "decode_tokens_per_s_deviation": float,
    "decode_tokens_per_s_median": float,
    "decode_ms_median": float,
    "decode_ms_p10": float,
    "decode_ms_p90": float,
    "others_cores": float,
    "requests": int,
    "throughput_tokens_per_s": type(None),
    "throughput_tokens_per_s_deviation": type(None),
    "decode_bytes": int,
    "bandwidth_gbps": float,
    "memory_bandwidth_gbps": float,
    "peak_rss_bytes": int,
    "joules_per_token": type(EnergyMeter().joules()),
    "energy_source": type(None) if EnergyMeter().joules() is None else str,
    "speculation": type(None),
    "memory": type(None),
    "gpu_layers": type(None),
    "paging": type(None),
}


def bench_json(*args: str | Path, run: Callable[..., "subprocess.CompletedProcess[str]"] = edge_here) -> dict[str, Any]:
    """The object `edge bench --json` prints; it must succeed."""
    done = run("bench", *QUICK, "--json", *args)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def options_used(monkeypatch: pytest.MonkeyPatch, *args: str) -> EngineOptions:
    """The options with which a command line would load the engine."""

    class Seen(Exception):
        pass

    def engine(path: Path, options: EngineOptions, **_: object) -> None:
        raise Seen(options)

    with monkeypatch.context() as patch:
        patch.setattr("edge.llm.engine.Engine", engine)
        with pytest.raises(Seen) as seen:
            run(build_parser().parse_args(["bench", *QUICK, *args]))
    options: EngineOptions = seen.value.args[0]
    return options


def test_the_table_is_markdown_with_prefill_and_decode() -> None:
    done = run_edge("bench", *QUICK)
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    header, rule, prefill, decode, empty, summary, *scatter = done.stdout.splitlines()
    assert header == "| model | size | threads | test | tokens/s | median |"
    assert re.fullmatch(r"(\| -+:? )+\|", rule)
    start = rf"\| {re.escape(MODEL_PATH.name)} \| [\d.]+ MiB \| 1 \| "
    assert re.fullmatch(start + r"prefill 16 \| [\d.]+ ± [\d.]+ \| [\d.]+ \|", prefill)
    assert re.fullmatch(start + r"decode 4 \| [\d.]+ ± [\d.]+ \| [\d.]+ \|", decode)
    assert empty == ""
    assert all(line.startswith("these figures scatter: ") for line in scatter)
    assert re.fullmatch(r"decode: [\d.]+ ms a token .* GB/s .* peak memory [\d.]+ \wiB", summary)


def test_json_has_the_documented_keys_and_they_agree_with_each_other() -> None:
    for package in ("apps", "devices", "edge", "partition", "quant", "transport"):  # compiling would take memory
        compileall.compile_dir(ROOT / package, quiet=2)
    result = bench_json(run=partial(run_edge, preexec=os.setsid))  # not forked: its memory is that of a process
    assert {key: type(value) for key, value in result.items()} == KEYS
    assert all(result[key] > 0 for key, kind in KEYS.items() if kind in (int, float) and key != "others_cores")
    assert result["others_cores"] >= 0
    assert result["decode_ms_p10"] <= result["decode_ms_median"] <= result["decode_ms_p90"]
    assert (result["model"], result["architecture"]) == (str(MODEL_PATH), "llama")
    assert result["decode_bytes"] < result["weight_bytes"] < result["peak_rss_bytes"]
    assert result["peak_rss_bytes"] < 200 << 20  # measuring the memory takes little more than the model had
    achieved = result["decode_bytes"] / (result["decode_ms_median"] / 1e3) / 1e9
    assert result["bandwidth_gbps"] == pytest.approx(achieved)


def test_draft_measures_drafts_too() -> None:
    result = bench_json("--draft", "ngram", "--context", "64")["speculation"]
    assert result["draft"] == "ngram"
    assert list(result["pass_ms"]) == ["1", "2", "4", "8", "16"]
    assert all(ms > 0 for ms in (*result["pass_ms"].values(), result["tokens_per_s"], result["plain_tokens_per_s"]))
    table = edge_here("bench", *QUICK, "--draft", "ngram").stdout
    assert re.search(r"^drafts: ngram: .* tokens/s, .* without; rows of a pass: .* ms for 1, ", table, re.MULTILINE)


def test_model_is_the_file_that_is_measured(synthetic: Synthetic) -> None:
    path = synthetic("qwen3")
    result = bench_json(path)
    assert (result["model"], result["architecture"]) == (str(path), "qwen3")


def test_tokens_and_repeats_are_what_was_asked_for() -> None:
    result = bench_json("--prompt-tokens", "5", "--gen-tokens", "3", "--repeats", "1")
    assert (result["prompt_tokens"], result["gen_tokens"], result["repeats"]) == (5, 3, 1)
    assert result["prefill_tokens_per_s_deviation"] == result["decode_tokens_per_s_deviation"] == 0


def test_several_requests_have_a_throughput_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    result = bench_json("--requests", "3")
    assert result["requests"] == 3
    assert result["throughput_tokens_per_s"] > 0
    done = edge_here("bench", *QUICK, "--requests", "3")
    assert re.search(r"\| 3 requests \| [\d.]+ ± [\d.]+ \|", done.stdout)
    options = options_used(monkeypatch, "--requests", "3")
    assert (options.sequences, options.context) == (3, 60)
    assert_one_line_error(edge_here("bench", *QUICK, "--requests", "3", "--context", "32"), 2, "3 requests")


def test_threads_are_what_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert options_used(monkeypatch, "--threads", "3").threads == 3
    assert bench_json()["threads"] == 1


def test_the_context_is_just_what_the_run_needs_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert options_used(monkeypatch).context == 20
    assert options_used(monkeypatch, "--context", "64").context == 64


def test_engine_options_reach_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    options = options_used(
        monkeypatch,
        *("--batch", "8", "--kv-type", "q8_0", "--flash-attention", "on", "--gpu-layers", "0", "--no-repack"),
    )
    assert options == EngineOptions(
        context=20,
        batch=8,
        threads=1,
        gpu_layers=0,
        repack=False,
        flash_attention="on",
        kv_type="q8_0",
    )


def test_more_tokens_than_the_context_holds() -> None:
    assert_one_line_error(edge_here("bench", *QUICK, "--context", "19"), 2, "16 prompt and 4 generated", "19")


@pytest.mark.parametrize("option", ["--prompt-tokens 0", "--gen-tokens 0", "--repeats 0", "--threads 0", "--repeats x"])
def test_a_value_out_of_range(option: str) -> None:
    assert_one_line_error(edge_here("bench", *option.split()), 2, option.split()[0])


def test_a_missing_file(tmp_path: Path) -> None:
    assert_one_line_error(edge_here("bench", *QUICK, tmp_path / "none.gguf"), 3, "no such file")
