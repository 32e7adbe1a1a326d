"""Pictures as inputs of an ONNX model: read, resized, and scaled as in the model's training."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from edge.errors import EdgeError, NotEnoughMemory
from edge.onnx.samples import Array, Input, SamplesError, shape_text
from quant.text import first_line

if TYPE_CHECKING:
    from PIL.Image import Image

# Mean and standard deviation of ImageNet's pixels by channel. Most vision networks were trained with these values.
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
# Allowed formats. Pillow reads more, but some of these start programs, and some are rarely tested.
_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
_MODES = {1: "L", 3: "RGB"}  # Pillow's mode by number of channels
_BORDER = (114, 114, 114)  # color around a picture that keeps its proportions, as in YOLO's training
_ORIENTATION = 0x0112  # tag of EXIF data
STEPS = ("decode", "resize", "scale")


@dataclass(frozen=True)
class Scaling:
    """Scaling of pixels (0 to 255) to floats: (pixel / scale - mean) / std."""

    scale: float = 255.0
    mean: tuple[float, ...] = (0.0,)  # one value for each channel, or one for all
    std: tuple[float, ...] = (1.0,)
    pad: bool = False  # keep the picture's proportions, on a gray border


@dataclass(frozen=True)
class Area:
    """The part of an input that shows the picture, in pixels of the input."""

    left: int
    top: int
    width: int
    height: int


@dataclass(frozen=True)
class Picture:
    """A picture as an input of a network."""

    path: Path
    array: Array
    scaling: Scaling | None  # scaling of its pixels; None if unscaled
    size: tuple[int, int]  # width and height of the picture, turned as its EXIF data say
    input_size: tuple[int, int]  # width and height of the input
    area: Area
    seconds: tuple[float, ...]  # time of each of STEPS
    note: str  # changes of the picture, for people


@dataclass(frozen=True)
class _Target:
    """Pixel layout of an input."""

    batch: int | None  # None if the input has no batch axis
    channels: int
    height: int | None  # None if open: the picture's own height, or scaled like the width
    width: int | None
    channels_first: bool

    def size(self, own: tuple[int, int]) -> tuple[int, int]:
        """Return width and height that a picture of the size `own` gets in the input."""
        width, height = own
        if self.width is None and self.height is None:
            return own
        if self.width is None:
            return max(1, round(width * (self.height or 0) / height)), self.height or 0
        return self.width, self.height or max(1, round(height * self.width / width))

    def largest_side(self, own: tuple[int, int]) -> int:
        """Return the larger side of the input for a picture of the size `own`."""
        return max(self.size(own))


def picture(
    path: Path,
    spec: Input,
    scaling: Scaling | None = None,
    default: Scaling | None = None,
    sides: tuple[int, int] = (0, 0),
) -> Picture:
    """Read a picture as an array for an input: N x C x H x W or N x H x W x C, or either without N.

    The picture is turned as its EXIF data say, and transparent pixels become white. It is stretched to H x W, and
    converted to RGB or, for one channel, to gray. If H and W are open, it keeps its size. If one of them is open, it
    keeps its proportions. If the model has a fixed batch size, the picture is repeated.

    scaling: scaling for inputs of floats; None: `default`, or else ImageNet's for RGB, and 0 to 1 for gray. Inputs of
        uint8 get unscaled pixels.
    sides: height and width for open dimensions; 0: none.

    Raises OSError if the file cannot be read. Raises SamplesError if it is not a picture, or if the input does not look
    like a picture. Raises NotEnoughMemory if memory runs out.
    """
    target = _target(spec, sides)
    dtype = spec.dtype
    if dtype != np.uint8 and dtype.kind != "f":
        raise SamplesError(f"input {spec.name!r} takes {dtype}; pictures go into floats or uint8, give a .npz file")
    used = _scaling(scaling or default, target.channels) if dtype.kind == "f" else None
    if used is None and scaling is not None:
        raise SamplesError(f"input {spec.name!r} takes bytes: pixels go in as they are; leave mean, std and scale out")
    times = [time.perf_counter()]
    try:
        with opened(path, target.largest_side) as (image, size):
            times.append(time.perf_counter())
            pixels, area = _resized(image, size, path, target, pad=used is not None and used.pad)
        times.append(time.perf_counter())
        if used:
            scaled = (pixels.astype(np.float32) / used.scale - np.asarray(used.mean, np.float32)) / np.asarray(
                used.std, np.float32
            )
            pixels = scaled.astype(dtype)
        if target.channels_first:
            pixels = pixels.transpose(2, 0, 1)
        if target.batch is not None:
            pixels = np.broadcast_to(pixels, (target.batch, *pixels.shape))
        array = np.ascontiguousarray(pixels)
    except MemoryError as exc:
        raise NotEnoughMemory(f"{path} does not fit into memory as the input {spec.name!r} takes it") from exc
    times.append(time.perf_counter())
    height, width = array.shape[-2:] if target.channels_first else array.shape[-3:-1]
    note = _note(path, size, (width, height), target, used)
    seconds = tuple(end - start for start, end in pairwise(times))
    return Picture(path, array, used, size, (width, height), area, seconds, note)


@contextmanager
def opened(
    path: Path, largest_side: Callable[[tuple[int, int]], int] | None = None
) -> Iterator[tuple[Image, tuple[int, int]]]:
    """Yield a decoded picture with 8 bits a channel and without transparency, and the width and height in its file.

    largest_side: gives the largest side that the picture is resized to. A JPEG picture that is more than twice as
        large is decoded in a smaller size, which is several times faster.

    Raises OSError if the file cannot be read, and SamplesError if it is not a picture.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    with path.open("rb") as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        try:
            with Image.open(file, formats=_FORMATS) as image:
                width, height = image.size
                if largest_side is not None:
                    least = 2 * max(largest_side((width, height)), largest_side((height, width)))
                    image.draft(None, (least, least))
                is_on_its_side = image.getexif().get(_ORIENTATION) in (5, 6, 7, 8)
                ImageOps.exif_transpose(image, in_place=True)
                yield _plain(image, path), (height, width) if is_on_its_side else (width, height)
        except (MemoryError, EdgeError):
            raise
        except (Image.DecompressionBombWarning, Image.DecompressionBombError) as exc:
            raise SamplesError(f"{path} has too many pixels to be a usual picture: {first_line(exc)}") from exc
        except UnidentifiedImageError as exc:
            raise SamplesError(f"{path} is neither a picture ({', '.join(_FORMATS)}) nor a .npz file") from exc
        except Exception as exc:  # each format of Pillow raises other classes
            raise SamplesError(f"{path} is a damaged picture, or is cut off: {first_line(exc)}") from exc


