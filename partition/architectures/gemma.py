"""Gemma's architectures. The head is the token table, and hidden states are scaled before the first layer."""

from collections.abc import Mapping

from partition.architectures.description import PART, UNCHECKED, Architecture, Rules, Table, Window
from partition.architectures.tensors import DENSE, FFN_NORM, HEAD_NORMS, LLAMA, POST_NORMS, experts, without

_GEMMA = {"tied": True, "rms_eps": 1e-6}
_GEMMA_4: Table = {**POST_NORMS, **HEAD_NORMS, "layer_output_scale.weight": (1,)}
_HEAD_SIZES = ("attention.key_length", "attention.value_length", "rope.dimension_count")

GEMMA_ARCHITECTURES: Mapping[str, Architecture] = {
    "gemma": Architecture(
        LLAMA, DENSE, common=_GEMMA, always_tied=True, rules=Rules(scales_input=True), rope=PART, plain=True,
        default_window=1,
    ),
    "gemma2": Architecture(
        {**LLAMA, **POST_NORMS}, DENSE,
        common={**_GEMMA, "window": 4096, "attn_softcap": 50.0, "final_softcap": 30.0}, always_tied=True,
        rules=Rules(window=Window(2), scales_input=True, layers_of_other_scale=46), rope=PART, plain=True,
        default_window=1,
    ),
    "gemma3": Architecture(
        {**LLAMA, **POST_NORMS, **HEAD_NORMS}, DENSE, common={**_GEMMA, "window": 512, "rope_base": 1e6},
        rules=Rules(window=Window(6, optional=True), scales_input=True, layers_of_other_scale=62), rope=PART,
        plain=True, default_window=1,
    ),
    # Layers with a window have smaller heads. Layers without a window use their keys as values, too.
    "gemma4": Architecture(
        {**without(LLAMA, "attn_v.weight"), **_GEMMA_4}, DENSE,
        {
            **DENSE,
            **experts("expert ff"),
            "ffn_gate_inp.scale": ("embd",),
            "pre_ffw_norm_2.weight": ("embd",),
            "post_ffw_norm_1.weight": ("embd",),
            "post_ffw_norm_2.weight": ("embd",),
        },
        windowed={
            "attn_norm.weight": ("embd",),
            "attn_q.weight": ("half q", "embd"),
            "attn_k.weight": ("half kv", "embd"),
            "attn_v.weight": ("half kv", "embd"),
            "attn_output.weight": ("embd", "half q"),
            **FFN_NORM,
            **_GEMMA_4,
            "attn_q_norm.weight": ("half head",),
            "attn_k_norm.weight": ("half head",),
        },
        outer={"output_norm.weight": ("embd",), "rope_freqs.weight": ("half head",)},
        common={**_GEMMA, "window": 1024, "rope_base": 1e6, "final_softcap": 30.0},
        keys={
            "embedding_length_per_layer_input": 0,
            "rope.freq_base_swa": 1e4,
            **{f"{key}_swa": "half head" for key in _HEAD_SIZES},
        },
        rules=Rules(
            window=Window(6, listed=True, both=True), scales_input=True,
            whole_with={
                "embedding_length_per_layer_input": "each layer reads a part of `inp_per_layer`, which llama.cpp makes "
                "of the token and of what the first layer is given (`inp_scaled`), and a later stage is not given",
                "attention.shared_kv_layers": "its last layers read the keys and values of earlier ones",
            },
            whole_attention="its layers have heads of two sizes",
        ),
        rope=UNCHECKED,
    ),
}  # fmt: skip
