"""Predictor layers: layers after a model's last one that predict further tokens (multi-token prediction, MTP).

This module lists the tensors that the first of them needs, and the reasons why llama.cpp cannot compute it.
"""

from partition.architectures.table import ASSERTED
from partition.model.file import ModelFile
from partition.model.metadata import MAX_COUNT, Metadata
from partition.model.model import block_of
from quant.gguf.file import TensorInfo

COUNT_KEY = "nextn_predict_layers"
# Tensors that join a hidden state and a token's row.
_JOINS = ("nextn.eh_proj.weight", "nextn.enorm.weight", "nextn.hnorm.weight")
# Tensors of a predictor layer that replace the model's own tensors.
_OWN = {"nextn.embed_tokens.weight": "token_embd.weight", "nextn.shared_head_head.weight": "output.weight"}
_HEAD, _TABLE = "output.weight", "token_embd.weight"


def why_no_predictor(file: ModelFile) -> str:
    """Return the reason why a model's own layers cannot draft tokens; "" if they can.

    Raises ModelFileError for impossible metadata.
    """
    meta = Metadata(file)
    count = meta.count(COUNT_KEY, 0)
    if not count:
        return "it has no layers that predict further tokens"
    row = ASSERTED.get(file.architecture)
    known = row.predictors if row else None
    if known is None:
        return f"llama.cpp computes no such layers of {file.architecture} models here"
    if count > known.most:
        return f"it has {count} layers that predict further tokens, and llama.cpp computes {known.most}"
    layer = file.shape.n_layers
    lacking = [name for name in (*_JOINS, *known.needs) if f"blk.{layer}.{name}" not in file.tensors]
    if lacking:
        return f"it says that it has layers that predict further tokens, and lacks blk.{layer}.{lacking[0]}"
    if "ffn_gate_inp.weight" in known.needs and meta.count("leading_dense_block_count", 0, most=MAX_COUNT) > layer:
        return "its layer that predicts further tokens is said to have no experts"
    not_zero = [name for name in known.zero if file.metadata.get(meta.key(name))]
    return f"llama.cpp computes no such layers where {meta.key(not_zero[0])} is set" if not_zero else ""


def predictor_tensors(file: ModelFile) -> list[TensorInfo]:
    """Return the tensors that the first predictor layer reads: its own, and common tensors that it does not replace."""
    layer = file.shape.n_layers
    replaced = {whole for own, whole in _OWN.items() if f"blk.{layer}.{own}" in file.tensors}
    if (
        _HEAD not in file.tensors
        and _TABLE in replaced
        and f"blk.{layer}.nextn.shared_head_head.weight" not in file.tensors
    ):
        replaced.remove(_TABLE)  # the table is also the head
    return [t for t in file.tensors.values() if block_of(t.name) in (None, layer) and t.name not in replaced]
