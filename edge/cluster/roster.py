"""Discovery of workers: find them by mDNS or by address, ask for their state, and measure the links between pairs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from devices import discovery
from devices.errors import DiscoveryError, TrustError
from devices.names import join_address
from devices.remembered import KEPT_AGE_S, Remembered
from edge.cluster.client import Remote
from edge.cluster.connect import credentials, reach
from edge.cluster.diagnose import LinkReport, measure_link
from edge.cluster.fleet import device, label
from edge.cluster.members import SEEN, browser_address, joined_members, last_address
from edge.errors import WorkerError
from edge.tasks import SILENT, Steps
from transport.errors import LinkClosed, LinkTimeout, TransportError
from transport.received import printable

AT_ONCE = 16  # workers queried concurrently
# SLOW and these are the states of a worker; LOST: answered within the last 30 days, silent now
JOINED, LEAVING, LOST = "joined", "leaving", "lost"
SLOW = "slow"  # a model that ran on it within the last day found it slower than before
# keys of a session whose worker divides memory between sessions
_SHARE = ("share_bytes", "least_bytes", "most_bytes", "use")
_SLOWED = "slow-workers"  # name of the file that remembers slowdown factors, by address


@dataclass
class Entry:
    """A worker that was discovered or named."""

    address: str
    name: str | None = None  # announced name, later the worker's own or that of its certificate
    worker: Remote | None = None  # None if the worker cannot be used; `error` holds the reason
    profile: dict[str, Any] | None = None
    state: dict[str, Any] | None = None
    error: str | None = None
    silent: bool = False  # True if the error is that the worker does not answer
    membership: str | None = None  # JOINED, SLOW, LEAVING or LOST; None if it never answered or cannot be used

    def to_json(self) -> dict[str, Any]:
        """Return plain values for JSON, as described in docs/cli/devices.md."""
        return {
            "name": self.name,
            "address": self.address or None,
            "answers": self.worker is not None,
            "state": self.membership,
            "secure": self.worker.secure if self.worker else None,
            "profile": self.profile,
            **(self.state or {"sessions": None, "slices_bytes": None, "slices_limit_bytes": None}),
            "error": self.error,
        }

    def why(self) -> str:
        """Return the error, preceded by the worker's name or address if the error lacks it."""
        error = self.error or ""
        said = error.startswith(self.name) if self.name else self.address in error
        return error if said else f"{self.name or self.address}: {error}"


@dataclass
class Pair:
    """The measurement of the link between two workers, or the error that prevented it."""

    a: str  # device names
    b: str
    report: LinkReport | None = None
    error: str | None = None


def mark_slow(address: str, times: float) -> None:
    """Remember for a day that a device takes `times` as long as before. A factor of at most 1 clears the entry."""
    slowed = Remembered(_SLOWED)
    slowed.put(address, round(times, 2)) if times > 1 else slowed.forget(address)


def is_slow(address: str) -> bool:
    """Return True if a model that ran on a worker within the last day found it slower than before."""
    return Remembered(_SLOWED).get(device(address)) is not None


def has_answered(address: str, name: str) -> None:
    """Remember the address at which a worker of this name answers."""
    Remembered(SEEN).put(address, name)


@contextmanager
def roster(
    addresses: Iterable[str], *, discover: bool, insecure: bool, timeout_s: float, steps: Steps = SILENT
) -> Iterator[list[Entry]]:
    """Return all workers, connected until the end of the block; workers found by mDNS come first.

    addresses: workers to query in addition to discovery.
    timeout_s: time for discovery, and for each worker to answer. Both run at the same time.

    Raises TrustError if this device's own credentials cannot be used.
    """
    credentials()  # report an error of this device's own credentials once, instead of for every worker
    named_entries = [Entry(address) for address in dict.fromkeys(addresses)]
    named = {entry.address for entry in named_entries}
    with ThreadPoolExecutor(AT_ONCE) as pool:

        def ask(entries: Sequence[Entry]) -> list[Future[None]]:
            return [pool.submit(_ask, entry, insecure, timeout_s) for entry in entries]

        answered = ask(named_entries)
        discovered = _discovered(timeout_s, steps.say) if discover else []
        names = {entry.address: entry.name for entry in discovered}
        discovered = [entry for entry in discovered if entry.address not in named]
        for done in [*answered, *ask(discovered)]:
            done.result()
        if discover:
            lost = _missing([*discovered, *named_entries])
            for done in ask([entry for entry in lost if entry.address]):
                done.result()
            discovered += lost
    for entry in named_entries:
        entry.name = entry.name or names.get(entry.address)
    try:
        yield [*discovered, *named_entries]
    finally:
        for entry in (*discovered, *named_entries):
            if entry.worker:
                entry.worker.close()


