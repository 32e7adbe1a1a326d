"""Rules for the tensors of a slice and for its metadata of layers, for all architectures."""

from collections.abc import Mapping
from enum import Enum

from partition.architectures.table import RULES
from quant.gguf.file import GgufFile


def scales_input(architecture: str) -> bool:
    """Return whether llama.cpp multiplies token rows by the square root of n_embd before the first layer."""
    return architecture in RULES and RULES[architecture].scales_input


def takes_tokens(architecture: str) -> bool:
    """Return whether llama.cpp accepts only tokens, so that hidden states must overwrite a token's rows."""
    return architecture in RULES and RULES[architecture].takes_tokens


def has_windows(file: GgufFile) -> bool:
    """Return whether a model has, or may have, layers with attention windows.

    In some architectures layers alternate between a window and all tokens even if no key gives a window.
    """
    rules = RULES.get(file.architecture)
    has_key = bool(file.metadata.get(f"{file.architecture}.attention.sliding_window"))
    return has_key or (rules is not None and rules.window is not None)


class Cut(Enum):
    """Part of a layer's tensor that a rank holds, and the dimension of the cut (0: values of a row, 1: rows)."""

    WHOLE = -1, ""
    FIRST = -1, "first"  # whole on the first shard, zeros on the others
    Q_ROWS = 1, "q"
    K_ROWS = 1, "k"
    V_ROWS = 1, "v"
    QKV_ROWS = 1, "qkv"
    FF_ROWS = 1, "ff"
    Q_ITEMS = 0, "q"
    K_ITEMS = 0, "k"
    V_ITEMS = 0, "v"
    QKV_ITEMS = 0, "qkv"
    FF_ITEMS = 0, "ff"
    SHARED_ROWS = 1, "shared"
    SHARED_ITEMS = 0, "shared"
    HEADS = 0, "heads"
    OUT_COLUMNS = 0, "out"

    @property
    def dimension(self) -> int:
        return self.value[0]

    @property
    def unit(self) -> str:
        return self.value[1]


# Name, without "blk.<n>.", to its cut. Shards are refused for a model with other tensors in its layers. The sum over
# ranks is taken at the products with attn_output and ffn_down, before their biases are added. Every rank therefore adds
# these biases. For a mixture of experts, the sum is taken after the experts' weighted sum.
CUTS: Mapping[str, Cut] = {
    **dict.fromkeys(
        (
            "attn_norm.weight", "attn_norm.bias", "attn_q_norm.weight", "attn_k_norm.weight", "ffn_norm.bias",
            "post_attention_norm.weight", "post_attention_norm", "post_ffw_norm", "ffn_norm.weight",
            "post_ffw_norm.weight", "attn_output.bias", "ffn_down.bias",
            "ffn_gate_inp.weight", "ffn_gate_inp.bias", "exp_probs_b.bias", "exp_probs_b",
            # Every rank computes the shared expert, which is added after the sum.
            "ffn_gate_shexp.weight", "ffn_up_shexp.weight", "ffn_down_shexp.weight",
        ),
        Cut.WHOLE,
    ),
    "attn_q.weight": Cut.Q_ROWS,
    "attn_gate.weight": Cut.Q_ROWS,
    "attn_k.weight": Cut.K_ROWS,
    "attn_v.weight": Cut.V_ROWS,
    "attn_qkv.weight": Cut.QKV_ROWS,
    "attn_q.bias": Cut.Q_ITEMS,
    "attn_k.bias": Cut.K_ITEMS,
    "attn_v.bias": Cut.V_ITEMS,
    "attn_qkv.bias": Cut.QKV_ITEMS,
    "attn_sinks.weight": Cut.HEADS,
    "attn_output.weight": Cut.OUT_COLUMNS,
    "ffn_gate.weight": Cut.FF_ROWS,
    "ffn_up.weight": Cut.FF_ROWS,
    "ffn_gate.bias": Cut.FF_ITEMS,
    "ffn_up.bias": Cut.FF_ITEMS,
    "ffn_down.weight": Cut.FF_ITEMS,
    "ffn_gate_exps.weight": Cut.FF_ROWS,
    "ffn_up_exps.weight": Cut.FF_ROWS,
    "ffn_gate_exps.bias": Cut.FF_ITEMS,
    "ffn_up_exps.bias": Cut.FF_ITEMS,
    "ffn_down_exps.weight": Cut.FF_ITEMS,
    "ffn_down_exps.bias": Cut.FIRST,
}  # fmt: skip

# The shared expert, if it is cut like the other experts (`Rules.shared_sum`).
SHARED: Mapping[str, Cut] = {
    "ffn_gate_shexp.weight": Cut.SHARED_ROWS,
    "ffn_up_shexp.weight": Cut.SHARED_ROWS,
    "ffn_down_shexp.weight": Cut.SHARED_ITEMS,
}

# Tensors outside layers: those of every slice, those of the first layers only, and those cut with the head's rows.
COMMON = (
    "output_norm.weight", "output_norm.bias", "token_embd_norm.weight", "token_embd_norm.bias", "rope_freqs.weight",
    "rope_factors_long.weight", "rope_factors_short.weight",
)  # fmt: skip
DOWN = ("ffn_down.weight", "ffn_down_exps.weight")  # last matrix of the FFN: dense, and of experts
POSITIONS = "position_embd.weight"
HEAD_VECTORS = ("output.bias",)

# Metadata that has one value per layer if it is an array.
PER_LAYER = (
    "attention.head_count", "attention.head_count_kv", "feed_forward_length", "expert_feed_forward_length",
    "expert_used_count", "attention.sliding_window_pattern", "attention.rope_pattern", "attention.recurrent_layers",
    "swiglu_clamp_exp", "swiglu_clamp_shexp", "attention.indexer.types",
)  # fmt: skip
PER_LAYER_PREFIX = "xielu."  # prefix of such metadata that do not contain the architecture's name
# Metadata that count leading layers.
LEADING = ("leading_dense_block_count",)
# Metadata of features that slices lack: pictures, and predictor layers, which rank 0 computes.
LEFT_OUT = ("n_deepstack_layers", "deepstack_mapping", "nextn_predict_layers")
