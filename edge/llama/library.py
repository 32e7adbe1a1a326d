"""Choice of the llama.cpp library, and the check of its version. One of nine files with ctypes.

llama-cpp-python brings its own, built where it was installed. Another, built before, is used where `LLAMA_CPP_LIB_PATH`
names its folder, or where llama-cpp-python has none and the system does. Importing this module asks it for its version
before anything else of it is called, and raises EngineError if that is another: functions, structs and names of
nodes belong to a version. `edge/llama/ggml.py` and `edge/llama/buffers.py` then check the layout of each struct.
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
from quant.text import printable

PINNED_VERSION = "0.3.36"  # of llama-cpp-python
# What that one is made for. Builds from between two releases say "-dev" behind it.
PINNED_LLAMA, PINNED_GGML = "0.5.0", "0.25.3"
# Defaults of that version which lie in front, in the middle and at the end of each struct, and are not all 0.
_DEFAULTS: dict[str, dict[str, int | float]] = {
    "model": {"n_gpu_layers": -1, "load_mode": -1, "vocab_only": 0, "use_extra_bufts": 1, "no_host": 0},
    "context": {"n_ctx": 512, "n_batch": 2048, "yarn_ext_factor": -1.0, "type_k": 1, "type_v": 1, "swa_full": 1},
    "model_quantize": {"ftype": 7, "token_embedding_type": 43, "quantize_output_tensor": 1, "max_buf_size": 8 << 30},
}
LIB_PATH = "LLAMA_CPP_LIB_PATH"  # llama-cpp-python reads it, too
EXIT_NATIVE_ABORT = 70  # EX_SOFTWARE: ggml found an invariant broken and the process cannot go on
_NAME = "libllama.dylib" if sys.platform == "darwin" else "libllama.so"
_INSTALL = f"pip install llama-cpp-python=={PINNED_VERSION}"


def system_folders() -> list[Path]:
    """Return the folders of a system's libraries, and of environments such as conda's or Termux's."""
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
    """The folder of the llama.cpp to use. system: folders in place of the system's. EngineError if there is none."""
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
    """Raise EngineError unless the llama.cpp there loads and is of the version that is needed."""
    try:
        library = C.CDLL(str(folder / _NAME))
    except OSError as error:
        raise EngineError(f"{folder / _NAME} cannot be loaded: {error}; {_what_to_do()}") from None
    there = [_version_text(library, name) for name in ("llama_version", "ggml_version")]
    needed = [PINNED_LLAMA, PINNED_GGML]
    if [version.split("-")[0] for version in there] != needed:
        raise EngineError(
            f"{folder / _NAME} is llama.cpp {there[0]} with ggml {there[1]}; needed is {needed[0]} with {needed[1]}, as"
            f" llama-cpp-python {PINNED_VERSION} brings it: {_what_to_do()}"
        )


def check_parameters(package: Any, folder: Path) -> None:
    """Raise EngineError unless llama.cpp gives its parameters as llama-cpp-python declares them: they go by value, and
    what lies otherwise would be taken for something else."""
    library = C.CDLL(str(folder / _NAME))
    for name, defaults in _DEFAULTS.items():
        # With room behind, for a library that gives more.
        fields = [("declared", getattr(package, f"llama_{name}_params")), ("more", C.c_char * 1024)]
        function = library[f"llama_{name}_default_params"]
        function.restype, function.argtypes = type("_Padded", (C.Structure,), {"_fields_": fields}), []
        declared = function().declared
        if {field: getattr(declared, field) for field in defaults} != defaults:
            raise EngineError(
                f"{folder / _NAME} lays its {name} parameters out differently from llama-cpp-python {PINNED_VERSION}:"
                f" {_what_to_do()}"
            )


def _open() -> tuple[Any, Any, Path]:
    """llama-cpp-python with the llama.cpp to use, that library again, for what llama-cpp-python does not declare, and
    its folder. EngineError if there is none that fits."""
    folder = library_folder()
    check_library(folder)
    if folder in system_folders():
        os.environ.setdefault(LIB_PATH, str(folder))  # llama-cpp-python, and processes that this one starts, use it
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
    # ggml's functions are found through libllama: the file beside it may be a copy, with a state of its own.
    return llama_cpp, C.CDLL(str(folder / _NAME)), folder


def described() -> str:
    """The llama.cpp in use: its version, and where it lies."""
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


llama_cpp, libllama, _folder = _open()


_AbortHandler = C.CFUNCTYPE(None, C.c_char_p)


@_AbortHandler  # type: ignore[untyped-decorator]
def _on_abort(message: bytes | None) -> None:
    # ggml calls abort() after this returns. Say it in one line and leave with a documented code instead.
    reason = printable((message or b"unknown").decode(errors="replace").strip())
    sys.stderr.write(f"edge: llama.cpp stopped the process: {reason}\n")
    sys.stderr.flush()
    os._exit(EXIT_NATIVE_ABORT)


def on_abort_exit() -> None:
    """Leave with one line and EXIT_NATIVE_ABORT where ggml would dump core."""
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")  # it would attach a debugger to us and print pages
    libllama.ggml_set_abort_callback.argtypes = [_AbortHandler]
    libllama.ggml_set_abort_callback(_on_abort)


def no_vocabulary(model: object) -> Any:
    """Raise EngineError: native code would read memory that was given back."""
    raise EngineError("the model is closed; load it again")
