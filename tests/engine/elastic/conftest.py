"""An elastic file of a small random model, the static files it was made of, and memory that tests set."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest

from edge.llm.engine import Engine
from edge.llm.options import EngineOptions
from edge.models.demo import MODEL_PATH
from edge.quantization.gguf import quantize
from edge.weights.elastic.load import load_elastic
from edge.weights.elastic.room import Room
from edge.weights.elastic.weights import ElasticWeights
from partition.model.file import ModelFile
from quant.gguf.elastic import plan_elastic, write_elastic
from quant.mixes import mix_by_name
from tests.support import paging
from tests.support.paging import MIB, OPTIONS, steady_runtime

MIXES = ("q8_0", "q4_0", "q2_k")


@dataclass(frozen=True)
class Elastic:
    """An elastic file, and the files of its sizes, the largest first."""

    path: Path
    static: tuple[Path, ...]


@pytest.fixture(scope="session")
def elastic(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Elastic]:
    """Make the elastic file of an architecture, once."""

    def make(arch: str) -> Elastic:
        figures = {"expert_ff": 512, "experts": 8} if "moe" in arch else {}
        source = ModelFile.open(paging.model(tmp_path_factory, arch, "f16", layers=3, head_size=64, **figures))
        static = tuple(source.path.with_name(f"{arch}-{mix}.gguf") for mix in MIXES)
        out = source.path.with_name(f"{arch}-elastic.gguf")
        if not out.exists():
            for mix, path in zip(MIXES, static, strict=True):
                quantize(source, path, mix_by_name(mix), threads=1)
            write_elastic(plan_elastic([ModelFile.open(path) for path in static], [0.001, 0.01, 0.1]), out)
        return Elastic(out, static)

    return make


@pytest.fixture(scope="session")
def bundled(tmp_path_factory: pytest.TempPathFactory) -> Elastic:
    """The bundled model in several sizes."""
    folder, source = tmp_path_factory.mktemp("elastic"), ModelFile.open(MODEL_PATH)
    static = tuple(folder / f"{mix}.gguf" for mix in MIXES)
    for path in static:
        quantize(source, path, mix_by_name(path.stem), threads=1)
    out = folder / "elastic.gguf"
    write_elastic(plan_elastic([ModelFile.open(path) for path in static], [0.0, 0.01, 0.1]), out)
    return Elastic(out, static)


class Memory:
    """Memory of a machine that a test sets. What the process holds is not counted."""

    def __init__(self, free: int) -> None:
        self.free, self.now_s, self.stalled_s = free, 0.0, 0.0
        self.room = Room(lambda: 0, lambda: self.free, lambda: self.stalled_s, lambda: self.now_s)

    def is_now(self, weights: ElasticWeights, free: int, after_s: float = 0.0) -> None:
        """Let so much be free, and weights see it then and `after_s` seconds later."""
        self.free = free
        for seconds in (0.0, after_s):
            self.now_s += seconds
            weights.look()


@contextmanager
def followed(memory: Memory, grow_wait_s: float = 60.0) -> Iterator[None]:
    """Let weights that change follow a memory, and look at it only when told. grow_wait_s: of reading that a pass may
    wait for, so that it puts no change off."""
    with (
        steady_runtime(),
        mock.patch("edge.weights.elastic.load.load_elastic", partial(load_elastic, room=memory.room)),
        mock.patch("edge.weights.elastic.weights.LOOK_S", 1e9),
        mock.patch("edge.weights.elastic.weights.GROW_WAIT_S", grow_wait_s),
        mock.patch("edge.weights.elastic.governor.SLACK", 1 << 40),  # sizes of these models are near each other
    ):
        yield


class ElasticEngine(NamedTuple):
    """An engine, and its weights, which change."""

    engine: Engine
    weights: ElasticWeights


@contextmanager
def engine_in(
    memory: Memory, path: Path, options: EngineOptions = OPTIONS, least: int = 42 * MIB, grow_wait_s: float = 60.0
) -> Iterator[ElasticEngine]:
    """Yield an engine that follows a memory, and looks at it only when told, with its weights."""
    with followed(memory, grow_wait_s), Engine(path, replace(options, least_memory=least)) as engine:
        assert isinstance(engine.paging, ElasticWeights)
        yield ElasticEngine(engine, engine.paging)
