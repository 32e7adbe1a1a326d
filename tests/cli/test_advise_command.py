"""`edge advise`: what is printed, what each option does, that it plans as `edge plan` does, and bad input."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from apps.commands import advise
from devices.catalog import CATALOG
from edge.models.catalog import catalog, read_catalog
from edge.models.synth import synthesize
from edge.planning.advise import FORMAT, TASKS
from tests.support.commands import Run, assert_refused, main
from tests.support.deployments import shared_workers
from tests.support.workers import Worker, worker

pytestmark = pytest.mark.usefixtures("measured_briefly")

FEW = ("--models", "qwen3-0.6b,llama-3.2-1b,qwen3-4b,llama-3.1-8b")
TOO_LARGE = ("--models", "llama-3.3-70b", "--types", "f32")
LAPTOP = ("--presets", "laptop", *FEW)
ROW_KEYS = {
    "model", "type", "parameters", "bits_per_weight", "size_bytes", "context", "licence", "source", "scores",
    "placement", "figures", "measured", "why", "on_front", "command", "memory_bytes", "tokens_per_s", "ttft_s",
    "answer_s", "within_s", "pull",
}  # fmt: skip
MINE = """
[[model]]
name = "mine"
repo = "me/mine-GGUF"
file = "mine-Q4_0.gguf"
about_bytes = 1_000_000
licence = "mit"
types = ["q4_0", "q8_0"]
parameters = 1.84e6
shape = { arch = "llama", layers = 2, embd = 256, ff = 512, heads = 4, vocab = 1024, context = 2048 }
"""


@pytest.fixture(name="edge")
def in_this_process(capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*args: str | Path) -> tuple[int, str, str]:
        capsys.readouterr()
        return main("advise", *args), *capsys.readouterr()

    return run


@pytest.fixture(name="mine", scope="module")
def catalog_of_one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("catalog") / "models.toml"
    path.write_text(MINE)
    return path


@pytest.fixture(scope="module", name="one")
def a_worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    with shared_workers(tmp_path_factory, "one") as [first]:
        yield first


def advised(edge: Run, *args: str | Path) -> dict[str, Any]:
    code, out, error = edge(*args, "--json")
    assert code == 0, error
    values: dict[str, Any] = json.loads(out)
    return values


def named(result: dict[str, Any], model: str, type_name: str = "q8_0") -> dict[str, Any]:
    [row] = [row for row in result["rows"] if (row["model"], row["type"]) == (model, type_name)]
    return dict(row)


def test_json_has_what_is_documented(edge: Run) -> None:
    result = advised(edge, *LAPTOP)
    assert {*result} == {
        "format", "task", "prompt_tokens", "answer_tokens", "context", "devices", "memory_bytes", "rows", "notes",
    }  # fmt: skip
    assert (result["format"], result["task"], result["prompt_tokens"], result["answer_tokens"]) == (
        FORMAT,
        "chat",
        128,
        200,
    )
    assert result["devices"] == ["laptop"]
    assert {(row["model"], row["type"]) for row in result["rows"]} == {
        ("qwen3-0.6b", "q8_0"), ("llama-3.2-1b", "q4_k_m"), ("llama-3.2-1b", "q8_0"), ("qwen3-4b", "q4_k_m"),
        ("qwen3-4b", "q8_0"), ("llama-3.1-8b", "q4_k_m"), ("llama-3.1-8b", "q8_0"),
    }  # fmt: skip
    for row in result["rows"]:
        assert {*row} == ROW_KEYS
        assert row["size_bytes"] * 8 == pytest.approx(row["parameters"] * row["bits_per_weight"])
        assert row["answer_s"] == pytest.approx(row["ttft_s"] + 199 / row["tokens_per_s"])
        assert row["within_s"] == next((line for line in (10, 30) if row["answer_s"] <= line), None)
        assert (row["placement"], row["figures"], row["measured"]) == ("resident", "preset", [])
        assert result["memory_bytes"]["laptop"] > row["memory_bytes"]["laptop"] > row["size_bytes"] * 0.9
        assert row["pull"] in row["command"]
        assert row["pull"].partition(":")[2] in ("", row["type"])
    [score] = named(result, "llama-3.2-1b")["scores"]
    assert (score["name"], score["value"]) == ("MMLU, 5 shots", 49.3)


def test_a_preset_takes_what_its_bandwidth_says(edge: Run) -> None:
    """Decoding reads all weights but rows of the token table: bytes over bandwidth, and the step itself."""
    row = named(advised(edge, *LAPTOP), "llama-3.1-8b", "q4_k_m")
    seconds = row["size_bytes"] / CATALOG["laptop"].memory_bytes_per_s
    assert 0.9 * seconds < 1 / row["tokens_per_s"] < 1.05 * seconds


def test_the_front_are_those_that_are_larger_than_all_that_answer_sooner(edge: Run) -> None:
    rows = advised(edge, "--presets", "laptop", "--models", "qwen3-0.6b,gpt-oss-20b,llama-3.1-8b,qwen3-14b")["rows"]
    assert {row["on_front"] for row in rows} == {True, False}
    assert [row["answer_s"] for row in rows] == sorted(row["answer_s"] for row in rows)
    for row in rows:
        better = [
            item for item in rows if item["answer_s"] <= row["answer_s"] and item["size_bytes"] >= row["size_bytes"]
        ]
        assert row["on_front"] == (better == [row]), row


def test_it_plans_as_edge_plan_does(edge: Run, mine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file of the same shape, with random weights, on the same devices has the same prediction."""
    model = read_catalog(mine)[0]
    assert model.shape is not None
    cluster = tmp_path / "cluster.toml"
    cluster.write_text(
        '[[device]]\nname = "a"\naddress = "local"\npreset = "pi4"\n[[device]]\nname = "b"\npreset = "pi5"\n'
        "[[link]]\ndelay_ms = 0.001\nbandwidth_mbps = 100000\n"
    )
    row = named(advised(edge, "--catalog", mine, "--models", "mine", "--cluster", cluster), "mine")
    synthesize(tmp_path / "mine.gguf", model.shape, "q8_0")
    work = ("--context", "2048", "--prompt-tokens", "128", "--depth", "228", "--concurrency", "1")
    assert main("plan", tmp_path / "mine.gguf", "--cluster", cluster, *work, "--json") == 0
    planned = json.loads(capsys.readouterr().out)["predicted"]
    assert 1 / row["tokens_per_s"] == pytest.approx(planned["latency_s"])
    assert row["ttft_s"] == pytest.approx(planned["ttft_s"])
    names = {"local": "a", "b": "b"}
    assert row["memory_bytes"] == {names[device]: n for device, n in planned["memory_bytes"].items()}


