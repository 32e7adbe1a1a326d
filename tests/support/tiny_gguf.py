"""Write small GGUF files, valid or broken: tests change a value, a shape or a type before the file is written.

This writer checks nothing, on purpose. That it writes GGUF is proved by the `gguf` package reading it back.
"""

import math
import random
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quant.types import TYPES

EMBD, FF, HEADS, HEADS_KV, HEAD, LAYERS, EXPERTS = 64, 96, 4, 2, 16, 2, 4
VOCAB = 3 + 256 + 13

# Value type: its id and struct code.
_CODES = {
    "u8": (0, "B"), "i8": (1, "b"), "u16": (2, "H"), "i16": (3, "h"), "u32": (4, "I"), "i32": (5, "i"), "f32": (6, "f"),
    "bool": (7, "?"), "str": (8, ""), "u64": (10, "Q"), "i64": (11, "q"), "f64": (12, "d"),
}  # fmt: skip


@dataclass
class Tensor:
    """Shape in ggml order, type, and optionally another offset or type id than the right one."""

    shape: tuple[int, ...]
    type: str = "f32"
    offset: int | None = None
    type_id: int | None = None
    noisy: bool = False  # f16: values like those of f32, in place of zeros


@dataclass
class Gguf:
    """Content of a file: `pairs` map a key to (type, value), where an array's type is "arr[str]"."""

    pairs: dict[str, tuple[str, Any]]
    tensors: dict[str, Tensor] = field(default_factory=dict)
    version: int = 3
    seed: int = 0
    largest: float = 0.1  # of the weights

    def write(self, path: Path) -> Path:
        header, data = self.encode()
        path.write_bytes(header + data)
        return path

    def encode(self) -> tuple[bytes, bytes]:
        """The padded header and the weights."""
        kind, alignment = self.pairs.get("general.alignment", ("u32", 32))
        if not (kind == "u32" and isinstance(alignment, int) and 0 < alignment <= 4096):
            alignment = 32
        head = [b"GGUF", struct.pack("<IQQ", self.version, len(self.tensors), len(self.pairs))]
        for key, (kind, value) in self.pairs.items():
            head += [_string(key.encode()), _value(kind, value)]
        data = bytearray()
        noise = random.Random(self.seed)
        some = struct.pack("<4099f", *(noise.uniform(-self.largest, self.largest) for _ in range(4099)))
        for name, t in self.tensors.items():
            type_id = TYPES[t.type].id if t.type_id is None else t.type_id
            offset = len(data) if t.offset is None else t.offset
            head.append(_string(name.encode()) + struct.pack("<I", len(t.shape)))
            head.append(b"".join(struct.pack("<Q", n % 2**64) for n in t.shape))
            head.append(struct.pack("<IQ", type_id, offset))
            data += _weights(t, some)
            data += bytes(-len(data) % alignment)
        header = b"".join(head)
        return header + bytes(-len(header) % alignment), bytes(data)


def _string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def _value(kind: str, value: Any) -> bytes:
    if kind.startswith("arr["):
        item = kind[4:-1]
        return struct.pack("<IIQ", 9, _CODES[item][0], len(value)) + b"".join(_item(item, v) for v in value)
    return struct.pack("<I", _CODES[kind][0]) + _item(kind, value)


def _item(kind: str, value: Any) -> bytes:
    if kind == "str":
        return _string(value if isinstance(value, bytes) else str(value).encode())
    return struct.pack("<" + _CODES[kind][1], value)


