"""Mixes of tensor types of llama.cpp's quantizer, such as q4_k_m.

A mix has a main type; llama.cpp's rules give wider types to the head and other sensitive tensors. Ids are those of
`general.file_type` in GGUF files.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from types import MappingProxyType

from quant.errors import UnknownTypeError
from quant.types import TYPES, TensorType

# llama.cpp refuses to quantize a layer's matrix to these without an importance matrix: the result would be garbage.
NEED_IMPORTANCE = ("iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs")
_MIXES_THAT_NEED_IT = ("q2_k_s", "iq3_xs")  # although their main type does not


@dataclass(frozen=True, slots=True)
class Mix:
    """Mix of tensor types for a whole model, with its name."""

    id: int
    name: str  # in lower case, such as "q4_k_m"
    type: TensorType  # type of most tensors

    @property
    def needs_importance(self) -> bool:
        """True if it cannot be made without an importance matrix."""
        return self.type.name in NEED_IMPORTANCE or self.name in _MIXES_THAT_NEED_IT


# Id, name and main type, roughly by size.
_TABLE = (
    (24, "iq1_s", "iq1_s"),
    (40, "q1_0", "q1_0"),
    (36, "tq1_0", "tq1_0"),
    (31, "iq1_m", "iq1_m"),
    (19, "iq2_xxs", "iq2_xxs"),
    (37, "tq2_0", "tq2_0"),
    (41, "q2_0", "q2_0"),
    (20, "iq2_xs", "iq2_xs"),
    (28, "iq2_s", "iq2_xs"),
    (29, "iq2_m", "iq2_s"),
    (21, "q2_k_s", "q2_k"),
    (10, "q2_k", "q2_k"),
    (23, "iq3_xxs", "iq3_xxs"),
    (22, "iq3_xs", "iq3_s"),
    (26, "iq3_s", "iq3_s"),
    (11, "q3_k_s", "q3_k"),
    (27, "iq3_m", "iq3_s"),
    (12, "q3_k_m", "q3_k"),
    (13, "q3_k_l", "q3_k"),
    (30, "iq4_xs", "iq4_xs"),
    (38, "mxfp4_moe", "mxfp4"),
    (25, "iq4_nl", "iq4_nl"),
    (2, "q4_0", "q4_0"),
    (14, "q4_k_s", "q4_k"),
    (15, "q4_k_m", "q4_k"),
    (3, "q4_1", "q4_1"),
    (8, "q5_0", "q5_0"),
    (16, "q5_k_s", "q5_k"),
    (17, "q5_k_m", "q5_k"),
    (9, "q5_1", "q5_1"),
    (18, "q6_k", "q6_k"),
    (7, "q8_0", "q8_0"),
    (1, "f16", "f16"),
    (32, "bf16", "bf16"),
    (0, "f32", "f32"),
)
MIXES: Mapping[str, Mix] = MappingProxyType({name: Mix(n, name, TYPES[kind]) for n, name, kind in _TABLE})
WEIGHT_TYPES: Mapping[str, TensorType] = MappingProxyType({mix.type.name: mix.type for mix in MIXES.values()})
_SHORT = {"q3_k": "q3_k_m", "q4_k": "q4_k_m", "q5_k": "q5_k_m"}


def mix_by_name(name: str) -> Mix:
    """Return the mix called `name`, in any case. Raises UnknownTypeError, which lists the known names."""
    lower = name.lower()
    mix = MIXES.get(_SHORT.get(lower, lower))
    if mix is None:
        near = get_close_matches(lower, MIXES, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UnknownTypeError(f"unknown type {name!r}; known: {', '.join(MIXES)}{hint}")
    return mix


def is_type_file(name: str) -> bool:
    """Return whether `name` is a GGUF file instead of a type: the file's types are then used, such as fitted ones."""
    return name.lower().endswith(".gguf")


def weight_type(name: str) -> TensorType:
    """Return the type called `name`, in any case. Raises UnknownTypeError if weights cannot be quantized to it."""
    kind = WEIGHT_TYPES.get(name.lower())
    if kind is None:
        raise UnknownTypeError(f"{name!r} is not a type for weights; known: {', '.join(WEIGHT_TYPES)}")
    return kind
