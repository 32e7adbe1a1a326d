"""Architectures with experts whose layers select attended tokens by an index. The most downloaded ones come first."""

from collections.abc import Mapping
from dataclasses import replace

from partition.architectures.description import UNCHECKED, Architecture, Number, Rules, Table, Window
from partition.architectures.moe import EXPERTS_PREDICT, MOE_ARCHITECTURES
from partition.architectures.tensors import (  # fmt: skip
    DENSE,
    EXPERT_KEY,
    FFN_NORM,
    HEAD_NORMS,
    LATENT,
    LATENT_KEYS,
    LEADING,
    LLAMA,
    ONE_LATENT_STATE,
    ROUTER_BIAS,
    SIGMOID,
    TURNED_OTHERWISE,
    experts,
    shared,
)

_DEEPSEEK_2 = MOE_ARCHITECTURES["deepseek2"]
# Tensors of the index that selects the attended tokens of a layer.
_INDEX: Table = {
    "indexer.k_norm.weight": (64,),
    "indexer.k_norm.bias": (64,),
    "indexer.proj.weight": (4, "embd"),
    "indexer.attn_k.weight": (64, "embd"),
    "indexer.attn_q_b.weight": (256, "q rank"),
}
_INDEX_STATES = "an index is kept in addition to keys and values"
_INDEX_KEYS: dict[str, Number] = {
    "attention.indexer.head_count": 4,
    "attention.indexer.key_length": 64,
    "attention.indexer.top_k": 16,
}
_DOTS_3: Table = {
    **LATENT,
    "attn_k_norm.weight": ("half head",),
    "attn_gate.weight": ("heads", "embd"),
    **FFN_NORM,
}
_DEEPSEEK_32 = replace(
    _DEEPSEEK_2,
    attention={**_DEEPSEEK_2.attention, **_INDEX},
    keys={**_DEEPSEEK_2.keys, **_INDEX_KEYS},
    rules=Rules(ff_key=EXPERT_KEY, shared_sum="ffn_out-{}", whole_attention=ONE_LATENT_STATE, no_states=_INDEX_STATES),
    rope=UNCHECKED,
    predictors=EXPERTS_PREDICT,
)
_GLM_DSA = replace(_DEEPSEEK_32, rules=replace(_DEEPSEEK_32.rules, shares_index=True), rope=UNCHECKED)

INDEXED_ARCHITECTURES: Mapping[str, Architecture] = {
    "deepseek32": _DEEPSEEK_32,
    "glm-dsa": _GLM_DSA,
    "minimax-m3": Architecture(
        {**LLAMA, **HEAD_NORMS}, DENSE,
        {
            **experts("expert ff"),
            **shared(),
            **ROUTER_BIAS,
            "indexer.q_proj.weight": (128, "embd"),
            "indexer.k_proj.weight": (64, "embd"),
            "indexer.q_norm.weight": (64,),
            "indexer.k_norm.weight": (64,),
        },
        common=LEADING,
        keys={
            **SIGMOID,
            **_INDEX_KEYS,
            "expert_shared_count": 1,
            "attention.indexer.head_count": 2,
            "attention.indexer.block_size": 16,
            "attention.indexer.local_blocks": 1,
        },
        never_tied=True,
        rules=Rules(
            needs_output=True, ff_key=EXPERT_KEY, shared_sum="ffn_out-{}",
            whole_attention="an index of all heads selects the tokens that layers attend to", no_states=_INDEX_STATES,
        ),
        rope=UNCHECKED,
    ),
    "dots3note": Architecture(
        {**_DOTS_3, **_INDEX}, DENSE, {**experts("expert ff"), **shared(), **ROUTER_BIAS}, windowed=_DOTS_3,
        common={**LEADING, "window": 128},
        keys={
            **LATENT_KEYS,
            **_INDEX_KEYS,
            **SIGMOID,
            **TURNED_OTHERWISE,
            "expert_shared_count": 1,
            "attention.kv_lora_rank_swa": "kv rank",
            "attention.key_length_mla_swa": "head",
            "attention.value_length_mla_swa": "head",
        },
        rules=Rules(
            ff_key=EXPERT_KEY, shared_sum="ffn_out-{}", window=Window(4, listed=True, both=True),
            whole_attention=ONE_LATENT_STATE, no_states=_INDEX_STATES,
        ),
        rope=UNCHECKED,
    ),
}  # fmt: skip
