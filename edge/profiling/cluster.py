"""This device and its workers, as a program names them, and connected while they are used."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from devices.catalog import CATALOG
from devices.cluster_file import MAX_DEVICES, ClusterDevice, read_cluster
from devices.cluster_file import Cluster as ClusterFile
from devices.lab.lab import status as lab_status
from edge.closing import Closing
from edge.cluster.fleet import MAX_WORKERS, Fleet, device
from edge.errors import WorkerError
from edge.models.paths import PathLike
from edge.profiling.profile import reachable
from partition.errors import PlanError
from partition.plan.onnx_plan import OnnxPlan
from partition.plan.plan import LOCAL, Plan


class Cluster(Closing):
    """This device and its workers. `open()` connects the workers, `close()` disconnects them; it is also a context
    manager.
    """

    def __init__(
        self,
        workers: Sequence[str] = (),
        *,
        file: PathLike | None = None,
        insecure: bool = False,
        needs_all: bool = False,
    ) -> None:
        """workers: HOST or HOST:PORT of each; none: this device alone. file: a cluster.toml, instead of workers.
        insecure: also workers that do not encrypt. needs_all: `open` fails if a worker does not answer, and a worker
        that is named twice gets two ranks. Raises ValueError if both workers and file are given, or a text instead
        of a list; PlanError for too many workers; ClusterFileError if the file is invalid.
        """
        if isinstance(workers, str):
            raise ValueError(f"workers must be a list, such as [{workers!r}]")
        if workers and file is not None:
            raise ValueError("the file names the devices, and so do workers: leave one of them out")
        named = tuple(dict.fromkeys(map(device, workers))) if needs_all else workers
        self.devices = read_cluster(Path(file)) if file is not None else ClusterFile.of_addresses(named)
        if (others := sum(not entry.is_local for entry in self.devices.devices)) > MAX_WORKERS:
            raise PlanError(f"{MAX_WORKERS} devices beside this one are the most, got {others}; leave some out")
        self.fleet: Fleet | None = None  # the workers that answered; None before `open`, and where there is none
        self.notes: list[str] = []  # who did not answer, for people
        self.insecure, self._has_names = insecure, file is not None
        self._all = tuple(map(device, workers)) if needs_all else ()
        self._stack = ExitStack()
        self._is_open = False

    @classmethod
    def of_lab(cls, *, insecure: bool = False) -> Cluster | None:
        """Return this device and the emulated devices of the running lab, or None if no lab runs."""
        state = lab_status()
        return None if state is None else cls(tuple(state.addresses.values()), insecure=insecure or state.shaped)

    @classmethod
    def of_presets(cls, names: Sequence[str]) -> Cluster:
        """Return devices as `devices.catalog` describes them; the first replaces this device. Raises PlanError for
        an unknown name, and for no or too many names."""
        if not 1 <= len(names) <= MAX_DEVICES:
            raise PlanError(f"1 to {MAX_DEVICES} presets can be compared, got {len(names)}")
        for name in names:
            if name not in CATALOG:
                raise PlanError(f"no preset {name[:40]!r}; known are {', '.join(CATALOG)}")
        counts = [names[: i + 1].count(name) for i, name in enumerate(names)]
        titles = [name if count == 1 else f"{name}-{count}" for name, count in zip(names, counts, strict=True)]
        first, *others = (ClusterDevice(title, preset=name) for title, name in zip(titles, names, strict=True))
        cluster = cls()
        cluster.devices = ClusterFile((replace(first, address=LOCAL), *others))
        cluster._has_names = True
        return cluster

    @property
    def addresses(self) -> tuple[str, ...]:
        """HOST:PORT of each worker. A worker with two ranks is there twice."""
        return self._all or tuple(worker.address for worker in self.devices.workers if worker.address is not None)

    def open(self) -> Cluster:
        """Connect the workers that answer; `notes` names the others. Raises TransportError or WorkerError if a
        worker answers and cannot take part, or does not answer and is needed."""
        if not self._is_open:
            if self._all:
                self.fleet = self._stack.enter_context(Fleet(self._all, insecure=self.insecure))
            else:
                self.fleet, self.notes = self._stack.enter_context(reachable(self.devices, insecure=self.insecure))
            self._is_open = True
            if self.fleet is not None and not self._has_names:
                self.devices = _named(self.devices, self.fleet)
        return self

    def close(self) -> None:
        """End all connections, and everything that runs on the workers for them."""
        self.fleet, self._is_open = None, False
        self._stack.close()

    def check_open(self) -> None:
        """Raise WorkerError if `open` was not called: a plan would then be for this device alone."""
        if not self._is_open:
            raise WorkerError("the cluster is not open: call open(), or use it in a with block")

    def connected(self, plan: Plan | OnnxPlan) -> Fleet | None:
        """Return the workers of a plan, or None if it has none. Raises WorkerError if one is not connected."""
        there = self.fleet.workers if self.fleet else {}
        named = plan.all_devices if isinstance(plan, Plan) else plan.devices
        missing = [address for address in named if device(address) not in (LOCAL, *there)]
        if missing:
            raise WorkerError(
                f"the plan needs {', '.join(missing)}; connected are {', '.join(there) or 'none'}: open a cluster with"
                " them"
            )
        return self.fleet

    def __enter__(self) -> Cluster:
        return self.open()


def _named(devices: ClusterFile, fleet: Fleet) -> ClusterFile:
    """The same with the names that workers have, where these are different."""
    names = {address: worker.name for address, worker in fleet.workers.items()}
    if len({LOCAL, *names.values()}) <= len(names):
        return devices
    return replace(devices, devices=tuple(replace(d, name=names.get(d.address or "", d.name)) for d in devices.devices))