def _scaling(scaling: Scaling | None, channels: int) -> Scaling:
    """Return the scaling for pictures with this number of channels. Raises SamplesError if `scaling` has another
    number."""
    if scaling is None:
        return Scaling(255.0, MEAN, STD) if channels == len(MEAN) else Scaling()
    for name, values in (("mean", scaling.mean), ("std", scaling.std)):
        if len(values) not in (1, channels):
            raise SamplesError(
                f"{name} needs {channels} values, one for each channel of the picture, got {len(values)}"
            )
    return scaling


def _target(spec: Input, sides: tuple[int, int]) -> _Target:
    """Return the pixel layout of an input. Raises SamplesError if the input does not look like a picture.

    sides: height and width for open dimensions; 0: none.
    """
    shape = spec.shape
    first = len(shape) in (3, 4) and shape[-3] in _MODES
    if not first and not (len(shape) in (3, 4) and shape[-1] in _MODES):
        raise SamplesError(
            f"input {spec.name!r} takes the shape {shape_text(shape)}, not that of a picture of 3 or 1 channels; give a"
            " .npz file"
        )
    channels, height, width = shape[-3:] if first else (shape[-1], *shape[-3:-1])
    for what, dim in (("height", height), ("width", width)):
        if isinstance(dim, int) and dim < 1:
            raise SamplesError(f"input {spec.name!r} has a {what} of {dim}, which no picture has")
    batch = None if len(shape) == 3 else shape[0] if isinstance(shape[0], int) else 1
    fixed_height, fixed_width = (
        side if isinstance(side, int) else size or None for side, size in zip((height, width), sides, strict=True)
    )
    return _Target(batch, int(channels), fixed_height, fixed_width, first)


def _resized(image: Image, own: tuple[int, int], path: Path, target: _Target, *, pad: bool) -> tuple[Array, Area]:
    """Return pixels as bytes (H, W, C), and where the picture is in them.

    own: width and height of the picture in its file.
    pad: keep the picture's proportions, on a gray border.
    """
    from PIL import Image

    width, height = target.size(own)
    if width * height > (Image.MAX_IMAGE_PIXELS or width * height):
        raise SamplesError(f"{path} would have {width} x {height} pixels; give sizes for both dimensions")
    area = Area(0, 0, width, height)
    if pad:
        ratio = min(width / own[0], height / own[1])
        inner = max(1, round(own[0] * ratio)), max(1, round(own[1] * ratio))
        area = Area((width - inner[0]) // 2, (height - inner[1]) // 2, *inner)
    sized = image.convert(_MODES[target.channels]).resize((area.width, area.height), Image.Resampling.BILINEAR)
    if (area.width, area.height) != (width, height):
        canvas = Image.new(sized.mode, (width, height), _BORDER[: target.channels])
        canvas.paste(sized, (area.left, area.top))
        sized = canvas
    return np.asarray(sized).reshape(height, width, target.channels), area


def _plain(image: Image, path: Path) -> Image:
    """Return a picture with 8 bits a channel and without transparency.

    Pillow's own conversions would clip large values, and show the colors of transparent pixels. Raises SamplesError if
    the values of a picture need more than 16 bits.
    """
    from PIL import Image

    if image.mode.startswith("I;16") or (image.format, image.mode) == ("PPM", "I"):  # Pillow reads a PGM as "I"
        return Image.fromarray((np.asarray(image) >> 8).clip(0, 255).astype(np.uint8))
    if image.mode in ("I", "F"):
        values = np.asarray(image)
        if not (np.isfinite(values).all() and values.min() >= 0 and values.max() <= 255):
            raise SamplesError(f"{path} has values of 32 bits that are not from 0 to 255; convert it to 8 or 16 bits")
    elif image.has_transparency_data:
        rgba = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB")
    return image


def _note(path: Path, before: tuple[int, int], after: tuple[int, int], target: _Target, used: Scaling | None) -> str:
    became = f"became {after[0]} x {after[1]}" if after != before else "kept its size"
    parts = [f"{path.name}, {before[0]} x {before[1]} pixels, {became}"]
    if used and used.pad:
        parts.append("with a gray border, so that it keeps its proportions")
    parts.append("RGB" if target.channels == 3 else "gray")
    if used:
        mean, std = (", ".join(f"{value:g}" for value in values) for values in (used.mean, used.std))
        parts.append(f"(pixel / {used.scale:g} - mean) / std with mean {mean} and std {std}")
    if target.batch is not None and target.batch > 1:
        parts.append(f"repeated {target.batch} times for the model's batch")
    return "; ".join(parts)
