"""The token table of a model file: hidden states of tokens, looked up row by row and never loaded as a whole."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edge.errors import EngineError
from edge.llama import ggml
from partition.slices.rules import scales_input
from quant.gguf.file import GgufFile


class TokenTable:
    """Token embeddings of a model. The file stays mapped; only the requested rows are read."""

    def __init__(self, file: GgufFile) -> None:
        """EngineError where the file has no token table."""
        tensor = file.tensors.get("token_embd.weight")
        if tensor is None:
            raise EngineError(f"{file.path.name} has no token table, so it takes no text")
        self.n_embd, self.n_tokens = tensor.shape
        self._type = tensor.type.id
        self._rows = np.frombuffer(file.data(tensor.name), np.uint8).reshape(self.n_tokens, -1)
        self._scale = np.float32(math.sqrt(self.n_embd)) if scales_input(file.architecture) else None

    def look_up(self, tokens: Sequence[int] | NDArray[np.int32], out: NDArray[np.float32]) -> None:
        """Write the hidden states of `tokens` [n] to `out` [n, n_embd], with the bits llama.cpp would compute.

        EngineError for ids that are no tokens.
        """
        ids = np.asarray(tokens, np.int64)
        if ids.size and not 0 <= ids.min() <= ids.max() < self.n_tokens:
            raise EngineError(f"token ids are from 0 to {self.n_tokens - 1}, not {ids.min()} to {ids.max()}")
        ggml.dequantize_rows(self._rows[ids], self._type, out)
        if self._scale is not None:
            out *= self._scale
