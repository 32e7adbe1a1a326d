"""Architectures with recurrent layers, with or without attention layers. The most downloaded ones come first."""

from collections.abc import Mapping
from dataclasses import replace

from partition.architectures.description import PART, UNCHECKED, Architecture, Predictors, Rules, Table
from partition.architectures.moe import EXPERTS_PREDICT
from partition.architectures.tensors import (  # fmt: skip
    ATTENTION,
    DENSE,
    EXPERT_KEY,
    FFN_NORM,
    GATE_UP,
    GRANITE_SCALES,
    HEAD_NORMS,
    LATENT,
    LATENT_KEYS,
    LAYER_NORM,
    MROPE,
    NO_LATENT_STATES,
    ROUTER_BIAS,
    UNGATED,
    experts,
    shared,
    without,
)

_WHOLE = "recurrent layers hold a state of all their channels"
_NO_FF = "its layers have no feed-forward part"
_SSM_KEYS = {
    "ssm.conv_kernel": "conv",
    "ssm.inner_size": "inner",
    "ssm.state_size": "state",
    "ssm.time_step_rank": "time rank",
}
_GROUPED = {**_SSM_KEYS, "ssm.group_count": "groups"}
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
# Delta attention with a decay for each value (KDA), next to attention with a latent vector.
_KDA: Table = {
    **_NORM,
    **{f"ssm_conv1d_{part}.weight": ("q", 1, "conv") for part in "qkv"},
    **{f"attn_{part}.weight": ("q", "embd") for part in "qkv"},
    "ssm_beta.weight": ("heads", "embd"),
    "ssm_a": ("heads", 1),
    "ssm_dt.bias": ("q",),
    "ssm_norm.weight": ("head",),
    "attn_output.weight": ("embd", "q"),
    **FFN_NORM,
}
_KDA_KEYS = {**LATENT_KEYS, "ssm.conv_kernel": "conv", "kda.head_dim": "head", "expert_shared_count": 1}
_KDA_FIGURES = {"conv": 4, "attention_every": 4, "dense_layers": 1}
_RWKV_6_QWEN_2: Table = {
    **_NORM,
    "time_mix_w1.weight": (40, "embd"),
    "time_mix_w2.weight": (5, "embd", 8),
    "time_mix_lerp_x.weight": ("embd",),
    "time_mix_lerp_fused.weight": (5, 1, 1, "embd"),
    "time_mix_decay.weight": ("embd",),
    "time_mix_decay_w1.weight": (8, "embd"),
    "time_mix_decay_w2.weight": ("embd", 8),
    **{f"time_mix_{part}.weight": ("embd", "embd") for part in ("key", "value", "receptance", "gate", "output")},
    **{f"time_mix_{part}.bias": ("embd",) for part in ("key", "value", "receptance")},
    **FFN_NORM,
}
_SHARED_GATED: Table = {**experts("expert ff"), **shared(), "ffn_gate_inp_shexp.weight": ("embd",)}
_SHARED_KEYS = {"expert_shared_feed_forward_length": "shared ff"}
_DELTA_KEYS = {**_GROUPED, "ssm.inner_size": "delta values"}
_DELTA_FIGURES = {"attention_every": 4, "conv": 4, "rope_base": 1e6, "rms_eps": 1e-6}
_SIZES = {"conv": 4}
_PLAMO_2_NORMS: Table = {"post_attention_norm": ("embd",), **FFN_NORM, "post_ffw_norm": ("embd",)}


def _rules(**more: object) -> Rules:
    return Rules(**{"whole_attention": _WHOLE, "rolls_back": False, **more})  # type: ignore[arg-type]


_NEMOTRON_H = Architecture(
    ATTENTION, UNGATED, recurrent=_MAMBA_2, alone=_NORM, common={**_SIZES, "attention_every": 4},
    keys={**_GROUPED, **LAYER_NORM},
    rules=_rules(
        rolls_back=True, end_node="nemotron_h_block_out-{}", no_shards="not every layer has a feed-forward part"
    ),
    rope=UNCHECKED,
)  # fmt: skip

