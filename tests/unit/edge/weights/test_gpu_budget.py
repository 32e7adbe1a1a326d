"""Test the division of a GPU's memory: which layers are streamed through its two buffers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.llama.llama import ContextSizes
from edge.models.demo import MODEL_PATH
from edge.weights.gpu_layers import GpuLayers
from edge.weights.gpu_parts import fixed_parts, too_little
from partition.model.file import ModelFile
from partition.predict.residency import GpuBudget, share_out
from quant.types import type_by_name

LAYERS = st.lists(st.integers(1, 1000), min_size=3, max_size=40).map(lambda sizes: dict(enumerate(sizes)))
LOG = [
    "llama_kv_cache: size =    4.00 MiB ( 256 cells,   8 layers)",
    "sched_reserve:    Vulkan0 compute buffer size =    2.50 MiB",
    "sched_reserve: Vulkan_Host compute buffer size =    9.00 MiB",
]


@given(LAYERS, st.integers(0, 50_000))
def test_what_stays_and_the_buffers_have_room(layers: dict[int, int], room: int) -> None:
    streamed = share_out(layers, room)
    total, buffers = sum(layers.values()), 2 * max(layers.values())
    if streamed is None:
        assert buffers > room
    elif streamed:
        stays = total - sum(layers[layer] for layer in streamed)
        assert total > room >= stays + buffers
        assert len(set(streamed)) == len(streamed) >= 3
    else:
        assert total <= room


@pytest.mark.parametrize(
    ("room", "streamed"),
    [
        (120, ()),
        (119, (2, 6, 10)),  # 9 stay, beside 2 buffers
        (110, (2, 6, 10)),
        (109, (1, 4, 7, 10)),
        (80, (1, 3, 5, 7, 9, 11)),
        (79, (0, 2, 4, 6, 7, 9, 11)),
        (20, tuple(range(12))),
        (19, None),
    ],
)
def test_as_few_as_fit_evenly_between_the_others(room: int, streamed: tuple[int, ...] | None) -> None:
    assert share_out(dict.fromkeys(range(12), 10), room) == streamed


def test_parts_beside_the_layers() -> None:
    """The head with its norm, and what llama.cpp says of the GPU; the token table stays with the processor."""
    file = ModelFile.open(MODEL_PATH)
    sizes = ContextSizes(256, type_by_name("f16"), batch=64)
    parts = fixed_parts(file, sizes, LOG, "Vulkan0")
    assert parts == {
        "head": 557056 + 1024,
        "KV cache": 4 << 20,
        "compute buffers": 5 << 19,
        "products": (64 << 20) + 16 * 64 * 768,
    }


def test_too_little_names_the_parts_and_what_is_free() -> None:
    shape = ModelFile.open(MODEL_PATH).shape
    error = too_little(shape, {"head": 2 << 20, "two buffers": 5 << 20}, 6 << 20, 4 << 20)
    assert "needs at least 7 MiB of the GPU's memory (head 2, two buffers 5), the budget has 6 and 4 are free" in str(
        error
    )


def test_it_is_in_what_commands_print() -> None:
    budget = GpuBudget(100, {"head": 10, "layers": 50}, (1, 3, 5), 4, (0, 2))
    assert GpuLayers(4, 7, "because", budget).to_json() == {
        "layers": 4,
        "of": 7,
        "why": "because",
        "budget": {
            "budget_bytes": 100,
            "total_bytes": 60,
            "parts": {"head": 10, "layers": 50},
            "streamed_layers": [1, 3, 5],
            "processor_rows": 4,
            "processor_experts": [0, 2],
        },
    }
