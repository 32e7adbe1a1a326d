"""Test the slices of a model and its adapters: preparing, counting and sending a placement use the same ones."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edge.cluster import preflight
from edge.cluster.fleet import Fleet
from edge.cluster.model_slices import ModelSlices, adapter_bytes, send_ahead
from edge.errors import EngineError, NotEnoughMemory
from edge.llm.options import EngineOptions
from edge.models.demo import MODEL_PATH
from edge.models.local_slices import OwnSlices
from edge.weights.adapter_file import CheckedAdapter
from partition.model.file import ModelFile
from partition.model.model import ModelShape
from partition.plan.arrange import make_plan
from partition.plan.plan import LOCAL, Plan
from partition.slices.gguf_slice import limits
from tests.support.adapters import write_adapter

FILE = ModelFile.open(MODEL_PATH)
SHAPE = ModelShape.from_gguf(FILE)
WORKER = "a:1"
OPTIONS = EngineOptions(context=256)


def plan_for(*devices: str) -> Plan:
    return make_plan(limits(FILE), "", "", devices, "pipeline")


@pytest.fixture
def slices(tmp_path: Path) -> ModelSlices:
    adapter = write_adapter(tmp_path / "adapter.gguf", MODEL_PATH)
    own = OwnSlices(tmp_path / "cache", tmp_path / "state")
    return ModelSlices(FILE, own.model_digest(FILE.path), CheckedAdapter.all_from([str(adapter)], FILE), own)


def test_a_device_that_is_alone_has_all_of_an_adapter(slices: ModelSlices) -> None:
    [adapter], both = slices.adapters, slices.of_ranks(plan_for(LOCAL, WORKER))
    assert adapter_bytes(slices.of_ranks(plan_for(LOCAL))[0]) == adapter.file.gguf.size_bytes
    assert 0 < adapter_bytes(both[0]) < adapter.file.gguf.size_bytes
    assert [part.path for part in both[1]] == [FILE.path, adapter.path]


def test_adapters_count_in_what_a_placement_takes(slices: ModelSlices) -> None:
    plan, plain = plan_for(LOCAL, WORKER), ModelSlices(FILE, slices.digest, ())
    of_rank = adapter_bytes(slices.of_ranks(plan)[0])
    assert preflight.held_here(plan, slices, OPTIONS) - preflight.held_here(plan, plain, OPTIONS) == of_rank


def test_adapters_of_two_placements_need_room(slices: ModelSlices, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = plan_for(LOCAL)
    placements = [(alone, slices.of_ranks(alone))] * 2
    fleet = Fleet.__new__(Fleet)  # nothing is asked of it

    def need(more: int) -> Callable[[], int]:
        parts = sum(part.recipe.n_bytes for part in slices.of_ranks(alone)[0])
        return lambda: 2 * (parts + preflight.kv_bytes(alone, 0, SHAPE, OPTIONS)) + more

    monkeypatch.setattr(preflight, "available_memory", need(0))
    preflight.check_room(fleet, placements, SHAPE, OPTIONS)
    monkeypatch.setattr(preflight, "available_memory", need(-1))
    with pytest.raises(NotEnoughMemory, match=r"adapters \d"):
        preflight.check_room(fleet, placements, SHAPE, OPTIONS)


def test_slices_of_adapters_are_sent_ahead(slices: ModelSlices) -> None:
    sent: list[str] = []
    worker = SimpleNamespace(send_slice=lambda recipe, path, digest, check: sent.append(path.name))
    fleet: Any = SimpleNamespace(workers={WORKER: worker})
    send_ahead(fleet, plan_for(LOCAL, WORKER), slices, lambda done, total: None)
    assert sent == [FILE.path.name, "adapter.gguf"]


def test_no_slice_is_cut_from_an_adapter_that_has_changed(slices: ModelSlices) -> None:
    plan = plan_for(LOCAL, WORKER)
    _, adapter = slices.of_ranks(plan)[1]
    write_adapter(adapter.path, MODEL_PATH, seed=1)
    with pytest.raises(EngineError, match="has changed since it was checked"):
        slices.name(adapter)
