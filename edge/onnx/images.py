"""Pictures as inputs of an ONNX model: read, resized, and scaled as the model was trained."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from edge.errors import NotEnoughMemory
from edge.onnx.file import first_line
from edge.onnx.samples import Input, SamplesError
from edge.onnx.signature import dtype_of, shape_text

if TYPE_CHECKING:
    from PIL.Image import Image

Array = npt.NDArray[Any]

# Of the images of ImageNet, by channel: what most networks for pictures were trained with.
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
# Not all that Pillow reads: some formats start other programs, others are seldom tested.
_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
_MODES = {1: "L", 3: "RGB"}  # by channels


@dataclass(frozen=True)
class Scaling:
    """How pixels from 0 to 255 become floats: (pixel / scale - mean) / std."""

    scale: float = 255.0
    mean: tuple[float, ...] = (0.0,)  # by channel, or one for all
    std: tuple[float, ...] = (1.0,)


@dataclass(frozen=True)
class Picture:
    """A picture as the model takes it."""

    array: Array
    scaling: Scaling | None  # None: pixels went in as they are
    note: str  # what was done to it, for people


@dataclass(frozen=True)
class _Target:
    """What an input takes of a picture."""

    batch: int | None  # None: it has no such axis
    channels: int
    height: int | None  # None: the picture's own, or as the other side is scaled
    width: int | None
    channels_first: bool

    def size(self, own: tuple[int, int]) -> tuple[int, int]:
        """Width and height of a picture that has these of its own."""
        width, height = own
        if self.width is None and self.height is None:
            return own
        if self.width is None:
            return max(1, round(width * (self.height or 0) / height)), self.height or 0
        return self.width, self.height or max(1, round(height * self.width / width))


def picture(path: Path, one: Input, scaling: Scaling | None) -> Picture:
    """The picture in `path` as the input takes it: N x C x H x W or N x H x W x C, or either without N.

    It is turned as its EXIF data say, resized to H x W with its sides stretched, and RGB, or gray where there is one
    channel. Where the model leaves H and W open, it keeps its size; where one of them, its proportions. Where the model
    takes several at once, it is repeated. scaling: for inputs of floats; where None, that of ImageNet for RGB, and 0 to
    1 for gray. Inputs of uint8 take pixels as they are. OSError where it cannot be read; SamplesError for what is no
    picture, or for an input that takes none; NotEnoughMemory.
    """
    target = _target(one)
    dtype = dtype_of(one.type)
    if dtype != np.uint8 and dtype.kind != "f":
        raise SamplesError(f"input {one.name!r} takes {dtype}; pictures go into floats or uint8, give a .npz file")
    used = _scaling(scaling, target.channels) if dtype.kind == "f" else None
    if used is None and scaling is not None:
        raise SamplesError(f"input {one.name!r} takes bytes: pixels go in as they are; leave mean, std and scale out")
    try:
        pixels, was = _pixels(path, target)
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
        raise NotEnoughMemory(f"{path} does not fit into memory as the input {one.name!r} takes it") from exc
    height, width = array.shape[-2:] if target.channels_first else array.shape[-3:-1]
    return Picture(array, used, _note(path, was, (width, height), target, used))


def _scaling(scaling: Scaling | None, channels: int) -> Scaling:
    """What is used for so many channels. SamplesError where it is for another number of them."""
    if scaling is None:
        return Scaling(255.0, MEAN, STD) if channels == len(MEAN) else Scaling()
    for name, values in (("mean", scaling.mean), ("std", scaling.std)):
        if len(values) not in (1, channels):
            raise SamplesError(
                f"{name} needs {channels} values, one for each channel of the picture, got {len(values)}"
            )
    return scaling


def _target(one: Input) -> _Target:
    """Return the layout of pixels that an input takes. SamplesError for one that does not look like a picture."""
    shape = one.shape
    first = len(shape) in (3, 4) and shape[-3] in _MODES
    if not first and not (len(shape) in (3, 4) and shape[-1] in _MODES):
        raise SamplesError(
            f"input {one.name!r} takes the shape {shape_text(shape)}, which is no picture of 3 or 1 channels; give a"
            " .npz file"
        )
    channels, height, width = shape[-3:] if first else (shape[-1], *shape[-3:-1])
    for what, dim in (("height", height), ("width", width)):
        if isinstance(dim, int) and dim < 1:
            raise SamplesError(f"input {one.name!r} has a {what} of {dim}, which no picture has")
    batch = None if len(shape) == 3 else shape[0] if isinstance(shape[0], int) else 1
    fixed_height, fixed_width = (None if isinstance(side, str) else side for side in (height, width))
    return _Target(batch, int(channels), fixed_height, fixed_width, first)


def _pixels(path: Path, target: _Target) -> tuple[Array, tuple[int, int]]:
    """Bytes (H, W, C), and the width and height that the picture had."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    with path.open("rb") as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        try:
            with Image.open(file, formats=_FORMATS) as image:
                turned = _eight_bits(ImageOps.exif_transpose(image))
                width, height = target.size(turned.size)
                if width * height > (Image.MAX_IMAGE_PIXELS or width * height):
                    raise SamplesError(f"{path} would have {width} x {height} pixels; give --dim for both of its sides")
                sized = turned.convert(_MODES[target.channels]).resize((width, height), Image.Resampling.BILINEAR)
                return np.asarray(sized).reshape(height, width, target.channels), turned.size
        except (MemoryError, SamplesError):
            raise
        except (Image.DecompressionBombWarning, Image.DecompressionBombError) as exc:
            raise SamplesError(f"{path} has too many pixels to be a usual picture: {first_line(exc)}") from exc
        except UnidentifiedImageError as exc:
            raise SamplesError(f"{path} is no picture ({', '.join(_FORMATS)}) and no .npz file") from exc
        except Exception as exc:  # every format of Pillow has others
            raise SamplesError(f"{path} is a damaged picture, or is cut off: {first_line(exc)}") from exc


def _eight_bits(image: Image) -> Image:
    """The picture, where its pixels had 16 bits with 8 of them: converting would cut the larger values off."""
    from PIL.Image import fromarray

    if not image.mode.startswith("I;16"):
        return image
    return fromarray((np.asarray(image) >> 8).astype(np.uint8))


def _note(path: Path, was: tuple[int, int], now: tuple[int, int], target: _Target, used: Scaling | None) -> str:
    became = f"became {now[0]} x {now[1]}" if now != was else "kept its size"
    parts = [f"{path.name}, {was[0]} x {was[1]} pixels, {became}"]
    parts.append("RGB" if target.channels == 3 else "gray")
    if used:
        mean, std = (", ".join(f"{value:g}" for value in values) for values in (used.mean, used.std))
        parts.append(f"(pixel / {used.scale:g} - mean) / std with mean {mean} and std {std}")
    if target.batch is not None and target.batch > 1:
        parts.append(f"repeated {target.batch} times for the model's batch")
    return "; ".join(parts)
