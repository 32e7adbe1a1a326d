"""libmtmd projectors, which turn images and audio into embeddings of a text model.

A projector needs the sizes and the vocabulary of the text model, but not its weights. Native code trusts its input: the
file must have been checked, the image or audio size must be bounded, and the caller must run in its own process.
"""

from __future__ import annotations

import collections
import os
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.errors import EngineError
from edge.llama.library import llama_cpp as L
from edge.llama.llama import Model

_TEXT, _IMAGE = 0, 1  # chunk types
_POSITION_PARTS = ("t", "y", "x", "z")  # order of the parts of a row's position; the last part must be 0


@dataclass(frozen=True)
class EncodedChunk:
    """Part of an encoded image or audio clip: tokens of the text model, or rows of embeddings."""

    tokens: tuple[int, ...] = ()
    embeddings: NDArray[np.float32] | None = None  # [rows, widths]
    # [3, rows] time, height and width of each row relative to the first; None: one-part positions
    offsets: NDArray[np.int32] | None = None
    n_positions: int = 0  # number of positions that the rows occupy
    causal: bool = True  # False: each row attends to all others, so one decode must contain all rows


class NativeProjector:
    """Loaded projector. `close()` frees it."""

    def __init__(self, path: str | os.PathLike[str], model: Model, *, threads: int, use_gpu: bool = False) -> None:
        """model: the text model, which may have no weights. Raises EngineError if libmtmd cannot load the projector
        for it."""
        from llama_cpp import mtmd_cpp  # loads libmtmd

        self._mtmd, self.n_embd = mtmd_cpp, L.llama_model_n_embd_inp(model._handle)
        parameters = mtmd_cpp.mtmd_context_params_default()
        parameters.use_gpu, parameters.print_timings = use_gpu, False
        parameters.n_threads, parameters.warmup = threads, False
        lines: collections.deque[str] = collections.deque(maxlen=200)
        self._on_log = L.llama_log_callback(lambda level, text, _: lines.append(text.decode(errors="replace").strip()))
        mtmd_cpp.mtmd_helper_log_set(self._on_log, None)
        self._handle = mtmd_cpp.mtmd_init_from_file(os.fsencode(path), model._handle, parameters)
        said = next((line for line in reversed(lines) if "rror" in line or "mismatch" in line), "it gives no reason")
        if not self._handle:
            raise EngineError(f"{os.fspath(path)}: libmtmd cannot load this projector for {model.path}: {said}")
        self.marker: bytes = mtmd_cpp.mtmd_get_marker(self._handle)
        self.takes_pictures: bool = mtmd_cpp.mtmd_support_vision(self._handle)
        self.takes_sounds: bool = mtmd_cpp.mtmd_support_audio(self._handle)
        self.sample_rate: int = mtmd_cpp.mtmd_get_audio_sample_rate(self._handle) if self.takes_sounds else 0
        self._has_sections: bool = mtmd_cpp.mtmd_decode_use_mrope(self._handle)

    def close(self) -> None:
        if self._handle:
            self._mtmd.mtmd_free(self._handle)
            self._handle = None

    def samples(self, data: bytes) -> NDArray[np.float32]:
        """Decode a WAV, MP3 or FLAC file to mono samples [n] at `sample_rate`. Raises EngineError for other data."""
        mtmd, kind = self._mtmd, self._mtmd.mtmd_helper_bitmap_init_from_buf_wrapper.argtypes[1]
        source = np.frombuffer(data, np.uint8)
        with ExitStack() as stack:
            bitmap = mtmd.mtmd_helper_bitmap_init_from_buf(
                self._handle, source.ctypes.data_as(kind), len(source), False
            )
            if not bitmap:
                raise EngineError("it is not a WAV, MP3 or FLAC file, or it is damaged")
            stack.callback(mtmd.mtmd_bitmap_free, bitmap)
            if not mtmd.mtmd_bitmap_is_audio(bitmap):
                raise EngineError("it is not audio")
            n_bytes = mtmd.mtmd_bitmap_get_n_bytes(bitmap)
            values = np.ctypeslib.as_array(mtmd.mtmd_bitmap_get_data(bitmap), shape=(n_bytes,))
            samples: NDArray[np.float32] = values.view(np.float32).copy()
            return samples

    def encode_picture(self, pixels: NDArray[np.uint8]) -> list[EncodedChunk]:
        """Encode RGB pixels [height, width, 3]. Raises EngineError if libmtmd fails."""
        height, width, _ = pixels.shape
        init = self._mtmd.mtmd_bitmap_init
        pixels = np.ascontiguousarray(pixels)
        return self._encode(init(width, height, pixels.ctypes.data_as(init.argtypes[2])))

    def encode_sound(self, samples: NDArray[np.float32]) -> list[EncodedChunk]:
        """Encode mono samples [n] at `sample_rate`. Raises EngineError if libmtmd fails."""
        init = self._mtmd.mtmd_bitmap_init_from_audio
        return self._encode(init(len(samples), samples.ctypes.data_as(init.argtypes[1])))

    def _encode(self, bitmap: Any) -> list[EncodedChunk]:
        mtmd = self._mtmd
        with ExitStack() as stack:
            stack.callback(mtmd.mtmd_bitmap_free, bitmap)
            chunks = mtmd.mtmd_input_chunks_init()
            stack.callback(mtmd.mtmd_input_chunks_free, chunks)
            text = mtmd.mtmd_input_text(self.marker, len(self.marker), False, True)
            bitmaps = (mtmd.mtmd_bitmap_p_ctypes * 1)(bitmap)
            if mtmd.mtmd_tokenize(self._handle, chunks, text, bitmaps, 1):
                raise EngineError("this projector cannot process it; it may support only pictures, or only sounds")
            each = (mtmd.mtmd_input_chunks_get(chunks, i) for i in range(mtmd.mtmd_input_chunks_size(chunks)))
            return [self._chunk(chunk) for chunk in each]

    def _chunk(self, chunk: Any) -> EncodedChunk:
        mtmd, n = self._mtmd, self._mtmd.mtmd_input_chunk_get_n_tokens(chunk)
        kind = mtmd.mtmd_input_chunk_get_type(chunk)
        if kind == _TEXT:
            length = mtmd.mtmd_input_chunk_get_tokens_text.argtypes[1]._type_(0)
            return EncodedChunk(tuple(mtmd.mtmd_input_chunk_get_tokens_text(chunk, length)[: length.value]))
        if mtmd.mtmd_encode_chunk(self._handle, chunk):
            raise EngineError("libmtmd failed to encode it")
        values = np.ctypeslib.as_array(mtmd.mtmd_get_output_embd(self._handle), shape=(n, self.n_embd)).copy()
        if not np.isfinite(values).all():
            raise EngineError("its embeddings are not all numbers: the projector may be damaged")
        offsets = None
        if self._has_sections:
            image = mtmd.mtmd_input_chunk_get_tokens_image(chunk) if kind == _IMAGE else None
            offsets = np.tile(np.arange(n, dtype=np.int32), (3, 1)) if image is None else self._offsets(image, n)
        causal = not mtmd.mtmd_decode_use_non_causal(self._handle, chunk)
        return EncodedChunk((), values, offsets, mtmd.mtmd_input_chunk_get_n_pos(chunk), causal)

    def _offsets(self, image: Any, n: int) -> NDArray[np.int32]:
        """Return the position parts [3, rows] of an image that begins at 0.

        Raises EngineError if the projector's positions are not relative to the beginning.
        """

        def at(start: int) -> NDArray[np.int32]:
            each = [self._mtmd.mtmd_image_tokens_get_decoder_pos(image, start, i) for i in range(n)]
            return np.array([[getattr(position, part) for position in each] for part in _POSITION_PARTS], np.int32)

        first, moved = at(0), at(1)
        if np.any(moved[:3] - first[:3] != 1) or first[3].any():
            raise EngineError("positions of this kind of projector are not known; use another model")
        return first[:3]
