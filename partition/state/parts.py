"""KV cache of a whole model and of its parts: stages hold layers, and shards hold heads of layers."""

from collections.abc import Sequence

import numpy as np

from partition.errors import StateError
from partition.state.sequence import Bytes, KVBlock, LayerRows, check
from partition.state.shape import LayerShape, StateShape


def join(parts: Sequence[tuple[KVBlock, StateShape]], whole: StateShape) -> KVBlock:
    """Return the block of `whole` from the blocks of its parts, each with its shape.

    If several parts hold a head, the first one is used. Raises StateError if data is missing, or if parts have
    different positions.
    """
    positions = parts[0][0].positions
    for block, shape in parts:
        check(block, shape)
        if block.positions != positions:
            raise StateError(
                f"parts have the positions {positions} and {block.positions}; all parts must have the same"
            )
    layers = []
    for layer in whole.layers:
        keys: dict[int, Bytes] = {}
        values: dict[int, Bytes] = {}
        for block, shape in parts:
            for layer_shape, rows in zip(shape.layers, block.layers, strict=True):
                if layer_shape.layer == layer.layer:
                    if layer_shape.kv_heads == layer.kv_heads:  # the whole layer; its heads may be inseparable
                        keys, values = {-1: rows.keys}, {-1: rows.values}
                        continue
                    for i, head in enumerate(layer_shape.kv_heads):
                        keys.setdefault(head, _head(rows.keys, i, layer_shape.key_head_bytes))
                        values.setdefault(head, _head(rows.values, i, layer_shape.value_head_bytes))
        layers.append(LayerRows(_together(keys, layer), _together(values, layer)))
    return KVBlock(positions, tuple(layers))


def cut(block: KVBlock, whole: StateShape, part: StateShape) -> KVBlock:
    """Return a model part's share of a block. Raises StateError if the whole lacks one of the part's layers."""
    check(block, whole)
    by_layer = {layer.layer: (layer, rows) for layer, rows in zip(whole.layers, block.layers, strict=True)}
    layers = []
    for own in part.layers:
        if own.layer not in by_layer:
            raise StateError(f"layer {own.layer} is not in the state")
        layer, rows = by_layer[own.layer]
        if own.kv_heads != layer.kv_heads:
            rows = LayerRows(
                _heads(rows.keys, own.kv_heads, layer.key_head_bytes),
                _heads(rows.values, own.kv_heads, layer.value_head_bytes),
            )
        layers.append(rows)
    return KVBlock(block.positions, tuple(layers))


def _head(rows: Bytes, place: int, head_bytes: int) -> Bytes:
    return rows[:, place * head_bytes : (place + 1) * head_bytes]


def _heads(rows: Bytes, heads: Sequence[int], head_bytes: int) -> Bytes:
    return np.concatenate([_head(rows, head, head_bytes) for head in heads], axis=1)


def _together(heads: dict[int, Bytes], layer: LayerShape) -> Bytes:
    if -1 in heads:
        return heads[-1]
    missing = [head for head in layer.kv_heads if head not in heads]
    if missing:
        raise StateError(f"no rank has KV heads {missing} of layer {layer.layer}; the history must be computed again")
    return np.concatenate([heads[head] for head in layer.kv_heads], axis=1)
