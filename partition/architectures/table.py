"""Table of all architectures whose models can be cut, and the reasons why others cannot be."""

from collections.abc import Mapping

from partition.architectures.dense import DENSE_ARCHITECTURES
from partition.architectures.description import Architecture, Asserted, Rules
from partition.architectures.indexed import INDEXED_ARCHITECTURES
from partition.architectures.moe import MOE_ARCHITECTURES
from partition.architectures.recurrent import RECURRENT_ARCHITECTURES
from partition.architectures.refused import REFUSED

__all__ = ["ARCHITECTURES", "ASSERTED", "REFUSED", "RULES", "has_flash"]

ARCHITECTURES: Mapping[str, Architecture] = {
    **DENSE_ARCHITECTURES,
    **MOE_ARCHITECTURES,
    **INDEXED_ARCHITECTURES,
    **RECURRENT_ARCHITECTURES,
}
RULES: Mapping[str, Rules] = {name: architecture.rules for name, architecture in ARCHITECTURES.items()}
ASSERTED: Mapping[str, Asserted] = {**ARCHITECTURES, **REFUSED}


def has_flash(architecture: str) -> bool:
    """Return whether llama.cpp has flash attention for models of an architecture."""
    return architecture not in ASSERTED or ASSERTED[architecture].flash
