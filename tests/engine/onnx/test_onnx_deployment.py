"""ONNX models on real workers: the outputs of one device, plans that follow one another, and devices that are lost."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from onnx import helper

from edge.cluster import client
from edge.cluster.fleet import Fleet
from edge.cluster.onnx_ranks import OnnxRanks
from edge.deployment.deployed_network import OneDevice
from edge.errors import EngineError, Interrupted, NotEnoughMemory, WorkerError
from edge.onnx.model import OnnxSource
from edge.onnx.pipeline import Result
from edge.onnx.samples import SamplesError
from edge.planning.onnx_sweep import sweep
from partition.errors import PlanError
from partition.plan.onnx_cuts import cuts
from partition.plan.onnx_plan import OnnxPlan
from partition.plan.plan import LOCAL
from tests.support.deployments import ONE_THREAD, shared_workers, waiting
from tests.support.helpers import TIMEOUT_S, until
from tests.support.links import start
from tests.support.onnx_files import saved
from tests.support.onnx_graphs import mlp
from tests.support.onnx_networks import model_of
from tests.support.onnx_pipelines import at, images, mixed, mixed_feeds, owned, residual, same, whole
from tests.support.thorough import each_once
from tests.support.workers import Worker, worker
from transport.errors import TransportError
from transport.link import Deadlines

QUICK = Deadlines(connect_timeout_s=5.0, step_timeout_s=8.0, send_timeout_s=8.0)
N_MIXED = 14  # nodes
BAD_IDS = np.array([[0, 99, 0]])  # a row that the table of `mixed` does not have


@pytest.fixture(autouse=True, scope="module", name="three")
def three_workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Worker]]:
    """Workers that the tests share which do not end them."""
    with shared_workers(tmp_path_factory, "one", "two", "three") as three:
        yield three


@pytest.fixture(scope="module", name="fleet")
def one_fleet(three: list[Worker]) -> Iterator[Fleet]:
    with Fleet([item.address for item in three]) as fleet:
        yield fleet


@pytest.fixture(scope="module", name="several")
def several_of_everything(tmp_path_factory: pytest.TempPathFactory) -> OnnxSource:
    return owned(mixed(), tmp_path_factory.mktemp("models") / "mixed.onnx")


@pytest.fixture(scope="module", name="running")
def one_deployment(three: list[Worker], fleet: Fleet, several: OnnxSource) -> Iterator[OnnxRanks]:
    """`mixed` on three workers, for tests that leave it usable."""
    with OnnxRanks(fleet, several, plan_for(several, three, 4, 9), deadlines=QUICK) as deployment:
        yield deployment


def plan_for(model: OnnxSource, workers: Sequence[Worker | str], *positions: int) -> OnnxPlan:
    """A stage for each of the workers, or LOCAL."""
    return model.plan([item if isinstance(item, str) else item.address for item in workers], at(model, *positions))


@contextmanager
def deployed(
    model: OnnxSource, workers: Sequence[Worker | str], *positions: int, transport: str = "auto"
) -> Iterator[OnnxRanks]:
    """A deployment of its own, which leaves no session behind."""
    real = [item for item in workers if isinstance(item, Worker)]
    before = {item: len(item.children()) for item in real}
    with Fleet([item.address for item in real]) as fleet:
        plan = plan_for(model, workers, *positions)
        with OnnxRanks(fleet, model, plan, transport=transport, deadlines=QUICK, threads=1) as deployment:
            yield deployment
        left(before)


def left(children: dict[Worker, int]) -> None:
    """Wait until workers that still run have no more engine processes than these."""
    for first, n in children.items():
        if first.process.poll() is None:
            until(lambda: len(first.children()) <= n, "the end of the engine processes")  # noqa: B023
    until(lambda: not [name for name in waiting() if name.startswith("deploy")], "the end of threads")


class Endless:
    """A pipeline that computes in a thread, until it fails."""

    def __init__(self, deployment: OnnxRanks, window: int = 6) -> None:
        self.pipeline = deployment.start()
        self.came = 0
        self._window = window
        self._done: Future[None] = start(self._run)
        until(lambda: self.came > 5 or self._done.done(), "some results")

    def _run(self) -> None:
        for _ in self.pipeline.map((mixed_feeds(1, seed) for seed in count()), window=self._window):
            self.came += 1

    def error(self) -> BaseException:
        """Return the error it failed with."""
        error = self._done.exception(TIMEOUT_S)
        assert error is not None
        return error


# ---------------------------------------------------------------------------------------------------- the same outputs


def test_many_plans_on_the_same_sessions(running: OnnxRanks, several: OnnxSource, three: list[Worker]) -> None:
    expected = [whole(several.file.model, mixed_feeds(batch, batch)) for batch in (1, 4, 2)]
    pids = [session.pid for session in running._sessions]
    for positions in ((1, 2), (3, 11), (4, 13), (12, 13), (6, 9)):
        running.load(plan_for(several, three, *positions))
        assert running.plan.cuts == positions
        assert [item.device for item in running.loaded] == [item.address for item in three]
        stage_s = running.times(2)
        assert len(stage_s) == 3
        assert all(0 < seconds < 5 for seconds in stage_s)
        pipeline = running.start()
        for _ in range(2):
            results = list(pipeline.map((mixed_feeds(batch, batch) for batch in (1, 4, 2)), window=3))
            for result, outputs in zip(results, expected, strict=True):
                same(result.outputs, outputs)
                assert len(result.compute_s) == 3
    assert [session.pid for session in running._sessions] == pids


@pytest.mark.parametrize(("own", "transport"), each_once([False, True], ["tcp", "grpc"]))
def test_one_worker_and_the_owner(three: list[Worker], tmp_path: Path, own: bool, transport: str) -> None:
    external = {"save_as_external_data": True, "location": "weights", "size_threshold": 0}
    model = owned(residual(), tmp_path / "residual.onnx", **(external if own else {}))
    assert bool(model.file.data_files) == own
    devices, positions = ([LOCAL, three[0]], [5]) if own else ([three[0]], [])
    with deployed(model, devices, *positions, transport=transport) as deployment:
        assert [item.device for item in deployment.loaded] == list(deployment.plan.devices)
        assert deployment.loaded[-1].memory_bytes >= 0
        hops = deployment.hops(0.05)
        assert len(hops) == 2
        assert all(hop.latency_s > 0 and hop.bytes_per_s > 0 for hop in hops)
        pipeline = deployment.start()
        for result, seed in zip(pipeline.map((images(2, seed) for seed in range(9)), window=4), range(9), strict=True):
            same(result.outputs, whole(model.file.model, images(2, seed)))


def test_wires(running: OnnxRanks, several: OnnxSource, three: list[Worker]) -> None:
    running.load(plan_for(several, three, 4, 13))
    pipeline = running.start()
    feeds = mixed_feeds(8, 1)
    expected, plain = whole(several.file.model, feeds), pipeline.run(feeds).outputs
    for wire, bound in (("f16", 2e-3), ("q8", 3e-2)):
        result = pipeline.run(feeds, wire).outputs
        off = np.abs(result["y"] - expected["y"]).max() / np.abs(expected["y"]).max()
        assert 0 < off < bound
        assert result["half"].tobytes() == plain["half"].tobytes()
    same(plain, expected)


def test_hops_are_measured_on_every_link(running: OnnxRanks, several: OnnxSource, three: list[Worker]) -> None:
    running.load(plan_for(several, three, 4, 9))
    for _ in range(2):
        hops = running.hops(0.05)
        assert len(hops) == 4
        assert all(0 < hop.latency_s < 1 and hop.bytes_per_s > 1e6 for hop in hops)
    same(running.start().run(mixed_feeds()).outputs, whole(several.file.model, mixed_feeds()))


def test_whatever_goes_wrong_here_does_no_harm(running: OnnxRanks, several: OnnxSource, three: list[Worker]) -> None:
    running.load(plan_for(several, three, 4, 9))
    pipeline = running.start()
    expected = whole(several.file.model, mixed_feeds())

    def failing() -> Iterator[dict[str, Any]]:
        yield from (mixed_feeds(1, seed) for seed in range(3))
        raise RuntimeError("the camera is gone")

    for _ in range(2):
        with closing(pipeline.map((mixed_feeds(1, seed) for seed in count()), window=8)) as results:
            for seed, result in enumerate(islice(results, 3)):
                same(result.outputs, whole(several.file.model, mixed_feeds(1, seed)))
        with pytest.raises(SamplesError, match="takes values of type float32, got float64"):
            pipeline.run(mixed_feeds() | {"x": np.zeros((1, 8))})
        with pytest.raises(RuntimeError, match="the camera is gone"):
            list(pipeline.map(failing(), window=2))
        feeds = mixed_feeds()
        feeds["x"][:] = np.nan
        assert np.isnan(pipeline.run(feeds).outputs["y"]).any()
        same(pipeline.run(mixed_feeds()).outputs, expected)


def test_a_sweep_over_cuts(three: list[Worker], tmp_path: Path) -> None:
    model = owned(mlp((64, 96, 32, 10)), tmp_path / "mlp.onnx")
    every = cuts(model.graph)
    x = np.zeros((1, 64), np.float32)
    with deployed(model, three[:2], every[0].position) as deployment:
        speeds = list(sweep(deployment, model, every[::3], {"x": x}, repeats=3, window=2))
    assert [speed.cut for speed in speeds] == every[::3]
    for speed in speeds:
        assert len(speed.stage_s) == 2
        assert len(speed.transfer_s) == 3
        assert speed.speed.throughput_per_s > 0
        assert speed.expected_throughput_per_s == pytest.approx(1 / max(*speed.stage_s, *speed.transfer_s))


# ------------------------------------------------------------------------------------------------- plans that are none


def edited(plan: OnnxPlan, **changed: Any) -> OnnxPlan:
    return OnnxPlan.from_json(plan.to_json() | changed)


def test_plans_that_are_refused_leave_the_pipeline_as_it_is(
    running: OnnxRanks, several: OnnxSource, three: list[Worker]
) -> None:
    good = plan_for(several, three, 4, 9)
    running.load(good)
    pipeline = running.start()
    stages = good.to_json()["stages"]
    elsewhere = plan_for(several, [three[1], three[0], three[2]], 4, 9)
    fewer = plan_for(several, three[:2], 4)
    own = plan_for(several, [LOCAL, *three[1:]], 4, 9)
    refused: list[tuple[OnnxPlan, str]] = [
        (elsewhere, "the plan is for .*; connected are"),
        (fewer, "the plan is for .*; connected are"),
        (own, "the plan is for local, .*; connected are"),
        (edited(good, model_digest="ab" * 32), "has SHA-256 .*, the plan is for abababababab.*make a new plan"),
        (
            edited(good, n_nodes=15, stages=[*stages[:2], {**stages[2], "nodes": [9, 15]}]),
            "for a graph of 15 nodes, mixed.onnx has 14; make a new plan",
        ),
        (
            edited(good, stages=[{**stages[0], "until": "nowhere"}, *stages[1:]]),
            "the cut at node 4 is after '.*gather.*', the plan says 'nowhere'",
        ),
        (edited(good, stages=[{**stages[0], "affinity": [0]}, *stages[1:]]), "affinities differ from those"),
    ]
    for plan, words in refused:
        with pytest.raises(PlanError, match=words):
            running.load(plan)
    assert running.plan == good
    same(pipeline.run(mixed_feeds()).outputs, whole(several.file.model, mixed_feeds()))
    running.load(edited(good, model_digest="", stages=[{**stage, "until": ""} for stage in stages]))  # nothing to check
    same(running.start().run(mixed_feeds()).outputs, whole(several.file.model, mixed_feeds()))


def test_a_stage_that_cannot_be_loaded(running: OnnxRanks, several: OnnxSource, three: list[Worker]) -> None:
    good = plan_for(several, three, 4, 9)
    stages = good.to_json()["stages"]
    with pytest.raises(WorkerError, match="two: there is no provider 'abacus'") as raised:
        running.load(edited(good, stages=[stages[0], {**stages[1], "provider": "abacus"}, stages[2]]))
    assert raised.value.error == "EngineError"
    running.load(good)
    same(running.start().run(mixed_feeds()).outputs, whole(several.file.model, mixed_feeds()))


def test_what_cannot_be_deployed(several: OnnxSource, three: list[Worker], fleet: Fleet, tmp_path: Path) -> None:
    def refused(kind: type[Exception], words: str, model: OnnxSource, plan: OnnxPlan, **how: Any) -> None:
        with pytest.raises(kind, match=words):
            OnnxRanks(fleet, model, plan, **how)

    refused(PlanError, "for this device alone; it needs no workers", several, plan_for(several, [LOCAL]))
    refused(ValueError, "transport is 'mail'", several, plan_for(several, three[:1]), transport="mail")
    alone = owned(mlp(), tmp_path / "mlp.onnx")
    refused(PlanError, "is for another|has changed, or is another model", alone, plan_for(several, three[:1]))
    until(lambda: not any(item.startswith("deploy") for item in waiting()), "the end of threads")


def test_an_output_that_depends_on_no_input(three: list[Worker], tmp_path: Path) -> None:
    nodes = [("Relu", ["x"], ["h"]), ("Exp", ["w"], ["fixed"]), ("Neg", ["h"], ["y"]), ("Exp", ["y"], ["z"])]
    built = [helper.make_node(*node) for node in nodes]
    model = owned(model_of(built, {"x": [4]}, ["fixed", "z"], {"w": np.ones(3, np.float32)}), tmp_path / "fixed.onnx")
    feeds = {"x": np.arange(4, dtype=np.float32)}
    with deployed(model, three[:2], 2) as deployment:
        same(deployment.start().run(feeds).outputs, whole(model.file.model, feeds))


def test_a_layer_whose_name_is_long_can_be_cut_after(tmp_path: Path) -> None:
    name = f"/{'outer/' * 60}block.0/Relu\u2028"
    nodes = [helper.make_node("Relu", ["x"], ["h"], name), helper.make_node("Exp", ["h"], ["y"])]
    model = owned(model_of(nodes, {"x": [4]}, ["y"]), tmp_path / "long.onnx")
    plan = plan_for(model, ["a", "b"], 1)
    model.check(plan)
    assert OnnxPlan.from_json(plan.to_json()) == plan


# ------------------------------------------------------------------------------------------------- weights and memory


def test_weights_cross_once_or_never(several: OnnxSource, three: list[Worker], fleet: Fleet, tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    model = owned(mlp((64, 200, 200, 10), seed=5), tmp_path / "models" / "mlp.onnx")
    external = {"save_as_external_data": True, "location": "weights", "size_threshold": 0}
    baseline = owned(mlp((64, 200, 200, 10), seed=6), tmp_path / "models" / "beside.onnx", **external)
    first = three[0].address
    for owner in (model, baseline):
        for part in owner.parts(plan_for(owner, ["a", "b"], 3)):
            with owner.recipe(part) as (recipe, path):
                sent = [fleet.workers[first].send_slice(recipe, path, part.digest) for _ in range(2)]
            # A recipe that copies nothing is all that is needed.
            assert sent == [len(part.content) if recipe.copies else 0, 0]
    with (
        worker(tmp_path / "w", "--name", "holds", "--models", tmp_path / "models", *ONE_THREAD) as holds,
        holds.remote() as connected,
    ):
        [part] = model.parts(plan_for(model, ["a"]))
        with model.recipe(part) as (recipe, path):
            assert len(recipe.to_bytes()) < len(part.content) / 20
            assert connected.send_slice(recipe, path, part.digest) == 0
        other = owned(mlp((64, 200, 200, 10), seed=7), tmp_path / "other.onnx")
        [part] = other.parts(plan_for(other, ["a"]))
        with other.recipe(part) as (recipe, path):
            assert connected.send_slice(recipe, path, part.digest) == len(part.content)


def test_a_model_that_was_changed_is_not_cut(tmp_path: Path, fleet: Fleet, three: list[Worker]) -> None:
    model = owned(mlp((64, 200, 10), seed=8), tmp_path / "mlp.onnx")
    saved(mlp((64, 200, 10), seed=9), tmp_path / "mlp.onnx")
    plan = plan_for(model, three[:1])
    with OnnxRanks(fleet, model, plan, deadlines=QUICK) as deployment:  # what was read is what runs
        x = np.ones((1, 64), np.float32)
        same(deployment.start().run({"x": x}).outputs, whole(model.file.model, {"x": x}))


def test_a_worker_without_room(tmp_path: Path) -> None:
    """By its weights and activations before anything is sent; by the file, for what the worker has left."""
    relu = [
        helper.make_node("Expand", ["x", "shape"], ["w"]),
        helper.make_node("Relu", ["w"], ["h"]),  # 120 MiB in, 120 MiB out
        helper.make_node("ReduceMax", ["h"], ["y"], keepdims=1),
    ]
    shape = {"shape": np.array([1, 120 << 18])}
    wide = owned(model_of(relu, {"x": [1, 1]}, ["y"], shape), tmp_path / "wide.onnx")
    with (
        worker(tmp_path / "small", "--name", "small", "--memory", "230MiB", *ONE_THREAD) as small,
        Fleet([small.address]) as fleet,
    ):
        with pytest.raises(NotEnoughMemory, match=r"small needs 240 MiB or more and has 230: cut the model so that"):
            OnnxRanks(fleet, wide, plan_for(wide, [small]))
        left({small: 0})
        # A weight of 82 MiB: more than is left of 230 beside the daemon and the engine process.
        product = [helper.make_node("MatMul", ["x", "w"], ["y"])]
        net = model_of(product, {"x": [1, 72]}, ["y"], {"w": np.zeros((72, 300_000), np.float32)})
        weights = owned(net, tmp_path / "weights.onnx")
        with pytest.raises(
            WorkerError, match=r"small: the stage needs \d+ MiB more than this worker has left"
        ) as raised:
            OnnxRanks(fleet, weights, plan_for(weights, [small]))
        assert raised.value.error == "NotEnoughMemory"
        left({small: 0})


def test_a_stage_larger_than_the_limit_of_its_worker_is_paged(tmp_path: Path) -> None:
    """120 MiB of weights, for which ONNX Runtime takes twice as much. The daemon has a part of the limit, too."""
    rng = np.random.default_rng(0)
    weights = {f"w{i}": rng.standard_normal((1586, 1586), np.float32) / 40 for i in range(12)}
    nodes = [helper.make_node("MatMul", [f"h{i}" if i else "x", f"w{i}"], [f"h{i + 1}"]) for i in range(12)]
    net = owned(model_of(nodes, {"x": [1, 1586]}, ["h12"], weights), tmp_path / "net.onnx")
    with (
        worker(tmp_path / "small", "--name", "small", "--memory", "300MiB", *ONE_THREAD) as small,
        Fleet([small.address]) as fleet,
        OnnxRanks(fleet, net, plan_for(net, [small])) as deployment,
    ):
        pipeline = deployment.start()
        [process] = small.children()
        for _ in range(3):
            x, before = {"x": rng.standard_normal((1, 1586), np.float32)}, _read_bytes(process)
            same(pipeline.run(x).outputs, whole(net.file.model, x))
            assert sys.platform != "linux" or _read_bytes(process) - before > 10 << 20  # a weight has 10 MB


def _read_bytes(process: psutil.Process) -> int:
    """Return the bytes that a process has read; 0 if the system does not count them."""
    return int(process.io_counters().read_chars) if sys.platform == "linux" else 0


# -------------------------------------------------------------------------------------------------------------- faults


@pytest.mark.parametrize("victim", [0, 1])
def test_an_engine_process_that_is_killed(several: OnnxSource, three: list[Worker], victim: int) -> None:
    with deployed(several, three[:2], 6) as deployment:
        endless = Endless(deployment)
        os.kill(deployment._sessions[victim].pid, signal.SIGKILL)
        error = endless.error()
        assert isinstance(error, WorkerError), repr(error)
        assert f"{('one', 'two')[victim]}: the engine process was killed by SIGKILL" in str(error)
        with pytest.raises((WorkerError, TransportError), match=r"one|two"):
            endless.pipeline.run(mixed_feeds())


def test_a_daemon_that_is_killed(
    several: OnnxSource, three: list[Worker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "RECONNECT_S", 1.0)
    with worker(tmp_path / "doomed", "--name", "doomed", *ONE_THREAD) as doomed:
        with deployed(several, [LOCAL, three[0], doomed], 4, 9) as deployment:
            endless = Endless(deployment)
            children = doomed.children()
            doomed.kill()
            error = endless.error()
            assert isinstance(error, (WorkerError, TransportError)), repr(error)
            assert "doomed" in str(error)
        until(lambda: not any(child.is_running() for child in children), "the end of its engine process")


def test_an_operator_that_fails_names_its_node_and_the_worker(several: OnnxSource, three: list[Worker]) -> None:
    with deployed(several, three[:2], 2) as deployment:
        pipeline = deployment.start()
        feeds = [mixed_feeds(), mixed_feeds() | {"ids": BAD_IDS}, *[mixed_feeds()] * 20]
        came: list[Result] = []
        with pytest.raises(WorkerError, match=r"two: .*gather") as raised:
            came.extend(pipeline.map(feeds, window=8))
        assert raised.value.error == "EngineError"
        assert len(came) <= 1
        assert "\n" not in str(raised.value)


def test_stop_from_another_thread(several: OnnxSource, three: list[Worker]) -> None:
    with deployed(several, [LOCAL, three[0]], 4) as deployment:
        with pytest.raises(EngineError, match="gather"):  # in this process: the pipeline goes on
            deployment.start().run(mixed_feeds() | {"ids": BAD_IDS})
        deployment.load(plan_for(several, [LOCAL, three[0]], 9))
        endless = Endless(deployment)
        endless.pipeline.stop()
        assert isinstance(endless.error(), Interrupted)
        with pytest.raises(Interrupted):
            endless.pipeline.run(mixed_feeds())


def test_nothing_is_left_of_all_this(three: list[Worker], running: OnnxRanks) -> None:
    """Sessions are those of the deployment that still runs; no thread waits for another one."""
    assert len(running.loaded) == len(three)
    until(lambda: all(len(item.children()) == 1 for item in three), "the end of other engine processes")
    until(lambda: not any(t.name in ("feed", "stage") for t in threading.enumerate()), "the end of threads")


def test_a_whole_network_that_changed_since_it_was_planned_is_not_loaded(tmp_path: Path) -> None:
    model = owned(mixed(), tmp_path / "mixed.onnx")
    plan = model.plan((LOCAL,), [])
    OneDevice(model, plan, 1, None).close()
    owned(residual(), tmp_path / "mixed.onnx")
    with pytest.raises(PlanError, match="has changed since it was loaded; start again"):
        OneDevice(model, plan, 1, None)
