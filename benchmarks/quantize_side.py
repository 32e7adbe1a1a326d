"""One side of bench_quantize.py: a process that quantizes or converts on command, and returns the duration.

    python benchmarks/quantize_side.py SIDE SIDES    (started by bench_quantize.py, in a memory group)

Methods are commands; they take and return JSON.
"""

from __future__ import annotations

import ctypes as C
import time
from pathlib import Path

from benchmarks.processes import serve


class Side:
    """Operations on a file; all return seconds."""

    def quantize(self, source: str, target: str, mix: str) -> float:
        """As `edge quantize` does it: the file is checked, and llama.cpp has a process of its own."""
        from edge.quantization.gguf import quantize
        from partition.model.file import ModelFile
        from quant.mixes import MIXES

        began = time.perf_counter()
        quantize(ModelFile.open(source), Path(target), MIXES[mix])
        return time.perf_counter() - began

    def directly(self, source: str, target: str, mix: str) -> float:
        """By llama.cpp's function with the parameters that it comes with."""
        import llama_cpp as L

        from devices.probe import default_threads
        from edge.llama import llama
        from quant.mixes import MIXES

        llama.initialise()
        params = L.llama_model_quantize_default_params()
        params.nthread, params.ftype = default_threads(), MIXES[mix].id
        began = time.perf_counter()
        with llama.forwarded_log(lambda line: None):
            if L.llama_model_quantize(source.encode(), target.encode(), C.byref(params)):
                raise RuntimeError(f"llama.cpp does not quantize {source} to {mix}")
        return time.perf_counter() - began

    def convert(self, source: str, target: str) -> float:
        """A folder of safetensors to GGUF."""
        from quant.checkpoint.convert import convert

        began = time.perf_counter()
        convert(Path(source), Path(target))
        return time.perf_counter() - began


if __name__ == "__main__":
    serve(Side())
