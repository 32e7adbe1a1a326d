"""An ONNX model as its owner has it: the checked file, its graph, and the stages it is cut into."""

from __future__ import annotations

import hashlib
import mmap
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path

from devices.files import removed_at_end
from edge.errors import EngineError, NotEnoughMemory
from edge.onnx.file import OnnxFile, load
from edge.onnx.inputs import read
from edge.onnx.observed import ObservedRun
from edge.onnx.samples import ANY_SHAPE, TYPES, Feeds, Input, SamplesError, made_up
from edge.onnx.signature import dims_of, fit, with_dims
from edge.onnx.wire import Array, Boundary, Tensor
from edge.slices.local import OwnSlices
from partition.errors import CannotSlice, PlanError
from partition.model.onnx_graph import OnnxGraph
from partition.model.onnx_shapes import Value, type_name
from partition.plan.onnx_cuts import Cut, cut_at, cuts, places_text, stage_io
from partition.plan.onnx_plan import OnnxPlan, OnnxStage
from partition.plan.plan import Range
from partition.slices.onnx_recipe import stage_recipe
from partition.slices.onnx_slice import slice_model
from partition.slices.recipe import Recipe, whole

_MOST_BYTES = (1 << 31) - 1  # of a protobuf message
_MOST_RECIPE = 8 << 20  # bytes that a recipe may write out: it travels in one message


@dataclass(frozen=True)
class Part:
    """One stage, cut."""

    content: bytes  # a serialized ModelProto
    digest: str  # its SHA-256
    takes: Boundary
    gives: Boundary
    weight_bytes: int
    activation_bytes: int  # the largest that one node takes and makes


@dataclass(frozen=True)
class OnnxSource:
    """A model and its graph."""

    file: OnnxFile
    graph: OnnxGraph  # looked at with sizes for all open dimensions
    digest: str  # SHA-256 of the model's file, without files beside it
    sample: Feeds  # an input: the one that was given, or a made-up one; the graph has its sizes
    unrun: str = ""  # why the model could not be run on it, where shapes were wanted that only a run tells

    @classmethod
    def of(cls, file: OnnxFile, dims: Mapping[str, int], feeds: Feeds | None = None) -> OnnxSource:
        """The model, looked at with these sizes of its open dimensions, and with those of `feeds`, an input; where
        there is none, others are 1. Shapes that cannot be inferred are those of a run of the input.

        SamplesError for a size that no input asks for, and an input that does not fit; the errors of OnnxGraph.
        """
        declared = declared_inputs(file)
        fixed = with_dims(declared, dims)
        if feeds is None:
            feeds = _noise(fixed)
        fit(fixed, feeds)
        run = ObservedRun(file, feeds)
        graph = OnnxGraph.from_model(file.model, dims_of(declared, feeds), run.shapes)
        return cls(file, graph, OwnSlices().model_digest(file.path), feeds, run.failed)

    @property
    def name(self) -> str:
        """For people."""
        return self.file.path.name

    @property
    def inputs(self) -> tuple[Input, ...]:
        """What it takes."""
        return declared_inputs(self.file)

    def plan(self, devices: Sequence[str], cuts: Sequence[Cut]) -> OnnxPlan:
        """The plan that cuts here, with a stage for each of `devices`."""
        bounds = [0, *(cut.position for cut in cuts), len(self.graph.nodes)]
        stages = [
            OnnxStage(where, Range(start, stop), cut.label if cut else "")
            for where, (start, stop), cut in zip(devices, pairwise(bounds), [*cuts, None], strict=True)
        ]
        return OnnxPlan(self.name[:255], self.digest, len(self.graph.nodes), tuple(stages))

    def check(self, plan: OnnxPlan) -> None:
        """PlanError where the plan is for another model, or cuts where nothing can be cut."""
        if plan.model_digest and plan.model_digest != self.digest:
            raise PlanError(
                f"{self.name} has SHA-256 {self.digest[:12]}..., the plan is for {plan.model_digest[:12]}...: it has"
                " changed, or is another model; make a new plan"
            )
        if plan.n_nodes != len(self.graph.nodes):
            raise PlanError(
                f"the plan is for a graph of {plan.n_nodes} nodes, {self.name} has {len(self.graph.nodes)};"
                " make a new plan"
            )
        for stage in plan.stages[:-1]:
            known = self._labels.get(stage.nodes.stop)
            label = known if known is not None else cut_at(self.graph, stage.nodes.stop).label
            if stage.until and stage.until != label:
                raise PlanError(f"the cut at node {stage.nodes.stop} is after {label!r}, the plan says {stage.until!r}")

    @cached_property
    def _labels(self) -> dict[int, str]:
        """Of all cuts, by position: a sweep asks for each of them."""
        return {cut.position: cut.label for cut in cuts(self.graph)}

    def check_places(self, devices: int) -> None:
        """PlanError where it cannot be cut in enough places for so many devices; it says why."""
        if words := self.places_text(devices):
            raise PlanError(words)

    def places_text(self, devices: int) -> str:
        """Why it cannot have a stage on each of so many devices; "" where it can."""
        found = cuts(self.graph)
        if len(found) + 1 >= devices:
            return ""
        words = places_text(self.graph, found)
        return f"{words}; an input that it takes would tell more, as {self.unrun}" if self.unrun else words

    def node_seconds(self, threads: int | None) -> list[float] | None:
        """Seconds of each node of the graph on this device, in a run of the sample; None where it has no room, or does
        not run."""
        try:
            run = ObservedRun(self.file, self.sample)
            return run.node_seconds([node.place for node in self.graph.nodes], threads)
        except (EngineError, NotEnoughMemory):
            return None

    def parts(self, plan: OnnxPlan) -> list[Part]:
        """The stages of a plan that was checked. CannotSlice where one is too large to be sent, or its shapes are not
        known."""
        return [self._part(i, plan) for i in range(len(plan.stages))]

    @contextmanager
    def recipe(self, part: Part) -> Iterator[tuple[Recipe, Path]]:
        """How to cut a stage, and from which file, which is there until the end of the block: the model's, or one of
        the stage itself, where that is not made of the model's."""
        path = self.file.path
        with (
            path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
            memoryview(mapped) as data,
        ):
            recipe = stage_recipe(part.content, data, self.digest)
        if len(recipe.to_bytes()) <= _MOST_RECIPE:
            yield recipe, path
            return
        with tempfile.NamedTemporaryFile(prefix="edge-stage-", suffix=".onnx") as held, removed_at_end(Path(held.name)):
            held.write(part.content)
            held.flush()
            yield whole(part.digest, len(part.content)), Path(held.name)

    def _part(self, i: int, plan: OnnxPlan) -> Part:
        nodes = plan.stages[i].nodes
        proto = slice_model(self.file.model, self.graph, nodes.start, nodes.stop)
        if proto.ByteSize() > _MOST_BYTES:
            raise CannotSlice(f"stage {i} has {proto.ByteSize():,} bytes, at most 2 GiB can be sent; cut it once more")
        content: bytes = proto.SerializeToString(deterministic=True)
        io = stage_io(self.graph, nodes.start, nodes.stop)
        return Part(
            content,
            hashlib.sha256(content).hexdigest(),
            _boundary(io.tensors_in, inner=i > 0, passed=i),
            _boundary(io.tensors_out, inner=i + 1 < len(plan.stages), passed=i + 1),
            self.graph.stage_weight_bytes(nodes.start, nodes.stop),
            self.graph.activation_bytes(nodes.start, nodes.stop),
        )


