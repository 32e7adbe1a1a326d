"""Registry of engine kinds: an engine computes, sleeps for the times of a profile, or lets a browser's page compute.

Every slice is opened here. Only this module reads which kind this device has. All other code uses the interface
of `EngineKind` without knowing the kind. `edge.parallel.thin` has the engine of a rank without layers.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from devices.catalog import CATALOG
from devices.processes.rates import Rates, known_rates, own_rates, read_rates
from devices.profile import DeviceProfile, describe
from devices.sleeping import VARIABLE, run_first
from edge.browser.profile import PAGE_VARIABLE, PageProfile
from edge.errors import EdgeError, EngineError
from edge.llama.own_gpu import own_gpu
from edge.parallel.topology import Topology
from edge.version import version
from partition.architectures.table import RULES
from partition.model.file import ModelFile
from partition.plan.plan import Slice
from partition.slices.gguf_slice import elastic_recipe, header_recipe, slice_recipe
from partition.slices.recipe import Recipe
from quant.gguf.file import GgufFile
from transport.errors import Refused

if TYPE_CHECKING:  # an engine loads llama.cpp, which a worker's daemon does not need
    from edge.llama.hooks import Hook
    from edge.llama.llama import ContextSizes
    from edge.llm.engine import Engine, ModelRunner
    from edge.llm.options import EngineOptions
    from edge.onnx.stage import StageEngine


class EngineKind:
    """Engines that compute. Base class of the other kinds."""

    sleeps = False  # True if steps only take the time of a profile and return zeros
    follows_memory = True  # True if weights can have fewer or more bits as free memory changes
    pages_networks = True  # True if stages of networks can read weights from disk in every run

    def slice_file(self, path: Path) -> ModelFile:
        """Return the file of a slice. Raises ModelFileError if it is damaged."""
        return ModelFile.open(path)

    def open(
        self,
        file: ModelFile,
        options: EngineOptions,
        place: Topology,
        hooks: Sequence[Hook],
        progress: Callable[[float], None] | None,
    ) -> ModelRunner:
        """Open the slice of a rank that has layers. Raises the errors of ModelRunner."""
        from edge.llm.engine import ModelRunner

        return ModelRunner(file, options, hooks, progress, embeddings=True)

    def parts_within(self, file: ModelFile, sizes: ContextSizes, budget: int) -> dict[str, int]:
        """Return the bytes of a slice by part if all weights are resident within a budget."""
        from edge.weights.budget import other_parts

        return {**other_parts(file, sizes, budget), "file": file.size_bytes}

    def open_network(
        self, path: Path, threads: int, provider: str | None, progress: Callable[[float], None]
    ) -> StageEngine:
        """Open the file of an ONNX stage. Raises the errors of OnnxEngine."""
        from edge.onnx.stage import open_here

        return open_here(path, threads, provider)

    def timing_clock(self, engine: ModelRunner) -> AbstractContextManager[Callable[[], float] | None]:
        """Return a context manager that yields the clock for timing steps, or None for the usual clock."""
        return nullcontext()

    def open_whole(self, file: ModelFile, options: EngineOptions, progress: Callable[[float], None] | None) -> Engine:
        """Open a whole model, which drafts. Raises the errors of ModelRunner."""
        from edge.llm.engine import Engine

        return Engine(file, options, progress=progress)

    def check_encodes(self) -> None:
        """Raise EdgeError if this device cannot have an encoder of pictures or sound."""

    def prepare_process(self) -> None:
        """Prepare an engine process, before it starts threads."""

    def polling_s(self, threads: int) -> float:
        """Return how many seconds a wait for a link may poll. threads: number of compute threads."""
        from edge.net.rendezvous import polling_s  # links load numpy, which the server does not need

        return polling_s(threads)

    def recipe(self, file: GgufFile, model_digest: str, cut: Slice, *, elastic: bool = False) -> Recipe:
        """Return the recipe of a rank's slice.

        elastic: include all sizes of an elastic file.
        Raises CannotSlice if the model cannot be cut like this.
        """
        return (elastic_recipe if elastic else slice_recipe)(file, model_digest, cut)

    def describe(
        self,
        name: str,
        *,
        threads: int | None = None,
        memory_limit_bytes: int | None = None,
        gpu: str | None = None,
    ) -> DeviceProfile:
        """Return the profile of this device, as `devices.profile.describe`, with its GPU, and its rates if they are
        known.
        """
        own = own_gpu()
        profile = describe(
            name,
            threads=threads,
            memory_limit_bytes=memory_limit_bytes,
            gpu=gpu or (own.name if own is not None else None),
            runtime=version("edge-runtime"),
            llama_cpp=version("llama-cpp-python"),
        )
        if own is not None:
            profile = replace(profile, gpu_total_bytes=own.total_bytes, gpu_free_bytes=own.free_bytes)
        return _with_rates(profile, known_rates(profile))

    def measure_rates(self, profile: DeviceProfile) -> DeviceProfile:
        """Return the profile of this device with its rates. They are measured if they are not known."""
        return _with_rates(profile, own_rates(profile))

    def check_worker(self, name: str, *, sleeps: bool) -> None:
        """Raise Refused if a worker's engines are of the other kind, because responses would be computed from zeros."""
        if sleeps:
            raise Refused(
                f"{name} is a sleeping device of a lab: it takes the time of its profile and answers with zeros. Run"
                " this command in that lab, with `edge lab run DEVICE -- ...`, or use devices that compute"
            )

    def slowness(self, seconds: Sequence[float]) -> list[float]:
        """Return the slowdown of each processor relative to the fastest.

        seconds: time of the same work on each device.
        """
        fastest_s = min(seconds)
        return [device_s / fastest_s for device_s in seconds]


