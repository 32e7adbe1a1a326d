"""A wheel of llama.cpp beside the one that was compiled for this machine: `edge bench` with each in turn.

    python -m benchmarks.bench_wheels --wheel FILE.whl [--model FILE] [--rounds 15] [--threads 2] [--json [FILE]]

The compiled one is that of the environment. The wheel's libraries are unpacked, and LLAMA_CPP_LIB_PATH names them, so
that all else is the same. The wheel should have at least 0.99 of the speed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness import EDGE, ROOT, Section, alternate, bench, compared, medians, parser_of, ratio_text, table

_RUN_S = 600.0  # of one run of `edge bench`
FIGURES = ("prefill_tokens_per_s", "decode_tokens_per_s")


def main() -> None:
    parser = parser_of(__doc__, rounds=15)
    parser.add_argument(
        "--wheel", type=Path, metavar="FILE", help="wheel of llama-cpp-python (default: none, to try it)"
    )
    parser.add_argument("--model", metavar="FILE", help="model (default: SmolLM2 135M with trained weights)")
    parser.add_argument("--threads", type=int, default=2, help="threads of both (default: 2)")
    bench(parser, Section(measure, text))


def measure(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Return the speeds of both, and their ratios."""
    sides: dict[str, dict[str, str]] = {"compiled": {}, "wheel": {}}
    if args.wheel:
        with zipfile.ZipFile(args.wheel) as file:
            file.extractall(folder, [name for name in file.namelist() if name.startswith("llama_cpp/lib/")])
        sides["wheel"] = {"LLAMA_CPP_LIB_PATH": str(folder / "llama_cpp" / "lib")}
    result = alternate(
        {name: partial(speeds, args, env) for name, env in sides.items()}, 1 if args.tiny else args.rounds
    )
    return {"median": medians(result), "compared": compared(result, "wheel", "compiled"), "rounds": result}


def speeds(args: argparse.Namespace, env: dict[str, str]) -> dict[str, float]:
    """Return the speeds that `edge bench` measures with one library."""
    command = [*EDGE, "bench", *([args.model] if args.model else []), "--threads", str(args.threads), "--json"]
    # Short runs: the sides alternate often, so other programs slow both down equally.
    prompt, generated = ("16", "4") if args.tiny else ("128", "24")
    command += ["--repeats", "1", "--prompt-tokens", prompt, "--gen-tokens", generated]
    if not args.tiny and not args.model:
        from tests.real import weights

        command.insert(len(EDGE) + 1, str(weights.SMOLLM2.path()))
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | env, capture_output=True, text=True, timeout=_RUN_S, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}: {done.stderr.strip()}")
    figures = json.loads(done.stdout)
    return {name: figures[f"{name}_median"] for name in FIGURES}


def text(figures: dict[str, Any]) -> str:
    """Return the figures as a table."""
    lines = [[side, *(f"{row[name]:.1f}" for name in FIGURES)] for side, row in figures["median"].items()]
    lines.append(["wheel / compiled", *(ratio_text(row) for row in figures["compared"])])
    return table(["llama.cpp", "prefill, tokens/s", "decode, tokens/s"], lines)


if __name__ == "__main__":
    main()
