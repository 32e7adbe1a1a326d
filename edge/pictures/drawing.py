"""Predictions of a network, drawn on the picture that they are about."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from devices.files import temporary_beside
from edge.errors import TextError
from edge.onnx.images import Picture, opened
from edge.onnx.predictions import Predictions

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageDraw import ImageDraw
    from PIL.ImageFont import FreeTypeFont, ImageFont

FORMATS = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".webp": "WEBP"}  # by suffix of the file
_COLORS = ("#e6194b", "#0082c8", "#3cb44b", "#f58231", "#911eb4", "#008080", "#aa6e28", "#800000", "#808000", "#000080")
_LINE, _TEXT = 250, 35  # the larger side of a picture in widths of a line, and in heights of a text
_SMALLEST_TEXT = 11
_LONGEST = 100  # characters of a text
_TINT = (230, 25, 75)  # color of a map


def check_suffix(path: Path) -> None:
    """Raise TextError if a picture cannot be written to a file of this name."""
    if path.suffix.lower() not in FORMATS:
        raise TextError(f"{path} needs a name that ends in {', '.join(FORMATS)}")


def draw(its_picture: Picture, predictions: Predictions, path: Path) -> None:
    """Write the picture with its predictions to a file, whose suffix is one of FORMATS.

    The file appears only when it is complete. Raises OSError if a file cannot be read or written, and SamplesError if
    the picture has changed and is not a picture any more.
    """
    from PIL import ImageDraw, ImageFont

    with opened(its_picture.path) as (image, _):
        drawn = image.convert("RGB")
    if predictions.map is not None:
        drawn = _tinted(drawn, its_picture, predictions)
    pen, largest = ImageDraw.Draw(drawn), max(drawn.size)
    font = ImageFont.load_default(max(_SMALLEST_TEXT, largest // _TEXT))
    width = max(1, largest // _LINE)
    boxes = [row for row in predictions.rows if row.box is not None]
    for row in reversed(boxes):  # the most likely box is drawn last, above the others
        assert row.box is not None
        color = _COLORS[row.class_number % len(_COLORS)]
        left, top, right, bottom = row.box
        pen.rectangle((left, top, max(left, right - 1), max(top, bottom - 1)), outline=color, width=width)
        if predictions.kind == "boxes":
            _write(pen, drawn, font, f"{row.label}  {row.score:.2f}", (left, top), color, above=True)
    y = 0.0
    for row in predictions.rows if not boxes else ():
        if row.box is None:
            y = _write(pen, drawn, font, f"{row.label}  {row.score:.3f}", (0, y), "#202020")
    with temporary_beside(path) as temporary:
        drawn.save(temporary, FORMATS[path.suffix.lower()])
        os.replace(temporary, path)


def _write(
    pen: ImageDraw, image: Image, font: FreeTypeFont | ImageFont, text: str, corner: tuple[float, float], color: str,
    *, above: bool = False,
) -> float:  # fmt: skip
    """Write a text on a colored ground inside the picture, and return the lower edge of the ground.

    above: put the text above the corner if there is room.
    """
    text = text[:_LONGEST].replace("\n", " ")
    left, top, right, bottom = pen.textbbox((0, 0), text, font=font)
    margin = max(2, round((bottom - top) / 4))
    width, height = right - left + 2 * margin, bottom - top + 2 * margin
    x = min(max(0.0, corner[0]), max(0.0, image.width - width))
    y = corner[1] - height if above and corner[1] >= height else corner[1]
    y = min(max(0.0, y), max(0.0, image.height - height))
    pen.rectangle((x, y, x + width, y + height), fill=color)
    pen.text((x + margin - left, y + margin - top), text, fill="white", font=font)
    return y + height + 1


def _tinted(image: Image, its_picture: Picture, predictions: Predictions) -> Image:
    """Return the picture with a color where the map has high values."""
    from PIL import Image

    area = its_picture.area
    values = (255 * np.asarray(predictions.map)).astype(np.uint8)
    inner = Image.fromarray(values).crop((area.left, area.top, area.left + area.width, area.top + area.height))
    mask = inner.resize(image.size, Image.Resampling.BILINEAR).point(lambda value: value // 2)
    return Image.composite(Image.new("RGB", image.size, _TINT), image, mask)
