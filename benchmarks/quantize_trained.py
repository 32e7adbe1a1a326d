"""The section of bench_quantize.py with trained weights: fitted files compared with types of their size."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from edge.errors import EngineError
from edge.llm.options import EngineOptions
from edge.quantization.evaluate import evaluate
from edge.quantization.fit import FitOptions, fit_file
from edge.quantization.gguf import quantize
from edge.quantization.imatrix import collect
from edge.quantization.text_file import BUNDLED, read_text
from partition.model.file import ModelFile
from quant.mixes import MIXES
from tests.support.permuted import permute

HELD_OUT = Path(__file__).parent.parent / "tests" / "data" / "held-out.txt"
SIZES = ("q3_k_m", "iq4_nl", "q4_0", "q4_k_m")  # a fitted file has the size of each
OTHERS = ("q3_k_s", "q4_k_s", "q4_1", "q5_0")  # which may be the best that is no larger


def trained(model: Path, folder: Path, *, minutes: float, chunks: int, threads: int, tiny: bool) -> dict[str, Any]:
    """Compare fits of the model as it is, in F16, and with its neurons in another order, on the grid of no type."""
    as_it_is = folder / "as-it-is.gguf"
    quantize(ModelFile.open(model), as_it_is, MIXES["f16"], threads=threads)
    results = {"as it is": _compared(as_it_is, folder / "as", minutes, chunks, threads, tiny)}
    if ModelFile.open(model).architecture == "llama" and not tiny:
        permute(as_it_is, folder / "permuted.gguf")
        results["in another order"] = _compared(
            folder / "permuted.gguf", folder / "other", minutes, chunks, threads, tiny
        )
    return {"model": model.name, "minutes": minutes, "threads": threads, "models": results}


def _compared(model: Path, folder: Path, minutes: float, chunks: int, threads: int, tiny: bool) -> dict[str, Any]:
    folder.mkdir()
    file, text, options = ModelFile.open(model), read_text(BUNDLED), EngineOptions(threads=threads)
    matrix = folder / "matrix.gguf"
    collect(model, text, options, most=1 if tiny else 32).write(matrix)
    sizes = SIZES[-1:] if tiny else SIZES
    paths: dict[tuple[str, str], Path] = {}
    for name in sizes if tiny else (*SIZES, *OTHERS):
        for how, imatrix in (("with", matrix), ("without", None)):
            out = folder / f"{name}-{how}.gguf"
            try:
                quantize(file, out, MIXES[name], imatrix=imatrix, threads=threads)
            except EngineError:  # it cannot be made without a matrix
                continue
            paths[name, how] = out
    rows = []
    for name in sizes:
        began, out = time.monotonic(), folder / f"fitted-{name}.gguf"
        size = paths[name, "with"].stat().st_size
        fitted = fit_file(file, out, size, text, FitOptions(within_s=60 * minutes, threads=threads))
        rows.append(
            {
                "size_of": name,
                "took_s": time.monotonic() - began,
                "expected": fitted.expected_divergence,
                "measured": fitted.measured_divergence,
                "exact": len(fitted.exact),
            }
        )
        paths[name, "fitted"] = out
    quality = evaluate(model, list(paths.values()), read_text(HELD_OUT), options, most=chunks)
    files = {
        key: {"size_bytes": item.size_bytes, "perplexity": item.summary.perplexity, "kl": item.summary.mean_divergence}
        for key, item in zip(paths, quality[1:], strict=True)
    }
    for row in rows:
        row |= files.pop((row["size_of"], "fitted"))
        for how in ("with", "without"):
            no_larger = {key: item for key, item in files.items() if item["size_bytes"] <= row["size_bytes"]}
            mine = {key[0]: item["kl"] for key, item in no_larger.items() if key[1] == how}
            if mine:
                row[how], row[f"kl_{how}"] = min(mine.items(), key=lambda item: item[1])
    types = [{"type": name, "how": how, **item} for (name, how), item in files.items()]
    reference = quality[0].summary
    return {"tokens": reference.tokens, "perplexity": reference.perplexity, "rows": rows, "types": types}
