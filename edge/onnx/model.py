"""ONNX model in the owner's process: the checked file, its graph, and the stages it is cut into."""

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
from edge.models.local_slices import OwnSlices
from edge.onnx.file import OnnxFile, load
from edge.onnx.inputs import read
from edge.onnx.metadata import metadata_of
from edge.onnx.observed import ObservedRun
from edge.onnx.samples import TYPES, Array, Feeds, Input, Output, SamplesError, declared_shape, random_feeds
from edge.onnx.signature import dims_of, fit, with_dims
from edge.onnx.wire import Boundary, Tensor
from partition.errors import CannotSlice, PlanError
from partition.model.onnx_graph import OnnxGraph
from partition.model.onnx_shapes import Value, type_name
from partition.plan.onnx_cuts import Cut, cut_at, cuts, places_text, stage_io
from partition.plan.onnx_plan import OnnxPlan, OnnxStage
from partition.plan.plan import Range
from partition.slices.onnx_recipe import stage_recipe
from partition.slices.onnx_slice import slice_model
from partition.slices.recipe import Recipe, whole
from quant.errors import ModelFileError

_MOST_BYTES = (1 << 31) - 1  # limit of a protobuf message
_MOST_RECIPE = 8 << 20  # limit of a recipe, which travels in one message


@dataclass(frozen=True)
class CutStage:
    """One stage that was cut from the model."""

    content: bytes  # a serialized ModelProto
    digest: str  # SHA-256 of the content
    takes: Boundary
    gives: Boundary
    weight_bytes: int
    activation_bytes: int  # maximum over nodes of the bytes of a node's inputs and outputs


@dataclass(frozen=True)
class OnnxSource:
    """A model file and its graph."""

    file: OnnxFile
    graph: OnnxGraph  # graph with sizes for all open dimensions
    digest: str  # SHA-256 of the model's file, without separate weight files
    sample: Feeds  # caller's or random input, whose sizes the graph has
    unrun: str = ""  # reason why the model could not be run on the sample, if its shapes need a run

    @classmethod
    def from_file(cls, file: OnnxFile, dims: Mapping[str, int], feeds: Feeds | None = None) -> OnnxSource:
        """Return the model with sizes for its open dimensions.

        dims: sizes of open dimensions
        feeds: an input whose sizes other dimensions get; without one, other dimensions are 1

        Shapes that cannot be inferred are observed in a run of the input. Raises SamplesError if `dims` names a
        dimension that no input has open, or if the input does not fit. Raises the errors of OnnxGraph.
        """
        declared = declared_inputs(file)
        fixed = with_dims(declared, dims)
        if feeds is None:
            feeds = noise(fixed)
        fit(fixed, feeds)
        run = ObservedRun(file, feeds)
        graph = OnnxGraph.from_model(file.model, dims_of(declared, feeds), run.shapes)
        return cls(file, graph, OwnSlices().model_digest(file.path), feeds, run.failed)

    @property
    def name(self) -> str:
        """File name of the model, for people."""
        return self.file.path.name

    @property
    def inputs(self) -> tuple[Input, ...]:
        """Declared inputs of the model."""
        return declared_inputs(self.file)

    def plan(self, devices: Sequence[str], cuts: Sequence[Cut]) -> OnnxPlan:
        """Return the plan with these cuts and one stage for each of `devices`."""
        bounds = [0, *(cut.position for cut in cuts), len(self.graph.nodes)]
        stages = [
            OnnxStage(where, Range(start, stop), cut.label if cut else "")
            for where, (start, stop), cut in zip(devices, pairwise(bounds), [*cuts, None], strict=True)
        ]
        return OnnxPlan(self.name[:255], self.digest, len(self.graph.nodes), tuple(stages))

    def check(self, plan: OnnxPlan) -> None:
        """Raise PlanError if the plan is for another model, or if it has a cut at a node where the model cannot be
        cut."""
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
        """Labels of all cuts by position, cached because a sweep needs each of them."""
        return {cut.position: cut.label for cut in cuts(self.graph)}

    def check_places(self, devices: int) -> None:
        """Raise PlanError, with the reason, if the model has too few places to cut it for this number of devices."""
        if reason := self.places_text(devices):
            raise PlanError(reason)

    def places_text(self, devices: int) -> str:
        """Return the reason why the model cannot have a stage on each of this number of devices; "" if it can."""
        places = cuts(self.graph)
        if len(places) + 1 >= devices:
            return ""
        reason = places_text(self.graph, places)
        return f"{reason}; an input that it takes would tell more, as {self.unrun}" if self.unrun else reason

    def node_seconds(self, threads: int | None) -> list[float] | None:
        """Return the seconds of each node of the graph in a run of the sample on this device.

        Return None if the model does not run here or lacks memory.
        """
        try:
            places = [node.place for node in self.graph.nodes]
            return ObservedRun(self.file, self.sample).node_seconds(places, threads)
        except (EngineError, NotEnoughMemory):
            return None

    def parts(self, plan: OnnxPlan) -> list[CutStage]:
        """Return the stages of a checked plan.

        Raises CannotSlice if a stage is too large to send, or if its shapes are unknown.
        """
        return [self._part(i, plan) for i in range(len(plan.stages))]

    @contextmanager
    def recipe(self, part: CutStage) -> Iterator[tuple[Recipe, Path]]:
        """Yield the recipe of a stage and the file to cut it from, which exists until the end of the block.

        The file is the model's file. If the recipe would be too large, it is a temporary file with the stage itself.
        """
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
        with (
            tempfile.NamedTemporaryFile(prefix="edge-stage-", suffix=".onnx") as file_of_stage,
            removed_at_end(Path(file_of_stage.name)),
        ):
            file_of_stage.write(part.content)
            file_of_stage.flush()
            yield whole(part.digest, len(part.content)), Path(file_of_stage.name)

    def _part(self, i: int, plan: OnnxPlan) -> CutStage:
        nodes = plan.stages[i].nodes
        proto = slice_model(self.file.model, self.graph, nodes.start, nodes.stop)
        if proto.ByteSize() > _MOST_BYTES:
            raise CannotSlice(f"stage {i} has {proto.ByteSize():,} bytes, at most 2 GiB can be sent; cut it once more")
        content: bytes = proto.SerializeToString(deterministic=True)
        io = stage_io(self.graph, nodes.start, nodes.stop)
        return CutStage(
            content,
            hashlib.sha256(content).hexdigest(),
            _boundary(io.tensors_in, inner=i > 0, passed=i),
            _boundary(io.tensors_out, inner=i + 1 < len(plan.stages), passed=i + 1),
            self.graph.stage_weight_bytes(nodes.start, nodes.stop),
            self.graph.activation_bytes(nodes.start, nodes.stop),
        )


