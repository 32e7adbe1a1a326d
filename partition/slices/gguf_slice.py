"""Slices of a GGUF model: the part that one rank needs, as a recipe for a GGUF file that llama.cpp loads by itself.

Every slice takes hidden states (`batch.embd`) and has a vocabulary without words, because the owner of the model
tokenizes and looks up token rows. If the slice has rows of the head, their results are its logits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain

from partition.errors import CannotSlice
from partition.plan.plan import Sizes, Slice
from partition.plan.tensor import Limits
from partition.slices import tensors
from partition.slices.metadata import pairs
from partition.slices.recipe import Blocks, Literal, Recipe, Segment, Zeros
from partition.slices.rules import DOWN, SHARED
from partition.slices.source import Source
from partition.slices.tensors import Placed
from quant.gguf.elastic import elastic_pairs, elastic_sizes, is_elastic
from quant.gguf.file import GgufFile
from quant.gguf.writer import NewTensor, header

_FACTORS = "rope_f"  # prefix of tensors that rotation frequencies are divided by
_KINDS = ("query", "kv", "ff", "rest")  # kinds of a layer's weights


def limits(file: GgufFile) -> Limits:
    """Return the limits for cutting `file`. Raises CannotSlice if the model cannot even be cut into stages.

    Bytes are the bytes read to compute one token. With experts, these are the bytes of the used experts. If layers
    differ, they are averages over the layers.
    """
    source = Source.from_file(file)
    sizes = [source]
    if is_elastic(file):
        sizes = [Source.from_file(file.with_tensors(size.tensors)) for size in elastic_sizes(file)]
    shape = source.shape
    layers = range(shape.n_layers)
    heads = sum(shape.n_heads)
    heads_kv = sum(shape.n_heads_kv)
    by_layer = [_bytes(source, layer) for layer in layers]
    query, key_value, ff, rest = (math.fsum(values) for values in zip(*by_layer, strict=True))
    if source.rules.whole_attention:  # each rank has all heads, and other attention weights are not shared either
        query, key_value = query + key_value + rest, 0.0
    return Limits(
        sizes=Sizes(shape.n_layers, source.heads, source.heads_kv, source.ff, source.head.shape[-1]),
        head_unit=math.lcm(*(size.head_unit for size in sizes)),
        ff_unit=math.lcm(*(size.ff_unit for size in sizes)),
        head_bytes=query / heads if heads else 0.0,
        kv_head_bytes=key_value / heads_kv if heads_kv else 0.0,
        ff_bytes=ff / (len(layers) * source.ff),
        vocab_bytes=source.head.n_bytes / source.head.shape[-1],
        layer_bytes=tuple(sum(kinds) for kinds in by_layer),
        starts=source.starts,
        no_stage_of=source.no_stage_of,
        shares_heads=not source.rules.whole_attention,
    )


def check_tensor(file: GgufFile) -> None:
    """Raise CannotSlice, with reason and alternative, if no layer of the model can be shared by several ranks."""
    check_shards(Source.from_file(file))


def slice_recipe(file: GgufFile, model_digest: str, cut: Slice) -> Recipe:
    """Return the recipe that cuts `cut` from the model. Raises CannotSlice if that is impossible."""
    placed, own_pairs = _planned(file, cut)
    return joined(file, model_digest, header(own_pairs, [part.tensor for part in placed]), placed)


def elastic_recipe(file: GgufFile, model_digest: str, cut: Slice) -> Recipe:
    """Return the recipe of a slice with all sizes of an elastic file; the slice is an elastic file, too.

    The slice holds each of its tensors in every type that a size uses. Raises CannotSlice, as `slice_recipe` does, for
    any size.
    """
    sizes = elastic_sizes(file)
    if len(sizes) == 1:
        return slice_recipe(file, model_digest, cut)
    by_size = [_planned(file.with_tensors(size.tensors), cut) for size in sizes]
    if len({tuple((part.tensor.name, part.tensor.shape) for part in parts) for parts, _ in by_size}) > 1:
        raise CannotSlice("the sizes of this model would need different cuts; choose other shares, or one size")
    placed: dict[tuple[str, int], Placed] = {}
    positions: dict[tuple[str, int], int] = {}
    end = 0
    for part in chain.from_iterable(parts for parts, _ in by_size):
        if (key := (part.tensor.name, part.tensor.type.id)) not in placed:
            placed[key], positions[key] = part, end
            end += part.tensor.n_bytes + part.tensor.padding
    first, own_pairs = by_size[0]
    described = elastic_pairs(
        [{part.tensor.name: part.tensor.type.id for part in parts} for parts, _ in by_size],
        positions,
        [_file_bytes(*planned) for planned in by_size],
        [size.divergence for size in sizes],
    )
    head = header(own_pairs | described, [part.tensor for part in first])
    return joined(file, model_digest, head, list(placed.values()))


def _file_bytes(placed: list[Placed], own_pairs: dict[str, bytes]) -> int:
    """Return the bytes of a slice of one size."""
    new = [part.tensor for part in placed]
    return len(header(own_pairs, new)) + sum(tensor.n_bytes + tensor.padding for tensor in new)


def joined(file: GgufFile, digest: str, head: bytes, placed: list[Placed]) -> Recipe:
    """Return the recipe of a header and the tensors after it, from bytes of `file`."""
    segments = chain.from_iterable((*p.segments, *_padding(p)) for p in placed)
    return Recipe(digest, file.size_bytes, tuple(tensors.merged([Literal(head), *segments])))


def blank_recipe(file: GgufFile, model_digest: str, cut: Slice) -> Recipe:
    """Return the recipe of the same slice with synthetic weights, which needs no bytes of the model, for timing a
    device.

    Numbers are zero. The scales of blocks vary as in a model, because llama.cpp looks scales up in a table of 256 KiB,
    and equal scales would make this faster. The factors that rotation divides by are the model's own, so that no value
    becomes infinite.
    """
    placed, own_pairs = _planned(file, cut)
    segments: list[Segment] = [Literal(header(own_pairs, [part.tensor for part in placed]))]
    for p in placed:
        is_factors = p.tensor.name.startswith(_FACTORS)
        segments.append(Literal(bytes(file.data(p.tensor.name))) if is_factors else _made_up(p.tensor))
        segments += _padding(p)
    return Recipe(model_digest, file.size_bytes, tuple(tensors.merged(segments)))


def header_recipe(file: GgufFile, model_digest: str, cut: Slice) -> Recipe:
    """Return the recipe of the header of the same slice, without weights."""
    placed, own_pairs = _planned(file, cut)
    head = Literal(header(own_pairs, [part.tensor for part in placed]))
    return Recipe(model_digest, file.size_bytes, (head,))


def _made_up(tensor: NewTensor) -> Segment:
    """Return the synthetic weights of a tensor."""
    first, scales = tensor.type.scales
    if not scales:
        return Zeros(tensor.n_bytes)
    return Blocks(tensor.n_bytes // tensor.type.block_bytes, tensor.type.block_bytes, first, scales)


def _planned(file: GgufFile, cut: Slice) -> tuple[list[Placed], dict[str, bytes]]:
    """Return the slice's tensors, and the key-value pairs of its header."""
    source = Source.from_file(file)
    vocab = source.head.shape[-1]
    for unit, part, total, least in (
        ("layers", cut.layers, source.shape.n_layers, 1),
        ("heads", cut.heads, source.heads, min(source.heads, 1)),
        ("FFN columns", cut.ff, source.ff, 1),
        ("vocabulary rows", cut.vocab, vocab, 0),
    ):
        if part.stop > total or len(part) < least:
            raise CannotSlice(f"{unit} {part} of a model that has {total}; make the plan again")
    edges = (*source.starts, source.shape.n_layers)
    if cut.layers.start not in edges or cut.layers.stop not in edges:
        raise CannotSlice(
            f"layers {cut.layers} of a {source.file.architecture} model, whose stages must begin with layers "
            f"{', '.join(map(str, source.starts))}, because its layers are of several kinds; make the plan again"
        )
    if len(cut.layers) in source.no_stage_of:
        raise CannotSlice(
            f"a stage of {len(cut.layers)} layers, which llama.cpp would take for another kind of "
            f"{source.file.architecture} model; choose other shares"
        )
    if not source.is_whole(cut):
        check_shards(source)
        if (len(cut.heads) == source.heads) != bool(source.rules.whole_attention):
            raise CannotSlice(
                f"heads {cut.heads} of {source.heads} beside FFN columns {cut.ff} of {source.ff}; ranks share "
                f"{'the columns alone' if source.rules.whole_attention else 'both'} in {source.file.architecture} "
                "models; make the plan again"
            )
        if (len(cut.heads) % source.head_unit and len(cut.heads) < source.heads) or len(cut.ff) % source.ff_unit:
            raise CannotSlice(
                f"{len(cut.heads)} heads and {len(cut.ff)} FFN columns; expected multiples of {source.head_unit} and "
                f"{source.ff_unit}, the quantization's blocks; make the plan again"
            )
    return tensors.tensors(source, cut), pairs(source, cut)


