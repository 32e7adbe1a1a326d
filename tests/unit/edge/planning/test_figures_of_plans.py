"""Test the figures of plans, clusters and simulations: their units and their names."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from apps.commands import devices
from devices import remembered as cache
from devices.catalog import CATALOG
from devices.cluster_file import Cluster, ClusterDevice, ClusterLink
from devices.sizes import parse_bytes
from edge.cluster import failures
from edge.errors import WorkerError
from edge.models.demo import MODEL_PATH
from edge.pictures.front_points import relative_error, table
from edge.planning import describe
from edge.profiling.llm_survey import estimated
from edge.profiling.machine import rate_text
from edge.profiling.profile import ASSUMED_LINK, with_links, with_overrides
from partition.model.file import ModelFile
from partition.model.model import ModelShape
from partition.plan.plan import LOCAL
from partition.predict.objectives import OBJECTIVES
from partition.predict.prediction import Prediction, StagePrediction
from partition.predict.speeds import Curve, Links, LinkSpeed
from partition.simulate.result import Spread
from partition.slices.gguf_slice import limits
from quant.text import age_text, bytes_text, count_text, number_text
from tests.support.clock import Clock
from tests.support.planning import MS, device
from transport.errors import LinkClosed, LinkTimeout

GIB = 1 << 30


# --------------------------------------------------------------------------------------------- what a file says


def test_what_a_cluster_file_says_of_a_device() -> None:
    """Twice as fast: half the time for everything. Less memory than there is counts, more does not."""
    measured = device("pi:1", 2 * MS, half_s=1.5 * MS, head_s=4 * MS, step_s=1 * MS, token_s=1e-6, memory_bytes=2 * GIB)
    said = ClusterDevice("pi", "pi:1", memory_bytes=GIB, watts=5.0, speed=2.0, disk_bytes_per_s=1e8)
    result = with_overrides(measured, said)
    curves = (result.layer_s, result.half_layer_s, result.head_s, result.step_s)
    assert [curve.at(1) for curve in curves] == pytest.approx([1 * MS, 0.75 * MS, 2 * MS, 0.5 * MS])
    assert result.token_s == pytest.approx(5e-7)
    assert (result.name, result.memory_bytes, result.watts, result.disk_bytes_per_s) == ("pi", GIB, 5.0, 1e8)
    assert with_overrides(measured, ClusterDevice("pi", "pi:1", memory_bytes=4 * GIB)).memory_bytes == 2 * GIB
    assert with_overrides(measured, None) is measured


def test_a_preset_takes_what_its_memory_or_its_arithmetic_takes() -> None:
    file = ModelFile.open(MODEL_PATH)
    shape, preset = ModelShape.from_gguf(file), CATALOG["pi5"]
    layer_bytes = sum(limits(file).layer_bytes) / shape.n_layers
    weights = sum(tensor.n_values for name, tensor in file.tensors.items() if name.startswith("blk.")) / shape.n_layers
    result = estimated(ClusterDevice("pi", preset="pi5"), file)
    assert result.estimate
    assert result.layer_s.at(1) == pytest.approx(layer_bytes / preset.memory_bytes_per_s)
    assert result.layer_s.at(64) == pytest.approx(2 * 64 * weights / preset.flops)
    assert result.half_layer_s.at(64) == pytest.approx(64 * weights / preset.flops)
    assert result.head_s.at(1) == pytest.approx(shape.head_bytes / preset.memory_bytes_per_s)
    assert result.token_s == pytest.approx(
        shape.n_heads_kv[0] * (shape.head_k + shape.head_v) * 2 / preset.memory_bytes_per_s
    )
    assert (result.memory_bytes, result.disk_bytes_per_s) == (preset.memory_bytes, preset.disk_bytes_per_s)


def test_links_are_as_said_as_measured_or_assumed() -> None:
    names = ("desk", "pi", "tv")
    devices = (ClusterDevice("desk", LOCAL), *(ClusterDevice(name, f"{name}:1") for name in names[1:]))
    cluster = Cluster(devices, {frozenset(("desk", "pi")): ClusterLink(latency_s=0.003)})
    there, back = LinkSpeed(0.001, 1e8), LinkSpeed(0.001, 2e7)
    result = with_links(
        cluster, [LOCAL, "pi:1", "tv:1"], Links({(LOCAL, "pi:1"): there, ("pi:1", LOCAL): back})
    ).between
    assert (result[LOCAL, "pi:1"].latency_s, result[LOCAL, "pi:1"].bytes_per_s) == (0.003, 1e8)
    assert (result["pi:1", LOCAL].latency_s, result["pi:1", LOCAL].bytes_per_s) == (0.003, 2e7)
    assert result["tv:1", LOCAL] == result[LOCAL, "tv:1"] == ASSUMED_LINK


# --------------------------------------------------------------------------------------------- what people read

STAGE = StagePrediction(
    devices=(LOCAL, "pi:1"),
    what="layers 0-9",
    compute_s=0.020,
    busy_s=0.030,
    transfer_s=0.004,
    transfer_busy_s=0.001,
    memory_bytes={LOCAL: 3 * GIB, "pi:1": GIB},
    rows_s=Curve(((1, 0.02),)),
    sums_s=0.005,
    paged_bytes=512 << 20,
)


PREDICTED = Prediction(
    latency_s=0.025,
    throughput_per_s=50.0,
    ttft_s=1.5,
    prompt=128,
    energy_j=0.4,
    enter_s=0.001,
    stages=(STAGE,),
    in_flight=4,
    microbatches=2,
)


def test_a_plan_is_told_in_its_units() -> None:
    names = {LOCAL: "desk", "pi:1": "pi"}
    columns, (row,) = describe.stage_rows(PREDICTED, names)
    assert dict(zip(columns, row, strict=True)) == {
        "stage": "0",
        "device": "desk + pi",
        "holds": "layers 0-9",
        "computes": "20.0 ms, 5.00 of it sums",
        "then sends": "4.00 ms",
        "memory": "3.00 GiB + 1.00 GiB, pages 512 MiB",
    }
    rows = dict(describe.prediction_rows(PREDICTED, names))
    assert rows["latency"].startswith("25.0 ms a token")
    assert rows["throughput"].startswith("50.0 tokens/s")
    assert rows["TTFT"] == "1.50 s to the first token of a prompt of 128 tokens"
    assert rows["energy"] == "0.400 J a token"
    assert rows["bound"] == "computing on local and pi takes 15.0 of 25.0 ms"
    assert PREDICTED.memory_bytes == {LOCAL: 3 * GIB, "pi:1": GIB}
    assert OBJECTIVES["latency"].describe(0.025, "input") == "25.0 ms an input"
    assert OBJECTIVES["throughput"].describe(0.025) == "40.0 tokens/s"
    assert OBJECTIVES["ttft"].describe(1.5) == "1.50 s to the first token"
    assert OBJECTIVES["memory"].describe(GIB) == "1.00 GiB on the fullest device"
    assert OBJECTIVES["energy"].describe(0.4) == "0.400 J a token"


def test_a_devices_speed_is_told_in_its_units() -> None:
    pi = device("pi:1", 2 * MS, half_s=MS, head_s=4 * MS, memory_bytes=GIB)
    pi = with_overrides(pi, None)
    reported = dict(zip(devices.LLM_COLUMNS, devices._llm_row(pi), strict=True))
    assert (reported["layer"], reported["half"], reported["head"]) == ("2.00 ms", "1.00 ms", "4.00 ms")
    assert reported["prompt"] == f"{number_text(2 / 64)} ms"  # so many rows take as long as one
    assert reported["memory"] == "1.00 GiB"
    link = {"from": "desk", "to": "pi", "bytes_per_s": 12.5e6, "latency_s": 0.002, "estimate": False, "age_s": 120.0}
    reported = dict(zip(devices.LINK_COLUMNS, devices._link_row(link), strict=True))
    assert reported == {
        "from": "desk",
        "to": "pi",
        "latency": "2.00 ms",
        "bandwidth": "100 Mbit/s",
        "measured": "2 min ago",
    }


def test_rates_ages_and_sizes_in_words() -> None:
    measured: Any = SimpleNamespace(bytes_per_s=2.5e9, how="direct", age_s=7200.0)
    assert rate_text(measured) == "2.50 GB/s, direct, 2 h ago"
    assert [age_text(s) for s in (0.5, 59, 60, 3599, 3600)] == ["now", "59 s ago", "1 min ago", "60 min ago", "1 h ago"]
    assert [bytes_text(n) for n in (1000, 1536, 3 << 20, 5 << 29)] == ["1000 B", "1.50 KiB", "3.00 MiB", "2.50 GiB"]
    assert [count_text(n) for n in (999, 1500, 7_000_000, 1_100_000_000)] == ["999", "1.50 K", "7.00 M", "1.10 B"]
    assert [parse_bytes(text) for text in ("2GiB", "2G", "2gi", "3GB", "900MiB", "1.5MB", "12B")] == [
        2 << 30,
        2 << 30,
        2 << 30,
        3_000_000_000,
        900 << 20,
        1_500_000,
        12,
    ]


def test_a_prediction_above_what_was_measured_is_a_plus() -> None:
    point: dict[str, Any] = {
        "id": "p1",
        "label": "one",
        "knee": False,
        "on_front": True,
        "type": None,
        "devices": ["desk"],
        "parallel": "single",
        "error": None,
        "predicted": {"latency_s": 0.030, "throughput_per_s": 50.0, "memory_bytes": {"desk": GIB}},
        "measured": {"latency_s": 0.020, "throughput_per_s": 100.0, "memory_bytes": {"desk": 2 * GIB}},
    }
    assert relative_error(point, "latency_s") == pytest.approx(0.5)
    assert relative_error(point, "throughput_per_s") == pytest.approx(-0.5)
    columns, (row,) = table({"kind": "llm", "objectives": [], "points": [point], "devices": [], "exact": True})
    assert columns[2:] == ["latency ms", "measured", "tokens/s", "measured", "memory"]
    assert row[2:] == ["30", "20 (+50 %)", "50", "100 (-50 %)", "2.00 GiB"]


def test_figures_are_remembered_for_a_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock().install(monkeypatch, cache)
    saved = cache.Remembered("figures", tmp_path)
    saved.put("pi", 5)
    for later_s, result in ((0, (5, 0.0)), (86_399, (5, 86_399.0)), (86_402, None), (-10, None)):
        clock.now = later_s
        assert saved.get("pi") == result


def test_percentiles_lie_between_sorted_values() -> None:
    result = Spread.from_values([float(n) for n in range(101)][::-1])
    assert result == Spread(50.0, 50.0, 90.0, 99.0)
    assert Spread.from_values([1.0, 2.0]) == Spread(1.5, 1.5, pytest.approx(1.9), pytest.approx(1.99))


def test_the_error_that_says_why_is_told() -> None:
    killed, lost = WorkerError("pi: the engine process was killed"), LinkClosed("rank 1 went away")
    late: Any = SimpleNamespace(error="LinkTimeout")
    assert failures.failure_reason([killed], lost) is killed
    assert failures.failure_reason([late, killed]) is killed
    assert failures.failure_reason([late], lost) is late
    assert isinstance(failures.failure_reason([], LinkTimeout("rank 1")), LinkTimeout)
