"""Recipe of a slice: pure data, so that every device that has the model cuts the same bytes.

A recipe names the model file (one file, by SHA-256 and size) and lists segments. The slice is the concatenation of
their bytes. The binary form of a recipe is:

    8 bytes magic and version, 32 bytes digest, u64 size of the model, u32 number of segments, then each segment:
    0, u64 length, the bytes                         Literal
    1, u64 length                                    Zeros
    2, u64 offset, u64 length                        Copy of one piece
    3, u64 offset, u64 length, u64 stride, u64 count Copy of several pieces
    5, u64 count, u64 length, u64 first, u64 scales  Blocks

All numbers are little-endian. Equal recipes have equal bytes, and each recipe has exactly one binary form.
"""

import hashlib
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache

from edge.errors import EdgeError
from partition.fields import is_digest

MAX_SEGMENTS = 1_000_000
MAX_BYTES = 1 << 44  # limit of a model and of a slice: 16 TiB

_MAGIC = b"EDGECUT\x01"
_HEAD = struct.Struct("<8s32sQI")
_LITERAL, _ZEROS, _PIECE, _PIECES = range(4)
_BLOCKS = 5  # tag 4 was for blocks with other scales, so its remembered digests do not fit these bytes
_TAGS = {_LITERAL: struct.Struct("<Q"), _ZEROS: struct.Struct("<Q"), _PIECE: struct.Struct("<QQ")}
_TAGS[_PIECES] = _TAGS[_BLOCKS] = struct.Struct("<QQQQ")
_SMALLEST = 9  # bytes of the smallest segment: its tag and one number

_MOST_BLOCK = 1024  # limit of a block in bytes
# A scale is a 16-bit float. Its bits are the least ones plus three fields of 10 bits, whose sum is bell-shaped over
# three octaves. In a trained model 90 % of scales are within 1.3 octaves and 99 % within 3, here within 1.6 and 2.4.
_SPREAD = 0x9E3779B97F4A7C15  # a block's number times this, modulo 2^64, contains the fields
_FIELDS = (2, 12, 22)  # first bits of the fields; the second scale's fields are 30 bits higher
_PATTERN_BYTES = 1 << 19
_LEAST_SCALES = (0x1C00, 0x2C00)  # 2^-8, 2^-4


class RecipeError(EdgeError, ValueError):
    """An invalid recipe: malformed bytes, a piece outside the model, or more than the limits permit."""


@dataclass(frozen=True, slots=True)
class Literal:
    """Bytes that the recipe itself contains, such as the header of the slice."""

    data: bytes

    def __post_init__(self) -> None:
        _need(len(self.data) > 0, lambda: "a literal has no bytes; leave it out")

    @property
    def n_bytes(self) -> int:
        """Bytes of the slice."""
        return len(self.data)


@dataclass(frozen=True, slots=True)
class Zeros:
    """Padding: `length` zero bytes."""

    length: int

    def __post_init__(self) -> None:
        _need(0 < self.length <= MAX_BYTES, lambda: f"{self.length} zeros, expected 1 to {MAX_BYTES}")

    @property
    def n_bytes(self) -> int:
        """Bytes of the slice."""
        return self.length


@dataclass(frozen=True, slots=True)
class Blocks:
    """Synthetic weights: `count` blocks of `length` bytes. Each block has `scales` 16-bit floats at byte `first`.

    All other bytes are 0. The scales differ from block to block and repeat after about _PATTERN_BYTES.
    """

    count: int
    length: int
    first: int
    scales: int

    def __post_init__(self) -> None:
        end = self.first + 2 * self.scales
        _need(
            0 < self.n_bytes <= MAX_BYTES
            and 0 <= self.first < end <= self.length <= _MOST_BLOCK
            and 0 < self.scales <= 2,
            lambda: f"{self}: expected 1 or 2 scales within blocks of up to {_MOST_BLOCK} bytes",
        )

    @property
    def n_bytes(self) -> int:
        """Bytes of the slice."""
        return self.count * self.length

    def data(self, at: int, n: int) -> bytes:
        """Return `n` bytes from byte `at` on."""
        pattern = memoryview(_pattern(self.length, self.first, self.scales))
        parts: list[memoryview] = []
        while n:
            parts.append(pattern[at % len(pattern) :][:n])
            at += len(parts[-1])
            n -= len(parts[-1])
        return b"".join(parts)


