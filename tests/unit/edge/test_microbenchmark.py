"""Test measurements while other processes use the processor in bursts, with simulated clocks."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from devices import busy, probe
from edge.microbenchmark import BestTime, TimedTask, best_of

TRUE_S = 2e-3  # of a step of the first kind


class Machine:
    """A processor of which bursts take a part: what runs meanwhile takes longer. Its clock goes on as steps run."""

    def __init__(self, bursts: list[tuple[float, float]], left: float = 0.3, *, tells: bool = True) -> None:
        """bursts: (from, to), ascending. left: of the processor, in them."""
        self.now_s, self.lost_s = 0.0, 0.0
        self._bursts, self._left, self._tells = bursts, left, tells

    def run(self, seconds: float) -> None:
        """Compute what takes so long without bursts."""
        while seconds > 1e-12:
            inside = next(((a, b) for a, b in self._bursts if a <= self.now_s < b), None)
            if inside is None:
                begins = next((a for a, _ in self._bursts if a > self.now_s), float("inf"))
                took = min(seconds, begins - self.now_s)
                self.now_s, seconds = self.now_s + took, seconds - took
                continue
            took = min(seconds / self._left, inside[1] - self.now_s)
            self.now_s, seconds = self.now_s + took, seconds - took * self._left
            self.lost_s += took * (1 - self._left)

    def watch(self) -> Callable[[], float]:
        before = self.lost_s
        return lambda: self.lost_s - before if self._tells else 0.0


def figures(machine: Machine, kinds: int = 3, **how: float) -> list[BestTime]:
    """Measure kinds that take TRUE_S, twice that, and so on."""
    steps = [TimedTask(lambda i=i: machine.run(TRUE_S * (i + 1))) for i in range(kinds)]  # type: ignore[misc]
    return best_of(steps, clock=lambda: machine.now_s, watch=machine.watch, **how)  # type: ignore[arg-type]


def test_a_quiet_device() -> None:
    machine = Machine([])
    result = figures(machine)
    assert [item.seconds for item in result] == pytest.approx([TRUE_S, 2 * TRUE_S, 3 * TRUE_S])
    assert not any(item.busy for item in result)
    assert machine.now_s < 3 * 4 * 0.04 + 0.1  # four samples of each, and no more


@pytest.mark.parametrize("tells", [True, False])
@pytest.mark.parametrize("seed", range(40))
def test_bursts_that_take_half_of_the_time(seed: int, tells: bool) -> None:
    """Bursts last 10 to 500 ms, at random: the figures kept are the true ones within a few per cent, or they are
    marked."""
    dice = random.Random(seed)
    bursts, at = [], dice.uniform(0, 0.3)
    while at < 60:
        long = dice.uniform(0.01, 0.5)
        bursts.append((at, at + long))
        at += long + dice.uniform(0.01, 0.5)
    for i, figure in enumerate(figures(Machine(bursts, tells=tells))):
        assert figure.busy or figure.seconds == pytest.approx(TRUE_S * (i + 1), rel=0.03)
        assert figure.seconds < 1.2 * TRUE_S * (i + 1)


@pytest.mark.parametrize("half", [range(0, 4, 2), range(1, 4, 2), range(2), range(2, 4)])
def test_any_half_of_the_pieces(half: range) -> None:
    """Whichever pieces a burst covers whole, the others count."""
    number = iter(range(1000))
    machine = Machine([])
    slow = False

    def prepare() -> None:
        nonlocal slow
        slow = next(number) in half

    kind = TimedTask(lambda: machine.run(TRUE_S * (5 if slow else 1)), prepare)
    [result] = best_of([kind], clock=lambda: machine.now_s, watch=machine.watch)
    assert result == BestTime(pytest.approx(TRUE_S), False)


def test_what_is_never_alone_is_marked() -> None:
    result = figures(Machine([(0.0, 1e9)]))
    assert all(item.busy for item in result)
    once = figures(Machine([(0.0, 1e9)]), kinds=1, samples=1)
    assert once[0].busy
    assert not figures(Machine([]), kinds=1, samples=1)[0].busy


def test_the_better_of_two_moments() -> None:
    assert BestTime(3.0, True).or_better(BestTime(2.0, False)) == BestTime(2.0, False)
    assert BestTime(1.9, True).or_better(BestTime(2.0, False)) == BestTime(1.9, False)
    assert BestTime(2.0, True).or_better(BestTime(3.0, True)) == BestTime(2.0, True)


def test_pieces_of_a_kind_are_far_from_each_other() -> None:
    order: list[int] = []
    machine = Machine([])
    kinds = [TimedTask(lambda: machine.run(0.1), lambda i=i: order.append(i)) for i in range(3)]  # type: ignore[misc]
    best_of(kinds, clock=lambda: machine.now_s, watch=machine.watch)
    assert order == [0, 1, 2] * 4
    assert all(a != b for a, b in pairwise(order))


def test_what_precedes_each_step_is_not_timed() -> None:
    machine, order = Machine([]), []

    def step() -> None:
        order.append("step")
        machine.run(TRUE_S)

    def before() -> None:
        order.append("before")
        machine.run(10 * TRUE_S)

    task = TimedTask(step, before_step=before)
    [best] = best_of([task], clock=lambda: machine.now_s, watch=machine.watch)
    assert best == BestTime(pytest.approx(TRUE_S), False)
    assert all(after == "step" for event, after in pairwise(order) if event == "before")
    assert order.count("step") - order.count("before") == 4  # a warm-up for each sample
    # All samples of a task together take a bounded time, with what precedes their steps.
    began = machine.now_s
    best_of([TimedTask(step, before_step=lambda: machine.run(1.0))], 0.1, clock=lambda: machine.now_s, samples=8)
    assert machine.now_s - began < 2 * 51 * 1.01


@pytest.mark.parametrize(("most_s", "samples"), [(1.0, 1), (2.0, 2), (7.0, 4), (60.0, 4)])
def test_preparation_counts_as_time_of_a_task(most_s: float, samples: int) -> None:
    """A sample with its preparation takes 2.2 s."""
    machine = Machine([])
    task = TimedTask(lambda: machine.run(0.1), lambda: machine.run(2.0))
    best_of([task], clock=lambda: machine.now_s, watch=machine.watch, most_s=most_s)
    assert machine.now_s == pytest.approx(2.1 * samples + 0.1)  # one warm-up


def test_a_burst_is_compared_with_all_of_a_sample() -> None:
    """Two samples that lose 8 % of their steps' time: 4 % of the sample, as much precedes the steps."""
    machine = Machine([])

    def step() -> None:
        machine.run(TRUE_S)
        machine.lost_s += 0.08 * TRUE_S

    task = TimedTask(step, before_step=lambda: machine.run(TRUE_S))
    [best] = best_of([task], clock=lambda: machine.now_s, watch=machine.watch)
    assert not best.busy


