"""What is known of each architecture's loader and graph in llama.cpp, so that its slices load and compute right.

Every row was checked against `src/models/<architecture>.cpp` of the pinned llama.cpp: that its layers depend neither on
their number nor on how many there are, but for what a row says and `slice_metadata` writes down.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True, slots=True)
class Window:
    """An architecture whose layers take turns: attention over a window of tokens, and over all of them."""

    period: int  # where the file gives no pattern: of so many layers the last is without the window
    optional: bool = False  # a window of 0 tokens means that no layer has one; else llama.cpp asserts that one has


@dataclass(frozen=True, slots=True)
class Rules:
    """How models of one architecture are cut."""

    needs_output: bool = False  # the loader insists on output.weight; else the token table may be the head
    ff_key: str = "feed_forward_length"  # how wide the FFN is, or one of its experts
    window: Window | None = None
    scales_input: bool = False  # hidden states are multiplied by the root of n_embd before the first layer
    # With so many layers the loader takes attention's scale from n_embd / heads instead of the head size.
    layers_of_other_scale: int = 0
    fused_gate_up: bool = False  # ffn_up holds the rows of gate and then those of up
    shards_as: str = ""  # the architecture a shard is written as; "": its own
    no_shards: str = ""  # why there can be none


# Qwen 2 and Phi-3 insist that attn_q is n_embd x n_embd. EXAONE's graph is the same, but for the order of a product and
# a scale, with the same rotation (NEOX, unlike llama's) and heads of any number and size.
_SQUARE_Q_AS = "exaone"
_GEMMA_2 = Rules(window=Window(2), scales_input=True, layers_of_other_scale=46)
_GEMMA_3 = Rules(window=Window(6, optional=True), scales_input=True, layers_of_other_scale=62)

RULES: Mapping[str, Rules] = {
    "llama": Rules(),
    "qwen2": Rules(shards_as=_SQUARE_Q_AS),
    "qwen3": Rules(),
    "qwen3moe": Rules(ff_key="expert_feed_forward_length"),
    "gemma": Rules(scales_input=True),
    "gemma2": _GEMMA_2,
    "gemma3": _GEMMA_3,
    "phi3": Rules(fused_gate_up=True, shards_as=_SQUARE_Q_AS),
    "gpt-oss": Rules(needs_output=True, ff_key="expert_feed_forward_length", window=Window(2)),
    "mistral3": Rules(),
    "exaone": Rules(),
    "seed_oss": Rules(),
    "olmo2": Rules(
        needs_output=True,
        window=Window(4, optional=True),
        no_shards="olmo2 norms queries and keys over all heads at once",
    ),
}


def scales_input(architecture: str) -> bool:
    """Whether llama.cpp multiplies token rows by the square root of n_embd before the first layer."""
    return architecture in RULES and RULES[architecture].scales_input


def has_window(architecture: str) -> bool:
    """Whether layers of this architecture may take turns between a window and all tokens, also where no key says so."""
    return architecture in RULES and RULES[architecture].window is not None


class Cut(Enum):
    """Which part of a layer's tensor a rank holds, and along which of its dimensions (0: the values of a row)."""

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
    HEADS = 0, "heads"
    OUT_COLUMNS = 0, "out"

    @property
    def dimension(self) -> int:
        return self.value[0]

    @property
    def of(self) -> str:
        return self.value[1]


# Name, without "blk.<n>.", to its cut. A shard of a model with other tensors in its layers is refused.
# The sum over ranks is taken at the product with attn_output and ffn_down, before their biases are added, so that every
# rank adds these; at a mixture of experts it is taken after, at their weighted sum.
CUTS: Mapping[str, Cut] = {
    **dict.fromkeys(
        (
            "attn_norm.weight", "attn_q_norm.weight", "attn_k_norm.weight", "post_attention_norm.weight",
            "ffn_norm.weight", "post_ffw_norm.weight", "attn_output.bias", "ffn_down.bias",
            "ffn_gate_inp.weight", "ffn_gate_inp.bias",
        ),
        Cut.WHOLE,
    ),
    "attn_q.weight": Cut.Q_ROWS,
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

# Outside of layers: what every slice has, and what follows the rows of the head.
COMMON = ("output_norm.weight", "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
HEAD_VECTORS = ("output.bias",)

# Metadata with one value a layer, where it is an array.
PER_LAYER = (
    "attention.head_count", "attention.head_count_kv", "feed_forward_length", "expert_feed_forward_length",
    "expert_used_count", "attention.sliding_window_pattern",
)  # fmt: skip
