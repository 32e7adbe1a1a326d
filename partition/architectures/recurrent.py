"""Architectures with recurrent layers, alone or beside attention; the most downloaded ones first."""

from collections.abc import Mapping

from partition.architectures.description import Architecture, Rules, Table
from partition.architectures.tensors import (  # fmt: skip
    ATTENTION,
    DENSE,
    FFN_NORM,
    HEAD_NORMS,
    ROUTER_BIAS,
    experts,
    shared,
)

_EXPERT_KEY = "expert_feed_forward_length"
_NO_SHARDS = "recurrent layers hold a state of all their channels"
_NO_STATES = "recurrent layers hold what all tokens so far made, and nothing of each"
_SSM_KEYS = {
    "ssm.conv_kernel": "conv",
    "ssm.inner_size": "inner",
    "ssm.state_size": "state",
    "ssm.time_step_rank": "time rank",
}
_GROUPED = {**_SSM_KEYS, "ssm.group_count": "groups"}
_MROPE = {"rope.dimension_sections": (4, 2, 2, 0)}
_NORM: Table = {"attn_norm.weight": ("embd",)}
_MAMBA: Table = {
    **_NORM,
    "ssm_in.weight": ("2 inner", "embd"),
    "ssm_conv1d.weight": ("inner", "conv"),
    "ssm_conv1d.bias": ("inner",),
    "ssm_x.weight": ("time and states", "inner"),
    "ssm_dt.weight": ("inner", "time rank"),
    "ssm_dt.bias": ("inner",),
    "ssm_a": ("inner", "state"),
    "ssm_d": ("inner",),
    "ssm_out.weight": ("embd", "inner"),
}
_MAMBA_2: Table = {
    **_NORM,
    "ssm_in.weight": ("ssm in", "embd"),
    "ssm_conv1d.weight": ("ssm conv", "conv"),
    "ssm_conv1d.bias": ("ssm conv",),
    "ssm_dt.bias": ("time rank",),
    "ssm_a": ("time rank", 1),
    "ssm_d": ("time rank", 1),
    "ssm_norm.weight": ("groups", "inner of group"),
    "ssm_out.weight": ("embd", "inner"),
}
_SHORT: Table = {
    **_NORM,
    "shortconv.conv.weight": ("embd", "conv"),
    "shortconv.in_proj.weight": ("3 embd", "embd"),
    "shortconv.out_proj.weight": ("embd", "embd"),
    **FFN_NORM,
}
# Gated attention, and gated delta rule.
_GATED: Table = {
    **_NORM,
    "attn_q.weight": ("2 q", "embd"),
    "attn_k.weight": ("kv", "embd"),
    "attn_v.weight": ("kv", "embd"),
    "attn_output.weight": ("embd", "q"),
    **HEAD_NORMS,
    "post_attention_norm.weight": ("embd",),
}
_DELTA: Table = {
    **_NORM,
    "attn_qkv.weight": ("delta conv", "embd"),
    "attn_gate.weight": ("delta values", "embd"),
    "ssm_conv1d.weight": ("delta conv", "conv"),
    "ssm_dt.bias": ("time rank",),
    "ssm_a": ("time rank",),
    "ssm_norm.weight": ("state",),
    "ssm_out.weight": ("embd", "delta values"),
    "post_attention_norm.weight": ("embd",),
}
_DELTA_35: Table = {**_DELTA, "ssm_beta.weight": ("time rank", "embd"), "ssm_alpha.weight": ("time rank", "embd")}
_SHARED_GATED: Table = {**experts("expert ff"), **shared(), "ffn_gate_inp_shexp.weight": ("embd",)}
_SHARED_KEYS = {"expert_shared_feed_forward_length": "shared ff"}
_DELTA_KEYS = {**_GROUPED, "ssm.inner_size": "delta values"}
_DELTA_FIGURES = {"attention_every": 4, "conv": 4, "rope_base": 1e6, "rms_eps": 1e-6}
_SIZES = {"conv": 4}
_SCALES = {"logit_scale": 8.0, "embedding_scale": 12.0, "residual_scale": 0.22, "attention.scale": 0.125}


def _rules(**more: object) -> Rules:
    return Rules(**{"no_shards": _NO_SHARDS, "no_states": _NO_STATES, **more})  # type: ignore[arg-type]


RECURRENT_ARCHITECTURES: Mapping[str, Architecture] = {
    "qwen35": Architecture(
        _GATED,
        DENSE,
        recurrent=_DELTA_35,
        common=_DELTA_FIGURES,
        keys={**_DELTA_KEYS, **_MROPE},
        rules=_rules(recurrent_every=4),
    ),
    "qwen35moe": Architecture(
        _GATED,
        experts=_SHARED_GATED,
        recurrent=_DELTA_35,
        common=_DELTA_FIGURES,
        keys={**_DELTA_KEYS, **_MROPE, **_SHARED_KEYS},
        rules=_rules(recurrent_every=4, ff_key=_EXPERT_KEY),
    ),
    "qwen3next": Architecture(
        _GATED,
        experts=_SHARED_GATED,
        recurrent={**_DELTA, "ssm_ba.weight": ("2 time rank", "embd")},
        common=_DELTA_FIGURES,
        keys={**_DELTA_KEYS, **_SHARED_KEYS},
        rules=_rules(recurrent_every=4, ff_key=_EXPERT_KEY),
    ),
    "lfm2": Architecture(
        {**ATTENTION, **FFN_NORM, **HEAD_NORMS},
        DENSE,
        recurrent=_SHORT,
        outer={"token_embd_norm.weight": ("embd",)},
        common={"attention_every": 3, "conv": 3},
        keys={"shortconv.l_cache": "conv"},
        square_q=True,
        rules=_rules(),
    ),
    "lfm2moe": Architecture(
        {**ATTENTION, **FFN_NORM, **HEAD_NORMS},
        DENSE,
        {**experts("expert ff"), **ROUTER_BIAS},
        recurrent=_SHORT,
        outer={"token_embd_norm.weight": ("embd",)},
        common={"attention_every": 3, "conv": 3, "dense_layers": 1},
        keys={"shortconv.l_cache": "conv", "expert_gating_func": 2},
        square_q=True,
        rules=_rules(ff_key=_EXPERT_KEY),
    ),
    "granitehybrid": Architecture(
        {**ATTENTION, **FFN_NORM},
        DENSE,
        recurrent={**_MAMBA_2, **FFN_NORM},
        common={**_SIZES, "attention_every": 3},
        keys={**_GROUPED, **_SCALES},
        rules=_rules(input_node="embd"),
    ),
    "falcon-h1": Architecture(
        {**ATTENTION, **_MAMBA_2, "ffn_norm": ("embd",)}, DENSE, common=_SIZES, keys=_GROUPED, rules=_rules()
    ),
    "jamba": Architecture(
        {**ATTENTION, **FFN_NORM},
        DENSE,
        recurrent={
            **_MAMBA,
            "ssm_dt_norm.weight": ("time rank",),
            "ssm_b_norm.weight": ("state",),
            "ssm_c_norm.weight": ("state",),
            **FFN_NORM,
        },
        common={**_SIZES, "attention_every": 3},
        keys=_SSM_KEYS,
        square_q=True,
        rules=_rules(),
    ),
    "mamba": Architecture({}, recurrent=_MAMBA, common=_SIZES, keys=_SSM_KEYS, rules=_rules()),
    "mamba2": Architecture({}, recurrent=_MAMBA_2, common=_SIZES, keys=_GROUPED, rules=_rules()),
}
