"""Shape of the keys and values of one slice of a model: layers, heads, and bytes of a token."""

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

    layer: int  # of the model
    kv_heads: tuple[int, ...]  # of the model, in the slice's order; a shard may hold one several times
    key_bytes: int  # of one token: all of its KV heads
    value_bytes: int
    windowed: bool  # its keys and values are in the second of two caches

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
    """Shapes of all layers of a slice that have attention. Recurrent ones hold nothing of each token."""

    layers: tuple[LayerShape, ...]
    key_type: int  # as ggml numbers types
    value_type: int
    value_size: int  # bytes of one value; 0 where the type has blocks of several
    caches: int  # 2 where some layers have an attention window, whether this slice has both kinds or one
    sections: bool = False  # each cell has its position in two dimensions as well, and a token

    def __hash__(self) -> int:
        return hash(
            (len(self.layers), self.key_type, self.value_type)
        )  # asked for with every block; the layers take longer than a check

    @classmethod
    def of_slice(cls, source: Source, cut: Slice, kv: CacheType) -> "StateShape":
        """The shape of a slice that stores keys and values as `kv`.

        CannotSlice if a head's keys do not end with a block of that type, so that heads cannot be separated.
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
        """The shape of the whole model."""
        whole = Slice(Range(0, source.shape.n_layers), Range(0, source.heads), Range(0, source.ff), NOTHING, first=True)
        return cls.of_slice(source, whole, kv)

    def in_cache(self, number: int) -> Sequence[LayerShape]:
        """The layers whose keys and values are in one of the caches, in order."""
        return [layer for layer in self.layers if self.caches == 1 or layer.windowed == bool(number)]

    @property
    def cell(self) -> struct.Struct:
        """Bytes that llama.cpp writes of a token beside keys and values: its position, how many sequences have it, its
        position in two dimensions and its id where positions have sections, and its sequence."""
        return struct.Struct("<iIiiii") if self.sections else struct.Struct("<iIi")

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values."""
        return sum(layer.key_bytes + layer.value_bytes for layer in self.layers)
