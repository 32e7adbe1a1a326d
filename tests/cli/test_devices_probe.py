"""Test `edge devices probe`: this machine as a table and as JSON, and its agreement with `edge devices`."""

import json
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import onnx
import pytest

from apps import cli
from devices import machine, machine_disk
from devices.machine import Machine, Rate
from devices.profile import DeviceProfile, describe
from edge.profiling.machine import machine_rows
from quant.text import age_text
from tests.support.helpers import ROOT, assert_one_line_error, run_edge
from tests.support.onnx_pipelines import residual

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def edge_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """`edge devices` in this process, measuring for a moment only."""
    monkeypatch.setattr(machine.probe, "_MOST_MEMORY_MB", 64)  # type: ignore[attr-defined]
    monkeypatch.setattr(machine_disk, "_MOST_BYTES", 16 << 20)
    monkeypatch.setattr(machine_disk, "_MOST_READ_S", 0.02)
    for name in ("STATE", "CACHE", "CONFIG"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name))

    def run(*args: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = cli.main(["devices", *args])
        return code, *capsys.readouterr()

    return run


def test_the_table(edge_devices: Run) -> None:
    code, out, err = edge_devices("probe", "--folder", str(ROOT))
    assert (code, err) == (0, "")
    name, *lines = out.splitlines()
    assert name == name.strip()
    rows = dict(re.split(r"  +", line.strip(), maxsplit=1) for line in lines)
    assert list(rows)[:8] == [
        "processor",
        "cores",
        "threads",
        "instruction sets",
        "memory",
        "memory bandwidth",
        "disk reads",
        "GPU",
    ]
    assert re.fullmatch(r"[0-9.e+]+ GB/s, [0-9]+ threads?, now", rows["memory bandwidth"])
    assert re.fullmatch(rf"[0-9.e+-]+ GB/s, [a-z]+, now \({re.escape(str(ROOT))}\)", rows["disk reads"])


def test_the_json_and_what_is_measured_again(edge_devices: Run) -> None:
    def measure(*args: str) -> dict[str, dict[str, float]]:
        code, out, err = edge_devices("probe", "--json", "--folder", str(ROOT), *args)
        assert (code, err, len(out.splitlines())) == (0, "", 1)
        result: dict[str, dict[str, float]] = json.loads(out)
        return result

    first, again, fresh = measure(), measure(), measure("--fresh")
    assert first.keys() == Machine.__dataclass_fields__.keys()
    assert first["profile"].keys() == DeviceProfile.__dataclass_fields__.keys()
    for what in ("memory", "disk"):
        assert first[what].keys() == {"bytes_per_s", "how", "measured_at", "age_s"}
        assert again[what]["measured_at"] == first[what]["measured_at"] < fresh[what]["measured_at"]
        assert again[what]["age_s"] > first[what]["age_s"] >= 0
        assert first[what]["bytes_per_s"] > 1e6


def test_the_folder_is_where_the_disk_is_measured(edge_devices: Run) -> None:
    with tempfile.TemporaryDirectory(dir=ROOT, prefix=".probe-") as folder:
        result = json.loads(edge_devices("probe", "--json", "--folder", folder)[1])
        assert result["disk_folder"] == folder
    default = json.loads(edge_devices("probe", "--json")[1])["disk_folder"]
    assert default.endswith("CACHE/edge")
    assert Path(default).is_dir()


def test_what_is_not_measured_has_a_line_below(edge_devices: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=0, total=1 << 30))
    code, out, _ = edge_devices("probe", "--folder", str(ROOT))
    assert code == 0
    assert re.search(r"^  disk reads +not measured \(", out, re.MULTILINE)
    assert re.fullmatch(r"disk not measured: .* of room; free some", out.splitlines()[-1])


def test_the_word_wins_wherever_it_stands(edge_devices: Run) -> None:
    assert "profile" in json.loads(edge_devices("--json", "probe")[1])
    code, _, err = edge_devices("probe", "none.gguf")
    assert code == 3  # it would be a model, not an address
    assert "none.gguf" in err


def test_devices_are_still_listed_as_before(edge_devices: Run) -> None:
    code, out, _ = edge_devices("--no-discover", "--json", "--timeout", "0.5")
    assert (code, json.loads(out)) == (0, {"devices": [], "links": [], "links_failed": []})


def test_usage() -> None:
    done = run_edge("devices", "probe", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "usage: edge devices probe" in done.stdout
    assert "edge devices probe" in run_edge("devices", "--help").stdout
    assert_one_line_error(run_edge("devices", "probe", "--folder", "/nowhere"), 2, "edge devices probe:", "/nowhere")
    assert_one_line_error(run_edge("devices", "probe", "--links"), 2, "--links")


def test_rows_of_all_kinds() -> None:
    profile = DeviceProfile.from_json(
        {
            **describe("here", gpu="Metal").to_json(),
            "battery_percent": 80.0,
            "plugged": False,
            "temperature_c": 71.5,
            "cores_logical": 12,
        }
    )
    rate = Rate(12.34e9, "2 threads", 0.0)
    rows = dict(machine_rows(Machine(profile, 4, 4, 0.5, (), "hot", rate, None, "/models")))
    assert rows["cores"] == "4 performance, 4 efficiency; 12 logical; limited to 0.5"
    assert rows["memory bandwidth"].startswith("12.3 GB/s, 2 threads, ")
    assert rows["disk reads"] == "not measured (/models)"
    assert (rows["GPU"], rows["battery"]) == ("Metal", "80 %, not plugged in")
    assert rows["temperature"] == "71.5 C, hot"
    assert rows["instruction sets"] == "none that ggml has kernels for"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.2, "now"), (5, "5 s ago"), (60, "1 min ago"), (3599, "60 min ago"), (7200, "2 h ago")]
)
def test_ages(seconds: float, text: str) -> None:
    assert age_text(seconds) == text


@pytest.mark.usefixtures("measured_briefly")
def test_with_a_model_its_parts_are_measured(edge_devices: Run, tmp_path: Path) -> None:
    network = tmp_path / "chain.onnx"
    onnx.save(residual(), str(network))
    code, out, _ = edge_devices("probe", str(network), "--dim", "batch=2", "--json")
    said = json.loads(out)
    assert (code, said["kind"], said["model"]) == (0, "onnx", str(network))
    (device,) = said["devices"]
    assert device["address"] == "local"
    assert device["measured_age_s"] >= 0
    code, out, _ = edge_devices("probe", str(network), "--dim", "batch=2")
    assert code == 0
    assert re.search(r"device +whole +parts +longest part", out)
    assert re.search(r"^local +[\d.e-]+ ms +\d+ ", out, re.M)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--workers", "127.0.0.1:1"], "--workers needs a MODEL"),
        (["--insecure"], "--insecure needs a MODEL"),
        (["model.gguf", "--folder", "."], "--folder is about this machine alone"),
    ],
)
def test_options_that_are_not_for_what_is_asked(edge_devices: Run, args: list[str], said: str) -> None:
    code, _, err = edge_devices("probe", *args)
    assert code == 2
    assert said in err
