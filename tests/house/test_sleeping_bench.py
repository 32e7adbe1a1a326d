"""The benchmark of sleeping devices, with known values: what counts, what is measured again, what a lab is made of."""

import argparse
import json
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import bench_sleeping
from benchmarks.bench_sleeping import MOST_WAITED, STRETCHES, better, first_stretch, summary, unstretched
from benchmarks.core_waits import CoreWaits
from benchmarks.sleeping_labs import CABLE, FAR, GROUPED, SETTINGS, WIFI, Setting, lab_of, link_kinds
from benchmarks.sleeping_side import near
from devices.lab.config import parse_lab
from tests.support.clock import Clock

SETTING = Setting("some", ("pi4",) * 4, FAR, 2, CABLE)


def plan(key: str, latency_s: float, per_s: float, predicted_s: float = 1.0, waited: float = 0.0) -> dict[str, Any]:
    return {
        "key": key,
        "measured": {"latency_s": latency_s, "throughput_per_s": per_s},
        "predicted": {"latency_s": predicted_s, "throughput_per_s": 4.0},
        "waited": {"latency_s": 0.0, "throughput_per_s": waited},
        "requests": None,
    }


def test_the_process_that_waits_the_longest_counts_over_all_its_threads(tmp_path: Path) -> None:
    clock = Clock()

    def write(pid: int, *waited_ns: int) -> None:
        for thread, ns in enumerate(waited_ns):
            path = tmp_path / str(pid) / "task" / str(thread) / "schedstat"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"123456789 {ns} 7\n")

    def work() -> str:
        clock.sleep(2.0)
        write(1, 400_000_000, 600_000_000)
        write(2, 5_200_000_000)
        write(4, 100_000_000)  # began meanwhile
        return "done"

    write(1, 100_000_000, 500_000_000)
    write(2, 5_000_000_000)
    waits = CoreWaits(lambda: [1, 2, 3, 4], clock.perf_counter, tmp_path)
    assert waits.during(work) == ("done", pytest.approx((0.3 + 0.1) / 2.0))
    assert CoreWaits(lambda: [9], clock.perf_counter, tmp_path).during(lambda: 1) == (1, 0.0)


def args_of(only: str, minutes: float = 20.0, to: str | None = None) -> argparse.Namespace:
    return argparse.Namespace(only=only, tiny=False, requests=0, minutes=minutes, json=to)