class SleepingKind(EngineKind):
    """Engines of a sleeping device in a lab. A step takes the time of a profile, and all devices share one machine."""

    sleeps = True
    follows_memory = False

    def __init__(self, profile: Path) -> None:
        """profile: JSON file as described in `partition.predict.part_times`."""
        self._profile = profile

    def slice_file(self, path: Path) -> ModelFile:
        """Same as in `EngineKind`. The file may be a header alone."""
        return ModelFile.open_header(path)

    def parts_within(self, file: ModelFile, sizes: ContextSizes, budget: int) -> dict[str, int]:
        from edge.parallel.sleeping import parts_of

        return parts_of(file.shape, sizes)

    def open(
        self,
        file: ModelFile,
        options: EngineOptions,
        place: Topology,
        hooks: Sequence[Hook],
        progress: Callable[[float], None] | None,
    ) -> ModelRunner:
        """Same as in `EngineKind`. Raises PlanError if the file is not a profile, and OSError if it cannot be read."""
        from edge.parallel.sleeping import SleepingEngine
        from partition.predict.part_times import PartTimes
        from partition.predict.presets import PartSizes

        values = json.loads(self._profile.read_text())
        sizes = PartSizes.from_file(file)
        times = PartTimes(values, sizes, last=place.last, alone=len(place.group) == 1)
        engine = SleepingEngine(file, options, hooks, times)
        if place.rank:
            engine.follow_snapshots()
        return engine

    def timing_clock(self, engine: ModelRunner) -> AbstractContextManager[Callable[[], float] | None]:
        from edge.parallel.sleeping import SleepingEngine

        assert isinstance(engine, SleepingEngine)
        return engine.timing_clock()

    def open_whole(self, file: ModelFile, options: EngineOptions, progress: Callable[[float], None] | None) -> Engine:
        raise EdgeError("this lab device only sleeps and has no weights to draft with; let another device draft")

    def check_encodes(self) -> None:
        raise EdgeError("this lab device only sleeps and has no weights to encode with; let another device encode")

    def prepare_process(self) -> None:
        run_first(children=True)

    def polling_s(self, threads: int) -> float:
        """Return 0, because other devices of the lab need the cores."""
        return 0.0

    def recipe(self, file: GgufFile, model_digest: str, cut: Slice, *, elastic: bool = False) -> Recipe:
        """Return the recipe of the slice's header. A sleeping device reads nothing else."""
        return header_recipe(file, model_digest, cut)

    def describe(
        self,
        name: str,
        *,
        threads: int | None = None,
        memory_limit_bytes: int | None = None,
        gpu: str | None = None,
    ) -> DeviceProfile:
        """Same as in `EngineKind`, without the host, because a sleeping device takes no cores from others.

        The rates and the GPU are those that the device's profile states, or those of its preset.
        """
        profile = super().describe(name, threads=threads, memory_limit_bytes=memory_limit_bytes, gpu=gpu)
        gpu, n_bytes = self._gpu()
        profile = replace(profile, gpu=gpu, gpu_total_bytes=n_bytes, gpu_free_bytes=n_bytes)
        return self.measure_rates(replace(profile, host=None))

    def _gpu(self) -> tuple[str | None, int | None]:
        """Return the name of the profile's GPU and its memory, or None and None."""
        values = json.loads(self._profile.read_text())
        measured = values.get("speed")
        if isinstance(measured, dict) and isinstance(measured.get("gpu"), dict):
            return "GPU of the profile", int(measured["gpu"].get("memory_bytes", 0))
        return values.get("gpu"), values.get("gpu_memory_bytes")

    def measure_rates(self, profile: DeviceProfile) -> DeviceProfile:
        values = json.loads(self._profile.read_text())
        if (preset := CATALOG.get(str(values.get("preset")))) is not None:
            return _with_rates(profile, Rates(preset.memory_bytes_per_s, preset.flops))
        return _with_rates(profile, read_rates(values.get("rates")))

    def check_worker(self, name: str, *, sleeps: bool) -> None:
        if not sleeps:
            raise Refused(
                f"{name} computes, and this command runs on a sleeping device of a lab; use sleeping devices alone, or"
                " run it outside the lab"
            )

    def slowness(self, seconds: Sequence[float]) -> list[float]:
        """Return equal factors, because all devices have the processor of this machine."""
        return [1.0] * len(seconds)


