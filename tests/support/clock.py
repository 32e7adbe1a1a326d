"""A clock that tests set: measured times are exact on any machine under any load."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest


class Clock:
    """Stands in for the module `time`. It goes on by `tick_s` with every look, by `sleep`, and where `now` is set."""

    def __init__(self, tick_s: float = 0.0) -> None:
        self.now, self.tick_s = 0.0, tick_s

    def perf_counter(self) -> float:
        """Seconds so far, this look included."""
        self.now += self.tick_s
        return self.now

    monotonic = time = perf_counter

    def sleep(self, seconds: float) -> None:
        """Pass them at once."""
        self.now += seconds

    def install(self, patch: pytest.MonkeyPatch, *modules: ModuleType) -> "Clock":
        """Be the clock of these modules."""
        for module in modules:
            patch.setattr(module, "time", self)
        return self

    def while_it_runs(self, call: Callable[..., Any], seconds: Callable[..., float]) -> Callable[..., Any]:
        """`call`, which takes as long as `seconds` of the same arguments say."""

        def timed(*args: Any, **options: Any) -> Any:
            self.now += seconds(*args, **options)
            return call(*args, **options)

        return timed
