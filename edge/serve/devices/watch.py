"""Watch of this device and of workers, for the page: each answers how it is, at its own pace.

Threads ask the workers, so that a worker that does not answer delays neither the server nor the other workers. They ask
only while a client polls the state of the devices, and end soon afterwards.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from devices import discovery
from devices.errors import DiscoveryError, TrustError
from devices.names import host_name, join_address
from devices.profile import DeviceProfile, describe
from edge.cluster.client import Remote
from edge.cluster.connect import reach
from edge.cluster.roster import has_answered, is_slow
from edge.errors import WorkerError
from edge.llama.own_gpu import own_gpu
from partition.plan.plan import LOCAL
from quant.text import printable
from transport.errors import LinkTimeout, TransportError

LOOKED_S = 10.0  # the watch ends this long after the last poll of a client
LOOK_S = 0.8  # interval of the questions to one worker
OWN_S = 3.0  # interval of the readings of this device
_SLOW_S = 10.0  # interval of the readings of the file with slow workers
_AT_FULL_PACE = 4  # with more workers, the interval grows, so that the watch takes no more of this machine
ANSWER_S = 1.5  # time for a worker to answer
CONNECT_S = 2.0
AGAIN_S = 2.0  # interval of attempts to connect to a worker that is lost
TIMEOUTS_OF_LOSS = 2  # a busy worker may miss one question
BROWSE_AGAIN_S = 15.0  # interval of searches for members that do not answer
_THREADS = 8


@dataclass(frozen=True)
class Sight:
    """The latest knowledge about a device."""

    name: str = ""  # empty: it has never answered
    profile: DeviceProfile | None = None
    is_member: bool = False  # True if it has shown a certificate of this cluster
    is_slow: bool = False
    latency_s: float | None = None  # best of the latest questions, one way
    lost_at: float | None = None  # time.monotonic() of the loss; None: it answers, or was not asked yet
    why: str = ""  # reason of the loss
    timeouts: int = 0  # questions in a row without an answer

    @property
    def answers(self) -> bool:
        """True if the device answered the last question."""
        return self.profile is not None and self.lost_at is None


class DeviceWatch:
    """Asks devices while a client polls their state. No method waits."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._workers: dict[str, bool] = {}  # canonical addresses; True: the worker need not encrypt
        self._missing: frozenset[str] = frozenset()  # names of members whose address is not known
        self._sights: dict[str, Sight] = {}
        self._slow: dict[str, tuple[float, bool]] = {}  # time of the reading, and the result, by address
        self._looked_at = 0.0
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()
        self.announced: dict[str, str] = {}  # addresses of members that announce themselves, by name

    def look(self, workers: Mapping[str, bool], missing: frozenset[str] = frozenset()) -> dict[str, Sight]:
        """Return the sights of this device (LOCAL) and these workers, and keep asking the workers for LOOKED_S.

        workers: canonical addresses; True if a worker need not encrypt.
        missing: names of members of the cluster to search for in the network.
        """
        with self._lock:
            self._workers, self._missing, self._looked_at = dict(workers), missing, self._clock()
            if self._thread is None and not self._closed.is_set():
                self._thread = threading.Thread(target=self._run, name="devices", daemon=True)
                self._thread.start()
            return {address: sight for address, sight in self._sights.items() if address in (LOCAL, *workers)}

    def close(self) -> None:
        """Stop asking."""
        self._closed.set()

    # --- threads ---

    def _run(self) -> None:
        remotes: dict[str, Remote] = {}
        pending: set[str] = set()  # addresses of questions in progress
        next_at: dict[str, float] = {}
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="device") as pool:

            def ask(address: str, work: Callable[[], float]) -> None:
                try:
                    next_at[address] = self._clock() + work()
                finally:
                    pending.discard(address)

            while self._goes_on():
                with self._lock:
                    workers, missing = dict(self._workers), self._missing
                for address in remotes.keys() - workers.keys() - pending:
                    remotes.pop(address).close()
                tasks: dict[str, Callable[[], float]] = {LOCAL: self._look_here}
                for address, insecure in workers.items():
                    tasks[address] = partial(self._look_at, address, insecure, remotes, len(workers))
                if missing:
                    tasks[_BROWSING] = partial(self._browse, missing)
                for address, work in tasks.items():
                    if address not in pending and next_at.get(address, 0.0) <= self._clock():
                        pending.add(address)
                        try:
                            pool.submit(ask, address, work)
                        except RuntimeError:  # the interpreter is ending
                            return
                self._closed.wait(LOOK_S / 4)
        for remote in remotes.values():
            remote.close()

    def _goes_on(self) -> bool:
        """Return False, and forget the thread, if no client has polled for LOOKED_S."""
        with self._lock:
            if self._closed.is_set() or self._clock() - self._looked_at > LOOKED_S:
                self._thread = None
                return False
            return True

    def _look_here(self) -> float:
        gpu = own_gpu()
        profile = describe(host_name(), gpu=gpu.name if gpu else None)
        if gpu is not None:
            profile = replace(profile, gpu_total_bytes=gpu.total_bytes, gpu_free_bytes=gpu.free_bytes)
        self._put(LOCAL, Sight(name="this device", profile=profile))
        return OWN_S

    def _look_at(self, address: str, insecure: bool, remotes: dict[str, Remote], n_workers: int) -> float:
        """Ask a worker. Return the seconds until the next question."""
        sight = self._sights.get(address, Sight())
        remote = remotes.get(address)
        try:
            is_new = remote is None
            if remote is None:
                remote = remotes[address] = reach(address, insecure=insecure, timeout_s=CONNECT_S)
            began = self._clock()
            profile, said = remote.describe(ANSWER_S)
            took_s = (self._clock() - began) / 2
            if is_new:
                has_answered(address, remote.name)
        except (TransportError, TrustError, WorkerError, ValueError, OSError) as error:
            return self._lost(address, sight, remotes, error)
        best_s = took_s if sight.latency_s is None else min(took_s, 1.05 * sight.latency_s)  # forgets slowly
        self._put(
            address,
            Sight(
                name=printable(remote.name)[:80],
                profile=profile,
                is_member=remote.secure,
                is_slow=self._is_slow(address),
                latency_s=best_s,
                lost_at=self._clock() if said.leaving else None,
                why="is about to end" if said.leaving else "",
            ),
        )
        return LOOK_S * max(1.0, n_workers / _AT_FULL_PACE)

    def _is_slow(self, address: str) -> bool:
        at, slow = self._slow.get(address, (-_SLOW_S, False))
        if self._clock() - at >= _SLOW_S:
            slow = is_slow(address)
            self._slow[address] = self._clock(), slow
        return slow

    def _lost(self, address: str, sight: Sight, remotes: dict[str, Remote], error: Exception) -> float:
        """Record that a worker did not answer. Return the seconds until the next attempt."""
        if isinstance(error, LinkTimeout) and sight.answers and sight.timeouts + 1 < TIMEOUTS_OF_LOSS:
            self._put(address, replace(sight, timeouts=sight.timeouts + 1))
            return 0.0
        if (remote := remotes.pop(address, None)) is not None:
            with suppress(Exception):
                remote.close()
        if sight.lost_at is None or not sight.why:  # otherwise the first reason is the one to show
            sight = replace(sight, lost_at=sight.lost_at or self._clock(), why=printable(str(error))[:300])
        self._put(address, sight)
        return AGAIN_S

    def _browse(self, missing: frozenset[str]) -> float:
        """Search for members in the network."""
        with suppress(DiscoveryError, OSError):
            services = discovery.browse()
            self.announced |= {s.name: join_address(s.addresses[0], s.port) for s in services if s.name in missing}
        return BROWSE_AGAIN_S

    def _put(self, address: str, sight: Sight) -> None:
        with self._lock:
            self._sights[address] = sight


_BROWSING = " search"  # key of the search among the questions; no address has a space
