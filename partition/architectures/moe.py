"""Architectures with experts, and attention in every layer. The most downloaded ones come first."""

from collections.abc import Mapping
from dataclasses import replace

from partition.architectures.description import (
    PART,
    UNCHECKED,
    Architecture,
    Number,
    Predictors,
    Rules,
    Window,
)
from partition.architectures.tensors import (  # fmt: skip
    ATTENTION,
    DENSE,
    EXPERT_KEY,
    FFN_NORM,
    FUSED,
    GRANITE_SCALES,
    HEAD_NORMS,
    LATENT,
    LATENT_KEYS,
    LAYER_NORM,
    LEADING,
    LLAMA,
    MROPE,
    NO_LATENT_STATES,
    NORM_BIASES,
    ONE_LATENT_STATE,
    OUTER_BIASED,
    POST_NORMS,
    QKV_BIAS,
    QWEN,
    ROUTER_BIAS,
    SIGMOID,
    SQUARE,
    TURNED_OTHERWISE,
    WIDE,
    WIDE_NORMS,
    experts,
    shared,
)

_YARN = {"rope_scaling": "yarn", "rope_factor": 32.0, "rope_context": 4096}
_SHARED_SUM = "ffn_out-{}"
_GATE = "attention has a gate of its own"
_SHARED: dict[str, Number] = {"expert_shared_count": 1, "expert_shared_feed_forward_length": "shared ff"}
_DEEPSEEK_2 = Architecture(
    {**LATENT, **FFN_NORM},
    DENSE,
    {**experts("expert ff"), **shared(), **ROUTER_BIAS},
    common=LEADING,
    keys={**LATENT_KEYS, **SIGMOID, "expert_shared_count": 1},
    rules=Rules(
        ff_key=EXPERT_KEY,
        no_stage_of=(26, 27, 48),  # "lite" models, whose queries have no low-rank projection
        guessed={"expert_gating_func": (47, 48)},
        if_missing={"attention.q_lora_rank": 0, "expert_gating_func": 1},
        shared_sum=_SHARED_SUM,
        whole_attention=ONE_LATENT_STATE,
        no_states=NO_LATENT_STATES,
    ),
    rope=UNCHECKED,
)

EXPERTS_PREDICT = Predictors(("ffn_gate_inp.weight",))
_LATENT_PREDICTOR = Predictors(
    (
        "attn_q_a.weight", "attn_kv_a_mqa.weight", "attn_k_b.weight", "ffn_gate_inp.weight", "ffn_down_exps.weight",
        "ffn_down_shexp.weight",
    ),
    zero=("attention.temperature_scale",),
)  # fmt: skip

