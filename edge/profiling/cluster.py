"""This device and its workers, which are connected while a program uses them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from devices.catalog import CATALOG
from devices.cluster_file import MAX_DEVICES, ClusterDevice, read_cluster
from devices.cluster_file import Cluster as ClusterFile
from devices.lab.lab import status as lab_status
from edge.arguments import checked
from edge.closing import Closing
from edge.cluster.fleet import MAX_WORKERS, Fleet, device
from edge.cluster.members import address_of
from edge.errors import WorkerError
from edge.models.paths import PathLike
from edge.profiling.profile import reachable
from partition.errors import PlanError
from partition.plan.onnx_plan import OnnxPlan
from partition.plan.plan import LOCAL, Plan


class Cluster(Closing):
    """This device and its workers.

    `open()` connects the workers and `close()` disconnects them. It is also a context manager.
    """

    @checked
    def __init__(
        self,
        workers: Sequence[str] = (),
        *,
        file: PathLike | None = None,
        insecure: bool = False,
        needs_all: bool = False,
    ) -> None:
        """Describe a cluster without connecting it.

        workers: name, HOST or HOST:PORT of each worker; empty: only this device.
        file: a cluster.toml, instead of workers.
        insecure: allow workers without encryption.
        needs_all: `open` fails if a worker does not answer, and a worker that is named twice gets two ranks.
        Raises ValueError if both workers and file are given, or a string instead of a list; PlanError for too many
        workers; and ClusterFileError if the file is invalid.
        """
        if workers and file is not None:
            raise ValueError("the file names the devices, and so do workers: leave one of them out")
        workers = tuple(map(address_of, workers))
        named = tuple(dict.fromkeys(map(device, workers))) if needs_all else workers
        self.devices = read_cluster(Path(file)) if file is not None else ClusterFile.of_addresses(named)
        if (others := sum(not entry.is_local for entry in self.devices.devices)) > MAX_WORKERS:
            raise PlanError(
                f"a cluster has at most {MAX_WORKERS} devices besides this one, got {others}; leave some out"
            )
        self.fleet: Fleet | None = None  # connected workers; None before `open`, or without workers
        self.notes: list[str] = []  # a sentence for each worker that did not answer
        self.insecure, self._has_names = insecure, file is not None
        self._all = tuple(map(device, workers)) if needs_all else ()
        self._stack = ExitStack()
        self._is_open = False

    def __repr__(self) -> str:
        others = ", ".join(device.address or device.name for device in self.devices.devices if not device.is_local)
        return f"<edge.Cluster of this device{others and ' and '}{others}, {'open' if self._is_open else 'closed'}>"

    @classmethod
    @checked
    def of_lab(cls, *, insecure: bool = False) -> Cluster | None:
        """Return this device and the emulated devices of the running lab, or None if no lab runs."""
        state = lab_status()
        return None if state is None else cls(tuple(state.addresses.values()), insecure=insecure or state.shaped)

    @classmethod
    @checked
    def of_presets(cls, names: Sequence[str]) -> Cluster:
        """Return preset devices from `devices.catalog`. The first one replaces this device.

        Raises PlanError for an unknown name, and for no or too many names.
        """
        if not 1 <= len(names) <= MAX_DEVICES:
            raise PlanError(f"1 to {MAX_DEVICES} presets can be compared, got {len(names)}")
        for name in names:
            if name not in CATALOG:
                raise PlanError(f"the preset {name[:40]!r} is unknown; choose from {', '.join(CATALOG)}")
        counts = [names[: i + 1].count(name) for i, name in enumerate(names)]
        titles = [name if count == 1 else f"{name}-{count}" for name, count in zip(names, counts, strict=True)]
        first, *others = (ClusterDevice(title, preset=name) for title, name in zip(titles, names, strict=True))
        cluster = cls()
        cluster.devices = ClusterFile((replace(first, address=LOCAL), *others))
        cluster._has_names = True
        return cluster

    @property
    def addresses(self) -> tuple[str, ...]:
        """HOST:PORT of each worker. A worker with two ranks occurs twice."""
        return self._all or tuple(worker.address for worker in self.devices.workers if worker.address is not None)

    def open(self) -> Cluster:
        """Connect the workers that answer. `notes` names the others.

        Raises TransportError or WorkerError if a worker answers but cannot take part, or if a required worker does not
        answer.
        """
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
        """Close all connections, and end the workers' processes that belong to them."""
        self.fleet, self._is_open = None, False
        self._stack.close()

    def check_open(self) -> None:
        """Raise WorkerError if `open` was not called, because a plan would then use only this device."""
        if not self._is_open:
            raise WorkerError("the cluster is not open: call open(), or use it in a with block")

    def connected(self, plan: Plan | OnnxPlan) -> Fleet | None:
        """Return the workers of a plan, or None if it has none. Raises WorkerError if one is not connected."""
        there = self.fleet.workers if self.fleet else {}
        missing = [address for address in plan.all_devices if device(address) not in (LOCAL, *there)]
        if missing:
            raise WorkerError(
                f"the plan needs {', '.join(missing)}; connected are {', '.join(there) or 'none'}: open a cluster with"
                " them"
            )
        return self.fleet

    def __enter__(self) -> Cluster:
        return self.open()


def _named(devices: ClusterFile, fleet: Fleet) -> ClusterFile:
    """Return the devices with the workers' own names, if these are unique."""
    names = {address: worker.name for address, worker in fleet.workers.items()}
    if len({LOCAL, *names.values()}) <= len(names):
        return devices
    return replace(devices, devices=tuple(replace(d, name=names.get(d.address or "", d.name)) for d in devices.devices))
