"""Load ggml's backends if they are modules in libllama's folder. One of the files with ctypes.

A wheel has several modules for the CPU, one per set of instructions: `libggml-cpu-haswell.so`, `libggml-cpu-zen4.so`.
Each module computes its own score on this processor, and 0 means that it would crash. Modules for GPUs need a driver. A
llama.cpp that pip compiled has its backends linked, and this module then loads nothing.
"""

from __future__ import annotations

import ctypes as C
import os
from _ctypes import dlclose
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from edge.errors import EngineError

_CPU_DEVICE = 0  # ggml's number of the device type
_CPU = "libggml-cpu"
_NOT_BACKENDS = "libggml-base.so"
# Device files of GPUs: Linux, NVIDIA's driver, WSL2, Android. Without one, Mesa would offer the processor as a GPU, and
# loading Mesa takes 100 MB.
_GPU_FILES = ("/dev/dri/renderD*", "/dev/nvidia[0-9]*", "/dev/dxg", "/dev/mali[0-9]*", "/dev/kgsl-3d0")
_Log = C.CFUNCTYPE(None, C.c_int, C.c_char_p, C.c_void_p)


def load(library: Any, folder: Path, has_gpu: Callable[[], bool] | None = None) -> str | None:
    """Load the modules in `folder` unless ggml has a CPU backend. Return the name of the CPU module, or None.

    library: the opened libllama. Call this before any other function of ggml.
    has_gpu: returns whether Vulkan could find a GPU; by default it looks for device files.
    Raises EngineError if there are CPU modules and this processor can run none of them.
    """
    library.ggml_backend_dev_by_type.restype = C.c_void_p
    if library.ggml_backend_dev_by_type(_CPU_DEVICE):
        return None
    modules = cpu_modules(folder)
    if not modules:
        return None
    scores = {name: _score(path) for name, path in modules.items()}
    best = max(scores, key=lambda name: scores[name])
    if not scores[best]:
        raise EngineError(
            f"none of llama.cpp's modules in {folder} can run on this processor: {', '.join(modules)}; build llama.cpp"
            " here: pip install --force-reinstall --no-binary llama-cpp-python llama-cpp-python"
        )
    others = (path for path in sorted(folder.glob("libggml-*.so")) if not path.name.startswith((_CPU, _NOT_BACKENDS)))
    with _quiet(library):
        # ggml prefers the first devices, so the CPU is last, as in ggml_backend_load_all_from_path.
        for path in (*others, modules[best]):
            if path.stem == "libggml-vulkan" and not (has_gpu or may_have_gpu)():
                continue
            library.ggml_backend_load(os.fsencode(path))  # reports a missing driver in the log
    return best


def cpu_modules(folder: Path) -> dict[str, Path]:
    """Return the CPU modules in `folder` by variant: "haswell". The only module of a build has the name "cpu"."""
    paths = sorted(folder.glob(f"{_CPU}*.so"))
    return {path.stem.removeprefix(_CPU).removeprefix("-") or "cpu": path for path in paths}


def _score(path: Path) -> int:
    """Return the module's score on this processor, 0 if it cannot run here, or 1 if the module has no score."""
    try:
        module = C.CDLL(str(path))
    except OSError:
        return 0
    try:
        function = getattr(module, "ggml_backend_score", None)
        return 1 if function is None else int(function())
    finally:
        dlclose(module._handle)


def may_have_gpu() -> bool:
    """Return whether a GPU's device file exists, or the user has chosen Vulkan devices."""
    if "GGML_DISABLE_VULKAN" in os.environ:
        return False
    root = Path("/")
    return bool(os.environ.get("GGML_VK_VISIBLE_DEVICES")) or any(any(root.glob(name[1:])) for name in _GPU_FILES)


@contextmanager
def _quiet(library: Any) -> Iterator[None]:
    """Drop ggml's log inside the block. ggml prints it to standard error by default."""
    drop = _Log(lambda *_: None)
    library.ggml_log_set.argtypes = [C.c_void_p, C.c_void_p]
    library.ggml_log_set(C.cast(drop, C.c_void_p), None)
    try:
        yield
    finally:
        library.ggml_log_set(None, None)
