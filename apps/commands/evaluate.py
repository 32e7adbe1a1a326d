"""`edge evaluate`: what smaller models cost in quality, and whether they are faster, as a table, JSON and a picture."""

from __future__ import annotations

import argparse
from pathlib import Path

from apps.errors import UsageError
from apps.options import (
    add,
    add_engine_arguments,
    model_path,
    options_of_chunks,
    positive_int,
)
from apps.show.progress import ShownSteps
from apps.show.table import print_columns, print_json

HELP = "Compare models with one they were made from: perplexity, divergence, size and speed."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The models, the text, and how much of it."""
    parser.add_argument("reference", metavar="REFERENCE", help="GGUF file or REPO:FILE the others are held against")
    parser.add_argument("models", nargs="*", metavar="MODEL", help="GGUF file or REPO:FILE with the same vocabulary")
    parser.add_argument("--text", type=Path, metavar="FILE", help="UTF-8 text to predict (default: a bundled one)")
    parser.add_argument("--tokens", type=positive_int, metavar="N", help="use the first N (default: the whole text)")
    add(parser, "--chunk-tokens")
    parser.add_argument(
        "--speed", action=argparse.BooleanOptionalAction, default=True, help="measure decode and prefill (default: yes)"
    )
    add(parser, "--png", "--json")
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Measure and show; the exit code."""
    options = options_of_chunks(args)
    if args.tokens is not None and args.tokens < args.chunk_tokens:
        raise UsageError(f"--tokens {args.tokens} is less than one chunk of {args.chunk_tokens}; see --chunk-tokens")
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
    # Folders are named where files are not told apart without them.
    names = [str(path) if files.count(path.name) > 1 else path.name for path in paths]
    most = args.tokens // args.chunk_tokens if args.tokens else None
    how = {"chunk_tokens": args.chunk_tokens, "most": most, "speed": args.speed}
    evaluation = compare(paths, names, text, options, **how, steps=ShownSteps())
    if args.png:
        from edge.pictures.quality import draw_evaluation

        draw_evaluation(evaluation, args.png)
    values = evaluation.to_json()
    if args.json:
        head = {"reference": str(paths[0]), "text": str(source), "chunk_tokens": args.chunk_tokens}
        models = [{**one, "model": str(path)} for one, path in zip(values["models"], paths, strict=True)]
        return print_json({**head, **values, "models": models, "png": str(args.png) if args.png else None})
    where = args.text or "the bundled text"
    scored = f"{values['scored_tokens']} predictions on {where}; KL divergence in nats from {names[0]}"
    print_columns(COLUMNS, evaluation.rows(), ("model",), [scored, *evaluation.notes])
    return 0
