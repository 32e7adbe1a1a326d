"""Budgets of memory and GPU memory, as a user sets them or as the machine has them."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from edge.errors import EngineError
from edge.llama import ggml, llama
from edge.weights import budgets
from edge.weights.budgets import Budgets, chosen_budgets
from edge.weights.on_gpu import GpuRequest
from partition.predict.residency import SPARE_BYTES

GIB = 1 << 30
FREE, ON_GPU, OWN = 10 * GIB, 4 * GIB, GIB // 8
AUTOMATIC = OWN + round(0.8 * FREE)
ITS_GPU = GpuRequest(7, budget=ON_GPU, is_required=False)


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """10 GiB are free, and 4 GiB of a GPU besides the spare bytes. There is a second GPU."""
    monkeypatch.setattr(budgets, "available_memory", lambda: FREE)
    monkeypatch.setattr(budgets, "own_rss", lambda: OWN)
    monkeypatch.setattr(llama, "has_gpu", lambda: True)
    monkeypatch.setattr(ggml, "gpu_devices", lambda: [7, 8])
    monkeypatch.setattr(ggml, "discrete_gpus", lambda: [7, 8])
    monkeypatch.setattr(ggml, "gpu_free_bytes", lambda gpus: {(7,): ON_GPU + SPARE_BYTES}[tuple(gpus)])


def chosen(n_bytes: int, experts: int = 0, **options: Any) -> Budgets:
    shape: Any = SimpleNamespace(weight_bytes=n_bytes, n_experts=experts)
    return chosen_budgets(shape, **{"memory": None, "gpu_memory": None, "gpu_layers": None, **options})


def test_options_of_a_user_are_kept() -> None:
    assert chosen(99 * GIB, memory=5) == Budgets(5, ITS_GPU)
    assert chosen(99 * GIB, memory=5, most_gpu_layers=9) == Budgets(5, replace(ITS_GPU, most_layers=9))
    assert chosen(99 * GIB, memory=5, most_gpu_layers=0) == Budgets(5, None)
    assert chosen(99 * GIB, memory=5, gpu_memory=6) == Budgets(5, GpuRequest(7, budget=6))
    assert chosen(99 * GIB, memory=5, gpu_layers=3) == Budgets(5, GpuRequest(7, layers=3))
    assert chosen(99 * GIB, memory=5, gpu_layers=0) == Budgets(5, None)
    assert chosen(GIB, gpu_memory=6) == Budgets(None, GpuRequest(7, budget=6))


def test_a_dense_model_gets_a_budget_if_it_is_larger_than_memory_and_gpu_together() -> None:
    assert chosen(FREE + ON_GPU) == Budgets(None, None)
    assert chosen(FREE + ON_GPU + 1) == Budgets(AUTOMATIC, ITS_GPU, is_own_choice=True)
    assert chosen(FREE, gpu_layers=0) == Budgets(None, None)
    assert chosen(FREE + 1, gpu_layers=0) == Budgets(AUTOMATIC, None, is_own_choice=True)


def test_experts_that_do_not_fit_on_the_gpu_stay_in_memory() -> None:
    assert chosen(ON_GPU, experts=8) == Budgets(None, None)
    assert chosen(ON_GPU + 1, experts=8) == Budgets(AUTOMATIC, ITS_GPU, is_own_choice=True)
    requested = GpuRequest(7, budget=GIB)
    assert chosen(GIB + 1, experts=8, gpu_memory=GIB) == Budgets(AUTOMATIC, requested)


def test_a_gpu_that_shares_the_memory_is_used_only_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ggml, "discrete_gpus", list)
    assert chosen(99 * GIB, memory=5) == Budgets(5, None)
    assert chosen(99 * GIB, memory=5, gpu_memory=6) == Budgets(5, GpuRequest(7, budget=6))
    assert chosen(ON_GPU + 1, experts=8) == Budgets(None, None)
    assert chosen(FREE + 1) == Budgets(AUTOMATIC, None, is_own_choice=True)


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama, "has_gpu", lambda: False)
    assert chosen(FREE, experts=8) == Budgets(None, None)
    assert chosen(FREE + 1, experts=8) == Budgets(AUTOMATIC, None, is_own_choice=True)
    assert chosen(99 * GIB, memory=5) == Budgets(5, None)
    with pytest.raises(EngineError, match="finds no GPU"):
        chosen(GIB, gpu_memory=5)
