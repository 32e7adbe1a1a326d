"""Key-value pairs of a slice: those of the model, with changes for the size of the slice."""

import struct
from collections.abc import Sequence
from math import sqrt

from partition.plan.plan import Slice
from partition.plan.tensor import kv_heads
from partition.slices.rules import LEADING, LEFT_OUT, PER_LAYER, PER_LAYER_PREFIX
from partition.slices.source import INDEXES, PATTERN, WINDOW, Source
from partition.slices.tensors import STUB_ROWS
from quant.gguf.header import GgufArray
from quant.gguf.writer import encoded

# A window that hides nothing: more tokens than any model is trained for. llama.cpp multiplies it by the number of
# sequences, which can be 256, in 32 bits.
NO_WINDOW = 1 << 22

_FF_KEY = "feed_forward_length"
_SHARED_KEY = "expert_shared_feed_forward_length"
_TURN_BASE = "rope.freq_base_swa"
_RECURRENT = "attention.recurrent_layers"


def pairs(source: Source, cut: Slice) -> dict[str, bytes]:
    """Return the slice's metadata: keys to encoded values."""
    file, whole = source.file, source.is_whole(cut)
    own, arch = file.architecture, architecture(source, cut)
    metadata = {"general.architecture": encoded("str", arch)}
    own_prefix = f"{own}."
    for key in file.metadata:
        if key.startswith("general.") and key not in ("general.architecture", "general.alignment"):
            metadata[key] = file.raw_value(key)
    values = {key.removeprefix(own_prefix): file.raw_value(key) for key in file.metadata if key.startswith(own_prefix)}
    values = {name: value for name, value in values.items() if name not in LEFT_OUT}
    values |= _per_layer(source, cut)
    values |= _sizes(source, cut)
    if not whole:
        values |= _shard_sizes(source, cut)
    _set_window(source, cut, values)
    metadata |= {f"{arch}.{name}": value for name, value in values.items()}
    metadata |= {key: _cut(source, key, cut) for key in file.metadata if key.startswith(PER_LAYER_PREFIX)}
    metadata["tokenizer.ggml.model"] = encoded("str", "none")
    return metadata


def architecture(source: Source, cut: Slice) -> str:
    """Return the architecture that a slice is written as."""
    own = source.file.architecture
    return own if source.is_whole(cut) else source.rules.shards_as or own


def _per_layer(source: Source, cut: Slice) -> dict[str, bytes]:
    """Return the metadata of the slice's layers, from the model's values for each layer."""
    layers, meta, rules = cut.layers, source.meta, source.rules
    metadata = {name: _cut(source, meta.key(name), cut) for name in PER_LAYER if name in meta}
    for name in LEADING:
        if name in meta:
            metadata[name] = encoded("u32", min(max(meta.count(name) - layers.start, 0), len(layers)))
    if rules.recurrent_every and _RECURRENT not in meta:
        metadata[_RECURRENT] = encoded("arr[bool]", source.recurrent[layers.start : layers.stop])
    if rules.shares_index:
        metadata[INDEXES] = encoded("arr[u32]", source.own_index[layers.start : layers.stop])
    metadata |= {name: encoded("u32", value) for name, value in rules.if_missing.items() if name not in meta}
    for name, factor in rules.by_root_of_layers.items():
        if name not in meta:
            metadata[name] = encoded("f32", _f32(_f32(factor) / _f32(sqrt(source.shape.n_layers))))
    return metadata


def _cut(source: Source, key: str, cut: Slice) -> bytes:
    """Return the encoded value, or the slice's part of it if it is an array with an item for each layer."""
    value = source.file.metadata[key]
    if not isinstance(value, GgufArray):
        return source.file.raw_value(key)
    return encoded(source.file.value_type(key), value[cut.layers.start : cut.layers.stop])


def _f32(value: float) -> float:
    """Return the nearest 32-bit float."""
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def _sizes(source: Source, cut: Slice) -> dict[str, bytes]:
    """Return sizes that llama.cpp would otherwise derive from others, which could be wrong in a slice."""
    numbers = {
        "block_count": len(cut.layers),
        "vocab_size": len(cut.vocab) or STUB_ROWS,
        "attention.key_length": source.shape.head_k,
        "attention.value_length": source.shape.head_v,
        "rope.dimension_count": source.turned,
    }
    return {name: encoded("u32", number) for name, number in numbers.items()}


def _shard_sizes(source: Source, cut: Slice) -> dict[str, bytes]:
    numbers = {}
    if not source.rules.whole_attention:
        numbers["attention.head_count"] = len(cut.heads)
        numbers["attention.head_count_kv"] = len(kv_heads(cut.heads, source.heads, source.heads_kv))
    layers = range(cut.layers.start, cut.layers.stop)
    shared = [tensor for layer in layers if (tensor := source.block(layer).get("ffn_down_shexp.weight"))]
    if shared and not source.rules.shared_sum and _SHARED_KEY not in source.meta:
        numbers[_SHARED_KEY] = shared[0].shape[0]  # llama.cpp would derive it from a cut tensor
    metadata = {name: encoded("u32", number) for name, number in numbers.items()}
    dense = [layer for layer in layers if "ffn_down.weight" in source.block(layer)]
    for name, shared_layers in (
        (_FF_KEY, dense),
        (source.rules.ff_key, [layer for layer in layers if layer not in dense]),
    ):
        if shared_layers:
            metadata[name] = _columns(source, cut, name, shared_layers)
    return metadata


def _columns(source: Source, cut: Slice, name: str, layers: Sequence[int]) -> bytes:
    """Return the slice's FFN columns of these layers. name: key of their number in the model"""
    value = source.file.metadata.get(source.meta.key(name))

    def own(width: int, layer: int) -> int:
        return width * len(source.part(cut.ff, layer)) // source.columns(layer)

    if isinstance(value, GgufArray):
        own_layers = range(cut.layers.start, cut.layers.stop)
        return encoded("arr[u32]", [own(int(value[n]), n) if n in layers else int(value[n]) for n in own_layers])
    return encoded("u32", own(value if isinstance(value, int) and value else source.columns(layers[0]), layers[0]))


def cached_windows(source: Source, cut: Slice) -> tuple[bool, ...] | None:
    """Return for each layer of a slice whether the cache for window layers holds its keys; None if there is one
    cache."""
    window, all_flags = source.rules.window, source.windowed
    if window is None or not any(all_flags):
        return None
    flags = all_flags[cut.layers.start : cut.layers.stop]
    if any(flags):
        return flags
    return None if window.optional else (True,) * len(flags)


def _set_window(source: Source, cut: Slice, values: dict[str, bytes]) -> None:
    """Set for each layer of the slice whether it has the window, because the period starts again in each slice."""
    window = source.rules.window
    all_flags = source.windowed
    if window is None or not any(all_flags):
        if source.rules.shards_as and not source.is_whole(cut):
            values.pop(WINDOW, None)  # the model's own architecture ignores it; the other might not
        return
    if not any(all_flags[cut.layers.start : cut.layers.stop]):
        # llama.cpp asserts that one layer has the window. Without any, there is no window, or one that hides nothing.
        # Rotation is then as in layers without a window.
        values.pop(_TURN_BASE, None)
        values[WINDOW] = encoded("u32", 0 if window.optional else NO_WINDOW)
    flags = cached_windows(source, cut) or (False,) * len(cut.layers)
    values[PATTERN] = encoded("arr[bool]", flags)
