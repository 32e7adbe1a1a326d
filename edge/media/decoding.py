"""Decoding of picture and sound files within limits. The caller must be a process that may crash."""

from __future__ import annotations

import io
import warnings
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from edge.errors import MediaError
from quant.text import first_line

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_BYTES = 32 << 20  # limit of a file
MOST_PIXELS = 40_000_000
MOST_SIDE = 20_000
MOST_SECONDS = 600
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF")  # some other formats of Pillow start programs, or are rarely tested


def is_sound(data: bytes) -> bool:
    """Return whether a file begins like a WAV, MP3 or FLAC file."""
    is_wav = data[:4] == b"RIFF" and data[8:12] == b"WAVE"
    return is_wav or data[:4] == b"fLaC" or data[:3] == b"ID3" or (data[:1] == b"\xff" and data[1:2] >= b"\xe0")


def pixels(data: bytes) -> NDArray[np.uint8]:
    """Return the pixels of a picture: uint8 [height, width, 3].

    Of several pictures in a file, the first counts. The picture is turned as its EXIF data require, and put on white
    where it is transparent. Raises MediaError if the file is not a picture, is damaged, or is too large. Raises
    MemoryError.
    """
    try:
        from PIL import Image, ImageOps
    except ImportError:
        raise MediaError("pictures need Pillow: pip install 'edge-runtime[multimodal]'") from None
    Image.MAX_IMAGE_PIXELS = None  # the size is checked below instead
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(data), formats=FORMATS) as image:
                width, height = image.size
                if width * height > MOST_PIXELS or max(width, height) > MOST_SIDE:
                    raise MediaError(
                        f"the picture has {width} x {height} points; up to {MOST_PIXELS} are decoded, {MOST_SIDE} a"
                        " side: make it smaller"
                    )
                image.load()
                return np.asarray(_on_white(_in_8_bits(ImageOps.exif_transpose(image))), np.uint8)
    except (MediaError, MemoryError):
        raise
    except Exception as error:  # decoders raise exceptions of any class for damaged files
        raise MediaError(
            f"this is no {', '.join(FORMATS[:-1])} or {FORMATS[-1]} picture, or it is damaged: {first_line(error)}"
        ) from None


def _in_8_bits(image: Image) -> Image:
    """Return a picture with 8 of its 16 bits per gray value, because Pillow would turn all but the darkest white."""
    from PIL import Image as Images

    return Images.fromarray((np.asarray(image) >> 8).astype(np.uint8)) if image.mode.startswith("I") else image


def _on_white(image: Image) -> Image:
    from PIL import Image as Images

    if not image.has_transparency_data:
        return image.convert("RGB")
    with_alpha = image.convert("RGBA")
    return Images.alpha_composite(Images.new("RGBA", with_alpha.size, "white"), with_alpha).convert("RGB")


def check_length(samples: NDArray[np.float32], rate: int) -> None:
    """Raise MediaError if a sound is empty, too long, or has samples that are not finite."""
    if not len(samples) or not np.isfinite(samples).all():
        raise MediaError("the sound is empty, or has samples that are not finite numbers")
    if len(samples) > MOST_SECONDS * rate:
        raise MediaError(f"the sound lasts {len(samples) / rate:.0f} s; {MOST_SECONDS} s is the maximum: cut it")
