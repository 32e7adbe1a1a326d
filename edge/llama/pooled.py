"""llama.cpp contexts that compute one vector per text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.errors import EngineError
from edge.llama.library import llama_cpp as L
from edge.llama.llama import Batch, Model, captured_log


class PooledContext:
    """Context that computes one vector per text, by the model's own pooling or else by mean pooling."""

    def __init__(self, model: Model, tokens: int, threads: int, *, ranks: bool = False) -> None:
        """Create the context.

        tokens: maximum number of tokens in a text.
        ranks: the vector is the output of the model's ranking head.
        Raises EngineError if llama.cpp cannot create it.
        """
        params = L.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = params.n_outputs_max = tokens
        params.n_threads = params.n_threads_batch = threads
        params.embeddings = True
        self._handle: Any = None
        own, rank = L.LLAMA_POOLING_TYPE_UNSPECIFIED, L.LLAMA_POOLING_TYPE_RANK
        for pooling in (own,) if ranks else (own, L.LLAMA_POOLING_TYPE_MEAN):
            params.pooling_type = pooling
            with captured_log() as lines:
                self._handle = L.llama_init_from_model(model._handle, params)
            if not self._handle:
                reason = lines[-1] if lines else "it gives no reason"
                raise EngineError(f"llama.cpp cannot make a context to pool texts: {reason}")
            there = L.llama_pooling_type(self._handle)
            if there == rank if ranks else there not in (L.LLAMA_POOLING_TYPE_NONE, rank):
                break
            self.close()
        if not self._handle:
            raise EngineError("this model has no ranking head")
        self._width: int = (L.llama_model_n_cls_out if ranks else L.llama_model_n_embd_out)(model._handle)
        self._batch = Batch(tokens)

    def pooled(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Return the vector of a text of token ids: [n_embd], or [outputs of the ranking head]."""
        n, batch = len(tokens), self._batch
        batch.tokens[:n], batch.positions[:n], batch.sequences[:n], batch.outputs[:n] = tokens, range(n), 0, 1
        batch.native.n_tokens = n
        L.llama_memory_clear(L.llama_get_memory(self._handle), True)
        if code := L.llama_decode(self._handle, batch.native):
            raise EngineError(f"llama.cpp cannot compute the text: llama_decode returned {code}")
        values = L.llama_get_embeddings_seq(self._handle, 0)
        if not values:
            raise EngineError("this model gives no embeddings")
        return np.array(np.ctypeslib.as_array(values, shape=(self._width,)))

    def close(self) -> None:
        if self._handle:
            L.llama_free(self._handle)
            self._handle = None
