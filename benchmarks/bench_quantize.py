"""The quantizer: quality of files that are fitted to a size, and the memory and time that large files take.

    python benchmarks/bench_quantize.py [--only fit|memory] [--model FILE] [--work DIR] [--json [FILE]] [--tiny]

| section | question                                                                                              |
| fit     | is a file that is fitted to a size better than the best type that is not larger?                      |
| memory  | how much memory and time does it take to quantize a 7B shape and to convert a folder of 1.1B,         |
|         | compared with the disk and with llama.cpp's own quantizer?                                            |

`fit` takes a model with trained weights (default: SmolLM2-135M-Instruct), both as it is and with its neurons in another
order so that its weights fit no type exactly, and measures the quality on prose that was not used for the fit. A side
of `memory` is a process in a memory group of its own (Linux and root). Its model files have random weights; they are
written to DIR (14 GB, and 7 GB more during a run), and later runs use them again.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from benchmarks import quantize_tables
from benchmarks.harness import Section, bench, parser_of
from benchmarks.quantize_runs import TINY, memory, random_model
from benchmarks.quantize_trained import trained
from devices.probe import default_threads
from tests.real.weights import SMOLLM2

CHUNKS = 24  # of the text that quality is measured on


def main() -> None:
    parser = parser_of(__doc__, SECTIONS)
    parser.add_argument("--work", type=Path, metavar="DIR", help="for model files (default: a folder that is deleted)")
    parser.add_argument("--model", type=Path, metavar="FILE", help="of `fit` (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--minutes", type=float, default=10.0, help="of each fit (default: 10)")
    bench(parser, SECTIONS, prepare)


def prepare(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    args.work = args.work or folder
    args.work.mkdir(parents=True, exist_ok=True)
    return {}


def fit(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Fitted files of a model with trained weights beside types of their size."""
    model = args.model or (random_model(folder, "tiny", TINY) if args.tiny else SMOLLM2.path())
    how = {"minutes": 0.01 if args.tiny else args.minutes, "chunks": 1 if args.tiny else CHUNKS}
    return trained(model, folder, **how, threads=default_threads(), tiny=args.tiny)


SECTIONS = {"fit": Section(fit, quantize_tables.fit), "memory": Section(memory, quantize_tables.memory)}

if __name__ == "__main__":
    main()
