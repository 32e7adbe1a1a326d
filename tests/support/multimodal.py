"""Pictures and sounds for tests, their embedding rows, and libmtmd's own run of a prompt with one."""

import ctypes as C
import io
import wave
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from edge.llama import llama
from edge.llama.library import llama_cpp as L
from edge.llama.multimodal import NativeProjector
from edge.media.media import EmbeddingRows
from quant.types import cache_type

BEFORE, BEHIND = "w1 what is in", "w2 w3 say it"
CONTEXT, BATCH = 512, 128


def pixels(seed: int = 1, width: int = 60, height: int = 40) -> NDArray[np.uint8]:
    """Pixels of a picture that is like no other."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def samples(seed: int = 1, seconds: float = 2.0, rate: int = 16000) -> NDArray[np.float32]:
    """Samples of a sound."""
    return np.sin(np.arange(int(rate * seconds)) / (15 + seed)).astype(np.float32)


def png(seed: int = 1, **how: Any) -> bytes:
    """A PNG file of these pixels. how: options of Pillow."""
    data = io.BytesIO()
    Image.fromarray(pixels(seed)).save(data, "PNG", **how)
    return data.getvalue()


def wav(seconds: float = 2.0, rate: int = 16000) -> bytes:
    """A WAV file of these samples."""
    data = io.BytesIO()
    with wave.open(data, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes((samples(1, seconds, rate) * 32000).astype("<i2").tobytes())
    return data.getvalue()


def open_projector(text: Path, projector: Path) -> tuple[NativeProjector, llama.Model]:
    """A projector in this process, and the text model, without weights."""
    model = llama.Model(text, allocate=False)
    return NativeProjector(projector, model, threads=1), model


def encoded(kind: str, native: NativeProjector, seed: int = 1) -> tuple[list[int], list[EmbeddingRows]]:
    """Token ids of a picture, or of a sound, and the rows among them."""
    chunks = native.encode_sound(samples(seed)) if kind == "audio" else native.encode_picture(pixels(seed))
    tokens: list[int] = []
    media: list[EmbeddingRows] = []
    for i, chunk in enumerate(chunks):
        tokens += chunk.tokens
        if chunk.embeddings is not None:
            digest = f"{kind} {seed} {i}".encode()
            rows = EmbeddingRows(digest, chunk.embeddings, chunk.offsets, chunk.n_positions, causal=chunk.causal)
            media.append(rows)
            tokens += rows.ids
    return tokens, media


def prompt_around(model: llama.Model, tokens: Sequence[int], before: str = BEFORE, behind: str = BEHIND) -> list[int]:
    """A prompt with text around a picture, tokenized as libmtmd does."""
    text = [model.tokenize(part, add_special=not i, parse_special=True) for i, part in enumerate((before, behind))]
    return [*text[0], *tokens, *text[1]]


def own_run(kind: str, text: Path, native: NativeProjector, seed: int = 1) -> NDArray[np.float32]:
    """Logits [n_vocab] behind that prompt, as libmtmd's helper computes them."""
    mtmd: Any = native._mtmd
    model = llama.Model(text)
    sizes = llama.ContextSizes(CONTEXT, cache_type("f16"), batch=BATCH)
    with closing(model), closing(llama.Context(model, sizes, threads=1)) as context:
        if kind == "audio":
            data = samples(seed)
            bitmap = mtmd.mtmd_bitmap_init_from_audio(len(data), data.ctypes.data_as(C.POINTER(C.c_float)))
        else:
            image = pixels(seed)
            bitmap = mtmd.mtmd_bitmap_init(image.shape[1], image.shape[0], image.ctypes.data_as(C.POINTER(C.c_uint8)))
        chunks = mtmd.mtmd_input_chunks_init()
        prompt = BEFORE.encode() + native.marker + BEHIND.encode()
        provided = mtmd.mtmd_input_text(prompt, len(prompt), True, True)
        bitmaps = (C.c_void_p * 1)(bitmap)
        assert mtmd.mtmd_tokenize(native._handle, chunks, C.byref(provided), bitmaps, 1) == 0
        past = C.c_int32()
        code = mtmd.mtmd_helper_eval_chunks(native._handle, context._handle, chunks, 0, 0, BATCH, True, C.byref(past))
        assert code == 0
        logits = L.llama_get_logits_ith(context._handle, -1)
        mtmd.mtmd_input_chunks_free(chunks)
        mtmd.mtmd_bitmap_free(bitmap)
        return np.ctypeslib.as_array(logits, shape=(model.n_vocab,)).copy()
