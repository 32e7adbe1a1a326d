"""Evaluation of smaller models' quality on a text: perplexity, and divergence from a reference model.

One model is in memory at a time. The reference's predictions are stored in a temporary file as float32, because
log-probabilities of near-identical models differ by less than the precision of float16.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from devices.files import FULL
from edge.llama.interrupt import interrupt_stops
from edge.llama.llama import Model
from edge.llm.engine import Engine
from edge.llm.options import DEFAULTS, EngineOptions
from edge.quantization.divergence import (
    CHUNK_TOKENS,
    Chunks,
    Scores,
    Summary,
    blocks_of_log_probabilities,
    options_for,
    results_bytes,
)
from partition.model.file import ModelFile, ModelLike
from quant.errors import ModelFileError
from quant.text import bytes_text

Progress = Callable[[int, int], None]  # arguments: chunks done and chunks in total, over all models
Floats = NDArray[np.float32]

_KEEP_FREE = 64 << 20  # bytes of the disk that stay free


@dataclass(frozen=True)
class Quality:
    """Size and quality of one model."""

    path: Path
    size_bytes: int  # bytes of the model's files
    bits_per_weight: float  # average over all tensors
    summary: Summary


def evaluate(
    reference: ModelLike,
    models: Sequence[ModelLike],
    text: str,
    options: EngineOptions = DEFAULTS,
    *,
    chunk_tokens: int = CHUNK_TOKENS,
    most: int | None = None,
    progress: Progress | None = None,
) -> list[Quality]:
    """Evaluate how `reference`, and then each of `models`, predict `text`. Return their figures in this order.

    options: engine options; their context and outputs do not matter, because the chunks determine both
    most: maximum number of chunks; None: all

    Raises TextError if the text is too short. Raises ModelFileError if a model's vocabulary differs from the
    reference's. Raises OSError if the disk has no room for the reference's predictions. Raises the errors of Engine,
    and Interrupted after Ctrl-C.
    """
    files = [ModelFile.open(model) for model in (reference, *models)]
    chunks = common_chunks(files, text, chunk_tokens, most)
    n_vocab = files[0].shape.n_vocab
    options = options_for(options, chunk_tokens, n_vocab)
    if options.memory is not None:
        options = replace(options, reserved=results_bytes(options, n_vocab))
    results = []
    with temporary(4 * len(chunks) * chunks.scored * n_vocab if models else 0) as predictions:
        for number, file in enumerate(files):
            predictions.seek(0)
            scores = Scores(len(chunks) * chunks.scored)
            with Engine(file, options) as engine, interrupt_stops(engine):
                for i in range(len(chunks)):
                    targets, at = chunks.targets(i), 0
                    for log_p in blocks_of_log_probabilities(engine, chunks.inputs(i)):
                        others = (_read(predictions, log_p.shape),) if number else ()
                        scores.add(i * chunks.scored + at, targets[at : at + len(log_p)], log_p, *others)
                        if models and not number:
                            _write(predictions, log_p)
                        at += len(log_p)
                    if progress:
                        progress(number * len(chunks) + i + 1, len(files) * len(chunks))
            bits = 8 * file.shape.weight_bytes / file.shape.n_params
            results.append(Quality(file.path, file.size_bytes, bits, *scores.summaries()))
    return results


def common_chunks(files: Sequence[ModelFile], text: str, size: int, most: int | None) -> Chunks:
    """Return the chunks of the text, which must have the same tokens in all models.

    This check comes first, because the evaluation of a model can take an hour.
    """
    chunks_and_sizes: list[tuple[Chunks, int]] = []
    for file in files:
        model = Model(file.path, vocabulary_only=True)
        try:
            chunks_and_sizes.append((Chunks.cut(model, text, size, most), model.n_vocab))
        finally:
            model.close()
        (chunks, n_vocab), (first, first_n_vocab) = chunks_and_sizes[-1], chunks_and_sizes[0]
        if n_vocab != first_n_vocab or not chunks.same(first):
            raise ModelFileError(
                f"{file.path.name}: its vocabulary ({n_vocab} tokens) is not that of {files[0].path.name}"
                f" ({first_n_vocab}), so their predictions cannot be compared; give models made from the reference"
            )
    return chunks_and_sizes[0][0]


@contextmanager
def temporary(n_bytes: int) -> Iterator[IO[bytes]]:
    """Yield an unnamed temporary file of `n_bytes`, which the system removes when it is closed.

    The bytes are reserved on the disk if the system supports it, because writing to a mapped file on a full disk would
    kill the process. Raises OSError if there is no room.
    """
    folder = tempfile.gettempdir()
    free = shutil.disk_usage(folder).free - _KEEP_FREE
    if n_bytes > free:
        raise _no_room(folder, n_bytes, free)
    with tempfile.TemporaryFile(dir=folder) as file:
        if n_bytes and hasattr(os, "posix_fallocate"):
            try:
                os.posix_fallocate(file.fileno(), 0, n_bytes)
            except OSError as error:
                if error.errno in (*FULL, errno.EFBIG):
                    raise _no_room(folder, n_bytes, shutil.disk_usage(folder).free) from error
        yield file


def _write(file: IO[bytes], values: Floats) -> None:
    try:
        file.write(values.data)
    except OSError as error:
        folder = tempfile.gettempdir()
        raise _no_room(folder, values.nbytes, shutil.disk_usage(folder).free) from error


def _read(file: IO[bytes], shape: tuple[int, ...]) -> Floats:
    values = np.empty(shape, np.float32)
    view = values.data.cast("B")
    if file.readinto(view) != len(view):  # type: ignore[attr-defined]  # every binary file has this method
        raise OSError(f"the temporary file in {tempfile.gettempdir()} is shorter than what was written to it")
    return values


def _no_room(folder: str, need: int, have: int) -> OSError:
    return OSError(
        errno.ENOSPC,
        f"no room in {folder} for the reference's predictions: {bytes_text(need)} needed,"
        f" {bytes_text(max(have, 0))} free; evaluate fewer tokens, or set TMPDIR to a folder on a larger disk",
    )