class PageKind(EngineKind):
    """Engines of a browser's page. This process has only the links to other ranks."""

    follows_memory = False
    pages_networks = False

    def __init__(self, folder: Path) -> None:
        """folder: folder of the page, with its profile and the socket of its bridge."""
        self._folder = folder

    def open(
        self,
        file: ModelFile,
        options: EngineOptions,
        place: Topology,
        hooks: Sequence[Hook],
        progress: Callable[[float], None] | None,
    ) -> ModelRunner:
        """Same as in `EngineKind`. Raises EngineError if the page was closed, or cannot compute this slice."""
        from edge.browser.engine import PageEngine

        rules = RULES[file.architecture]
        if len(place.group) > 1:
            raise EngineError("a browser computes whole layers: the links are too slow to share them; use stages")
        if rules.deepstack and not place.stage:
            raise EngineError(
                f"a browser cannot compute the first stage of {file.architecture} models; use a later one"
            )
        return PageEngine(file, options, self._folder, self._page().memory_bytes, hooks, progress)

    def open_network(
        self, path: Path, threads: int, provider: str | None, progress: Callable[[float], None]
    ) -> StageEngine:
        """Same as in `EngineKind`. Raises the errors of PageOnnxEngine."""
        from edge.browser.onnx_engine import PageOnnxEngine

        return PageOnnxEngine(path, threads, provider, self._folder, self._page().memory_bytes, progress)

    def open_whole(self, file: ModelFile, options: EngineOptions, progress: Callable[[float], None] | None) -> Engine:
        """Same as in `EngineKind`. Raises EngineError if the page was closed."""
        from edge.browser.engine import WholePageEngine

        return WholePageEngine(file, options, self._folder, self._page().memory_bytes, (), progress, embeddings=False)

    def check_encodes(self) -> None:
        raise EdgeError("a browser computes stages and drafts, and cannot encode; let another device encode")

    def timing_clock(self, engine: ModelRunner) -> AbstractContextManager[Callable[[], float] | None]:
        """Return a clock of its own, because this machine's caches and other load are not the page's."""
        return nullcontext(time.perf_counter)

    def polling_s(self, threads: int) -> float:
        """Return 0, because this machine's cores are not those that compute."""
        return 0.0

    def describe(
        self,
        name: str,
        *,
        threads: int | None = None,
        memory_limit_bytes: int | None = None,
        gpu: str | None = None,
    ) -> DeviceProfile:
        """Return the profile of the page's device. It has no host, because it takes no cores from this machine."""
        page = self._page()
        return replace(
            super().describe(name, memory_limit_bytes=memory_limit_bytes),
            system=page.system,
            machine="wasm32",
            cpu=page.browser,
            cores_physical=page.threads,
            cores_logical=page.threads,
            threads=page.threads,
            cpu_quota=None,
            memory_total_bytes=page.memory_bytes,
            memory_available_bytes=page.memory_bytes,
            battery_percent=page.battery_percent,
            plugged=page.plugged,
            temperature_c=None,
            host=None,
            load=None,
            disk_total_bytes=None,
            disk_free_bytes=None,
            memory_bytes_per_s=page.memory_bytes_per_s,
            flops=page.flops,
            page_round_trip_s=page.round_trip_s,
            page_bytes_per_s=page.bytes_per_s,
            gpu=None,
            gpu_total_bytes=None,
            gpu_free_bytes=None,
        )

    def measure_rates(self, profile: DeviceProfile) -> DeviceProfile:
        """Return the profile. The page measured its rates when it joined."""
        return profile

    def _page(self) -> PageProfile:
        return PageProfile.load(self._folder)


def _with_rates(profile: DeviceProfile, rates: Rates | None) -> DeviceProfile:
    if rates is None:
        return replace(profile, memory_bytes_per_s=None, flops=None)
    return replace(profile, memory_bytes_per_s=rates.memory_bytes_per_s, flops=rates.flops)


def own_kind() -> EngineKind:
    """Return the engine kind of this device."""
    if profile := os.environ.get(VARIABLE):
        return SleepingKind(Path(profile))
    folder = os.environ.get(PAGE_VARIABLE)
    return PageKind(Path(folder)) if folder else EngineKind()