RECURRENT_ARCHITECTURES: Mapping[str, Architecture] = {
    "qwen35": Architecture(
        _GATED, DENSE, recurrent=_DELTA_35, common=_DELTA_FIGURES, keys={**_DELTA_KEYS, **MROPE},
        rules=_rules(rolls_back=True, recurrent_every=4), rope=PART, predictors=Predictors(),
    ),
    "qwen35moe": Architecture(
        _GATED, experts=_SHARED_GATED, recurrent=_DELTA_35, common=_DELTA_FIGURES,
        keys={**_DELTA_KEYS, **MROPE, **_SHARED_KEYS}, rope=PART, predictors=EXPERTS_PREDICT,
        rules=_rules(rolls_back=True, recurrent_every=4, ff_key=EXPERT_KEY),
    ),
    "qwen3next": Architecture(
        _GATED, experts=_SHARED_GATED, recurrent={**_DELTA, "ssm_ba.weight": ("2 time rank", "embd")},
        common=_DELTA_FIGURES, keys={**_DELTA_KEYS, **_SHARED_KEYS},
        rules=_rules(recurrent_every=4, ff_key=EXPERT_KEY), rope=PART,
        predictors=Predictors(("ffn_gate_inp.weight",), cuts=True),
    ),
    "lfm2": Architecture(
        {**ATTENTION, **FFN_NORM, **HEAD_NORMS}, DENSE, recurrent=_SHORT, outer={"token_embd_norm.weight": ("embd",)},
        common={"attention_every": 3, "conv": 3}, keys={"shortconv.l_cache": "conv"}, square_q=True, rope=PART,
        rules=_rules(rolls_back=True),
    ),
    "lfm2moe": Architecture(
        {**ATTENTION, **FFN_NORM, **HEAD_NORMS}, DENSE, {**experts("expert ff"), **ROUTER_BIAS}, recurrent=_SHORT,
        outer={"token_embd_norm.weight": ("embd",)}, common={"attention_every": 3, "conv": 3, "dense_layers": 1},
        keys={"shortconv.l_cache": "conv", "expert_gating_func": 2}, square_q=True, rope=PART,
        rules=_rules(rolls_back=True, ff_key=EXPERT_KEY),
    ),
    "granitehybrid": Architecture(
        {**ATTENTION, **FFN_NORM}, DENSE, recurrent={**_MAMBA_2, **FFN_NORM}, common={**_SIZES, "attention_every": 3},
        keys={**_GROUPED, **GRANITE_SCALES}, rules=_rules(input_node="embd"), rope=PART, twice_as_wide=True,
    ),
    "nemotron_h": _NEMOTRON_H,
    "nemotron_h_moe": replace(
        _NEMOTRON_H, dense={},
        experts={
            **without(experts("expert ff"), "ffn_gate_exps.weight"),
            **without(shared(), "ffn_gate_shexp.weight"),
            **ROUTER_BIAS,
        },
        keys={**_NEMOTRON_H.keys, **_SHARED_KEYS},
    ),
    "falcon-h1": Architecture(
        {**ATTENTION, **_MAMBA_2, "ffn_norm": ("embd",)}, DENSE, common=_SIZES, keys=_GROUPED, rules=_rules(),
        rope=PART,
    ),
    "jamba": Architecture(
        {**ATTENTION, **FFN_NORM}, DENSE,
        recurrent={
            **_MAMBA,
            "ssm_dt_norm.weight": ("time rank",),
            "ssm_b_norm.weight": ("state",),
            "ssm_c_norm.weight": ("state",),
            **FFN_NORM,
        },
        common={**_SIZES, "attention_every": 3}, keys=_SSM_KEYS, square_q=True, rules=_rules(), rope=PART,
        twice_as_wide=True,
    ),
    "kimi-linear": Architecture(
        {
            **without(LATENT, "attn_q_a.weight", "attn_q_a_norm.weight", "attn_q_b.weight"),
            "attn_q.weight": ("q", "embd"),
            **FFN_NORM,
        },
        DENSE, {**experts("expert ff"), **shared(), **ROUTER_BIAS},
        recurrent={
            **_KDA,
            "ssm_f_a.weight": ("head", "embd"),
            "ssm_f_b.weight": ("q", "head"),
            "ssm_g_a.weight": ("head", "embd"),
            "ssm_g_b.weight": ("q", "head"),
        },
        common=_KDA_FIGURES, keys={**_KDA_KEYS, "expert_gating_func": 2, "expert_weights_scale": 2.5},
        never_tied=True, rope=UNCHECKED,
        rules=_rules(ff_key=EXPERT_KEY, needs_output=True, shared_sum="ffn_out-{}", no_states=NO_LATENT_STATES),
    ),
    "bailingmoe3": Architecture(
        {**LATENT, "attn_gate.weight": ("heads", "embd"), **FFN_NORM}, DENSE,
        {**experts("expert ff"), **shared(), **ROUTER_BIAS},
        recurrent={**_KDA, "ssm_f_a.weight": ("q", "embd"), "ssm_g_a.weight": ("q", "embd")}, common=_KDA_FIGURES,
        keys={**_KDA_KEYS, "expert_gating_func": 2, "expert_weights_scale": 2.5, "kda.gate_lower_bound": -5.0},
        rules=_rules(rolls_back=True, ff_key=EXPERT_KEY, no_states=NO_LATENT_STATES), rope=UNCHECKED,
    ),
    "plamo2": Architecture(
        {
            **_NORM,
            "attn_qkv.weight": ("qkv", "embd"),
            "attn_q_norm.weight": ("heads", "head"),
            "attn_k_norm.weight": ("kv heads", "head"),
            "attn_output.weight": ("embd", "q"),
            **_PLAMO_2_NORMS,
        },
        GATE_UP,
        recurrent={
            **without(_MAMBA, "ssm_conv1d.bias"),
            "ssm_x.weight": ("pace and states", "inner"),
            "ssm_dt.weight": ("time rank", "pace"),
            "ssm_dt.bias": ("time rank",),
            "ssm_a": ("time rank",),
            "ssm_d": ("time rank",),
            "ssm_dt_norm": ("pace",),
            "ssm_b_norm": ("state",),
            "ssm_c_norm": ("state",),
            **_PLAMO_2_NORMS,
        },
        common={**_SIZES, "attention_every": 2}, keys={**_SSM_KEYS, "ssm.group_count": 0},
        rules=_rules(end_node="ffn_residual-{}", fused_gate_up=True), rope=UNCHECKED,
        counts={"ssm.group_count": (0, 0, 0)},
    ),
    "rwkv6qwen2": Architecture(
        {}, DENSE, recurrent=_RWKV_6_QWEN_2,
        keys={"wkv.head_size": "head", "time_mix_extra_dim": 8, "time_decay_extra_dim": 8, "token_shift_count": 1},
        never_tied=True, rules=_rules(needs_output=True, no_shards=_WHOLE), rope=UNCHECKED,
    ),
    "mamba": Architecture(
        {}, recurrent=_MAMBA, common=_SIZES, keys=_SSM_KEYS, rules=_rules(no_shards=_NO_FF), rope=UNCHECKED,
    ),
    "mamba2": Architecture(
        {}, recurrent=_MAMBA_2, common=_SIZES, keys=_GROUPED, rules=_rules(no_shards=_NO_FF), rope=UNCHECKED,
    ),
}  # fmt: skip