def test_devices_are_estimated_unless_they_are_to_be_measured(edge: Run, mine: Path, one_worker: Worker) -> None:
    arguments = (
        "--catalog", mine, "--models", "mine", "--workers", one_worker.address, "--insecure", "--threads", "1",
    )  # fmt: skip
    for more, figures in ((), "estimated"), (("--measure",), "measured"):
        result = advised(edge, *arguments, *more)
        assert result["devices"] == ["local", "one"]
        for row in result["rows"]:
            assert row["figures"] == figures
            assert 0 < row["ttft_s"] < row["answer_s"]
    assert "session-opened" in one_worker.log()


def test_an_estimate_starts_nothing_on_a_worker(edge: Run, mine: Path, tmp_path: Path) -> None:
    with worker(tmp_path, "--name", "idle", "--threads", "1") as idle:
        result = advised(edge, "--catalog", mine, "--models", "mine", "--workers", idle.address, "--insecure")
        assert {row["figures"] for row in result["rows"]} == {"estimated"}
        assert "session-opened" not in idle.log()


def test_a_worker_that_does_not_answer_is_named(edge: Run, mine: Path) -> None:
    result = advised(edge, "--catalog", mine, "--models", "mine", "--workers", "127.0.0.1:1", "--threads", "1")
    assert any(note.startswith("planned without 127.0.0.1:1: ") for note in result["notes"])
    assert result["devices"] == ["local"]


def test_a_line_of_the_table_stands_above_a_model(edge: Run) -> None:
    code, out, _ = edge(*LAPTOP, "--models", "smollm2-135m,gemma-3-12b", "--types", "q4_k_m", "--all")
    assert code == 0
    assert re.findall(r"^(?:-- above|\S+-\d\S+)(?: 10| 30)?", out, re.M) == [
        "smollm2-135m",
        "-- above 30",
        "gemma-3-12b",
    ]


