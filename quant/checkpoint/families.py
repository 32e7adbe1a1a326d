"""Model families that can be converted: their keys in config.json, and the values that llama.cpp assumes.

A checkpoint is refused if its configuration needs something that llama.cpp does not compute. Otherwise the converted
model would run and give wrong answers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from quant.checkpoint.config import Config
from quant.errors import ModelFileError

MAX_LAYERS = 512  # llama.cpp's limit
_MAX_EXPERTS = 512
_MAX_WIDTH = 1 << 20


@dataclass(frozen=True, slots=True)
class Family:
    """A family of models, by its name in `architectures` of config.json."""

    arch: str  # llama.cpp's name
    activations: frozenset[str]
    defaults: Mapping[str, Any]  # values of the Hugging Face configuration class for keys that config.json lacks
    interleaved: bool = False  # llama.cpp rotates pairs of neighbours, the checkpoint the two halves of a head
    norm_offset: float = 0.0  # constant that the checkpoint subtracts from its norms
    post_norms: bool = False  # also has norms after attention and after the feed-forward network
    head_norms: bool = False  # has norms of the query and key of each head
    qkv_bias: bool = False
    square_q: bool = False  # the query matrix must be square
    experts: bool = False
    head: bool = True  # may have its own output matrix
    wrapped: bool = False  # is the text part of a larger model, in `text_config`


_SILU = frozenset({"silu", "swish"})
_GELU = frozenset({"gelu_pytorch_tanh", "gelu"})  # Gemma's first files say "gelu" but mean gelu_pytorch_tanh
_LLAMA = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "hidden_act": "silu"}
_MISTRAL = _LLAMA | {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096}
_QWEN = _LLAMA | {"max_position_embeddings": 32768, "num_key_value_heads": 32}
_QWEN_MOE = _QWEN | {"num_key_value_heads": 4, "num_experts_per_tok": 8,
                     "moe_intermediate_size": 768, "decoder_sparse_step": 1}  # fmt: skip
_GEMMA = {"max_position_embeddings": 8192, "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "head_dim": 256,
          "hidden_activation": "gelu_pytorch_tanh", "vocab_size": 256000}  # fmt: skip
_GEMMA_2 = _GEMMA | {"num_attention_heads": 8, "num_key_value_heads": 4, "query_pre_attn_scalar": 256,
                     "sliding_window": 4096, "attn_logit_softcapping": 50.0,
                     "final_logit_softcapping": 30.0}  # fmt: skip
_GEMMA_3 = _GEMMA | {"num_attention_heads": 8, "num_key_value_heads": 4, "query_pre_attn_scalar": 256,
                     "sliding_window": 4096, "max_position_embeddings": 131072, "vocab_size": 262208,
                     "rope_theta": 1e6, "rope_local_base_freq": 1e4}  # fmt: skip

_GEMMA_3_FAMILY = Family("gemma3", _GELU, _GEMMA_3, norm_offset=1.0, post_norms=True, head_norms=True)

FAMILIES: Mapping[str, Family] = MappingProxyType({
    "LlamaForCausalLM": Family("llama", _SILU, _LLAMA, interleaved=True),
    "MistralForCausalLM": Family("llama", _SILU, _MISTRAL, interleaved=True),
    "Qwen2ForCausalLM": Family("qwen2", _SILU, _QWEN, qkv_bias=True, square_q=True),
    "Qwen3ForCausalLM": Family("qwen3", _SILU, _QWEN | {"head_dim": 128}, head_norms=True),
    "Qwen3MoeForCausalLM": Family("qwen3moe", _SILU, _QWEN_MOE, head_norms=True, experts=True),
    "GemmaForCausalLM": Family("gemma", _GELU, _GEMMA | {"num_key_value_heads": 16}, norm_offset=1.0, head=False),
    "Gemma2ForCausalLM": Family("gemma2", _GELU, _GEMMA_2, norm_offset=1.0, post_norms=True, head=False),
    "Gemma3ForCausalLM": _GEMMA_3_FAMILY,
    "Gemma3ForConditionalGeneration": replace(_GEMMA_3_FAMILY, wrapped=True),
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Model:
    """Checked configuration of a model."""

    family: Family
    config: Config = field(repr=False)
    layers: int
    embd: int  # width of a hidden state
    ff: int  # width of the feed-forward network
    heads: int
    kv: int  # number of key-value heads
    head_size: int
    vocab: int
    tied: bool  # the token embeddings are also the output matrix
    experts: int  # 0 if there are none
    expert_ff: int
    experts_used: int

    @property
    def arch(self) -> str:
        """llama.cpp's name of the architecture."""
        return self.family.arch


