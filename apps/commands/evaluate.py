"""`edge evaluate`: what smaller models cost in quality, and whether they are faster, as a table, JSON and a picture.
And how near to one device the ways are in which one model can be computed."""

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
from apps.options import add, model_path, option, refuse
from apps.show.progress import ShownSteps
from apps.show.table import print_columns, print_json
from edge.units import positive_int

if TYPE_CHECKING:
    from apps.distributed import Devices
    from edge.llm.interface import TextEngine
    from edge.llm.options import EngineOptions
    from partition.plan.plan import Plan

HELP = "Compare models with one they were made from: perplexity, divergence, size and speed."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("reference", metavar="REFERENCE", help="GGUF file or REPO:FILE the others are held against")
    parser.add_argument("models", nargs="*", metavar="MODEL", help="GGUF file or REPO:FILE with the same vocabulary")
    option(parser, "--text FILE", "UTF-8 text to predict (default: a bundled one)", Path)
    option(parser, "--tokens N", "use the first N (default: the whole text)", positive_int)
    add(parser, "--chunk-tokens")
    option(
        parser,
        "--speed",
        "measure decode and prefill (default: yes)",
        action=argparse.BooleanOptionalAction,
        default=True,
    )
    option(parser, "--routes", "the ways to compute the last model, on this device and over --workers")
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
            raise UsageError("a picture needs models to compare with the reference; give some, or leave --png out")
    from edge.quantization.comparison import COLUMNS, compare
    from edge.quantization.text_file import BUNDLED, read_text

    source = args.text or BUNDLED
    text = read_text(source)
    paths = [model_path(spec) for spec in (args.reference, *args.models)]
    files = [path.name for path in paths]
    # Folders are named where file names alone are ambiguous.
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
    """Compare the ways to compute the last model."""
    refuse(args, ("png",), "draws several models, and --routes and --workers compare ways to compute one; leave it out")
    if len(args.models) > 1:
        raise UsageError(f"one model is computed in several ways, {len(args.models)} were given beside the reference")
    from edge.llm.engine import Engine
    from edge.quantization.evaluate import common_chunks
    from edge.quantization.text_file import BUNDLED, read_text
    from edge.sameness.evaluate import COLUMNS, compare_routes
    from edge.sameness.standard import answer_routes, local_route, options_for, remote_route, setting_routes
    from partition.model.model import ModelShape
    from quant.gguf.file import GgufFile

    source = args.text or BUNDLED
    reference, path = (model_path(spec) for spec in (args.reference, *(args.models or [args.reference])))
    chunks = common_chunks([reference, path], read_text(source), args.chunk_tokens, _most(args))
    options = options_for(options, args.chunk_tokens)
    others = answer_routes(options, partial(Engine, path))
    if devices is not None:
        config = distributed.engine_config(args, path, devices)

        @contextmanager
        def over(engine_options: EngineOptions) -> Iterator[TextEngine]:
            with config.deployed(engine_options, ShownSteps()) as model:
                yield model.engine

        others += [remote_route(options, over, "the devices"), *answer_routes(options, over, "the devices")]
    n_vocab = ModelShape.from_gguf(GgufFile.open(path)).n_vocab
    with ShownSteps().step("Evaluating", unit="predictions") as show:
        comparison = compare_routes(
            local_route(reference, options),
            local_route(path, options),
            setting_routes(path, options),
            others,
            chunks,
            n_vocab,
            show,
        )
    if args.json:
        head = {"reference": str(reference), "model": str(path), "text": str(source)}
        return print_json({**head, "chunk_tokens": args.chunk_tokens, **comparison.to_json()})
    where = args.text or "the bundled text"
    notes = [
        f"{len(chunks) * chunks.scored} predictions on {where}; KL divergence in nats from {reference.name}, and from"
        " one device",
        "of the spread: KL from one device, over the largest among llama.cpp's own settings",
    ]
    print_columns(COLUMNS, comparison.rows(), ("route",), notes)
    return 0


def _most(args: argparse.Namespace) -> int | None:
    """Chunks of the text; None: all."""
    return args.tokens // args.chunk_tokens if args.tokens else None
