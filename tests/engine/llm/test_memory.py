"""Test memory accounting: the predicted need equals what llama.cpp really takes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import llama_cpp
import pytest

from edge.errors import NotEnoughMemory
from edge.llama import llama
from edge.llama.llama import ContextSizes
from edge.llm.engine import Engine
from edge.weights import memory
from partition.model.model import ModelShape
from quant.gguf.file import GgufFile
from quant.types import cache_type
from tests.conftest import OPTIONS, Synthetic

MIB = 1 << 20


@pytest.mark.parametrize("kv_type", ["f16", "q8_0", "q8_0/q4_0"])
@pytest.mark.parametrize("context", [256, 4096])
def test_the_kv_cache_is_what_the_formula_says(synthetic: Synthetic, context: int, kv_type: str) -> None:
    path = synthetic("llama")
    kv = cache_type(kv_type)
    need = memory.need(path, ContextSizes(context=context, kv=kv))
    shape = ModelShape.from_gguf(GgufFile.open(path))
    assert need.parts["KV cache"] == pytest.approx(shape.kv_bytes(context, kv.keys, kv.values), abs=0.01 * MIB)
    assert need.parts["weights"] == shape.weight_bytes
    assert need.total == sum(need.parts.values())


@pytest.mark.parametrize("arch", ["llama", "gemma3", "qwen3moe"])
def test_the_dry_run_says_what_the_real_run_takes(synthetic: Synthetic, arch: str) -> None:
    path = synthetic(arch)
    need = memory.need(path, ContextSizes(context=512, batch=32, kv=cache_type("f16")))
    with llama.captured_log() as lines:
        Engine(path, replace(OPTIONS, context=512)).close()
    real = sum(float(result[2]) for line in lines if (result := memory._COMPUTE.search(line))) * MIB
    assert real > 0
    assert need.parts["compute buffers"] == pytest.approx(real, abs=0.02 * MIB)


@llama_cpp.llama_log_callback
def ignore(level: int, text: bytes, user: object) -> None:
    pass


def test_the_log_is_heard_even_after_others_took_it(synthetic: Synthetic) -> None:
    path, sizes = synthetic("llama"), ContextSizes(context=512, batch=32, kv=cache_type("f16"))
    before = memory.need(path, sizes)
    llama_cpp.llama_log_set(ignore, None)
    after = memory.need(path, sizes)
    assert {**after.parts, "runtime": 0} == {**before.parts, "runtime": 0}
    assert after.parts["KV cache"] > 0


def test_a_larger_context_and_batch_need_more(synthetic: Synthetic) -> None:
    path = synthetic("llama")
    small = memory.need(path, ContextSizes(context=256, batch=32, kv=cache_type("f16")))
    assert (
        memory.need(path, ContextSizes(context=512, batch=32, kv=cache_type("f16"))).parts["KV cache"]
        > small.parts["KV cache"]
    )
    assert memory.need(path, ContextSizes(context=256, batch=256, kv=cache_type("f16"))).allocated > small.allocated


def test_a_context_longer_than_memory_is_refused_with_need_have_and_a_way_out(
    synthetic: Synthetic, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: 40 * MIB)
    path = synthetic("llama")
    with pytest.raises(
        NotEnoughMemory, match=r"needs [\d,]+ MiB .* 40 MiB are available; use --context (\d+)"
    ) as caught:
        Engine(path, replace(OPTIONS, context=100_000))
    suggested = int(str(caught.value).split("--context ")[1].split(",")[0])
    with Engine(path, replace(OPTIONS, context=suggested)) as engine:
        assert engine.memory.allocated <= 40 * MIB


@pytest.mark.parametrize(
    "options",
    [{"batch": 8192, "context": 8192}, {"context": 16384}, {"flash_attention": "off", "context": 16384}],
    ids=str,
)
def test_large_buffers_are_measured_and_not_guessed(
    synthetic: Synthetic, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    path = synthetic("llama")
    monkeypatch.setattr(memory, "available_memory", lambda: 8 << 30)
    with Engine(path, replace(OPTIONS, **options)) as engine:
        kv = cache_type("f16")
        exact = memory.need(path, ContextSizes(kv=kv, **({"batch": OPTIONS.batch} | options)))
        assert engine.memory.parts["compute buffers"] == exact.parts["compute buffers"]


def test_weights_that_do_not_fit_stay_mapped(synthetic: Synthetic, monkeypatch: pytest.MonkeyPatch) -> None:
    path: Path = synthetic("llama", "q4_0")

    def repacked() -> bool:
        with llama.captured_log() as lines, Engine(path, OPTIONS) as engine:
            assert engine.memory.fits == any("CPU_REPACK model buffer" in line for line in lines)
            return engine.memory.fits

    assert repacked()
    need = memory.need(path, ContextSizes(context=OPTIONS.context or 0, batch=OPTIONS.batch, kv=cache_type("f16")))
    monkeypatch.setattr(memory, "available_memory", lambda: need.allocated + need.parts["weights"] // 2)
    assert not repacked()