def declared_inputs(file: OnnxFile) -> tuple[Input, ...]:
    """Return the inputs of a model, with types as ONNX Runtime names them.

    Raises SamplesError if an input is not a tensor of numbers.
    """
    inputs = []
    for value in file.model.graph.input:
        tensor = value.type.tensor_type
        kind = type_name(tensor.elem_type) if value.type.HasField("tensor_type") else None
        if kind not in _NAMES:
            what = kind or "no tensor of numbers"
            raise SamplesError(f"input {value.name!r} is {what}; such a model cannot be cut")
        inputs.append(Input(value.name, _NAMES[kind], declared_shape(value)))
    return tuple(inputs)


def declared_outputs(file: OnnxFile) -> tuple[Output, ...]:
    """Return the outputs of a stage. Raises ModelFileError if the type of an output is not declared."""
    outputs = []
    for value in file.model.graph.output:
        kind = type_name(value.type.tensor_type.elem_type)
        if kind not in _NAMES:
            raise ModelFileError(
                f"output {value.name!r:.80} of the stage is {kind or 'of no type'}; cut the model again"
            )
        outputs.append(Output(value.name, _NAMES[kind], declared_shape(value)))
    return tuple(outputs)


def load_source(path: Path, dims: Mapping[str, int], inputs: Sequence[str] | Mapping[str, Array] = ()) -> OnnxSource:
    """Load the model in a file.

    dims: sizes of open dimensions; other open dimensions get their sizes from `inputs`, or 1
    inputs: arrays by name, or pictures and arrays as "FILE" or "NAME=FILE"; if empty, random values

    Raises the errors of `load`, of `edge.onnx.inputs.read` and of `OnnxSource.from_file`.
    """
    file = load(path)
    if isinstance(inputs, Mapping):
        return OnnxSource.from_file(file, dims, dict(inputs) or None)
    declared = with_dims(declared_inputs(file), dims)
    feeds = read(declared, inputs, None, metadata_of(file.model)).feeds if inputs else None
    return OnnxSource.from_file(file, dims, feeds)


def noise(inputs: tuple[Input, ...]) -> Feeds:
    """Return a random input with 1 for every open dimension; it is the same in each call."""
    try:
        return next(random_feeds(inputs, 1))
    except (MemoryError, ValueError) as error:  # numpy raises ValueError if the size exceeds the address space
        shapes = ", ".join(f"{input_.name} {list(input_.concrete_shape)}" for input_ in inputs)
        raise NotEnoughMemory(f"memory ran out for an input of {shapes}; choose smaller dimensions") from error


_NAMES = {name: type_ for type_, name in TYPES.items()}  # numpy's name of a type to ONNX Runtime's


def _boundary(values: tuple[Value, ...], inner: bool, passed: int) -> Boundary:
    return Boundary(tuple(map(_tensor, values)), inner, passed)


def _tensor(value: Value) -> Tensor:
    try:
        open_dims = tuple(i for i, dim in enumerate(value.dims) if isinstance(dim, str))
        return Tensor(value.name, value.type, value.shape, open_dims, not value.ranked)
    except ValueError as error:
        raise CannotSlice(f"{error}; cut the model elsewhere") from None
