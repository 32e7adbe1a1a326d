"""Test the default number of layers on a GPU: it depends on the GPU's memory and on the time of tokens. All figures are
made up.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from devices.remembered import Remembered
from edge.errors import EngineError
from edge.llama import ggml, llama
from edge.llama.llama import ContextSizes
from edge.llm.engine import Engine
from edge.llm.options import EngineOptions
from edge.microbenchmark import BestTime, TimedTask, best_of
from edge.models.demo import MODEL_PATH
from edge.weights import gpu_layers
from edge.weights.gpu_layers import GpuLayers, choose, fastest, layer_sizes
from partition.model.model import ModelShape
from quant.gguf.file import GgufFile
from quant.types import cache_type
from tests.unit.edge.test_microbenchmark import Machine

SHAPE = ModelShape.from_gguf(GgufFile.open(MODEL_PATH))
SIZES = ContextSizes(1024, cache_type("f16"))
OF = SHAPE.n_layers + 1
BUFFERS = 10 << 20
SPARE = 512 << 20
ALL = sum(layer_sizes(SHAPE, SIZES))


class Timer:
    """Tells made-up times by the layers on the GPU, and counts the questions."""

    def __init__(self, seconds: Mapping[int, float], *, busy: bool = False) -> None:
        self.measured: list[int] = []
        self._seconds, self._busy = seconds, busy

    def __call__(self, layers: int) -> BestTime:
        self.measured.append(layers)
        return BestTime(self._seconds[layers], self._busy)


@pytest.fixture(autouse=True)
def _nothing_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


def chosen(
    timed: Callable[[int], BestTime] | None,
    *,
    most: int | None = None,
    free: int | None = None,
    available: int = 1 << 40,
    threads: int = 2,
) -> GpuLayers:
    return choose(
        SHAPE,
        SIZES,
        threads,
        most=most,
        free=free,
        buffers=lambda: BUFFERS,
        timed=timed,
        available=lambda: available,
    )


@pytest.mark.parametrize(
    ("seconds", "busy", "layers"),
    [
        ({9: 1.0, 4: 2.0, 0: 3.0}, False, 9),
        ({9: 1.0, 4: 1.2, 0: 0.81}, False, 9),  # faster, but not clearly
        ({9: 1.0, 4: 1.2, 0: 0.79}, False, 0),
        ({9: 1.0, 4: 0.5, 0: 0.7}, False, 4),
        ({9: 1.0, 4: 1.2, 0: 0.3}, True, 9),  # a busy moment may have hit one of them
        ({9: 1.0, 4: 1.2, 0: 0.2}, True, 0),
    ],
)
def test_what_is_used_stays_unless_another_is_clearly_faster(
    seconds: Mapping[int, float], busy: bool, layers: int
) -> None:
    assert fastest({n: BestTime(s, busy and n == 9) for n, s in seconds.items()}) == layers


def test_all_are_on_a_gpu_that_is_fast_and_half_and_none_were_tried() -> None:
    timer = Timer({OF: 1.0, OF // 2: 2.0, 0: 3.0})
    result = chosen(timer)
    assert (result.layers, result.native, timer.measured) == (OF, -1, [OF, OF // 2, 0])
    assert result.describe() == f"{OF} of {OF} layers on the GPU (all fit, measured now)"


def test_what_was_measured_is_remembered_with_its_age(monkeypatch: pytest.MonkeyPatch) -> None:
    timer = Timer({OF: 3.0, OF // 2: 2.0, 0: 1.0})
    assert chosen(timer).layers == 0
    get = Remembered.get
    monkeypatch.setattr(Remembered, "get", lambda self, key: (result := get(self, key)) and (result[0], 7200.0))
    again = chosen(timer)
    assert again.to_json() == {"layers": 0, "of": OF, "why": f"3.0 times as fast as with {OF}, measured 2 h ago"}
    assert len(timer.measured) == 3
    chosen(timer, threads=1)  # other threads take other times
    assert len(timer.measured) == 6


def test_a_busy_moment_is_not_remembered() -> None:
    timer = Timer({OF: 2.0, OF // 2: 1.5, 0: 1.0}, busy=True)
    assert chosen(timer).describe().endswith("(all fit, measured now, while this device was busy)")
    assert chosen(timer).layers == OF
    assert len(timer.measured) == 6


@pytest.mark.parametrize("entry", [{"9": 1.0}, {"9": 1.0, "4": "x", "0": 1.0}, [], {"9": 1.0, "4": 0.0, "0": 1.0}])
def test_what_cannot_have_been_measured_is_measured_again(entry: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Remembered, "get", lambda *_: (entry, 1.0))
    timer = Timer({OF: 1.0, OF // 2: 2.0, 0: 3.0})
    assert chosen(timer).layers == OF
    assert timer.measured == [OF, OF // 2, 0]


def test_as_many_as_have_room_and_why() -> None:
    head, last, before, *_ = layer_sizes(SHAPE, SIZES)
    room = BUFFERS + SPARE + head + last + before
    assert chosen(None, free=room).layers == 3
    short = chosen(None, free=room - 1)
    assert (short.layers, short.native) == (2, 2)
    assert short.why.startswith("2 fit: all need 53")
    assert short.why.endswith("are free")
    assert chosen(None, free=ALL + BUFFERS + SPARE).layers == OF
    assert chosen(None, free=ALL + BUFFERS + SPARE - 1).layers == OF - 1
    assert chosen(Timer({}), free=SPARE).layers == 0  # then nothing is tried
    assert chosen(None, free=None).layers == OF  # a driver that does not tell


def test_buffers_are_asked_for_only_where_room_is_short() -> None:
    def never() -> int:
        raise AssertionError

    assert choose(SHAPE, SIZES, 1, most=None, free=1 << 40, buffers=never, timed=None).layers == OF


def test_keys_and_values_count() -> None:
    doubled = layer_sizes(SHAPE, ContextSizes(2048, SIZES.kv))
    cache = SHAPE.kv_bytes(1024, SIZES.kv.keys, SIZES.kv.values)
    assert sum(doubled) - ALL == cache > 0
    assert sum(layer_sizes(SHAPE, SIZES)) == SHAPE.head_bytes + sum(SHAPE.layer_bytes) + cache


def test_a_worker_lends_no_more_than_it_says() -> None:
    timer = Timer({5: 2.0, 2: 1.0, 0: 3.0})
    result = chosen(timer, most=5)
    assert (result.layers, result.why) == (2, "2.0 times as fast as with 5, measured now")
    assert timer.measured == [5, 2, 0]
    assert chosen(Timer({}), most=0).layers == 0


def test_what_the_processors_memory_has_no_room_for_is_not_tried() -> None:
    timer = Timer({OF: 2.0, OF // 2: 1.0, 0: 0.1})
    assert chosen(timer, available=sum(layer_sizes(SHAPE, SIZES)[OF // 2 :])).layers == OF // 2
    assert timer.measured == [OF, OF // 2]


@pytest.mark.parametrize("seed", range(4))
def test_bursts_of_other_work_do_not_change_what_is_chosen(seed: int) -> None:
    """The GPU takes 2 ms, the processor 2.2: whichever a burst hits, it stays."""
    machine = Machine([(0.4 * i + 0.1 * seed, 0.4 * i + 0.1 * seed + 0.2) for i in range(40)])
    takes = {OF: 2e-3, OF // 2: 2.1e-3, 0: 2.2e-3}

    def timed(layers: int) -> BestTime:
        step = TimedTask(lambda: machine.run(takes[layers]))
        return best_of([step], clock=lambda: machine.now_s, watch=machine.watch)[0]

    assert chosen(timed).layers == OF


def test_without_a_gpu_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError

    monkeypatch.setattr(llama, "has_gpu", lambda: False)
    monkeypatch.setattr(gpu_layers, "choose", never)
    for layers in (None, 0):
        with Engine(MODEL_PATH, EngineOptions(context=64, gpu_layers=layers)) as engine:
            assert engine.gpu_layers is None
    with pytest.raises(EngineError, match="leave --gpu-layers out"):
        Engine(MODEL_PATH, EngineOptions(context=64, gpu_layers=1))


def test_an_engine_tries_and_obeys(monkeypatch: pytest.MonkeyPatch) -> None:
    """A build without a GPU takes any number of layers, and computes them on the processor."""
    monkeypatch.setattr(llama, "has_gpu", lambda: True)
    monkeypatch.setattr(ggml, "gpu_free_bytes", lambda: 600 << 20)

    def one_step(kinds: Sequence[TimedTask], _: float) -> list[BestTime]:
        kinds[0].step()
        return [BestTime(1.0, False)]

    monkeypatch.setattr(gpu_layers, "best_of", one_step)
    reported: list[float] = []
    with Engine(MODEL_PATH, EngineOptions(context=64), progress=reported.append) as engine:
        assert engine.gpu_layers is not None
        assert (engine.gpu_layers.layers, engine.gpu_layers.why) == (OF, "all fit, measured now")
    assert reported.count(0.0) >= 3  # it was known to live during each of the tries
    monkeypatch.setattr(gpu_layers, "choose", None)  # not asked
    with Engine(MODEL_PATH, EngineOptions(context=64, gpu_layers=2)) as engine:
        assert engine.gpu_layers == GpuLayers(2, OF, "as asked for")
    with Engine(MODEL_PATH, EngineOptions(context=64, gpu_layers=99)) as engine:
        assert engine.gpu_layers == GpuLayers(OF, OF, "as asked for")
