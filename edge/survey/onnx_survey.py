"""What plans of an ONNX model go by, measured: what each device takes for what lies between cuts, and the links."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib.metadata import version

from devices.probe import available_memory, default_threads
from devices.profile import DeviceProfile
from edge.cluster.fleet import Fleet
from edge.cluster.session import EngineSession, LocalSession, RemoteSession, connect_all
from edge.net.peers import SECRET_BYTES
from edge.onnx.model import OnnxSource
from edge.survey.cache import BUSY_AGE_S, Remembered, key_of
from edge.survey.links import measure_links
from edge.survey.onnx_times import Probes, Times, probes, timed
from edge.survey.survey import own_profile
from edge.tasks import CancelScope, results
from partition.plan.onnx_cuts import Cut
from partition.plan.plan import LOCAL
from partition.predict.onnx_predict import OnnxDevice
from partition.predict.speeds import Links

# Of a core's time for an item on its way through a stage: system calls, Python, threads that wake each other. Measured
# on two processes: 0.2 ms for small tensors, 0.5 for 0.8 MB in and out. Slow devices take longer in proportion.
_ITEM_CPU_S = 0.25e-3
REMEMBERED = "onnx-speeds"  # what they are remembered as
_MOST_SLOWER = 10.0  # times than the fastest, which may have a GPU for its nodes, and none for this


@dataclass(frozen=True)
class OnnxSurvey:
    """What was measured."""

    cuts: tuple[Cut, ...]  # the candidates; between them, and at both ends, are the segments
    devices: Mapping[str, OnnxDevice]  # as in a plan; this device first, then in the order of addresses
    links: Links
    estimated: tuple[str, ...]  # segments that some device could not be timed with, by what ends them: estimates

    @property
    def segments(self) -> dict[str, tuple[float, ...]]:
        """Seconds of each segment, by device."""
        return {device: found.segments_s for device, found in self.devices.items()}


def onnx_survey(
    fleet: Fleet | None,
    addresses: Sequence[str],
    model: OnnxSource,
    cuts: Sequence[Cut],
    *,
    threads: int | None = None,
    provider: str | None = None,
    transport: str = "auto",
    fresh: bool = False,
    on_step: Callable[[float, float], None] = lambda done, of: None,
) -> OnnxSurvey:
    """Measure the links, this device, with so many threads, and then all workers at `addresses` at once. fleet:
    where they are connected; None: there are none. cuts: the candidates, which ascend; there may be none. provider:
    ONNX Runtime's, on every device; None: the best of each.

    A device's times are remembered for a day, but where it was busy only for a minute; fresh: measure them
    anyway. on_step(done, of) is called as links and
    parts are done. PlanError for cuts that are none, CannotSlice for a part that cannot be sent, EngineError where
    nothing can be timed; else the errors of sessions.
    """
    devices = [LOCAL, *(address for address in addresses if address != LOCAL)] if fleet else [LOCAL]
    world_size = len(devices)
    threads = threads or default_threads()
    secret = secrets.token_bytes(SECRET_BYTES)
    own_name, credentials = (fleet.local_name, fleet.credentials) if fleet else (LOCAL, None)
    workers = [None, *(fleet.workers[address] for address in devices[1:])] if fleet else [None]
    profiles = [own_profile(own_name, threads), *(fleet.profiles[address] for address in devices[1:] if fleet)]
    cache = Remembered(REMEMBERED)
    pool = ThreadPoolExecutor(world_size, "survey")
    try:
        with CancelScope() as closing:  # and whoever still waits for a session then hears that it was closed
            found = probes(model, cuts, provider, closing)
            keys = [_key(found, provider, profile) for profile in profiles]
            known = [None if fresh else _known(cache, key, found) for key in keys]
            wanting = [one is None or (one[0].busy and one[1] > BUSY_AGE_S) for one in known]
            steps = found.steps * wanting.count(True) + world_size * (world_size - 1) // 2
            done: list[None] = []

            def step() -> None:
                closing.check()  # nobody shows progress any more
                done.append(None)
                on_step(len(done), steps)

            def start(rank: int) -> EngineSession:
                session: EngineSession
                worker = workers[rank]
                if worker is None:
                    session = LocalSession(own_name, world_size, secret, credentials, threads, streams=True)
                else:
                    session = RemoteSession(worker, rank, world_size, secret, streams=True)
                closing.then(session.close)
                return session

            def times(session: EngineSession) -> tuple[Times, float]:
                rank = session.rank
                remembered = known[rank]
                if remembered is not None and not wanting[rank]:
                    return remembered
                taken = timed(session, workers[rank], found, _memory(fleet, devices[rank]), step)
                if remembered is not None and taken.busy and remembered[0].seconds < taken.seconds:
                    taken = remembered[0]
                cache.put(keys[rank], taken.to_json())
                return taken, 0.0

            sessions = results(pool.submit(start, rank) for rank in range(world_size))
            links = measure_links(sessions, devices, connect_all(sessions, transport), step, fresh=fresh)
            # This device on its own: what a lab emulates is a part of it.
            [own] = results([pool.submit(times, sessions[0])])
            taken = [own, *results(pool.submit(times, session) for session in sessions[1:])]
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    labels = [*(cut.label for cut in cuts), "the end"]
    fastest_s = min(sum(one.segments_s) for one, _ in taken)
    return OnnxSurvey(
        tuple(cuts),
        {
            device: replace(_device(fleet, device, one, age_s, fastest_s), key=key)
            for device, (one, age_s), key in zip(devices, taken, keys, strict=True)
        },
        links,
        tuple(labels[i] for i in sorted({i for one, _ in taken for i in one.estimated})),
    )


def _key(found: Probes, provider: str | None, profile: DeviceProfile) -> str:
    """What times depend on. The shapes are not in a part's file where dimensions are open."""
    of = [str(provider), version("onnxruntime")]
    for probe in found.parts:
        part = probe.part
        of += [part.digest, repr([(value.name, value.shape) for value in (*part.takes.tensors, *part.gives.tensors)])]
    return key_of(of, profile)


def _known(cache: Remembered, key: str, found: Probes) -> tuple[Times, float] | None:
    """Times that are remembered, and how old they are; None where they have to be taken."""
    remembered = cache.get(key)
    if remembered is None:
        return None
    value, age_s = remembered
    times = Times.from_json(value, len(found.segments_s))
    return None if times is None else (times, age_s)


def _device(fleet: Fleet | None, device: str, times: Times, age_s: float, fastest_s: float) -> OnnxDevice:
    slower = min(_MOST_SLOWER, sum(times.segments_s) / fastest_s) if fastest_s else 1.0
    return OnnxDevice(
        device=device,
        name="this device" if fleet is None or device == LOCAL else fleet.workers[device].label,
        segments_s=times.segments_s,
        stage_s=times.stage_s + _ITEM_CPU_S * slower,
        memory_bytes=_memory(fleet, device),
        runtime_bytes=times.runtime_bytes,
        age_s=age_s,
        busy=times.busy,
    )


def _memory(fleet: Fleet | None, device: str) -> int:
    """Bytes of memory that a model may take there."""
    return available_memory() if fleet is None or device == LOCAL else fleet.memory_of(device)