def read_model(values: Mapping[str, Any]) -> Model:
    """Return the model that a config.json describes. Raises ModelFileError if it cannot be converted."""
    root = Config(values, {})
    names = root.items("architectures")
    family = FAMILIES.get(names[0]) if names and isinstance(names[0], str) else None
    if family is None:
        have = f"{names[0]!r:.80}" if names else "no architecture"
        raise root.error(f"{have} cannot be converted; supported are {', '.join(FAMILIES)}")
    config = root.layered("text_config" if family.wrapped else "", family.defaults)
    for owner in (root, config):
        if "quantization_config" in owner or "compression_config" in owner:
            how = owner.section("quantization_config").text("quant_method", "some way")
            raise root.error(f"the checkpoint is quantized ({how:.40}); get the original one, in BF16, F16 or F32")
    heads, embd = config.count("num_attention_heads", most=_MAX_WIDTH), config.count("hidden_size", most=_MAX_WIDTH)
    kv = heads if config.is_null("num_key_value_heads") else config.count("num_key_value_heads", heads)
    has_size = "head_dim" in config and not config.is_null("head_dim")
    if not has_size and embd % heads:
        raise config.error(f"hidden_size {embd} does not divide into {heads} heads")
    counted = "num_local_experts" if "num_local_experts" in config else "num_experts"  # key in newer and older files
    model = Model(
        family=family,
        config=config,
        layers=config.count("num_hidden_layers", most=MAX_LAYERS),
        embd=embd,
        ff=config.count("intermediate_size", most=1 << 24),
        heads=heads,
        kv=kv,
        head_size=config.count("head_dim", embd // heads or 1, most=_MAX_WIDTH) if has_size else embd // heads,
        vocab=config.count("vocab_size", most=1 << 24),
        tied=config.flag("tie_word_embeddings"),
        experts=config.count(counted, 128, most=_MAX_EXPERTS) if family.experts else 0,
        expert_ff=config.count("moe_intermediate_size", most=1 << 24) if family.experts else 0,
        experts_used=config.count("num_experts_per_tok", most=_MAX_EXPERTS) if family.experts else 0,
    )
    _check(model)
    return model


def _check(model: Model) -> None:
    """Raise ModelFileError for settings that llama.cpp would compute differently, or would abort at."""
    config, family = model.config, model.family
    wide = model.heads * model.head_size
    if model.heads % model.kv:
        raise config.error(f"{model.heads} heads do not divide into {model.kv} key-value heads")
    if model.head_size % 2:
        raise config.error(f"heads have {model.head_size} values, but rotation needs an even number")
    if family.square_q and wide != model.embd:
        raise config.error(f"{family.arch} needs heads x head_dim = hidden_size, got {wide} and {model.embd}")
    if not family.head and not model.tied:
        raise config.error(f"tie_word_embeddings is false, but {family.arch} has no output matrix in llama.cpp")
    for key in ("hidden_act", "hidden_activation"):
        if key in config and config.text(key) not in family.activations:
            have = config.text(key)
            raise config.error(
                f"{key} is {have!r:.40}, but {family.arch} needs {', '.join(sorted(family.activations))}"
            )
    if config.number("partial_rotary_factor", 1.0) != 1.0:
        raise config.error("partial_rotary_factor is not 1, but llama.cpp rotates whole heads here")
    if config.flag("use_bidirectional_attention"):
        raise config.error(
            "use_bidirectional_attention is true, but only models with causal attention can be converted"
        )
    if family.experts:
        _check_experts(model)
    if family.post_norms:
        _check_scale(model)


def _check_experts(model: Model) -> None:
    config = model.config
    if model.experts_used > model.experts:
        raise config.error(f"num_experts_per_tok is {model.experts_used}, but there are only {model.experts} experts")
    if config.count("decoder_sparse_step") != 1 or config.items("mlp_only_layers"):
        raise config.error("some layers have no experts (decoder_sparse_step, mlp_only_layers); llama.cpp needs all")
    if not config.flag("norm_topk_prob"):
        raise config.error("norm_topk_prob is false, but llama.cpp always normalizes the weights of the chosen experts")


def _check_scale(model: Model) -> None:
    """Raise ModelFileError unless the scale of attention is the one that llama.cpp uses for this size of the family."""
    config = model.config
    largest = {"gemma2": 46, "gemma3": 62}[model.arch]  # number of layers of the 27B, which is an exception
    need = model.embd // model.heads if model.layers == largest else model.head_size
    if (have := config.number("query_pre_attn_scalar")) != need:
        raise config.error(f"query_pre_attn_scalar is {have:g}, but llama.cpp computes with {need}")
    if model.arch == "gemma3" and "attn_logit_softcapping" in config:
        raise ModelFileError("config.json: attn_logit_softcapping is set, but llama.cpp has none for Gemma 3")
