"""Test a deployment that is cancelled during its start, and what it tells its ranks."""

import threading
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edge.cluster import rank_group, session
from edge.cluster.fleet import Fleet
from edge.cluster.llm_ranks import Exchange, LlmRanks
from edge.cluster.model_slices import FileSlice
from edge.cluster.preflight import check_room
from edge.errors import Interrupted, NoRoom, NotEnoughMemory, WorkerError
from edge.llama import llama
from edge.models import local_slices as local
from edge.models.demo import MODEL_PATH
from edge.models.local_slices import OwnSlices
from edge.models.slice_store import SliceStore
from edge.parallel.engine import DistributedEngine
from edge.parallel.engine_kinds import EngineKind
from edge.weights.memory import MIB
from partition.model.file import ModelFile
from partition.model.model import ModelShape
from partition.plan.arrange import make_plan
from partition.plan.plan import LOCAL, Plan, Range
from partition.slices.gguf_slice import limits, slice_recipe
from partition.slices.recipe import Recipe
from tests.support.deployments import (
    OPTIONS,
    deployed,
    idle,
    own_folders,
    pipeline,
    plan_for,
    tensor,
    waiting,
)
from tests.support.helpers import TIMEOUT_S, until
from tests.support.links import start
from tests.support.slices import whole
from tests.support.workers import Worker


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_folders(monkeypatch, tmp_path / "own")


def refused_by_rank_1(two: list[Worker]) -> Plan:
    """A plan whose rank 1 is to run on a core that no machine has."""
    plan = plan_for(MODEL_PATH, two[:1], pipeline(1, 1))
    first, last = plan.stages
    shard = replace(last.shards[0], affinity=(4000,))
    return replace(plan, stages=(first, replace(last, shards=(shard,))))


class Models:
    """Every model that is loaded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.every: list[llama.Model] = []
        true = llama.Model.__init__

        def init(model: llama.Model, *args: Any, **kwargs: Any) -> None:
            self.every.append(model)
            true(model, *args, **kwargs)

        monkeypatch.setattr(llama.Model, "__init__", init)

    def loaded(self) -> bool:
        return any(getattr(model, "_handle", None) for model in self.every)


def test_after_a_refusal_nothing_goes_on(two: list[Worker], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0's slice is being cut then, and never loaded."""
    models = Models(monkeypatch)
    cutting, given_up = threading.Event(), threading.Event()
    true_open, true_close = LlmRanks._open, LlmRanks.close

    def put_cut(store: SliceStore, recipe: Any, model: Any, digest: str, progress: Any = None) -> Path:
        progress(0, 3000)
        cutting.set()
        assert given_up.wait(TIMEOUT_S)
        progress(1, 3000)
        raise AssertionError("nobody stopped this")

    def open_while_it_is_cut(deployment: LlmRanks, *args: Any) -> list[str]:
        assert cutting.wait(TIMEOUT_S)
        return true_open(deployment, *args)

    def close(deployment: LlmRanks) -> None:
        true_close(deployment)
        given_up.set()

    monkeypatch.setattr(SliceStore, "put_cut", put_cut)
    monkeypatch.setattr(LlmRanks, "_open", open_while_it_is_cut)
    monkeypatch.setattr(LlmRanks, "close", close)
    reported: list[float] = []
    with Fleet([two[0].address]) as fleet:
        with pytest.raises(WorkerError, match="one: core 4000 is not available here"):
            LlmRanks(
                fleet,
                refused_by_rank_1(two),
                ModelFile.open(MODEL_PATH),
                OPTIONS,
                progress=lambda done, *_: reported.append(done),
            )
        n = len(reported)
        until(lambda: not waiting(), "the end of threads")
        assert len(reported) - n <= 1  # one may have been on its way
        assert not models.loaded()
        idle(two[:1], fleet)


def test_after_a_refusal_no_model_is_left(two: list[Worker], monkeypatch: pytest.MonkeyPatch) -> None:
    models = Models(monkeypatch)
    with Fleet([two[0].address]) as fleet:
        with pytest.raises(WorkerError, match="core 4000"):
            LlmRanks(fleet, refused_by_rank_1(two), ModelFile.open(MODEL_PATH), OPTIONS)
        until(lambda: not waiting(), "the end of threads")
        assert models.every
        assert not models.loaded()


def test_a_load_ends_where_its_progress_raises(capfd: pytest.CaptureFixture[str]) -> None:
    def progress(_: float) -> None:
        raise Interrupted("given up")

    with pytest.raises(Interrupted, match="given up"):
        llama.Model(MODEL_PATH, progress=progress)
    assert capfd.readouterr().err == ""


