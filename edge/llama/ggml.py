"""Interface to ggml: tensor layout, graph nodes, quantization. One of the files with ctypes.

Importing this module reads one tensor through ggml's accessors and through our copy of its struct. If the two disagree,
the import raises EngineError: the layout belongs to one exact version of llama-cpp-python.
"""

from __future__ import annotations

import ctypes as C
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.errors import EngineError
from edge.llama.library import LIB_PATH, PINNED_VERSION, described, libllama
from edge.llama.library import llama_cpp as L

_F32, _I32 = 0, 26  # ggml type ids
_NO_OP = 0


class _Tensor(C.Structure):
    """struct ggml_tensor as PINNED_VERSION has it."""

    _fields_ = (
        ("type", C.c_int),
        ("buffer", C.c_void_p),
        ("ne", C.c_int64 * 4),
        ("nb", C.c_size_t * 4),
        ("op", C.c_int),
        ("op_params", C.c_int32 * 16),
        ("flags", C.c_int32),
        ("src", C.c_void_p * 10),
        ("view_src", C.c_void_p),
        ("view_offs", C.c_size_t),
        ("data", C.c_void_p),
        ("name", C.c_char * 64),
        ("extra", C.c_void_p),
        ("padding", C.c_char * 8),
    )


def _ggml(name: str, result: Any, *arguments: Any) -> Any:
    function = getattr(libllama, name, None)
    if function is None:
        raise EngineError(
            f"{described()}, lacks {name}; expected a library with all functions, as llama-cpp-python"
            f" {PINNED_VERSION} brings it"
        )
    function.restype, function.argtypes = result, list(arguments)
    return function


_get_name = _ggml("ggml_get_name", C.c_char_p, C.c_void_p)
_get_data = _ggml("ggml_get_data", C.c_void_p, C.c_void_p)
_nbytes = _ggml("ggml_nbytes", C.c_size_t, C.c_void_p)
_tensor_get = _ggml("ggml_backend_tensor_get", None, C.c_void_p, C.c_void_p, C.c_size_t, C.c_size_t)
_tensor_set = _ggml("ggml_backend_tensor_set", None, C.c_void_p, C.c_void_p, C.c_size_t, C.c_size_t)
_row_size = _ggml("ggml_row_size", C.c_size_t, C.c_int, C.c_int64)
_buffer_is_host = _ggml("ggml_backend_buffer_is_host", C.c_bool, C.c_void_p)
_device_by_type = _ggml("ggml_backend_dev_by_type", C.c_void_p, C.c_int)
_device_registry = _ggml("ggml_backend_dev_backend_reg", C.c_void_p, C.c_void_p)
_procedure = _ggml("ggml_backend_reg_get_proc_address", C.c_void_p, C.c_void_p, C.c_char_p)
_device_count = _ggml("ggml_backend_dev_count", C.c_size_t)
_device = _ggml("ggml_backend_dev_get", C.c_void_p, C.c_size_t)
_device_type = _ggml("ggml_backend_dev_type", C.c_int, C.c_void_p)
_device_name = _ggml("ggml_backend_dev_name", C.c_char_p, C.c_void_p)
_device_description = _ggml("ggml_backend_dev_description", C.c_char_p, C.c_void_p)
_device_memory = _ggml("ggml_backend_dev_memory", None, C.c_void_p, C.POINTER(C.c_size_t), C.POINTER(C.c_size_t))
_set_node_callback = _ggml("ggml_backend_sched_set_eval_callback", None, C.c_void_p, C.c_void_p, C.c_void_p)
# C++ symbol of llama.cpp, because the C interface has no such function. None if a build hides the symbol.
_get_scheduler: Any = getattr(libllama, "_ZNK13llama_context9get_schedEv", lambda context: None)
_get_scheduler.restype, _get_scheduler.argtypes = C.c_void_p, [C.c_void_p]
_CPU_DEVICE = 0
_GPU_DEVICES = (1, 2)  # types of GPUs with their own memory, and of GPUs that use the machine's memory
_op_name = _ggml("ggml_op_name", C.c_char_p, C.c_int)
_quantize_chunk = _ggml(
    "ggml_quantize_chunk", C.c_size_t, C.c_int, C.c_void_p, C.c_void_p, C.c_int64, C.c_int64, C.c_int64, C.c_void_p
)


class _TypeTraits(C.Structure):
    """struct ggml_type_traits as PINNED_VERSION has it, up to the dequantization function."""

    _fields_ = (
        ("type_name", C.c_char_p),
        ("blck_size", C.c_int64),
        ("blck_size_interleave", C.c_int64),
        ("type_size", C.c_size_t),
        ("is_quantized", C.c_bool),
        ("to_float", C.CFUNCTYPE(None, C.c_void_p, C.c_void_p, C.c_int64)),
    )


