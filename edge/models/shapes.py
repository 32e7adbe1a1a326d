"""What a model is made of, without its weights: figures, tensors and metadata of the architectures `edge.models.synth`
writes.

An architecture is a table: tensor names, and for each the names of its dimensions (slowest first, as numpy has them). A
shape gives the dimensions their numbers. Adding an architecture is adding rows.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from math import prod
from typing import Any

from edge.errors import EdgeError

MIN_VOCAB = 261  # 4 control tokens, 256 bytes, and the space


class ShapeError(EdgeError):
    """Figures that make no model: unknown names, heads that do not divide, a figure missing."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The figures of one model. Zero means "the architecture has none", except where a comment says otherwise."""

    arch: str
    layers: int
    embd: int  # width of the hidden state
    ff: int  # width of the feed-forward part
    heads: int
    vocab: int  # tokens
    kv: int = 0  # key and value heads; 0: as many as heads
    head_size: int = 0  # values a head; 0: embd / heads
    experts: int = 0
    experts_used: int = 0  # experts a token
    expert_ff: int = 0  # width of one expert
    context: int = 4096  # tokens it was trained on
    tied: bool = False  # the token table is the output head, too
    rms_eps: float = 1e-5
    rope_base: float = 10_000.0
    rope_freqs: bool = False  # has a tensor of factors for the rotation frequencies (Llama 3)
    rope_scaling: str = ""  # "linear" or "yarn"
    rope_factor: float = 0.0
    rope_context: int = 0  # context before it was stretched, tokens
    window: int = 0  # of attention, tokens
    attn_softcap: float = 0.0
    final_softcap: float = 0.0

    @property
    def sizes(self) -> dict[str, int]:
        """The number behind each dimension name in the tables below."""
        head = self.head_size or self.embd // self.heads
        kv = self.kv or self.heads
        return {
            "embd": self.embd, "vocab": self.vocab, "heads": self.heads, "head": head, "half head": head // 2,
            "q": self.heads * head, "kv": kv * head, "qkv": (self.heads + 2 * kv) * head,
            "ff": self.ff, "gate+up": 2 * self.ff, "experts": self.experts, "expert ff": self.expert_ff,
        }  # fmt: skip

    @property
    def parameters(self) -> int:
        """Values in all tensors; a tied table counts once."""
        return sum(prod(dims) for _, dims in self.tensors())

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Every tensor's name and dimensions (slowest first), in the order of the file; ShapeError for bad figures."""
        check(self)
        architecture, sizes = ARCHITECTURES[self.arch], self.sizes
        block = architecture.attention | (architecture.experts if self.experts else architecture.dense)
        tables: list[tuple[str, Dims]] = [("token_embd.weight", ("vocab", "embd"))]
        if self.rope_freqs:
            tables.append(("rope_freqs.weight", ("half head",)))
        tables += [(f"blk.{i}.{name}", dims) for i in range(self.layers) for name, dims in block.items()]
        tables.append(("output_norm.weight", ("embd",)))
        if not self.tied:
            tables.append(("output.weight", ("vocab", "embd")))
        for name, dims in tables:
            yield name, tuple(sizes[dim] for dim in dims)

    def metadata(self) -> dict[str, int | float | str]:
        """GGUF metadata of the architecture: whole keys to values; what is zero or empty is left out."""
        known = ((f"{self.arch}.{key}", getattr(self, name)) for key, name in _METADATA.items())
        head = self.sizes["head"]
        heads = ("attention.head_count_kv", self.kv or self.heads), *((key, head) for key in _HEAD_SIZE)
        return {key: value for key, value in known if value} | {f"{self.arch}.{key}": value for key, value in heads}


Dims = tuple[str, ...]
Table = Mapping[str, Dims]


@dataclass(frozen=True, slots=True)
class Architecture:
    """The tensors of one layer, and the figures all models of the architecture share."""

    attention: dict[str, Dims]  # with the layer's norms
    dense: dict[str, Dims] = field(default_factory=dict)  # feed-forward part; empty: always experts
    experts: dict[str, Dims] = field(default_factory=dict)  # the same with experts; empty: never
    common: Mapping[str, Any] = field(default_factory=dict)  # fields of Shape
    square_q: bool = False  # llama.cpp wants heads * head_size = embd
    always_tied: bool = False


