"""Place model weights in our own memory by a buffer type for llama.cpp. One of the files with ctypes.

The buffer type reserves addresses and records every tensor, and loads nothing. The runtime sets the real address of a
tensor later, and may change it between two nodes of a graph.
"""

from __future__ import annotations

import ctypes as C
import functools
import itertools
from collections.abc import Callable
from copy import copy
from typing import Any

from edge.errors import EngineError, NotEnoughMemory
from edge.llama.address_space import AddressSpace
from edge.llama.ggml import _ggml, _nbytes, _row_size, _Tensor, _tensor_set, cpu_device, cpu_procedure, device_name
from edge.llama.library import PINNED_VERSION
from edge.llama.library import llama_cpp as L

ROW_GROUP = 32  # number of rows in a repacked chunk is a multiple of this; ggml's layouts interleave 4, 8 or 16 rows

_P = C.c_void_p
_Alloc = C.CFUNCTYPE(_P, _P, C.c_size_t)
_GetName = C.CFUNCTYPE(_P, _P)
_InitTensor = C.CFUNCTYPE(C.c_int, _P, _P)
_SetTensor = C.CFUNCTYPE(None, _P, _P, _P, C.c_size_t, C.c_size_t)

_cpu_type = _ggml("ggml_backend_cpu_buffer_type", _P)
_type_name = _ggml("ggml_backend_buft_name", C.c_char_p, _P)
_from_pointer = _ggml("ggml_backend_cpu_buffer_from_ptr", _P, _P, C.c_size_t)
_get_base = _ggml("ggml_backend_buffer_get_base", _P, _P)
_get_size = _ggml("ggml_backend_buffer_get_size", C.c_size_t, _P)
_alloc_buffer = _ggml("ggml_backend_buft_alloc_buffer", _P, _P, C.c_size_t)
_init_tensor = _ggml("ggml_backend_buffer_init_tensor", C.c_int, _P, _P)
_type_size = _ggml("ggml_type_size", C.c_size_t, C.c_int)
_device_type = _ggml("ggml_backend_dev_buffer_type", _P, _P)
_device_host_type = _ggml("ggml_backend_dev_host_buffer_type", _P, _P)
_alignment = _ggml("ggml_backend_buft_get_alignment", C.c_size_t, _P)
_max_size = _ggml("ggml_backend_buft_get_max_size", C.c_size_t, _P)
_alloc_size = _ggml("ggml_backend_buft_get_alloc_size", C.c_size_t, _P, _P)
_set_usage = _ggml("ggml_backend_buffer_set_usage", None, _P, C.c_int)
_free_buffer = _ggml("ggml_backend_buffer_free", None, _P)
_WEIGHTS = 1  # buffer usage: the device with this buffer computes the matrix products


class _BufferType(C.Structure):
    """struct ggml_backend_buffer_type as PINNED_VERSION has it."""

    _fields_ = (
        ("get_name", _P),
        ("alloc_buffer", _P),
        ("get_alignment", _P),
        ("get_max_size", _P),
        ("get_alloc_size", _P),
        ("is_host", _P),
        ("device", _P),
        ("context", _P),
    )


class _Buffer(C.Structure):
    """struct ggml_backend_buffer as PINNED_VERSION has it."""

    _fields_ = (
        ("free_buffer", _P),
        ("get_base", _P),
        ("init_tensor", _P),
        ("memset_tensor", _P),
        ("set_tensor", _P),
        ("get_tensor", _P),
        ("set_tensor_2d", _P),
        ("get_tensor_2d", _P),
        ("cpy_tensor", _P),
        ("clear", _P),
        ("reset", _P),
        ("buft", _P),
        ("context", _P),
        ("size", C.c_size_t),
        ("usage", C.c_int),
    )


class _Override(C.Structure):
    """struct llama_model_tensor_buft_override."""

    _fields_ = (("pattern", C.c_char_p), ("buft", _P))


