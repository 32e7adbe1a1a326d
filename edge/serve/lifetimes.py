"""Lifetimes of loaded models: the time until an idle model is unloaded."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Collection

LEAST_S = 1.0  # minimum time that an idle model stays, because a request gets the model before it begins


class Lifetimes:
    """Last use of each model, and the time that it stays loaded afterwards."""

    def __init__(
        self,
        idle_unload_s: float = math.inf,
        pinned: Collection[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """idle_unload_s: seconds that an idle model stays; infinity: until another model needs its memory.

        pinned: models that always stay.
        """
        self._idle_unload_s, self._pinned, self._clock = idle_unload_s, frozenset(pinned), clock
        self._keep_s: dict[str, dict[str, float]] = {}  # seconds to stay, by model and API key
        self._for_all: dict[str, float] = {}  # seconds to stay set by an administrator, by model
        self.holders: Counter[str] = Counter()  # running requests for each model
        self._used: dict[str, float] = {}  # time of the last use of each model

    def use(self, name: str) -> None:
        """Record that a model is in use now."""
        self._used[name] = self._clock()

    def add_user(self, name: str, owner: str) -> None:
        """Record that a key uses a model. It gets the default idle time, unless the key has set one."""
        self._keep_s.setdefault(name, {}).setdefault(owner, self._idle_unload_s)

    def idle_s(self, name: str) -> float:
        """Return the seconds since the last use of a model."""
        now = self._clock()
        return now - self._used.get(name, now)

    def keep(self, name: str, idle_s: float | None, owner: str | None = None) -> None:
        """Set the time that an idle model stays.

        idle_s: seconds; None: the default.
        owner: key that sets its own time; the longest time of all its users applies. None: an administrator sets the
        time for all.
        """
        if owner is not None:
            self._keep_s.setdefault(name, {})[owner] = self._idle_unload_s if idle_s is None else idle_s
        elif idle_s is None:
            self._for_all.pop(name, None)
        else:
            self._for_all[name] = idle_s

    def forget_users(self, name: str) -> None:
        """Record that a model was unloaded. Times set by its users are reset."""
        self._keep_s.pop(name, None)

    def stays(self, name: str) -> bool:
        """Return True if a model stays even if another model needs its memory."""
        return name in self._pinned or self._for_all.get(name) == math.inf

    def left_s(self, name: str) -> float:
        """Return the seconds until a model is unloaded if it remains unused. Infinity: never because of idleness."""
        users = self._keep_s.get(name, {}).values()
        limit = self._for_all.get(name, max(users, default=self._idle_unload_s))
        limit = math.inf if name in self._pinned else limit
        return max(limit, LEAST_S) - self.idle_s(name)
