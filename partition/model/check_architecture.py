"""The part of `check_loadable` that depends on the architecture: what its graph builder in llama.cpp asserts.

An architecture that is in no table here is not refused; the general checks still hold for it.
"""

from partition.model.metadata import Metadata
from partition.model.model import ModelShape
from quant.gguf.header import GgufArray

# RoPE turns whole heads: `GGML_ASSERT(n_embd_head == n_rot)`.
_WHOLE_ROPE = frozenset((
    "arctic", "baichuan", "deepseek", "dream", "ernie4_5", "ernie4_5-moe", "exaone", "exaone-moe", "granite",
    "granitemoe", "grok", "grovemoe", "hunyuan-dense", "hunyuan-moe", "hunyuan_vl", "internlm2", "llada", "llada-moe",
    "llama", "maincoder", "minicpm", "mistral3", "orion", "pangu-embedded", "qwen2", "qwen2moe", "qwen2vl", "qwen3",
    "qwen3moe", "qwen3vl", "qwen3vlmoe", "rnd1", "smollm3", "xverse",
))  # fmt: skip
# RoPE turns a part of each head.
_PART_ROPE = frozenset((
    "bailingmoe", "bitnet", "eurobert", "gemma", "gemma2", "gemma3", "gemma3n", "phi3", "phimoe", "stablelm",
))  # fmt: skip

# A plain decoder layer, whose shapes follow from the metadata alone.
_PLAIN = frozenset(("llama", "qwen2", "qwen3", "qwen3moe", "gemma", "gemma2", "gemma3", "phi3"))
_MAX_WINDOW = 1 << 30  # tokens; more overflows an int


def check_architecture(meta: Metadata, shape: ModelShape) -> None:
    """ModelFileError where the metadata or shapes would fail an assertion of the architecture."""
    if meta.architecture in _WHOLE_ROPE or meta.architecture in _PART_ROPE:
        _check_heads(meta, shape)
        _check_window(meta)
    if meta.architecture in _PLAIN:
        _check_shapes(meta, shape)
    if meta.architecture == "ernie4_5-moe":
        meta.count("interleave_moe_layer_step", 1, least=1)


def _check_heads(meta: Metadata, shape: ModelShape) -> None:
    """Keys and values have one size in these architectures; RoPE over 0 values would never end."""
    if not shape.n_heads[0]:
        raise meta.error(f"{meta.key('attention.head_count')} is missing or 0; convert the model again")
    turned = meta.count("rope.dimension_count", shape.head_k)
    meta.count("rope.dimension_count_swa", 2, least=2)
    if turned % 2 or not turned:
        raise meta.error(f"RoPE turns {turned} values of a head, needed is an even number above 0")
    if shape.head_k != shape.head_v or (turned != shape.head_k and meta.architecture in _WHOLE_ROPE):
        sizes = f"keys have {shape.head_k} values, values {shape.head_v}, RoPE turns {turned}"
        raise meta.error(f"{sizes}; {meta.architecture} needs all three equal")


def _check_window(meta: Metadata) -> None:
    """A model with an attention window needs at least one layer that uses it: llama.cpp asserts it."""
    key = "attention.sliding_window"
    pattern = meta.file.metadata.get(meta.key(key + "_pattern"))
    default = 1 if meta.architecture.startswith("gemma") else 0  # what llama.cpp takes where the key is absent
    if meta.count(key, default, most=_MAX_WINDOW) and (
        (isinstance(pattern, GgufArray) and not any(pattern))  # one flag for each layer
        or (isinstance(pattern, int) and pattern == 1)  # every n-th layer is without the window
    ):
        raise meta.error(f"the model has an attention window, but {meta.key(key + '_pattern')} gives it to no layer")


def _check_shapes(meta: Metadata, shape: ModelShape) -> None:
    """Compare the tensors that are there with the sizes the metadata give; missing ones llama.cpp names itself."""
    embd = shape.n_embd
    expected = {"token_embd.weight": (embd, shape.n_vocab), "output.weight": (embd, shape.n_vocab)}
    for i in range(shape.n_layers):
        names = [f"blk.{i}.attn_{part}.weight" for part in "qkv"]
        if f"blk.{i}.attn_qkv.weight" not in meta.file.tensors:  # llama.cpp computes with the null pointer
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
