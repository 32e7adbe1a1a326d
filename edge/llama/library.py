"""Choose the llama.cpp library and check its version. One of the files with ctypes.

llama-cpp-python usually contains a llama.cpp that was built at installation. A prebuilt library is used if
`LLAMA_CPP_LIB_PATH` names its folder, or if llama-cpp-python has none and the system does. Importing this module checks
the library's version before any other call, and raises EngineError for another version: functions, structs and node
names belong to one version. Backends that are modules are loaded next (`edge/llama/backends.py`). `edge/llama/ggml.py`
and `edge/llama/buffers.py` then check the layout of each struct.
"""

from __future__ import annotations

import ctypes as C
import importlib.util
import os
import sys
import sysconfig
from pathlib import Path
from typing import Any

from edge.errors import EngineError
from edge.llama import backends
from quant.text import printable

PINNED_VERSION = "0.3.36"  # version of llama-cpp-python
# The versions that this llama-cpp-python needs. A build from between two releases has the suffix "-dev".
PINNED_LLAMA, PINNED_GGML = "0.5.0", "0.25.3"
# Defaults of that version at the beginning, middle and end of each struct that are not all 0.
_DEFAULTS: dict[str, dict[str, int | float]] = {
    "model": {"n_gpu_layers": -1, "load_mode": -1, "vocab_only": 0, "use_extra_bufts": 1, "no_host": 0},
    "context": {"n_ctx": 512, "n_batch": 2048, "yarn_ext_factor": -1.0, "type_k": 1, "type_v": 1, "swa_full": 1},
    "model_quantize": {"ftype": 7, "token_embedding_type": 43, "quantize_output_tensor": 1, "max_buf_size": 8 << 30},
}
LIB_PATH = "LLAMA_CPP_LIB_PATH"  # environment variable that llama-cpp-python reads, too
EXIT_NATIVE_ABORT = 70  # EX_SOFTWARE: ggml aborts after a failed internal check
_NAME = "libllama.dylib" if sys.platform == "darwin" else "libllama.so"
_INSTALL = f"pip install llama-cpp-python=={PINNED_VERSION}"
# Wheels that gcc compiled need its OpenMP library, which minimal systems lack.
_INSTALL_OPENMP = "install OpenMP; on Debian: apt-get install libgomp1"


def system_folders() -> list[Path]:
    """Return the library folders of the system and of environments such as conda's or Termux's."""
    multiarch = sysconfig.get_config_var("MULTIARCH") or ""
    names = [
        f"{sys.prefix}/lib",
        "/usr/local/lib",
        f"/usr/lib/{multiarch}",
        "/usr/lib",
        "/usr/lib64",
        "/opt/homebrew/lib",
    ]
    return [Path(name) for name in dict.fromkeys(names)]


def library_folder(system: list[Path] | None = None) -> Path:
    """Return the folder of the llama.cpp to use.

    system: folders to search instead of the system's.
    Raises EngineError if no folder has the library.
    """
    named = os.environ.get(LIB_PATH)
    if named is not None:
        if not (Path(named) / _NAME).exists():
            raise EngineError(
                f"{LIB_PATH}={named}: there is no {_NAME}; name a folder that has one, or unset it to use"
                " what llama-cpp-python brings"
            )
        return Path(named)
    package = importlib.util.find_spec("llama_cpp")
    if package is None or package.origin is None:
        raise EngineError(f"llama-cpp-python is needed and not installed: {_INSTALL}")
    own = Path(package.origin).parent / "lib"
    folders = [own, *(system_folders() if system is None else system)]
    for folder in folders:
        if (folder / _NAME).exists():
            return folder
    raise EngineError(
        f"llama-cpp-python was installed without llama.cpp, and there is no {_NAME} in"
        f" {', '.join(map(str, folders[1:]))}; set {LIB_PATH} to its folder, or {_INSTALL}"
    )


def check_library(folder: Path) -> None:
    """Raise EngineError unless the llama.cpp in `folder` loads and has the needed version."""
    try:
        library = C.CDLL(str(folder / _NAME))
    except OSError as error:
        what_to_do = _INSTALL_OPENMP if "libgomp" in str(error) else _what_to_do()
        raise EngineError(f"{folder / _NAME} cannot be loaded: {error}; {what_to_do}") from None
    there = [_version_text(library, name) for name in ("llama_version", "ggml_version")]
    needed = [PINNED_LLAMA, PINNED_GGML]
    if [version.split("-")[0] for version in there] != needed:
        raise EngineError(
            f"{folder / _NAME} is llama.cpp {there[0]} with ggml {there[1]}; expected {needed[0]} with {needed[1]}, as"
            f" llama-cpp-python {PINNED_VERSION} brings it: {_what_to_do()}"
        )