# ------------------------------------------------------------------------------------------- what the system tells


def system(proc: Path, waited_ns: dict[str, int], stolen_ticks: int) -> None:
    """Files as Linux has them."""
    for thread, n in waited_ns.items():
        (proc / "self" / "task" / thread).mkdir(parents=True, exist_ok=True)
        (proc / "self" / "task" / thread / "schedstat").write_text(f"123456 {n} 78\n")
    (proc / "stat").write_text(f"cpu  1 2 3 4 5 6 7 {stolen_ticks} 9 10\ncpu0 1 2 3 4 5 6 7 99999 9 10\n")


def test_what_threads_wait_and_what_the_host_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(busy, "throttled_s", lambda: 0.0)
    monkeypatch.setattr(busy.os, "sysconf", lambda _: 100)  # type: ignore[attr-defined]
    system(tmp_path, {"1": 1_000_000_000, "2": 500_000_000}, 10)
    watch = busy.LostTimeMeter(tmp_path)
    assert watch.lost_s() == 0
    system(tmp_path, {"1": 1_200_000_000, "2": 600_000_000}, 15)
    assert watch.lost_s() == pytest.approx(0.2 + 0.1 + 0.05)
    assert watch.lost_s() == 0  # it counts from the last time on


@pytest.mark.parametrize(
    ("used_s", "own_s", "preempted", "lost_s"),
    [
        (2.0, 1.0, 9, 1.0),  # this process wanted both cores, and another one had half of them
        (1.5, 1.0, 9, 0.0),  # the core that was idle for half of the time was free for it
        (1.8, 1.0, 9, 0.6),
        (2.0, 1.0, 0, 0.0),  # it never had to leave its core: it wanted no other
        (2.0, 2.0, 9, 0.0),
    ],
)
def test_kernels_that_do_not_count_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, used_s: float, own_s: float, preempted: int, lost_s: float
) -> None:
    """One second on two cores: seconds in use, seconds of this process, and how often it had to leave a core."""
    monkeypatch.setattr(busy, "throttled_s", lambda: 0.0)
    monkeypatch.setattr(busy.os, "cpu_count", lambda: 2)  # type: ignore[attr-defined]
    cores, left = iter([(10.0, 5.0, 3.0), (11.0, 5.0 + used_s, 3.0 + own_s)]), iter([4, 4 + preempted])
    watch = busy.LostTimeMeter(tmp_path / "nothing", lambda: next(cores), lambda: next(left))
    assert watch.lost_s() == pytest.approx(lost_s)


def test_a_quota_is_no_disturbance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    current = iter([1.0, 1.4])
    monkeypatch.setattr(busy, "throttled_s", lambda: next(current))
    system(tmp_path, {"1": 0}, 0)
    watch = busy.LostTimeMeter(tmp_path)
    system(tmp_path, {"1": 500_000_000}, 0)
    assert watch.lost_s() == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("version", "quota", "stat"),
    [
        (2, ("cpu.max", "50000 100000"), "nr_periods 9\nthrottled_usec 2500000\n"),
        (1, ("cpu.cfs_quota_us", "50000"), "nr_periods 9\nthrottled_time 2500000000\n"),
    ],
)
def test_how_long_a_quota_held_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int, quota: tuple[str, str], stat: str
) -> None:
    (tmp_path / "cpu.stat").write_text(stat)
    monkeypatch.setattr(probe, "_own_groups", lambda _: iter([(tmp_path, version)]))
    assert probe.throttled_s() == 0  # without a quota nothing is held back
    (tmp_path / quota[0]).write_text(quota[1])
    (tmp_path / "cpu.cfs_period_us").write_text("100000")
    assert probe.throttled_s() == pytest.approx(2.5)
