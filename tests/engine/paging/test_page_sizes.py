"""Weights are paged with memory pages of 16 and 64 KiB, too, as some ARM systems have."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import ROOT, paging
from tests.support.helpers import TIMEOUT_S
from tests.support.thorough import thorough

SIZES = {"layers": 14, "embd": 1024, "ff": 3072, "heads": 8, "vocab": 8192}  # 100 MB at q4_0
# This machine's own pages divide these, so that what is aligned for larger pages is aligned here.
_CHILD = """
import json, mmap, sys

mmap.PAGESIZE = int(sys.argv[1])
from edge.llm.engine import Engine
from edge.llm.options import EngineOptions

with Engine(sys.argv[2], EngineOptions(threads=1, context=256, batch=16, memory=160 << 20)) as engine:
    rows = [engine.decode([5, 300, 17, 401], 0), engine.decode([88], 4)]
    plan = engine.paging.plan
    print(json.dumps({"greatest": [int(row.argmax()) for row in rows], "streamed": plan.streamed_bytes}))
"""


def child(page: int, path: Path) -> dict[str, Any]:
    """Return what a process of its own computes with memory pages of so many bytes."""
    command = [sys.executable, "-c", _CHILD, str(page), str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A model, and what is computed of it with pages of 4 KiB."""
    # Fresh values for each row take longer than the test.
    path = paging.model(tmp_path_factory, "llama", "q4_0", pool_bytes=4 << 20, **SIZES)
    return path, child(4096, path)


@pytest.mark.parametrize("page", [64 << 10, *thorough(16 << 10)])
def test_what_a_paged_model_computes(usual: tuple[Path, dict[str, Any]], page: int) -> None:
    path, expected = usual
    result = child(page, path)
    assert result["greatest"] == expected["greatest"]
    assert result["streamed"] > 0
