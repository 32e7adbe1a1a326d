"""Workers with made-up speeds, so that a test knows which plan is the best: as measured, and during steps."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from edge.cluster.session import EngineSession
from edge.deployment import watch
from edge.parallel.engine import DistributedEngine
from edge.parallel.step_times import StepTime, StepTimes, Summary
from edge.profiling import llm_survey
from edge.profiling.layer_times import LayerTimes
from partition.predict.speeds import Curve
from tests.support.deployments import ONE_THREAD
from tests.support.workers import Worker, worker

FAST, USUAL, SLOW = 1e-3, 1e-1, 10.0  # seconds of a layer


class Network:
    """Workers that can be found, and what each is measured to take. The measurement itself can be held up."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, *, is_shared: bool = True, held_after: int = 2) -> None:
        """is_shared: half a layer takes half as long, so that devices may share it. held_after: number of measurements
        after which others can be held up."""
        self._curves = (("layers", 1), ("more", 2), ("head", 1), *(() if is_shared else (("half", 1),)))
        self.stack, self.folder, self._patch = ExitStack(), folder, patch
        self.workers: list[tuple[str, Worker]] = []  # by name, in the order of their start
        self.seeks = 0
        self.seconds: dict[str, float] = {}  # of a layer, by name; USUAL of a device that is not among them
        self.timed: list[str] = []
        self.hold: Callable[[], None] = lambda: None
        self._held_after = held_after
        patch.setattr(llm_survey, "timed", self._timed)  # how long a test takes is not to decide what pays
        for name, value in (("OFFER_S", 0.2), ("QUIET_S", 0.4), ("REST_S", 0.1), ("BUSY_S", 0.2), ("LOOK_S", 0.05)):
            patch.setattr(watch, name, value)

    def start(self, name: str, seconds: float, **options: Any) -> Worker:
        """A worker of this name, which takes so long for a layer."""
        self.seconds[name] = seconds
        folder = self.folder / f"{name}-{len(self.workers)}"
        started = self.stack.enter_context(worker(folder, "--name", name, *ONE_THREAD, **options))
        self.workers.append((name, started))
        return started

    def seek(self) -> list[str]:
        """The addresses of all."""
        self.seeks += 1
        return [first.address for _, first in self.workers]

    def times_in_use(self, in_use: dict[str, float]) -> None:
        """From now on the steps of a device take so many times what it was measured to take. in_use: by address; 1 of
        a device that is not among them."""
        seconds = {first.address: self.seconds[name] for name, first in self.workers}

        def times(engine: DistributedEngine, **_: Any) -> list[dict[str, Summary]]:
            return [
                _steps(len(engine.plan.slice(rank).layers) * seconds.get(device, USUAL) * in_use.get(device, 1.0))
                for rank, device in enumerate(engine.plan.devices)
            ]

        self._patch.setattr(DistributedEngine, "times", times)

    def _timed(self, session: EngineSession, *_: Any, **__: Any) -> LayerTimes:
        self.timed.append(session.device)
        if len(self.timed) > self._held_after:
            self.hold()
        took = self.seconds.get(session.device, USUAL)
        curves = {name: Curve(((1, n * took),)) for name, n in self._curves}
        return LayerTimes(1, curves, 0.0, 1, None)


def _steps(seconds: float, n: int = 32) -> dict[str, Summary]:
    times = StepTimes()
    for _ in range(n):
        times.add(StepTime(1, compute_s=seconds, communication_s=0.0))
    return times.summaries()
