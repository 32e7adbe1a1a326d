"""`edge evaluate`: how much quality and time smaller models cost, as a table, JSON and a picture.

With --routes or --workers: how much the results of one model differ between ways to compute it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from apps import distributed
from apps.engine_options import add_engine_arguments, options_of_chunks
from apps.errors import UsageError
from apps.options import add, model_path, option, refuse, set_common
from apps.show.progress import ShownSteps
from apps.show.table import print_columns, print_json
from edge.units import positive_int

if TYPE_CHECKING:
    from apps.distributed import Devices
    from edge.llm.interface import TextEngine
    from edge.llm.options import EngineOptions
    from partition.plan.plan import Plan

HELP = "Compare models with the one they were made from: perplexity, divergence, size and speed."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    set_common(parser, "--text --tokens --json --threads --memory --workers --parallel")
    words = "GGUF file or REPO:FILE of the model that the others are compared with"
    parser.add_argument("reference", metavar="REFERENCE", help=words)
    parser.add_argument("models", nargs="*", metavar="MODEL", help="GGUF file or REPO:FILE with the same vocabulary")
    option(parser, "--text FILE", "UTF-8 text to predict (default: a bundled one)", Path)
    option(parser, "--tokens N", "use the first N tokens (default: the whole text)", positive_int)
    add(parser, "--chunk-tokens")
    option(
        parser,
        "--speed",
        "measure decode and prefill speed (default: yes)",
        action=argparse.BooleanOptionalAction,
        default=True,
    )
    words = "compare ways to compute MODEL (or REFERENCE if it is alone): on this device, and with those of --workers"
    option(parser, "--routes", words)
    add(parser, "--png", "--json")
    add_engine_arguments(parser)
    distributed.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    devices = distributed.prepare(args)
    options = options_of_chunks(args)
    if args.tokens is not None and args.tokens < args.chunk_tokens:
        raise UsageError(f"--tokens {args.tokens} is less than one chunk of {args.chunk_tokens}; see --chunk-tokens")
    if args.routes or devices is not None:
        return _routes(args, options, devices)
    if args.png:
        from edge.pictures.canvas import check_picture

        check_picture(args.png)  # before anything is computed
        if not args.models:
            raise UsageError("--png needs a model to compare with the reference; name one, or leave --png out")
    from edge.quantization.comparison import COLUMNS, compare
    from edge.quantization.text_file import BUNDLED, read_text

    source = args.text or BUNDLED
    text = read_text(source)
    paths = [model_path(spec) for spec in (args.reference, *args.models)]
    files = [path.name for path in paths]
    # Full paths if file names alone are ambiguous.
    names = [str(path) if files.count(path.name) > 1 else path.name for path in paths]
    how = {"chunk_tokens": args.chunk_tokens, "most": _most(args), "speed": args.speed}
    evaluation = compare(paths, names, text, options, **how, steps=ShownSteps())
    if args.png:
        from edge.pictures.quality import draw_evaluation

        draw_evaluation(evaluation, args.png)
    values = evaluation.to_json()
    if args.json:
        head = {"reference": str(paths[0]), "text": str(source), "chunk_tokens": args.chunk_tokens}
        models = [{**value, "model": str(path)} for value, path in zip(values["models"], paths, strict=True)]
        return print_json({**head, **values, "models": models, "png": str(args.png) if args.png else None})
    where = args.text or "the bundled text"
    scored = f"{values['scored_tokens']} predictions on {where}; KL divergence in nats from {names[0]}"
    print_columns(COLUMNS, evaluation.rows(), ("model",), [scored, *evaluation.notes])
    return 0


def _routes(args: argparse.Namespace, options: EngineOptions, devices: Devices[Plan] | None) -> int:
    """Compare ways to compute the model, or the reference if no model is named."""
    refuse(args, ("png",), "draws several models, but --routes and --workers compare ways to compute one; leave it out")
    if len(args.models) > 1:
        raise UsageError(f"--routes and --workers need one MODEL besides the reference, got {len(args.models)}")
    from edge.llm.engine import Engine
    from edge.quantization.evaluate import common_chunks
    from edge.quantization.route_comparison import COLUMNS, compare_routes
    from edge.quantization.standard_routes import answer_routes, local_route, options_for, remote_route, setting_routes
    from edge.quantization.text_file import BUNDLED, read_text
    from partition.model.file import ModelFile

    source = args.text or BUNDLED
    paths = [model_path(spec) for spec in (args.reference, *args.models)]
    files = list(map(ModelFile.open, paths))
    reference, file = files[0], files[-1]
    chunks = common_chunks([reference, file], read_text(source), args.chunk_tokens, _most(args))
    options = options_for(options, args.chunk_tokens)
    others = answer_routes(options, partial(Engine, file))
    if devices is not None:
        config = distributed.engine_config(args, file.path, devices)

        @contextmanager
        def over(engine_options: EngineOptions) -> Iterator[TextEngine]:
            with config.deployed(engine_options, ShownSteps()) as model:
                yield model.engine

        others += [remote_route(options, over, "the devices"), *answer_routes(options, over, "the devices")]
    with ShownSteps().step("Evaluating", unit="predictions") as show:
        comparison = compare_routes(
            local_route(reference, options),
            local_route(file, options),
            setting_routes(file, options),
            others,
            chunks,
            file.shape.n_vocab,
            show,
        )
    if args.json:
        head = {"reference": str(reference.path), "model": str(file.path), "text": str(source)}
        return print_json({**head, "chunk_tokens": args.chunk_tokens, **comparison.to_json()})
    where = args.text or "the bundled text"
    notes = [
        f"{len(chunks) * chunks.scored} predictions on {where}; KL divergence in nats from {reference.path.name},"
        " and from the model on one device",
        "of the spread: KL from one device, divided by the largest among llama.cpp's own settings",
    ]
    print_columns(COLUMNS, comparison.rows(), ("route",), notes)
    return 0


def _most(args: argparse.Namespace) -> int | None:
    """Return the number of chunks to use, or None for all."""
    return args.tokens // args.chunk_tokens if args.tokens else None
