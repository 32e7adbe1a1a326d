"""The demonstration model in PyTorch: a small Llama, with the weight names and the head layout of llama.cpp."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Config:
    """Sizes of the model; widths are in elements."""

    vocabulary: int = 2048
    layers: int = 8
    width: int = 256
    heads: int = 8
    kv_heads: int = 4
    head_size: int = 32
    ffn: int = 768
    context: int = 1024
    rope_base: float = 10000.0
    eps: float = 1e-5


def rotations(config: Config) -> Tensor:
    """Cosines and sines of the rotary embedding: [2, context, head_size / 2]."""
    pairs = torch.arange(0, config.head_size, 2, dtype=torch.float64) / config.head_size
    angles = torch.arange(config.context, dtype=torch.float64)[:, None] * config.rope_base**-pairs
    return torch.stack((angles.cos(), angles.sin())).float()


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attention written out: compiled for short rows on a CPU it is faster than the fused kernel."""
    scores = (q @ k.transpose(-1, -2)).float() * q.shape[-1] ** -0.5
    return scores.masked_fill(~mask, -1e9).softmax(-1).to(v.dtype) @ v


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotate each pair of neighbouring elements of `x` [batch, heads, time, head_size] by its position's angle."""
    cos, sin = rotation[0, : x.shape[2]], rotation[1, : x.shape[2]]
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2).to(x.dtype)


class Block(nn.Module):
    """Attention and a gated feed-forward network, each behind a norm and around a residual."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width, inner, kv = config.width, config.heads * config.head_size, config.kv_heads * config.head_size
        self.head_size = config.head_size
        self.attn_norm = nn.RMSNorm(width, config.eps)
        self.attn_q = nn.Linear(width, inner, bias=False)
        self.attn_k = nn.Linear(width, kv, bias=False)
        self.attn_v = nn.Linear(width, kv, bias=False)
        self.attn_output = nn.Linear(inner, width, bias=False)
        self.ffn_norm = nn.RMSNorm(width, config.eps)
        self.ffn_gate = nn.Linear(width, config.ffn, bias=False)
        self.ffn_up = nn.Linear(width, config.ffn, bias=False)
        self.ffn_down = nn.Linear(config.ffn, width, bias=False)

    def forward(self, x: Tensor, rotation: Tensor, mask: Tensor) -> Tensor:
        """`x` [batch, time, width] after this block."""
        h = self.attn_norm(x)
        q, k, v = (
            linear(h).unflatten(-1, (-1, self.head_size)).transpose(1, 2)
            for linear in (self.attn_q, self.attn_k, self.attn_v)
        )
        q, k = rotate(q, rotation), rotate(k, rotation)
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        x = x + self.attn_output(attention(q, k, v, mask).transpose(1, 2).flatten(2))
        h = self.ffn_norm(x)
        return x + self.ffn_down(F.silu(self.ffn_gate(h)) * self.ffn_up(h))


class Llama(nn.Module):
    """The model. `forward` takes tokens [batch, time] and returns logits [batch, time, vocabulary]."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.token_embd = nn.Embedding(config.vocabulary, config.width)
        self.blk = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.output_norm = nn.RMSNorm(config.width, config.eps)
        self.output = nn.Linear(config.width, config.vocabulary, bias=False)
        self.register_buffer("rotation", rotations(config), persistent=False)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                last = name.endswith(("attn_output.weight", "ffn_down.weight"))
                nn.init.normal_(weight, std=0.02 / (2 * config.layers) ** 0.5 if last else 0.02)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """Logits; `mask` [batch, 1, time, time] is true where a position may be looked at, causal without it."""
        if mask is None:
            mask = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).tril()
        x = self.token_embd(tokens)
        for block in self.blk:
            x = block(x, self.rotation, mask)
        logits: Tensor = self.output(self.output_norm(x))
        return logits
