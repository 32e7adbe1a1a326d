"""Tensors of layers that many architectures share."""

from collections.abc import Mapping

from partition.architectures.description import Number, Table

# Metadata and rules that several tables share.
QWEN: Mapping[str, Number] = {"rope_base": 1e6, "rms_eps": 1e-6}
MROPE = {"rope.dimension_sections": (4, 2, 2, 0)}
GRANITE_SCALES: Mapping[str, Number] = {
    "logit_scale": 8.0, "embedding_scale": 12.0, "residual_scale": 0.22, "attention.scale": 0.125
}  # fmt: skip
SQUARE = "llama.cpp expects query matrices that are as wide as the model"
WIDE = "{} normalizes queries and keys over all heads"

ATTENTION: Table = {
    "attn_norm.weight": ("embd",),
    "attn_q.weight": ("q", "embd"),
    "attn_k.weight": ("kv", "embd"),
    "attn_v.weight": ("kv", "embd"),
    "attn_output.weight": ("embd", "q"),
}
FFN_NORM: Table = {"ffn_norm.weight": ("embd",)}
QKV_BIAS: Table = {"attn_q.bias": ("q",), "attn_k.bias": ("kv",), "attn_v.bias": ("kv",)}
HEAD_NORMS: Table = {"attn_q_norm.weight": ("head",), "attn_k_norm.weight": ("head",)}
WIDE_NORMS: Table = {"attn_q_norm.weight": ("q",), "attn_k_norm.weight": ("kv",)}
POST_NORMS: Table = {"post_attention_norm.weight": ("embd",), "post_ffw_norm.weight": ("embd",)}
ROUTER_BIAS: Table = {"exp_probs_b.bias": ("experts",)}

DENSE: Table = {
    "ffn_gate.weight": ("ff", "embd"),
    "ffn_up.weight": ("ff", "embd"),
    "ffn_down.weight": ("embd", "ff"),
}
UNGATED: Table = {"ffn_up.weight": ("ff", "embd"), "ffn_down.weight": ("embd", "ff")}
UNGATED_BIAS: Table = {"ffn_up.bias": ("ff",), "ffn_down.bias": ("embd",)}
GATE_UP: Table = {"ffn_up.weight": ("gate+up", "embd"), "ffn_down.weight": ("embd", "ff")}
FUSED: Table = {
    "attn_norm.weight": ("embd",),
    "attn_qkv.weight": ("qkv", "embd"),
    "attn_output.weight": ("embd", "q"),
}

LLAMA: Table = {**ATTENTION, **FFN_NORM}
# Layers as in GPT-2: norms with a bias, and one matrix for queries, keys and values.
GPT: Table = {
    **FUSED,
    **FFN_NORM,
    "attn_norm.bias": ("embd",),
    "attn_qkv.bias": ("qkv",),
    "attn_output.bias": ("embd",),
    "ffn_norm.bias": ("embd",),
}
GPT_DENSE: Table = {**UNGATED, **UNGATED_BIAS}
NORM_BIASES: Table = {"attn_norm.bias": ("embd",), "ffn_norm.bias": ("embd",)}

OUTER_BIASED: Table = {"output_norm.weight": ("embd",), "output_norm.bias": ("embd",)}

LAYER_NORM = {"attention.layer_norm_epsilon": 1e-5}  # metadata of models whose norms subtract the mean

# Keys and values of all heads from one latent vector, next to a part that RoPE rotates.
LATENT: Table = {
    "attn_norm.weight": ("embd",),
    "attn_q_a.weight": ("q rank", "embd"),
    "attn_q_a_norm.weight": ("q rank",),
    "attn_q_b.weight": ("q", "q rank"),
    "attn_kv_a_mqa.weight": ("latent", "embd"),
    "attn_kv_a_norm.weight": ("kv rank",),
    "attn_k_b.weight": ("heads", "kv rank", "unturned"),
    "attn_v_b.weight": ("heads", "head", "kv rank"),
    "attn_output.weight": ("embd", "q"),
}
LATENT_KEYS: Mapping[str, Number] = {
    "attention.q_lora_rank": "q rank",
    "attention.kv_lora_rank": "kv rank",
    "attention.head_count_kv": 1,
    "attention.key_length": "latent",
    "attention.value_length": "kv rank",
    "attention.key_length_mla": "head",
    "attention.value_length_mla": "head",
    "rope.dimension_count": "half head",
}

EXPERT_KEY = "expert_feed_forward_length"
SIGMOID: dict[str, Number] = {"expert_gating_func": 2, "expert_weights_norm": True, "expert_weights_scale": 1.5}
LEADING = {"dense_layers": 1}
TURNED_OTHERWISE: dict[str, Number] = {"rope.freq_base_swa": 5e3}  # metadata of layers with a window
ONE_LATENT_STATE = "all heads share one latent state"  # reason why there are no shards
NO_LATENT_STATES = "keys and values are one latent state, not heads"  # reason why the KV cache is not read


def experts(width: str) -> Table:
    """Return a router and one stack of matrices for all experts, each expert `width` wide."""
    return {
        "ffn_gate_inp.weight": ("experts", "embd"),
        "ffn_gate_exps.weight": ("experts", width, "embd"),
        "ffn_up_exps.weight": ("experts", width, "embd"),
        "ffn_down_exps.weight": ("experts", "embd", width),
    }


def shared(width: str = "shared ff") -> Table:
    """Return an expert that every token passes through."""
    return {
        "ffn_gate_shexp.weight": (width, "embd"),
        "ffn_up_shexp.weight": (width, "embd"),
        "ffn_down_shexp.weight": ("embd", width),
    }


def without(table: Table, *names: str) -> Table:
    """Return a table without some of its rows."""
    return {name: dims for name, dims in table.items() if name not in names}
