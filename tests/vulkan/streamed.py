"""Answers of a model within a budget of a GPU's memory: streamed.py MODEL BUDGET [MEMORY]. Prints JSON.

MEMORY: budget of the process. A budget of 0: all layers on the GPU. Passes of few rows are computed there, too, as the
processor rounds otherwise."""

import hashlib
import json
import sys
from pathlib import Path

import numpy as np

from edge.llm.engine import Engine
from edge.llm.options import EngineOptions
from edge.weights import gpu_budget as load

PROMPT = list(range(264, 284))
STEPS = 3


def main() -> None:
    vars(load)["processor_rows"] = lambda *_: 0
    path, budget = Path(sys.argv[1]), int(sys.argv[2])
    on_gpu = {"gpu_memory": budget} if budget else {"gpu_layers": 99}
    if len(sys.argv) > 3:
        on_gpu["memory"] = int(sys.argv[3])
    with Engine(path, EngineOptions(threads=1, context=128, batch=32, **on_gpu)) as engine:
        rows = [engine.decode(PROMPT, 0).copy()]
        for i in range(STEPS):
            rows.append(engine.decode([int(rows[-1].argmax())], len(PROMPT) + i).copy())
        assert engine.gpu_layers is not None
        print(
            json.dumps(
                {
                    "tokens": [int(row.argmax()) for row in rows],
                    "digest": hashlib.sha256(np.stack(rows).tobytes()).hexdigest(),
                    **engine.gpu_layers.to_json(),
                }
            )
        )


if __name__ == "__main__":
    main()
