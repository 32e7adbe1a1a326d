"""Choices for a file of a given size: the tensors that may change, their possible types, and the bytes and damage."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import closing
from pathlib import Path

from edge.errors import SizeTooSmall
from edge.quantization.gguf import file_bytes, types_of_each
from quant.errors import DoesNotFit
from quant.fit import LEAST_FILL, Choice, Fit, fit
from quant.gguf.file import GgufFile
from quant.gguf.writer import NewTensor
from quant.mixes import MIXES, NEED_IMPORTANCE, Mix
from quant.sensitivity import Sensitivity
from quant.types import TYPES, TensorType

# Usual mixes, the smallest first, which are compared with the chosen types.
_USUAL = ("iq2_xxs", "iq2_xs", "iq2_s", "iq2_m", "q2_k", "iq3_xxs", "iq3_xs", "iq3_s", "q3_k_s", "iq3_m", "q3_k_m",
          "iq4_xs", "iq4_nl", "q4_0", "q4_k_s", "q4_k_m", "q5_k_s", "q5_k_m", "q6_k", "q8_0")  # fmt: skip
_MIB = 1 << 20
Condition = Callable[[TensorType], bool]


def free_tensors(file: GgufFile) -> list[str]:
    """Return the tensors that llama.cpp's quantizer changes. Their type changes in at least one of two mixes."""
    mixes = [MIXES[name] for name in ("q4_1", "q8_0")]  # the output matrix has different types in these two
    changed = [outcome.types for outcome in types_of_each([(file, mix) for mix in mixes])]
    return [name for name, tensor in file.tensors.items() if any(types[name] != tensor.type for types in changed)]


def choose_kinds(
    file: GgufFile,
    free: Sequence[str],
    covered: Container[str],
    reserved: int,
    budget: int,
    kinds: Sequence[TensorType],
    conditions: Sequence[Condition],
) -> list[TensorType]:
    """Return the types of `kinds` that meet the conditions.

    covered: names of the tensors in the importance matrix
    conditions: if no file of the budget meets a condition and the earlier ones, the condition is dropped

    Raises SizeTooSmall if even the smallest types exceed the budget.
    """

    def least(kinds: Sequence[TensorType]) -> int:
        return smallest(file, candidates(file, free, covered, kinds), reserved)

    if least(kinds) > budget:
        raise too_small(file, least(kinds), budget)
    useful = list(kinds)
    for condition in conditions:
        fewer = [kind for kind in useful if condition(kind)]
        useful = fewer if least(fewer) <= budget else useful
    return useful


def candidates(
    file: GgufFile, free: Sequence[str], covered: Container[str], kinds: Sequence[TensorType]
) -> dict[str, list[TensorType]]:
    """Return the types of `kinds` that each tensor may have. covered: tensors in the importance matrix"""
    return {name: _candidates(file, name, kinds, name in covered) for name in free}


def _candidates(file: GgufFile, name: str, kinds: Sequence[TensorType], has_importance: bool) -> list[TensorType]:
    """Return the types that a tensor may have: its own type, and narrower types whose blocks divide its rows."""
    tensor = file.tensors[name]
    wide = [TYPES["f16"]] if tensor.type.name == "f32" else []
    return [tensor.type] + [
        kind
        for kind in (*kinds, *wide)
        if kind.bits_per_weight < tensor.type.bits_per_weight
        and tensor.shape[0] % kind.block == 0
        and (has_importance or kind.name not in NEED_IMPORTANCE)
    ]


def choices(
    file: GgufFile, candidates: Mapping[str, Sequence[TensorType]], sensitivities: Sensitivity
) -> dict[str, list[Choice]]:
    """Return bytes and damage of each possible type of each tensor."""
    table = {}
    for name, kinds in candidates.items():
        if name in sensitivities.damages:
            table[name] = [
                Choice(kind, tensor_bytes(file, name, kind), sensitivities.damage(name, kind.name)) for kind in kinds
            ]
        else:  # the tensor keeps its type because no graph uses it directly or its rows do not fill blocks
            table[name] = [Choice(kinds[0], tensor_bytes(file, name, kinds[0]), 0.0)]
    return table


def from_mix(
    file: GgufFile, table: Mapping[str, Sequence[Choice]], budget: int, reserved: int, imatrix: Path
) -> Fit | None:
    """Return the largest usual mix within the budget, improved by spending the rest of the budget on wider types.

    The result is at least as good as that mix, even if the measured damages are wrong. Return None if no mix fits the
    budget, or if the result leaves too much of it unused.
    """
    usual = [(file, MIXES[name]) for name in reversed(_USUAL)]
    with closing(types_of_each(usual, imatrix=imatrix)) as outcomes:
        outcome = next((mixed for mixed in outcomes if mixed.n_bytes <= budget), None)
    if outcome is None:
        return None
    wider = {}
    for name, row in table.items():
        n_bytes = tensor_bytes(file, name, outcome.types[name])
        own = [choice for choice in row if choice.type == outcome.types[name]]
        least = own[0].damage if own else math.inf
        wider[name] = own + [choice for choice in row if choice.n_bytes > n_bytes and choice.damage <= least]
    if not all(wider.values()):
        return None
    try:
        widened = fit(wider, budget, reserved)
    except DoesNotFit:
        return None
    return widened if widened.n_bytes + reserved >= LEAST_FILL * budget else None


def reserved_bytes(file: GgufFile, free: Sequence[str]) -> int:
    """Return the bytes of a file that do not depend on the choice of types."""
    whole = file_bytes(file, {name: tensor.type for name, tensor in file.tensors.items()})
    return whole - sum(tensor_bytes(file, name, file.tensors[name].type) for name in free)


def smallest(file: GgufFile, candidates: Mapping[str, Sequence[TensorType]], reserved: int) -> int:
    """Return the bytes of the smallest file, in which every tensor has its narrowest possible type."""
    return reserved + sum(min(tensor_bytes(file, name, kind) for kind in kinds) for name, kinds in candidates.items())


def tensor_bytes(file: GgufFile, name: str, kind: TensorType) -> int:
    """Return the bytes of a tensor in a type, including padding."""
    tensor = NewTensor(name, file.tensors[name].shape, kind)
    return tensor.n_bytes + tensor.padding


def mix_like(chosen: Fit) -> Mix:
    """Return the mix that the file is labelled with: the mix of the type that most bytes have.

    The label has no other effect, because every tensor that may change gets an explicit type.
    """
    n_bytes = Counter[str]()
    for choice in chosen.choices.values():
        if choice.type.block > 1:
            n_bytes[choice.type.name] += choice.n_bytes
    most = n_bytes.most_common(1)[0][0] if n_bytes else "q8_0"
    return next((mix for mix in MIXES.values() if mix.name in (most, f"{most}_m", f"{most}_moe")), MIXES["q8_0"])


def too_small(file: GgufFile, least: int, budget: int) -> SizeTooSmall:
    """Return an error with the least possible size."""
    return SizeTooSmall(
        f"{file.path.name} cannot be smaller than {least}B ({least / _MIB:,.1f} MiB) with the types to choose among;"
        f" {budget}B ({budget / _MIB:,.1f} MiB) were asked for. Allow smaller types, or take a smaller"
        " model"
    )