class Weight:
    """Weight of a loaded model, as graph nodes use it."""

    __slots__ = (
        "_n_matrices", "_plain", "_strides", "_tensor", "_traits", "_twins", "_type", "address", "n_bytes", "name",
        "row_bytes", "rows", "shape",
    )  # fmt: skip

    def __init__(self, address: int) -> None:
        t = self._tensor = _Tensor.from_address(address)
        self.address = address  # address of ggml's struct; nodes refer to their sources by it
        self.name = bytes(t.name).decode(errors="replace")
        # Matrices (more than one for experts), rows of one matrix, columns.
        self.shape = int(t.ne[2] * t.ne[3]), int(t.ne[1]), int(t.ne[0])
        self.rows = self.shape[0] * self.shape[1]
        self._n_matrices = self.shape[0]
        self._plain = t.buffer
        self._twins: list[_Tensor] = []
        self._set_type(t.type)

    def _set_type(self, type_id: int) -> None:
        self._type, self._strides = type_id, _strides(type_id, self.shape[::-1])
        self.row_bytes = self._strides[1]
        self.n_bytes = self.row_bytes * self.rows
        self._traits = self._layout()

    def _layout(self) -> int | None:
        """Return ggml's handle of the repacked layout for the weight, or None if it would not repack it."""
        if not (buffer := _repack_buffer()):
            return None
        t = _Tensor.from_buffer_copy(self._tensor)  # ggml stores the layout in this copy
        t.type, t.ne[2], t.nb[:] = self._type, self.shape[0], self._strides
        t.buffer, t.extra = buffer, None
        return None if _init_tensor(buffer, C.addressof(t)) else t.extra or None

    def in_type(self, type_id: int) -> Weight:
        """Return a copy of this weight with another ggml type. If the copy is pointed to data, graphs compute with
        that type."""
        other = copy(self)
        other._set_type(type_id)
        return other

    @property
    def repacks(self) -> bool:
        """Return whether this CPU has faster kernels for a repacked layout of the weight. The layout has the same
        size."""
        return self._traits is not None

    def add_twin(self, address: int) -> None:
        """Make one more of ggml's structs follow this weight. Gemma 4 has two: one for the head and one for the
        token table."""
        self._twins.append(_Tensor.from_address(address))

    def point(self, address: int, repacked: bool) -> None:
        """Move the weight to `address` from the next node on. repacked: the data has this CPU's layout."""
        for t in (self._tensor, *self._twins):
            t.data, t.type, t.ne[2] = address, self._type, self._n_matrices
            t.nb[:] = self._strides
            t.buffer, t.extra = (_repack_buffer(), self._traits) if repacked else (self._plain, None)

    def place(self, buffer: DeviceBuffer, offset: int) -> None:
        """Place the weight at byte `offset` of a device's buffer, for graphs that are built later. Nothing is
        copied."""
        for t in (self._tensor, *self._twins):
            t.data, t.buffer, t.extra = buffer.address + offset, buffer.handle, None

    def copy_from(self, source: int) -> None:
        """Copy the weight from an address in host memory to its place on the device, and wait for the copy.

        Runs without the interpreter's lock. Raises EngineError if the device stores weights in a form of its own.
        """
        self.begin_copy()
        self.copy_part(source, 0, _nbytes(self.address))

    def begin_copy(self) -> None:
        """Prepare the weight's place on the device. Raises EngineError if the device stores weights in a form of its
        own."""
        if _init_tensor(self._tensor.buffer, self.address) or self._tensor.extra:
            raise EngineError(f"{self.name} cannot be copied into a buffer of this GPU; use --gpu-layers")

    def copy_part(self, source: int, start: int, n_bytes: int) -> None:
        """Copy `n_bytes` from an address in host memory to byte `start` of the weight on the device, and wait for the
        copy. Runs without the interpreter's lock."""
        _tensor_set(self.address, source, start, n_bytes)

    def replace(self, type_id: int, address: int) -> Callable[[], None]:
        """Replace the weight by the data at `address`, of another ggml type, from the next node on.

        Return a function that restores the original. The weight must not be repacked.
        """
        t = self._tensor
        before = t.type, t.data, tuple(t.nb)

        def restore() -> None:
            t.type, t.data = before[0], before[1]
            t.nb[:] = before[2]

        t.type, t.data = type_id, address
        t.nb[:] = _strides(type_id, t.ne)
        return restore

    def spread_matrices(self, n_bytes: int, n: int) -> None:
        """Expect `n` matrices at the weight's address from now on, with `n_bytes` from one matrix to the next."""
        self._n_matrices, self._strides = n, (*self._strides[:2], n_bytes, n_bytes * n)

    def join_matrices(self) -> None:
        """Expect the model's own matrices without gaps at the weight's address from now on."""
        self.spread_matrices(self.n_bytes // self.shape[0], self.shape[0])

    def repack(self, source: int, rows: int, target: int) -> None:
        """Repack `rows` rows from address `source` to `target`, in this CPU's layout.

        The rows begin at a multiple of ROW_GROUP. They end at such a multiple or at the end of the matrix. Runs without
        the interpreter's lock.
        """
        part = self.part(target, rows, repacked=True)
        _tensor_set(C.addressof(part), source, 0, rows * self.row_bytes)

    def part(self, address: int, rows: int, repacked: bool) -> _Tensor:
        """Return ggml's struct for a matrix of `rows` rows of this weight, stored at `address`."""
        part = _Tensor.from_buffer_copy(self._tensor)
        part.type, part.nb[0], part.nb[1] = self._type, self._strides[0], self.row_bytes
        part.ne[1], part.ne[2], part.ne[3] = rows, 1, 1
        part.nb[2] = part.nb[3] = rows * self.row_bytes
        part.data = address
        part.buffer, part.extra = (_repack_buffer(), self._traits) if repacked else (self._plain, None)
        return part


class DeviceBuffer:
    """Device memory for computing, or page-locked host memory for copies to a device."""

    def __init__(self, kind: int, n_bytes: int, name: str) -> None:
        self.handle = _alloc_buffer(kind, n_bytes)
        if not self.handle:
            raise NotEnoughMemory(f"{name} has no {n_bytes / 2**20:,.0f} MiB more; use a smaller --gpu-memory")
        self.address, self.n_bytes = int(_get_base(self.handle)), n_bytes
        _set_usage(self.handle, _WEIGHTS)

    def view(self) -> memoryview:
        """Return a writable view of the page-locked host memory. The view is valid until `close`."""
        return memoryview((C.c_char * self.n_bytes).from_address(self.address)).cast("B")

    def close(self) -> None:
        _free_buffer(self.handle)


class Device:
    """ggml device that computes with weights copied to it."""

    def __init__(self, handle: int) -> None:
        self.name = device_name(handle)
        self._kind = _device_type(handle)
        self._host_kind = _device_host_type(handle) or _cpu_type()
        self._alignment = int(_alignment(self._kind))
        self.most_bytes = int(_max_size(self._kind))  # maximum size of one buffer
        self.buffer_name = bytes(_type_name(self._kind)).decode()  # name in llama.cpp's log

    def span(self, weight: Weight) -> int:
        """Return the bytes that a weight takes on the device, including padding up to the next weight."""
        n_bytes = int(_alloc_size(self._kind, weight.address))
        return -(-n_bytes // self._alignment) * self._alignment

    def allocate(self, n_bytes: int) -> DeviceBuffer:
        """Return a buffer of `n_bytes` in device memory. Raises NotEnoughMemory."""
        return DeviceBuffer(self._kind, n_bytes, self.name)

    def allocate_host(self, n_bytes: int) -> DeviceBuffer:
        """Return a buffer of `n_bytes` in host memory, page-locked if the driver supports that. Raises
        NotEnoughMemory."""
        return DeviceBuffer(self._host_kind, n_bytes, "this machine")


def _strides(type_id: int, ne: Any) -> tuple[int, int, int, int]:
    """Return the strides in bytes of a block, a row, a matrix and a set of matrices of this type, without gaps."""
    row = int(_row_size(type_id, ne[0]))
    return int(_type_size(type_id)), row, row * ne[1], row * ne[1] * ne[2]


class CallerBuffer:
    """Buffer type that records the tensors of a model and assigns them addresses, but no memory."""

    def __init__(self, pattern: bytes = b".*") -> None:
        """Create the buffer type.

        pattern: regular expression that selects tensors by name.
        Raises EngineError if this build of ggml has another layout of buffers.
        """
        self.weights: dict[str, Weight] = {}
        self.is_ordinary = False  # True: later tensors are not weights of the model and get ordinary memory
        self._spaces: list[AddressSpace] = []
        self._name = C.create_string_buffer(b"Edge")  # llama.cpp distinguishes buffer types by name
        self._callbacks = (
            _Alloc(self._allocate),
            _InitTensor(self._note),
            _SetTensor(lambda *_: None),
            _GetName(lambda _: C.addressof(self._name)),
        )
        allocate, self._init, self._set, get_name = (C.cast(callback, _P).value for callback in self._callbacks)
        self._type = _BufferType.from_buffer_copy(_BufferType.from_address(_cpu_type()))
        if C.CFUNCTYPE(C.c_char_p, _P)(self._type.get_name)(_cpu_type()) != _type_name(_cpu_type()):
            raise EngineError(
                f"llama-cpp-python {L.__version__} lays buffers out differently from {PINNED_VERSION}, which paging was"
                f" written for; install llama-cpp-python=={PINNED_VERSION}, or leave --memory out"
            )
        self._type.alloc_buffer, self._type.get_name = allocate, get_name
        self._overrides = (_Override * 2)(_Override(pattern, C.addressof(self._type)), _Override(None, None))
        # for llama.cpp's model parameters: assigns this buffer type to the tensors
        self.overrides = C.addressof(self._overrides)

    def close(self) -> None:
        """Free the buffers. Call it after the model was freed."""
        for space in self._spaces:
            space.close()

    def _allocate(self, _: int, n_bytes: int) -> int | None:
        if self.is_ordinary:
            return _alloc_buffer(_cpu_type(), n_bytes)  # type: ignore[no-any-return]
        try:
            space = AddressSpace(n_bytes)
        except (OSError, ValueError):
            return None  # llama.cpp reports that it could not allocate
        self._spaces.append(space)
        address = int(_from_pointer(space.address, n_bytes))
        buffer = _Buffer.from_address(address)
        if buffer.size != _get_size(address) or _get_base(address) != space.address or buffer.free_buffer:
            return None
        buffer.init_tensor, buffer.set_tensor = self._init, self._set
        return address

    def _note(self, _: int, tensor: int) -> int:
        weight = Weight(tensor)
        if weight.name in self.weights:
            self.weights[weight.name].add_twin(tensor)
        else:
            self.weights[weight.name] = weight
        return 0


def disable_amx() -> None:
    """Remove the kernels for Intel AMX from llama.cpp's repacking. llama.cpp then uses its next best kernels.

    GCC before 13 drops the stores in front of `_tile_loadconfig`, so the first matrix product crashes. In addition,
    only the CPU_REPACK kernels compute the same bits for resident and for paged weights.
    """
    types = _extra_types()
    without_amx = [kind for kind in types if _type_name(kind) != b"AMX"]
    for i in range(len(types)):
        _extra_array()[i] = without_amx[i] if i < len(without_amx) else None


@functools.cache
def _extra_array() -> Any:
    """Return ggml's own array of repacking buffer types for this CPU, best first and null-terminated."""
    procedure = cpu_procedure(b"ggml_backend_dev_get_extra_bufts")
    return C.CFUNCTYPE(C.POINTER(_P), _P)(procedure)(cpu_device()) if procedure else None


def _extra_types() -> list[int]:
    return list(itertools.takewhile(bool, _extra_array() or ()))


@functools.cache
def _repack_buffer() -> int | None:
    """Return a buffer of ggml's type for repacked weights, which selects ggml's repacked kernels for its tensors."""
    for kind in _extra_types():
        if _type_name(kind) == b"CPU_REPACK":
            return int(_alloc_buffer(kind, 64))
    return None