_type_traits = _ggml("ggml_get_type_traits", C.POINTER(_TypeTraits), C.c_int)


class _InitParams(C.Structure):
    _fields_ = (("mem_size", C.c_size_t), ("mem_buffer", C.c_void_p), ("no_alloc", C.c_bool))


_init = _ggml("ggml_init", C.c_void_p, _InitParams)
_free = _ggml("ggml_free", None, C.c_void_p)
_new_2d = _ggml("ggml_new_tensor_2d", C.c_void_p, C.c_void_p, C.c_int, C.c_int64, C.c_int64)
_mul_mat = _ggml("ggml_mul_mat", C.c_void_p, C.c_void_p, C.c_void_p, C.c_void_p)


def check_layout(version: str = L.__version__) -> None:
    """Raise EngineError unless `_Tensor` matches the tensor layout of this build of ggml."""
    memory = _init(_InitParams(1 << 20, None, False))
    a, b = _new_2d(memory, _F32, 32, 3), _new_2d(memory, _F32, 32, 5)
    _ggml("ggml_set_name", C.c_void_p, C.c_void_p, C.c_char_p)(a, b"layout.weight")
    product = _mul_mat(memory, a, b)
    view = _ggml("ggml_view_1d", C.c_void_p, C.c_void_p, C.c_void_p, C.c_int64, C.c_size_t)(memory, a, 16, 64)
    q4_0 = _type_traits(2).contents
    t, p, v = _Tensor.from_address(a), _Tensor.from_address(product), _Tensor.from_address(view)
    same = (
        t.name == _get_name(a) == b"layout.weight"
        and t.data == _get_data(a)
        and tuple(t.ne) == (32, 3, 1, 1)
        and t.nb[1] * t.ne[1] == _nbytes(a)
        and tuple(p.ne) == (3, 5, 1, 1)
        and tuple(p.src[:3]) == (a, b, None)
        and v.view_src == a
        and v.view_offs == 64
        and (q4_0.blck_size, q4_0.type_size, q4_0.is_quantized) == (32, 18, True)
    )
    _free(memory)
    if not same:
        raise EngineError(
            f"llama-cpp-python {version} lays tensors out differently from {PINNED_VERSION}, which this runtime was"
            f" checked with; install llama-cpp-python=={PINNED_VERSION}, and leave {LIB_PATH} unset"
        )


check_layout()


_MOST_VIEWS = 4096
_views: dict[tuple[int, ...], NDArray[np.float32]] = {}


def use_node_callback(context: Any, callback: Any) -> None:
    """Set the callback, or None, for the reused graph of the last decode. A new graph gets the callback of its context.

    context: handle of an open context.
    """
    if scheduler := _get_scheduler(context):
        _set_node_callback(scheduler, callback, None)


