"""Architectures whose layers have attention and one feed-forward part. The most downloaded ones come first."""

from collections.abc import Mapping

from partition.architectures.description import PART, UNCHECKED, Architecture, Rules, Window
from partition.architectures.gemma import GEMMA_ARCHITECTURES
from partition.architectures.tensors import (  # fmt: skip
    ATTENTION,
    DENSE,
    FFN_NORM,
    FUSED,
    GATE_UP,
    GPT,
    GPT_DENSE,
    GRANITE_SCALES,
    HEAD_NORMS,
    LAYER_NORM,
    LLAMA,
    MROPE,
    NORM_BIASES,
    OUTER_BIASED,
    POST_NORMS,
    QKV_BIAS,
    QWEN,
    SQUARE,
    UNGATED,
    UNGATED_BIAS,
    WIDE,
    WIDE_NORMS,
    experts,
    without,
)

# Qwen 2 and Phi-3 require attn_q to be n_embd x n_embd. EXAONE's graph is the same except for the order of a product or
# a scale. It has the same rotation (NEOX, unlike llama's), and any number and size of heads. The graphs of InternLM 2
# and Xverse are llama's.
_SQUARE_Q_AS = "exaone"
_ALIBI = "the ALiBi slope of a head depends on its number among all heads"
_HALF_TURNED = {"rope.dimension_count": "half head"}
_PHI_3 = Architecture(
    {**FUSED, **FFN_NORM}, GATE_UP, common={"window": 2047}, square_q=True,
    rules=Rules(fused_gate_up=True, shards_as=_SQUARE_Q_AS), rope=PART, plain=True,
)  # fmt: skip
_WITHOUT_NORMS = without(ATTENTION, "attn_norm.weight")
_BIASED = {**ATTENTION, **FFN_NORM, **NORM_BIASES, **QKV_BIAS, "attn_output.bias": ("embd",)}
_XVERSE = Architecture(
    LLAMA, DENSE, square_q=True, never_tied=True, rules=Rules(needs_output=True, shards_as="llama"),
)  # fmt: skip
_POSITIONS = {"position_embd.weight": ("context", "embd")}

