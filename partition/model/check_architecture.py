"""Part of `check_loadable` that depends on the architecture: assertions of its graph builder in llama.cpp.

Most assertions are in the rows of `partition.architectures`. An architecture without a row is not refused, and only the
general checks apply to it.
"""

from partition.architectures.description import UNCHECKED, WHOLE, Architecture, Asserted
from partition.architectures.table import ARCHITECTURES, ASSERTED
from partition.model.metadata import MAX_COUNT, Metadata
from partition.model.model import ModelShape
from quant.gguf.header import GgufArray

# Metadata that llama.cpp takes sizes from without checking the tensor, and the tensor and dimension with that size.
_SIZES = {
    "ssm.inner_size": ("ssm_out.weight", 0),
    "ssm.conv_kernel": ("ssm_conv1d.weight", 0),
    "shortconv.l_cache": ("shortconv.conv.weight", 0),
    "attention.kv_lora_rank": ("attn_kv_a_norm.weight", 0),
    "attention.q_lora_rank": ("attn_q_a_norm.weight", 0),
}
_POOLINGS = 4  # number of llama.cpp's ways to pool a text into one vector, besides none
_MAX_WINDOW = 1 << 30  # limit in tokens; larger values overflow an int


def check_architecture(meta: Metadata, shape: ModelShape) -> None:
    """Raise ModelFileError if the metadata or shapes would fail an assertion of the architecture."""
    meta.count("pooling_type", 0, most=_POOLINGS)
    if (asserted := ASSERTED.get(meta.architecture)) is not None:
        _check_asserted(meta, shape, asserted)
    if meta.architecture == "grovemoe":
        groups = shape.n_experts // meta.count("experts_per_group", least=1)
        meta.count("expert_used_count", least=1, most=max(groups, 1))
    _check_values(meta, shape)


def _check_asserted(meta: Metadata, shape: ModelShape, asserted: Asserted) -> None:
    """Check the assertions in the architecture's row."""
    described = asserted if isinstance(asserted, Architecture) else None
    window = described.rules.window if described else None
    tokens = asserted.default_window if asserted.default_window is not None else window.size if window else 0
    if asserted.rope != UNCHECKED:
        _check_heads(meta, shape, whole=asserted.rope == WHOLE)
        _check_window(meta, tokens)
    if asserted.plain:
        _check_shapes(meta, shape)
    if described is not None:
        _check_described(meta, shape, described)
    if asserted.needs_gate and "expert_gating_func" not in meta:
        raise meta.error(f"{meta.key('expert_gating_func')} is missing; convert the model again")
    if asserted.needs_window and not meta.count("attention.sliding_window", tokens):
        raise meta.error(f"llama.cpp stops at a {meta.architecture} model without an attention window")
    for key, (default, least, most) in asserted.counts.items():
        meta.count(key, default, least, MAX_COUNT if most is None else most)


