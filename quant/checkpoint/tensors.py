"""Mapping of a checkpoint's tensors to those of a GGUF file, with the changes to their rows.

Every tensor is treated as rows: a matrix has [rows, row], a vector has one value in each row. So a stack of experts, a
query matrix and a norm need no special cases.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from quant.checkpoint.checkpoint import StoredTensor
from quant.checkpoint.families import Model
from quant.errors import ModelFileError

STORED_TYPES = {"F32": "f32", "F16": "f16", "BF16": "bf16"}
# Tensors without a place in the GGUF: tables that are computed anyway, and parts for pictures.
_DROPPED_ENDS = (".rotary_emb.inv_freq", ".attention.masked_bias", ".attention.bias")
_DROPPED_PARTS = ("vision_tower.", "multi_modal_projector.")
_PREFIXES = {"language_model.": "", "model.language_model.": "model."}


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows [first, first + count) of a tensor of the checkpoint."""

    tensor: StoredTensor
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class Target:
    """A tensor of the new GGUF, and its sources."""

    name: str
    shape: tuple[int, ...]  # slowest dimension first
    sources: tuple[Rows, ...]
    stored: str  # type of the sources; f32 if they differ
    keeps_f32: bool  # it is always stored as f32
    interleave: int = 0  # number of rows of a head whose halves are interleaved; 0 keeps the order of rows
    offset: float = 0.0  # added to every value

    @property
    def row(self) -> int:
        """Number of values in a row."""
        return self.shape[-1] if len(self.shape) > 1 else 1


@dataclass(frozen=True, slots=True)
class _Required:
    """A tensor that the configuration requires."""

    name: str
    sources: tuple[tuple[str, int], ...]  # (name in the checkpoint, first row)
    shape: tuple[int, ...]  # slowest dimension first
    interleave: int = 0
    offset: float = 0.0


def targets(model: Model, stored: Mapping[str, StoredTensor]) -> list[Target]:
    """Return the tensors of the GGUF, in order.

    Raises ModelFileError if a tensor is missing, has another shape than config.json requires or a type that is not
    supported, or if a tensor of the checkpoint has no place in the GGUF.
    """
    have = {_plain_name(name): tensor for name, tensor in stored.items()} if model.family.wrapped else dict(stored)
    mapped = [_target(required, have) for required in _required_tensors(model, have)]
    used = {rows.tensor.name for target in mapped for rows in target.sources}
    for name, tensor in have.items():
        if tensor.name not in used and not _is_dropped(model, name):
            raise ModelFileError(
                f"{tensor.path.name}: tensor {tensor.name!r:.200} has no place in {model.arch}; "
                "the model does not match its config.json, or is a variant that cannot be converted"
            )
    return mapped


def _plain_name(name: str) -> str:
    """Return the name that a tensor of the text part has in a text-only checkpoint."""
    prefix = next((prefix for prefix in _PREFIXES if name.startswith(prefix)), "")
    return _PREFIXES.get(prefix, "") + name[len(prefix) :]


def _is_dropped(model: Model, name: str) -> bool:
    if name == "lm_head.weight":
        return model.tied  # then it is a copy of the token embeddings
    return name.endswith(_DROPPED_ENDS) or (model.family.wrapped and any(part in name for part in _DROPPED_PARTS))


def _required_tensors(model: Model, have: Mapping[str, StoredTensor]) -> Iterator[_Required]:
    """Yield the tensors that the configuration requires, in order."""
    offset = model.family.norm_offset
    yield _Required("token_embd.weight", (("model.embed_tokens.weight", 0),), (model.vocab, model.embd))
    for i in range(model.layers):
        for name, source, shape, interleave in _layer(model):
            extra = offset if name.endswith("norm.weight") else 0.0
            sources = ((f"model.layers.{i}.{source}", 0),)
            yield _Required(f"blk.{i}.{name}", sources, shape, interleave, extra)
        if model.experts:
            yield from _experts(model, i, have)
    yield _Required("output_norm.weight", (("model.norm.weight", 0),), (model.embd,), 0, offset)
    if not model.tied:
        yield _Required("output.weight", (("lm_head.weight", 0),), (model.vocab, model.embd))


