"""Time to first token of a prompt with a picture if a faster device encodes the picture.

    python benchmarks/bench_pictures.py [--rounds N] [--json [FILE]] [--tiny]

This device of the lab has 0.3 cores; another one with 1.5 cores is 1 Gbit/s away. The planner places the encoder and
the model for the soonest first token. Each round encodes a new picture, and measures the first token of a prompt with
the picture's rows and 24 tokens of text. Times are medians of all rounds; the table also shows the predictions of
`edge plan`. The model has Qwen2.5-0.5B's shape and random weights in Q4_0; the encoder has 6 layers of 768 values and
random weights, and encodes a picture of 336 x 336 as 576 rows. Needs root.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from benchmarks.beside_worker import beside_worker
from benchmarks.harness import Section, bench, parser_of, table
from edge.models import synth
from edge.models.demo import MODEL_PATH
from edge.models.synth import SHAPES
from quant.gguf.file import GgufFile
from tests.support import projectors

SHAPE, MOST_OFF = "qwen2.5-0.5b", 0.15
ENCODER = projectors.Size(width=768, ff=3072, layers=6, heads=12, patch=14, side=336)
LINK = {"delay_ms": 0.2, "bandwidth_mbps": 1000}


def main() -> None:
    bench(parser_of(__doc__, rounds=3), Section(measured, text))


def measured(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Predicted and measured seconds, by what they are of."""
    model, projector = MODEL_PATH, folder / "mmproj.gguf"
    if not args.tiny:
        model = folder / "model.gguf"
        synth.synthesize(model, SHAPES[SHAPE], "q4_0")
    file = GgufFile.open(model)
    width = file.metadata[f"{file.architecture}.embedding_length"]
    assert isinstance(width, int)
    projectors.projector("plain", width, size=projectors.TINY if args.tiny else ENCODER).write(projector)
    settings = {"model": str(model), "projector": str(projector), "rounds": 1 if args.tiny else args.rounds}
    result: dict[str, Any] = beside_worker(
        "pictures_side", settings, folder, own=0.3, other=1.5, link=LINK, tiny=args.tiny
    )
    return result


def text(r: dict[str, Any]) -> str:
    """The result as Markdown."""
    lines = [
        [name, f"{s['predicted']:.2f}", f"{s['measured']:.2f}", f"{s['measured'] / s['predicted'] - 1:+.0%}"]
        for name, s in r["seconds"].items()
    ]
    first = r["seconds"]["first token"]
    verdict = "is" if abs(first["measured"] / first["predicted"] - 1) <= MOST_OFF else "is not"
    return (
        f"{table(['s', 'predicted', 'measured', 'off by'], lines)}\n\nThe plan encodes on {r['encoder']}; layers by"
        f" rank: {' + '.join(map(str, r['layers']))}. The first token {verdict} within {MOST_OFF:.0%} of predicted."
    )


if __name__ == "__main__":
    main()
