"""Cuts of an ONNX graph into two parts, their labels, and the tensors that cross each cut."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from partition.errors import CannotSlice, PlanError
from partition.model.onnx_graph import Node, OnnxGraph
from partition.model.onnx_shapes import Value
from quant.text import counted

_NEAR = 5  # number of similar labels in an error
_MOST = 10_000_000  # limit of tensors over all cuts, for the sake of memory; far more than any network has
_NUMBERED = re.compile(r".*[._]\d+$")  # such as layer1.0, features.3, block_2


@dataclass(frozen=True, slots=True)
class Cut:
    """A position between two nodes, which divides the graph into a stage before and a stage after it."""

    position: int  # number of nodes before the cut
    label: str  # readable name of the last node or block before the cut; unique in a graph
    block: bool  # true if a whole block ends here
    distinct: bool  # false if the next cut moves as many bytes with no product between, so that it is at least as good
    tensors: tuple[Value, ...]  # tensors that cross, in the order of their nodes
    payload_bytes: int
    weight_bytes: tuple[int, int]  # weight bytes of the stages before and after; shared weights count in both
    flops: tuple[int, int]


@dataclass(frozen=True, slots=True)
class StageIO:
    """Inputs and outputs of a stage."""

    # Tensors that cross the cut before the stage; for the first stage, inputs of the graph.
    tensors_in: tuple[Value, ...]
    # Tensors that cross the cut after the stage; for the last stage, outputs of the graph.
    tensors_out: tuple[Value, ...]
    takes: tuple[str, ...]  # inputs of the stage's model, each in `tensors_in`
    makes: tuple[str, ...]  # outputs of the stage's model


def cuts(graph: OnnxGraph) -> list[Cut]:
    """Return all valid cuts in topological order. At a valid cut, type and shape of all crossing tensors are known.

    A graph of one node has no cuts. There is no cut between a convolution and its normalization, because runtimes
    compute them together. Outputs that are made before a cut cross it, so that all outputs leave from the last stage.
    """
    names = labels(graph)
    crossing = _crossings(graph)
    costs = list(accumulate((node.flops for node in graph.nodes), initial=0))
    before, after = _weights(graph)
    n = len(graph.nodes)
    result: list[Cut] = []
    for at in range(1, n):
        if not all(_crosses(graph, name) for name in crossing[at]):
            continue
        tensors = tuple(graph.values[name] for name in crossing[at])
        payload = sum(value.n_bytes for value in tensors)
        label, block = names[at - 1]
        flops = (costs[at], costs[n] - costs[at])
        result.append(Cut(at, label, block, True, tensors, payload, (before[at], after[at]), flops))
    return [_marked(graph, cut, following) for cut, following in pairwise(result)] + result[-1:]


def check_enough(graph: OnnxGraph, possible: Sequence[Cut], devices: int) -> None:
    """Raise PlanError if a graph with these cuts cannot have a stage for each of `devices` devices."""
    if len(possible) + 1 < devices:
        raise PlanError(places_text(graph, possible))


def places_text(graph: OnnxGraph, possible: Sequence[Cut]) -> str:
    """Return a text about the maximum number of devices for a graph with these cuts, and the reason."""
    n = len(graph.nodes)
    places, devices = counted(len(possible), "place") if possible else "no place", counted(len(possible) + 1, "device")
    why = f"it has {counted(n, 'node')}"
    lacking = [names for names in _crossings(graph)[1:n] if not all(_crosses(graph, name) for name in names)]
    if lacking:
        why = _refusal(graph, lacking)
    return f"the network can be cut in {places}, so it runs on at most {devices}: {why}"


def cut_at(graph: OnnxGraph, where: str | int) -> Cut:
    """Return the cut with a label, or at a position, which may also be text.

    Raises PlanError, with similar labels, if there is none. Raises CannotSlice if tensors of unknown shape cross there.
    """
    return _cut_of(cuts(graph), graph, where)


def _cut_of(possible: list[Cut], graph: OnnxGraph, where: str | int) -> Cut:
    n = len(graph.nodes)
    at = int(where) if isinstance(where, int) or where.isdecimal() else None
    named = [cut for cut in possible if cut.label == where] or [cut for cut in possible if cut.position == at]
    if named:
        return named[0]
    if at is not None:
        if 0 < at < n:
            raise CannotSlice(_refusal(graph, [_crossing(graph, at)]))
        if possible:
            raise PlanError(f"there is no cut at {at}; expected a position of 1 to {n - 1}, or a label")
    if not possible or isinstance(where, int):
        raise PlanError(places_text(graph, possible))
    labels = [cut.label for cut in possible]
    near = difflib.get_close_matches(where, labels, _NEAR, 0.3)
    blocks = [cut.label for cut in possible if cut.block]
    suggestions = near or blocks[:_NEAR] or labels[:_NEAR]
    raise PlanError(f"there is no cut after {where[:200]!r}; near ones: {', '.join(suggestions)}")


def choose(graph: OnnxGraph, which: str) -> list[Cut]:
    """Return the cuts that a word names, or the cuts with the labels in `which`, separated by commas.

    "all" means all cuts. "distinct" omits cuts if another cut is at least as good. "blocks" means cuts between whole
    blocks. "auto" means blocks if there are any, else distinct cuts. Raises PlanError for an unknown label.
    """
    possible = cuts(graph)
    blocks = [cut for cut in possible if cut.block]
    distinct = [cut for cut in possible if cut.distinct]
    by_name = {"all": possible, "distinct": distinct, "blocks": blocks, "auto": blocks or distinct}
    return (
        by_name[which] if which in by_name else [_cut_of(possible, graph, label.strip()) for label in which.split(",")]
    )


def routes(graph: OnnxGraph, positions: Iterable[int]) -> list[tuple[Value, ...]]:
    """Return the tensors that cross each boundary of a pipeline with cuts at these positions.

    The first item has the inputs of the first stage, and the last item the outputs of the last stage. Raises PlanError
    if positions are not cuts or do not ascend. Raises CannotSlice, which names a tensor, if a shape is unknown.
    """
    n = len(graph.nodes)
    bounds = (0, *positions, n)
    if any(start >= stop for start, stop in pairwise(bounds)):
        raise PlanError(f"cuts at {list(bounds[1:-1])}; expected positions from 1 to {n - 1} that ascend")
    return [_values(graph, _crossing(graph, at)) for at in bounds]


def stage_io(graph: OnnxGraph, start: int, stop: int) -> StageIO:
    """Return inputs and outputs of the stage of nodes [start, stop).

    Raises PlanError if the range is empty or outside the graph. Raises CannotSlice, which names a tensor, if a shape is
    unknown.
    """
    if not 0 <= start < stop <= len(graph.nodes):
        raise PlanError(f"stage [{start}, {stop}]; expected 0 <= start < stop <= {len(graph.nodes)}")
    tensors_in, tensors_out = (_values(graph, _crossing(graph, at)) for at in (start, stop))
    nodes = graph.nodes[start:stop]
    used = {name for node in nodes for name in node.inputs}
    produced = {name for node in nodes for name in node.outputs}
    if stop == len(graph.nodes):  # the last stage also makes constant outputs
        produced |= set(graph.outputs) - graph.makers.keys()
    return StageIO(
        tensors_in,
        tensors_out,
        tuple(value.name for value in tensors_in if value.name in used),
        tuple(value.name for value in tensors_out if value.name in produced),
    )


def _crossing(graph: OnnxGraph, at: int) -> list[str]:
    """Return the tensors that cross a position from 0 to the number of nodes: inputs first, then by their nodes'
    order."""
    if at == len(graph.nodes):
        return list(graph.outputs)
    last = graph.last_uses
    return [name for name, maker in graph.makers.items() if maker < at <= last[name]]


def _crossings(graph: OnnxGraph) -> list[list[str]]:
    """Return the tensors that cross each position, computed for all positions together."""
    n, last = len(graph.nodes), graph.last_uses
    if sum(last[name] - maker for name, maker in graph.makers.items()) > _MOST:
        raise CannotSlice(f"{n} nodes whose tensors wait for each other; more than {_MOST} crossings are not looked at")
    crossing: list[list[str]] = [[] for _ in range(n + 1)]
    for name, maker in graph.makers.items():
        for at in range(maker + 1, last[name] + 1):
            crossing[at].append(name)
    return crossing


def _values(graph: OnnxGraph, names: list[str]) -> tuple[Value, ...]:
    if not all(_crosses(graph, name) for name in names):
        raise CannotSlice(_refusal(graph, [names]))
    return tuple(graph.values[name] for name in names)


def _crosses(graph: OnnxGraph, name: str) -> bool:
    return name in graph.values and graph.values[name].crosses and name not in graph.folded


def _refusal(graph: OnnxGraph, crossing: Sequence[Sequence[str]]) -> str:
    """Return the reason why the graph cannot be cut at a position that these tensors cross."""
    name = next(name for names in crossing for name in names if not _crosses(graph, name))
    maker = graph.makers.get(name, -1)
    producer = f"{graph.nodes[maker]}" if maker >= 0 else "an input or a constant"
    if name in graph.folded:
        return f"{producer} and the normalization behind it are computed as one, so nothing can be cut there"
    if name in graph.values:
        return f"{producer}: {name!r} is of type {graph.values[name].type}, which does not cross between devices"
    reason = f": {graph.unknown}" if graph.unknown else ""
    why = "depends on data or cannot be inferred, or it is no tensor"
    return f"{producer}: the shape of {name!r} {why}, so nothing can be cut there{reason}"


def _weights(graph: OnnxGraph) -> tuple[list[int], list[int]]:
    """Return for each position the bytes of the weights that nodes before it use, and that nodes after it use."""
    n = len(graph.nodes)
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for i, node in enumerate(graph.nodes):
        for name in node.weights:
            first.setdefault(name, i)
            last[name] = i
    new, done_with = [0] * n, [0] * n
    for name, i in first.items():
        new[i] += graph.weight_bytes[name]
        done_with[last[name]] += graph.weight_bytes[name]
    total = sum(new)
    return list(accumulate(new, initial=0)), [total - done for done in accumulate(done_with, initial=0)]


def _marked(graph: OnnxGraph, cut: Cut, following: Cut) -> Cut:
    """Return the cut, marked as not distinct if the next cut moves as much and only cheap nodes are between them."""
    between = graph.nodes[cut.position : following.position]
    cheap = all(max(node.flops, node.weight_bytes) <= node.output_bytes for node in between)
    if following.block < cut.block or following.payload_bytes != cut.payload_bytes or not cheap:
        return cut
    return replace(cut, distinct=False)


def labels(graph: OnnxGraph) -> list[tuple[str, bool]]:
    """Return for each node the label of a cut directly after it, and whether a block ends there. Labels are unique.

    A block is the outermost numbered module (layer1.0, features.3), or else the outermost module, taken from the node
    names of exporters: /layer1/layer1.0/conv1/Conv. The last node of a block is labelled with the block's name. An
    inner node adds the rest of its own name: layer1.0/conv1/Conv. A node outside modules is labelled with its own name
    if that contains the operator, or else with operator and output: Conv:conv1_1.
    """
    shared = _shared(graph)
    blocks = [_block(node.scopes[shared:]) for node in graph.nodes]
    ends = {block: i for i, block in enumerate(blocks) if block}
    short = Counter(block[-1] for block in ends)
    labelled: list[tuple[str, bool]] = []
    used: set[str] = set()
    for i, (node, block) in enumerate(zip(graph.nodes, blocks, strict=True)):
        whole = bool(block) and ends[block] == i
        name = "/".join(block[-1:] if block and short[block[-1]] == 1 else block)
        if not block:
            name = _own_name(node)
        elif not whole:
            last = node.name.rsplit("/", 1)[-1] or node.op
            name = "/".join((name, *node.scopes[shared + len(block) :], last))
        if name in used:
            name = f"{name}:{node.outputs[0]}"
        used.add(name)
        labelled.append((name, whole))
    return labelled


def _shared(graph: OnnxGraph) -> int:
    """Return the number of outermost modules that contain all nodes, whose names are therefore useless."""
    scopes = [node.scopes for node in graph.nodes if node.scopes]
    if len(scopes) < len(graph.nodes):
        return 0
    return next((i for i, parts in enumerate(zip(*scopes, strict=False)) if len(set(parts)) > 1), 0)


def _block(scopes: tuple[str, ...]) -> tuple[str, ...]:
    """Return the path of the block that contains a node; () if there is none."""
    for i, part in enumerate(scopes):
        if _NUMBERED.match(part):
            return scopes[: i + 1]
    return scopes[:1]


def _own_name(node: Node) -> str:
    name = node.name.strip("/")
    if name and (node.name.startswith("/") or node.op.lower() in name.lower()):
        return name
    return f"{node.op}:{node.outputs[0]}"