def _layer(model: Model) -> Iterator[tuple[str, str, tuple[int, ...], int]]:
    """Yield (name, name in the checkpoint, shape, rows of a head to interleave) of a layer's tensors except experts."""
    family, config, embd, ff = model.family, model.config, model.embd, model.ff
    q, kv = model.heads * model.head_size, model.kv * model.head_size
    turned = model.head_size if family.interleaved else 0
    attention_bias = family.arch == "llama" and config.flag("attention_bias")
    yield "attn_norm.weight", "input_layernorm.weight", (embd,), 0
    for name, source, rows, interleave in (
        ("attn_q", "q_proj", q, turned), ("attn_k", "k_proj", kv, turned), ("attn_v", "v_proj", kv, 0),
    ):  # fmt: skip
        yield f"{name}.weight", f"self_attn.{source}.weight", (rows, embd), interleave
        if family.qkv_bias or attention_bias:
            yield f"{name}.bias", f"self_attn.{source}.bias", (rows,), interleave
    yield "attn_output.weight", "self_attn.o_proj.weight", (embd, q), 0
    if attention_bias:
        yield "attn_output.bias", "self_attn.o_proj.bias", (embd,), 0
    if family.head_norms:
        yield "attn_q_norm.weight", "self_attn.q_norm.weight", (model.head_size,), 0
        yield "attn_k_norm.weight", "self_attn.k_norm.weight", (model.head_size,), 0
    if family.post_norms:
        yield "post_attention_norm.weight", "post_attention_layernorm.weight", (embd,), 0
        yield "ffn_norm.weight", "pre_feedforward_layernorm.weight", (embd,), 0
        yield "post_ffw_norm.weight", "post_feedforward_layernorm.weight", (embd,), 0
    else:
        yield "ffn_norm.weight", "post_attention_layernorm.weight", (embd,), 0
    if model.experts:
        yield "ffn_gate_inp.weight", "mlp.gate.weight", (model.experts, embd), 0
        return
    for part, shape in (("gate", (ff, embd)), ("up", (ff, embd)), ("down", (embd, ff))):
        yield f"ffn_{part}.weight", f"mlp.{part}_proj.weight", shape, 0
        if family.arch == "llama" and config.flag("mlp_bias"):
            yield f"ffn_{part}.bias", f"mlp.{part}_proj.bias", shape[:1], 0


def _experts(model: Model, layer: int, have: Mapping[str, StoredTensor]) -> Iterator[_Required]:
    """Yield the three stacks of experts of a layer. A checkpoint has a matrix for each expert, or stacks of its own."""
    n, ff, embd, base = model.experts, model.expert_ff, model.embd, f"model.layers.{layer}.mlp.experts"
    stacked = f"{base}.gate_up_proj" in have
    for part, shape, first, step in (
        ("gate", (n, ff, embd), 0, 2 * ff), ("up", (n, ff, embd), ff, 2 * ff), ("down", (n, embd, ff), 0, embd),
    ):  # fmt: skip
        source = f"{base}.{'down_proj' if part == 'down' else 'gate_up_proj'}"
        if stacked:
            sources = tuple((source, first + e * step) for e in range(n))
        else:
            sources = tuple((f"{base}.{e}.{part}_proj.weight", 0) for e in range(n))
        yield _Required(f"blk.{layer}.ffn_{part}_exps.weight", sources, shape)


def _target(required: _Required, have: Mapping[str, StoredTensor]) -> Target:
    """Find and check the source tensors of a required tensor."""
    count = len(required.sources)
    rows = math.prod(required.shape[:-1] or required.shape) // count  # rows in each source
    sources = []
    for name, first in required.sources:
        tensor = have.get(name)
        if tensor is None:
            raise ModelFileError(f"tensor {name!r} is missing, but config.json requires it; download the model again")
        need = _source_shape(required, name)
        if tensor.shape != need:
            raise ModelFileError(
                f"{tensor.path.name}: tensor {tensor.name!r} has the shape {list(tensor.shape)}, but config.json needs "
                f"{list(need)}; the two files do not belong together"
            )
        if tensor.dtype not in STORED_TYPES:
            raise ModelFileError(
                f"{tensor.path.name}: tensor {tensor.name!r} is stored as {tensor.dtype:.20}, but must be BF16, F16 or "
                "F32: get the original checkpoint"
            )
        sources.append(Rows(tensor, first, rows))
    kinds = {STORED_TYPES[source.tensor.dtype] for source in sources}
    return Target(
        name=required.name,
        shape=required.shape,
        sources=tuple(sources),
        stored=kinds.pop() if len(kinds) == 1 else "f32",
        keeps_f32=len(required.shape) == 1 or required.name.endswith("ffn_gate_inp.weight"),  # as llama.cpp needs it
        interleave=required.interleave,
        offset=required.offset,
    )


def _source_shape(required: _Required, name: str) -> tuple[int, ...]:
    """Return the shape that a tensor of the checkpoint must have."""
    if name.endswith(".gate_up_proj"):
        n, ff, embd = required.shape
        return (n, 2 * ff, embd)
    if len(required.shape) == 3 and name.endswith(".weight"):
        return required.shape[1:]
    return required.shape