class Node:
    """Node of the graph that is being computed. Valid only during a node callback."""

    __slots__ = ("address",)

    def __init__(self, address: int) -> None:
        self.address = address

    @property
    def name(self) -> str:
        return bytes(_get_name(self.address)).decode(errors="replace")

    @property
    def weight(self) -> str:
        """Return the name of the node's first source, or "" without a source. For a matrix product this is the weight.

        If ggml's scheduler moves a product to another backend, the source is a copy called BACKEND#NAME#NUMBER.
        """
        source = _Tensor.from_address(self.address).src[0]
        name = bytes(_get_name(source)).decode(errors="replace") if source else ""
        return name.split("#")[1] if name.count("#") == 2 else name

    def adapted_weight(self) -> tuple[str, int] | None:
        """Return the weight and the number of adapters added so far, if this node adds an adapter's result to a
        product.

        Return None for any other node.
        """
        product, added = (_Tensor.from_address(self.address).src[i] for i in (0, 1))
        scaled = _Tensor.from_address(added).src[0] if product and added and self.op == "ADD" else None
        matrix = Node(scaled).weight if scaled else ""
        if not matrix.endswith(".lora_b"):
            return None
        _, before = Node(product).adapted_weight() or ("", 0)
        return matrix.removesuffix(".lora_b"), before + 1

    @property
    def op(self) -> str:
        """Return the name of the node's operation in ggml, such as "MUL_MAT"."""
        return bytes(_op_name(_Tensor.from_address(self.address).op)).decode()

    @property
    def source(self) -> int:
        """Return the address of the first source's struct, or 0 if the node has no source."""
        return _Tensor.from_address(self.address).src[0] or 0

    @property
    def sources(self) -> tuple[int, ...]:
        """Return the addresses of all source structs, with 0 for unused places."""
        return tuple(address or 0 for address in _Tensor.from_address(self.address).src)

    @property
    def viewed(self) -> tuple[int, ...]:
        """Return the addresses of the tensors behind this node and its sources, if these are views."""
        own = _Tensor.from_address(self.address)
        tensors = (own, *(_Tensor.from_address(address) for address in own.src if address))
        return tuple(address.view_src for address in tensors if address.view_src)

    def skip(self) -> Callable[[], None]:
        """Make the graph skip this node. Return a function that restores it.

        Call that function before the graph is reused or freed.
        """
        t = _Tensor.from_address(self.address)
        op, t.op = t.op, _NO_OP

        def restore() -> None:
            t.op = op

        return restore

    def use_source(self, tensor: _Tensor, index: int = 0) -> Callable[[], None]:
        """Make `tensor` the node's source `index`. Return a function that restores the original source.

        Call that function before the graph is reused or freed. `tensor` must live until then.
        """
        t = _Tensor.from_address(self.address)
        source, t.src[index] = t.src[index], C.addressof(tensor)

        def restore() -> None:
            t.src[index] = source

        return restore

    def with_integers(self, values: NDArray[np.int32]) -> _Tensor:
        """Return a copy of the node's struct with other values [rows, columns]. The values must outlive the struct."""
        t = _Tensor.from_buffer_copy(_Tensor.from_address(self.address))
        t.nb[1], t.nb[2], t.nb[3] = values.strides[0], values.nbytes, values.nbytes
        t.data = values.ctypes.data
        return t

    def product_addresses(self) -> tuple[int, int]:
        """Return the host addresses of a matrix product's input rows and of its result.

        Raises EngineError unless the rows of both are contiguous.
        """
        t = _Tensor.from_address(self.address)
        x = _Tensor.from_address(t.src[1])
        if x.type != _F32 or x.nb[1] != 4 * x.ne[0] or t.nb[1] != 4 * t.ne[0] or not _buffer_is_host(t.buffer):
            raise EngineError(f"the product {self.name} is not laid out row after row, so it cannot be cut")
        return x.data, t.data

    def integers(self) -> NDArray[np.int32]:
        """Return a copy of the node's int32 values [rows, columns]."""
        values: NDArray[np.int32] = self.values()[0, 0]
        if values.dtype != np.int32:
            raise EngineError(f"node {self.name} does not hold integers")
        return values

    def values(self) -> NDArray[Any]:
        """Return a copy of the node's float32 or int32 values [ne3, ne2, ne1, ne0] from any memory and any row stride.

        Raises EngineError for other types or if the values of a row are not contiguous.
        """
        t = _Tensor.from_address(self.address)
        if t.type not in (_F32, _I32) or t.nb[0] != 4:
            raise EngineError(f"node {self.name} of ggml type {t.type} does not hold rows of numbers of 32 bits")
        raw = np.empty(_nbytes(self.address), np.uint8)
        _tensor_get(self.address, raw.ctypes.data, 0, raw.nbytes)
        kind = np.float32 if t.type == _F32 else np.int32
        values: NDArray[Any] = np.ndarray(tuple(t.ne)[::-1], kind, raw, strides=tuple(t.nb)[::-1])
        return values

    @property
    def shape(self) -> tuple[int, int]:
        """Return (rows, columns) in numpy's order. A hidden state has (tokens, embedding length)."""
        ne = _Tensor.from_address(self.address).ne
        return ne[1] * ne[2] * ne[3], ne[0]

    def view(self) -> NDArray[np.float32] | None:
        """Return the node's float32 values [rows, columns] in place, or None if they are not in host memory.

        Views are cached by address, because the nodes of a reused graph stay at their addresses.
        """
        t = _Tensor.from_address(self.address)
        key = (t.data, *t.ne)
        # another thread may clear the cache, if two engines of this process compute concurrently
        view = _views.get(key)
        if view is not None:
            return view
        n = math.prod(t.ne)
        if t.type != _F32 or not t.buffer or not _buffer_is_host(t.buffer) or _nbytes(self.address) != 4 * n:
            return None
        if n == 0:
            return np.empty(self.shape, np.float32)
        if len(_views) >= _MOST_VIEWS:
            _views.clear()
        view = _views[key] = np.frombuffer((C.c_float * n).from_address(t.data), np.float32).reshape(self.shape)
        return view

    def read(self, out: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
        """Return a copy of the node's float32 values [rows, columns], from any memory."""
        if out is None:
            out = np.empty(self.shape, np.float32)
        self._check(out)
        _tensor_get(self.address, out.ctypes.data, 0, out.nbytes)
        return out

    def write(self, values: NDArray[np.float32]) -> None:
        """Replace the node's values for the rest of the graph."""
        values = np.ascontiguousarray(values, np.float32)
        self._check(values)
        _tensor_set(self.address, values.ctypes.data, 0, values.nbytes)

    def _check(self, values: NDArray[np.float32]) -> None:
        # If sizes differ ggml aborts, and it would read other types as floats.
        kind, n_bytes = _Tensor.from_address(self.address).type, _nbytes(self.address)
        if kind != _F32 or values.nbytes != n_bytes:
            raise EngineError(
                f"node {self.name} holds {n_bytes} bytes of ggml type {kind},"
                f" {values.nbytes} bytes of float32 were requested or given"
            )


def forget_views() -> None:
    """Clear the cache of node views, because their memory is about to be freed."""
    _views.clear()


def cpu_device() -> int:
    """Return ggml's handle of this machine's CPU. Raises EngineError if this build has no CPU backend."""
    device = _device_by_type(_CPU_DEVICE)
    if not device:
        raise EngineError("ggml has no CPU backend; reinstall llama-cpp-python")
    return int(device)


def gpu_names() -> list[str]:
    """Return the GPUs of this build by ggml's and the driver's name: "Vulkan0 (llvmpipe)"."""
    return [
        f"{_device_name(device).decode(errors='replace')} ({_device_description(device).decode(errors='replace')})"
        for kind in _GPU_DEVICES
        for device in _devices(kind)
    ]


def gpu_devices() -> list[int]:
    """Return ggml's handles of the GPUs that llama.cpp uses: GPUs with their own memory, or else integrated GPUs."""
    return next((devices for kind in _GPU_DEVICES if (devices := _devices(kind))), [])


def discrete_gpus() -> list[int]:
    """Return ggml's handles of the GPUs that have memory of their own. Metal's share the memory of the processor."""
    return [] if sys.platform == "darwin" else _devices(_GPU_DEVICES[0])


def device_name(device: int) -> str:
    """Return ggml's name of a device: "Vulkan0"."""
    return bytes(_device_name(device)).decode(errors="replace")


def gpu_free_bytes(devices: Sequence[int] | None = None) -> int | None:
    """Return the free bytes on `devices` (default: the GPUs that llama.cpp uses), or None if a driver does not
    report them."""
    memory = [gpu_memory_bytes(device) for device in (gpu_devices() if devices is None else devices)]
    return None if None in memory else sum(free for free, _ in filter(None, memory))


def gpu_memory_bytes(device: int) -> tuple[int, int] | None:
    """Return (free bytes, bytes) of a device's memory, or None if its driver does not report them."""
    free, total = C.c_size_t(), C.c_size_t()
    _device_memory(device, C.byref(free), C.byref(total))
    return (free.value, total.value) if total.value else None


def gpu_bytes() -> tuple[int, int] | None:
    """Return the total and the free bytes of the GPUs that llama.cpp uses, or None if a driver does not report them."""
    memory = [gpu_memory_bytes(device) for device in gpu_devices()]
    known = [pair for pair in memory if pair is not None]
    return (sum(total for _, total in known), sum(free for free, _ in known)) if len(known) == len(memory) > 0 else None


def _devices(kind: int) -> list[int]:
    """Return ggml's handles of the devices of a kind."""
    return [device for i in range(_device_count()) if _device_type(device := _device(i)) == kind]


def cpu_procedure(name: bytes) -> int | None:
    """Return the address of a function of ggml's CPU backend, or None if this build lacks it."""
    return _procedure(_device_registry(cpu_device()), name)  # type: ignore[no-any-return]


def quantize_rows(
    values: NDArray[np.float32], type_id: int, importance: NDArray[np.float32] | None = None
) -> NDArray[np.uint8]:
    """Return `values` [rows, columns] quantized to ggml type `type_id`, as [rows, bytes per row].

    The number of columns must be a multiple of the block size. Runs without the interpreter's lock.
    importance: weight of each column, float32 [columns]. Some types require it.
    """
    rows, columns = values.shape
    values = np.ascontiguousarray(values, np.float32)
    out = np.empty((rows, _row_size(type_id, columns)), np.uint8)
    weights = None if importance is None else importance.ctypes.data
    written = _quantize_chunk(type_id, values.ctypes.data, out.ctypes.data, 0, rows, columns, weights)
    if written != out.nbytes:
        raise EngineError(f"ggml wrote {written} bytes of type {type_id} where {out.nbytes} were expected")
    return out


def dequantize_rows(rows: NDArray[np.uint8], type_id: int, out: NDArray[np.float32]) -> None:
    """Dequantize `rows` [n, bytes per row] of ggml type `type_id` into `out` [n, columns]."""
    if type_id == _F32:
        out[:] = rows.view(np.float32)
        return
    traits = _type_traits(type_id).contents
    if not traits.to_float or out.size * traits.type_size != rows.nbytes * traits.blck_size:
        raise EngineError(f"{rows.nbytes} bytes of ggml type {type_id} are not {out.size} values")
    traits.to_float(rows.ctypes.data, out.ctypes.data, out.size)
