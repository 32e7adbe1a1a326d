"""A process of bench_gpu.py: computes a prompt and some tokens, and measures its peak of GPU memory.

    gpu_side.py MODEL HOW AMOUNT

AMOUNT: bytes of a budget, layers on the GPU, or layers whose experts the processor computes. Prints JSON.
"""

from __future__ import annotations

import ctypes as C
import json
import sys
import threading
import time
from dataclasses import replace
from typing import Any

from edge.llama import ggml, llama
from edge.llama.buffers import CallerBuffer, _cpu_type, _Override
from edge.llama.library import llama_cpp as L
from edge.llama.llama import ContextSizes
from edge.llm.engine import Engine
from edge.llm.options import EngineOptions
from quant.types import cache_type

LOCKED, STREAMED = "llama.cpp, page-locked", "streamed"
EXPERTS, PLACED = "llama.cpp, --n-cpu-moe", "placed"
PROMPT = 512
TOKENS = 16
OPTIONS = EngineOptions(context=2 * PROMPT, batch=PROMPT)
SIZES = ContextSizes(2 * PROMPT, cache_type("f16"), batch=PROMPT)
LOOK_S = 0.0005  # between two looks at what is free


class Peak:
    """The most that was taken of the first GPU's memory since it began to look. A context: it looks in a thread."""

    def __init__(self) -> None:
        self._gpu = ggml.gpu_devices()[:1]
        self._first = self._free()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self.peak_bytes = 0

    def _free(self) -> int:
        return ggml.gpu_free_bytes(self._gpu) or 0

    def _look(self) -> None:
        while not self._over.wait(LOOK_S):
            self.peak_bytes = max(self.peak_bytes, self._first - self._free())

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


class ExpertsOnProcessor(llama.Model):
    """A model whose first layers' experts are in the processor's memory, as with llama.cpp's --n-cpu-moe."""

    layers = 0

    def __init__(self, path: str, **options: Any) -> None:
        own = CallerBuffer()
        pattern = rb"blk\.(" + b"|".join(str(n).encode() for n in range(self.layers)) + rb")\.ffn_(up|down|gate)_exps"
        overrides = (_Override * 2)(_Override(pattern, _cpu_type()), _Override(None, None))
        own.overrides = C.addressof(overrides)
        super().__init__(path, **options, own=own if self.layers else None)
        self.own_memory = None  # llama.cpp copies weights to the GPU for prompts, as it does by itself
        self._overrides = overrides


def main() -> None:
    path, how, amount = sys.argv[1], sys.argv[2], int(sys.argv[3])
    if how == EXPERTS:
        ExpertsOnProcessor.layers, amount = amount, 999
        vars(llama)["Model"] = ExpertsOnProcessor
    if how == LOCKED:
        L.LLAMA_LOAD_MODE_MMAP = L.LLAMA_LOAD_MODE_NONE  # as --no-mmap: edge itself always maps files
    has_budget = how in (STREAMED, PLACED)
    options = replace(OPTIONS, gpu_memory=amount) if has_budget else replace(OPTIONS, gpu_layers=amount)
    llama.initialise()
    took: dict[str, float] = {}
    with Peak() as peak, Engine(path, options) as engine:
        for _ in range(3):
            engine.kv_clear()
            began = time.perf_counter()
            row = engine.decode([5 + i % 200 for i in range(PROMPT)], 0)
            prompt_s = time.perf_counter() - began
            began = time.perf_counter()
            for i in range(TOKENS):
                row = engine.decode([int(row.argmax())], PROMPT + i)
            token_s = (time.perf_counter() - began) / TOKENS
            took = {
                "prompt_s": min(prompt_s, took.get("prompt_s", prompt_s)),
                "token_s": min(token_s, took.get("token_s", token_s)),
            }
        account = engine.gpu_layers.budget if engine.gpu_layers else None
    took["peak_bytes"] = peak.peak_bytes
    if account:
        print(f"the processor computes passes of up to {account.processor_rows} rows", file=sys.stderr)
        took |= {
            "budget_bytes": account.budget,
            "account_bytes": sum(account.parts.values()),
            "streamed": len(account.streamed),
            "processor_experts": len(account.processor_experts),
        }
    print(json.dumps(took))


if __name__ == "__main__":
    main()
