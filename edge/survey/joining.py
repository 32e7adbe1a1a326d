"""Devices that join while a model runs on others: found, and measured in moments in which nobody is disturbed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TypeVar

from devices.cluster_file import Cluster
from edge.cluster.fleet import MAX_WORKERS, Fleet, device
from edge.errors import EdgeError, Interrupted
from edge.survey.llm_survey import llm_survey
from edge.survey.profile import reachable
from edge.survey.survey import Survey
from edge.tasks import CancelScope, Progress
from partition.plan.plan import LOCAL
from partition.predict.speeds import DeviceSpeed
from quant.gguf.file import GgufFile

TRIES = 3  # to measure a device that is there: more would only disturb the others
_LOOK_S = 0.05  # between two looks whether what is under way may go on

T = TypeVar("T")

Seek = Callable[[], Sequence[str]]  # gives the addresses of all workers that could take part by now


@dataclass(frozen=True)
class Joined:
    """A device that was measured."""

    address: str  # as `device` writes it
    name: str  # for people
    survey: Survey[DeviceSpeed]  # what was known before, and this device


class Newcomers:
    """Looks for devices that nothing is known of."""

    def __init__(self, seek: Seek, file: GgufFile, model_digest: str, transport: str, *, insecure: bool) -> None:
        """file: the model that they are to be measured for. transport: of links."""
        self._seek, self._file, self._digest = seek, file, model_digest
        self._transport, self._insecure = transport, insecure
        self._tries: Counter[str] = Counter()  # that failed, by address

    def measured(self, known: Survey[DeviceSpeed], check: Progress) -> Joined | None:
        """Measure one device that is there and not known; None where there is none that can be.

        check: what it raises ends this within moments, and that is no failed try. A device that failed TRIES times is
        left alone.
        """
        before = [device(speed.device) for speed in known.speeds]
        for address in dict.fromkeys(map(device, self._seek())):
            check(0, 0)
            if address in before or self._tries[address] >= TRIES or len(before) > MAX_WORKERS:
                continue
            try:
                joined = self._measured(address, known, check)
            except Interrupted:
                raise
            except EdgeError:
                joined = None
            if joined is not None:
                return joined
            self._tries[address] += 1
        return None

    def _measured(self, address: str, known: Survey[DeviceSpeed], check: Progress) -> Joined | None:
        addresses = [one for speed in known.speeds if (one := device(speed.device)) != LOCAL]
        with reachable(Cluster.of_addresses([address]), insecure=self._insecure) as (alone, _):
            if alone is None:
                return None
        check(0, 0)
        with reachable(Cluster.of_addresses([*addresses, address]), insecure=self._insecure) as (fleet, _):
            if fleet is None or address not in fleet.workers or _is_known(fleet, address):
                return None
            survey = _while_allowed(
                lambda scope: llm_survey(
                    fleet, tuple(fleet.workers), self._file, self._digest,
                    transport=self._transport, known=known, scope=scope,
                ),
                check,
            )  # fmt: skip
            return Joined(address, fleet.workers[address].label, survey)


def _is_known(fleet: Fleet, address: str) -> bool:
    """Whether a device takes part already, under another address: names of a cluster's members differ."""
    new = fleet.workers[address]
    others = (worker for other, worker in fleet.workers.items() if other != address)
    return new.secure and any(new.name == worker.name for worker in others)


def _while_allowed(work: Callable[[CancelScope], T], check: Progress) -> T:
    """Return the result of `work`. An error of `check` meanwhile is raised at once, and the work's scope is closed."""
    pool = ThreadPoolExecutor(1, "joining")
    try:
        with CancelScope() as scope:
            done: Future[T] = pool.submit(work, scope)
            while not done.done():
                wait([done], timeout=_LOOK_S)
                check(0, 0)
        return done.result()
    finally:
        pool.shutdown(wait=False)
