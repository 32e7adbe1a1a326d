"""Test published configurations of the families: old and new spellings, missing values, nulls."""

from typing import Any

import pytest

from quant.checkpoint.families import read_model
from quant.checkpoint.metadata import model_pairs
from quant.checkpoint.rope import rope_factors
from quant.errors import ModelFileError
from quant.gguf.writer import encoded

LLAMA_3_ROPE = {
    "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}  # fmt: skip
CONFIGS: dict[str, tuple[dict[str, Any], dict[str, tuple[str, Any]]]] = {
    "Llama 2 7B": (
        {"architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 11008, "hidden_act": "silu",
         "max_position_embeddings": 4096, "num_attention_heads": 32, "num_hidden_layers": 32, "pretraining_tp": 1,
         "num_key_value_heads": 32, "rms_norm_eps": 1e-05, "rope_scaling": None, "tie_word_embeddings": False,
         "vocab_size": 32000},
        {"attention.key_length": ("u32", 128), "rope.freq_base": ("f32", 10000.0), "context_length": ("u32", 4096)},
    ),
    "Llama 3.2 1B": (
        {"architectures": ["LlamaForCausalLM"], "attention_bias": False, "head_dim": 64, "hidden_act": "silu",
         "hidden_size": 2048, "intermediate_size": 8192, "max_position_embeddings": 131072, "mlp_bias": False,
         "num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
         "rope_scaling": LLAMA_3_ROPE, "rope_theta": 500000.0, "tie_word_embeddings": True, "vocab_size": 128256},
        {"attention.head_count_kv": ("u32", 8), "rope.freq_base": ("f32", 500000.0)},
    ),
    "Mistral 7B v0.1": (
        {"architectures": ["MistralForCausalLM"], "hidden_act": "silu", "hidden_size": 4096,
         "intermediate_size": 14336, "max_position_embeddings": 32768, "num_attention_heads": 32,
         "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
         "sliding_window": 4096, "tie_word_embeddings": False, "vocab_size": 32000},
        {"context_length": ("u32", 4096), "attention.head_count_kv": ("u32", 8)},
    ),
    "Qwen2.5 0.5B": (
        {"architectures": ["Qwen2ForCausalLM"], "hidden_act": "silu", "hidden_size": 896, "intermediate_size": 4864,
         "max_position_embeddings": 32768, "max_window_layers": 21, "num_attention_heads": 14,
         "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
         "sliding_window": 32768, "tie_word_embeddings": True, "use_sliding_window": False, "vocab_size": 151936},
        {"context_length": ("u32", 32768), "rope.freq_base": ("f32", 1e6), "attention.key_length": ("u32", 64)},
    ),
    "Qwen3 30B A3B": (
        {"architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "decoder_sparse_step": 1, "head_dim": 128,
         "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 6144, "max_position_embeddings": 40960,
         "mlp_only_layers": [], "moe_intermediate_size": 768, "norm_topk_prob": True, "num_attention_heads": 32,
         "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4,
         "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000.0, "sliding_window": None,
         "tie_word_embeddings": False, "use_sliding_window": False, "vocab_size": 151936},
        {"expert_count": ("u32", 128), "expert_used_count": ("u32", 8), "expert_feed_forward_length": ("u32", 768)},
    ),
    "Gemma 2B": (
        {"architectures": ["GemmaForCausalLM"], "head_dim": 256, "hidden_act": "gelu", "hidden_activation": None,
         "hidden_size": 2048, "intermediate_size": 16384, "max_position_embeddings": 8192, "num_attention_heads": 8,
         "num_hidden_layers": 18, "num_key_value_heads": 1, "rms_norm_eps": 1e-06, "rope_scaling": None,
         "rope_theta": 10000.0, "vocab_size": 256000},
        {"attention.head_count_kv": ("u32", 1), "attention.key_length": ("u32", 256)},
    ),
    "Gemma 2 27B": (
        {"architectures": ["Gemma2ForCausalLM"], "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
         "head_dim": 128, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 4608, "intermediate_size": 36864,
         "max_position_embeddings": 8192, "num_attention_heads": 32, "num_hidden_layers": 46,
         "num_key_value_heads": 16, "query_pre_attn_scalar": 144, "rms_norm_eps": 1e-06, "rope_theta": 10000.0,
         "sliding_window": 4096, "vocab_size": 256000},
        {"attention.sliding_window": ("u32", 4096), "attn_logit_softcapping": ("f32", 50.0)},
    ),
    "Gemma 3 4B": (
        {"architectures": ["Gemma3ForConditionalGeneration"], "eos_token_id": [1, 106],
         "text_config": {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
                         "num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                         "sliding_window": 1024},
         "vision_config": {"hidden_size": 1152}},
        {"vocab_size": ("u32", 262208), "attention.head_count": ("u32", 8), "rope.freq_base": ("f32", 1e6),
         "rope.freq_base_swa": ("f32", 1e4), "rope.scaling.factor": ("f32", 8.0),
         "attention.sliding_window": ("u32", 1024), "context_length": ("u32", 131072)},
    ),
}  # fmt: skip
WITHOUT = {
    "Llama 2 7B": "rope.scaling.type", "Llama 3.2 1B": "rope.scaling.type", "Qwen2.5 0.5B": "attention.sliding_window",
    "Gemma 2 27B": "attention.sliding_window_pattern", "Gemma 3 4B": "attention.sliding_window_pattern",
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_published_configurations(name: str) -> None:
    values, expected = CONFIGS[name]
    model = read_model(values)
    pairs = model_pairs(model)
    for key, (kind, value) in expected.items():
        assert pairs[f"{model.arch}.{key}"] == encoded(kind, value), key
    assert f"{model.arch}.{WITHOUT.get(name)}" not in pairs


def test_factors_of_llama_3() -> None:
    factors = rope_factors(read_model(CONFIGS["Llama 3.2 1B"][0]))
    assert len(factors) == 32
    assert factors[:15] == pytest.approx([1.0] * 15)  # those that turn more than 4 times in 8192 tokens
    assert factors[-12:] == pytest.approx([32.0] * 12)  # less than once
    assert factors == sorted(factors)
    assert rope_factors(read_model(CONFIGS["Llama 2 7B"][0])) == []


@pytest.mark.parametrize("high", [0.5, 1.0, 1.0 + 1e-9, 4.0])
def test_bounds_of_llama_3_leave_something_between_them(high: float) -> None:
    rope = {**LLAMA_3_ROPE, "low_freq_factor": 1.0, "high_freq_factor": high}
    model = read_model({**CONFIGS["Llama 3.2 1B"][0], "rope_scaling": rope})
    if high > 1.0:
        assert set(rope_factors(model)) >= {1.0, 32.0}
    else:
        with pytest.raises(
            ModelFileError, match=f"high_freq_factor is {high:g}, but must be more than low_freq_factor"
        ):
            rope_factors(model)
