"""Hidden states after a model's last layer, for its multi-token prediction (MTP) layers.

llama.cpp declares these calls in an unstable header (`src/llama-ext.h`), and llama-cpp-python in a module that it calls
experimental. This file is the only one that uses them. The import detects missing calls, and `check_library` reports
them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.errors import EngineError
from edge.llama.library import PINNED_VERSION
from edge.llama.library import llama_cpp as L
from edge.llama.llama import Context

_CALLS = ("llama_set_embeddings_nextn", "llama_get_embeddings_nextn", "llama_get_embeddings_nextn_ith")
_FIELDS = (("llama_model_params", "load_mtp"), ("llama_context_params", "ctx_type"))


def _open(package: Any) -> tuple[Any, str]:
    """Return the module with these calls and a description of the missing calls, "" if none is missing."""
    try:
        from llama_cpp import llama_cpp_ext
    except (ImportError, AttributeError) as error:  # AttributeError: the library lacks a call
        return None, str(error)
    lacking = [name for name in _CALLS if not hasattr(llama_cpp_ext, name)]
    lacking += [name for struct, name in _FIELDS if name not in dict(getattr(package, struct)._fields_)]
    lacking += [] if hasattr(package, "LLAMA_CONTEXT_TYPE_MTP") else ["LLAMA_CONTEXT_TYPE_MTP"]
    return llama_cpp_ext, f"there is no {', '.join(lacking)}" if lacking else ""


_ext, _problem = _open(L)


def check_library() -> None:
    """Raise EngineError if this llama.cpp lacks a call that multi-token prediction needs."""
    if _problem:
        raise EngineError(
            f"the llama.cpp in use cannot draft by a model's own layers: {_problem}; install"
            f" llama-cpp-python=={PINNED_VERSION}, or use --draft ngram"
        )


HiddenListener = Callable[[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32], NDArray[np.float32]], None]
"""Receives the tokens, positions and sequences of a step's rows, each [n], and the hidden states after the last
layer [n, n_embd]. The arrays are views that are valid during the call."""


class HiddenRows:
    """Hidden states of a context's last decode, before or after the last norm depending on the model's graph."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.listener: HiddenListener | None = None

    def give(self, *, only_outputs: bool = False) -> None:
        """Make later decodes keep the hidden state of each row, or only of rows with logits.

        Raises EngineError if this llama.cpp cannot do that.
        """
        check_library()
        self._context.gives_hidden = True
        _ext.llama_set_embeddings_nextn(self._context._handle, True, only_outputs)

    def rows(self, n: int) -> NDArray[np.float32]:
        """Return the hidden states [n, n_embd] of the first `n` rows that have one: a view until the next decode.

        Raises EngineError if the model gives no hidden states.
        """
        values = _ext.llama_get_embeddings_nextn(self._context._handle)
        return self._view(values, (n, L.llama_model_n_embd_out(self._context.model._handle)))

    def row(self, number: int) -> NDArray[np.float32]:
        """Return the hidden state [n_embd] of a row with logits: a view until the next decode."""
        values = _ext.llama_get_embeddings_nextn_ith(self._context._handle, number)
        return self._view(values, (L.llama_model_n_embd_out(self._context.model._handle),))

    def _view(self, values: Any, shape: tuple[int, ...]) -> NDArray[np.float32]:
        if not values:
            raise EngineError(f"llama.cpp gives no hidden states of {self._context.model.architecture} models")
        return np.ctypeslib.as_array(values, shape=shape)
