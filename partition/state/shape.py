"""Shape of the KV cache of a slice: layers, heads, and bytes per token."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from partition.errors import CannotSlice
from partition.plan.plan import NOTHING, Range, Slice
from partition.plan.tensor import kv_heads
from partition.slices.metadata import cached_windows
from partition.slices.source import Source
from quant.types import CacheType


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Shape of one layer of a slice."""

    layer: int  # number in the model
    kv_heads: tuple[int, ...]  # heads of the model, in the slice's order; a shard may repeat one
    key_bytes: int  # bytes of one token: all its KV heads
    value_bytes: int
    windowed: bool  # true if the second of two caches holds its keys and values

    @property
    def key_head_bytes(self) -> int:
        """Bytes of one head's key."""
        return self.key_bytes // len(self.kv_heads)

    @property
    def value_head_bytes(self) -> int:
        """Bytes of one head's value."""
        return self.value_bytes // len(self.kv_heads)


@dataclass(frozen=True, slots=True)
class StateShape:
    """Shapes of a slice's attention layers. Recurrent layers store nothing for each token."""

    layers: tuple[LayerShape, ...]
    key_type: int  # ggml's number of the type
    value_type: int
    value_size: int  # bytes of one value; 0 for types with blocks of several values
    caches: int  # 2 if some layers of the model have an attention window, else 1
    sections: bool = False  # true if each cell also has a two-dimensional position and a token

    def __hash__(self) -> int:
        # Every block needs the hash, and hashing all layers would take longer than a check.
        return hash((len(self.layers), self.key_type, self.value_type))

    @classmethod
    def of_slice(cls, source: Source, cut: Slice, kv: CacheType) -> "StateShape":
        """Return the shape of a slice whose KV cache has the type `kv`.

        Raises CannotSlice if a head's keys do not end at a block of that type, so that heads cannot be separated.
        """
        shape = source.shape
        if source.rules.no_states:
            raise CannotSlice(f"of {source.file.architecture} models {source.rules.no_states}")
        windows = cached_windows(source, cut)
        keys, values = kv.keys, kv.values
        if len(cut.heads) < source.heads and (shape.head_k % keys.block or shape.head_v % values.block):
            raise CannotSlice(
                f"keys of {shape.head_k} values in blocks of {keys.block} ({kv.name}) cannot be cut by heads; use f16"
            )
        layers = []
        for i, layer in enumerate(range(cut.layers.start, cut.layers.stop)):
            if source.recurrent[layer] or not shape.n_heads_kv[layer]:
                continue
            key, value = source.head_sizes(layer)
            n_heads, n_kv = shape.n_heads[layer], shape.n_heads_kv[layer]
            has_all = len(cut.heads) == source.heads
            heads = tuple(range(n_kv)) if has_all else kv_heads(cut.heads, n_heads, n_kv)
            layers.append(
                LayerShape(
                    layer,
                    heads,
                    keys.n_bytes(len(heads) * key),
                    values.n_bytes(len(heads) * value),
                    windows is not None and windows[i],
                )
            )
        sections = "rope.dimension_sections" in source.meta
        value_size = values.block_bytes if values.block == 1 else 0
        return cls(tuple(layers), keys.id, values.id, value_size, 1 if windows is None else 2, sections)

    @classmethod
    def of_model(cls, source: Source, kv: CacheType) -> "StateShape":
        """Return the shape of the whole model."""
        whole = Slice(Range(0, source.shape.n_layers), Range(0, source.heads), Range(0, source.ff), NOTHING, first=True)
        return cls.of_slice(source, whole, kv)

    def in_cache(self, number: int) -> Sequence[LayerShape]:
        """Return the layers in one of the caches, in order."""
        return [layer for layer in self.layers if self.caches == 1 or layer.windowed == bool(number)]

    @property
    def cell(self) -> struct.Struct:
        """Layout of llama.cpp's data of a token besides keys and values.

        The fields are its position, the number of its sequences, then (if positions have sections) its two-dimensional
        position and its ID, and its sequence.
        """
        return struct.Struct("<iIiiii") if self.sections else struct.Struct("<iIi")

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values."""
        return sum(layer.key_bytes + layer.value_bytes for layer in self.layers)
