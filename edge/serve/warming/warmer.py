"""The warmer: decides which prefixes to compute while the server is idle, and when.

A complete turn is rendered as the beginning of the next prompt. This differs from the generated text if a template
drops thoughts or writes calls differently. A system prompt with the date or time is rendered again shortly before that
changes, as long as its client is likely to return. Clients may announce other prefixes.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edge.errors import EdgeError, Overloaded
from edge.llm.requests import RequestState
from edge.llm.slot import common_prefix
from edge.serve.engine.inputs import InputProcessor
from edge.serve.warming.allowance import Allowance
from edge.serve.warming.prefix import Prefix, Turn
from edge.serve.warming.stamps import next_change

MOST_QUEUED = 8  # waiting turns
MOST_CLIENTS = 8  # clients with stamps
MOST_ANNOUNCED = 16  # announced prefixes of a namespace
MOST_CHANGES = 10  # changes of its stamps after which an inactive client is dropped
LEAD_S = 20.0  # time before a stamp changes at which the next prefix is computed
_MOST_WARMED = 32  # prefixes remembered to count their use
_LOOK_S = 5.0  # interval of checking an exhausted allowance


@dataclass
class _Client:
    """The last turn of a client whose system prompt has stamps."""

    turn: Turn
    due: float | None  # when its next prefix must be computed


class Warmer:
    """Computes prefixes with the engine of one model. `count`, `ran` and `ended` are for the engine thread."""

    def __init__(
        self,
        inputs: InputProcessor,
        start: Callable[[Prefix], None],
        cancel: Callable[[Prefix], None],
        allowance: Allowance,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """start: makes the engine thread compute a prefix in the background, which ends with a call of `ended`.

        cancel: ends that computation. Both may be called from any thread.
        clock: returns seconds since the epoch.
        """
        self._inputs, self._start, self._cancel, self._allowance = inputs, start, cancel, allowance
        self._clock = clock
        self.counters = {"computed_tokens": 0, "used_tokens": 0, "seconds": 0.0}
        self._lock, self._wake, self._closed = threading.Lock(), threading.Event(), False
        self._queue: list[Prefix] = []
        self._computing: Prefix | None = None
        self._announced: dict[str, Prefix] = {}
        self._clients: dict[tuple[str, ...], _Client] = {}
        self._warmed: deque[Prefix] = deque(maxlen=_MOST_WARMED)

    # --- its thread ---

    def run(self) -> None:
        """Start due prefixes until the warmer is closed."""
        while not self._closed:
            self._wake.wait(self.poll())
            self._wake.clear()

    def poll(self) -> float | None:
        """Start a prefix if one is due. Return the seconds until the next check, or None to wait for an event."""
        now = self._clock()
        for client in list(self._clients.values()):
            if client.due is not None and client.due <= now:
                self._predict(client, now)
        with self._lock:
            waits = [client.due - now for client in self._clients.values() if client.due is not None]
            if self._computing is None and self._queue:
                if self._allowance.is_left:
                    self._computing = self._queue.pop(0)
                    self._computing.state = "computing"
                    self._start(self._computing)
                else:
                    waits.append(_LOOK_S)
        return max(0.0, min(waits)) if waits else None

    def close(self) -> None:
        """Make `run` return."""
        self._closed = True
        self._wake.set()

    def _predict(self, client: _Client, now: float) -> None:
        """Queue the prefix of the client's next prompt after the next change of its stamps."""
        turn, then = client.turn, now + LEAD_S
        change = next_change(turn.stamps, then)
        lasts_s = min(stamp.lasts_s for stamp in turn.stamps)
        client.due = change - LEAD_S if change - turn.at <= MOST_CHANGES * lasts_s else None
        self._add(turn, ("next", *turn.client), then)

    # --- any thread ---

    def turn(self, **values: Any) -> None:
        """Process a complete turn. values: fields of a Turn."""
        turn = Turn(**values)
        self._add(turn, turn.key)
        if turn.is_predictable:
            with self._lock:
                self._clients.pop(turn.client, None)
                self._clients[turn.client] = _Client(turn, next_change(turn.stamps, turn.at) - LEAD_S)
                while len(self._clients) > MOST_CLIENTS:
                    del self._clients[next(iter(self._clients))]
        self._wake.set()

    def _add(self, turn: Turn, key: tuple[str, ...], then: float | None = None) -> None:
        """Queue the prefix of a turn before others. It replaces a prefix with the same key."""
        try:
            prompts = turn.prompts(then)
            tokens = self._inputs.shared_prefix(prompts, turn.tools, turn.variables, turn.think)
        except EdgeError:  # the template refuses the turn, or it fills the context, so there is no next prompt
            return
        with self._lock:
            if self._computing is not None and self._computing.key == key:
                self._computing.is_stale = True
                self._cancel(self._computing)
            turns = [prefix for prefix in self._queue if not prefix.id and prefix.key != key]
            announced = [prefix for prefix in self._queue if prefix.id]
            self._queue = [Prefix(tokens, turn.namespace, turn.adapters, key), *turns[: MOST_QUEUED - 1], *announced]

    def announce(
        self,
        prompts: Sequence[Sequence[Mapping[str, Any]]] | None,
        text: str | None,
        tools: Sequence[Mapping[str, Any]],
        namespace: str,
        adapters: Sequence[float] | None,
    ) -> dict[str, Any]:
        """Queue a prefix that prompts will begin with. Return `Prefix.to_json`.

        prompts: two prompts that share the prefix; None: `text` is used instead. Raises Overloaded if the namespace has
        MOST_ANNOUNCED prefixes, and the errors of a prompt.
        """
        scales = None if adapters is None else tuple(adapters)
        tokens = (
            self._inputs.tokens_before(text or "") if prompts is None else self._inputs.shared_prefix(prompts, tools)
        )
        with self._lock:
            own = [prefix for prefix in self._announced.values() if prefix.namespace == namespace]
            for prefix in own:
                if (prefix.tokens, prefix.adapters) == (tokens, scales):
                    return prefix.to_json()
            if len(own) >= MOST_ANNOUNCED:
                raise Overloaded(f"{len(own)} prefixes are announced, which is the maximum; delete one")
            prefix = Prefix(tokens, namespace, scales, id=f"prefix-{secrets.token_hex(12)}")
            self._announced[prefix.id] = prefix
            self._queue.append(prefix)
        self._wake.set()
        return prefix.to_json()

    def announced(self, namespace: str) -> list[dict[str, Any]]:
        """Return the announced prefixes of a namespace."""
        with self._lock:
            return [prefix.to_json() for prefix in self._announced.values() if prefix.namespace == namespace]

    def forget(self, prefix_id: str, namespace: str) -> bool:
        """Delete an announced prefix. Return True if it existed.

        Its cached tokens are evicted like all others.
        """
        with self._lock:
            prefix = self._announced.get(prefix_id)
            if prefix is None or prefix.namespace != namespace:
                return False
            del self._announced[prefix_id]
            if prefix in self._queue:
                self._queue.remove(prefix)
            if prefix is self._computing:
                prefix.is_stale = True
                self._cancel(prefix)
            return True

    # --- the engine thread ---

    def ran(self, prefix: Prefix, seconds: float) -> None:
        """Record the time of a step that computed a prefix. Cancel the prefix if the allowance is used up."""
        prefix.seconds += seconds
        self.counters["seconds"] += seconds
        self._allowance.spend(seconds)
        if not self._allowance.is_left:
            self._cancel(prefix)

    def ended(self, prefix: Prefix, state: RequestState | None) -> None:
        """Record that a prefix was computed, or ended early.

        state: its request; None if the request could not begin.
        """
        with self._lock:
            self._computing = None
            if state is None:  # the client can announce it again
                self._announced.pop(prefix.id, None)
            elif prefix.cached is None:
                prefix.cached = state.cached_tokens
            if state is not None and state.answer:
                prefix.state = "ready"
                self.counters["computed_tokens"] += len(prefix.tokens) - (prefix.cached or 0)
                self._warmed.append(prefix)
                # A prefix that takes more than half of the time between two changes would come too late.
                for client in self._clients.values():
                    if prefix.key == ("next", *client.turn.client):
                        lasts_s = min(stamp.lasts_s for stamp in client.turn.stamps)
                        client.due = None if prefix.seconds > lasts_s / 2 else client.due
            elif state is not None and not prefix.is_stale:
                prefix.state = "queued"
                self._queue.insert(0, prefix)
        self._wake.set()

    def count(self, state: RequestState) -> None:
        """Count the tokens that a request reused from computed prefixes."""
        request, n_cached = state.request, state.cached_tokens or 0
        own = [p for p in self._warmed if (p.namespace, p.adapters) == (request.namespace, request.adapters)]
        used = {prefix: min(n_cached, common_prefix(prefix.tokens, request.prompt)) for prefix in own}
        gains = {prefix: used[prefix] - (prefix.cached or 0) for prefix in own}
        best = max(own, key=lambda prefix: gains[prefix], default=None)
        if best is not None and gains[best] > 0:
            self.counters["used_tokens"] += gains[best]
            best.cached = used[best]
