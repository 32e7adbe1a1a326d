"""Names for the places between nodes: the block that ends there, as a person would call it."""

from __future__ import annotations

import re
from collections import Counter

from partition.model.onnx_graph import Node, OnnxGraph

_NUMBERED = re.compile(r".*[._]\d+$")  # layer1.0, features.3, block_2


def labels(graph: OnnxGraph) -> list[tuple[str, bool]]:
    """Return for each node the label of a cut just after it, and whether a block ends there. Labels are unique.

    A block is the outermost module with a number (layer1.0, features.3), or else the outermost one, by the names that
    exporters give nodes: /layer1/layer1.0/conv1/Conv. The last node of a block has the block's name; one inside has the
    rest of its own after it: layer1.0/conv1/Conv. A node outside of modules has its own name where that tells the
    operator, or else the operator and its output: Conv:conv1_1.
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
    """Return how many outermost modules contain all nodes: their names tell nothing."""
    scopes = [node.scopes for node in graph.nodes if node.scopes]
    if len(scopes) < len(graph.nodes):
        return 0
    return next((i for i, parts in enumerate(zip(*scopes, strict=False)) if len(set(parts)) > 1), 0)


def _block(scopes: tuple[str, ...]) -> tuple[str, ...]:
    """The path of the block that a node is in; () for none."""
    for i, part in enumerate(scopes):
        if _NUMBERED.match(part):
            return scopes[: i + 1]
    return scopes[:1]


def _own_name(node: Node) -> str:
    name = node.name.strip("/")
    if name and (node.name.startswith("/") or node.op.lower() in name.lower()):
        return name
    return f"{node.op}:{node.outputs[0]}"
