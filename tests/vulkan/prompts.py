"""Seconds of a prompt of 512 tokens within budgets of a GPU's memory, beside llama.cpp's own offload in the same bytes.

    prompts.py [MODEL] [ROUNDS] [SHARES]

llama.cpp has as many layers on the GPU as its dry run says, and copies each matrix of the others there for the prompt.
Streamed layers pass through two buffers. Both are loaded anew in each round, and compute the prompt twice; the second
time counts. Prints JSON.
"""

import json
import sys
import time
from dataclasses import replace
from pathlib import Path

from edge.demo import MODEL_PATH
from edge.gpu.load import PRODUCTS, fixed_parts
from edge.llama import ggml
from edge.llama.buffers import Device
from edge.llama.llama import ContextSizes
from edge.llm.engine import Engine
from edge.llm.options import EngineOptions
from edge.paging import memory
from edge.paging.gpu_layers import layer_sizes
from partition.model.model import ModelShape
from quant.gguf.file import GgufFile
from quant.types import cache_type

PROMPT = 512
OPTIONS = EngineOptions(context=PROMPT, batch=PROMPT)
SIZES = ContextSizes(PROMPT, cache_type("f16"), batch=PROMPT)


def seconds(path: Path, options: EngineOptions) -> float:
    with Engine(path, options) as engine:
        for _ in range(2):
            engine.kv_clear()
            began = time.perf_counter()
            engine.decode([5 + i % 200 for i in range(PROMPT)], 0)
            took = time.perf_counter() - began
        return took


def main() -> None:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else MODEL_PATH
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 2
    file = GgufFile.open(path)
    shape, name = ModelShape.from_gguf(file), Device(ggml.gpu_devices()[0]).buffer_name

    def parts(layers: int) -> dict[str, int]:
        return fixed_parts(file, shape, SIZES, memory.dry_run(path, SIZES, layers)[1], name)

    every = parts(-1)
    for share in map(float, sys.argv[3:] or ("0.25", "0.5")):
        budget = sum(every.values()) + round((share + 2 / shape.n_layers) * sum(shape.layer_bytes))
        sizes, fit = layer_sizes(shape, SIZES), 0
        for layers in range(1, shape.n_layers + 2):
            of_stock = parts(layers)
            if sum(sizes[:layers]) + of_stock["compute buffers"] + of_stock[PRODUCTS] <= budget:
                fit = layers
        took: dict[str, list[float]] = {"llama.cpp": [], "streamed": []}
        for _ in range(rounds):
            took["llama.cpp"].append(seconds(path, replace(OPTIONS, gpu_layers=fit)))
            took["streamed"].append(seconds(path, replace(OPTIONS, gpu_memory=budget)))
        print(json.dumps({"budget_bytes": budget, "layers_of_llama_cpp": fit, "of": shape.n_layers + 1, "s": took}))


if __name__ == "__main__":
    main()
