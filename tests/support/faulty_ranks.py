"""A cluster whose devices are threads of this process; a fault is injected into their sockets at a chosen frame.

Ranks are real ones (`edge.parallel`), and so is all that notices a loss and goes on without it (`RankGroup`,
`LivenessMonitor`, `Supervisor`). What is different from a deployment: no daemon, no process, and slices are
written, not sent.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from devices.cluster_file import Cluster as ClusterFile
from edge.cluster import liveness
from edge.cluster.llm_ranks import LlmRanks
from edge.cluster.rank_group import RankGroup
from edge.cluster.session import EngineSession
from edge.deployment import deploy, supervisor
from edge.errors import NotEnoughMemory
from edge.llama import llama
from edge.llm.options import EngineOptions
from edge.parallel.engine import DistributedEngine
from edge.parallel.follower import follow
from edge.parallel.replaceable import ReplaceableEngine
from edge.parallel.shard import Shard
from edge.parallel.topology import place
from edge.planning.choice import PlanChoice
from edge.tasks import Steps
from edge.worker.rank import failed
from partition.model.file import ModelFile
from partition.plan.arrange import make_plan
from partition.plan.plan import LOCAL, Plan, Slice
from partition.slices.gguf_slice import limits
from quant.gguf.file import GgufFile
from tests.support.helpers import TIMEOUT_S
from tests.support.slices import write
from transport import edge_pb2 as pb
from transport.collective import Group
from transport.errors import LinkClosed
from transport.frame import HEADER_BYTES, Kind
from transport.link import Deadlines, Link
from transport.tcp_link import TcpLink

FAULTS = ("kill", "freeze", "cut", "corrupt", "slow")
OF_LINKS = ("cut", "corrupt", "slow")  # what can also happen to the device that asks
_SLOW_FRAMES, _SLOW_S = 20, 0.002
_LOOK_S = 0.01  # how often somebody looks whether a device stands still; lost after four of them
# A frame of which a part is missing ends a wait at the latest then.
_DEADLINES = Deadlines(step_timeout_s=5.0, send_timeout_s=5.0)
_LAST = (Kind.ERROR, Kind.CLOSE)


@dataclass
class Fault:
    """A fault at one of the next frames that a device sends."""

    frames: int  # before it
    kind: str
    bit: int = 0  # of the header, that is another


class Device:
    """A device: what it has on its links, and whether it answers."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.answers = True
        self.has_room = True
        self.fails_at: int | None = None  # the frame at which every new rank of it is killed
        self.links: list[FaultyLink] = []  # of the rank it has now
        self.killed = False  # its rank, which says no word
        self.frozen_at: float | None = None
        self.faults: list[Fault] = []
        self._slow_frames = 0
        self._thawed = threading.Event()

    def come_back(self) -> None:
        """Answer again. What stood still goes on, and finds its links closed."""
        self.answers, self.frozen_at = True, None
        self._thawed.set()

    def begin(self) -> None:
        """A new rank, which nothing has happened to."""
        self.links, self.killed = [link for link in self.links if link.broken is None], False
        if self.fails_at is not None:
            self.faults = [Fault(self.fails_at, "end")]

    def end(self) -> None:
        """As a process that is killed ends: its connections break, and nobody says goodbye."""
        for link in self.links:
            link.break_off()

    def hurt(self, link: FaultyLink, header: bytes) -> bytes:
        """The header to send; LinkClosed where nothing is sent any more."""
        if self._slow_frames:
            self._slow_frames -= 1
            time.sleep(_SLOW_S)
        for fault in self.faults:
            fault.frames -= 1
        due = [fault for fault in self.faults if fault.frames < 0]
        self.faults = [fault for fault in self.faults if fault.frames >= 0]
        for fault in due:
            header = self._happens(fault, link, header)
        return header

    def _happens(self, fault: Fault, link: FaultyLink, header: bytes) -> bytes:
        if fault.kind == "slow":
            self._slow_frames = _SLOW_FRAMES
        elif fault.kind == "corrupt":
            data = bytearray(header)
            data[fault.bit // 8] ^= 1 << fault.bit % 8
            return bytes(data)
        elif fault.kind == "cut":
            link.break_off(header[: HEADER_BYTES // 2])
            raise LinkClosed("the link was cut")
        elif fault.kind in ("kill", "end"):  # the device, or its process alone
            self.answers, self.killed = fault.kind == "end", True
            self.end()
            raise LinkClosed("the process was killed")
        else:
            self._thawed.clear()
            self.answers, self.frozen_at = False, time.monotonic()
            self._thawed.wait(TIMEOUT_S)
        return header


class FaultyLink(TcpLink):
    """A device's end of a link, over which something happens to what it sends."""

    def __init__(self, sock: socket.socket, peer: str, device: Device) -> None:
        super().__init__(sock, peer, _DEADLINES, poll_s=0)
        self._device = device
        device.links.append(self)

    def break_off(self, last: bytes = b"") -> None:
        """End in the middle of whatever there is. last: the bytes that still go out."""
        with suppress(LinkClosed):
            self._try_send([memoryview(last)])
        self._break(LinkClosed(f"the link to {self.peer} was broken off"))

    def _write(self, header: bytes, payload: memoryview, timeout_s: float) -> None:
        # A last word is said by whoever closes the link, also where the device stands still.
        if header[5] not in _LAST:
            header = self._device.hurt(self, header)
        super()._write(header, payload, timeout_s)

    def _write_both(self, frame: bytes, header: bytes, payload: memoryview, timeout_s: float) -> None:
        Link._write_both(self, frame, header, payload, timeout_s)


class _Session(EngineSession):
    """A rank as its owner sees it."""

    pid = 0

    def __init__(self, device: Device, rank: int, links: Iterable[Link]) -> None:
        super().__init__(device.name, rank)
        self._host, self._links = device, links

    @property
    def silent_s(self) -> float:
        since = self._host.frozen_at
        return 0.0 if since is None else time.monotonic() - since

    def close(self) -> None:
        if self._host.frozen_at is None:  # else nobody there hears it
            for link in self._links:
                assert isinstance(link, FaultyLink)
                link.break_off()

    def _send(self, command: pb.Command) -> None:
        raise AssertionError("a rank of a thread takes no commands")


class _LlmRanks(RankGroup):
    """A plan whose ranks are threads, with the methods of `edge.cluster.llm_ranks.LlmRanks` that `deploy` calls."""

    def __init__(
        self,
        fleet: Fleet,
        plan: Plan,
        file: GgufFile,
        options: EngineOptions,
        *_: Any,
        vocabulary: llama.Model,
        **__: Any,
    ) -> None:
        super().__init__(
            fleet,  # type: ignore[arg-type]
            plan.world_size,
            lambda words: None,
            transport="tcp",
            deadlines=_DEADLINES,
            streams=False,
            gives_up=True,
        )
        cluster, n = fleet.cluster, plan.world_size
        devices = [cluster.devices[address] for address in plan.devices]
        for address, device in zip(plan.devices, devices, strict=True):
            if not device.has_room:
                lacking = NotEnoughMemory(f"{device.name} has no room")
                lacking.devices = (address,)
                raise lacking
        widths = [len(stage.shards) for stage in plan.stages]
        links: list[dict[int, Link]] = [{} for _ in range(n)]
        for device in devices:
            device.begin()
        for a, b in combinations(range(n), 2):
            for item, other, sock in zip((a, b), (b, a), socket.socketpair(), strict=True):
                links[item][other] = FaultyLink(sock, f"rank {other} ({devices[other].name})", devices[item])
        groups = [Group(rank, links[rank]) for rank in range(n)]
        shards = []
        for rank in range(n):
            here = place(rank, widths)
            own = options if here.last else replace(options, outputs=options.rows)
            shards.append(Shard(ModelFile.open(cluster.slice(plan.slice(rank))), own, here))
        self._closing.then(shards[0].close)
        self._closing.then(lambda: [link.close() for link in links[0].values()])
        for rank in range(1, n):
            session = self._by_rank[rank] = _Session(devices[rank], rank, links[rank].values())
            self._addresses[rank] = plan.devices[rank]
            self._closing.then(session.close)
            cluster.start(_serve, devices[rank], session, shards[rank], groups[rank])
        self._group = groups[0]
        self.engine = DistributedEngine(
            file, vocabulary, plan, shards[0], groups[0], outputs=options.outputs, explain=self._explained
        )
        self._closing.then(self.engine.end)

    break_off = LlmRanks.break_off

    def _is_busy(self) -> bool:
        return bool(self.engine.busy)


def _serve(device: Device, session: _Session, shard: Shard, group: Group) -> None:
    """A rank, until it ends in whatever way; as `edge.worker.rank` runs it."""
    try:
        follow(shard, group)
        session._hear(pb.Event(ran=pb.Ran()))
    except Exception as error:
        for link in group.links.values():
            link.refuse(f"rank {session.rank}: {error}")
        died = pb.Event(died=pb.Died(reason="the engine process was killed by SIGKILL"))
        session._hear(died if device.killed else failed(error))
    finally:
        for link in group.links.values():
            link.close()
        shard.close()


@dataclass
class _Worker:
    label: str


@dataclass
class Fleet:
    """The devices that answer."""

    cluster: Cluster
    workers: dict[str, _Worker]  # by address


class _Said(Steps):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)


class Cluster:
    """This device and some more, with one model. Made by `cluster`."""

    def __init__(self, model: Path, folder: Path, n_devices: int) -> None:
        """n_devices: beside this one."""
        self.devices = {LOCAL: Device("this device")}
        self.devices |= {f"10.0.0.{i}:1": Device(f"worker {i}") for i in range(1, n_devices + 1)}
        self.others = [address for address in self.devices if address != LOCAL]
        self._model, self._folder = model, folder
        self._threads: list[threading.Thread] = []
        self._steps = _Said()

    @property
    def said(self) -> list[str]:
        """Return the messages to a person."""
        return self._steps.lines

    def fault(self, address: str, fault: Fault) -> None:
        """Let it happen."""
        self.devices[address].faults.append(fault)

    def heal(self) -> None:
        """Nothing happens any more, and all devices answer."""
        for device in self.devices.values():
            device.faults.clear()
            device.come_back()

    @contextmanager
    def running(
        self, how: dict[str, Any], options: EngineOptions, prefill: dict[str, Any] | None = None
    ) -> Iterator[ReplaceableEngine]:
        """The model on all devices that answer. how: as `tests.support.deployments` has it. prefill: likewise, of the
        placement that computes prompts; the last devices are in that one."""
        limits_of = limits(GgufFile.open(self._model))
        answering = [other for other in self.others if self.devices[other].answers]
        addresses = [LOCAL, *answering[: len(how["shares"]) - 1]]
        plan = make_plan(limits_of, self._model.stem, "", addresses, **how)
        if prefill is not None:
            there = [LOCAL, *answering[::-1][: len(prefill["shares"]) - 1]]
            plan = replace(plan, prefill=make_plan(limits_of, self._model.stem, "", there, **prefill))
            addresses = [*plan.all_devices]
        connected: Any = SimpleNamespace(connected=lambda _: self._fleet(addresses[1:]), insecure=True)
        choice = PlanChoice(self._model, plan, "as the plan says")
        with deploy.deploy(choice, connected, options, steps=self._steps) as model:
            assert isinstance(model.engine, ReplaceableEngine)
            yield model.engine

    def slice(self, cut: Slice) -> Path:
        """The file of a slice, written once."""
        path = self._folder / f"{sha256(repr(cut).encode()).hexdigest()[:16]}.gguf"
        if not path.exists():
            write(self._model, cut, path)
        return path

    def start(self, work: Callable[..., None], *args: Any) -> None:
        """Do it in a thread that is waited for at the end."""
        self._threads.append(threading.Thread(target=work, args=args, name="rank", daemon=True))
        self._threads[-1].start()

    def close(self) -> None:
        """Wait for the end of all ranks."""
        self.heal()
        for thread in self._threads:
            thread.join(TIMEOUT_S)
            assert not thread.is_alive(), "a rank did not end"

    @contextmanager
    def reachable(
        self,
        result: ClusterFile,
        *,
        insecure: bool,
        timeout_s: float = 0,
        return_s: float | None = None,
        anyway: bool = False,
    ) -> Iterator[tuple[Fleet | None, list[str]]]:
        """As `edge.profiling.profile.reachable`."""
        there = [str(worker.address) for worker in result.workers if self.devices[str(worker.address)].answers]
        yield self._fleet(there) if there else None, []

    def _fleet(self, addresses: list[str]) -> Fleet:
        return Fleet(self, {address: _Worker(self.devices[address].name) for address in addresses})


@contextmanager
def cluster(model: Path, folder: Path, n_devices: int) -> Iterator[Cluster]:
    """A cluster whose devices all answer. At the end no rank is left."""
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        built = Cluster(model, folder, n_devices)
        stack.callback(built.close)
        patch.setattr(supervisor, "reachable", built.reachable)
        patch.setattr(deploy, "LlmRanks", _LlmRanks)
        patch.setattr(deploy, "send_ahead", lambda *_: None)  # slices are written
        patch.setattr(deploy, "check_room", lambda *_: None)
        patch.setattr(liveness, "_LOOK_S", _LOOK_S)
        patch.setattr(liveness, "LOST_S", 4 * _LOOK_S)
        yield built