DENSE_ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(LLAMA, DENSE, experts("ff"), plain=True),
    "qwen2": Architecture(
        {**LLAMA, **QKV_BIAS}, DENSE, common=QWEN, square_q=True, rules=Rules(shards_as=_SQUARE_Q_AS), plain=True,
    ),
    "qwen3": Architecture({**LLAMA, **HEAD_NORMS}, DENSE, common=QWEN, plain=True),
    **GEMMA_ARCHITECTURES,
    "phi3": _PHI_3,
    "mistral3": Architecture(LLAMA, DENSE),
    "qwen2vl": Architecture(
        {**LLAMA, **QKV_BIAS}, DENSE, common=QWEN, keys=MROPE, square_q=True, rules=Rules(whole_attention=SQUARE),
    ),
    "qwen3vl": Architecture(
        {**LLAMA, **HEAD_NORMS}, DENSE, common=QWEN, keys=MROPE, rules=Rules(deepstack=True),
    ),
    "smollm3": Architecture(LLAMA, DENSE, rules=Rules(period=4)),
    "granite": Architecture(LLAMA, DENSE, keys=GRANITE_SCALES, rules=Rules(input_node="embd")),
    "glm4": Architecture(
        {**LLAMA, **QKV_BIAS, **POST_NORMS}, GATE_UP, keys=_HALF_TURNED,
        rules=Rules(fused_gate_up=True, input_node="embd", takes_tokens=True), rope=PART,
    ),
    "hunyuan-dense": Architecture({**LLAMA, **HEAD_NORMS}, DENSE, one_expert_is_dense=True),
    "hunyuan_vl": Architecture({**LLAMA, **HEAD_NORMS}, DENSE, one_expert_is_dense=True),
    "ernie4_5": Architecture(LLAMA, DENSE),
    "paddleocr": Architecture(LLAMA, DENSE, keys=MROPE, rope=UNCHECKED),
    "granite_swa": Architecture(
        {**LLAMA, "attn_sinks.weight": ("heads",)}, DENSE, common={"window": 4096}, keys=GRANITE_SCALES,
        rules=Rules(input_node="embd", window=Window(4, listed=True), period=4), rope=UNCHECKED,
    ),
    "exaone": Architecture(LLAMA, DENSE),
    "exaone4": Architecture(
        {**_WITHOUT_NORMS, **POST_NORMS, **HEAD_NORMS}, DENSE, square_q=True,
        rules=Rules(layers_of_other_kind=(64,), whole_attention=SQUARE),
    ),
    "olmo2": Architecture(
        {**_WITHOUT_NORMS, **POST_NORMS, **WIDE_NORMS}, DENSE, square_q=True,
        rules=Rules(needs_output=True, window=Window(4, optional=True), whole_attention=WIDE.format("olmo2")),
    ),
    "seed_oss": Architecture({**ATTENTION, **QKV_BIAS, "post_attention_norm.weight": ("embd",)}, DENSE),
    "cohere2": Architecture(
        ATTENTION, DENSE, common={"window": 4096, "tied": True}, keys={**LAYER_NORM, "logit_scale": 0.25},
        square_q=True, always_tied=True, rules=Rules(window=Window(4), period=4, whole_attention=SQUARE), rope=PART,
    ),
    "command-r": Architecture(
        ATTENTION, DENSE, common={"tied": True}, keys={**LAYER_NORM, "logit_scale": 0.0625}, square_q=True,
        always_tied=True, rules=Rules(other_kind_from=64, whole_attention=SQUARE), rope=PART,
    ),
    "apertus": Architecture(
        {**LLAMA, **HEAD_NORMS}, UNGATED,
        keys={"xielu.alpha_n": 0.8, "xielu.alpha_p": 0.8, "xielu.beta": 0.5, "xielu.eps": -1e-6}, never_tied=True,
        rules=Rules(needs_output=True),
    ),
    "arcee": Architecture(LLAMA, UNGATED),
    "internlm2": _XVERSE,
    "xverse": _XVERSE,
    "minicpm": Architecture(LLAMA, DENSE, rules=Rules(input_node="embd", by_root_of_layers={"residual_scale": 1.4})),
    "plm": Architecture(
        {
            "attn_norm.weight": ("embd",),
            "attn_q.weight": ("q", "embd"),
            "attn_kv_a_mqa.weight": ("latent", "embd"),
            "attn_kv_a_norm.weight": ("kv rank",),
            "attn_kv_b.weight": ("unturned and value", "kv rank"),
            "attn_output.weight": ("embd", "q"),
            **FFN_NORM,
        },
        UNGATED, common={"tied": True}, keys={"attention.kv_lora_rank": "kv rank", **_HALF_TURNED}, equal_heads=True,
        always_tied=True, rules=Rules(whole_attention="all heads share one latent state"), rope=UNCHECKED,
        flash=False,
    ),
    "pangu-embedded": Architecture({**LLAMA, **QKV_BIAS, "attn_output.bias": ("embd",)}, DENSE),
    "maincoder": Architecture({**LLAMA, **HEAD_NORMS}, DENSE),
    "phi2": Architecture(
        {**ATTENTION, **QKV_BIAS, "attn_norm.bias": ("embd",), "attn_output.bias": ("embd",)}, GPT_DENSE,
        outer={**OUTER_BIASED, "output.bias": ("vocab",)}, keys={**LAYER_NORM, **_HALF_TURNED}, square_q=True,
        never_tied=True, rules=Rules(needs_output=True, needs_bias=True, whole_attention=SQUARE), rope=PART,
    ),
    "stablelm": Architecture(
        {**ATTENTION, **FFN_NORM, **NORM_BIASES}, DENSE, outer=OUTER_BIASED, keys={**LAYER_NORM, **_HALF_TURNED},
        square_q=True, never_tied=True, rules=Rules(needs_output=True, whole_attention=SQUARE), rope=PART,
    ),
    "starcoder2": Architecture(
        _BIASED, GPT_DENSE, outer=OUTER_BIASED, keys=LAYER_NORM, square_q=True, rules=Rules(whole_attention=SQUARE),
    ),
    "gpt2": Architecture(
        GPT, GPT_DENSE, outer={**_POSITIONS, **OUTER_BIASED}, keys=LAYER_NORM, square_q=True,
        rules=Rules(input_node="inpL", whole_attention=SQUARE), rope=PART,
    ),
    "gptneox": Architecture(
        GPT, GPT_DENSE, outer=OUTER_BIASED, keys={**LAYER_NORM, **_HALF_TURNED, "use_parallel_residual": True},
        square_q=True, never_tied=True, rules=Rules(needs_output=True, whole_attention=SQUARE), rope=PART,
    ),
    "falcon": Architecture(
        {**FUSED, "attn_norm.bias": ("embd",)}, UNGATED, outer=OUTER_BIASED, keys=LAYER_NORM, square_q=True,
        rules=Rules(whole_attention=SQUARE),
    ),
    "bloom": Architecture(
        GPT, GPT_DENSE,
        outer={"token_embd_norm.weight": ("embd",), "token_embd_norm.bias": ("embd",), **OUTER_BIASED},
        keys=LAYER_NORM, square_q=True, rules=Rules(input_node="inp_norm-0", whole_attention=_ALIBI), rope=PART,
    ),
    "mpt": Architecture(
        {**FUSED, **FFN_NORM}, UNGATED, keys={**LAYER_NORM, "attention.max_alibi_bias": 8.0}, square_q=True,
        rules=Rules(input_node="inpL", whole_attention=_ALIBI), rope=PART,
    ),
    "starcoder": Architecture(
        GPT, GPT_DENSE, outer={**_POSITIONS, **OUTER_BIASED}, keys=LAYER_NORM, square_q=True,
        rules=Rules(input_node="inpL", whole_attention=SQUARE), rope=PART,
    ),
    "qwen": Architecture(
        {**FUSED, **FFN_NORM, "attn_qkv.bias": ("qkv",)},
        {
            "ffn_gate.weight": ("half ff", "embd"),
            "ffn_up.weight": ("half ff", "embd"),
            "ffn_down.weight": ("embd", "half ff"),
        },
        equal_heads=True, square_q=True, never_tied=True, rules=Rules(needs_output=True, whole_attention=SQUARE),
        rope=PART,
    ),
    "orion": Architecture(
        {**LLAMA, **NORM_BIASES}, DENSE, outer=OUTER_BIASED, keys=LAYER_NORM, square_q=True, never_tied=True,
        rules=Rules(needs_output=True, whole_attention=SQUARE),
    ),
    "olmo": Architecture(
        _WITHOUT_NORMS, DENSE, outer={}, keys=LAYER_NORM, square_q=True, rules=Rules(whole_attention=SQUARE),
    ),
    "nemotron": Architecture(
        {**LLAMA, **NORM_BIASES}, UNGATED, outer=OUTER_BIASED, keys={**LAYER_NORM, **_HALF_TURNED}, square_q=True,
        never_tied=True, rules=Rules(needs_output=True, whole_attention=SQUARE), rope=PART,
    ),
    "chatglm": Architecture(
        {**FUSED, **FFN_NORM, "attn_qkv.bias": ("qkv",)}, GATE_UP, keys=_HALF_TURNED, square_q=True,
        rules=Rules(fused_gate_up=True, whole_attention=SQUARE), rope=PART,
    ),
    "plamo": Architecture(
        ATTENTION, DENSE, square_q=True, never_tied=True, rules=Rules(needs_output=True, whole_attention=SQUARE),
    ),
    "plamo3": Architecture(
        {**FUSED, **FFN_NORM, **HEAD_NORMS, "post_attention_norm": ("embd",), "post_ffw_norm": ("embd",)}, GATE_UP,
        common={"window": 512}, rules=Rules(window=Window(8, optional=True), fused_gate_up=True), rope=PART,
    ),
    "bitnet": Architecture(
        {**LLAMA, "attn_sub_norm.weight": ("embd",), "ffn_sub_norm.weight": ("ff",)}, DENSE, common={"tied": True},
        square_q=True, always_tied=True,
        rules=Rules(no_shards="bitnet normalizes the input of the last product over all columns"), rope=PART,
    ),
    "refact": Architecture(LLAMA, DENSE, rules=Rules(whole_attention=_ALIBI), rope=PART),
    "codeshell": Architecture(
        _BIASED, GPT_DENSE, outer=OUTER_BIASED, keys=LAYER_NORM, square_q=True, never_tied=True,
        rules=Rules(needs_output=True, whole_attention=SQUARE),
    ),
    "deci": Architecture(LLAMA, DENSE),
    "openelm": Architecture(
        {**FUSED, **FFN_NORM, **HEAD_NORMS}, DENSE, common={"tied": True}, always_tied=True, rope=PART,
    ),
    "jais": Architecture(
        GPT, {**DENSE, **UNGATED_BIAS, "ffn_gate.bias": ("ff",)}, outer=OUTER_BIASED,
        keys={**LAYER_NORM, "attention.max_alibi_bias": 8.0}, square_q=True, never_tied=True,
        rules=Rules(needs_output=True, whole_attention=_ALIBI), rope=PART,
    ),
    "jais2": Architecture(_BIASED, GPT_DENSE, outer=OUTER_BIASED, keys=LAYER_NORM),
    "muse-glimmer": Architecture(
        {**LLAMA, **POST_NORMS, **HEAD_NORMS, "attn_gate.weight": ("q", "embd")}, DENSE, common={"window": 512},
        keys={"logit_scale": 1.0}, never_tied=True,
        rules=Rules(needs_output=True, window=Window(4), period=4, input_node="embd_norm"), rope=PART,
    ),
    "spark2_5": Architecture(
        {**LLAMA, "attn_gate.weight": ("heads", "embd")}, DENSE, common={"window": 1024},
        rules=Rules(window=Window(4, listed=True), period=4, whole_attention="attention has a gate of its own"),
        rope=UNCHECKED,
    ),
}  # fmt: skip