def _padding(placed: Placed) -> Iterator[Segment]:
    if placed.tensor.padding:
        yield Zeros(placed.tensor.padding)


def _bytes(source: Source, layer: int) -> tuple[float, ...]:
    """Return the bytes of one layer's tensors that the computation of a token reads, for each of _KINDS."""
    shape = source.shape
    n_bytes = dict.fromkeys(_KINDS, 0.0)
    for name, tensor in source.block(layer).items():
        read = float(tensor.n_bytes)
        if "_exps." in name:
            read *= shape.n_experts_used / max(shape.n_experts, 1)
        if name.startswith("attn_qkv.") and shape.n_heads[layer] and shape.head_k:
            heads, heads_kv = shape.n_heads[layer], shape.n_heads_kv[layer]
            part = heads * shape.head_k / (heads * shape.head_k + heads_kv * (shape.head_k + shape.head_v))
            n_bytes["query"] += read * part
            n_bytes["kv"] += read * (1 - part)
        else:
            n_bytes[_kind(source, name)] += read
    return tuple(n_bytes.values())


def _kind(source: Source, name: str) -> str:
    if name.startswith(("attn_q.", "attn_output.")):
        return "query"
    if name.startswith(("attn_k.", "attn_v.")):
        return "kv"
    is_ff = name.startswith(("ffn_gate.", "ffn_up.", "ffn_down.")) or "_exps." in name
    return "ff" if is_ff or (name in SHARED and source.rules.shared_sum) else "rest"


