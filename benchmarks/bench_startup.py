"""Seconds from process start to the output of `--help`, and to the first token of `edge chat -p hi` (bundled model).

    python benchmarks/bench_startup.py [--rounds 11] [--json]

The figures are medians of whole processes, started one after the other, with all files in the page cache; the start of
Python alone is shown for comparison.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness import EDGE, ROOT, Section, alternate, bench, medians, parser_of, table

SIDES = {
    "python_s": ("Python itself", [sys.executable, "-c", "print()"]),
    "help_s": ("`edge --help`", [*EDGE, "--help"]),
    "first_token_s": ("first token of `edge chat -p hi`", [*EDGE, "chat", "-p", "hi"]),
}


def measure(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of each, in turn."""
    sides = {name: partial(first_output, command) for name, (_, command) in SIDES.items()}
    result = alternate(sides, 1 if args.tiny else args.rounds)
    return {name: figures["s"] for name, figures in medians(result).items()} | {"measured": result}


def first_output(command: list[str]) -> dict[str, float]:
    """Seconds until the first byte of output."""
    began = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as process:
        assert process.stdout is not None
        if not process.stdout.read(1):
            raise SystemExit(f"{' '.join(command)} printed nothing")
        seconds = time.perf_counter() - began
        process.stdout.read()
    return {"s": seconds}


def text(r: dict[str, Any]) -> str:
    """The result as Markdown."""
    return table(
        ["from process start to", "median, s"], [[words, f"{r[name]:.3f}"] for name, (words, _) in SIDES.items()]
    )


if __name__ == "__main__":
    bench(parser_of(__doc__, rounds=11), Section(measure, text))