def _weights(t: Tensor, noise: bytes) -> bytes:
    """Small values for f32, so that a model runs; zeros for the other types. Impossible shapes get a few bytes."""
    values = math.prod(t.shape)
    if not 0 < values <= 1 << 22:
        return bytes(64)
    kind = TYPES[t.type]
    size = -(-values // kind.block) * kind.block_bytes
    if t.type == "f16" and t.noisy:
        floats = struct.unpack("<4099f", noise)
        return struct.pack(f"<{values}e", *(floats[i % len(floats)] for i in range(values)))
    return bytes(size) if t.type != "f32" else (noise * (size // len(noise) + 1))[:size]


def vocabulary() -> dict[str, tuple[str, Any]]:
    """A byte-level SentencePiece vocabulary of VOCAB tokens."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *(f"\u2581w{i}" for i in range(13))]
    return {
        "tokenizer.ggml.model": ("str", "llama"),
        "tokenizer.ggml.tokens": ("arr[str]", tokens),
        "tokenizer.ggml.scores": ("arr[f32]", [0.0] * 259 + [-float(i) for i in range(13)]),
        "tokenizer.ggml.token_type": ("arr[i32]", [2, 3, 3] + [6] * 256 + [1] * 13),
        "tokenizer.ggml.bos_token_id": ("u32", 1),
        "tokenizer.ggml.eos_token_id": ("u32", 2),
    }


def byte_level_vocabulary(pre: str) -> dict[str, tuple[str, Any]]:
    """A byte-level BPE vocabulary of VOCAB tokens, whose texts are cut into words as `pre` says."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]  # bytes that GPT-2 writes as they are
    letters = [chr(byte) for byte in plain] + [chr(256 + i) for i in range(256 - len(plain))]
    merges = ["a a", "aa aa", "\u0120 a", "b a"]
    tokens = [*letters, *(merge.replace(" ", "") for merge in merges), *(f"<{i}>" for i in range(VOCAB - 260))]
    return {
        "tokenizer.ggml.model": ("str", "gpt2"),
        "tokenizer.ggml.pre": ("str", pre),
        "tokenizer.ggml.tokens": ("arr[str]", tokens),
        "tokenizer.ggml.token_type": ("arr[i32]", [1] * 260 + [3] * (VOCAB - 260)),
        "tokenizer.ggml.merges": ("arr[str]", merges),
        "tokenizer.ggml.bos_token_id": ("u32", 260),
        "tokenizer.ggml.eos_token_id": ("u32", 261),
    }


def model(arch: str = "llama", weights: str = "f32", layers: int = LAYERS, experts: int = 0) -> Gguf:
    """A tiny model of `arch` that llama.cpp loads and runs; `experts` makes its FFN a mixture."""
    pairs: dict[str, tuple[str, Any]] = {"general.architecture": ("str", arch), "general.name": ("str", "tiny")}
    numbers = {"context_length": 128, "embedding_length": EMBD, "block_count": layers, "feed_forward_length": FF,
               "attention.head_count": HEADS, "attention.head_count_kv": HEADS_KV}  # fmt: skip
    if arch in ("llama", "phi3", "qwen2"):
        numbers["rope.dimension_count"] = HEAD
    if arch in ("qwen3", "qwen3moe", "gemma", "gemma2", "gemma3"):
        numbers |= {"attention.key_length": HEAD, "attention.value_length": HEAD}
    if arch in ("gemma2", "gemma3"):
        numbers["attention.sliding_window"] = 32
    if experts:
        numbers |= {"expert_count": experts, "expert_used_count": 2, "expert_feed_forward_length": FF}
    pairs |= {f"{arch}.{key}": ("u32", value) for key, value in numbers.items()}
    pairs[f"{arch}.attention.layer_norm_rms_epsilon"] = ("f32", 1e-5)
    pairs[f"{arch}.rope.freq_base"] = ("f32", 10000.0)
    pairs |= vocabulary()
    tensors = {"token_embd.weight": Tensor((EMBD, VOCAB), weights)}
    for i in range(layers):
        tensors |= {f"blk.{i}.{name}": t for name, t in _layer(arch, weights, experts).items()}
    tensors["output_norm.weight"] = Tensor((EMBD,))
    if not arch.startswith("gemma"):
        tensors["output.weight"] = Tensor((EMBD, VOCAB), weights)
    return Gguf(pairs, tensors)


def _layer(arch: str, weights: str, experts: int) -> dict[str, Tensor]:
    q, kv = HEADS * HEAD, HEADS_KV * HEAD
    layer = {"attn_norm.weight": Tensor((EMBD,))}
    if arch == "phi3":
        layer["attn_qkv.weight"] = Tensor((EMBD, q + 2 * kv), weights)
    else:
        layer["attn_q.weight"] = Tensor((EMBD, q), weights)
        layer["attn_k.weight"] = Tensor((EMBD, kv), weights)
        layer["attn_v.weight"] = Tensor((EMBD, kv), weights)
    if arch == "qwen2":
        layer |= {"attn_q.bias": Tensor((q,)), "attn_k.bias": Tensor((kv,)), "attn_v.bias": Tensor((kv,))}
    if arch in ("qwen3", "qwen3moe", "gemma3"):
        layer |= {"attn_q_norm.weight": Tensor((HEAD,)), "attn_k_norm.weight": Tensor((HEAD,))}
    layer["attn_output.weight"] = Tensor((q, EMBD), weights)
    if arch in ("gemma2", "gemma3"):
        layer |= {"post_attention_norm.weight": Tensor((EMBD,)), "post_ffw_norm.weight": Tensor((EMBD,))}
    layer["ffn_norm.weight"] = Tensor((EMBD,))
    if experts:
        layer["ffn_gate_inp.weight"] = Tensor((EMBD, experts))
        layer["ffn_gate_exps.weight"] = Tensor((EMBD, FF, experts), weights)
        layer["ffn_up_exps.weight"] = Tensor((EMBD, FF, experts), weights)
        layer["ffn_down_exps.weight"] = Tensor((FF, EMBD, experts), weights)
    elif arch == "phi3":
        layer |= {"ffn_up.weight": Tensor((EMBD, 2 * FF), weights), "ffn_down.weight": Tensor((FF, EMBD), weights)}
    else:
        layer["ffn_gate.weight"] = Tensor((EMBD, FF), weights)
        layer["ffn_up.weight"] = Tensor((EMBD, FF), weights)
        layer["ffn_down.weight"] = Tensor((FF, EMBD), weights)
    return layer
