"""The connected workers of a model: reach them, and check that their versions and security settings match."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from devices.names import host_name, join_address, parse_address
from devices.paths import credentials_folder
from devices.profile import DeviceProfile
from devices.trust import credentials
from edge.closing import Closing
from edge.cluster.client import Remote
from edge.cluster.connect import CONNECT_TIMEOUT_S, reach
from edge.errors import WorkerError
from edge.parallel.engine_kinds import own_kind
from edge.tasks import CancelScope, results, unwaited_pool
from edge.version import version
from partition.plan.plan import LOCAL, Plan
from transport.errors import Refused

MAX_WORKERS = 63


class Fleet(Closing):
    """Connected workers, by the addresses that the caller gave. `close()` ends the connections; a `Fleet` is also a
    context manager.
    """

    workers: dict[str, Remote]
    profiles: dict[str, DeviceProfile]

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        insecure: bool = False,
        timeout_s: float = CONNECT_TIMEOUT_S,
        return_s: float | None = None,
    ) -> None:
        """Connect to all workers concurrently.

        addresses: HOST or HOST:PORT. A device that occurs twice, also as "pi" and "pi:7070", gets two ranks.
        timeout_s: time for each worker to answer.
        return_s: as `Remote.return_s`.

        Raises the errors of `reach`, and Refused or WorkerError if a worker cannot take part. The first error is
        raised.
        """
        if not 1 <= len(addresses) <= MAX_WORKERS:
            raise ValueError(f"{len(addresses)} workers were named; 1 to {MAX_WORKERS} are possible")
        different = tuple(dict.fromkeys(map(device, addresses)))
        self._closing, self._return_s = CancelScope(), return_s
        try:
            # Workers that connect after a failure are closed immediately.
            with unwaited_pool(len(different), "reach") as pool:
                reached = results([pool.submit(self._reached, address, insecure, timeout_s) for address in different])
                described = results([pool.submit(worker.describe) for worker in reached])
            for worker, (profile, said) in zip(reached, described, strict=True):
                check_versions(worker.name, profile)
                own_kind().check_worker(worker.name, sleeps=said.sleeps)
                if said.leaving:
                    raise Refused(f"{worker.name} is stopping and accepts no new sessions; continue without it")
            at = {address: different.index(device(address)) for address in addresses}
            self.workers = {address: reached[i] for address, i in at.items()}
            self.profiles = {address: described[i][0] for address, i in at.items()}
            self._check_trust()
            label(reached, self.local_name)
        except BaseException:
            self.close()
            raise

    @property
    def secure(self) -> bool:
        """True if all traffic between the devices is encrypted."""
        return all(worker.secure for worker in self.workers.values())

    @property
    def credentials(self) -> Path | None:
        """Folder of this device's certificate, or None if the links are not encrypted."""
        return credentials_folder() if self.secure else None

    @property
    def local_name(self) -> str:
        """Name of this device on the other devices."""
        return own_name(secure=self.secure)

    def memory_of(self, address: str) -> int:
        """Return the bytes of memory that a model may take on a worker's device."""
        have = self.profiles[address].memory_available_bytes
        return min(have, self.profiles[address].memory_limit_bytes or have)

    def close(self) -> None:
        """End all connections, and with them all sessions."""
        self._closing.close()

    def _reached(self, address: str, insecure: bool, timeout_s: float) -> Remote:
        worker = reach(address, insecure=insecure, timeout_s=timeout_s)
        self._closing.then(worker.close)
        worker.return_s = self._return_s
        return worker

    def _check_trust(self) -> None:
        names: dict[bool, list[str]] = {True: [], False: []}
        for worker in dict.fromkeys(self.workers.values()):
            names[worker.secure].append(worker.name)
        if names[True] and names[False]:
            raise Refused(
                f"{', '.join(names[True])} encrypt and {', '.join(names[False])} do not, so they cannot be linked: let"
                " all join the cluster and listen on an address of the network"
            )


def own_name(*, secure: bool) -> str:
    """Return this device's name: its name in the cluster if `secure`, else its host name."""
    own = credentials.load(credentials_folder()) if secure else None
    return own.holder.name if own else host_name()


def device(address: str) -> str:
    """Return the canonical HOST:PORT of an address; LOCAL stays LOCAL. Raises ValueError if it is not an address."""
    return LOCAL if address == LOCAL else join_address(*parse_address(address)).lower()


def by_device(plan: Plan) -> Plan:
    """Return the plan with canonical addresses, as `device` returns them."""
    return plan.with_shards(lambda shard: replace(shard, device=device(shard.device)))


def label(workers: Sequence[Remote], *others: str) -> None:
    """Make labels unique: add the address to the label of a worker whose name occurs twice or is among `others`."""
    names = Counter([*others, *(worker.name for worker in workers)])
    for worker in workers:
        if names[worker.name] > 1:
            worker.label = f"{worker.name} at {join_address(worker.host, worker.port)}"


def check_versions(name: str, profile: DeviceProfile) -> None:
    """Raise WorkerError if a device runs another version of edge or llama-cpp-python than this one."""
    for what, there, here in (
        ("edge", profile.runtime, version("edge-runtime")),
        ("llama-cpp-python", profile.llama_cpp, version("llama-cpp-python")),
    ):
        if there != here:
            raise WorkerError(f"{name} runs {what} {there}, this device {here}; install the same version on both")
