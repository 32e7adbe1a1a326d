"""An ONNX model as a graph that can be cut: nodes in order, the tensors between them, and the cost of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from types import MappingProxyType
from typing import Any

from partition.errors import CannotSlice
from partition.model.onnx_cost import flops
from partition.model.onnx_shapes import Value, inferred, type_bytes, type_name

# Observes tensors in a run of the model. Returns element type and shape of the named tensors, as far as possible.
Observe = Callable[[Sequence[str]], Mapping[str, tuple[str, tuple[int, ...]]]]

_RANDOM = {"RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Multinomial", "Bernoulli"}
_SCOPES = "pkg.torch.onnx.name_scopes"  # key under which PyTorch's newer exporter stores module names


@dataclass(frozen=True, slots=True)
class Node:
    """An operator that depends on the graph's inputs."""

    name: str  # "" if the model gives none
    scopes: tuple[str, ...]  # enclosing modules, outermost first, if the name contains them
    op: str
    inputs: tuple[str, ...]  # tensors that depend on the graph's inputs, each once
    outputs: tuple[str, ...]  # outputs that are used
    weights: tuple[str, ...]  # constants that it uses, by their names in `OnnxGraph.weight_bytes`
    flops: int
    weight_bytes: int
    output_bytes: int
    place: int  # index in the model's list of nodes

    def __str__(self) -> str:
        """Return the node's name for messages, which a user can find in the model."""
        return f"node {self.name or self.outputs[0]!r} ({self.op})"


@dataclass(frozen=True)
class OnnxGraph:
    """A model's graph as data. `nodes` has neither nodes that only make constants nor unused nodes."""

    nodes: tuple[Node, ...]  # nodes in the model's own topological order
    values: Mapping[str, Value]  # tensors of known shape that depend on the inputs, and outputs
    inputs: tuple[str, ...]  # inputs that are used
    outputs: tuple[str, ...]
    weight_bytes: Mapping[str, int]  # bytes of initializers and constants that nodes use, by name
    unknown: str  # reason for tensors without shapes, from shape inference; "" if there is none

    @classmethod
    def from_model(
        cls, model: Any, dims: Mapping[str, int] = MappingProxyType({}), observe: Observe | None = None
    ) -> OnnxGraph:
        """Return the graph of an onnx.ModelProto, with or without the data of its weights, for the given dimensions.

        dims: sizes of open dimensions, by name or as "input[axis]"
        observe: returns types and shapes of tensors whose shape cannot be inferred

        Raises PlanError if a size is missing, unknown, or not positive. Raises CannotSlice if nodes are out of order,
        or if a tensor is made twice or never.
        """
        listed = flat_nodes(model)
        weights = {t.name for t in model.graph.initializer} | {s.values.name for s in model.graph.sparse_initializer}
        inputs = [value.name for value in model.graph.input if value.name not in weights]
        outputs = [value.name for value in model.graph.output]
        constant = _constants(listed, weights, inputs, outputs)
        shapes = inferred(model, listed, constant, dims)
        values = shapes.values
        live = _live(listed, constant, outputs)
        used = {name for place in live for name in uses(listed[place])} | set(outputs)
        crossing = {name for name in used if name not in constant} | set(outputs)
        lacking = sorted(crossing - values.keys())
        if lacking and observe is not None:
            values |= {name: shapes.observed(name, *observation) for name, observation in observe(lacking).items()}
        for name in outputs:  # the shape of an output of the last stage need not be known in advance
            if name not in values and name in shapes.types:
                values[name] = Value(name, shapes.types[name], (), (), ranked=False)
        sources = _Sources(model, listed, constant, values)
        nodes = tuple(_node(listed[i], i, constant, used, values, sources) for i in live)
        return cls(
            nodes,
            MappingProxyType({name: value for name, value in values.items() if name in crossing}),
            tuple(name for name in inputs if name in used),
            tuple(dict.fromkeys(outputs)),
            MappingProxyType({name: sources.n_bytes[name] for node in nodes for name in node.weights}),
            shapes.unknown,
        )

    @cached_property
    def makers(self) -> Mapping[str, int]:
        """Index of the node that makes each tensor; -1 for inputs of the graph. Constant outputs are not included."""
        result = dict.fromkeys(self.inputs, -1)
        return result | {name: i for i, node in enumerate(self.nodes) for name in node.outputs}

    @cached_property
    def last_uses(self) -> Mapping[str, int]:
        """Index of the last node that uses each tensor; the number of nodes for outputs of the graph."""
        uses = {name: i for i, node in enumerate(self.nodes) for name in node.inputs}
        return uses | dict.fromkeys(self.outputs, len(self.nodes))

    @cached_property
    def folded(self) -> frozenset[str]:
        """Outputs of convolutions that only a normalization uses.

        Runtimes multiply the normalization's factors into the weights. Cutting there would round differently, and
        trained networks would give different last digits.
        """
        uses = Counter(name for node in self.nodes for name in node.inputs) + Counter(self.outputs)
        alone = {node.inputs[0] for node in self.nodes if node.op == "BatchNormalization" and len(node.inputs) == 1}
        convolved = {name for node in self.nodes if node.op in ("Conv", "ConvTranspose") for name in node.outputs}
        return frozenset(name for name in alone & convolved if uses[name] == 1)

    @property
    def flops(self) -> int:
        """Floating-point operations of one run."""
        return sum(node.flops for node in self.nodes)

    def stage_weight_bytes(self, start: int, stop: int) -> int:
        """Return the bytes of the weights that nodes [start, stop) use, each counted once."""
        used = {name for node in self.nodes[start:stop] for name in node.weights}
        return sum(self.weight_bytes[name] for name in used)

    def activation_bytes(self, start: int, stop: int) -> int:
        """Return the maximum bytes of inputs and outputs of one of the nodes [start, stop)."""
        return max(
            node.output_bytes + sum(self.values[name].n_bytes for name in node.inputs if name in self.values)
            for node in self.nodes[start:stop]
        )


