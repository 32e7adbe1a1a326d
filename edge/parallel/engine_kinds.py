"""Registry of engine kinds: an engine computes, is thin (it has no layers), or sleeps for the time of a profile.

Every slice is opened here. This module is the only one that reads which device of a lab sleeps. The rest of the code
uses the interface of `EngineKind`, and does not know which kind it has.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from devices.profile import DeviceProfile, describe
from devices.sleeping import VARIABLE, run_first
from edge.errors import EdgeError, EngineError
from edge.parallel.topology import Topology
from edge.version import version
from partition.plan.plan import Slice
from partition.slices.gguf_slice import blank_recipe, elastic_recipe, slice_recipe
from partition.slices.recipe import Recipe
from quant.gguf.file import GgufFile
from transport.errors import Refused

if TYPE_CHECKING:  # an engine loads llama.cpp, which a worker's daemon does not need
    from edge.llama.hooks import Hook
    from edge.llama.llama import Model
    from edge.llm.engine import ModelRunner
    from edge.llm.options import EngineOptions


class EngineKind:
    """Engines that compute. Base of the other kinds."""

    sleeps = False  # a step takes the time of a profile, and gives zeros
    follows_memory = True  # weights can have more or fewer bits, as the memory allows

    def open(
        self,
        path: str | os.PathLike[str],
        options: EngineOptions,
        place: Topology,
        hooks: Sequence[Hook],
        progress: Callable[[float], None] | None,
        vocabulary: Model | None,
    ) -> ModelRunner:
        """Open a slice for a place among the ranks. vocabulary: as in `open_slice`. The errors of ModelRunner."""
        from edge.llm.engine import ModelRunner

        return ModelRunner(path, options, hooks, progress, embeddings=True)

    def timing_clock(self, engine: ModelRunner) -> AbstractContextManager[Callable[[], float] | None]:
        """Return a context that yields the clock by which steps are timed, or None for the usual clock."""
        return nullcontext()

    def check_whole(self, purpose: str) -> None:
        """Raise EdgeError if this device cannot have a whole model. purpose: a verb, for people."""

    def prepare_process(self) -> None:
        """Prepare an engine process, before it starts threads."""

    def polling_s(self, threads: int) -> float:
        """Return how many seconds a wait for a link may poll. threads: number of threads that compute."""
        from edge.net.rendezvous import polling_s  # links load numpy, which the server does not need

        return polling_s(threads)

    def recipe(self, file: GgufFile, model_digest: str, cut: Slice, *, elastic: bool = False) -> Recipe:
        """Return the recipe of a rank's slice. elastic: of all sizes that the file holds. CannotSlice if the model
        cannot be cut so."""
        return (elastic_recipe if elastic else slice_recipe)(file, model_digest, cut)

    def describe(
        self,
        name: str,
        *,
        threads: int | None = None,
        memory_limit_bytes: int | None = None,
        gpu: str | None = None,
    ) -> DeviceProfile:
        """Return the profile of this device, as `devices.profile.describe`."""
        return describe(
            name,
            threads=threads,
            memory_limit_bytes=memory_limit_bytes,
            gpu=gpu,
            runtime=version("edge-runtime"),
            llama_cpp=version("llama-cpp-python"),
        )

    def check_worker(self, name: str, *, sleeps: bool) -> None:
        """Raise Refused if a worker's engines are of the other kind: an answer would contain zeros of a lab."""
        if sleeps:
            raise Refused(
                f"{name} is a sleeping device of a lab: it takes the time of its profile and answers with zeros. Run"
                " this command in that lab, with `edge lab run DEVICE -- ...`, or use devices that compute"
            )

    def slowness(self, seconds: Sequence[float]) -> list[float]:
        """Return how many times as long as the fastest each processor takes. seconds: of the same work, by device."""
        fastest_s = min(seconds)
        return [device_s / fastest_s for device_s in seconds]


