"""Lifetimes of loaded models: how long an idle one stays."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection

LEAST_S = 1.0  # that an idle model stays: a request has it some time before it begins


class Lifetimes:
    """Times at which models were last in use, and for how long each stays from then on."""

    def __init__(
        self,
        idle_unload_s: float = math.inf,
        pinned: Collection[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """idle_unload_s: seconds that an idle model stays; infinity: until another needs its memory. pinned: models
        that always stay."""
        self._idle_unload_s, self._pinned, self._clock = idle_unload_s, frozenset(pinned), clock
        self._keep_s: dict[str, float] = {}  # seconds of the models that requests said it of
        self._used: dict[str, float] = {}  # when each was last in use, by the clock

    def use(self, name: str) -> None:
        """Note that a model is in use now."""
        self._used[name] = self._clock()

    def idle_s(self, name: str) -> float:
        """Return the seconds since a model was last in use."""
        now = self._clock()
        return now - self._used.get(name, now)

    def keep(self, name: str, idle_s: float | None) -> None:
        """Let a model stay for so many seconds when idle; None: as the options say."""
        self._keep_s.pop(name, None)
        if idle_s is not None:
            self._keep_s[name] = idle_s

    def stays(self, name: str) -> bool:
        """Return whether a model stays also where another needs its memory."""
        return name in self._pinned or self._keep_s.get(name) == math.inf

    def left_s(self, name: str) -> float:
        """Return the seconds that a model stays if nobody uses it; infinity: it is not unloaded for being idle."""
        limit = math.inf if name in self._pinned else self._keep_s.get(name, self._idle_unload_s)
        return max(limit, LEAST_S) - self.idle_s(name)
