"""Test messages between owner and worker: they arrive unchanged, and invalid fields are refused by name."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from devices.profile import DeviceProfile, describe
from edge.errors import EdgeError, EngineError
from edge.llm import options as limits
from edge.llm.options import EngineOptions
from edge.onnx.wire import MOST_DIMS, MOST_STAGES, MOST_TENSOR_BYTES, Boundary, Tensor
from edge.worker.messages import (
    boundaries_from,
    options_from,
    options_message,
    profile_from,
    profile_message,
    stage_message,
)
from partition.plan.onnx_plan import OnnxStage
from partition.plan.plan import Range
from quant.types import KV_TYPES
from transport import edge_pb2 as pb


def most(n: int) -> st.SearchStrategy[int | None]:
    return st.none() | st.integers(1, n)


BUDGET = {
    "memory": st.integers(1, limits.MAX_BYTES),
    "window": most(limits.MAX_BYTES),
    "io_threads": most(limits.MAX_IO_THREADS),
    "io_chunk": most(limits.MAX_IO_CHUNK),
    "verify": st.booleans(),
}
ANY_OPTIONS = st.fixed_dictionaries(
    {
        "batch": st.integers(limits.MAX_SEQUENCES, limits.MAX_CONTEXT),
        "outputs": st.just(limits.MAX_SEQUENCES) | st.none(),
        "sequences": st.integers(1, limits.MAX_SEQUENCES),
        "context": most(limits.MAX_CONTEXT),
        "threads": most(limits.MAX_THREADS),
        "repack": st.none() | st.booleans(),
        "flash_attention": st.sampled_from(["auto", "on", "off"]),
        "kv_type": st.sampled_from(sorted(KV_TYPES)),
        "reserved": st.integers(0, limits.MAX_BYTES),
    }
).flatmap(
    lambda values: (
        st.fixed_dictionaries(BUDGET) | st.fixed_dictionaries({"gpu_layers": st.integers(0, limits.MAX_GPU_LAYERS)})
    ).map(lambda more: EngineOptions(**values, **more))
)
SHAPES = st.lists(st.integers(1, 9), max_size=4).map(tuple)
TENSORS = SHAPES.flatmap(
    lambda shape: st.builds(
        Tensor,
        st.text(max_size=9),
        st.sampled_from(["float32", "int64", "bool"]),
        st.just(shape),
        st.sets(st.integers(0, len(shape) - 1)).map(lambda open_: tuple(sorted(open_))) if shape else st.just(()),
    )
)
BOUNDARIES = st.builds(Boundary, st.lists(TENSORS, max_size=3).map(tuple), st.booleans(), st.integers(0, MOST_STAGES))


def sent(message: Any) -> Any:
    """As it arrives."""
    return type(message).FromString(message.SerializeToString())


@pytest.mark.parametrize(("message", "values"), [(pb.EngineOptions, EngineOptions), (pb.DeviceProfile, DeviceProfile)])
def test_a_message_has_a_field_for_each_value_and_no_other(message: Any, values: Any) -> None:
    # Of each device, or the owner.
    own = {"prefixes", "most_gpu_layers", "gpu_memory", "least_memory", "prefer"}
    own |= {"draft_rows", "draft_bytes", "lora", "attention_window"}
    crosses = [field.name for field in dataclasses.fields(values) if field.name not in own]
    assert [field.name for field in message.DESCRIPTOR.fields] == crosses
    assert all(field.has_presence for field in message.DESCRIPTOR.fields)  # 0 is not the same as not said


@given(ANY_OPTIONS)
def test_every_option_comes_back(options: EngineOptions) -> None:
    assert options_from(sent(options_message(options))) == options


def test_options_that_are_absent_are_the_defaults() -> None:
    assert options_from(pb.EngineOptions()) == EngineOptions()
    assert options_from(pb.Load().options) == EngineOptions()


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *((name, 0) for name in ("context", "batch", "sequences", "outputs", "threads", "memory", "io_threads")),
        *(
            (field.name, value)
            for field in pb.EngineOptions.DESCRIPTOR.fields
            if field.cpp_type == field.CPPTYPE_INT64
            for value in (-1, -(1 << 63), (1 << 63) - 1)
        ),
        ("flash_attention", "maybe"),
        ("flash_attention", "x\n" * 1000),
    ],
)
def test_an_option_out_of_its_range_is_named(option: str, value: Any) -> None:
    with pytest.raises(EngineError, match=rf"^{option} must be ") as refused:
        options_from(sent(pb.EngineOptions(**{option: value})))
    assert len(str(refused.value)) < 300
    assert str(refused.value).isprintable()


def test_options_that_exclude_each_other() -> None:
    with pytest.raises(EngineError, match="need a memory budget"):
        options_from(pb.EngineOptions(window=1 << 20))
    with pytest.raises(EngineError, match=r"^least_memory.* need a memory budget"):
        EngineOptions(least_memory=1 << 30)
    with pytest.raises(EngineError, match="least_memory must be from 1 to 1000, got 1001"):
        EngineOptions(memory=1000, least_memory=1001)
    with pytest.raises(EngineError, match="4 sequences need at least as many batch rows"):
        options_from(pb.EngineOptions(sequences=4, batch=2))


@given(BOUNDARIES, BOUNDARIES, most(64), st.none() | st.text(min_size=1, max_size=9))
def test_a_stage_comes_back(takes: Boundary, gives: Boundary, threads: int | None, provider: str | None) -> None:
    stage = OnnxStage("b", Range(0, 1), threads=threads, provider=provider)
    message = sent(stage_message(stage, takes, gives))
    assert boundaries_from(message) == (takes, gives)
    assert (message.threads, message.HasField("provider"), message.provider) == (
        threads or 0,
        provider is not None,
        provider or "",
    )


@pytest.mark.parametrize(
    ("boundary", "words"),
    [
        ({"passed": MOST_STAGES + 1}, r"gives.passed: 65 stages"),
        (
            {"tensors": [{"name": "a", "type": "float32", "shape": [-1]}]},
            r"gives.tensors\[0\]: tensor 'a' has the shape",
        ),
        ({"tensors": [{}]}, r"gives.tensors\[0\]: tensor '' is of type "),
        ({"tensors": [{"type": "O", "shape": [1]}]}, r"gives.tensors\[0\]: .* type 'O'"),
        ({"tensors": [{"type": "O\n" * 1000, "shape": [1]}]}, r"gives.tensors\[0\]: "),
        ({"tensors": [{"name": "n" * 9000, "type": "bool", "shape": [-1]}]}, r"gives.tensors\[0\]: tensor 'nnn"),
        ({"tensors": [{"type": "bool", "shape": [2], "open": [1]}]}, r"gives.tensors\[0\]: .* the shape \[2\]"),
        ({"tensors": [{"type": "bool", "shape": [MOST_TENSOR_BYTES + 1]}]}, "bytes, at most 1,073,741,824 can be sent"),
        ({"tensors": [{"type": "bool", "shape": [(1 << 63) - 1] * MOST_DIMS}]}, r"tensors\[0\]: tensor '' has 7,524,"),
        ({"tensors": [{"type": "bool", "shape": [1] * 100_000}]}, "100000 dimensions, at most 32 are possible"),
    ],
)
def test_a_stage_that_cannot_be_is_refused_by_field(boundary: dict[str, Any], words: str) -> None:
    with pytest.raises(
        EdgeError, match=rf"the description of this stage is invalid: .*{words}.*; update both devices"
    ) as refused:
        boundaries_from(sent(pb.Stage(gives=boundary)))
    assert len(str(refused.value)) < 500
    assert str(refused.value).isprintable()


@pytest.mark.parametrize("gpu", [None, "GPU 0"])
def test_a_profile_comes_back(gpu: str | None) -> None:
    profile = describe("kitchen", threads=3, memory_limit_bytes=1 << 40, gpu=gpu, runtime="1", llama_cpp="2")
    assert profile_from(sent(profile_message(profile))) == profile


@pytest.mark.parametrize(
    ("field", "value"),
    [("name", "\x1b[2J"), ("cpu", "x" * 201), ("threads", -1), ("cpu_quota", float("nan")), ("battery_percent", 1e300)],
)
def test_a_profile_that_cannot_be_is_refused_by_field(field: str, value: Any) -> None:
    message = profile_message(describe("kitchen"))
    setattr(message, field, value)
    with pytest.raises(ValueError, match=f"device profile: {field} needs"):
        profile_from(sent(message))
    message.ClearField("name")
    with pytest.raises(ValueError, match="device profile: name needs"):
        profile_from(message)


@pytest.mark.parametrize("message", [pb.EngineOptions(context=5), pb.DeviceProfile(name="a"), pb.Stage(threads=1)])
def test_fields_of_newer_versions_are_ignored(message: Any) -> None:
    newer = type(message).FromString(message.SerializeToString() + b"\xfa\x07\x03new")  # field 127, a text
    assert [field.name for field, _ in newer.ListFields()] == [field.name for field, _ in message.ListFields()]
    if isinstance(newer, pb.EngineOptions):
        assert options_from(newer) == EngineOptions(context=5)
