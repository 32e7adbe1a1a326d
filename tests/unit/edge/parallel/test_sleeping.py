"""Test sleeping ranks with a simulated clock: how long they wait, their results, and the positions they hold."""

import json
import subprocess
import sys
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from devices.catalog import CATALOG
from devices.sleeping import VARIABLE, run_first
from edge.errors import Interrupted, NotEnoughMemory
from edge.llama.hooks import Hook
from edge.llm.engine import ModelRunner
from edge.llm.options import EngineOptions
from edge.models.demo import MODEL_PATH
from edge.models.synth import SHAPES, outline
from edge.parallel.engine_kinds import own_kind
from edge.parallel.shard import Shard
from edge.parallel.sleeping import Sleeper, SleepingEngine
from edge.parallel.topology import place
from edge.planning.arrange import work_of
from edge.worker.timing import time_shard
from partition.errors import PlanError
from partition.model.file import ModelFile
from partition.plan.arrange import make_plan
from partition.plan.plan import LOCAL, Plan, Range
from partition.predict.part_times import PartTimes, profile_json
from partition.predict.predict import compute_s
from partition.predict.presets import PartSizes, preset_speed
from partition.predict.residency import fixed_bytes
from partition.predict.speeds import Curve, DeviceSpeed, Links, LinkSpeed
from partition.search.planner import Planner
from partition.slices.gguf_slice import limits
from partition.slices.recipe import Literal
from quant.errors import ModelFileError
from tests.support.clock import Clock
from tests.support.slices import write

OPTIONS = EngineOptions(context=64, batch=16, sequences=4, threads=1)
FILE = ModelFile.open(MODEL_PATH)
SIZES = PartSizes.from_file(FILE)
ROWS, BEHIND = 4, 12


def test_processes_that_a_sleeping_thread_starts_do_not_come_first() -> None:
    run_first()
    script = "import os; print(os.sched_getscheduler(0) == os.SCHED_OTHER)"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, check=True).stdout == b"True\n"


def test_threads_of_a_process_that_comes_first_stay_so_when_it_has_slept() -> None:
    """Links are read by threads that begin later: other load would make their frames late."""
    script = (
        "import os, threading; from devices.sleeping import run_first; from edge.parallel.sleeping import Sleeper\n"
        "run_first(children=True); Sleeper().wait(0.0)\n"
        "def show(): print(os.sched_getscheduler(0) == os.SCHED_FIFO)\n"
        "thread = threading.Thread(target=show); thread.start(); thread.join()"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, check=True).stdout == b"True\n"


def uneven(name: str) -> DeviceSpeed:
    """A speed as measured ones are: half a layer takes more than half."""
    return DeviceSpeed(
        name, name, Curve(((1, 0.003), (4, 0.004))), Curve(((1, 0.010), (4, 0.018))), 1e-5,
        Curve(((1, 0.006), (4, 0.011))), Curve(((1, 0.020), (4, 0.026))), 1 << 30, 1 << 20,
    )  # fmt: skip


def plan_of(how: str, shares: list[float]) -> Plan:
    devices = ["local", *(f"rank-{i}" for i in range(1, len(shares)))]
    return make_plan(limits(FILE), "demo", "", devices, how, shares)


def sleeping(
    folder: Path, plan: Plan, rank: int, profile: Any, hooks: list[Hook] | None = None, options: EngineOptions = OPTIONS
) -> tuple[SleepingEngine, Clock]:
    """Return the engine of a rank, and the clock by which the engine sleeps."""
    path = write(MODEL_PATH, plan.slice(rank), folder / f"{rank}.gguf")
    here = place(rank, [len(stage.shards) for stage in plan.stages])
    times = PartTimes(profile, PartSizes.from_file(ModelFile.open(path)), last=here.last, alone=len(here.group) == 1)
    clock = Clock()
    return SleepingEngine(
        ModelFile.open(path), options, hooks or [], times, Sleeper(clock.perf_counter, clock.sleep)
    ), clock


