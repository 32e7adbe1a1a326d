"""Estimates of devices from their profiles, and what replaces them."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from devices.catalog import CATALOG
from devices.processes import rates
from devices.processes.rates import Rates
from devices.profile import DeviceProfile
from devices.remembered import KEPT_AGE_S, Remembered
from edge.models.demo import MODEL_PATH
from edge.parallel.engine_kinds import EngineKind
from edge.profiling.estimate import estimated_speed
from edge.profiling.layer_times import LayerTimes
from edge.profiling.links import _CALL_S, _by_calls
from edge.profiling.llm_survey import REMEMBERED, Estimator, _LayerProfiler, llm_speeds
from edge.profiling.survey import Devices
from edge.tasks import CancelScope
from partition.model.file import ModelFile
from partition.plan.plan import LOCAL
from partition.predict.presets import PartSizes
from partition.predict.speeds import Curve, DeviceSpeed, speed_to_json
from tests.support.clock import Clock
from tests.support.deployments import own_folders

FILE = ModelFile.open(MODEL_PATH)
SIZES = PartSizes.from_file(FILE)
PROFILE = EngineKind().describe("here", threads=2)
RATE = st.floats(1e8, 1e13)


def estimated(**changes: Any) -> DeviceSpeed:
    return estimated_speed(replace(PROFILE, **changes), SIZES, "a:1", "a", 1 << 30)


def seconds_of(speed: DeviceSpeed) -> list[float]:
    """Return all times of an estimate."""
    curves = (speed.step_s, speed.layer_s, speed.half_layer_s, speed.head_s)
    return [speed.token_s, *(curve.at(rows) for curve in curves for rows in (1, 4, 64, 512))]


@given(RATE, RATE, st.floats(1, 10), st.booleans())
def test_higher_rates_never_make_an_estimate_slower(memory: float, flops: float, factor: float, more: bool) -> None:
    before = seconds_of(estimated(memory_bytes_per_s=memory, flops=flops))
    faster = {"memory_bytes_per_s": memory * (factor if more else 1), "flops": flops * (1 if more else factor)}
    after = seconds_of(estimated(**faster))
    assert all(new <= old * (1 + 1e-9) for new, old in zip(after, before, strict=True))
    # No part gains more than the rate did.
    assert all(new >= old / factor * (1 - 1e-9) for new, old in zip(after, before, strict=True))


@given(st.integers(1, 64), st.integers(1, 64), st.sampled_from(["a cpu", "Intel N100", "Raspberry Pi 5 Model B"]))
def test_more_threads_never_make_a_device_without_rates_slower(a: int, b: int, cpu: str) -> None:
    few, many = (
        seconds_of(estimated(memory_bytes_per_s=None, flops=None, cpu=cpu, threads=n, cpu_quota=None))
        for n in sorted((a, b))
    )
    assert all(new <= old * (1 + 1e-9) for new, old in zip(many, few, strict=True))


@pytest.mark.parametrize(("cpu", "preset"), [("Raspberry Pi 5 Model B Rev 1.0", "pi5"), ("Raspberry Pi 4", "pi4")])
def test_a_board_without_rates_counts_as_its_preset(cpu: str, preset: str) -> None:
    speed = estimated(memory_bytes_per_s=None, flops=None, cpu=cpu)
    assert speed.layer_s.at(1) == pytest.approx(SIZES.layer_bytes / CATALOG[preset].memory_bytes_per_s)


@pytest.mark.parametrize("value", [0.0, -1.0, 1e-300, 1e14])
def test_rates_that_cannot_be_give_an_estimate_all_the_same(value: float) -> None:
    usual = {"memory_bytes_per_s": 1e10, "flops": 1e11, "page_round_trip_s": 0.01, "page_bytes_per_s": 1e6}
    for name in usual:
        speed = estimated(**{**usual, name: value})
        assert all(0 <= seconds < math.inf for seconds in seconds_of(speed))


def test_a_page_is_slower_by_its_network_and_takes_less_memory() -> None:
    """Each step takes a round trip, and the time of the hidden states there and back."""
    speed = estimated(page_round_trip_s=0.01, page_bytes_per_s=1e6)
    step_s = speed.step_s
    for rows in (1, 100, 2048):
        assert step_s.at(rows) == pytest.approx(0.01 + rows * 2 * 4 * FILE.shape.n_embd / 1e6)
    assert estimated(page_round_trip_s=0.01).step_s == estimated().step_s
    assert speed.runtime_bytes < estimated().runtime_bytes


def test_an_estimate_of_a_device_is_no_preset() -> None:
    speed = estimated()
    assert (speed.estimate, speed.preset) == (True, False)


@pytest.fixture
def remembered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Clock:
    """Its own folders, with a clock for the age of what is remembered."""
    import devices.remembered as module

    own_folders(monkeypatch, tmp_path)
    clock = Clock().install(monkeypatch, module)
    clock.now = 1e9
    return clock


def test_measured_figures_precede_estimates_for_a_month(remembered: Clock) -> None:
    [estimate] = Estimator(None).survey(FILE).speeds
    assert estimate.estimate
    measured = replace(estimate.times(3.0), estimate=False, busy=True)
    Remembered(REMEMBERED).put(estimate.key, speed_to_json(measured))
    remembered.now += KEPT_AGE_S - 1
    [known] = Estimator(None).survey(FILE).speeds
    assert (known.estimate, known.busy, known.age_s) == (False, True, KEPT_AGE_S - 1)
    assert known.layer_s == measured.layer_s
    remembered.now += 2
    assert Estimator(None).survey(FILE).speeds[0].estimate


def test_without_time_nothing_is_measured(remembered: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    from devices.cluster_file import Cluster
    from edge.profiling import llm_survey

    monkeypatch.setattr(llm_survey, "survey", lambda *_, **__: pytest.fail("measured"))
    monkeypatch.setattr(llm_survey, "Probes", lambda *_: pytest.fail("made slices"))
    known = llm_speeds(Cluster.of_addresses(()), None, (), FILE, "0" * 64, seconds=0)
    assert [(speed.device, speed.estimate) for speed in known.speeds] == [(LOCAL, True)]


@pytest.mark.parametrize(
    ("factor", "busy", "used"),
    [(3.0, False, 3.0), (0.1, False, 0.1), (2.0, True, 2.0), (40.0, True, 2.5), (0.1, True, 0.4)],
)
def test_few_samples_of_a_busy_device_change_an_estimate_little(
    remembered: Clock, factor: float, busy: bool, used: float
) -> None:
    with CancelScope() as scope:
        profiler = _LayerProfiler(Devices(None, 1), FILE, "0" * 64, {}, {}, scope)
        estimate = profiler.so_far(0)
        curve = Curve(((1, factor * estimate.seconds),))
        profiler._so_far[0] = LayerTimes(1, {"layers": curve}, 0.0, 0, None, busy)
        corrected = profiler.so_far(0)
    assert corrected.seconds == pytest.approx(used * estimate.seconds)
    assert (corrected.estimate, corrected.busy) == (True, busy)


class TestRates:
    """Rates that a device reports about itself."""

    def own(self, monkeypatch: pytest.MonkeyPatch, measured: Rates | None, **changes: Any) -> Rates | None:
        monkeypatch.setattr(rates, "instruction_sets", lambda: ())
        monkeypatch.setattr(rates, "measured_apart", lambda threads: measured)
        return rates.own_rates(replace(PROFILE, **changes))

    def test_are_measured_once(self, remembered: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
        first = self.own(monkeypatch, Rates(1e10, 1e12), cpu_quota=None)
        assert first == Rates(1e10, 1e12)
        assert self.own(monkeypatch, Rates(1.0, 1.0), cpu_quota=None) == first

    def test_follow_a_quota(self, remembered: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
        assert self.own(monkeypatch, Rates(1e10, 1e12), threads=2, cpu_quota=0.5) == Rates(0.25e10, 0.25e12)
        assert self.own(monkeypatch, Rates(1e10, 1e12), threads=2, cpu_quota=8.0) == Rates(1e10, 1e12)

    @pytest.mark.parametrize(("flops", "memory"), [(1e12, 1e10), (5e10, 7e9), (1e10, 1.4e9)])
    def test_decoding_is_bound_by_arithmetic_without_products_of_bytes(
        self, remembered: Clock, monkeypatch: pytest.MonkeyPatch, flops: float, memory: float
    ) -> None:
        result = self.own(monkeypatch, Rates(1e10, flops), cpu_quota=None)
        assert result == Rates(pytest.approx(memory), flops)
        monkeypatch.setattr(rates, "instruction_sets", lambda: ("avx2", "avx512_vnni"))
        result = rates.own_rates(replace(PROFILE, name="other", cpu_quota=None))
        assert result == Rates(1e10, 2.0 * flops)

    def test_that_cannot_be_measured_are_not_remembered(
        self, remembered: Clock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert self.own(monkeypatch, None) is None
        assert self.own(monkeypatch, Rates(1e10, 1e11), cpu_quota=None) is not None

    @pytest.mark.parametrize("values", [None, 7, [], [1.0], ["x", 1.0], [1.0, 0.0], [-1.0, 1.0], [1e99, 1.0], {}])
    def test_of_another_version_are_ignored(self, values: Any) -> None:
        assert rates.read_rates(values) is None

    def test_are_plausible(self) -> None:
        measured = rates.measure(1)
        assert 1e7 < measured.memory_bytes_per_s < 1e13
        assert 1e7 < measured.flops < 1e14

    def test_cross_the_wire_and_may_be_missing(self) -> None:
        stated = replace(PROFILE, memory_bytes_per_s=1e10, flops=3.6e12)
        assert DeviceProfile.from_json(stated.to_json()) == stated
        old = {name: value for name, value in stated.to_json().items() if name not in ("memory_bytes_per_s", "flops")}
        assert DeviceProfile.from_json(old) == replace(stated, memory_bytes_per_s=None, flops=None)


class Calls:
    """Worker behind a link of known speed."""

    def __init__(self, latency_s: float, bytes_per_s: float) -> None:
        self._latency_s, self._bytes_per_s, self.padded = latency_s, bytes_per_s, 0

    def ping_s(self) -> float:
        return 2 * self._latency_s + _CALL_S

    def padded_s(self, n_bytes: int) -> float:
        self.padded += n_bytes > 0
        return 2 * self._latency_s + 5e-3 + n_bytes / self._bytes_per_s


@pytest.mark.parametrize(
    ("latency_s", "bytes_per_s", "calls"), [(2e-3, 1e7, 3), (1e-6, 1e10, 3), (0.03, 1e5, 1), (0.2, 1e8, 1)]
)
def test_a_link_is_estimated_from_calls(latency_s: float, bytes_per_s: float, calls: int) -> None:
    worker: Any = Calls(latency_s, bytes_per_s)
    link = _by_calls(worker)
    assert link.estimate
    assert link.latency_s == pytest.approx(max(1e-4, latency_s))
    assert link.bytes_per_s == pytest.approx(min(125e6, bytes_per_s))
    assert worker.padded == calls
