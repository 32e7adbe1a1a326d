"""Test the detection of slow devices: known times give known messages, and one slow moment gives none."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from devices.remembered import Remembered
from edge.parallel.engine import DistributedEngine
from edge.parallel.step_times import StepTime, StepTimes, Summary
from edge.profiling.llm_survey import REMEMBERED
from edge.profiling.straggler_watch import IN_A_ROW, LEAST_STEPS, SpeedChange, StragglerDetector, StragglerWatch
from edge.profiling.survey import Survey
from partition.plan.arrange import make_plan
from partition.plan.plan import LOCAL
from partition.predict.predict import compute_s
from partition.predict.speeds import speed_to_json
from partition.search.planner import Planner
from tests.support import planning

MS = 1e-3


def changes_of(expected: list[float | None], windows: list[tuple[float, ...]]) -> list[list[SpeedChange]]:
    """Return what each window reports, in ms."""
    first = StragglerDetector([None if ms is None else ms * MS for ms in expected])
    return [first.window([ms * MS for ms in window]) for window in windows]


def test_a_rank_is_slow_after_three_windows_and_then_that_is_expected_of_it() -> None:
    result = changes_of([10, 20], [(10, 40), (11, 42), (10, 44), (10, 42), (10, 42), (10, 42)])
    assert result[:2] == [[], []]
    assert result[2] == [SpeedChange(1, pytest.approx(2.1))]
    assert result[3:] == [[], [], []]


def test_it_is_fast_again_likewise() -> None:
    result = changes_of([10, 20], [(10, 40)] * 3 + [(10, 20)] * 3)
    assert result[2] == [SpeedChange(1, pytest.approx(2.0))]
    assert (result[3], result[4], result[5]) == ([], [], [SpeedChange(1, pytest.approx(0.5))])


@pytest.mark.parametrize(
    "windows",
    [
        [(10, 20), (10, 200), (10, 20)] * 4,  # bursts
        [(10, 60), (10, 60), (10, 29)] * 4,  # two bad answers
        [(20, 40), (25, 50), (40, 80), (80, 160)] * 3,  # all of them: a long history
        [(5, 10)] * 6,  # all of them: a short one
        [(10, 28)] * 9,  # somewhat
        [(0, 0)] * 9,  # nothing was computed
    ],
)
def test_a_bad_moment_is_none_and_nor_is_what_all_suffer(windows: list[tuple[float, ...]]) -> None:
    assert not any(changes_of([10, 20], windows))


def test_the_only_rank_that_computes_is_slow_by_itself() -> None:
    """Rank 0 is a thin owner. Without others to compare with, it takes more to be called slow."""
    assert changes_of([None, 20], [(0, 50)] * 3)[2] == [SpeedChange(1, pytest.approx(2.5))]
    assert not any(changes_of([None, 20], [(0, 38)] * 9))


def test_after_a_change_a_bad_moment_is_none_either() -> None:
    result = changes_of([10, 20], [(10, 40)] * 3 + [(10, 90)] + [(10, 40)] * 3)
    assert result[2] == [SpeedChange(1, pytest.approx(2.0))]
    assert not any(result[3:])


def test_what_was_never_predicted_is_expected_to_stay_as_it_was() -> None:
    result = changes_of([None, None], [(10, 20), (10, 90), (10, 21)] + [(10, 21)] * 3 + [(10, 63)] * 3)
    assert not any(result[:-1])
    assert result[-1] == [SpeedChange(1, pytest.approx(3.0))]


class Timed(DistributedEngine):
    """Ranks that took known times."""

    def __init__(self, ranks: list[StepTimes]) -> None:
        self.ranks = ranks

    @property
    def own_times(self) -> StepTimes:
        return self.ranks[0]

    def times(self, *, clear: bool = False, last: int = 0, rows: int = 0) -> list[dict[str, Summary]]:
        return [rank.summaries(last, rows) for rank in self.ranks]


def looked(watch: StragglerWatch, engine: DistributedEngine) -> list[str]:
    """Return what a look finds."""
    watch.look(engine)
    results = [*watch.notes]
    watch.notes.clear()
    return results


def test_a_slow_device_has_its_new_speed_in_the_next_plan_and_is_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    pi = "pi:7070"
    speeds = tuple(replace(planning.device(name, 10 * MS), key=f"key of {name}") for name in (LOCAL, pi))
    measurements = Remembered(REMEMBERED)

    def remembered() -> list[bool]:
        return [measurements.get(speed.key) is not None for speed in speeds]

    for speed in speeds:
        measurements.put(speed.key, speed_to_json(speed))
    links, work = planning.linked((LOCAL, pi)), planning.work(8)
    survey: Survey[Any] = Survey(speeds, links)
    plan, _ = planning.best_of(Planner(work, speeds, links, "made up", ""))
    assert plan.world_size == 2
    predicted = compute_s(plan, work, {speed.device: speed for speed in speeds}, links)
    engine, watch = Timed([StepTimes(), StepTimes()]), StragglerWatch(survey, work)
    watch.begin(engine, plan, ("this device", "pi"))
    assert not watch.is_due

    def answer(times: float) -> list[str]:
        for rank, factor, seconds in zip(engine.ranks, (1.0, times), predicted, strict=True):
            for _ in range(LEAST_STEPS):
                rank.add(StepTime(1, (seconds or 0.0) * factor))
        assert watch.is_due
        return looked(watch, engine)

    assert [answer(times) for times in (1, 1, 30, 1, 30)] == [[]] * 5
    assert remembered() == [True, True]
    assert [answer(30) for _ in range(IN_A_ROW - 1)] == [[], ["pi computes 30.0 times as long as it did"]]
    assert watch.survey is not None
    assert watch.survey.speeds[1].layer_s.at(1) == pytest.approx(300 * MS)
    assert remembered() == [True, False]
    measurements.put(speeds[1].key, speed_to_json(watch.survey.speeds[1]))  # as the next survey does
    by_now, _ = planning.best_of(Planner(work, watch.survey.speeds, links, "made up", ""))
    assert by_now.devices == [LOCAL] or by_now.devices == (LOCAL,)
    result = Remembered("slow-workers").get(pi)
    assert result is not None
    assert result[0] == 30
    assert [answer(1) for _ in range(IN_A_ROW)][-1] == ["pi computes 97 % less than it did"]
    assert Remembered("slow-workers").get(pi) is None
    assert watch.survey.speeds[1].layer_s.at(1) == pytest.approx(10 * MS)
    assert remembered() == [True, False]
    assert looked(watch, Timed(engine.ranks)) == []  # of a plan that is over
    assert watch.windows == 10


def test_steps_of_several_requests_are_measured_by_how_many_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of two rows takes longer than one of one row, and is no slower for that."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    names = (LOCAL, "pi:7070")
    speeds = tuple(planning.device(name, 10 * MS, by_row=True) for name in names)
    links, work = planning.linked(names), planning.work(8)
    plan, _ = planning.best_of(Planner(work, speeds, links, "made up", ""))
    by_rows = {rows: compute_s(plan, work, dict(zip(names, speeds, strict=True)), links, rows) for rows in (1, 2)}
    engine, watch = Timed([StepTimes(), StepTimes()]), StragglerWatch(Survey(speeds, links), work)
    watch.begin(engine, plan, ("this device", "pi"))

    def add(rows: int, times: float, steps: int) -> None:
        for rank, factor, seconds in zip(engine.ranks, (1.0, times), by_rows[rows], strict=True):
            for _ in range(steps):
                rank.add(StepTime(rows, (seconds or 0.0) * factor))

    def look(rows: int, times: float, steps: int = LEAST_STEPS) -> list[str]:
        add(rows, times, steps)
        add(3 - rows, times, steps // 4)  # some of the other number
        return looked(watch, engine)

    mixed = [look(rows, 1) for rows in (1, 2, 2, 1, 2, 1, 1, 2)]
    assert mixed == [[]] * 8
    assert [look(2, 2) for _ in range(IN_A_ROW)] == [[], [], ["pi computes 2.0 times as long as it did"]]
    assert [look(1, 2) for _ in range(IN_A_ROW)] == [[]] * IN_A_ROW  # that is known by now
    windows = watch.windows
    assert look(1, 2, LEAST_STEPS // 2) == look(2, 2, LEAST_STEPS // 2) == []
    assert watch.windows == windows  # of neither there were enough
    look(1, 2, LEAST_STEPS // 2)
    assert watch.windows == windows + 1  # the steps before count


def test_a_device_with_two_ranks_keeps_its_speed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its ranks disturb each other: what one of them takes says little of the device."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    pi = "pi:7070"
    speeds, links = tuple(planning.device(name, 10 * MS) for name in (LOCAL, pi)), planning.linked((LOCAL, pi))
    work = planning.work(8)
    plan = make_plan(work.limits, "made up", "", (LOCAL, pi, pi), "pipeline")
    predicted = compute_s(plan, work, {speed.device: speed for speed in speeds}, links)
    engine, watch = Timed([StepTimes() for _ in range(3)]), StragglerWatch(Survey(speeds, links), work)
    watch.begin(engine, plan, ("this device", "pi", "pi"))
    changes: list[str] = []
    for _ in range(IN_A_ROW):
        for rank, factor, seconds in zip(engine.ranks, (1, 30, 1), predicted, strict=True):
            for _ in range(LEAST_STEPS):
                rank.add(StepTime(1, (seconds or 0.0) * factor))
        changes += looked(watch, engine)
    assert changes == ["pi computes 30.0 times as long as it did"]
    assert watch.survey is not None
    assert watch.survey.speeds == speeds


def test_a_wrong_estimate_is_corrected_and_makes_no_straggler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    pi = "pi:7070"
    speeds = (planning.device(LOCAL, 10 * MS), replace(planning.device(pi, 10 * MS), estimate=True))
    links, work = planning.linked((LOCAL, pi)), planning.work(8)
    plan = make_plan(work.limits, "made up", "", (LOCAL, pi), "pipeline")
    predicted = compute_s(plan, work, {speed.device: speed for speed in speeds}, links)
    engine, watch = Timed([StepTimes(), StepTimes()]), StragglerWatch(Survey(speeds, links), work)
    watch.begin(engine, plan, ("this device", "pi"))

    def answer(times: float) -> list[str]:
        for rank, factor, seconds in zip(engine.ranks, (1.0, times), predicted, strict=True):
            for _ in range(LEAST_STEPS):
                rank.add(StepTime(1, (seconds or 0.0) * factor))
        return looked(watch, engine)

    def known_ms() -> list[float]:
        assert watch.survey is not None
        return [1e3 * speed.layer_s.at(1) for speed in watch.survey.speeds]

    assert answer(1.05) == []
    assert not watch.corrected
    assert known_ms() == pytest.approx([10, 10])
    assert answer(4) == []
    assert watch.corrected
    assert known_ms() == pytest.approx([10, 40])
    watch.corrected = False
    assert [answer(4) for _ in range(2 * IN_A_ROW)] == [[]] * 2 * IN_A_ROW
    assert not watch.corrected
    # From here on the device is slower than its own first steps.
    assert [answer(12) for _ in range(IN_A_ROW)][-1] == ["pi computes 3.0 times as long as it did"]
    assert known_ms() == pytest.approx([10, 120])