_ATTENTION: dict[str, Dims] = {
    "attn_norm.weight": ("embd",),
    "attn_q.weight": ("q", "embd"),
    "attn_k.weight": ("kv", "embd"),
    "attn_v.weight": ("kv", "embd"),
    "attn_output.weight": ("embd", "q"),
}
_FFN_NORM: dict[str, Dims] = {"ffn_norm.weight": ("embd",)}
_QKV_BIAS: dict[str, Dims] = {"attn_q.bias": ("q",), "attn_k.bias": ("kv",), "attn_v.bias": ("kv",)}
_HEAD_NORMS: dict[str, Dims] = {"attn_q_norm.weight": ("head",), "attn_k_norm.weight": ("head",)}
_POST_NORMS: dict[str, Dims] = {"post_attention_norm.weight": ("embd",), "post_ffw_norm.weight": ("embd",)}
_DENSE: dict[str, Dims] = {
    "ffn_gate.weight": ("ff", "embd"),
    "ffn_up.weight": ("ff", "embd"),
    "ffn_down.weight": ("embd", "ff"),
}


def _experts(width: str) -> dict[str, Dims]:
    """A router and one stack of matrices for all experts, each expert `width` wide."""
    return {
        "ffn_gate_inp.weight": ("experts", "embd"),
        "ffn_gate_exps.weight": ("experts", width, "embd"),
        "ffn_up_exps.weight": ("experts", width, "embd"),
        "ffn_down_exps.weight": ("experts", "embd", width),
    }


_LLAMA = _ATTENTION | _FFN_NORM
_GEMMA_2 = _LLAMA | _POST_NORMS
_GPT_OSS: dict[str, Dims] = {
    "attn_output.bias": ("embd",),
    "attn_sinks.weight": ("heads",),
    "post_attention_norm.weight": ("embd",),
}
_GPT_OSS_EXPERTS: dict[str, Dims] = {
    "ffn_gate_inp.bias": ("experts",),
    "ffn_gate_exps.bias": ("experts", "expert ff"),
    "ffn_up_exps.bias": ("experts", "expert ff"),
    "ffn_down_exps.bias": ("experts", "embd"),
}
_PHI_3: dict[str, Dims] = {
    "attn_norm.weight": ("embd",),
    "attn_qkv.weight": ("qkv", "embd"),
    "attn_output.weight": ("embd", "q"),
}
_PHI_3_DENSE: dict[str, Dims] = {"ffn_up.weight": ("gate+up", "embd"), "ffn_down.weight": ("embd", "ff")}
_QWEN = {"rope_base": 1e6, "rms_eps": 1e-6}
_YARN = {"rope_scaling": "yarn", "rope_factor": 32.0, "rope_context": 4096}
_GEMMA = {"tied": True, "rms_eps": 1e-6}

ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(_LLAMA, _DENSE, _experts("ff")),
    "qwen2": Architecture(_LLAMA | _QKV_BIAS, _DENSE, common=_QWEN, square_q=True),
    "qwen3": Architecture(_LLAMA | _HEAD_NORMS, _DENSE, common=_QWEN),
    "qwen3moe": Architecture(_LLAMA | _HEAD_NORMS, experts=_experts("expert ff"), common=_QWEN),
    "gemma": Architecture(_LLAMA, _DENSE, common=_GEMMA, always_tied=True),
    "gemma2": Architecture(
        _GEMMA_2,
        _DENSE,
        common=_GEMMA | {"window": 4096, "attn_softcap": 50.0, "final_softcap": 30.0},
        always_tied=True,
    ),
    "gemma3": Architecture(_GEMMA_2 | _HEAD_NORMS, _DENSE, common=_GEMMA | {"window": 512, "rope_base": 1e6}),
    "phi3": Architecture(_PHI_3 | _FFN_NORM, _PHI_3_DENSE, common={"window": 2047}, square_q=True),
    "gpt-oss": Architecture(
        _ATTENTION | _QKV_BIAS | _GPT_OSS,
        experts=_experts("expert ff") | _GPT_OSS_EXPERTS,
        common={"window": 128, "rope_base": 150_000.0, **_YARN},
    ),
}

