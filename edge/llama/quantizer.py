"""llama.cpp's quantizer. One of the files with ctypes.

The quantizer cannot be stopped and aborts the process on unexpected input, so run it in its own process.
"""

from __future__ import annotations

import ctypes as C
import os
import re
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from edge.errors import EngineError
from edge.llama import llama
from edge.llama.library import llama_cpp as L

_BUFFER_BYTES = 128 << 20  # buffer for rows in work; with a smaller buffer threads wait for each other


def quantize_model(
    source: str,
    target: str,
    mix_id: int,
    *,
    threads: int,
    types: Mapping[str, int],
    importance: Mapping[str, NDArray[np.float32]],
    dry: bool,
    on_log: Callable[[str], None],
) -> None:
    """Quantize the GGUF file `source` to `target` with a quantization mix.

    types: type ids of tensors that deviate from the mix. The mixes f32, f16 and bf16 ignore them.
    importance: for each tensor, one value per column of each expert.
    dry: report the types and write nothing.
    on_log: receives llama.cpp's lines, which name each tensor.
    Raises EngineError with llama.cpp's reason.
    """
    llama.initialise()
    params = L.llama_model_quantize_default_params()
    params.nthread, params.ftype = threads, mix_id
    params.allow_requantize, params.dry_run, params.max_buf_size = True, dry, _BUFFER_BYTES
    patterns = [f"^{re.escape(name)}$".encode() for name in types]
    overrides = (L.llama_model_tensor_override * (len(types) + 1))()
    for i, (pattern, type_id) in enumerate(zip(patterns, types.values(), strict=True)):
        overrides[i].pattern, overrides[i].type = pattern, type_id
    if types:
        params.tt_overrides = overrides
    arrays = [np.ascontiguousarray(values, np.float32) for values in importance.values()]
    entries = (L.llama_model_imatrix_data * (len(arrays) + 1))()
    for entry, name, values in zip(entries, importance, arrays, strict=False):
        entry.name, entry.size = name.encode(), values.size
        entry.data = values.ctypes.data_as(C.POINTER(C.c_float))
    if importance:
        params.imatrix = entries
    lines: list[str] = []

    def listen(line: str) -> None:
        if "failed to quantize" in line or "ERROR" in line or "Missing importance" in line:
            lines.append(line.strip(" \n="))
        on_log(line)

    with llama.forwarded_log(listen):
        failed = L.llama_model_quantize(os.fsencode(source), os.fsencode(target), C.byref(params))
    if failed:
        raise EngineError(lines[-1].split("failed to quantize: ")[-1] if lines else "llama.cpp gave no reason")