def test_who_could_not_be_reached_is_named(two: list[Worker], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 is told an address at which rank 2 is not; rank 0 only sees that rank 1 goes."""
    true = rank_group.tell_peers  # type: ignore[attr-defined]

    def wrong(sessions: Any, ranks: Any, transport: str) -> None:
        true(sessions, [replace(peer, host="127.0.0.9") if peer.rank == 2 else peer for peer in ranks], transport)

    last_failure = rank_group.last_failure  # type: ignore[attr-defined]

    def when_one_has_spoken(error: Exception, links: Any, sessions: Any) -> Exception:
        until(lambda: sessions[0].end_reason() is not None, "what rank 1 says of its end")
        return last_failure(error, links, sessions)

    monkeypatch.setattr(rank_group, "tell_peers", wrong)
    monkeypatch.setattr(rank_group, "last_failure", when_one_has_spoken)
    monkeypatch.setattr(session, "LAST_REASON_S", 0.0)
    with Fleet([item.address for item in two]) as fleet:
        plan = plan_for(MODEL_PATH, two, tensor(1, 1, 1))
        with pytest.raises(
            WorkerError, match=r"^one: rank 2 \(two\) cannot be reached: nothing listens at 127\.0\.0\.9"
        ):
            LlmRanks(fleet, plan, ModelFile.open(MODEL_PATH), OPTIONS)
        idle(two, fleet)


def test_the_last_step_is_not_waited_for(two: list[Worker], monkeypatch: pytest.MonkeyPatch) -> None:
    patience: list[float] = []
    true = DistributedEngine.end

    def end(engine: DistributedEngine) -> None:
        patience.extend(link.deadlines.send_timeout_s for link in engine.group.links.values())
        true(engine)

    monkeypatch.setattr(DistributedEngine, "end", end)
    with deployed(two, MODEL_PATH, pipeline(1, 1, 1)) as deployment:
        links = deployment.engine.group.links.values()
        assert {link.deadlines.send_timeout_s for link in links} == {300.0}
    assert len(patience) == 2
    assert max(patience) < 0.1


@pytest.mark.parametrize(("name", "value"), [("transport", "udp"), ("algorithm", "tree"), ("wire", "q4")])
def test_an_exchange_that_is_not_known(name: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is '{value}'; known are "):
        Exchange(**{name: value})


@pytest.mark.parametrize("name", ["two\nlines", "x" * 1000, "\udcff.gguf", ""])
def test_a_model_can_have_any_name(name: str) -> None:
    plan = make_plan(limits(ModelFile.open(MODEL_PATH)), name, "", [LOCAL, "a"])
    assert Plan.from_json(plan.to_json()).model.isprintable()


# Slices of this device.


def layers_recipe(layers: Range) -> Recipe:
    file = ModelFile.open(MODEL_PATH)
    return slice_recipe(file, "0" * 64, whole(file, layers))


def test_who_comes_second_waits_for_the_slice(tmp_path: Path) -> None:
    recipe = layers_recipe(Range(0, 1))
    slices = OwnSlices(tmp_path / "slices", tmp_path / "state")
    digest = slices.digest(recipe, MODEL_PATH)
    reported: list[float] = []

    def use() -> bytes:
        with slices.use(recipe, MODEL_PATH, digest, lambda done, total: reported.append(done)) as path:
            return path.read_bytes()

    with SliceStore(tmp_path / "slices", 1 << 30).receive(digest, recipe.n_bytes) as partial:
        done = start(use)
        until(lambda: len(reported) > 1, "a wait")
        assert not done.done()
        del partial
    assert len(done.result(TIMEOUT_S)) == recipe.n_bytes


def test_a_full_cache_says_what_can_be_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slices = OwnSlices(tmp_path / "slices", tmp_path / "state")
    monkeypatch.setattr(local, "CACHE_BYTES", 1)
    with ExitStack() as stack:
        for layers in (Range(0, 1), Range(1, 3)):
            recipe = layers_recipe(layers)
            context = slices.use(recipe, MODEL_PATH, slices.digest(recipe, MODEL_PATH))
            if layers.start:
                with pytest.raises(NoRoom, match="in use; end other commands that run models on several devices"):
                    stack.enter_context(context)
            else:
                stack.enter_context(context)


# What devices have.


def test_waits_poll_by_the_threads_of_the_plan(two: list[Worker], monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[int] = []
    monkeypatch.setattr(EngineKind, "polling_s", lambda _, threads: float(requests.append(threads) or 0))
    plan = plan_for(MODEL_PATH, two[:1], pipeline(1, 1))
    first, last = plan.stages
    plan = replace(plan, stages=(replace(first, shards=(replace(first.shards[0], threads=1),)), last))
    with Fleet([two[0].address]) as fleet:
        with LlmRanks(fleet, plan, ModelFile.open(MODEL_PATH), replace(OPTIONS, threads=2)) as deployment:
            assert deployment.engine.threads == 1
        idle(two[:1], fleet)
    assert requests == [1]


def test_one_device_under_two_addresses_needs_room_for_both(two: list[Worker]) -> None:
    file = ModelFile.open(MODEL_PATH)
    addresses = [f"localhost:{two[0].port}", f"LOCALHOST:{two[0].port}"]
    plan = make_plan(limits(file), "model", "", [LOCAL, *addresses], "pipeline")
    recipes = [slice_recipe(file, "0" * 64, plan.slice(rank)) for rank in range(3)]
    slices = {rank: [FileSlice(file.path, recipe)] for rank, recipe in enumerate(recipes)}
    with Fleet(addresses) as fleet:
        for address in addresses:
            fleet.profiles[address] = replace(fleet.profiles[address], memory_available_bytes=recipes[1].n_bytes)
        with pytest.raises(NotEnoughMemory) as caught:
            check_room(fleet, [(plan, slices)], ModelShape.from_gguf(file), OPTIONS)
    assert str(caught.value).count("needs") == 1
    weights = sum(recipe.n_bytes for recipe in recipes[1:]) / MIB
    assert f"(weights {weights:,.0f}, " in str(caught.value)
