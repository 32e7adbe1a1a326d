"""A picture or sound to time encoders with: noise of the size that a projector is made for."""

from __future__ import annotations

import io
import struct
import wave

import numpy as np

from quant.gguf.file import GgufFile

SECONDS, _RATE = 10, 16_000  # seconds and samples per second of the sound
_BMP = struct.Struct("<2sIHHIIiiHHIIiiII")
_BMP_BYTES, _BMP_INFO_BYTES = 54, 40  # bytes of all headers, and of the second header alone


def sample_for(projector: GgufFile) -> tuple[bytes, str]:
    """Return the bytes of a sample, and a description for people.

    The sample is a square picture of the projector's size, or a sound if the projector does not accept pictures.
    """
    noise = np.random.default_rng(1)
    if projector.metadata.get("clip.has_vision_encoder") is not True:
        return _wav(noise.integers(-9000, 9000, SECONDS * _RATE, np.int16)), f"a sound of {SECONDS} s"
    side = projector.metadata["clip.vision.image_size"]
    assert isinstance(side, int)  # `open_projector` has checked the size
    return _bmp(noise.integers(0, 256, (side, side, 3), np.uint8)), f"a picture of {side} x {side}"


def _bmp(pixels: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> bytes:
    height, width, _ = pixels.shape
    rows = np.zeros((height, -(-3 * width // 4) * 4), np.uint8)  # rows are padded to a multiple of 4 bytes
    rows[:, : 3 * width] = pixels.reshape(height, -1)
    size = _BMP_BYTES + rows.nbytes
    head = (b"BM", size, 0, 0, _BMP_BYTES, _BMP_INFO_BYTES, width, -height, 1, 24, 0, rows.nbytes, 0, 0, 0, 0)
    return _BMP.pack(*head) + rows.tobytes()


def _wav(samples: np.ndarray[tuple[int, ...], np.dtype[np.int16]]) -> bytes:
    data = io.BytesIO()
    with wave.open(data, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(_RATE)
        file.writeframes(samples.astype("<i2").tobytes())
    return data.getvalue()
