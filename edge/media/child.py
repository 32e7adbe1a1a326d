"""Process that decodes pictures and sounds, and encodes them with a projector. It ends when its parent ends.

A message in either direction is a line of JSON with the number of bytes that follow it. The first message from the
parent names the files to load; each later one is a picture or sound. The kernel limits decoding, so a hostile file can
at worst end this process.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from devices.processes.limits import limit_cpu, limit_memory, prefer_oom_kill
from edge.errors import EdgeError, MediaError
from edge.llama.llama import Model
from edge.llama.multimodal import EncodedChunk, NativeProjector
from edge.media import decoding

DECODE_S = 20.0  # limit of processor seconds to decode a file
ROOM_BYTES = 1 << 30  # limit of additional memory to decode a file


def main() -> int:
    """Answer messages until the parent ends; return 0."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--control", type=int, required=True, help="file descriptor of a socket to the parent")
    prefer_oom_kill()
    with socket.socket(fileno=parser.parse_args().control) as control, control.makefile("rwb") as stream:
        line = stream.readline()
        try:
            settings = json.loads(line)
            model = Model(settings["model"], allocate=False)
            projector = NativeProjector(
                settings["projector"], model, threads=settings["threads"], use_gpu=settings["use_gpu"]
            )
        except EdgeError as error:
            _send(stream, {"error": str(error)})
            return 0
        _send(stream, {"pictures": projector.takes_pictures, "sounds": projector.takes_sounds})
        while line := stream.readline():
            try:
                answer, arrays = _answer(projector, stream.read(json.loads(line)["bytes"]))
            except (EdgeError, MemoryError) as error:
                answer, arrays = {"error": str(error) or "it needs too much memory: make it smaller"}, []
            _send(stream, answer, arrays)
    return 0


def _answer(projector: NativeProjector, data: bytes) -> tuple[dict[str, Any], list[np.ndarray[Any, Any]]]:
    began = time.perf_counter()
    if decoding.is_sound(data):
        if not projector.takes_sounds:
            raise MediaError("this model takes no sounds, only pictures")
        with _limited():
            samples = projector.samples(data)
            decoding.check_length(samples, projector.sample_rate)
        digest = hashlib.sha256(b"sound" + samples.tobytes())
        chunks = projector.encode_sound(samples)
    else:
        if not projector.takes_pictures:
            raise MediaError("this model takes no pictures, only sounds (WAV, MP3 or FLAC)")
        with _limited():
            pixels = decoding.pixels(data)
        digest = hashlib.sha256(f"picture {pixels.shape}".encode() + pixels.tobytes())
        chunks = projector.encode_picture(pixels)
    arrays = [array for chunk in chunks for array in (chunk.embeddings, chunk.offsets) if array is not None]
    described = [_described(chunk) for chunk in chunks]
    return {"digest": digest.hexdigest(), "chunks": described, "encode_s": time.perf_counter() - began}, arrays


def _described(chunk: EncodedChunk) -> dict[str, Any]:
    if chunk.embeddings is None:
        return {"tokens": chunk.tokens}
    return {
        "shape": chunk.embeddings.shape,
        "sections": chunk.offsets is not None,
        "positions": chunk.n_positions,
        "causal": chunk.causal,
    }


@contextmanager
def _limited() -> Iterator[None]:
    limit_cpu(DECODE_S)
    limit_memory(ROOM_BYTES)
    try:
        yield
    finally:
        limit_cpu(0)
        limit_memory(None)


def _send(stream: io.BufferedRWPair, answer: dict[str, Any], arrays: list[np.ndarray[Any, Any]] | None = None) -> None:
    stream.write(json.dumps({**answer, "bytes": sum(array.nbytes for array in arrays or ())}).encode() + b"\n")
    for array in arrays or ():
        stream.write(np.ascontiguousarray(array).tobytes())
    stream.flush()


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
