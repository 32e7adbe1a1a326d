"""Logits with LoRA adapters are llama.cpp's own: on one device, on ranks, on stages, and on both."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge.llm.continuation import Request
from edge.llm.engine import Engine
from edge.llm.interface import TextEngine
from edge.llm.options import EngineOptions
from edge.llm.scheduler import Scheduler
from edge.models.demo import MODEL_PATH
from edge.parallel.steps import Adapt, Step
from partition.errors import CannotSlice
from quant.errors import ModelFileError
from tests.support.adapters import native_logits, write_adapter
from tests.support.deployments import EXACT, OPTIONS, plan_for, shared_workers, supervised, tensor
from tests.support.deployments import deployed as deployed_on
from tests.support.ranks_here import ranks_here
from tests.support.slices import synthetic
from tests.support.thorough import each_once, some

TENSOR: dict[str, Any] = {"parallel": "tensor", "shares": (1, 1)}
STAGES: dict[str, Any] = {"parallel": "pipeline", "shares": (1, 1)}
HYBRID: dict[str, Any] = {"stages_of": (2, 1), "shares": (1, 1, 1)}
THIN: dict[str, Any] = {"parallel": "tensor", "shares": (0, 1, 1)}
PLACES = {"one": None, "tensor": TENSOR, "stages": STAGES, "hybrid": HYBRID}
# A dense model, biases, a gate of GELU with norms around it, experts, a fused QKV with a fused gate, FFN columns alone.
ARCHITECTURES = some(
    ("llama", "qwen2", "gemma2", "qwen3moe", "phi3", "olmo2"),
    ("llama", "qwen2", "gemma2", "qwen3moe", "phi3", "olmo2", "gpt-oss", "gemma3", "seed_oss", "deepseek2", "llama4"),
)
CLOSE = {"gemma2": 2e-3, "gemma3": 2e-3}  # GELU is a table of 16-bit numbers; of others 32-bit sums in another order
TOKENS = list(range(5, 17))


@contextmanager
def engine_of(model: Path, how: dict[str, Any] | None, folder: Path, options: EngineOptions) -> Iterator[TextEngine]:
    """The model on one device, or on ranks that are threads."""
    if how is None:
        with Engine(model, options) as engine:
            yield engine
    else:
        with ranks_here(model, how, options, folder) as engine:
            yield engine


def logits(engine: TextEngine, scales: tuple[float, ...] | None = None) -> Any:
    """Return those of all tokens, with these adapters."""
    engine.kv_clear()
    return engine.decode(TOKENS, 0, outputs="all", adapters=scales).copy()


@pytest.mark.parametrize(("arch", "place"), each_once(ARCHITECTURES, PLACES))
def test_logits_are_those_of_llama_cpp(arch: str, place: str, tmp_path: Path) -> None:
    """One after the other: as the options say, none, scale 0, another one, both, and the first again."""
    model = synthetic(tmp_path / "model.gguf", arch)
    first = write_adapter(tmp_path / "first.gguf", model, size=0.05)
    second = write_adapter(tmp_path / "second.gguf", model, size=0.05, rank=2, seed=1)
    base = native_logits(model, [], TOKENS)
    cases = {
        None: native_logits(model, [(first, 0.5)], TOKENS),
        (): base,
        (0.0, 0.0): base,
        (0.0, -1.5): native_logits(model, [(second, -1.5)], TOKENS),
        (0.5, 0.25): native_logits(model, [(first, 0.5), (second, 0.25)], TOKENS),
        (0.5, 0.0): native_logits(model, [(first, 0.5)], TOKENS),
    }
    assert np.abs(cases[None] - base).max() > 0.05
    options = replace(EXACT, repack=False, lora=(f"{first}:0.5", f"{second}:0"))
    with engine_of(model, PLACES[place], tmp_path, options) as engine:
        for scales, expected in cases.items():
            provided = logits(engine, scales)
            if place == "one":
                assert np.array_equal(provided, expected), scales
            else:
                np.testing.assert_allclose(provided, expected, atol=CLOSE.get(arch, 2e-5), rtol=0, err_msg=str(scales))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("type_name", ["f16", "bf16", "q8_0"])
def test_of_every_type(type_name: str, place: str, tmp_path: Path) -> None:
    model = synthetic(tmp_path / "model.gguf", "llama", ff=128)
    adapter = write_adapter(tmp_path / "adapter.gguf", model, rank=32, size=0.02, type_name=type_name)
    expected = native_logits(model, [(adapter, 1.0)], TOKENS)
    with engine_of(model, PLACES[place], tmp_path, replace(EXACT, repack=False, lora=(str(adapter),))) as engine:
        # Sums of 16-bit products follow the order of columns, and so does the scale of a block of 8-bit inputs.
        np.testing.assert_allclose(logits(engine), expected, atol=0 if place == "one" else 2e-2, rtol=0)


@pytest.mark.parametrize("how", [TENSOR, THIN])
def test_of_the_head_alone(how: dict[str, Any], tmp_path: Path) -> None:
    """Where a slice has it as a matrix of its own, its rows are cut, and all else is left alone."""
    model = synthetic(tmp_path / "model.gguf", "gpt-oss")
    adapter = write_adapter(tmp_path / "adapter.gguf", model, ["output.weight"])
    expected = native_logits(model, [(adapter, 1.0)], TOKENS)
    with engine_of(model, how, tmp_path, replace(EXACT, repack=False, lora=(str(adapter),))) as engine:
        # Sums of 32-bit floats, whose order the processor's kernels choose.
        np.testing.assert_allclose(logits(engine), expected, atol=1e-5 * np.abs(expected).max(), rtol=0)


def test_of_the_token_table(tmp_path: Path) -> None:
    model = synthetic(tmp_path / "model.gguf", "llama")
    adapter = write_adapter(tmp_path / "adapter.gguf", model, ["token_embd.weight"])
    with Engine(model, replace(EXACT, repack=False, lora=(str(adapter),))) as engine:
        assert np.array_equal(logits(engine), native_logits(model, [(adapter, 1.0)], TOKENS))
    with (
        pytest.raises(CannotSlice, match=r"'token_embd.weight', which it cannot on several devices: rows of the token"),
        ranks_here(model, STAGES, replace(EXACT, lora=(str(adapter),)), tmp_path),
    ):
        pass


def test_the_token_table_of_a_tied_model_is_refused(tmp_path: Path) -> None:
    """llama.cpp would end the process."""
    model = synthetic(tmp_path / "model.gguf", "gemma")
    adapter = write_adapter(tmp_path / "adapter.gguf", model, ["token_embd.weight"])
    with pytest.raises(ModelFileError, match=r"which is the output matrix of model\.gguf, too"):
        Engine(model, replace(EXACT, lora=(str(adapter),)))


def test_a_head_that_slices_have_as_their_token_table_is_refused(tmp_path: Path) -> None:
    model = synthetic(tmp_path / "model.gguf", "llama")
    adapter = write_adapter(tmp_path / "adapter.gguf", model, ["output.weight"])
    with (
        pytest.raises(CannotSlice, match="slices have the output matrix of llama models as their token table"),
        ranks_here(model, TENSOR, replace(EXACT, lora=(str(adapter),)), tmp_path),
    ):
        pass


def test_ranks_hear_of_a_change_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from edge.parallel import steps

    model = synthetic(tmp_path / "model.gguf", "llama")
    adapter = write_adapter(tmp_path / "adapter.gguf", model)
    sent: list[type[Step]] = []
    pack = steps.pack
    monkeypatch.setattr(steps, "pack", lambda step, rows: (sent.append(type(step)), pack(step, rows))[1])
    with ranks_here(model, TENSOR, replace(EXACT, lora=(f"{adapter}:0",)), tmp_path) as engine:
        for scales in ((), (0.0,), None, (1.0,), (1.0,), (0.5,), ()):
            logits(engine, scales)
    assert sent.count(Adapt) == 3


@pytest.mark.parametrize("lies", ["shape", "architecture"])
def test_a_worker_checks_a_slice_again(lies: str, tmp_path: Path) -> None:
    """Whatever the owner says, llama.cpp sees no adapter that does not fit."""
    from edge.worker.limits import ResourceLimits
    from edge.worker.load import load
    from partition.slices.gguf_slice import limits
    from quant.gguf.file import GgufFile
    from tests.support.slices import ranges, whole, write
    from transport import edge_pb2 as pb

    model = synthetic(tmp_path / "model.gguf", "llama")
    n_layers = limits(GgufFile.open(model)).sizes.layers
    last = write(model, whole(GgufFile.open(model), ranges(3, n_layers - 3)[1]), tmp_path / "slice.gguf")
    shapes = {"blk.1.attn_q.weight.lora_a": (64, 4)} if lies == "shape" else {}
    values = {"general.architecture": ("str", "qwen2")} if lies == "architecture" else {}
    adapter = write_adapter(tmp_path / "adapter.gguf", last, shapes=shapes, values=values)
    request = pb.Load(path=str(last), stages=[1, 1], adapter_paths=[str(adapter)], options=pb.EngineOptions(context=64))
    with pytest.raises(ModelFileError, match=r"adapter.gguf: (it is an adapter of|'blk.1.attn_q.weight' is)"):
        load(request, 1, ResourceLimits(1), lambda fraction: None)


def test_workers_get_their_part(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    """Over real workers: sent once, and kept by its hash."""
    model = synthetic(tmp_path / "model.gguf", "llama")
    adapter = write_adapter(tmp_path / "adapter.gguf", model, size=0.05)
    options = replace(EXACT, repack=False, lora=(f"{adapter}:0.5",))
    expected = native_logits(model, [(adapter, 0.5)], TOKENS)
    with shared_workers(tmp_path_factory, "one") as workers:
        for _ in range(2):
            with deployed_on(workers, model, tensor(1, 1), options) as deployment:
                np.testing.assert_allclose(logits(deployment.engine), expected, atol=2e-5, rtol=0)


def test_a_deployed_model_has_them_on_its_devices(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    """As commands and programs have one, with an engine that others can take over from."""
    adapter = write_adapter(tmp_path / "adapter.gguf", MODEL_PATH, size=0.2)
    options = replace(OPTIONS, sequences=2, lora=(f"{adapter}:0",))
    requests = [Request(TOKENS, 8, ends=False, adapters=scales) for scales in ((1.0,), (), (0.5,))]
    with Engine(MODEL_PATH, options) as single:
        expected = Scheduler(single).run(requests)
    assert len(set(map(tuple, expected))) == 3
    with (
        shared_workers(tmp_path_factory, "one") as workers,
        supervised(workers, plan_for(MODEL_PATH, workers, STAGES), options) as model,
    ):
        assert Scheduler(model.engine).run(requests) == expected
