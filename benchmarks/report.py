"""What every benchmark says of itself: the machine and the versions, how long a part took, and where figures go."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from edge.version import version

GIB = 1 << 30
STDOUT = "-"  # as the name of a file: print the figures as JSON, and nothing else


def environment() -> dict[str, str]:
    """The machine, and the versions that figures depend on."""
    return {
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores,"
        f" {psutil.virtual_memory().total / GIB:.1f} GiB",
        "versions": f"{platform.system()} {platform.release()}, Python {platform.python_version()},"
        f" llama-cpp-python {version('llama-cpp-python')}",
    }


def steal_s() -> float:
    """Seconds that the host has taken from all cores since it started; 0 where it does not say."""
    return float(getattr(psutil.cpu_times(), "steal", 0.0))


def run_section(
    name: str, run: Callable[[], dict[str, Any]], table: Callable[[dict[str, Any]], str], to: str | None
) -> dict[str, Any]:
    """The figures of one part of a benchmark, with `took_s` and `steal_s`; its table is printed unless JSON is."""
    began, stolen_s = time.monotonic(), steal_s()
    figures = run()
    figures |= {"took_s": time.monotonic() - began, "steal_s": steal_s() - stolen_s}
    if to != STDOUT:
        print(f"## {name}\n\n{table(figures)}\n")
        took = "Took {took_s:.0f} s; the host took {steal_s:.1f} s of all cores meanwhile.\n"
        print(took.format(**figures), flush=True)
    return figures


def write_json(result: dict[str, Any], to: str | None) -> None:
    """Write all figures to a file, or print them; nothing where `to` is None."""
    if to == STDOUT:
        print(json.dumps(result))
    elif to:
        Path(to).write_text(json.dumps(result, indent=1))
