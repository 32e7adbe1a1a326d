"""Pictures as inputs of an ONNX model: read, resized, and scaled as in the model's training."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from edge.errors import NotEnoughMemory
from edge.onnx.samples import Array, Input, SamplesError, shape_text
from quant.text import first_line

if TYPE_CHECKING:
    from PIL.Image import Image

# Mean and standard deviation of ImageNet's pixels by channel. Most vision networks were trained with these values.
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
# Allowed formats. Pillow reads more, but some of these start programs, and some are rarely tested.
_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
_MODES = {1: "L", 3: "RGB"}  # Pillow's mode by number of channels


@dataclass(frozen=True)
class Scaling:
    """Scaling of pixels (0 to 255) to floats: (pixel / scale - mean) / std."""

    scale: float = 255.0
    mean: tuple[float, ...] = (0.0,)  # one value for each channel, or one for all
    std: tuple[float, ...] = (1.0,)


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


def picture(path: Path, spec: Input, scaling: Scaling | None) -> tuple[Array, Scaling | None, str]:
    """Read a picture as an array for an input: N x C x H x W or N x H x W x C, or either without N.

    Return the array, the scaling of its pixels (None if unscaled), and a description of the changes for people.

    The picture is turned as its EXIF data say. It is stretched to H x W, and converted to RGB or, for one channel, to
    gray. If H and W are open, it keeps its size. If one of them is open, it keeps its proportions. If the model has a
    fixed batch size, the picture is repeated.

    scaling: scaling for inputs of floats; None: ImageNet's for RGB, and 0 to 1 for gray. Inputs of uint8 get unscaled
        pixels.

    Raises OSError if the file cannot be read. Raises SamplesError if it is not a picture, or if the input does not look
    like a picture. Raises NotEnoughMemory if memory runs out.
    """
    target = _target(spec)
    dtype = spec.dtype
    if dtype != np.uint8 and dtype.kind != "f":
        raise SamplesError(f"input {spec.name!r} takes {dtype}; pictures go into floats or uint8, give a .npz file")
    used = _scaling(scaling, target.channels) if dtype.kind == "f" else None
    if used is None and scaling is not None:
        raise SamplesError(f"input {spec.name!r} takes bytes: pixels go in as they are; leave mean, std and scale out")
    try:
        pixels, size_before = _pixels(path, target)
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
    height, width = array.shape[-2:] if target.channels_first else array.shape[-3:-1]
    return array, used, _note(path, size_before, (width, height), target, used)


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


def _target(spec: Input) -> _Target:
    """Return the pixel layout of an input. Raises SamplesError if the input does not look like a picture."""
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
    fixed_height, fixed_width = (None if isinstance(side, str) else side for side in (height, width))
    return _Target(batch, int(channels), fixed_height, fixed_width, first)


def _pixels(path: Path, target: _Target) -> tuple[Array, tuple[int, int]]:
    """Return pixels as bytes (H, W, C), and the picture's width and height before resizing."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    with path.open("rb") as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        try:
            with Image.open(file, formats=_FORMATS) as image:
                ImageOps.exif_transpose(image, in_place=True)
                turned = _eight_bits(image)
                width, height = target.size(turned.size)
                if width * height > (Image.MAX_IMAGE_PIXELS or width * height):
                    raise SamplesError(f"{path} would have {width} x {height} pixels; give sizes for both dimensions")
                sized = turned.convert(_MODES[target.channels]).resize((width, height), Image.Resampling.BILINEAR)
                return np.asarray(sized).reshape(height, width, target.channels), turned.size
        except (MemoryError, SamplesError):
            raise
        except (Image.DecompressionBombWarning, Image.DecompressionBombError) as exc:
            raise SamplesError(f"{path} has too many pixels to be a usual picture: {first_line(exc)}") from exc
        except UnidentifiedImageError as exc:
            raise SamplesError(f"{path} is neither a picture ({', '.join(_FORMATS)}) nor a .npz file") from exc
        except Exception as exc:  # each format of Pillow raises other classes
            raise SamplesError(f"{path} is a damaged picture, or is cut off: {first_line(exc)}") from exc


def _eight_bits(image: Image) -> Image:
    """Return a 16-bit gray picture as 8-bit, and others unchanged. Pillow's own conversion would clip large values."""
    from PIL.Image import fromarray

    if not image.mode.startswith("I;16") and (image.format, image.mode) != ("PPM", "I"):  # Pillow reads a PGM as "I"
        return image
    return fromarray((np.asarray(image) >> 8).clip(0, 255).astype(np.uint8))


def _note(path: Path, before: tuple[int, int], after: tuple[int, int], target: _Target, used: Scaling | None) -> str:
    became = f"became {after[0]} x {after[1]}" if after != before else "kept its size"
    parts = [f"{path.name}, {before[0]} x {before[1]} pixels, {became}"]
    parts.append("RGB" if target.channels == 3 else "gray")
    if used:
        mean, std = (", ".join(f"{value:g}" for value in values) for values in (used.mean, used.std))
        parts.append(f"(pixel / {used.scale:g} - mean) / std with mean {mean} and std {std}")
    if target.batch is not None and target.batch > 1:
        parts.append(f"repeated {target.batch} times for the model's batch")
    return "; ".join(parts)
