"""Test that slices are timed with their weights out of the caches, as in a model that is larger than the caches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from edge import microbenchmark
from edge.llm.options import DEFAULTS
from edge.models.demo import MODEL_PATH
from edge.profiling import llm_survey
from edge.profiling.layer_times import LayerProbe, Probes, _loaded, _timed, cuts_to_time
from edge.profiling.survey import Devices
from edge.tasks import CancelScope
from edge.worker import timing
from partition.model.file import ModelFile
from partition.slices.gguf_slice import limits
from tests.support.clock import Clock
from transport import edge_pb2 as pb

MIB = 1 << 20
COLD_S, WARM_S, READ_S = 0.2, 0.1, 5.0


@pytest.fixture
def slices() -> dict[str, LayerProbe]:
    with CancelScope() as scope:
        file = ModelFile.open(MODEL_PATH)
        return dict(Probes(file, "0" * 64, cuts_to_time(file)[0], scope))


def test_each_slice_lacks_the_rest_of_the_model(slices: dict[str, LayerProbe]) -> None:
    can = limits(ModelFile.open(MODEL_PATH))
    layers, head = sum(can.layer_bytes), can.vocab_bytes * can.sizes.vocab
    assert slices["head"].other_bytes == pytest.approx(sum(can.layer_bytes[slices["head"].layers :]), abs=1)
    for name in ("layers", "more", "chunk", "half"):
        own = sum(can.layer_bytes[: slices[name].layers])
        assert slices[name].other_bytes == pytest.approx(layers - own + head, abs=1)


def test_slices_beside_more_weights_have_figures_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of more layers, or with a larger head, have the same first ones."""

    def key(other_bytes: int) -> str:
        monkeypatch.setattr(llm_survey, "other_bytes", lambda *_: other_bytes)
        devices = Devices(None, 1)
        with CancelScope() as scope:
            [own] = llm_survey._LayerProfiler(devices, ModelFile.open(MODEL_PATH), "0" * 64, {}, {}, scope).keys
        return own

    assert key(MIB) == key(MIB) != key(2 * MIB)


def test_an_engine_process_is_told_how_much_that_is(slices: dict[str, LayerProbe]) -> None:
    commands: list[pb.Command] = []

    def ask(command: pb.Command) -> pb.Event:
        commands.append(command)
        if command.HasField("load"):
            return pb.Event(loaded=pb.Loaded(memory_bytes=1 << 30))
        return pb.Event(timed=pb.Timed(step_s=[1.0] * len(command.time.rows), busy=[False] * len(command.time.rows)))

    session: Any = SimpleNamespace(ask=ask, rank=0, device="pi", unload=lambda: None)
    with _loaded(session, slices["head"], DEFAULTS, None):
        _timed(session, slices["head"])
    assert [command.time.other_bytes for command in commands if command.HasField("time")] == [
        slices["head"].other_bytes
    ]


def test_no_more_is_read_than_empties_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "available_memory", lambda: 1 << 40)
    monkeypatch.setattr(timing, "cache_bytes", lambda: 32 * MIB)
    assert timing.bytes_to_read(1 << 40) == 64 * MIB
    assert timing.bytes_to_read(10 * MIB) == 10 * MIB  # such a model stays in the cache, in part
    monkeypatch.setattr(timing, "cache_bytes", lambda: 1 << 40)
    assert timing.bytes_to_read(1 << 40) == 256 * MIB
    monkeypatch.setattr(timing, "available_memory", lambda: 40 * MIB)
    assert timing.bytes_to_read(1 << 40) == 10 * MIB


def test_the_reader_reads_memory_of_its_own() -> None:
    assert timing.memory_reader(0) is None
    read = timing.memory_reader(MIB)
    assert read is not None
    read()
    [cell] = read.__closure__ or ()
    assert cell.cell_contents.nbytes >= MIB
    assert cell.cell_contents.all()


def shard_with_cache(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A slice whose step is quick where nothing else was read since the last one."""
    is_warm = False

    def read() -> None:
        nonlocal is_warm
        clock.now += READ_S
        is_warm = False

    def compute(n: int) -> None:
        nonlocal is_warm
        clock.now += WARM_S if is_warm else COLD_S
        is_warm = True

    monkeypatch.setattr(timing, "memory_reader", lambda n_bytes: read if n_bytes else None)
    rows = SimpleNamespace(
        capacity=8,
        embeddings=np.ones((8, 4), np.float32),
        **{name: np.zeros(8, np.int32) for name in ("outputs", "sequences", "positions")},
    )
    engine = SimpleNamespace(
        kv_clear=lambda: None, kv_remove=lambda *_: None, use_top=lambda _: None, threads=1, sequences=8
    )
    return SimpleNamespace(rows=rows, engine=engine, compute=compute)


def test_steps_are_timed_cold(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock().install(monkeypatch, microbenchmark)
    shard = shard_with_cache(clock, monkeypatch)
    assert [best.seconds for best in timing.time_shard(shard, (1, 4), 4, depth=2, other_bytes=MIB)] == pytest.approx(
        [COLD_S] * 3
    )
    assert [best.seconds for best in timing.time_shard(shard, (1, 4), 4, depth=2)] == pytest.approx([WARM_S] * 3)


def test_emptying_the_cache_and_other_logits_take_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is a round trip or a transfer of a browser's page, which no token of an answer takes."""
    clock = Clock().install(monkeypatch, microbenchmark)
    shard = shard_with_cache(clock, monkeypatch)
    tops = list[int]()

    def trip(*_: int) -> None:
        clock.now += READ_S

    shard.engine.kv_clear = shard.engine.kv_remove = trip
    shard.engine.use_top = tops.append
    assert [best.seconds for best in timing.time_shard(shard, (1, 4), 4, depth=2)] == pytest.approx([WARM_S] * 3)
    assert tops == [1]


def test_no_other_memory_is_read_under_a_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pauses would fall on that in place of the steps, which would then seem as quick as without a quota."""
    clock = Clock().install(monkeypatch, microbenchmark)
    shard = shard_with_cache(clock, monkeypatch)
    monkeypatch.setattr(microbenchmark, "cpu_quota", lambda: 0.4)
    timing.time_shard(shard, (1,), 4, other_bytes=MIB)
    assert clock.now < READ_S
