"""Check whether several ranks can share a model's layers."""

from partition.errors import CannotSlice
from partition.slices.rules import DOWN
from partition.slices.source import Source


def check_shards(source: Source) -> None:
    """Raise CannotSlice if a layer cannot be shared by several ranks."""
    problem = source.rules.no_shards or _uneven(source) or _unknown(source) or _misfit(source)
    if problem:
        raise CannotSlice(f"{problem}; its layers cannot be shared, but they can be given out: --parallel pipeline")


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
    """Return what the architecture as which shards are written cannot do; "" if nothing."""
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
