"""Shapes of models without weights: figures, tensors and metadata of the architectures that `edge.models.synth` writes.

An architecture is a table of `partition.architectures`. It maps tensor names to dimension names, slowest first as in
numpy. A shape gives each dimension name a number. To add an architecture, add rows to the table.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from math import prod
from typing import Any

from edge.errors import EdgeError
from partition.architectures.description import Number, Table
from partition.architectures.table import ARCHITECTURES
from partition.architectures.tensors import EXPERT_KEY

MIN_VOCAB = 261  # 4 control tokens, 256 bytes, and the space


class ShapeError(EdgeError):
    """The figures do not make a model: a name is unknown, heads do not divide, or a figure is missing."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Figures of one model. Zero means that the model lacks the part, unless the comment gives another meaning."""

    arch: str
    layers: int  # number of layers, without `predictors`
    embd: int  # width of the hidden state
    ff: int  # width of the feed-forward part
    heads: int
    vocab: int  # number of tokens
    kv: int = 0  # number of KV heads; 0: the same as `heads`
    head_size: int = 0  # values per head; 0: embd / heads
    experts: int = 0
    experts_used: int = 0  # experts per token
    expert_ff: int = 0  # width of one expert
    shared_ff: int = 0  # width of the shared expert of every token; 0: the same as `expert_ff`
    dense_layers: int = 0  # number of leading layers without experts in a model with experts
    expert_every: int = 1  # period of layers with experts; the last layer of each period has them
    attention_every: int = 0  # period of layers with attention among recurrent ones; 0: all layers have attention
    conv: int = 0  # tokens that the convolution of a recurrent layer covers
    context: int = 4096  # tokens of context in training
    tied: bool = False  # whether the token table is also the output head
    rms_eps: float = 1e-5
    rope_base: float = 10_000.0
    rope_freqs: bool = False  # whether there is a tensor of factors for the rotation frequencies (Llama 3)
    rope_scaling: str = ""  # "linear" or "yarn"
    rope_factor: float = 0.0
    rope_context: int = 0  # tokens of context before it was extended
    window: int = 0  # tokens of the attention window
    attn_softcap: float = 0.0
    final_softcap: float = 0.0
    predictors: int = 0  # layers after the last one that predict further tokens (MTP)

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes of the dimension names in the architectures' tables."""
        head = self.head_size or self.embd // self.heads
        kv, expert_ff = self.kv or self.heads, self.expert_ff or self.ff
        inner, state, groups = 2 * self.embd, 16, 1  # sizes of recurrent layers
        rank = max(1, inner // 32)  # heads or values that control the decay of a recurrent layer
        key, value = groups * state, rank * state  # sizes of a layer with the delta rule
        latent = 2 * head  # size of the latent vector of keys and values, next to the rotated part
        return {
            "embd": self.embd, "vocab": self.vocab, "context": self.context, "heads": self.heads, "head": head,
            "half head": head // 2, "q": self.heads * head, "2 q": 2 * self.heads * head, "kv": kv * head,
            "kv heads": kv,
            "qkv": (self.heads + 2 * kv) * head, "ff": self.ff, "half ff": self.ff // 2, "gate+up": 2 * self.ff,
            "half q": self.heads * (head // 2), "half kv": kv * (head // 2), "3 embd": 3 * self.embd,
            "2 embd": 2 * self.embd,
            "experts": self.experts, "half experts": self.experts // 2,
            "expert ff": expert_ff, "shared ff": self.shared_ff or expert_ff, "expert every": self.expert_every,
            "q rank": self.embd // 2, "kv rank": latent, "latent": latent + head // 2, "unturned": head - head // 2,
            "unturned and value": self.heads * (head - head // 2 + head),
            "conv": self.conv, "inner": inner, "2 inner": 2 * inner, "state": state, "groups": groups,
            "inner of group": inner // groups, "time rank": rank, "2 time rank": 2 * rank,
            "time and states": rank + 2 * state, "ssm conv": inner + 2 * groups * state,
            "ssm in": 2 * inner + 2 * groups * state + rank, "delta conv": 2 * key + value, "delta values": value,
            "pace": max(64, self.embd // 16), "pace and states": max(64, self.embd // 16) + 2 * state,
        }  # fmt: skip

    @property
    def parameters(self) -> int:
        """Number of values in all tensors; a tied table counts once."""
        return sum(prod(dims) for _, dims in self.tensors())

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield every tensor's name and dimensions (slowest first), in file order. Raises ShapeError for bad
        figures."""
        check(self)
        architecture, sizes = ARCHITECTURES[self.arch], self.sizes
        tables: list[tuple[str, tuple[str | int, ...]]] = [("token_embd.weight", ("vocab", "embd"))]
        if self.rope_freqs:
            tables.append(("rope_freqs.weight", ("half head",)))
        for layer in range(self.layers + self.predictors):
            tables += [(f"blk.{layer}.{name}", dims) for name, dims in self._layer(layer).items()]
        tables += architecture.outer.items()
        if not self.tied:
            tables.append(("output.weight", ("vocab", "embd")))
        for name, dims in tables:
            yield name, tuple(sizes[dim] if isinstance(dim, str) else dim for dim in dims)

    def _layer(self, layer: int) -> Table:
        """Return the tensors of one layer."""
        architecture = ARCHITECTURES[self.arch]
        first = architecture.recurrent if self.is_recurrent(layer) else architecture.attention
        if architecture.windowed and _has_window(self.arch, layer):
            first = architecture.windowed
        if self._is_alone(layer):
            first = architecture.alone
        if architecture.alone and not self._is_alone(layer):
            return first
        has_experts = self.experts and layer >= self.dense_layers and (layer + 1) % self.expert_every == 0
        joins = _PREDICTOR if layer >= self.layers else {}
        return {**first, **(architecture.experts if has_experts else architecture.dense), **joins}

    def is_recurrent(self, layer: int) -> bool:
        """Return whether a layer has a recurrent part instead of attention."""
        every = self.attention_every
        has_attention = every > 0 and (layer + 1) % every == 0
        is_one = bool(ARCHITECTURES[self.arch].recurrent) and layer < self.layers  # predictor layers have attention
        return is_one and not has_attention and not self._is_alone(layer)

    def _is_alone(self, layer: int) -> bool:
        """Return whether a layer has only a feed-forward part. Every second layer without attention is like this."""
        every = self.attention_every
        return bool(ARCHITECTURES[self.arch].alone) and layer % 2 == 1 and (every == 0 or (layer + 1) % every != 0)

    def metadata(self) -> dict[str, "Number | list[int]"]:
        """Return the GGUF metadata of the architecture, with complete keys. Zero and empty values are left out."""
        architecture, sizes, arch = ARCHITECTURES[self.arch], self.sizes, self.arch
        values: dict[str, Number | list[int]] = {}
        for key, name in _METADATA.items():
            if value := getattr(self, name):
                values[f"{arch}.{key}"] = value
        if self.predictors:
            values[f"{arch}.block_count"] = self.layers + self.predictors
            values[f"{arch}.nextn_predict_layers"] = self.predictors
        kv = 1 if "attention.head_count_kv" in architecture.keys else self.kv or self.heads
        recurrent = [self.is_recurrent(layer) for layer in range(self.layers)]
        alone = [self._is_alone(layer) for layer in range(self.layers)]
        by_layer = [0 if flag or by_itself else kv for flag, by_itself in zip(recurrent, alone, strict=True)]
        if any(alone):
            width = self.expert_ff if self.experts else self.ff
            values[f"{arch}.feed_forward_length"] = [width if by_itself else 0 for by_itself in alone]
        # The file marks recurrent layers by 0 KV heads.
        by_heads = any(recurrent) and not architecture.rules.recurrent_every
        values[f"{arch}.attention.head_count_kv"] = by_layer if by_heads else kv
        if all(recurrent):
            values |= {f"{arch}.attention.head_count": 0, f"{arch}.attention.head_count_kv": 0}
        else:
            values |= {f"{arch}.{key}": sizes["head"] for key in _HEAD_SIZE}
        window = architecture.rules.window
        if window is not None and window.listed:
            values[f"{arch}.attention.sliding_window_pattern"] = [
                int(_has_window(self.arch, layer)) for layer in range(self.layers + self.predictors)
            ]
            if "attention.indexer.top_k" in architecture.keys:  # layers with an index are the layers without the window
                values[f"{arch}.attention.indexer.types"] = [
                    int(not _has_window(self.arch, layer)) for layer in range(self.layers)
                ]
        for key, value in architecture.keys.items():
            if key == "attention.head_count_kv":
                continue
            whole = key if key.startswith("xielu.") else f"{arch}.{key}"
            values[whole] = (
                sizes[value] if isinstance(value, str) else list(value) if isinstance(value, tuple) else value
            )
        return values


def _has_window(arch: str, layer: int) -> bool:
    """Return whether a layer has the attention window, in an architecture whose files list such layers."""
    window = ARCHITECTURES[arch].rules.window
    return window is not None and layer % window.period != (0 if window.full_first else window.period - 1)


# Metadata key (after "<arch>.") to the field of Shape with its value.
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
    "leading_dense_block_count": "dense_layers",
    "full_attention_interval": "attention_every",
}
# Additional tensors of a layer that predicts further tokens. They join a hidden state and a token's row.
_PREDICTOR: Table = {
    "nextn.eh_proj.weight": ("embd", "2 embd"),
    "nextn.enorm.weight": ("embd",),
    "nextn.hnorm.weight": ("embd",),
    "nextn.shared_head_norm.weight": ("embd",),
}
_NEEDED = ("layers", "embd", "ff", "heads", "context")
_HEAD_SIZE = ("attention.key_length", "attention.value_length", "rope.dimension_count")


def shape(arch: str, **figures: Any) -> Shape:
    """Return a shape with the architecture's constants for missing `figures`. Raises ShapeError for bad figures."""
    if arch not in ARCHITECTURES:
        raise ShapeError(f"unknown architecture {arch!r}; known: {', '.join(ARCHITECTURES)}")
    result = Shape(arch=arch, **{**ARCHITECTURES[arch].common, **figures})
    check(result)
    return result


def check(shape: Shape) -> None:
    """Raise ShapeError, with the wrong and the permitted values, if llama.cpp would not load the shape."""
    architecture = ARCHITECTURES.get(shape.arch)
    if architecture is None:
        raise ShapeError(f"unknown architecture {shape.arch!r}; known: {', '.join(ARCHITECTURES)}")
    for figure in fields(shape):
        value, least = getattr(shape, figure.name), int(figure.name in _NEEDED)
        if not isinstance(value, str) and value < least:
            raise ShapeError(f"{figure.name} is {value}, and must be at least {least}")
    known = architecture.predictors
    # The predictor layers of this architecture are of another kind.
    is_other = known is not None and "attn_qkv.weight" in known.needs
    if shape.predictors and (known is None or is_other or shape.predictors > known.most):
        raise ShapeError(f"{shape.predictors} layers of {shape.arch} that predict further tokens cannot be made here")
    if shape.vocab < MIN_VOCAB:
        raise ShapeError(f"vocab is {shape.vocab}; {MIN_VOCAB} tokens are needed to spell any text")
    if not shape.head_size and shape.embd % shape.heads:
        raise ShapeError(f"embd {shape.embd} does not divide into {shape.heads} heads; give the head size")
    if shape.heads % (shape.kv or shape.heads):
        raise ShapeError(f"{shape.heads} heads do not divide into {shape.kv} KV heads")
    sizes = shape.sizes
    if sizes["head"] % 2:
        raise ShapeError(f"the head size is {sizes['head']}, and must be even: positions rotate pairs of values")
    if architecture.square_q and sizes["q"] != shape.embd:
        raise ShapeError(f"{shape.arch} needs heads x head size = embd, got {sizes['q']} and {shape.embd}")
    if architecture.equal_heads and shape.kv not in (0, shape.heads):
        raise ShapeError(f"{shape.arch} needs as many KV heads as heads, got {shape.kv} and {shape.heads}")
    if architecture.always_tied and not shape.tied:
        raise ShapeError(f"{shape.arch} has no output head of its own: it is always tied")
    if architecture.never_tied and shape.tied:
        raise ShapeError(f"{shape.arch} needs an output head of its own: it is never tied")
    if shape.experts and not architecture.experts:
        others = ", ".join(name for name, other in ARCHITECTURES.items() if other.experts)
        raise ShapeError(f"{shape.arch} has no experts; these have: {others}")
    if (
        not shape.experts
        and architecture.experts
        and (not architecture.dense or architecture.rules.ff_key == EXPERT_KEY)
    ):
        raise ShapeError(f"{shape.arch} needs experts, experts used and the width of an expert")
    if shape.experts and not 1 <= shape.experts_used <= shape.experts:
        raise ShapeError(f"experts used is {shape.experts_used}, and must be 1 to {shape.experts}")
    has_own_width = any("expert ff" in dims for dims in architecture.experts.values())
    if shape.experts and shape.expert_ff < 1 and has_own_width:
        raise ShapeError(f"{shape.arch} needs the width of an expert")