@dataclass(frozen=True, slots=True)
class Copy:
    """`count` pieces of `length` bytes of the model file, the first at byte `offset`, at distances of `stride`.

    The stride of a single piece is set to `length`, so that equal cuts are equal.
    """

    offset: int
    length: int
    stride: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        if self.count == 1:
            object.__setattr__(self, "stride", self.length)
        _need(
            self.offset >= 0 and 0 < self.length <= self.stride and self.count > 0 and self.end <= MAX_BYTES,
            lambda: f"{self}: expected 0 <= offset, 0 < length <= stride, 0 < count, an end within {MAX_BYTES}",
        )

    @property
    def n_bytes(self) -> int:
        """Bytes of the slice."""
        return self.length * self.count

    @property
    def end(self) -> int:
        """End of the last piece in the model file."""
        return self.offset + self.stride * (self.count - 1) + self.length


Segment = Literal | Zeros | Blocks | Copy


@dataclass(frozen=True)
class Recipe:
    """The model file, and the segments that make the slice. Raises RecipeError if they are invalid."""

    model_digest: str  # SHA-256 as 64 lower-case hexadecimal digits
    model_bytes: int
    segments: tuple[Segment, ...]

    def __post_init__(self) -> None:
        _need(is_digest(self.model_digest), lambda: f"{self.model_digest[:80]!r} is not a SHA-256 in hexadecimal")
        _need(0 < self.model_bytes <= MAX_BYTES, lambda: f"a model of {self.model_bytes} bytes; up to {MAX_BYTES}")
        n_segments = len(self.segments)
        _need(0 < n_segments <= MAX_SEGMENTS, lambda: f"{n_segments} segments, expected 1 to {MAX_SEGMENTS}")
        for i, segment in enumerate(self.segments):
            if isinstance(segment, Copy) and segment.end > self.model_bytes:
                raise RecipeError(f"segment {i} copies up to byte {segment.end} of a model of {self.model_bytes} bytes")
        _need(self.n_bytes <= MAX_BYTES, lambda: f"a slice of {self.n_bytes} bytes; the most is {MAX_BYTES}")

    @cached_property
    def n_bytes(self) -> int:
        """Bytes of the slice."""
        return sum(segment.n_bytes for segment in self.segments)

    @cached_property
    def copies(self) -> bool:
        """True if the slice needs bytes of the model."""
        return any(isinstance(segment, Copy) for segment in self.segments)

    @cached_property
    def key(self) -> str:
        """SHA-256 of the recipe itself, under which a slice's digest is remembered."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    def to_bytes(self) -> bytes:
        """Return the binary form, which `from_bytes` reads."""
        digest = bytes.fromhex(self.model_digest)
        parts = [_HEAD.pack(_MAGIC, digest, self.model_bytes, len(self.segments))]
        for segment in self.segments:
            if isinstance(segment, Literal):
                parts += (_packed(_LITERAL, len(segment.data)), segment.data)
            elif isinstance(segment, Zeros):
                parts.append(_packed(_ZEROS, segment.length))
            elif isinstance(segment, Blocks):
                parts.append(_packed(_BLOCKS, segment.count, segment.length, segment.first, segment.scales))
            elif segment.count == 1:
                parts.append(_packed(_PIECE, segment.offset, segment.length))
            else:
                parts.append(_packed(_PIECES, segment.offset, segment.length, segment.stride, segment.count))
        return b"".join(parts)

    @classmethod
    def from_bytes(cls, data: bytes) -> "Recipe":
        """Return the recipe in `data`, which may be untrusted. Raises RecipeError if `to_bytes` cannot have written it.

        The memory used is proportional to the length of `data`, whatever it contains.
        """
        _need(len(data) >= _HEAD.size, lambda: f"{len(data)} bytes are not a recipe; the head alone has {_HEAD.size}")
        magic, digest, model_bytes, count = _HEAD.unpack_from(data)
        _need(magic[:-1] == _MAGIC[:-1], lambda: f"it begins with {magic!r}; a recipe begins with {_MAGIC!r}")
        _need(magic == _MAGIC, lambda: f"a recipe of version {magic[-1]}, known is {_MAGIC[-1]}; update both sides")
        room = min(MAX_SEGMENTS, (len(data) - _HEAD.size) // _SMALLEST)
        _need(count <= room, lambda: f"it says {count} segments, at most {room} can be in {len(data)} bytes")
        segments: list[Segment] = []
        at = _HEAD.size
        for _ in range(count):
            segment, at = _parsed(data, at)
            segments.append(segment)
        _need(at == len(data), lambda: f"{len(data) - at} bytes follow the last segment")
        return cls(digest.hex(), model_bytes, tuple(segments))


def whole(model_digest: str, model_bytes: int) -> Recipe:
    """Return the recipe of the simplest slice: the unchanged model file."""
    return Recipe(model_digest, model_bytes, (Copy(0, model_bytes),))


@lru_cache(maxsize=8)  # enough for the types of one model
def _pattern(length: int, first: int, scales: int) -> bytes:
    """Return the first blocks of `Blocks`, as many as fit into _PATTERN_BYTES."""
    import numpy as np  # imported here so that the program starts without waiting for numpy

    count = _PATTERN_BYTES // length
    blocks = np.zeros((count, length), np.uint8)
    spread = np.arange(count, dtype=np.uint64) * np.uint64(_SPREAD)
    for i in range(scales):
        fields = [(spread >> np.uint64(field + 30 * i)) & np.uint64(1023) for field in _FIELDS]
        scale = sum(fields, np.uint64(_LEAST_SCALES[i])).astype("<u2")
        blocks[:, first + 2 * i : first + 2 * i + 2] = scale[:, None].view(np.uint8)
    return blocks.tobytes()


def _packed(tag: int, *numbers: int) -> bytes:
    return bytes((tag,)) + _TAGS[tag].pack(*numbers)


def _parsed(data: bytes, at: int) -> tuple[Segment, int]:
    """Return the segment at byte `at`, and the position of the next one."""
    tag = data[at] if at < len(data) else None
    layout = _TAGS.get(tag) if tag is not None else None
    if tag is not None and layout is None:
        raise RecipeError(f"byte {at} has a segment of the unknown kind {tag}; known are 0 to {_PIECES}, and {_BLOCKS}")
    end = at + 1 + (layout.size if layout else 0)
    if layout is None or end > len(data):
        raise RecipeError(f"it ends at byte {len(data)}, within a segment; it was cut off")
    numbers = layout.unpack_from(data, at + 1)
    if tag == _LITERAL:
        _need(numbers[0] <= len(data) - end, lambda: f"{numbers[0]} bytes of a literal, {len(data) - end} are there")
        return Literal(bytes(data[end : end + numbers[0]])), end + numbers[0]
    if tag == _ZEROS:
        return Zeros(numbers[0]), end
    if tag == _BLOCKS:
        return Blocks(*numbers), end
    if tag == _PIECES and numbers[3] == 1:
        raise RecipeError(f"byte {at}: one piece, written as several")
    return Copy(*numbers), end


def _need(holds: bool, message: Callable[[], str]) -> None:
    """Raise RecipeError unless `holds`. `message` is only called then, because a recipe can have a million segments."""
    if not holds:
        raise RecipeError(message())