def declared_inputs(file: OnnxFile) -> tuple[Input, ...]:
    """Inputs of a model, as ONNX Runtime would say them. SamplesError for what is no tensor of numbers."""
    found = []
    for value in file.model.graph.input:
        tensor = value.type.tensor_type
        kind = type_name(tensor.elem_type) if value.type.HasField("tensor_type") else None
        if kind not in _NAMES:
            what = kind or "no tensor of numbers"
            raise SamplesError(f"input {value.name!r} is {what}; such a model cannot be cut")
        shape = tuple(
            dim.dim_value if dim.HasField("dim_value") and dim.dim_value >= 0 else dim.dim_param or "?"
            for dim in tensor.shape.dim
        )
        found.append(Input(value.name, _NAMES[kind], shape if tensor.HasField("shape") else ANY_SHAPE))
    return tuple(found)


def sized(path: Path, dims: Mapping[str, int], inputs: Sequence[str] | Mapping[str, Array] = ()) -> OnnxSource:
    """The model in a file, with these sizes of open dimensions; those of `inputs` for others, or 1.

    inputs: arrays by name, or pictures and arrays as "FILE" or "NAME=FILE"; none: they are made up. The errors of
    `load`, of `edge.onnx.inputs.read` and of `OnnxSource.of`.
    """
    file = load(path)
    if isinstance(inputs, Mapping):
        return OnnxSource.of(file, dims, dict(inputs) or None)
    feeds = read(with_dims(declared_inputs(file), dims), inputs, None).feeds if inputs else None
    return OnnxSource.of(file, dims, feeds)


def _noise(inputs: tuple[Input, ...]) -> Feeds:
    """A made-up input, with 1 for every open dimension; the same each time."""
    try:
        return next(made_up(inputs, 1))
    except (MemoryError, ValueError) as error:  # numpy has the second for more bytes than there can be
        shapes = ", ".join(f"{one.name} {list(one.made_up_shape)}" for one in inputs)
        raise NotEnoughMemory(f"memory ran out for an input of {shapes}; choose smaller dimensions") from error


_NAMES = {name: type_ for type_, name in TYPES.items()}  # as ONNX Runtime calls what numpy calls so


def _boundary(values: tuple[Value, ...], inner: bool, passed: int) -> Boundary:
    return Boundary(tuple(map(_tensor, values)), inner, passed)


def _tensor(value: Value) -> Tensor:
    try:
        open_dims = tuple(i for i, dim in enumerate(value.dims) if isinstance(dim, str))
        return Tensor(value.name, value.type, value.shape, open_dims, not value.ranked)
    except ValueError as error:
        raise CannotSlice(f"{error}; cut the model elsewhere") from None