def check_shards(source: Source) -> None:
    """Raise CannotSlice if a layer cannot be shared by several ranks."""
    problem = source.rules.no_shards or _uneven(source) or _unknown(source) or _misfit(source)
    if problem:
        raise CannotSlice(
            f"{problem}; layers of this model cannot be divided, but each device can have some whole layers:"
            " use --parallel pipeline"
        )


def _uneven(source: Source) -> str:
    shape = source.shape
    if not source.heads or not source.heads_kv:
        return "the model has no attention heads"
    blocks = [source.block(layer) for layer in range(shape.n_layers)]
    if any(all(name in block for name in DOWN) for block in blocks):
        return "the model's layers have experts beside a feed-forward part"
    widths = {(source.columns(layer), DOWN[0] in block) for layer, block in enumerate(blocks)}
    if len(widths) > len({dense for _, dense in widths}) or not all(columns for columns, _ in widths):
        return "the model's layers have different numbers of FFN columns"
    return "" if source.rules.whole_attention else _uneven_heads(source)


def _uneven_heads(source: Source) -> str:
    shape = source.shape
    if len(set(shape.n_heads)) > 1 or len(set(shape.n_heads_kv)) > 1:
        return "the model's layers have different numbers of heads"
    if source.scale_is_fixed():
        return f"attention's scale in this {source.file.architecture} model follows from its {source.heads} heads"
    if any(name in source.meta for name in ("attention.key_length_swa", "rope.dimension_count_swa")):
        return "heads of the model's window layers have a size of their own"
    return ""


def _unknown(source: Source) -> str:
    names = (name for layer in range(source.shape.n_layers) for name in source.block(layer))
    unknown = next((name for name in names if source.cut_of(name) is None), None)
    return f"how to share the tensor {unknown!r} of a layer is not known" if unknown else ""


def _misfit(source: Source) -> str:
    """Return the feature of the model that its shards' architecture lacks, as text; "" if there is none."""
    if not source.rules.shards_as:
        return ""
    arch, tensors = source.file.architecture, source.file.tensors
    if source.turned != source.shape.head_k or source.shape.head_k != source.shape.head_v:
        return f"only {source.turned} of {source.shape.head_k} values of a head carry the position"
    if "rope_factors_long.weight" in tensors or "rope_factors_short.weight" in tensors:
        return f"this {arch} model has position factors that change with the length of the context"
    if "output.bias" in tensors:
        return f"this {arch} model has an output.bias"
    if "exps" in source.down_name:
        return f"this {arch} model has experts"
    return ""
