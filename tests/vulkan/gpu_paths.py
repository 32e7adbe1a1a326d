"""Every way a GPU is used, on one that is there.

Not collected by itself: run.sh beside it runs it with a llama.cpp that has Vulkan. Where that finds no GPU, tests fail.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edge.cluster.fleet import Fleet
from edge.errors import NotEnoughMemory
from edge.llama import ggml, llama
from edge.llama.llama import ContextSizes
from edge.llm.engine import Engine
from edge.llm.interface import TextEngine
from edge.llm.options import EngineOptions
from edge.microbenchmark import BestTime
from edge.models.demo import MODEL_PATH
from edge.profiling.machine import gpu_backends
from edge.quantization.gguf import quantize
from edge.weights import gpu_layers
from partition.model.file import ModelFile
from partition.plan.plan import Range
from partition.predict.residency import SPARE_BYTES
from quant.mixes import mix_by_name
from quant.types import cache_type
from tests.support.deployments import deployed, pipeline, questions, tensor
from tests.support.helpers import run_edge
from tests.support.slices import synthetic
from tests.support.workers import Worker, worker

STEPS = 6
SIZES = ContextSizes(128, cache_type("f16"), batch=32)  # of the engines
ON_CPU = EngineOptions(threads=1, context=128, batch=32, gpu_layers=0)
ALL = 99
ON_GPU = replace(ON_CPU, gpu_layers=ALL)
AUTO = replace(ON_CPU, gpu_layers=None)


def greedy(engine: TextEngine) -> list[int]:
    """The first tokens of the answer to a question that the model was trained for. Other prompts lead to near-ties,
    which each processor decides in its way."""
    tokens = list(questions(1)[0].prompt)
    results: list[int] = []
    position = 0
    for _ in range(STEPS):
        row = engine.decode(tokens, position)
        position += len(tokens)
        tokens = [int(row.argmax())]
        results += tokens
    return results


@pytest.fixture(scope="module")
def expected() -> list[int]:
    """Return the processor's answer."""
    with Engine(MODEL_PATH, ON_CPU) as engine:
        return greedy(engine)


def test_the_probe_names_it(tmp_path: Path) -> None:
    assert llama.has_gpu()
    name = ggml.device_name(ggml.gpu_devices()[0])  # "Vulkan0", "CUDA0"
    assert f"{name} (" in str(gpu_backends())
    probed = run_edge("devices", "probe", "--folder", tmp_path)
    assert probed.returncode == 0, probed.stderr
    assert name in probed.stdout


@pytest.mark.parametrize("layers", [ALL, 2])
def test_a_whole_model_and_some_of_its_layers(expected: list[int], layers: int) -> None:
    with llama.captured_log() as lines, Engine(MODEL_PATH, replace(ON_CPU, gpu_layers=layers)) as engine:
        assert greedy(engine) == expected
    assert any("offloaded" in line and "/" in line and "offloaded 0/" not in line for line in lines), lines


def test_a_state_is_saved_and_restored(expected: list[int]) -> None:
    with Engine(MODEL_PATH, ON_GPU) as engine:
        assert greedy(engine) == expected
        current = engine.kv_last(0) + 1
        block = engine.states.read(0, Range(0, current))
        target = engine.decode(expected[-1:], current).copy()
        engine.kv_clear()
        engine.states.write(0, block)
        assert (engine.decode(expected[-1:], current) == target).all()
    with Engine(MODEL_PATH, ON_CPU) as engine:  # and moved to the processor
        engine.states.write(0, block)
        assert int(engine.decode(expected[-1:], current).argmax()) == int(target.argmax())


@pytest.mark.parametrize("local", [ALL, 0], ids=["both", "worker"])
@pytest.mark.parametrize("how", [tensor(1, 1), pipeline(1, 1)], ids=str)
def test_a_rank_and_a_stage(one_worker: Worker, expected: list[int], how: dict[str, Any], local: int) -> None:
    """On the GPU on both sides, or on the worker's alone."""
    on = replace(ON_GPU, gpu_layers=local)
    with deployed(one_worker, MODEL_PATH, how, on, workers_gpu_layers=ALL) as deployment:
        assert greedy(deployment.engine) == expected