def check_parameters(package: Any, folder: Path) -> None:
    """Raise EngineError unless llama.cpp's parameter structs match llama-cpp-python's declarations.

    llama.cpp passes these structs by value, so a different layout would silently change parameters.
    """
    library = C.CDLL(str(folder / _NAME))
    for name, defaults in _DEFAULTS.items():
        # The padding takes the rest of a larger struct.
        fields = [("declared", getattr(package, f"llama_{name}_params")), ("more", C.c_char * 1024)]
        function = library[f"llama_{name}_default_params"]
        function.restype, function.argtypes = type("_Padded", (C.Structure,), {"_fields_": fields}), []
        declared = function().declared
        if {field: getattr(declared, field) for field in defaults} != defaults:
            raise EngineError(
                f"{folder / _NAME} lays its {name} parameters out differently from llama-cpp-python {PINNED_VERSION}:"
                f" {_what_to_do()}"
            )


def _open() -> tuple[Any, Any, Path, str | None]:
    """Return llama-cpp-python, the same library opened for undeclared functions, its folder, and its CPU module.

    Raises EngineError if no library fits.
    """
    folder = library_folder()
    check_library(folder)
    # Find ggml's functions through libllama: the ggml file in the same folder may be a copy with its own state.
    library = C.CDLL(str(folder / _NAME))
    module = backends.load(library, folder)
    if folder in system_folders():
        os.environ.setdefault(LIB_PATH, str(folder))  # for llama-cpp-python and child processes
    try:
        import llama_cpp
    except (AttributeError, FileNotFoundError, RuntimeError) as error:
        message = f"llama-cpp-python cannot use {folder / _NAME}: {error}; {_what_to_do()}"
        raise EngineError(message) from None
    if llama_cpp.__version__ != PINNED_VERSION:
        raise EngineError(
            f"llama-cpp-python {llama_cpp.__version__} is installed, and {PINNED_VERSION} is needed: {_INSTALL}"
        )
    check_parameters(llama_cpp, folder)
    return llama_cpp, library, folder, module


def described() -> str:
    """Return the version and folder of the llama.cpp in use."""
    version, of_ggml = _version_text(libllama, "llama_version"), _version_text(libllama, "ggml_version")
    return f"llama.cpp {version} with ggml {of_ggml} of {_folder}"


def _version_text(library: Any, name: str) -> str:
    function = getattr(library, name, None)
    if function is None:
        return "of no known version"
    function.restype, function.argtypes = C.c_char_p, []
    return bytes(function() or b"").decode(errors="replace")


def _what_to_do() -> str:
    return f"unset {LIB_PATH}, or name a folder that has it" if os.environ.get(LIB_PATH) else _INSTALL


# cpu_module: variant of the CPU's kernels that was loaded, such as "haswell"; None: they are linked
llama_cpp, libllama, _folder, cpu_module = _open()


def cpu_modules() -> tuple[str, ...]:
    """Return the variants of the CPU's kernels that this llama.cpp has as modules."""
    return tuple(backends.cpu_modules(_folder))


_AbortHandler = C.CFUNCTYPE(None, C.c_char_p)


@_AbortHandler  # type: ignore[untyped-decorator]
def _on_abort(message: bytes | None) -> None:
    # ggml calls abort() after this returns. Print one line and exit with a documented code instead.
    reason = printable((message or b"unknown").decode(errors="replace").strip())
    sys.stderr.write(f"edge: llama.cpp stopped the process: {reason}\n")
    sys.stderr.flush()
    os._exit(EXIT_NATIVE_ABORT)


def on_abort_exit() -> None:
    """Print one line and exit with EXIT_NATIVE_ABORT when ggml aborts, instead of dumping core."""
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")  # otherwise ggml attaches a debugger and prints pages of output
    libllama.ggml_set_abort_callback.argtypes = [_AbortHandler]
    libllama.ggml_set_abort_callback(_on_abort)


def no_vocabulary(model: object) -> Any:
    """Raise EngineError: native code would read freed memory."""
    raise EngineError("the model is closed; load it again")
