"""Lifetimes of loaded models: how long an idle one stays."""

from __future__ import annotations

import math
import time
from collections import Counter
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
        self._keep_s: dict[str, dict[str, float]] = {}  # seconds that the keys which use each model want it to stay
        self._for_all: dict[str, float] = {}  # seconds that an administrator said, by model
        self.holders: Counter[str] = Counter()  # requests that have asked for each, until they end
        self._used: dict[str, float] = {}  # when each was last in use, by the clock

    def use(self, name: str) -> None:
        """Note that a model is in use now."""
        self._used[name] = self._clock()

    def add_user(self, name: str, owner: str) -> None:
        """Note that a key asks for a model: it stays as the options say, unless the key said otherwise."""
        self._keep_s.setdefault(name, {}).setdefault(owner, self._idle_unload_s)

    def idle_s(self, name: str) -> float:
        """Return the seconds since a model was last in use."""
        now = self._clock()
        return now - self._used.get(name, now)

    def keep(self, name: str, idle_s: float | None, owner: str | None = None) -> None:
        """Let a model stay for so many seconds when idle; None: as the options say. owner: who says so for itself; the
        model stays for as long as the longest of those who use it. None: an administrator says so for all."""
        if owner is not None:
            self._keep_s.setdefault(name, {})[owner] = self._idle_unload_s if idle_s is None else idle_s
        elif idle_s is None:
            self._for_all.pop(name, None)
        else:
            self._for_all[name] = idle_s

    def forget_users(self, name: str) -> None:
        """Note that a model was unloaded: who used it before does not count for the next time."""
        self._keep_s.pop(name, None)

    def stays(self, name: str) -> bool:
        """Return whether a model stays also where another needs its memory."""
        return name in self._pinned or self._for_all.get(name) == math.inf

    def left_s(self, name: str) -> float:
        """Return the seconds that a model stays if nobody uses it; infinity: it is not unloaded for being idle."""
        users = self._keep_s.get(name, {}).values()
        limit = self._for_all.get(name, max(users, default=self._idle_unload_s))
        limit = math.inf if name in self._pinned else limit
        return max(limit, LEAST_S) - self.idle_s(name)
