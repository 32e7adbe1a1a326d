"""Seconds from process start to `--help`, and to the first token of `edge chat -p hi` on the bundled model.

    python benchmarks/bench_startup.py [--repeats 11] [--json]

Medians of whole processes, started one after the other, files in the page cache; Python itself for comparison.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time

EDGE = [sys.executable, "-m", "apps.cli"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    first_output(["chat", "-p", "hi"])  # warms the page cache
    result = {
        "python_s": median(args.repeats, lambda: first_output([], [sys.executable, "-c", "print()"])),
        "help_s": median(args.repeats, lambda: first_output(["--help"])),
        "first_token_s": median(args.repeats, lambda: first_output(["chat", "-p", "hi"])),
    }
    if args.json:
        print(json.dumps(result))
    else:
        print("| from process start to | median, s |\n| --- | ---: |")
        print(f"| Python itself | {result['python_s']:.3f} |")
        print(f"| `edge --help` | {result['help_s']:.3f} |")
        print(f"| first token of `edge chat -p hi` | {result['first_token_s']:.3f} |")


def median(repeats: int, measure: object) -> float:
    assert callable(measure)
    return statistics.median(measure() for _ in range(repeats))


def first_output(arguments: list[str], command: list[str] = EDGE) -> float:
    """Seconds until the first byte of output."""
    began = time.perf_counter()
    with subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        if not process.stdout.read(1):
            raise SystemExit(f"{' '.join(arguments)} printed nothing")
        seconds = time.perf_counter() - began
        process.stdout.read()
    return seconds


if __name__ == "__main__":
    main()
