"""Sizes of a model: layers, heads, bytes. The planner's view of a GGUF file."""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from partition.model.metadata import Metadata
from quant.gguf.file import GgufFile
from quant.gguf.header import GgufArray
from quant.types import TensorType

MAX_LAYERS = 512  # of llama.cpp
_BLOCK = re.compile(r"blk\.([0-9]{1,9})\.")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of one model. Per-layer tuples have `n_layers` items; a layer without attention has 0 heads.

    Layers that predict further tokens come after these, and are not counted: no answer needs them
    (`partition.model.predictors`).
    """

    architecture: str
    name: str
    n_layers: int
    n_embd: int  # values of a hidden state
    n_heads: tuple[int, ...]  # query heads, per layer
    n_heads_kv: tuple[int, ...]  # key and value heads, per layer
    head_k: int  # values of one key; queries have as many
    head_v: int  # values of one value
    n_ff: tuple[int, ...]  # columns of the FFN (of one expert where there is no dense FFN), per layer
    n_experts: int  # 0: a dense model
    n_experts_used: int  # experts a token passes through
    n_vocab: int
    context_length: int  # trained
    n_params: int
    weight_bytes: int  # all tensors, each once
    bytes_by_type: Mapping[str, int]  # tensor type name to bytes, largest first
    layer_bytes: tuple[int, ...]  # weights of each layer
    embedding_bytes: int  # the token table
    head_bytes: int  # the output matrix; the token table's bytes again where it is tied
    head_is_tied: bool  # the token table is the output matrix

    @classmethod
    def from_gguf(cls, file: GgufFile) -> "ModelShape":
        """The sizes of `file`; ModelFileError if the metadata lack one or contradict each other."""
        meta = Metadata(file)
        n_all = meta.count("block_count", least=1, most=MAX_LAYERS)
        n_layers = n_all - meta.count("nextn_predict_layers", 0, most=n_all)
        if not n_layers:
            raise meta.error("it has only layers that predict several tokens at once; get the whole model")
        n_embd = meta.count("embedding_length", least=1)
        heads = meta.per_layer("attention.head_count", n_all, 0)
        # llama.cpp takes the head size from the first layer's heads.
        head = n_embd // heads[0] if heads[0] else 0
        n_ff = meta.per_layer("feed_forward_length", n_all, 0)
        if not any(n_ff):
            n_ff = meta.per_layer("expert_feed_forward_length", n_all, 0)
        used = meta.per_layer("expert_used_count", n_all, 0)
        by_type: Counter[str] = Counter()
        for tensor in file.tensors.values():
            by_type[tensor.type.name] += tensor.n_bytes
        embedding, output = file.tensors.get("token_embd.weight"), file.tensors.get("output.weight")
        embedding_bytes = embedding.n_bytes if embedding else 0
        name = file.metadata.get("general.name")
        return cls(
            architecture=file.architecture,
            name=name if isinstance(name, str) and name else file.path.stem,
            n_layers=n_layers,
            n_embd=n_embd,
            n_heads=heads[:n_layers],
            n_heads_kv=meta.per_layer("attention.head_count_kv", n_all, heads)[:n_layers],
            head_k=meta.count("attention.key_length", head),
            head_v=meta.count("attention.value_length", head),
            n_ff=n_ff[:n_layers],
            n_experts=meta.count("expert_count", 0),
            n_experts_used=max(used),
            n_vocab=vocabulary_size(meta),
            context_length=meta.count("context_length", least=1),
            n_params=sum(t.n_values for t in file.tensors.values()),
            weight_bytes=sum(by_type.values()),
            bytes_by_type=MappingProxyType(dict(by_type.most_common())),
            layer_bytes=_layer_bytes(file, n_layers),
            embedding_bytes=embedding_bytes,
            head_bytes=output.n_bytes if output else embedding_bytes,
            head_is_tied=output is None,
        )

    def kv_bytes(self, context: int, type_k: TensorType, type_v: TensorType) -> int:
        """Bytes of the KV cache for `context` tokens over all layers.

        Sum over layers of context * (bytes of n_heads_kv * head_k in type_k + bytes of n_heads_kv * head_v in type_v).
        Attention windows are ignored (a layer that keeps only its window needs less), and so is the state of recurrent
        layers, which does not grow. ValueError if a type's blocks do not divide a layer's keys or values.
        """
        return sum(self.kv_layer_bytes(layer, context, type_k, type_v) for layer in range(self.n_layers))

    def kv_layer_bytes(self, layer: int, context: int, type_k: TensorType, type_v: TensorType) -> int:
        """The part of `kv_bytes` that layer number `layer` keeps."""
        heads = self.n_heads_kv[layer]
        return context * (type_k.n_bytes(heads * self.head_k) + type_v.n_bytes(heads * self.head_v))


def block_of(tensor_name: str) -> int | None:
    """The layer a tensor belongs to ("blk.7.attn_q.weight" to 7), None for tensors outside of layers."""
    match = _BLOCK.match(tensor_name)
    return int(match[1]) if match else None


def vocabulary_size(meta: Metadata) -> int:
    """Tokens: the length of the list, else `vocab_size`, else the rows of the token table, else 0."""
    tokens = meta.file.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, GgufArray):
        return len(tokens)
    table = meta.file.tensors.get("token_embd.weight")
    return meta.count("vocab_size", table.shape[-1] if table else 0)


def _layer_bytes(file: GgufFile, n_layers: int) -> tuple[int, ...]:
    layers = [0] * n_layers
    for tensor in file.tensors.values():
        block = block_of(tensor.name)
        if block is not None and block < n_layers:
            layers[block] += tensor.n_bytes
    return tuple(layers)


def decode_bytes(file: GgufFile, shape: ModelShape) -> int:
    """Bytes of weights one token reads: all but the token table (one row of it), and of experts those it uses."""
    total = 0
    for name, tensor in file.tensors.items():
        block = block_of(name)
        if block is not None and block >= shape.n_layers:
            continue
        if name == "token_embd.weight" and not shape.head_is_tied:
            total += tensor.n_bytes // tensor.shape[1]
        elif "_exps." in name:
            total += tensor.n_bytes * shape.n_experts_used // shape.n_experts
        else:
            total += tensor.n_bytes
    return total
