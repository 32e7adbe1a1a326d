"""`edge imatrix`: makes an importance matrix. A quantizer weighs its errors by the matrix."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from apps.engine_options import add_engine_arguments, options_of_chunks
from apps.options import add, check_output, model_path, option, set_common
from apps.show.progress import progress
from apps.show.table import print_json, print_note
from edge.units import positive_int
from quant.text import printable

HELP = "Measure the inputs of a model's weights on a text, so that quantization loses less quality."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    set_common(parser, "--output --chunks --force --json --threads --memory")
    words = "GGUF file or REPO:FILE, best the file that will be quantized"
    parser.add_argument("model", metavar="MODEL", help=words)
    parser.add_argument("text", type=Path, metavar="TEXT", help="UTF-8 text like the future prompts and answers")
    option(parser, "--output FILE", "file to write (default: MODEL's name with .imatrix.gguf, in this folder)", Path)
    option(parser, "--chunks N", "use the first N chunks (default: the whole text)", positive_int)
    add(parser, "--chunk-tokens")
    option(parser, "--process-output", "measure also the inputs of the output matrix")
    add(parser, "--force", help="overwrite FILE")
    add(parser, "--json")
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    options = options_of_chunks(args)
    from edge.quantization.imatrix import collect
    from edge.quantization.text_file import read_text
    from partition.model.file import ModelFile

    began = time.monotonic()
    text = read_text(args.text)
    file = ModelFile.open(model_path(args.model))
    output = args.output or Path(f"{file.path.stem}.imatrix.gguf")
    check_output(output, (*file.paths, args.text), args.force)
    with progress("Calibrating", unit="chunks") as show:
        matrix = collect(
            file,
            text,
            options,
            chunk_tokens=args.chunk_tokens,
            most=args.chunks,
            output=args.process_output,
            dataset=str(args.text),
            progress=show,
        )
    size = matrix.write(output)
    if matrix.unseen:
        print(printable(matrix.unseen_text()), file=sys.stderr)
    if args.json:
        values = {
            "output": str(output),
            "model": str(file.path),
            "text": str(args.text),
            **matrix.to_json(),
            "size_bytes": size,
            "duration_s": time.monotonic() - began,
        }
        return print_json(values)
    print_note(f"{output}: {len(matrix.entries)} tensors, {matrix.chunk_count} chunks of {matrix.chunk_size} tokens")
    return 0
