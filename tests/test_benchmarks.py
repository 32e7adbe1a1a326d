"""Every benchmark runs, on tiny sizes; what it measures is for a quiet machine."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from edge.demo import MODEL_PATH

ROOT = Path(__file__).parent.parent
TINY = {
    "bench_engine.py": f"--model {MODEL_PATH} --prompt-tokens 16 --gen-tokens 3 --rounds 1 --threads 1",
    "bench_startup.py": "--repeats 1",
}


def run(name: str) -> dict[str, Any]:
    command = [sys.executable, str(ROOT / "benchmarks" / name), *TINY[name].split(), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT, check=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_every_benchmark_is_run_here() -> None:
    assert {path.name for path in (ROOT / "benchmarks").glob("bench_*.py")} == set(TINY)


def test_engine() -> None:
    result = run("bench_engine.py")
    assert result["decode_ratio"] > 0
    assert result["prefill_ratio"] > 0


def test_startup() -> None:
    result = run("bench_startup.py")
    assert 0 < result["python_s"] < result["first_token_s"]