def said(engine: TextEngine) -> tuple[int, int, str]:
    """Return what the engine has on the GPU, and why."""
    assert engine.gpu_layers is not None
    return engine.gpu_layers.layers, engine.gpu_layers.total, engine.gpu_layers.why


def test_measured_to_be_slower_it_is_left_alone(expected: list[int]) -> None:
    """This GPU is software: the processor is many times as fast."""
    with Engine(MODEL_PATH, AUTO) as engine:
        layers, total, why = said(engine)
        assert (layers, total) == (0, 9)
        assert "times as fast as with 9, measured" in why
        assert greedy(engine) == expected


def test_ranks_measure_each_for_itself(one_worker: Worker, expected: list[int]) -> None:
    with deployed(one_worker, MODEL_PATH, pipeline(1, 1), AUTO) as deployment:
        layers, total, _ = said(deployment.engine)
        assert (layers, total) == (0, 5)
        assert greedy(deployment.engine) == expected


@pytest.mark.parametrize("how", [tensor(1, 1), pipeline(1, 1)], ids=str)
def test_each_rank_divides_its_part_over_its_own_memory_and_gpu(
    tmp_path: Path, expected: list[int], how: dict[str, Any]
) -> None:
    """With a limit of memory on both sides, nothing else is said about the GPU."""
    with worker(tmp_path, "--memory", "1GiB", "--threads", "1") as limited:
        with Fleet([limited.address]) as fleet:
            assert fleet.profiles[limited.address].gpu_free_bytes
        with deployed(limited, MODEL_PATH, how, replace(AUTO, memory=1 << 30)) as deployment:
            layers, total, why = said(deployment.engine)
            assert layers == total
            assert "within" in why
            assert greedy(deployment.engine) == expected
            assert deployment.memory_bytes[limited.address] <= 1 << 30