def decode(engine: ModelRunner, rows: int = ROWS, at: int = BEHIND // ROWS) -> None:
    """Decode one step of `rows` requests, all at one position."""
    batch = engine.rows
    batch.sequences[:rows], batch.positions[:rows], batch.outputs[:rows] = range(rows), at, 1
    engine.decode_rows(batch, rows)


@pytest.mark.parametrize(("how", "shares"), [("pipeline", [0.5, 0.5]), ("tensor", [0.5, 0.5]), ("tensor", [0.7, 0.3])])
def test_a_rank_takes_what_the_planner_predicts_of_it(how: str, shares: list[float], tmp_path: Path) -> None:
    """The device's own sum of its slice's parts is the planner's of the plan, to a hundredth: norms are in both."""
    plan = plan_of(how, shares)
    speeds = {device: uneven(device) for device in plan.devices}
    work = work_of(FILE, EngineOptions(sequences=ROWS), depth=BEHIND // ROWS)
    links = Links({(a, b): LinkSpeed(0.001, 1e8) for a in speeds for b in speeds if a != b})
    predicted = compute_s(plan, work, speeds, links, ROWS)
    for rank in range(plan.world_size):
        engine, clock = sleeping(tmp_path, plan, rank, profile_json(uneven("x"), SIZES))
        with closing(engine):
            decode(engine)
        assert clock.now == pytest.approx(predicted[rank], rel=0.01)


def test_a_preset_takes_its_bytes_by_its_bandwidth(tmp_path: Path) -> None:
    plan, preset = plan_of("pipeline", [0.5, 0.5]), CATALOG["pi4"]
    engine, clock = sleeping(tmp_path, plan, 0, {"preset": "pi4"})
    layers = plan.stages[0].layers
    with closing(engine):
        decode(engine, rows=1, at=0)
    layer_bytes = sum(limits(FILE).layer_bytes[layers.start : layers.stop])
    assert clock.now == pytest.approx(5e-4 + layer_bytes / preset.memory_bytes_per_s, rel=1e-6)


def test_each_sum_comes_after_its_half_of_a_layer(tmp_path: Path) -> None:
    reached: list[tuple[str, float]] = []
    plan, profile = plan_of("tensor", [0.5, 0.5]), profile_json(uneven("x"), SIZES)

    def note(node: Any) -> None:
        reached.append((node.weight.split(".")[2], clock.now))
        assert node.view().shape == (ROWS, FILE.metadata["llama.embedding_length"])

    hook = Hook(lambda node: node.weight.endswith(("attn_output.weight", "ffn_down.weight")), note)
    engine, clock = sleeping(tmp_path, plan, 1, profile, [hook])
    with closing(engine):
        decode(engine, at=0)
    times = PartTimes(profile, PartSizes.from_file(engine.file), last=True, alone=False)
    attention_s, ff_s = times.attention_s(ROWS, 0), times.ff_s(ROWS)
    assert attention_s > 0
    assert ff_s > attention_s
    assert [name for name, _ in reached[:3]] == ["attn_output", "ffn_down", "attn_output"]
    assert len(reached) == 2 * engine.shape.n_layers
    first = times.step_s(ROWS) + attention_s
    assert [at for _, at in reached[:3]] == pytest.approx([first, first + ff_s, first + ff_s + attention_s])
    assert clock.now == pytest.approx(reached[-1][1] + times.head_s(ROWS))


def test_what_a_wait_took_too_long_is_taken_off_the_next() -> None:
    clock = Clock()
    late = iter([0.002, 0.0, 0.5, 0.0])

    def sleep(seconds: float) -> None:
        clock.sleep(seconds + next(late))

    sleeper, ends = Sleeper(clock.perf_counter, sleep), []
    for _ in range(4):
        sleeper.wait(0.1)
        ends.append(clock.now)
    # At most a hundredth of a second of lateness is caught up on. A longer one is due to other load.
    assert ends == pytest.approx([0.102, 0.2, 0.8, 0.89])
    assert sleeper.total_s == pytest.approx(0.4)
    late = iter([0.005, 0.0])
    sleeper.wait(0.1)
    sleeper.begin()  # of a step, which was not late
    began = clock.now
    sleeper.wait(0.1)
    assert clock.now - began == pytest.approx(0.1)


def test_rows_have_zeros_of_the_right_shapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    profile = tmp_path / "profile.json"
    profile.write_text(json.dumps(profile_json(uneven("x"), SIZES)))
    monkeypatch.setenv(VARIABLE, str(profile))
    plan = plan_of("pipeline", [0.5, 0.5])
    for rank in range(2):
        path = write(MODEL_PATH, plan.slice(rank), tmp_path / f"{rank}.gguf")
        with closing(Shard(ModelFile.open(path), OPTIONS, place(rank, [1, 1]))) as shard:
            assert isinstance(shard.engine, SleepingEngine)
            shard.engine.sleeper.skips = True
            shard.rows.outputs[:3] = 1
            shard.compute(3)
            if rank == 0:
                assert shard.hidden.shape == (3, FILE.metadata["llama.embedding_length"])
                assert not shard.hidden.any()
            else:
                assert [row.shape for row in shard.logits(3)] == [(limits(FILE).sizes.vocab,)] * 3
                assert not np.stack(shard.logits(3)).any()


def test_a_survey_gets_the_profile_without_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    profile = tmp_path / "profile.json"
    profile.write_text(json.dumps(profile_json(uneven("x"), SIZES)))
    monkeypatch.setenv(VARIABLE, str(profile))
    plan = plan_of("pipeline", [1.0])
    file = ModelFile.open(write(MODEL_PATH, plan.slice(0), tmp_path / "whole.gguf"))
    options = replace(OPTIONS, outputs=OPTIONS.rows)  # as the process sets it for a stage that is not the last
    with closing(Shard(file, options, place(0, [1, 1]))) as shard, own_kind().timing_clock(shard.engine) as clock:
        assert isinstance(shard.engine, SleepingEngine)
        assert clock is not None
        monkeypatch.setattr(shard.engine.sleeper, "_sleep", pytest.fail)
        first, four, deep = time_shard(shard, (1, 4), 1, 8, clock)
    layers = SIZES.layers
    assert first.seconds == pytest.approx(0.003 + layers * 0.010, rel=1e-4)
    assert four.seconds == pytest.approx(0.004 + layers * 0.018, rel=1e-4)
    assert deep.seconds - first.seconds == pytest.approx(8 * layers * 1e-5, rel=1e-3)


def test_rows_of_a_prompt_read_keys_together(tmp_path: Path) -> None:
    """Rows behind 12 tokens take as much longer than without: alone 10 us for each token, and a tenth in one
    sequence."""
    profile = profile_json(replace(uneven("x"), prompt_token_s=1e-6), SIZES)
    engine, clock = sleeping(tmp_path, plan_of("pipeline", [1.0]), 0, profile)

    def taken_s(sequences: list[int], at: list[int]) -> float:
        rows, began = engine.rows, clock.now
        rows.sequences[: len(at)], rows.positions[: len(at)], rows.outputs[: len(at)] = sequences, at, 1
        engine.decode_rows(rows, len(at))
        return clock.now - began

    with closing(engine):
        first_s = taken_s([0, 0, 0, 1], [0, 1, 2, 0])
        behind_s = taken_s([0, 0, 0, 1], [12, 13, 14, 12])
    assert behind_s - first_s == pytest.approx(SIZES.layers * (12 * 1e-5 + 3 * 12 * 1e-6), rel=1e-6)


def test_what_computes_has_no_clock_of_its_own() -> None:
    with closing(ModelRunner(MODEL_PATH, OPTIONS)) as engine, own_kind().timing_clock(engine) as clock:
        assert clock is None


@pytest.mark.parametrize(
    ("profile", "words"),
    [({"preset": "pi4"}, "even if its weights are paged"), (profile_json(uneven("x"), SIZES), "no disk rate")],
    ids=["no room for two layers", "no disk"],
)
def test_slice_that_neither_fits_nor_pages_is_refused(profile: Any, words: str, tmp_path: Path) -> None:
    options = replace(OPTIONS, memory=1 << 20)
    with pytest.raises(NotEnoughMemory, match=f"{words}.*sleeping device allows|sleeping device allows.*{words}"):
        sleeping(tmp_path, plan_of("pipeline", [1.0]), 0, profile, options=options)


@pytest.mark.parametrize("clock_skips", [False, True])
@pytest.mark.parametrize("disk_bytes_per_s", [1e6, 1e12])
def test_a_step_takes_no_less_than_reading_weights_that_do_not_fit(
    disk_bytes_per_s: float, clock_skips: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edge.parallel.sleeping.own_rss", lambda: 100 << 20)
    speed = replace(uneven("x"), disk_bytes_per_s=disk_bytes_per_s)
    plan, profile = plan_of("tensor", [0.5, 0.5]), profile_json(speed, SIZES)
    resident, resident_clock = sleeping(tmp_path, plan, 1, profile)
    with closing(resident):
        decode(resident)
    paged_bytes = resident.shape.weight_bytes // 2
    options = replace(OPTIONS, memory=resident.memory.total - paged_bytes)
    engine, clock = sleeping(tmp_path, plan, 1, profile, options=options)
    with closing(engine):
        assert engine.memory.total == options.memory
        seconds = []
        with engine.timing_clock() if clock_skips else nullcontext(clock.perf_counter) as now_s:
            assert now_s is not None
            for _ in range(3):
                began = now_s()
                decode(engine)
                seconds.append(now_s() - began)
    read_s = paged_bytes / disk_bytes_per_s
    assert (read_s > resident_clock.now) == (disk_bytes_per_s == 1e6)
    assert seconds == pytest.approx([max(read_s, resident_clock.now)] * 3, rel=1e-6)


def test_stop_ends_the_next_step(tmp_path: Path) -> None:
    engine, _ = sleeping(tmp_path, plan_of("pipeline", [1.0]), 0, {"preset": "pi4"})
    with closing(engine):
        engine.stop()
        with pytest.raises(Interrupted):
            decode(engine)
        engine.resume()
        decode(engine)


@pytest.mark.parametrize(
    ("profile", "words"),
    [
        ({"preset": "cray"}, "'cray'"),
        ({"speed": {}}, "layer_bytes"),
        ([], "object"),
        ({**profile_json(uneven("x"), SIZES), "heads": 0}, "above 0"),
        ({**profile_json(uneven("x"), SIZES), "layer_bytes": "1MiB"}, "layer_bytes"),
    ],
)
def test_what_is_no_profile_is_said(profile: Any, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        PartTimes(profile, SIZES, last=True, alone=True)


OPERATION = st.one_of(
    st.tuples(st.just("decode"), st.integers(0, 3), st.integers(1, 4)),
    st.tuples(st.just("remove"), st.integers(0, 3), st.integers(0, 12), st.integers(-1, 12)),
    st.tuples(st.just("copy"), st.integers(0, 3), st.integers(0, 3)),
    st.tuples(st.just("clear")),
)


@settings(max_examples=60, deadline=None)
@given(operations=st.lists(OPERATION, max_size=12))
def test_it_holds_the_positions_that_llama_cpp_holds(
    operations: list[tuple[Any, ...]], both: tuple[ModelRunner, ModelRunner]
) -> None:
    for engine in both:
        engine.kv_clear()
    for name, *numbers in operations:
        ends = [_do(engine, name, numbers) for engine in both]
        assert ends[0] == ends[1], (name, numbers)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The demo model, computing and asleep."""
    asleep, _ = sleeping(tmp_path_factory.mktemp("both"), plan_of("pipeline", [1.0]), 0, {"preset": "rtx-3060"})
    with closing(asleep), closing(ModelRunner(MODEL_PATH, OPTIONS)) as computing:
        yield computing, asleep


def _do(engine: ModelRunner, name: str, numbers: list[int]) -> list[int]:
    """Do an operation where it can be done: the last position of each sequence."""
    if name == "decode" and engine.kv_last(numbers[0]) + numbers[1] < 12:
        sequence, n = numbers
        start, rows = engine.kv_last(sequence) + 1, engine.rows
        rows.sequences[:n], rows.positions[:n], rows.outputs[:n] = sequence, range(start, start + n), 0
        rows.outputs[n - 1] = 1
        engine.decode_rows(rows, n)
    elif name == "remove":
        sequence, start, end = numbers
        if end < 0 or end > engine.kv_last(sequence):  # a hole would be no history
            engine.kv_remove(sequence, start, end)
    elif name == "copy" and numbers[0] != numbers[1] and engine.kv_last(numbers[1]) < 0:
        engine.kv_copy(*numbers)
    elif name == "clear":
        engine.kv_clear()
    return [engine.kv_last(sequence) for sequence in range(4)]


def test_states_are_as_large_as_real_ones(both: tuple[ModelRunner, ModelRunner]) -> None:
    blocks = []
    for engine in both:
        engine.kv_clear()
        _do(engine, "decode", [0, 8])
        blocks.append(engine.states.read(0, Range(0, 8)))
    assert blocks[0].n_bytes == blocks[1].n_bytes
    both[1].states.write(1, blocks[0])
    assert both[1].kv_last(1) == 7


def test_slice_of_a_sleeping_device_is_a_header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, path = plan_of("tensor", [0.5, 0.5]), tmp_path / "header.gguf"
    whole = ModelFile.open(write(MODEL_PATH, plan.slice(1), tmp_path / "slice.gguf"))
    monkeypatch.setenv(VARIABLE, "profile.json")
    [head] = own_kind().recipe(FILE, plan.model_digest or "0" * 64, plan.slice(1)).segments
    assert isinstance(head, Literal)
    path.write_bytes(head.data)
    with pytest.raises(ModelFileError, match="ends before its weights"):
        ModelFile.open(path)
    file = own_kind().slice_file(path)
    assert file.shape == whole.shape
    assert {name: tensor.n_bytes for name, tensor in file.tensors.items()} == {
        name: tensor.n_bytes for name, tensor in whole.tensors.items()
    }


def test_a_profile_that_cannot_be_read_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "none.json"))
    with pytest.raises(OSError, match=r"none\.json"):
        own_kind().open(ModelFile.open(MODEL_PATH), OPTIONS, place(0, [1]), [], None)


@pytest.mark.parametrize(
    ("values", "rates"),
    [
        ({"rates": [7e9, 8e10]}, (7e9, 8e10)),
        ({"rates": [7e9]}, (None, None)),
        ({}, (None, None)),
        ({"preset": "pi4"}, (CATALOG["pi4"].memory_bytes_per_s, CATALOG["pi4"].flops)),
    ],
)
def test_a_sleeping_device_reports_the_rates_of_its_profile_or_preset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, values: dict[str, Any], rates: tuple[float | None, float | None]
) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({**profile_json(uneven("x"), SIZES), **values}))
    monkeypatch.setenv(VARIABLE, str(path))
    profile = own_kind().describe("a")
    assert (profile.memory_bytes_per_s, profile.flops) == rates


def test_reported_rates_do_not_change_the_times_of_a_profile() -> None:
    profile = profile_json(uneven("x"), SIZES)
    times = [PartTimes(values, SIZES, last=True, alone=True) for values in (profile, {**profile, "rates": [1.0, 1.0]})]
    assert times[0].attention_s(1, 8) == times[1].attention_s(1, 8) > 0


@pytest.mark.parametrize(("model", "n_bytes"), [
    ("llama-3.1-8b", 2 << 30), ("llama-3.1-8b", 4 << 30), ("llama-3.1-8b", 11 << 30),
    ("qwen3-30b-a3b", 2 << 30), ("qwen3-30b-a3b", 8 << 30), ("qwen3-30b-a3b", 40 << 30),
])  # fmt: skip
def test_a_device_with_a_gpu_takes_what_the_planner_predicts(model: str, n_bytes: int, tmp_path: Path) -> None:
    """Each layer sleeps where its weights are, and the planner predicts from sums over layers."""
    outline(tmp_path / "model.gguf", SHAPES[model])
    file = ModelFile.open(tmp_path / "model.gguf")
    sizes, options = PartSizes.from_file(file), replace(OPTIONS, context=512, batch=512)
    laptop = replace(CATALOG["laptop"], memory_bytes=64 << 30)
    fixed = fixed_bytes(512, max(file.shape.n_embd, *file.shape.n_ff))
    gpu = replace(preset_speed(CATALOG["rtx-3060"], sizes, "", ""), memory_bytes=n_bytes, runtime_bytes=fixed)
    speed = replace(preset_speed(laptop, sizes, LOCAL, LOCAL), gpu=gpu)
    planner = Planner(work_of(file, EngineOptions(context=512), depth=0), [speed], Links(), "", "")
    times = PartTimes(profile_json(speed, sizes), sizes, last=True, alone=True)
    clock = Clock()
    with closing(SleepingEngine(file, options, [], times, Sleeper(clock.perf_counter, clock.sleep))) as engine:
        decode(engine, 1, 0)
    [placed] = planner.front(("latency",))[0]
    assert clock.now == pytest.approx(planner.predict(placed.plan).stages[0].compute_s, rel=0.01)
