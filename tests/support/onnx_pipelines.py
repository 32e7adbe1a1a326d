"""Small ONNX models with every kind of value at a cut, and pipelines of them in one process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, TensorProto, helper

from edge.onnx import file as onnx_file
from edge.onnx import stage as onnx_stage
from edge.onnx.model import CutStage, OnnxSource
from edge.onnx.pipeline import Pipeline, PipelineEnds
from edge.onnx.samples import Array
from edge.onnx.stage import LoadedStage, Opener, open_here
from partition.plan.onnx_cuts import Cut, cuts
from partition.plan.onnx_plan import OnnxPlan
from partition.plan.plan import LOCAL
from tests.support import memory_link
from tests.support.links import start
from tests.support.onnx_files import saved
from tests.support.onnx_graphs import TOLERANCES, difference, runs
from tests.support.onnx_networks import model_of
from transport.link import Deadlines, Link

QUICK = Deadlines(step_timeout_s=10.0, send_timeout_s=10.0)
FIRST = 1  # the rank of the first worker

Feeds = dict[str, Array]


def mixed() -> ModelProto:
    """Four inputs and six outputs, made in different places, of several types; the batch is open, two are scalars."""
    nodes = [
        helper.make_node("MatMul", ["x", "w0"], ["h"], "matmul0"),
        helper.make_node("Relu", ["h"], ["early"], "relu"),
        helper.make_node("Cast", ["early"], ["half"], "cast_half", to=TensorProto.FLOAT16),
        helper.make_node("Gather", ["table", "ids"], ["rows"], "gather"),
        helper.make_node("ReduceMean", ["rows"], ["mean"], "reducemean", axes=[1], keepdims=0),
        helper.make_node("Add", ["mean", "early"], ["a"], "add0"),
        helper.make_node("Mul", ["a", "scale"], ["b"], "mul"),
        helper.make_node("Where", ["keep", "b", "x"], ["c"], "where"),
        helper.make_node("Cast", ["half"], ["full"], "cast_full", to=TensorProto.FLOAT),
        helper.make_node("Add", ["c", "full"], ["d"], "add1"),
        helper.make_node("ReduceMax", ["d"], ["peak"], "reducemax", keepdims=0),
        helper.make_node("Greater", ["d", "scale"], ["large"], "greater"),
        helper.make_node("ArgMax", ["d"], ["top"], "argmax", axis=1, keepdims=0),
        helper.make_node("MatMul", ["d", "w1"], ["y"], "matmul1"),
    ]
    rng = np.random.default_rng(3)
    shapes = {"w0": (8, 8), "w1": (8, 5), "table": (10, 8)}
    weights = {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}
    model = model_of(nodes, {"x": ["batch", 8]}, [], weights)
    kinds = {"ids": (TensorProto.INT64, ["batch", 3]), "keep": (TensorProto.BOOL, ["batch", 1]),
             "scale": (TensorProto.FLOAT, [])}  # fmt: skip
    model.graph.input.extend(helper.make_tensor_value_info(name, *kind) for name, kind in kinds.items())
    built = {"y": (TensorProto.FLOAT, ["batch", 5]), "early": (TensorProto.FLOAT, ["batch", 8]),
            "top": (TensorProto.INT64, ["batch"]), "large": (TensorProto.BOOL, ["batch", 8]),
            "peak": (TensorProto.FLOAT, []), "half": (TensorProto.FLOAT16, ["batch", 8])}  # fmt: skip
    model.graph.output.extend(helper.make_tensor_value_info(name, *kind) for name, kind in built.items())
    onnx.checker.check_model(model)
    return model


def mixed_feeds(batch: int = 1, seed: int = 0) -> Feeds:
    """Inputs of `mixed`."""
    rng = np.random.default_rng(seed)
    return {
        "x": rng.standard_normal((batch, 8), dtype=np.float32),
        "ids": rng.integers(0, 10, (batch, 3)),
        "keep": rng.integers(0, 2, (batch, 1)).astype(np.bool_),
        "scale": np.array(rng.standard_normal(), np.float32),
    }


def residual(blocks: int = 3, channels: int = 8, size: int = 8) -> ModelProto:
    """Blocks of a convolution and a sum with what went in: image (batch, channels, size, size) to y (batch, 4)."""
    rng = np.random.default_rng(1)
    weights = {f"w{i}": 0.1 * rng.standard_normal((channels, channels, 3, 3), dtype=np.float32) for i in range(blocks)}
    weights["head"] = rng.standard_normal((channels, 4), dtype=np.float32)
    nodes, last = [], "image"
    for i in range(blocks):
        nodes += [
            helper.make_node("Conv", [last, f"w{i}"], [f"c{i}"], f"/block.{i}/Conv", pads=[1, 1, 1, 1]),
            helper.make_node("Relu", [f"c{i}"], [f"r{i}"], f"/block.{i}/Relu"),
            helper.make_node("Add", [f"r{i}", last], [f"s{i}"], f"/block.{i}/Add"),
        ]
        last = f"s{i}"
    nodes += [
        helper.make_node("GlobalAveragePool", [last], ["pooled"], "/pool/GlobalAveragePool"),
        helper.make_node("Flatten", ["pooled"], ["flat"], "/Flatten"),
        helper.make_node("MatMul", ["flat", "head"], ["y"], "/head/MatMul"),
    ]
    model = model_of(nodes, {"image": ["batch", channels, size, size]}, [], weights)
    model.graph.output.append(helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 4]))
    return model


def images(batch: int = 1, seed: int = 0, channels: int = 8, size: int = 8) -> Feeds:
    """Inputs of `residual`."""
    rng = np.random.default_rng(seed)
    return {"image": rng.standard_normal((batch, channels, size, size), dtype=np.float32)}


def whole(model: ModelProto, feeds: Mapping[str, Array]) -> Feeds:
    """Return what ONNX Runtime makes of them on one device."""
    [outputs] = runs(model, tuple(feeds[value.name] for value in model.graph.input))
    return dict(zip((value.name for value in model.graph.output), outputs, strict=True))


def same(result: Mapping[str, Array], expected: Mapping[str, Array]) -> None:
    """All outputs are there and are what was expected, as far as docs/onnx.md promises it of stages."""
    assert list(result) == list(expected)
    for name, array in expected.items():
        assert (result[name].dtype, result[name].shape) == (array.dtype, array.shape), name
        assert difference(array, result[name]) <= TOLERANCES.get(array.dtype.name, 0), name


def owned(model: ModelProto, path: Path, **how: Any) -> OnnxSource:
    """The model as its owner has it, saved in `path`; looked at with 1 for every open dimension."""
    if not all(value.HasField("type") for value in model.graph.output):
        model = onnx.shape_inference.infer_shapes(model)
    file = onnx_file.load(saved(model, path, **how))
    return OnnxSource.from_file(file, {})


def at(model: OnnxSource, *positions: int) -> list[Cut]:
    """The cuts at these positions."""
    results = {cut.position: cut for cut in cuts(model.graph)}
    return [results[position] for position in positions]


def loaded(part: CutStage, plan: OnnxPlan, i: int, folder: Path, opener: Opener = open_here) -> LoadedStage:
    """A stage as a worker would load it."""
    path = folder / part.digest
    path.write_bytes(part.content)
    return onnx_stage.load(str(path), part.takes, part.gives, 1, plan.stages[i].provider, opener=opener)[0]


def following(stage: LoadedStage, source: Link, sink: Link) -> None:
    """Be a rank: who fails says why to the others."""
    try:
        onnx_stage.follow(stage, source, sink)
    except Exception as error:
        for link in (source, sink):
            link.refuse(f"stage: {error}")
        raise


@dataclass
class RunningPipeline:
    """A pipeline in this process, and what it is made of."""

    pipeline: Pipeline
    parts: list[CutStage]
    stages: list[LoadedStage]  # those that threads of their own compute
    links: list[tuple[Link, Link]]  # into each of these, and out of the last one: (the end before, the end behind)
    done: list[Future[None]]  # what came of each


@contextmanager
def running(
    model: OnnxSource,
    folder: Path,
    *positions: int,
    own: bool = False,
    wrap: Any = lambda stage: stage,
    deadlines: Deadlines = QUICK,
    opener: Opener = open_here,
) -> Iterator[RunningPipeline]:
    """The model cut at these positions, its stages in threads that memory links join.

    own: the first stage is the owner's. wrap: what to make of each loaded stage. opener: opens stages of others.
    """
    n = len(positions) + 1
    devices: Sequence[str] = [LOCAL if own and not i else f"w{i}" for i in range(n)]
    plan = model.plan(devices, at(model, *positions))
    model.check(plan)
    parts = model.parts(plan)
    with ExitStack() as stack:
        stages = [loaded(part, plan, i, folder, open_here if own and not i else opener) for i, part in enumerate(parts)]
        for stage in stages:
            stack.callback(stage.close)
        mine = stages.pop(0) if own else None
        stages = [wrap(stage) for stage in stages]
        links: list[tuple[Link, Link]] = [
            memory_link.pair((f"rank {i}", f"rank {(i + 1) % (len(stages) + 1)}"), deadlines)
            for i in range(len(stages) + 1)
        ]
        for pair in links:
            for link in pair:
                stack.callback(link.close)
        done = [start(following, stage, links[i][1], links[i + 1][0]) for i, stage in enumerate(stages)]
        ends = PipelineEnds(model.inputs, parts[bool(own)].takes, links[0][0], parts[-1].gives, links[-1][1], mine)
        yield RunningPipeline(Pipeline(ends), parts, stages, links, done)
