"""The tensor types of ggml: their names, ids and sizes.

A type stores values in blocks: `block` values along a row share `block_bytes` bytes (values and their scales). The
numbers are llama.cpp's; tests compare every row with the library and with the `gguf` package.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from quant.errors import UnknownTypeError


@dataclass(frozen=True, slots=True)
class TensorType:
    """Storage type of a tensor's numbers."""

    id: int  # id in GGUF files
    name: str  # in lower case, such as "q4_0"
    block: int  # values in a block
    block_bytes: int  # bytes of a block

    @property
    def bits_per_weight(self) -> float:
        """Bits of one value, including scales."""
        return 8 * self.block_bytes / self.block

    @property
    def scales(self) -> tuple[int, int]:
        """(first byte, number) of the 16-bit floats in a block that scale or shift its values.

        (0, 0) for types without such floats, and for types that spread them over a block.
        """
        return _SCALES.get(self.name, (0, 0))

    def n_bytes(self, n_values: int) -> int:
        """Return the bytes of `n_values` values. Raises ValueError if they do not fill whole blocks."""
        blocks, rest = divmod(n_values, self.block)
        if rest:
            raise ValueError(f"{self.name} stores whole blocks of {self.block} values, got {n_values} values")
        return blocks * self.block_bytes


_TABLE = (
    # id, name, values in a block, bytes of a block
    (0, "f32", 1, 4),
    (1, "f16", 1, 2),
    (2, "q4_0", 32, 18),
    (3, "q4_1", 32, 20),
    (6, "q5_0", 32, 22),
    (7, "q5_1", 32, 24),
    (8, "q8_0", 32, 34),
    (9, "q8_1", 32, 36),
    (10, "q2_k", 256, 84),
    (11, "q3_k", 256, 110),
    (12, "q4_k", 256, 144),
    (13, "q5_k", 256, 176),
    (14, "q6_k", 256, 210),
    (15, "q8_k", 256, 292),
    (16, "iq2_xxs", 256, 66),
    (17, "iq2_xs", 256, 74),
    (18, "iq3_xxs", 256, 98),
    (19, "iq1_s", 256, 50),
    (20, "iq4_nl", 32, 18),
    (21, "iq3_s", 256, 110),
    (22, "iq2_s", 256, 82),
    (23, "iq4_xs", 256, 136),
    (24, "i8", 1, 1),
    (25, "i16", 1, 2),
    (26, "i32", 1, 4),
    (27, "i64", 1, 8),
    (28, "f64", 1, 8),
    (29, "iq1_m", 256, 56),
    (30, "bf16", 1, 2),
    (34, "tq1_0", 256, 54),
    (35, "tq2_0", 256, 66),
    (39, "mxfp4", 32, 17),
    (40, "nvfp4", 64, 36),
    (41, "q1_0", 128, 18),
    (42, "q2_0", 64, 18),
)

_SCALES = {
    **dict.fromkeys(("q1_0", "q2_0", "q4_0", "q5_0", "q8_0", "iq4_nl", "iq4_xs"), (0, 1)),
    **dict.fromkeys(("iq3_s", "iq3_xxs", "iq2_xxs", "iq2_xs", "iq2_s", "iq1_s"), (0, 1)),
    **dict.fromkeys(("q4_1", "q5_1", "q4_k", "q5_k"), (0, 2)),
    "q2_k": (80, 2), "q3_k": (108, 1), "q6_k": (208, 1), "tq1_0": (52, 1), "tq2_0": (64, 1),
}  # fmt: skip

TYPES: Mapping[str, TensorType] = MappingProxyType({row[1]: TensorType(*row) for row in _TABLE})
_BY_ID: Mapping[int, TensorType] = MappingProxyType({t.id: t for t in TYPES.values()})

# Types that llama.cpp supports for the KV cache (`--cache-type-k`, `--cache-type-v`), the widest first.
KV_TYPES: tuple[str, ...] = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")


# Quantized types for which llama.cpp has vector kernels in WebAssembly (ggml-cpu/arch/wasm/quants.c).
BROWSER_TYPES: tuple[str, ...] = ("q2_k", "q3_k", "q4_0", "q4_k", "q5_0", "q5_1", "q5_k", "q6_k", "q8_0")


@dataclass(frozen=True, slots=True)
class CacheType:
    """Types of the keys and the values of a KV cache."""

    keys: TensorType
    values: TensorType

    @property
    def name(self) -> str:
        """Name as used in options: "q8_0", or "q8_0/q4_0" if values have another type than keys."""
        return self.keys.name if self.keys == self.values else f"{self.keys.name}/{self.values.name}"


def cache_type(name: str) -> CacheType:
    """Return the types that a `CacheType.name` stands for. Raises UnknownTypeError, which lists the known ones."""
    keys, _, values = name.lower().partition("/")
    if not {keys, values or keys} <= set(KV_TYPES) or name.endswith("/"):
        raise UnknownTypeError(
            f"{name!r:.80} cannot store a KV cache; use one of {', '.join(KV_TYPES)}, or two, KEYS/VALUES"
        )
    return CacheType(TYPES[keys], TYPES[values or keys])


def type_by_name(name: str) -> TensorType:
    """Return the type called `name`, in any case. Raises UnknownTypeError, which lists the known names."""
    tensor_type = TYPES.get(name.lower())
    if tensor_type is None:
        raise UnknownTypeError(f"unknown tensor type {name!r}; known: {', '.join(TYPES)}")
    return tensor_type


def type_by_id(type_id: int) -> TensorType:
    """Return the type with this id in GGUF files. Raises UnknownTypeError, which lists the known ones."""
    tensor_type = _BY_ID.get(type_id)
    if tensor_type is None:
        known = ", ".join(f"{t.id} {t.name}" for t in TYPES.values())
        raise UnknownTypeError(f"unknown tensor type id {type_id}; known: {known}")
    return tensor_type
