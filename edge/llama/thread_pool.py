"""Threads that compute graphs, if llama.cpp was built without OpenMP. One of the files with ctypes.

Such a build starts new threads for each graph unless it has a pool. A hook or a paged weight ends a graph at its node,
so one token would start threads many times.
"""

from __future__ import annotations

import ctypes as C
import functools
from collections.abc import Callable
from typing import Any

from edge.llama.ggml import _ggml, cpu_procedure
from edge.llama.library import llama_cpp as L

_P = C.c_void_p
_PARAMS_BYTES = 4096  # struct ggml_threadpool_params has 536 bytes in PINNED_VERSION
attach_to_context = _ggml("llama_attach_threadpool", None, _P, _P, _P)  # context, pool, pool for prompts
_init_params = _ggml("ggml_threadpool_params_init", None, _P, C.c_int)


@functools.cache
def needs_pool() -> bool:
    """Return whether this build computes without OpenMP."""
    return b"OPENMP = 1" not in L.llama_print_system_info()


class ThreadPool:
    """Threads of one context or backend. `close()` ends them."""

    def __init__(self, attach: Callable[[int], object]) -> None:
        """attach: gives ggml's address of a pool to the context or backend."""
        self._attach = attach
        self._pools: list[int] = []  # the last one is in use; another thread may still compute with an earlier one
        self._threads = 1  # the thread that computes is enough

    def use(self, threads: int) -> None:
        """Have at least `threads` threads from the next graph on. Does nothing in a build with OpenMP."""
        if threads <= self._threads or not needs_pool() or not (new := _procedure(b"ggml_threadpool_new", _P, _P)):
            return
        params = C.create_string_buffer(_PARAMS_BYTES)
        _init_params(params, threads)
        self._pools.append(new(params))
        self._threads = threads
        self._attach(self._pools[-1])

    def close(self) -> None:
        """End the threads. Call it after the context or backend was freed."""
        while self._pools:
            _procedure(b"ggml_threadpool_free", None, _P)(self._pools.pop())


def _procedure(name: bytes, result: Any, *arguments: Any) -> Any:
    address = cpu_procedure(name)
    return C.CFUNCTYPE(result, *arguments)(address) if address else None
