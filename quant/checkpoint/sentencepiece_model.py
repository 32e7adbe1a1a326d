"""Reads a sentencepiece model (tokenizer.model), through the message classes of its own package."""

import math
from typing import Any

from quant.checkpoint.tokens import BYTE, CONTROL, NORMAL, SPACE, UNKNOWN, UNUSED, USER_DEFINED, Vocabulary, string
from quant.errors import ModelFileError

_BPE = 2  # of the trainer's model types: pairs are merged by score, as llama.cpp does
_TYPES = {1: NORMAL, 2: UNKNOWN, 3: CONTROL, 4: USER_DEFINED, 5: UNUSED, 6: BYTE}


def read_sentencepiece(raw: bytes) -> Vocabulary:
    """The pieces of a model, not yet filled up to the size of a table.

    ModelFileError for a file that is none, was trained in another way, or where the package is not installed.
    """
    proto = _parsed(raw)
    if proto.trainer_spec.model_type != _BPE:
        raise ModelFileError(
            f"tokenizer.model: it is of type {proto.trainer_spec.model_type}; llama.cpp's tokenizer needs BPE, type 2"
        )
    tokens, types, scores = [], [], []
    for piece in proto.pieces:
        kind = _TYPES.get(piece.type, NORMAL)
        if not math.isfinite(piece.score):
            raise ModelFileError(f"tokenizer.model: piece {piece.piece!r:.60} has the score {piece.score}")
        text = string(piece.piece, "tokenizer.model")
        # Looked for in text whose spaces are still spaces.
        tokens.append(text.replace(SPACE, " ") if kind == USER_DEFINED else text)
        types.append(kind)
        scores.append(piece.score)
    return Vocabulary("llama", "default", tokens, types, scores, [], proto.normalizer_spec.add_dummy_prefix)


def _parsed(raw: bytes) -> Any:
    try:
        from google.protobuf.message import DecodeError
        from sentencepiece import sentencepiece_model_pb2
    except ImportError as exc:
        raise ModelFileError(
            'tokenizer.model: reading it needs the sentencepiece package; pip install "edge-runtime[quantize]"'
        ) from exc
    try:
        proto = sentencepiece_model_pb2.ModelProto.FromString(raw)
    except DecodeError as exc:
        raise ModelFileError(f"tokenizer.model: this is no sentencepiece model: {exc}; download it again") from exc
    if not proto.pieces:
        raise ModelFileError("tokenizer.model: it has no pieces; download it again")
    return proto