class ThinKind(EngineKind):
    """Engines of a rank without layers: the vocabulary alone, from the model's own file."""

    def open(
        self,
        path: str | os.PathLike[str],
        options: EngineOptions,
        place: Topology,
        hooks: Sequence[Hook],
        progress: Callable[[float], None] | None,
        vocabulary: Model | None,
    ) -> ModelRunner:
        from edge.parallel.thin import ThinEngine

        if vocabulary is None:
            raise EngineError("a rank without layers has nothing to load on another device; update both devices")
        return ThinEngine(path, options, vocabulary)


class SleepingKind(EngineKind):
    """Engines of a lab's device that sleeps: a step takes the time of a profile. All devices share one machine."""

    sleeps = True
    follows_memory = False

    def __init__(self, profile: Path) -> None:
        """profile: JSON of `partition.predict.part_times`."""
        self._profile = profile

    def open(
        self,
        path: str | os.PathLike[str],
        options: EngineOptions,
        place: Topology,
        hooks: Sequence[Hook],
        progress: Callable[[float], None] | None,
        vocabulary: Model | None,
    ) -> ModelRunner:
        """As in `EngineKind`. PlanError if the file is no profile, OSError if it cannot be read."""
        from edge.parallel.sleeping import SleepingEngine
        from partition.predict.part_times import PartTimes
        from partition.predict.presets import PartSizes

        values = json.loads(self._profile.read_text())
        sizes = PartSizes.from_file(GgufFile.open(path))
        times = PartTimes(values, sizes, last=place.last, alone=len(place.group) == 1)
        engine = SleepingEngine(path, options, hooks, times)
        if place.rank:
            engine.follow_snapshots()
        return engine

    def timing_clock(self, engine: ModelRunner) -> AbstractContextManager[Callable[[], float] | None]:
        from edge.parallel.sleeping import SleepingEngine

        assert isinstance(engine, SleepingEngine)
        return engine.timing_clock()

    def check_whole(self, purpose: str) -> None:
        raise EdgeError(f"this device of a lab sleeps: it has no weights to {purpose} with; let another one {purpose}")

    def prepare_process(self) -> None:
        run_first(children=True)

    def polling_s(self, threads: int) -> float:
        """Do not poll: other devices of the lab need the cores."""
        return 0.0

    def recipe(self, file: GgufFile, model_digest: str, cut: Slice, *, elastic: bool = False) -> Recipe:
        """Return the recipe of made-up weights, which each device makes by itself."""
        return blank_recipe(file, model_digest, cut)

    def describe(
        self,
        name: str,
        *,
        threads: int | None = None,
        memory_limit_bytes: int | None = None,
        gpu: str | None = None,
    ) -> DeviceProfile:
        """As in `EngineKind`. The host is left out, because a sleeping device takes no cores from others."""
        profile = super().describe(name, threads=threads, memory_limit_bytes=memory_limit_bytes, gpu=gpu)
        return replace(profile, host=None)

    def check_worker(self, name: str, *, sleeps: bool) -> None:
        if not sleeps:
            raise Refused(
                f"{name} computes, and this command runs on a sleeping device of a lab; use sleeping devices alone, or"
                " run it outside the lab"
            )

    def slowness(self, seconds: Sequence[float]) -> list[float]:
        """All devices have the processor of this machine."""
        return [1.0] * len(seconds)


def own_kind() -> EngineKind:
    """Return the kind of engines that this device has."""
    profile = os.environ.get(VARIABLE)
    return SleepingKind(Path(profile)) if profile else EngineKind()


def open_slice(
    path: str | os.PathLike[str],
    options: EngineOptions,
    place: Topology,
    hooks: Sequence[Hook],
    progress: Callable[[float], None] | None,
    vocabulary: Model | None = None,
) -> ModelRunner:
    """Open a slice for a place among the ranks. A place without layers has the model's own file and its vocabulary.
    Raises the errors of `EngineKind.open`."""
    kind = ThinKind() if place.thin else own_kind()
    return kind.open(path, options, place, hooks, progress, vocabulary)
