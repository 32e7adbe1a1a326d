"""Sizes of a model for the planner, from a GGUF file: layers, heads and bytes."""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from partition.model.metadata import Metadata
from quant.gguf.file import GgufFile
from quant.gguf.header import GgufArray
from quant.types import TensorType

MAX_LAYERS = 512  # limit of llama.cpp
_BLOCK = re.compile(r"blk\.([0-9]{1,9})\.")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of one model. Tuples by layer have `n_layers` items; a layer without attention has 0 heads.

    Predictor layers, which predict further tokens, come after these layers. They are not counted, because no answer
    needs them (`partition.model.predictors`).
    """

    architecture: str
    name: str
    n_layers: int
    n_embd: int  # values of a hidden state
    n_heads: tuple[int, ...]  # query heads of each layer
    n_heads_kv: tuple[int, ...]  # key and value heads of each layer
    head_k: int  # values of one key or query
    head_v: int  # values of one value vector
    n_ff: tuple[int, ...]  # FFN columns of each layer (of one expert if there is no dense FFN)
    n_experts: int  # number of experts; 0 for a dense model
    n_experts_used: int  # experts that process a token
    n_vocab: int
    context_length: int  # tokens of context in training
    n_params: int
    weight_bytes: int  # bytes of all tensors, each counted once
    bytes_by_type: Mapping[str, int]  # bytes by tensor type, largest first
    layer_bytes: tuple[int, ...]  # bytes of each layer's weights
    embedding_bytes: int  # bytes of the token table
    head_bytes: int  # bytes of the output matrix; of the token table if it is tied
    head_is_tied: bool  # true if the token table is also the output matrix

    @classmethod
    def from_gguf(cls, file: GgufFile) -> "ModelShape":
        """Return the sizes of `file`. Raises ModelFileError if the metadata are incomplete or contradictory."""
        meta = Metadata(file)
        n_all = meta.count("block_count", least=1, most=MAX_LAYERS)
        n_layers = n_all - meta.count("nextn_predict_layers", 0, most=n_all)
        if not n_layers:
            raise meta.error("it has only layers that predict several tokens at once; get the whole model")
        n_embd = meta.count("embedding_length", least=1)
        heads = meta.per_layer("attention.head_count", n_all, 0)
        # llama.cpp computes the head size from the first layer's heads.
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
        """Return the bytes of the KV cache for `context` tokens over all layers.

        This is the sum over layers of context * (bytes of n_heads_kv * head_k values in type_k + bytes of n_heads_kv *
        head_v values in type_v). It ignores attention windows, which reduce the need, and the state of recurrent
        layers, which does not grow. Raises ValueError if a type's blocks do not divide a layer's keys or values.
        """
        return sum(self.kv_layer_bytes(layer, context, type_k, type_v) for layer in range(self.n_layers))

    def kv_layer_bytes(self, layer: int, context: int, type_k: TensorType, type_v: TensorType) -> int:
        """Return the part of `kv_bytes` for one layer."""
        heads = self.n_heads_kv[layer]
        return context * (type_k.n_bytes(heads * self.head_k) + type_v.n_bytes(heads * self.head_v))


def block_of(tensor_name: str) -> int | None:
    """Return the layer that a tensor belongs to ("blk.7.attn_q.weight" to 7); None for tensors outside layers."""
    match = _BLOCK.match(tensor_name)
    return int(match[1]) if match else None


def vocabulary_size(meta: Metadata) -> int:
    """Return the number of tokens: the length of the list, else `vocab_size`, else the token table's rows, else 0."""
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
    """Return the bytes of weights that one token reads: one row of the token table, the used experts, and all
    others."""
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
