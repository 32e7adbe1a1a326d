"""Tensor types of published mixes, computed from a shape by the rules of llama.cpp's quantizer.

A dry run of the quantizer costs a process and an outline file for each model. `edge advise` reads the catalog without.
"""

from __future__ import annotations

from edge.models.shapes import Shape
from edge.models.synth import fitting_type, layout
from quant.mixes import Mix
from quant.types import TYPES, TensorType

_MIXES = ("q8_0", "q4_0", "q4_1", "q4_k_m", "mxfp4_moe")
_ARCHITECTURES = ("llama", "gemma", "gemma2", "gemma3", "qwen2", "qwen3", "qwen3moe", "phi3", "gpt-oss")
_SENSITIVE = ("attn_v.weight", "attn_qkv.weight", "ffn_down.weight", "ffn_down_exps.weight")
_SPECIAL_EXPERTS = 8  # models with this number of experts have rules of their own
_SPECIAL_LAYERS = 80  # Llama models with this number of layers and grouped heads have wider values


def types_in_mix(shape: Shape, mix: Mix) -> dict[str, TensorType] | None:
    """Return the type of each tensor in a mix, or None if only the quantizer knows it."""
    if mix.name not in _MIXES or shape.arch not in _ARCHITECTURES or shape.experts == _SPECIAL_EXPERTS:
        return None
    if shape.layers == _SPECIAL_LAYERS and shape.arch != "llama":
        return None
    if mix.name == "mxfp4_moe" and not shape.experts:
        return None
    tensors = layout(shape, mix.type.name)
    return {tensor.name: _type(shape, mix, tensor.name, tensor.shape[0], tensor.type) for tensor in tensors}


def _type(shape: Shape, mix: Mix, name: str, columns: int, usual: TensorType) -> TensorType:
    """Return the type of one tensor. usual: type in a file whose matrices all have the mix's main type."""
    if usual == TYPES["f32"]:
        return usual
    if mix.name == "mxfp4_moe" and "_exps." not in name:
        return fitting_type(TYPES["q8_0"], columns)
    _, _, part = name.partition("blk.")
    layer, _, part = part.partition(".")
    if mix.name != "q4_k_m" or part not in _SENSITIVE:
        return usual
    if _has_more_bits(int(layer), shape.layers):
        return fitting_type(TYPES["q6_k"], columns)
    wider = shape.layers == _SPECIAL_LAYERS and shape.kv not in (0, shape.heads) and part == "attn_v.weight"
    return fitting_type(TYPES["q5_k"], columns) if wider else usual


def _has_more_bits(layer: int, layers: int) -> bool:
    """Return whether a layer is in the first or last eighth, or is every third layer between them."""
    first = layers // 8
    return layer < first or layer >= 7 * layers // 8 or (layer - first) % 3 == 2
