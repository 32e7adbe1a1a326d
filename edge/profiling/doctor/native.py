"""llama.cpp in its own process, so that a build that does not fit this processor crashes only that process.

As a module with the argument `describe` or `answer`, it prints one JSON object. `ask` runs it and returns the object.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from typing import Any

from devices.processes.interpreter import module_command
from edge.errors import EngineError

NATIVE_TIMEOUT_S = 60.0  # time to load llama.cpp and the bundled model from slow storage, and to answer
QUESTION, ANSWER = "What is 27 plus 38?", "27 plus 38 is 65."


def ask(question: str) -> dict[str, Any]:
    """Run the process and return its output: the fields of `_describe` for "describe", `text` for "answer".

    Raises EngineError with the exit reason if the process printed nothing.
    """
    try:
        process = subprocess.run(
            module_command("edge.profiling.doctor.native", question),
            capture_output=True,
            text=True,
            timeout=NATIVE_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        raise EngineError(f"llama.cpp gave no answer within {NATIVE_TIMEOUT_S:g} s") from None
    if process.returncode < 0:
        raise EngineError(f"llama.cpp crashed with {signal.Signals(-process.returncode).name}")
    if process.returncode:
        last = (process.stderr.strip().splitlines() or ["it gives no reason"])[-1]
        raise EngineError(f"llama.cpp cannot be used: {last}")
    values: dict[str, Any] = json.loads(process.stdout)
    return values


def _describe() -> dict[str, Any]:
    from edge.llama.library import cpu_module, cpu_modules, described
    from edge.llama.llama import system_info
    from edge.profiling.machine import gpu_backends

    return {
        "library": described(),
        "system_info": system_info(),
        "gpu": gpu_backends(),
        "module": cpu_module,
        "modules": cpu_modules(),
    }


def _answer() -> dict[str, Any]:
    from edge.llm.chat import Chat
    from edge.llm.engine import Engine
    from edge.llm.model import Model
    from edge.llm.options import EngineOptions
    from edge.llm.sampler import SamplingParams
    from edge.models.demo import MODEL_PATH

    engine = Engine(MODEL_PATH, EngineOptions(context=256))
    with Model(engine, engine.close) as model:
        responses = Chat(model).ask(QUESTION, SamplingParams(temperature=0.0), max_tokens=32)
        return {"text": "".join(response.text for response in responses)}


if __name__ == "__main__":
    print(json.dumps({"describe": _describe, "answer": _answer}[sys.argv[1]]()))
