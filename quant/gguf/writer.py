"""Writer of the header of a GGUF file: its key-value pairs and its table of tensors. The caller writes the weights.

Values are typed (`encoded("u32", 8)`) or copied from another file (`GgufFile.raw_value`), so copied metadata are exact.
The format is the one that `quant.gguf.file` reads: version 3, little-endian.
"""

import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from quant.gguf.header import ARRAY, NUMBERS, STRING, U32, U64
from quant.types import TensorType

ALIGNMENT = 32  # bytes; the default of general.alignment

_VERSION = 3
_NUMBERS = {name: (type_id, code) for type_id, (name, code) in NUMBERS.items()}

Scalar = int | float | bool | str


@dataclass(frozen=True, slots=True)
class NewTensor:
    """A tensor of a new file."""

    name: str
    shape: tuple[int, ...]  # in ggml's order: the number of values in a row comes first
    type: TensorType

    @property
    def n_bytes(self) -> int:
        """Bytes of its values, without padding."""
        return self.type.n_bytes(self.shape[0]) * math.prod(self.shape[1:])

    @property
    def padding(self) -> int:
        """Number of zero bytes between its values and the next tensor's."""
        return -self.n_bytes % ALIGNMENT


def encoded(type_name: str, value: Scalar | Sequence[Scalar]) -> bytes:
    """Return `value` as a file stores it, after its type id. `GgufFile.value_type` uses the same names of types.

    Raises ValueError for an unknown type or a value that the type cannot represent.
    """
    try:
        if type_name.startswith("arr["):
            assert not isinstance(value, int | float)
            item = type_name[4:-1]
            return U32.pack(ARRAY) + U32.pack(_id(item)) + U64.pack(len(value)) + _items(item, value)
        assert isinstance(value, int | float | str)
        return U32.pack(_id(type_name)) + _items(type_name, [value])
    except (AssertionError, AttributeError, KeyError, struct.error) as exc:
        raise ValueError(f"{value!r:.80} cannot be written as {type_name}") from exc


def header(pairs: Mapping[str, bytes], tensors: Sequence[NewTensor]) -> bytes:
    """Return the bytes of a file before its weights, with padding.

    pairs: values from `encoded` or `GgufFile.raw_value`, by key.
    tensors: tensors whose bytes, each followed by its `padding`, the caller writes next, in this order.

    Raises ValueError for a tensor whose rows do not fill whole blocks of its type.
    """
    head = b"GGUF" + U32.pack(_VERSION) + U64.pack(len(tensors)) + U64.pack(len(pairs))
    parts = [head, *(_text(key) + value for key, value in pairs.items())]
    offset = 0
    for tensor in tensors:
        dims = b"".join(U64.pack(n) for n in tensor.shape)
        parts.append(
            _text(tensor.name) + U32.pack(len(tensor.shape)) + dims + U32.pack(tensor.type.id) + U64.pack(offset)
        )
        offset += tensor.n_bytes + tensor.padding
    data = b"".join(parts)
    return data + bytes(-len(data) % ALIGNMENT)


def _id(type_name: str) -> int:
    return STRING if type_name == "str" else _NUMBERS[type_name][0]


def _items(type_name: str, values: Iterable[Scalar]) -> bytes:
    if type_name == "str":
        return b"".join(_text(value) for value in values)  # type: ignore[arg-type]  # a number has no `encode`
    code = "<" + _NUMBERS[type_name][1]
    return b"".join(struct.pack(code, value) for value in values)


def _text(text: str) -> bytes:
    raw = text.encode()
    return U64.pack(len(raw)) + raw