MOE_ARCHITECTURES: Mapping[str, Architecture] = {
    "gpt-oss": Architecture(
        {
            **ATTENTION,
            **QKV_BIAS,
            "attn_output.bias": ("embd",),
            "attn_sinks.weight": ("heads",),
            "post_attention_norm.weight": ("embd",),
        },
        experts={
            **experts("expert ff"),
            "ffn_gate_inp.bias": ("experts",),
            "ffn_gate_exps.bias": ("experts", "expert ff"),
            "ffn_up_exps.bias": ("experts", "expert ff"),
            "ffn_down_exps.bias": ("experts", "embd"),
        },
        common={"window": 128, "rope_base": 150_000.0, **_YARN},
        rules=Rules(needs_output=True, ff_key=EXPERT_KEY, window=Window(2)), rope=PART,
    ),
    "qwen3moe": Architecture(
        {**LLAMA, **HEAD_NORMS}, experts=experts("expert ff"), common=QWEN, rules=Rules(ff_key=EXPERT_KEY),
        plain=True,
    ),
    "qwen2moe": Architecture(
        {**LLAMA, **QKV_BIAS}, experts={**experts("expert ff"), **shared(), "ffn_gate_inp_shexp.weight": ("embd",)},
        common=QWEN, keys={"expert_shared_feed_forward_length": "shared ff"}, square_q=True, never_tied=True,
        rules=Rules(needs_output=True, ff_key=EXPERT_KEY, whole_attention=SQUARE),
    ),
    "qwen3vlmoe": Architecture(
        {**LLAMA, **HEAD_NORMS}, experts=experts("expert ff"), common=QWEN, keys=MROPE,
        rules=Rules(ff_key=EXPERT_KEY, deepstack=True),
    ),
    "deepseek2": replace(_DEEPSEEK_2, predictors=_LATENT_PREDICTOR),
    "mistral4": _DEEPSEEK_2,
    "glm4moe": Architecture(
        {**ATTENTION, **QKV_BIAS, **HEAD_NORMS, "post_attention_norm.weight": ("embd",)}, DENSE,
        {**experts("expert ff"), **shared(), **ROUTER_BIAS}, common=LEADING,
        keys={**SIGMOID, "expert_shared_count": 1, "rope.dimension_count": "half head"},
        rules=Rules(ff_key=EXPERT_KEY, shared_sum=_SHARED_SUM, input_node="embd", takes_tokens=True), rope=PART,
        predictors=EXPERTS_PREDICT,
    ),
    "llama4": Architecture(
        LLAMA, DENSE, {**experts("expert ff"), **shared("expert ff")}, common={"expert_every": 2},
        keys={"interleave_moe_layer_step": "expert every"},
        rules=Rules(
            ff_key=EXPERT_KEY, shared_sum="ffn_moe_out_merged-{}", period=4,
            window=Window(4, optional=True, size=8192, chunked=True),
            period_key="interleave_moe_layer_step",
        ),
        needs_window=True,
    ),
    "granitemoe": Architecture(
        LLAMA, experts={**experts("ff"), **shared()},
        keys={**GRANITE_SCALES, "expert_shared_feed_forward_length": "shared ff"}, rules=Rules(input_node="embd"),
    ),
    "olmoe": Architecture(
        {**LLAMA, "attn_q_norm.weight": ("embd",), "attn_k_norm.weight": ("embd",)}, experts=experts("ff"),
        square_q=True, equal_heads=True, never_tied=True,
        rules=Rules(needs_output=True, whole_attention=WIDE.format("olmoe")),
    ),
    "ernie4_5-moe": Architecture(
        LLAMA, DENSE, {**experts("expert ff"), **shared(), **ROUTER_BIAS}, common=LEADING,
        keys={"expert_shared_feed_forward_length": "shared ff", "interleave_moe_layer_step": 1},
        rules=Rules(ff_key=EXPERT_KEY, period_key="interleave_moe_layer_step"),
        counts={"interleave_moe_layer_step": (1, 1, None)},
    ),
    "hunyuan-moe": Architecture(
        {**LLAMA, **HEAD_NORMS}, experts={**experts("ff"), **shared()},
        keys={"expert_shared_feed_forward_length": "shared ff", "expert_feed_forward_length": "ff"},
    ),
    "smallthinker": Architecture(
        LLAMA, experts=experts("expert ff"), common={"window": 4096}, keys={"expert_gating_func": 2},
        rules=Rules(
            ff_key=EXPERT_KEY, window=Window(4, optional=True, full_first=True), period=8, no_stage_of=(4,),
            experts_sum="ffn_out-{}",
        ),
        needs_gate=True,
    ),
    "minimax-m2": Architecture(
        {**LLAMA, **WIDE_NORMS}, experts={**experts("ff"), **ROUTER_BIAS},
        keys={"expert_gating_func": 2, "expert_feed_forward_length": "ff"}, never_tied=True,
        rules=Rules(needs_output=True, whole_attention=WIDE.format("minimax-m2")), rope=PART, needs_gate=True,
    ),
    "dots1": Architecture(
        {**LLAMA, **HEAD_NORMS}, DENSE, {**experts("expert ff"), **shared(), **ROUTER_BIAS}, common=LEADING,
        keys={**SIGMOID, "expert_shared_count": 1}, equal_heads=True, never_tied=True,
        rules=Rules(needs_output=True, ff_key=EXPERT_KEY, shared_sum=_SHARED_SUM), needs_gate=True,
    ),
    "phimoe": Architecture(
        {**LLAMA, **NORM_BIASES, **QKV_BIAS, "attn_output.bias": ("embd",)}, experts=experts("ff"),
        outer={**OUTER_BIASED, "output.bias": ("vocab",)}, square_q=True, never_tied=True,
        rules=Rules(needs_output=True, needs_bias=True, whole_attention=SQUARE), rope=PART,
    ),
    "dbrx": Architecture(
        {**FUSED, "attn_output_norm.weight": ("embd",)}, experts=experts("ff"),
        keys={**LAYER_NORM, "attention.clamp_kqv": 8.0}, square_q=True, never_tied=True,
        rules=Rules(needs_output=True, whole_attention=SQUARE),
    ),
    "grok": Architecture(
        {**LLAMA, "attn_output_norm.weight": ("embd",), "layer_output_norm.weight": ("embd",)},
        experts=experts("expert ff"), square_q=True,
        rules=Rules(ff_key=EXPERT_KEY, input_node="embd", whole_attention=SQUARE),
    ),
    "deepseek": Architecture(
        LLAMA, DENSE, {**experts("expert ff"), **shared()}, common=LEADING,
        keys={"expert_shared_count": 1, "expert_weights_scale": 1.0}, square_q=True,
        rules=Rules(ff_key=EXPERT_KEY, shared_sum=_SHARED_SUM, whole_attention=SQUARE),
    ),
    "deepseek2-ocr": Architecture(
        LLAMA, DENSE, {**experts("expert ff"), **shared()}, common=LEADING, keys={"expert_shared_count": 1},
        square_q=True, equal_heads=True,
        rules=Rules(ff_key=EXPERT_KEY, shared_sum=_SHARED_SUM, whole_attention=SQUARE), rope=UNCHECKED,
    ),
    "bailingmoe": Architecture(
        LLAMA, experts={**experts("expert ff"), **shared()},
        keys={"expert_shared_count": 1, "expert_weights_scale": 1.0}, never_tied=True,
        rules=Rules(needs_output=True, ff_key=EXPERT_KEY, shared_sum=_SHARED_SUM), rope=PART,
    ),
    "bailingmoe2": Architecture(
        {**FUSED, **FFN_NORM, **HEAD_NORMS}, DENSE, {**experts("expert ff"), **shared(), **ROUTER_BIAS},
        common=LEADING, keys={**SIGMOID, **_SHARED}, square_q=True, never_tied=True,
        rules=Rules(needs_output=True, ff_key=EXPERT_KEY, whole_attention=SQUARE), rope=PART,
    ),
    "exaone-moe": Architecture(
        {**LLAMA, **HEAD_NORMS}, DENSE, {**experts("expert ff"), **shared(), **ROUTER_BIAS},
        common={**LEADING, "window": 128}, keys={**SIGMOID, **_SHARED}, never_tied=True,
        rules=Rules(needs_output=True, ff_key=EXPERT_KEY, window=Window(4), period=4),
    ),
    "afmoe": Architecture(
        {**LLAMA, **POST_NORMS, **HEAD_NORMS, "attn_gate.weight": ("q", "embd")}, DENSE,
        {**experts("expert ff"), **shared(), **ROUTER_BIAS}, common={**LEADING, "window": 2048},
        keys={**SIGMOID, "expert_shared_count": 1},
        rules=Rules(
            ff_key=EXPERT_KEY, shared_sum=_SHARED_SUM, window=Window(4, optional=True), period=4,
            input_node="inp_embd_scaled", whole_attention=_GATE,
        ),
        rope=PART, needs_window=True,
    ),
    "step35": Architecture(
        {**LLAMA, **HEAD_NORMS, "attn_gate.weight": ("heads", "embd")}, DENSE,
        {**experts("expert ff"), **shared(), **ROUTER_BIAS}, common={**LEADING, "window": 512},
        keys={**SIGMOID, "expert_shared_feed_forward_length": "shared ff", **TURNED_OTHERWISE}, never_tied=True,
        rules=Rules(
            needs_output=True, ff_key=EXPERT_KEY, window=Window(4, full_first=True, listed=True), period=4,
            end_node="h_nextn", whole_attention=_GATE,
        ),
        rope=UNCHECKED, predictors=Predictors(most=16, cuts=True),
    ),
    "mimo2": Architecture(
        {**LLAMA, "attn_sinks.weight": ("heads",)}, DENSE, {**experts("expert ff"), **ROUTER_BIAS},
        common={**LEADING, "window": 128}, keys=TURNED_OTHERWISE, never_tied=True,
        rules=Rules(needs_output=True, ff_key=EXPERT_KEY, window=Window(4, listed=True), period=4), rope=UNCHECKED,
        predictors=Predictors(
            ("attn_qkv.weight", "ffn_gate.weight", "ffn_up.weight", "ffn_down.weight"), most=16, cuts=True,
        ),
    ),
    "laguna": Architecture(
        {**LLAMA, **HEAD_NORMS, "attn_gate.weight": ("heads", "embd")}, DENSE,
        {**experts("expert ff"), **shared(), **ROUTER_BIAS}, common={**LEADING, "window": 512},
        keys={**SIGMOID, **_SHARED, **TURNED_OTHERWISE},
        rules=Rules(
            ff_key=EXPERT_KEY, window=Window(4, optional=True, full_first=True), period=4, whole_attention=_GATE,
        ),
        rope=UNCHECKED,
    ),
    "maple": Architecture(
        {**LLAMA, **HEAD_NORMS}, experts=experts("expert ff"), common={"window": 128}, keys={"swiglu_clamp_exp": 7.0},
        never_tied=True, rules=Rules(needs_output=True, ff_key=EXPERT_KEY, window=Window(4, listed=True), period=4),
        rope=UNCHECKED,
    ),
    "arctic": Architecture(
        {
            **LLAMA,
            "ffn_gate.weight": ("embd", "embd"),
            "ffn_up.weight": ("embd", "embd"),
            "ffn_down.weight": ("embd", "embd"),
            "ffn_norm_exps.weight": ("embd",),
        },
        experts=experts("ff"), square_q=True,
        rules=Rules(no_shards="its layers have both experts and a feed-forward part"),
    ),
    "grovemoe": Architecture(
        {**LLAMA, **HEAD_NORMS},
        experts={
            **experts("expert ff"),
            "ffn_gate_chexps.weight": ("half experts", "shared ff", "embd"),
            "ffn_up_chexps.weight": ("half experts", "shared ff", "embd"),
            "ffn_down_chexps.weight": ("half experts", "embd", "shared ff"),
        },
        keys={"expert_group_scale": 0.05, "experts_per_group": 2, "expert_chunk_feed_forward_length": "shared ff"},
        rules=Rules(ff_key=EXPERT_KEY, no_shards="each group of experts has another expert that is added separately"),
    ),
    "mellum": Architecture(
        {**LLAMA, **HEAD_NORMS}, experts=experts("expert ff"), common={"window": 1024}, never_tied=True,
        rules=Rules(needs_output=True, ff_key=EXPERT_KEY, window=Window(4, optional=True)),
    ),
    "hy_v3": Architecture(
        {**LLAMA, **HEAD_NORMS}, DENSE, {**experts("expert ff"), **shared(), "exp_probs_b": ("experts",)},
        common=LEADING, keys={**SIGMOID, **_SHARED}, rules=Rules(ff_key=EXPERT_KEY), predictors=Predictors(most=16),
    ),
}  # fmt: skip
