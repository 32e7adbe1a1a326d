"""Reads numbers, strings and key-value pairs in the header of a GGUF file, never beyond its end.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Everything is little-endian. A string is a u64 length
and that many bytes; an array is a u32 item type, a u64 count and the items. Every length and count is checked against
the remaining bytes before anything is read or allocated. So a damaged number costs neither memory nor time.
"""

import mmap
import struct
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, overload

from quant.errors import ModelFileError

U32 = struct.Struct("<I")
U64 = struct.Struct("<Q")

STRING, ARRAY = 8, 9  # value type ids
# Name and struct code of numbers, by value type id.
NUMBERS = {
    0: ("u8", "B"),
    1: ("i8", "b"),
    2: ("u16", "H"),
    3: ("i16", "h"),
    4: ("u32", "I"),
    5: ("i32", "i"),
    6: ("f32", "f"),
    7: ("bool", "?"),
    10: ("u64", "Q"),
    11: ("i64", "q"),
    12: ("f64", "d"),
}
_MAX_KEY_BYTES = 65535  # the format's limit


class GgufArray(Sequence[Any]):
    """An array of metadata, decoded at the first access. Its length and `item_type` ("str", "f32") need no decoding."""

    def __init__(self, data: mmap.mmap, item_type: str, code: str, count: int, start: int) -> None:
        self.item_type = item_type
        self._data = data
        self._code = code  # struct code of numbers, "" for strings
        self._count = count
        self._start = start
        self._items: tuple[Any, ...] | None = None

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Any, ...]: ...
    def __getitem__(self, index: int | slice) -> Any:
        return self._decoded()[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._decoded())

    def __repr__(self) -> str:
        return f"<GgufArray of {self._count} {self.item_type}>"

    def _decoded(self) -> tuple[Any, ...]:
        if self._items is None:
            if self._code:
                self._items = self._numbers()
            else:  # a token may be part of a UTF-8 sequence
                self._items = tuple(item.decode("utf-8", "replace") for item in self.raw_strings())
        return self._items

    def _numbers(self) -> tuple[Any, ...]:
        return struct.unpack_from(f"<{self._count}{self._code}", self._data, self._start)

    def raw_strings(self) -> list[bytes]:
        """Return the items of an array of strings as stored."""
        items, position, data, length_at = [], self._start, self._data, U64.unpack_from
        for _ in range(self._count):
            begin = position + U64.size
            position = begin + length_at(data, position)[0]
            items.append(data[begin:position])
        return items


Value = int | float | bool | str | GgufArray


class Pair(NamedTuple):
    """Key-value pair, with the location of its value."""

    key: str
    value: Value
    type: str  # "u32", "str", "arr[str]"
    start: int  # position of the value's type id, in bytes from the start of the file
    end: int  # position after the value


class HeaderReader:
    """A position in a mapped file that only moves forward. A step beyond the end raises ModelFileError."""

    def __init__(self, data: mmap.mmap, file_name: str) -> None:
        self.data = data
        self._size = len(data)
        self.file_name = file_name
        self.position = 0

    def error(self, problem: str) -> ModelFileError:
        """Return the error to raise about this file."""
        return ModelFileError(f"{self.file_name}: {problem}")

    @property
    def left(self) -> int:
        """Number of bytes from the position to the end of the file."""
        return self._size - self.position

    def skip(self, n_bytes: int, what: str) -> int:
        """Step over `n_bytes`; return the position where they start."""
        start = self.position
        if n_bytes > self._size - start:
            raise self.error(
                f"the file ends inside {what}: it needs {n_bytes} bytes, but only {self.left} are left; "
                "the file is incomplete or damaged, download it again"
            )
        self.position = start + n_bytes
        return start

    def u32(self, what: str) -> int:
        number: int = U32.unpack_from(self.data, self.skip(4, what))[0]
        return number

    def u64(self, what: str) -> int:
        number: int = U64.unpack_from(self.data, self.skip(8, what))[0]
        return number

    def name(self, what: str, max_bytes: int = _MAX_KEY_BYTES) -> str:
        """Read the name of a key or tensor. It must be printable UTF-8, because C code compares and prints it."""
        length = self.u64(f"the length of {what}")
        if not 0 < length <= max_bytes:
            raise self.error(f"{what} is {length} bytes long, but must have 1 to {max_bytes}; the file is damaged")
        start = self.skip(length, what)
        try:
            text = self.data[start : start + length].decode("utf-8")
        except UnicodeDecodeError:
            raise self.error(f"{what} is not valid UTF-8; the file is damaged") from None
        if not text.isprintable():
            raise self.error(f"{what} has unprintable characters: {text[:80]!r}; the file is damaged")
        return text

    def pair(self, what: str) -> Pair:
        """Read the next key-value pair. Arrays are stepped over, not decoded."""
        key = self.name(f"the key of {what}")
        where = f"the value of {key[:80]!r}"
        start = self.position
        type_id = self.u32(where)
        if type_id == ARRAY:
            value: Value = self._array(where)
            type_name = f"arr[{value.item_type}]"  # type: ignore[union-attr]
        elif type_id == STRING:
            length = self.u64(where)
            begin = self.skip(length, where)
            value, type_name = self.data[begin : begin + length].decode("utf-8", "replace"), "str"
        elif type_id in NUMBERS:
            type_name, code = NUMBERS[type_id]
            (value,) = struct.unpack_from("<" + code, self.data, self.skip(struct.calcsize("<" + code), where))
        else:
            raise self.error(f"{where} has the unknown type {type_id}; known are 0 to 12; the file is damaged")
        return Pair(key, value, type_name, start, self.position)

    def _array(self, where: str) -> GgufArray:
        type_id, count = self.u32(where), self.u64(where)
        if type_id == STRING:
            start = self._skip_strings(count, where)
            return GgufArray(self.data, "str", "", count, start)
        if type_id == ARRAY:
            raise self.error(f"{where} is an array of arrays, which llama.cpp does not read")
        if type_id not in NUMBERS:
            raise self.error(f"{where} is an array of the unknown type {type_id}; known are 0 to 12")
        item_type, code = NUMBERS[type_id]
        start = self.skip(count * struct.calcsize("<" + code), where)
        return GgufArray(self.data, item_type, code, count, start)

    def _skip_strings(self, count: int, where: str) -> int:
        """Step over `count` strings. This is the only long loop here, for a vocabulary of 128,000 tokens."""
        if count * U64.size > self.left:
            self.skip(count * U64.size, where)  # raises, because even empty strings would not fit
        start = position = self.position
        data, last, length_at = self.data, len(self.data) - U64.size, U64.unpack_from
        for _ in range(count):
            if position > last:
                break
            position += U64.size + length_at(data, position)[0]
        else:
            if position <= len(data):
                self.position = position
                return start
        raise self.error(f"the file ends inside {where}; the file is incomplete or damaged, download it again")