def flat_nodes(model: Any) -> Sequence[Any]:
    """Return the NodeProtos of a model. Calls of the model's own functions are replaced by the functions' nodes.

    Raises CannotSlice if that fails.
    """
    if not model.functions:
        return tuple(model.graph.node)
    import onnx
    import onnx.inliner

    bare = onnx.ModelProto(ir_version=model.ir_version)
    bare.opset_import.extend(model.opset_import)
    bare.functions.extend(model.functions)
    bare.graph.name = model.graph.name
    bare.graph.node.extend(model.graph.node)
    bare.graph.input.extend(model.graph.input)
    provided = {value.name for value in model.graph.input}
    weights = [t for t in model.graph.initializer if t.name not in provided]
    bare.graph.input.extend(onnx.helper.make_tensor_value_info(t.name, t.data_type, t.dims) for t in weights)
    bare.graph.output.extend(model.graph.output)
    try:
        return tuple(onnx.inliner.inline_local_functions(bare).graph.node)
    except Exception as exc:  # a RuntimeError of native code
        raise CannotSlice(f"the model's functions cannot be inlined, so it cannot be cut: {exc}") from exc


def uses(node: Any) -> Iterator[str]:
    """Yield the tensors that a NodeProto uses, including its subgraphs. Some may be repeated."""
    yield from (name for name in node.input if name)
    for attribute in node.attribute:
        for graph in (*((attribute.g,) if attribute.HasField("g") else ()), *attribute.graphs):
            own = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
            own |= {sparse.values.name for sparse in graph.sparse_initializer}
            own |= {name for inner in graph.node for name in inner.output}
            inside = (name for inner in graph.node for name in uses(inner))
            yield from (name for name in (*inside, *(value.name for value in graph.output)) if name not in own)