def test_as_many_as_have_room_where_it_is_fast(expected: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU of this speed, and of little memory, beside a processor that is slower."""
    baseline = gpu_layers._context_buffers(MODEL_PATH, SIZES) + SPARE_BYTES
    sizes = gpu_layers.layer_sizes(ModelFile.open(MODEL_PATH).shape, SIZES)
    monkeypatch.setattr(ggml, "gpu_free_bytes", lambda *_: baseline + sum(sizes[:4]))
    monkeypatch.setattr(gpu_layers, "_time_token", lambda *provided: BestTime(1.0 if provided[-1] else 2.0, True))
    with llama.captured_log() as lines, Engine(MODEL_PATH, AUTO) as engine:
        layers, _, why = said(engine)
        assert (layers, why.partition(":")[0]) == (4, "4 fit")
        assert greedy(engine) == expected
    assert any("offloaded 4/9" in line for line in lines), lines


def test_the_driver_tells_how_much_is_free() -> None:
    free = ggml.gpu_free_bytes()
    assert free is not None
    assert 256 << 20 < free < 1 << 46


def test_it_is_said_beside_the_threads(tmp_path: Path) -> None:
    """Measured once, and remembered where the moment was quiet; either way it is told."""
    done = run_edge("chat", "-p", "hi", "--max-tokens", "1", "--json", env={"XDG_STATE_HOME": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["gpu_layers"]["of"] == 9
    done = run_edge("chat", "-p", "hi", "--max-tokens", "1", "--json", "--gpu-layers", "3")
    assert json.loads(done.stdout)["gpu_layers"] == {"layers": 3, "of": 9, "why": "as asked for"}


@pytest.mark.parametrize("layers", [None, 0])
def test_a_budget_alone_uses_the_gpu_unless_it_is_left_out(expected: list[int], layers: int | None) -> None:
    with Engine(MODEL_PATH, replace(AUTO, memory=1 << 30, gpu_layers=layers)) as engine:
        assert (engine.gpu_layers is not None) == (layers is None)
        assert greedy(engine) == expected


def run_streamed(path: Path, budget: int, env: Mapping[str, str], *memory: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(Path(__file__).with_name("streamed.py")), str(path), str(budget), *memory]
    return subprocess.run(command, env=os.environ | env, capture_output=True, text=True, timeout=300, check=False)


def streamed(path: Path, budget: int, **env: str) -> dict[str, Any]:
    """Return what streamed.py says, in a process of its own."""
    done = run_streamed(path, budget, env)
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def least(path: Path) -> int:
    """Return about the least bytes of a GPU's memory that a model needs in a new process. What the driver takes is
    known only when the model is loaded."""
    budget = 1
    while needs := re.findall(r"needs at least ([\d,]+) MiB", run_streamed(path, budget, {}).stderr):
        budget = max(budget, int(needs[0].replace(",", "")) << 20) + (1 << 20)
    return budget


@pytest.fixture(scope="module")
def larger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 8 layers with 13 MiB each."""
    path = tmp_path_factory.mktemp("larger") / "larger.gguf"
    return synthetic(path, "llama", "q8_0", layers=8, embd=1024, ff=2816, heads=16, kv=8, vocab=2048)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose layers differ in their types, and whose last rows CUDA's kernels read beyond: up to a multiple of
    512 values. They must not see there what an earlier layer had."""
    folder = tmp_path_factory.mktemp("mixed")
    whole = synthetic(folder / "f16.gguf", "llama", "f16", layers=12, embd=768, ff=2304, heads=12, kv=4, vocab=2048)
    quantize(ModelFile.open(whole), folder / "mixed.gguf", mix_by_name("q4_k_m"))
    return folder / "mixed.gguf"


@pytest.mark.parametrize("model", ["larger", "mixed"])
def test_streamed_layers_compute_the_bits_of_resident_ones(model: str, request: pytest.FixtureRequest) -> None:
    """The driver does not tell what is used, or is believed."""
    path: Path = request.getfixturevalue(model)
    resident, result = streamed(path, 0), streamed(path, least(path))
    assert len(result["budget"]["streamed_layers"]) >= 3
    assert result["digest"] == resident["digest"]


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 6 layers with 32 experts of 1.5 MiB each. In F32, the processor and the GPU choose the same ones."""
    path = tmp_path_factory.mktemp("experts") / "experts.gguf"
    figures = {"experts": 32, "experts_used": 4, "expert_ff": 256, "head_size": 64}
    return synthetic(path, "qwen3moe", "f32", layers=6, embd=512, ff=512, heads=8, kv=2, vocab=2048, **figures)


def logits(path: Path, options: EngineOptions) -> tuple[NDArray[np.float32], Engine]:
    """Return the logits of a prompt and of some tokens, and the engine, which is closed."""
    with Engine(path, options) as engine:
        rows = [engine.decode(list(range(264, 284)), 0).copy()]
        rows += [engine.decode([300 + i], 20 + i).copy() for i in range(STEPS)]
        return np.stack(rows), engine


@pytest.mark.parametrize("model", ["larger", "experts"])
@pytest.mark.parametrize(
    "on_gpu",
    [
        {"gpu_layers": 1},
        {"gpu_layers": 4},
        {"gpu_layers": ALL},
        {"gpu_memory": 0.4},
        {"gpu_memory": 0.7},
        {"gpu_memory": 1.0},
    ],
    ids=str,
)
def test_weights_on_the_gpu_in_memory_and_on_disk(
    model: str, on_gpu: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    """Each placement with all other weights in memory, and with as many on disk as possible."""
    path: Path = request.getfixturevalue(model)
    expected, _ = logits(path, ON_CPU)
    if "gpu_memory" in on_gpu:
        with Engine(path, replace(AUTO, memory=1 << 33, gpu_memory=1 << 33)) as engine:
            assert engine.gpu_layers is not None
            assert engine.gpu_layers.budget is not None
            parts = engine.gpu_layers.budget.parts
        weights = parts["layers"]
        on_gpu = {"gpu_memory": sum(parts.values()) - weights + round(on_gpu["gpu_memory"] * weights)}
    options = replace(AUTO, **on_gpu)
    for memory in (1 << 33, 1 << 20):
        try:
            result, engine = logits(path, replace(options, memory=memory))
        except NotEnoughMemory as error:
            memory = (error.least or 0) + (48 << 20)  # the driver of this GPU takes memory of the process
            result, engine = logits(path, replace(options, memory=memory))
        difference = np.abs(result - expected) / expected.std()  # the processor rounds to 8 bits, the GPU does not
        assert difference.max() < 0.15
        assert (difference**2).mean() < 0.04**2
        assert engine.gpu_layers is not None
        print(model, on_gpu, memory >> 20, engine.gpu_layers.describe(), engine.paging and engine.paging.plan.pages)


def test_few_rows_of_streamed_layers_are_computed_by_the_processor(larger: Path) -> None:
    """Tokens are those of the processor, or of the GPU: in turns, as prompts and answers follow each other."""
    with Engine(larger, replace(ON_CPU, gpu_layers=None, gpu_memory=least(larger))) as engine:
        stream, node_hooks = engine._loaded.stream, engine._loaded.hooks
        assert stream is not None
        assert node_hooks is not None
        assert stream.is_locked
        rows = {}
        for most in (0, 16, 0):
            stream.processor_rows = most
            node_hooks.use(stream.hooks())
            for _ in range(2):
                engine.kv_clear()
                answer = [engine.decode(list(range(264, 284)), 0).copy()]
                answer += [engine.decode([300 + i], 20 + i).copy() for i in range(STEPS)]
                rows.setdefault(most, np.stack(answer))
                assert (rows[most] == np.stack(answer)).all()
        difference = np.abs(rows[16] - rows[0]) / rows[0].std()  # rounded to 8 bits by the one, not by the other
        assert difference.max() < 0.1
        assert (difference**2).mean() < 0.03**2


def test_the_budget_is_never_passed(larger: Path, tmp_path: Path) -> None:
    """Ten runs with a GPU that has memory of its own: its peak, as Vulkan allocates."""
    peak, counts = tmp_path / "peak", set()
    resident = streamed(larger, 0, LD_PRELOAD=os.environ["EDGE_VK_DISCRETE"], EDGE_VK_PEAK=str(peak))
    for budget in range(100 << 20, 150 << 20, 5 << 20):
        result = streamed(larger, budget, LD_PRELOAD=os.environ["EDGE_VK_DISCRETE"], EDGE_VK_PEAK=str(peak))
        print(f"budget {budget}, account {result['budget']['total_bytes']}, peak {peak.read_text()}")
        assert int(peak.read_text()) <= result["budget"]["total_bytes"] <= budget
        assert result["digest"] == resident["digest"]
        counts.add(len(result["budget"]["streamed_layers"]))
    assert min(counts) == 0
    assert max(counts) >= 4


def test_the_budget_beside_one_of_memory_is_never_passed(experts: Path, tmp_path: Path) -> None:
    """Ten runs with a GPU that has memory of its own."""
    peak = tmp_path / "peak"
    env = {"LD_PRELOAD": os.environ["EDGE_VK_DISCRETE"], "EDGE_VK_PEAK": str(peak)}
    placements = set()
    for budget in range(110 << 20, 460 << 20, 35 << 20):
        done = run_streamed(experts, budget, env, str(1 << 31))
        assert done.returncode == 0, done.stderr
        result = json.loads(done.stdout)
        print(f"budget {budget}, account {result['budget']['total_bytes']}, peak {peak.read_text()}", result["why"])
        assert int(peak.read_text()) <= budget
        placements.add((result["layers"], len(result["budget"]["processor_experts"])))
    assert len(placements) >= 3


def test_the_budget_is_an_option(tmp_path: Path) -> None:
    done = run_edge("chat", "-p", "hi", "--max-tokens", "1", "--json", "--gpu-memory", "128MiB", "--context", "128")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["gpu_layers"]["budget"]["budget_bytes"] == 128 << 20
    done = run_edge("chat", "-p", "hi", "--gpu-memory", "1MiB")
    assert done.returncode == 4, done.stderr
    assert "of the GPU's memory" in done.stderr