def _missing(entries: Sequence[Entry]) -> list[Entry]:
    """Return an entry for each member of the cluster that is not among the entries.

    Its address is the last one at which it answered, or "" if that is not known.
    """
    names = {entry.name for entry in entries}
    missing = [
        Entry(browser_address(name) or last_address(name) or "", name) for name in joined_members() if name not in names
    ]
    for entry in missing:
        if not entry.address:
            entry.membership, entry.silent = LOST, True
            entry.error = f"{entry.name} joined the cluster, but does not announce itself now"
    return missing


def measure_pairs(entries: Sequence[Entry], steps: Steps = SILENT) -> list[Pair]:
    """Measure the link of every pair of workers that answered, one after the other so that they do not disturb each
    other.
    """
    workers = [entry.worker for entry in entries if entry.worker]
    label(workers)
    pairs = list(combinations(workers, 2))
    with steps.step("Measuring links", len(pairs), "links") as show:
        measured = []
        for number, (a, b) in enumerate(pairs, 1):
            try:
                measured.append(Pair(a.label, b.label, measure_link(a, b)))
            except (TransportError, WorkerError) as error:
                measured.append(Pair(a.label, b.label, error=str(error)))
            show(number)
    return measured


def announced() -> list[str]:
    """Return the addresses of all workers that announce themselves by mDNS. Takes `discovery.BROWSE_S` seconds.

    The list is empty if the network does not allow mDNS.
    """
    return [entry.address for entry in _discovered(discovery.BROWSE_S, lambda why: None)]


def _discovered(timeout_s: float, say: Callable[[str], None]) -> list[Entry]:
    """Return the workers that announce themselves. If mDNS fails, show the error and return none."""
    try:
        return [
            Entry(join_address(service.addresses[0], service.port), service.name)
            for service in discovery.browse(timeout_s)
        ]
    except DiscoveryError as error:
        say(str(error))
        return []


def _ask(entry: Entry, insecure: bool, timeout_s: float) -> None:
    """Query a worker, and fill its entry with the answer or the error."""
    worker = None
    try:
        worker = reach(entry.address, insecure=insecure, timeout_s=timeout_s)
        profile, said = worker.describe(timeout_s)
    except (TransportError, TrustError, WorkerError) as error:
        entry.error, entry.silent = str(error), isinstance(error, (LinkClosed, LinkTimeout))
        seen = Remembered(SEEN).get(entry.address, KEPT_AGE_S) if entry.silent else None
        if seen is not None:
            entry.membership, entry.name = LOST, entry.name or printable(str(seen[0]))
        if worker is not None:
            worker.close()
        return
    entry.worker, entry.name, entry.profile = worker, worker.name, profile.to_json()
    entry.membership = LEAVING if said.leaving else SLOW if is_slow(entry.address) else JOINED
    has_answered(entry.address, worker.name)
    entry.state = {
        "sessions": [
            {
                "rank": s.rank,
                "world_size": s.world_size,
                "slice": s.slice,
                "memory_bytes": s.memory_bytes,
                **({name: getattr(s, name) for name in _SHARE} if s.share_bytes else {}),
            }
            for s in said.sessions
        ],
        "slices_bytes": said.slices_bytes,
        "slices_limit_bytes": said.slices_limit_bytes,
    }