def test_the_table_has_lines_at_10_and_30_seconds(edge: Run) -> None:
    code, out, _ = edge(*LAPTOP)
    assert code == 0
    lines = out.splitlines()
    assert lines[0] == (
        "an answer of 200 tokens to a prompt of 128 tokens, on laptop; larger models usually answer better (only size"
        " is known)"
    )
    names = [line.split()[0] for line in lines[3:]]
    assert names.index("qwen3-0.6b") < lines.index("-- above 10 s --") - 3 < lines.index("-- above 30 s --") - 3
    assert re.search(
        r"^llama-3\.1-8b +q8_0 .* resident +edge chat bartowski/Meta-Llama-3\.1-8B-Instruct-GGUF:q8_0$", out, re.M
    )
    assert "others are" not in out
    assert "times are preset; nothing was downloaded" in out
    slow = ("--presets", "pi4", "--models", "qwen3-0.6b,qwen3-1.7b,llama-3.2-1b,qwen3-32b")
    _, few, _ = edge(*slow)
    _, every, _ = edge(*slow, "--all")
    [left] = re.findall(
        r"^(\d) others are not larger than a model that answers sooner, take more than 5 min", few, re.M
    )
    assert len(every.splitlines()) == len(few.splitlines()) + int(left) - 1
    assert "qwen3-32b" in every
    assert "qwen3-32b" not in few


def test_commands_run_the_file_of_the_type(edge: Run) -> None:
    result = advised(edge, *LAPTOP, "--types", "q4_k_m,q8_0,q6_k")
    commands = {(row["model"], row["type"]): row["command"] for row in result["rows"]}
    assert commands["llama-3.2-1b", "q4_k_m"] == "edge chat llama-3.2-1b"
    assert commands["llama-3.2-1b", "q8_0"] == "edge chat bartowski/Llama-3.2-1B-Instruct-GGUF:q8_0"
    assert commands["llama-3.2-1b", "q6_k"] == (
        "edge quantize bartowski/Llama-3.2-1B-Instruct-GGUF:q8_0 llama-3.2-1b-q6_k.gguf --type q6_k"
        " && edge chat llama-3.2-1b-q6_k.gguf"
    )
    long = advised(edge, *LAPTOP, "--task", "long")
    assert named(long, "qwen3-4b", "q4_k_m")["command"] == "edge chat qwen3-4b --context 8192"


def test_what_does_not_fit_is_paged_spread_or_said_to_be_too_large(edge: Run) -> None:
    large = ("--models", "qwen3-4b,qwen3-32b")
    small = advised(edge, "--presets", "pi4", *large)
    paged = named(small, "qwen3-4b")
    assert paged["placement"] == "paged"
    assert paged["command"].endswith(" --memory 3072MiB")
    assert paged["tokens_per_s"] < named(small, "qwen3-4b", "q4_k_m")["tokens_per_s"]
    spread = named(advised(edge, "--presets", "pi5,rtx-3060,rtx-3060", *large), "qwen3-32b", "q4_k_m")
    assert spread["placement"] == "spread"
    assert " --workers rtx-3060,rtx-3060-2" in spread["command"]
    assert spread["memory_bytes"].keys() >= {"rtx-3060", "rtx-3060-2"}


def test_options_change_the_result(edge: Run, mine: Path) -> None:
    plain = advised(edge, *LAPTOP)
    row = named(plain, "qwen3-4b")
    for task, prompt in (("code", 1024), ("long", 6000)):
        other = advised(edge, *LAPTOP, "--task", task)
        assert (other["task"], other["prompt_tokens"]) == (task, prompt)
        assert named(other, "qwen3-4b")["ttft_s"] > 5 * row["ttft_s"]
    fast = advised(edge, *LAPTOP, "--min-speed", "10")
    assert [item["model"] for item in plain["rows"] if item["tokens_per_s"] >= 10] == [
        item["model"] for item in fast["rows"]
    ]
    assert 0 < len(fast["rows"]) < len(plain["rows"])
    assert named(advised(edge, *LAPTOP, "--kv-type", "q8_0"), "qwen3-4b")["memory_bytes"] != row["memory_bytes"]
    assert {item["type"] for item in advised(edge, *LAPTOP, "--types", "q4_0")["rows"]} == {"q4_0"}
    assert named(advised(edge, "--presets", "pi5", *FEW), "qwen3-4b")["answer_s"] > 2 * row["answer_s"]
    assert {
        item["model"] for item in advised(edge, "--presets", "laptop", "--models", "mine", "--catalog", mine)["rows"]
    } == {"mine"}


def test_all_models_are_there_without_being_measured(edge: Run) -> None:
    result = advised(edge, "--presets", "laptop,laptop")
    assert result["devices"] == ["laptop", "laptop-2"]
    spread = [row["command"] for row in result["rows"] if "--workers" in row["command"]]
    assert spread
    assert all("--workers laptop-2" in command for command in spread)
    assert any(note.endswith("edge cluster invite laptop-2 joins such a device") for note in result["notes"])
    shaped = {model.name for model in catalog() if model.shape is not None and model.source}
    assert {row["model"] for row in result["rows"]} == shaped
    assert all(row["answer_s"] > 0 for row in result["rows"])


