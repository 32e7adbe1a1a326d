"""First GPU of this device with memory of its own, read in a process of its own.

A worker's daemon and the server do not load llama.cpp, and a GPU's driver keeps memory in each process that uses it.
As a module, this file prints the GPU as JSON.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from devices.processes.interpreter import module_command
from edge.llama.backends import may_have_gpu

_TIMEOUT_S = 30.0
_BACKENDS = ("cuda", "hip", "sycl", "opencl", "cann", "musa", "vulkan")  # Metal's GPUs share the processor's memory
_MOST_BYTES = 1 << 50
_MOST_NAME = 200


@dataclass(frozen=True)
class OwnGpu:
    """A GPU that llama.cpp uses."""

    name: str
    total_bytes: int
    free_bytes: int


@cache
def own_gpu() -> OwnGpu | None:
    """Return the first GPU, and the memory that was free at the first call.

    None: this device has no GPU, the GPU shares the processor's memory, or the driver does not report its memory.
    """
    if not _has_backend():
        return None
    try:
        done = subprocess.run(
            module_command("edge.llama.own_gpu"), capture_output=True, timeout=_TIMEOUT_S, check=True,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        return _read(json.loads(done.stdout))
    except (OSError, subprocess.SubprocessError, ValueError, TypeError):
        return None


def _read(values: object) -> OwnGpu | None:
    """Return the GPU that the process printed, or None without one. Raises TypeError for other values."""
    if values is None:
        return None
    if not isinstance(values, dict):
        raise TypeError(f"a GPU needs an object with named fields, got {type(values).__name__}")
    gpu = OwnGpu(**values)
    is_plausible = 0 < gpu.total_bytes < _MOST_BYTES and 0 <= gpu.free_bytes <= gpu.total_bytes
    return OwnGpu(gpu.name[:_MOST_NAME], gpu.total_bytes, gpu.free_bytes) if is_plausible else None


def _has_backend() -> bool:
    """Return whether the folder of llama.cpp has a backend for GPUs. This does not load llama.cpp."""
    named, package = os.environ.get("LLAMA_CPP_LIB_PATH"), importlib.util.find_spec("llama_cpp")
    if named is None and (package is None or package.origin is None):
        return False
    folder = Path(named) if named is not None else Path(str(package and package.origin)).parent / "lib"
    backends = [backend for backend in _BACKENDS if any(folder.glob(f"*ggml-{backend}*"))]
    return bool(backends) and (backends != ["vulkan"] or may_have_gpu())


def _first() -> OwnGpu | None:
    from edge.llama import ggml, llama

    gpus = ggml.discrete_gpus() if llama.has_gpu() else []
    memory = ggml.gpu_memory_bytes(gpus[0]) if gpus else None
    return None if memory is None else OwnGpu(ggml.gpu_names()[0], memory[1], min(memory))


if __name__ == "__main__":
    gpu = _first()
    print(json.dumps(None if gpu is None else asdict(gpu)))
