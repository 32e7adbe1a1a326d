"""Matrix products outside llama.cpp's graphs, with the same kernels. One of the files with ctypes."""

from __future__ import annotations

import ctypes as C
from collections.abc import Iterator
from contextlib import contextmanager

from edge.errors import EngineError
from edge.llama.buffers import Weight
from edge.llama.ggml import (
    _F32,
    _free,
    _ggml,
    _init,
    _InitParams,
    _mul_mat,
    _new_2d,
    _Tensor,
    cpu_device,
    cpu_procedure,
)
from edge.llama.thread_pool import ThreadPool

_ROOM = 1 << 16  # bytes for the structs of a graph of one product

_P = C.c_void_p
_new_graph = _ggml("ggml_new_graph_custom", _P, _P, C.c_size_t, C.c_bool)
_device_init = _ggml("ggml_backend_dev_init", _P, _P, C.c_char_p)
_backend_free = _ggml("ggml_backend_free", None, _P)
_compute = _ggml("ggml_backend_graph_compute", C.c_int, _P, _P)
_expand = _ggml("ggml_build_forward_expand", None, _P, _P)


@contextmanager
def loose_weight(type_id: int, columns: int, rows: int) -> Iterator[Weight]:
    """Yield a matrix that belongs to no model and has no memory of its own. It is valid inside the block."""
    memory = _init(_InitParams(_ROOM, None, True))
    try:
        yield Weight(_new_2d(memory, type_id, columns, rows))
    finally:
        _free(memory)


class Products:
    """Multiplication by weights on `threads` CPU threads. `close()` frees it."""

    def __init__(self, threads: int) -> None:
        """Raises EngineError if this build cannot compute on the CPU."""
        set_threads = cpu_procedure(b"ggml_backend_set_n_threads")
        self._backend = _device_init(cpu_device(), None)
        if not self._backend or not set_threads:
            raise EngineError("ggml has no CPU backend; reinstall llama-cpp-python")
        C.CFUNCTYPE(None, _P, C.c_int)(set_threads)(self._backend, threads)
        self._pool = ThreadPool(self._use_pool)
        self._pool.use(threads)

    def _use_pool(self, pool: int) -> None:
        if set_pool := cpu_procedure(b"ggml_backend_cpu_set_threadpool"):
            C.CFUNCTYPE(None, _P, _P)(set_pool)(self._backend, pool)

    def multiply(
        self, weight: Weight, address: int, rows: int, repacked: bool, x: int, n: int, out: int, stride: int
    ) -> None:
        """Multiply `n` float32 rows at address `x` by `rows` rows of a weight at `address`, and write the products to
        `out`.

        Each row of `out` has `rows` float32 values. `stride` is the distance of its rows in bytes.
        """
        memory = _init(_InitParams(_ROOM, None, True))
        try:
            part = weight.part(address, rows, repacked)
            source = _new_2d(memory, _F32, weight.shape[2], n)
            _Tensor.from_address(source).data = x
            product = _mul_mat(memory, C.addressof(part), source)
            t = _Tensor.from_address(product)
            t.data, t.nb[1] = out, stride
            t.nb[2] = t.nb[3] = stride * n
            graph = _new_graph(memory, 8, False)
            _expand(graph, product)
            if _compute(self._backend, graph):
                raise EngineError(f"ggml could not multiply by {weight.name}")
        finally:
            _free(memory)

    def close(self) -> None:
        _backend_free(self._backend)
        self._pool.close()