def test_what_fits_nowhere_is_last_with_the_reason(edge: Run) -> None:
    result = advised(edge, "--presets", "pi4", "--models", "llama-3.3-70b,smollm2-135m", "--types", "f32")
    small, large = result["rows"]
    assert (small["model"], small["placement"]) == ("smollm2-135m", "resident")
    assert large["placement"] == "none"
    assert re.search(r"no plan fits: the model needs [\d,]+ MiB", large["why"])
    assert (large["command"], large["answer_s"], large["memory_bytes"], large["on_front"]) == ("", None, None, False)


def test_memory_and_threads_are_of_this_device(edge: Run, mine: Path) -> None:
    options = ("--catalog", mine, "--models", "mine", "--types", "q8_0", "--threads", "1")
    few = advised(edge, *options, "--memory", "300MiB")
    assert few["rows"][0]["placement"] == "resident"
    assert few["rows"][0]["memory_bytes"]["local"] <= 300 << 20
    assert_refused(edge(*options, "--memory", "1MiB"), 2, "no model fits")
    assert_refused(edge(*options, "--memory", "1MiB", "--measure"), 7, "Use a larger --memory")


def test_a_picture_is_written(edge: Run, tmp_path: Path) -> None:
    path = tmp_path / "advice.png"
    code, out, error = edge("--presets", "laptop", "--models", "qwen3-0.6b,llama-3.2-1b,phi-4,qwen3-14b", "--png", path)
    assert code == 0, error
    assert path.read_bytes().startswith(b"\x89PNG")
    assert "qwen3-0.6b" in out
    assert_refused(edge(*LAPTOP, "--png", path), 2, "exists; --force overwrites it")
    assert edge(*LAPTOP, "--png", path, "--force")[0] == 0
    assert_refused(edge(*LAPTOP, "--png", tmp_path / "advice.jpg"), 2, "must end in .png")


def test_a_model_of_a_person_takes_the_place_of_a_known_one(edge: Run, tmp_path: Path) -> None:
    path = tmp_path / "models.toml"
    path.write_text(MINE.replace('"mine"', '"qwen3-4b"'))
    row = named(advised(edge, *LAPTOP, "--catalog", path), "qwen3-4b")
    assert row["parameters"] < 2e6


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--presets", "laptpo"], 2, "the preset 'laptpo' is unknown; choose from pi4, pi5"),
        (["--presets", "laptop", "--workers", "127.0.0.1:1"], 2, "are devices that are not measured: leave --workers"),
        (["--presets", "laptop", "--memory", "1GiB"], 2, "leave --memory or --presets out"),
        (["--workers", "127.0.0.1:1", "--cluster", "x.toml"], 2, "leave one of them out"),
        ([*LAPTOP, "--min-speed", "1000000"], 2, "no model makes 1e+06 tokens a second here; the most is"),
        ([*LAPTOP, "--types", "q4_x"], 2, "unknown type 'q4_x'"),
        (["--presets", "laptop", "--models", "qwen"], 2, "names 'qwen', but the catalog has no shape of it; it has "),
        (["--presets", "laptop", "--models", "lfm2.5-1.2b"], 2, "the catalog has no shape of it"),
        ([*TOO_LARGE, "--presets", "pi4"], 2, "no model fits: no plan fits: the model needs"),
        ([*LAPTOP, "--catalog", "nowhere.toml"], 3, "nowhere.toml: No such file"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(edge: Run, options: list[str], code: int, words: str) -> None:
    assert_refused(edge(*options), code, words)


@pytest.mark.parametrize(
    ("options", "words"),
    [(["--min-speed", "-1"], "needs a number above 0, got '-1'"), (["--task", "cha"], "did you mean chat?")],
)
def test_a_wrong_value_is_refused_with_what_is_right(
    edge: Run, options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        edge(*LAPTOP, *options)
    assert words in capsys.readouterr().err


def test_a_context_that_is_too_small_for_the_task_is_said(edge: Run, mine: Path) -> None:
    options = ("--presets", "laptop", "--catalog", mine, "--models", "mine", "--task", "long")
    assert_refused(edge(*options), 2, "no model has a context of 6200 tokens, which the task 'long' needs")


def test_names_for_help_are_those_of_the_library() -> None:
    assert tuple(TASKS) == advise.TASKS