def _check_values(meta: Metadata, shape: ModelShape) -> None:
    """Check assertions of the loader or the graph about single values."""
    values = meta.file.metadata
    if meta.architecture == "bailingmoe3":
        bound, safe = values.get(meta.key("kda.gate_lower_bound")), values.get(meta.key("kda.safe_gate"), True)
        if not safe or not isinstance(bound, float) or not bound < 0:
            raise meta.error(
                "llama.cpp needs kda.safe_gate, and a kda.gate_lower_bound below 0; convert the model again"
            )
    if meta.architecture == "deepseek2-ocr":
        if values.get(meta.key("rope.freq_base"), 1e4) != 1e4:
            raise meta.error(f"{meta.key('rope.freq_base')} is not 10000, which llama.cpp needs")
        if {shape.head_k, shape.head_v} != {shape.n_embd // max(shape.n_heads[0], 1)}:
            raise meta.error("its heads together are not as wide as the model, which llama.cpp needs")
    indexes = values.get(meta.key("attention.indexer.types"))
    if meta.architecture == "glm-dsa" and isinstance(indexes, GgufArray) and len(indexes) and not indexes[0]:
        raise meta.error("its first layer has no index of its own, and there is none before it")


def _check_described(meta: Metadata, shape: ModelShape, described: Architecture) -> None:
    """Check requirements of the architecture's row for all its models."""
    if described.equal_heads and shape.n_heads_kv != shape.n_heads:
        raise meta.error(f"{meta.architecture} needs as many key-value heads as heads; convert the model again")
    if (table := meta.file.tensors.get("token_embd.weight")) and table.shape[0] != shape.n_embd:
        raise meta.error(f"{meta.key('embedding_length')} is {shape.n_embd}, token_embd.weight has {table.shape[0]}")
    for key, (name, dimension) in _SIZES.items():
        tensor = next(
            (t for layer in range(shape.n_layers) if (t := meta.file.tensors.get(f"blk.{layer}.{name}"))), None
        )
        if key in meta and tensor is not None and meta.count(key) != tensor.shape[dimension]:
            raise meta.error(f"{meta.key(key)} is {meta.count(key)}, {tensor.name} has {tensor.shape[dimension]}")
    if described.twice_as_wide and meta.count("ssm.inner_size", 0) != 2 * shape.n_embd:
        raise meta.error(
            f"{meta.key('ssm.inner_size')} is not twice {meta.key('embedding_length')}, which llama.cpp needs"
        )
    if "attention.key_length_mla" in meta:
        _check_latent(meta, shape)
    if described.recurrent and described.attention:
        kinds = set(recurrent_layers(meta, shape))
        if len(kinds) < 2:
            which = "recurrent" if True in kinds else "attention"
            raise meta.error(f"it has {which} layers only; llama.cpp needs both kinds in {meta.architecture} models")


def _check_latent(meta: Metadata, shape: ModelShape) -> None:
    """Check the sizes of latent attention, in which a head has a latent part and a part that RoPE rotates."""
    rank, turned = meta.count("attention.kv_lora_rank", least=1), meta.count("rope.dimension_count", least=2)
    needed = {
        "attention.key_length": (shape.head_k, rank + turned),
        "attention.value_length": (shape.head_v, rank),
        "attention.head_count_kv": (max(shape.n_heads_kv), 1),
    }
    for key, (value, needed_value) in needed.items():
        if value != needed_value:
            raise meta.error(f"{meta.key(key)} is {value}, needed for latent attention is {needed_value}")
    meta.count("attention.key_length_mla", least=turned + 1)
    meta.count("attention.value_length_mla", least=1)
    if turned % 2:
        raise meta.error(f"RoPE turns {turned} values of a head, expected an even number")


def recurrent_layers(meta: Metadata, shape: ModelShape) -> tuple[bool, ...]:
    """Return for each layer whether it is recurrent instead of using attention."""
    described = ARCHITECTURES.get(meta.architecture)
    if described is None or not described.recurrent:
        return (False,) * shape.n_layers
    every = described.rules.recurrent_every
    if not every:
        # If each layer has only one part, this can also be the feed-forward part.
        parts = zip(shape.n_heads_kv, shape.n_ff, strict=True)
        return tuple(heads == 0 and not (described.alone and ff) for heads, ff in parts)
    value = meta.file.metadata.get(meta.key("attention.recurrent_layers"))
    if isinstance(value, GgufArray):
        return tuple(bool(item) for item in value[: shape.n_layers])
    every = meta.count("full_attention_interval", every, least=1)
    return tuple((layer + 1) % every != 0 for layer in range(shape.n_layers))


def _check_heads(meta: Metadata, shape: ModelShape, whole: bool) -> None:
    """Check the head sizes. In these architectures keys and values have the same size; RoPE over 0 values never
    ends."""
    if not shape.n_heads[0]:
        raise meta.error(f"{meta.key('attention.head_count')} is missing or 0; convert the model again")
    turned = meta.count("rope.dimension_count", shape.head_k)
    meta.count("rope.dimension_count_swa", 2, least=2)
    if turned % 2 or not turned:
        raise meta.error(f"RoPE turns {turned} values of a head, expected an even number above 0")
    if shape.head_k != shape.head_v or (whole and turned != shape.head_k):
        sizes = f"keys have {shape.head_k} values, values {shape.head_v}, RoPE turns {turned}"
        raise meta.error(f"{sizes}; {meta.architecture} needs all three equal")


def _check_window(meta: Metadata, default: int) -> None:
    """Raise ModelFileError if a model with an attention window has no layer that uses it, which llama.cpp asserts.

    default: window in tokens if the file has none
    """
    key = "attention.sliding_window"
    pattern = meta.file.metadata.get(meta.key(key + "_pattern"))
    if meta.count(key, default, most=_MAX_WINDOW) and (
        (isinstance(pattern, GgufArray) and not any(pattern))  # one flag for each layer
        or (isinstance(pattern, int) and pattern == 1)  # every n-th layer has no window
    ):
        raise meta.error(f"the model has an attention window, but {meta.key(key + '_pattern')} gives it to no layer")


def _check_shapes(meta: Metadata, shape: ModelShape) -> None:
    """Compare existing tensors with the sizes in the metadata. llama.cpp itself reports missing tensors."""
    embd = shape.n_embd
    expected = {"token_embd.weight": (embd, shape.n_vocab), "output.weight": (embd, shape.n_vocab)}
    for i in range(shape.n_layers):
        names = [f"blk.{i}.attn_{part}.weight" for part in "qkv"]
        if f"blk.{i}.attn_qkv.weight" not in meta.file.tensors:  # llama.cpp would compute with a null pointer
            missing = [name for name in names if name not in meta.file.tensors]
            if missing:
                raise meta.error(f"tensor {missing[0]!r} is missing; download or convert the model again")
        q, kv = shape.n_heads[i], shape.n_heads_kv[i]
        expected |= {
            f"blk.{i}.attn_q.weight": (embd, q * shape.head_k),
            f"blk.{i}.attn_k.weight": (embd, kv * shape.head_k),
            f"blk.{i}.attn_v.weight": (embd, kv * shape.head_v),
            f"blk.{i}.attn_output.weight": (q * shape.head_v, embd),
            f"blk.{i}.ffn_down.weight": (shape.n_ff[i], embd),
        }
    for name, needed in expected.items():
        tensor = meta.file.tensors.get(name)
        if tensor is not None and tensor.shape != needed:
            raise meta.error(f"tensor {name!r} has shape {list(tensor.shape)}, the metadata need {list(needed)}")