def _constants(
    nodes: Sequence[Any], provided: set[str], inputs: Sequence[str], outputs: Sequence[str]
) -> dict[str, int | None]:
    """Return the tensors that depend on no input: name to the index of the node that makes it, None for
    initializers."""
    constant: dict[str, int | None] = dict.fromkeys(provided)
    available = set(inputs) | provided
    for place, node in enumerate(nodes):
        needed = tuple(uses(node))
        for name in needed:
            if name not in available:
                raise CannotSlice(
                    f"{_called(node)} uses {name!r}, which nothing before it makes; a model's nodes have to be in order"
                )
        inner = any(attribute.HasField("g") or attribute.graphs for attribute in node.attribute)
        fixed = node.op_type not in _RANDOM and not inner and all(name in constant for name in needed)
        for name in node.output:
            if name in available:
                raise CannotSlice(f"{_called(node)} makes {name!r}, which is there before; every tensor has one maker")
            if name:
                available.add(name)
                if fixed:
                    constant[name] = place
    for name in outputs:
        if name not in available:
            raise CannotSlice(f"no node makes the output {name!r}; the model is incomplete")
    return constant


def _live(nodes: Sequence[Any], constant: Mapping[str, int | None], outputs: Sequence[str]) -> list[int]:
    """Return the indexes of nodes that depend on an input and that an output depends on."""
    needed, live = set(outputs), []
    for place in range(len(nodes) - 1, -1, -1):
        node = nodes[place]
        if needed.intersection(name for name in node.output if name):
            needed.update(uses(node))
            if not all(name in constant for name in node.output if name):
                live.append(place)
    return live[::-1]


class _Sources:
    """Weights that each constant is computed from, and their bytes."""

    def __init__(
        self, model: Any, nodes: Sequence[Any], constant: Mapping[str, int | None], values: Mapping[str, Value]
    ) -> None:
        self.n_bytes = {tensor.name: _tensor_bytes(tensor) for tensor in model.graph.initializer}
        for sparse in model.graph.sparse_initializer:
            self.n_bytes[sparse.values.name] = _tensor_bytes(sparse.values) + _tensor_bytes(sparse.indices)
        # Maps each constant to initializers, and to outputs of nodes that create data from nothing or from a size.
        self.weights: dict[str, tuple[str, ...]] = {}
        for name, place in constant.items():  # in topological order
            self.weights[name] = (name,)
            if place is None:
                continue
            node = nodes[place]
            if node.op_type in ("Constant", "ConstantOfShape"):
                self.n_bytes[name] = values[name].n_bytes if name in values else int(node.ByteSize())
            else:
                self.weights[name] = tuple(
                    dict.fromkeys(source for used in uses(node) for source in self.weights[used])
                )


def _node(
    node: Any,
    place: int,
    constant: Mapping[str, int | None],
    used: set[str],
    values: Mapping[str, Value],
    sources: _Sources,
) -> Node:
    needed = dict.fromkeys(uses(node))
    weights = tuple(dict.fromkeys(s for name in needed if name in constant for s in sources.weights[name]))
    outputs = tuple(name for name in node.output if name in used)
    return Node(
        node.name,
        _scopes(node),
        node.op_type,
        tuple(name for name in needed if name not in constant),
        outputs,
        weights,
        flops(node, values),
        sum(sources.n_bytes[name] for name in weights),
        sum(values[name].n_bytes for name in outputs if name in values),
        place,
    )


def _scopes(node: Any) -> tuple[str, ...]:
    """Return the enclosing modules from the node's metadata, or from its name: all parts of a path but the last."""
    for entry in node.metadata_props:
        if entry.key == _SCOPES:
            parts = tuple(part.strip(" '\"") for part in entry.value.strip("[] ").split(","))
            return tuple(part for part in parts[:-1] if part)
    return tuple(part for part in node.name.split("/")[:-1] if part)


def _tensor_bytes(tensor: Any) -> int:
    name = type_name(tensor.data_type)
    return type_bytes(name, prod(tensor.dims)) if name else int(tensor.ByteSize())


def _called(node: Any) -> str:
    return f"node {node.name or next(iter(node.output), '')!r} ({node.op_type})"