# Metadata key (after "<arch>.") to the field of Shape it holds.
_METADATA: Mapping[str, str] = {
    "context_length": "context",
    "embedding_length": "embd",
    "block_count": "layers",
    "feed_forward_length": "ff",
    "vocab_size": "vocab",
    "attention.head_count": "heads",
    "attention.layer_norm_rms_epsilon": "rms_eps",
    "attention.sliding_window": "window",
    "attn_logit_softcapping": "attn_softcap",
    "final_logit_softcapping": "final_softcap",
    "expert_count": "experts",
    "expert_used_count": "experts_used",
    "expert_feed_forward_length": "expert_ff",
    "rope.freq_base": "rope_base",
    "rope.scaling.type": "rope_scaling",
    "rope.scaling.factor": "rope_factor",
    "rope.scaling.original_context_length": "rope_context",
}
_NEEDED = ("layers", "embd", "ff", "heads", "context")
_HEAD_SIZE = ("attention.key_length", "attention.value_length", "rope.dimension_count")


def shape(arch: str, **figures: Any) -> Shape:
    """A shape with the architecture's own constants where `figures` says nothing; ShapeError for bad figures."""
    if arch not in ARCHITECTURES:
        raise ShapeError(f"unknown architecture {arch!r}; known: {', '.join(ARCHITECTURES)}")
    made = Shape(arch=arch, **{**ARCHITECTURES[arch].common, **figures})
    check(made)
    return made


def check(shape: Shape) -> None:
    """Nothing for a shape that llama.cpp loads; ShapeError saying what is wrong and what would be right."""
    found = ARCHITECTURES.get(shape.arch)
    if found is None:
        raise ShapeError(f"unknown architecture {shape.arch!r}; known: {', '.join(ARCHITECTURES)}")
    for figure in fields(shape):
        value, least = getattr(shape, figure.name), int(figure.name in _NEEDED)
        if not isinstance(value, str) and value < least:
            raise ShapeError(f"{figure.name} is {value}, and must be at least {least}")
    if shape.vocab < MIN_VOCAB:
        raise ShapeError(f"vocab is {shape.vocab}; {MIN_VOCAB} tokens are needed to spell any text")
    if not shape.head_size and shape.embd % shape.heads:
        raise ShapeError(f"embd {shape.embd} does not divide into {shape.heads} heads; give the head size")
    if shape.heads % (shape.kv or shape.heads):
        raise ShapeError(f"{shape.heads} heads do not divide into {shape.kv} KV heads")
    sizes = shape.sizes
    if sizes["head"] % 2:
        raise ShapeError(f"the head size is {sizes['head']}, and must be even: positions rotate pairs of values")
    if found.square_q and sizes["q"] != shape.embd:
        raise ShapeError(f"{shape.arch} needs heads x head size = embd, got {sizes['q']} and {shape.embd}")
    if found.always_tied and not shape.tied:
        raise ShapeError(f"{shape.arch} has no output head of its own: it is always tied")
    if shape.experts and not found.experts:
        raise ShapeError(f"{shape.arch} has no experts; these have: {_with_experts()}")
    if not shape.experts and not found.dense:
        raise ShapeError(f"{shape.arch} needs experts, experts used and the width of an expert")
    if shape.experts and not 1 <= shape.experts_used <= shape.experts:
        raise ShapeError(f"experts used is {shape.experts_used}, and must be 1 to {shape.experts}")
    if not found.dense and shape.expert_ff < 1:
        raise ShapeError(f"{shape.arch} needs the width of an expert")


def _with_experts() -> str:
    return ", ".join(name for name, architecture in ARCHITECTURES.items() if architecture.experts)