def test_a_setting_whose_processes_waited_is_measured_again_in_a_slower_lab(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ran: list[tuple[str, float]] = []

    def measured(setting: Setting, model: Path, tiny: bool, requests: int, stretch: float, seconds: float) -> Any:
        ran.append((setting.name, stretch))
        late = setting.name == "4 Pi 4, LAN" and stretch < STRETCHES[1]
        plans = [plan("a", 1.0, 4.0), plan("b", 1.0, 4.0, waited=MOST_WAITED * (1.1 if late else 1.0))]
        plans[0]["waited"]["ttft_s"] = 1.0  # is not looked at
        row = {"name": setting.name, "devices": setting.devices, "again": [], "best": {}, "plans": plans}
        return {**row, "tried": stretch, "stretch": stretch}

    monkeypatch.setattr(bench_sleeping, "measured", measured)
    monkeypatch.setattr("os.geteuid", lambda: 0)
    result = bench_sleeping.measure(tmp_path, args_of("Pi 4, LAN", to=str(tmp_path / "figures")))
    # All of them come once before any is measured again.
    assert ran == [("4 Pi 4, LAN", STRETCHES[0]), ("8 Pi 4, LAN", STRETCHES[3]), ("4 Pi 4, LAN", STRETCHES[1])]
    row = result["settings"][0]
    assert row["stretch"] == STRETCHES[1]
    assert [again["stretch"] for again in row["again"]] == [STRETCHES[0]]
    assert json.loads((tmp_path / "figures").read_text())["summary"] == result["summary"]
    assert first_stretch(replace(SETTING, devices=("pi4",) * 5, link=WIFI)) == STRETCHES[1]
    assert first_stretch(replace(SETTING, devices=("pi4",) * 16)) == STRETCHES[0]  # over far links


def test_a_setting_that_fails_when_it_is_measured_again_keeps_its_figures(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ran: list[float] = []

    def measured(setting: Setting, model: Path, tiny: bool, requests: int, stretch: float, seconds: float) -> Any:
        ran.append(stretch)
        if len(ran) > 1:
            raise RuntimeError("no plan was measured")
        plans = [plan("a", 1.0, 4.4, waited=2 * MOST_WAITED)]
        row = {"name": setting.name, "devices": setting.devices, "again": [], "best": {}, "plans": plans}
        return {**row, "tried": stretch, "stretch": stretch}

    monkeypatch.setattr(bench_sleeping, "measured", measured)
    monkeypatch.setattr("os.geteuid", lambda: 0)
    result = bench_sleeping.measure(tmp_path, args_of("4 Pi 4, LAN"))
    assert ran == list(STRETCHES)
    assert not result["failed"]
    assert result["summary"]["rejected"] == 1


def test_a_run_that_is_stopped_has_the_figures_of_settings_that_are_done(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def measured(setting: Setting, *args: Any) -> Any:
        if setting.name != SETTINGS[0].name:
            raise SystemExit(1)  # as SIGTERM has it
        row = {
            "name": setting.name,
            "devices": setting.devices,
            "again": [],
            "best": {},
            "plans": [plan("a", 1.0, 4.4)],
        }
        return {**row, "tried": 2, "stretch": 2}

    monkeypatch.setattr(bench_sleeping, "measured", measured)
    monkeypatch.setattr("os.geteuid", lambda: 0)
    result = bench_sleeping.measure(tmp_path, args_of(""))
    assert [row["name"] for row in result["settings"]] == [SETTINGS[0].name]
    assert len(result["failed"]) == len(SETTINGS) + len(GROUPED) - 1
    assert "throughput off by 10.0% (median), 10.0% (worst of 1)" in bench_sleeping.last_line(result["summary"])


def test_figures_of_a_lab_measured_again_count_where_its_processes_waited_less() -> None:
    def row(waited: float, stretch: int) -> dict[str, Any]:
        return {"plans": [plan("a", 1.0, 4.0, waited=waited)], "again": [], "tried": stretch, "stretch": stretch}

    assert better(row(0.3, 2), row(0.2, 4))["stretch"] == 4
    still_worse = better(row(0.2, 2), row(0.3, 4))
    assert (still_worse["stretch"], still_worse["tried"]) == (2, 4)  # the next lab is stretched more than that
    assert [again["waited"] for again in still_worse["again"]] == [0.3]


def test_figures_are_those_of_a_lab_that_is_not_stretched() -> None:
    served = {
        "rate_per_s": 0.5,
        "ttft_s": {"measured": {"p50": 4.0}, "simulated": {"p50": 2.0}},
        "tpot_s": {"measured": {"p50": 1.0}, "simulated": {"p50": 1.0}},
    }
    result = unstretched({"plans": [{**plan("a", 8.0, 0.5), "requests": served}], "cases": []}, 4)
    [shown] = result["plans"]
    assert shown["measured"] == {"latency_s": 2.0, "throughput_per_s": 2.0}
    assert shown["predicted"] == {"latency_s": 0.25, "throughput_per_s": 16.0}
    assert shown["requests"]["rate_per_s"] == 2.0
    assert shown["requests"]["ttft_s"] == {"measured": {"p50": 1.0}, "simulated": {"p50": 0.5}}
    assert unstretched({}, 2) == {"stretch": 2}
    [case] = unstretched({"cases": [{"measured_per_s": 1.0, "predicted_per_s": 2.0}]}, 4)["cases"]
    assert case == {"measured_per_s": 4.0, "predicted_per_s": 8.0}


def test_a_stretched_lab_is_slower_in_all_it_has() -> None:
    profile = {"preset": "pi4"}
    lab, slow = (parse_lab(lab_of(SETTING, [profile] * 4, stretch)) for stretch in (1, 4))
    for a, b in (("own", "d1"), ("own", "d2")):
        assert slow.shape(a, b).delay_s == pytest.approx(4 * lab.shape(a, b).delay_s)
        assert slow.shape(a, b).bytes_per_s == pytest.approx((lab.shape(a, b).bytes_per_s or 0) / 4)
    assert lab.shape("own", "d1").delay_s < lab.shape("own", "d2").delay_s
    # A device sends no more over all links than over its fastest.
    assert [device.bytes_per_s for device in (*lab.devices[:1], *slow.devices[:1])] == [125e6, 125e6 / 4]
    assert link_kinds(SETTING)["kinds"][0] == [0, 0, 1, 1]


def test_rivals_are_near_the_best_in_latency_or_in_throughput() -> None:
    figures = [(1.0, 5.0), (1.1, 4.0), (3.0, 10.0), (2.9, 9.0), (2.0, 7.0)]
    points: list[Any] = [
        SimpleNamespace(predicted=SimpleNamespace(latency_s=latency_s, throughput_per_s=per_s))
        for latency_s, per_s in figures
    ]
    assert near(points, ("latency", "throughput")) == points[:4]


def case(per_s: float) -> dict[str, Any]:
    return {"measured_per_s": per_s, "predicted_per_s": 2.0, "waited": {"throughput_per_s": 0.0}}


def test_a_choice_is_compared_with_the_best_measured_of_its_setting() -> None:
    rows = [
        {"devices": [1] * 4, "again": [{}], "best": {"latency": "a", "throughput": "a"},
         "plans": [plan("a", 1.1, 4.4), plan("b", 1.0, 5.0, predicted_s=0.8)]},
    ]  # fmt: skip
    groups = [
        {"devices": [1] * 4, "again": [], "cases": [case(3.0)]},
        {"devices": [1] * 2, "again": [], "cases": [case(9.0)]},  # too few
    ]
    result = summary(rows, groups)
    assert (result["settings"], result["plans"], result["again"]) == (2, 3, 1)
    assert result["errors"]["latency_s"]["worst"] == pytest.approx(0.25)
    assert result["errors"]["throughput_per_s"]["worst"] == pytest.approx(0.5)
    assert result["chosen_over_best"]["latency"]["worst"] == pytest.approx(1.1)
    assert result["chosen_over_best"]["throughput"]["worst"] == pytest.approx(5.0 / 4.4)


def test_figures_of_processes_that_waited_do_not_count_and_a_setting_that_fails_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    late = plan("b", 1.0, 9.0, waited=2 * MOST_WAITED)
    rows = [{"devices": [1] * 4, "again": [], "best": {"throughput": "a"}, "plans": [plan("a", 1.0, 4.4), late]}]
    outcome = summary(rows, [])
    assert outcome["rejected"] == 1
    assert outcome["errors"]["throughput_per_s"]["worst"] == pytest.approx(0.1)
    assert not outcome["chosen_over_best"]  # nothing is left to compare it with
    assert "throughput off by 10.0% (median), 10.0% (worst of 1)" in bench_sleeping.last_line(outcome)

    def fails(setting: Setting, *args: Any, **more: Any) -> dict[str, Any]:
        if setting.name == SETTINGS[0].name:
            raise subprocess.TimeoutExpired("side", 1.0)
        row = {"name": setting.name, "devices": setting.devices, "tried": STRETCHES[-1]}
        return {**row, **{key: rows[0][key] for key in ("again", "best", "plans")}}

    monkeypatch.setattr(bench_sleeping, "measured", fails)
    monkeypatch.setattr("os.geteuid", lambda: 0)
    result = bench_sleeping.measure(tmp_path, args_of("4 Pi 4, LAN"))
    assert list(result["failed"]) == [SETTINGS[0].name]
    assert "not begun" in bench_sleeping.measure(tmp_path, args_of("4 Pi 5, LAN", -1.0))["failed"]["4 Pi 5, LAN"]


def test_thirty_settings_of_4_to_16_devices_have_all_that_is_to_be_validated() -> None:
    counted = [setting for setting in (*SETTINGS, *GROUPED) if len(setting.devices) >= bench_sleeping.LEAST_DEVICES]
    assert len(counted) >= 30
    assert {len(setting.devices) for setting in counted} >= {4, 8, 16}
    assert len({setting.name for setting in counted}) == len(counted)
    assert sum(setting.prompt > 0 for setting in SETTINGS) == 4
