"""Tighter bounds of what follows, case by case: by how much it brings of a peak that few groups have.

Bounds take each measure on its own. What a device holds is such a peak: nothing before the device is used, and then the
more the sooner all is done. A bound on its own has both, all of the device and none of its bytes. So for a label that
has not used the device yet there are cases: it will not, or for so many bytes, and if none is hopeful, it is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from partition.search.bounds import Bounds
from partition.search.tables import Tables

Array = NDArray[np.float64]
_PARTS = 3  # of the largest value, each of which is a case


@dataclass(frozen=True)
class Case:
    """What follows has at least `least` of the peak, with these bounds."""

    least: float
    bounds: Bounds
    used: np.uint64  # devices that are in no later group


@dataclass(frozen=True)
class Cases:
    """Cases of one measure, which labels that have some of it are in none of."""

    measure: int
    cases: tuple[Case, ...]


def cases_of(tables: Tables, bounds: Bounds, measures: Sequence[int]) -> list[Cases]:
    """Return the cases of each of these measures, peaks that only groups with one certain device have."""
    result = []
    for measure in measures:
        values = tables.stage[measure]
        some = np.where(np.isfinite(tables.stage).all(axis=0) & (values > 0), values, 0.0)
        having = some.max(axis=(1, 2), initial=0.0) > 0
        if not having.any():
            continue
        device = np.bitwise_and.reduce(tables.masks[having])
        cases, least = [Case(0.0, bounds, device)], 0.0
        different = np.unique(some)
        for part in range(1, _PARTS + 1):
            most = different[-1] * part / _PARTS
            between = different[(different > least) & (different <= most)]
            if len(between):
                cases.append(Case(float(between[0]), bounds if part == _PARTS else _capped(tables, measure, most), device & np.uint64(0)))
                least = most
        result.append(Cases(measure, tuple(cases[::-1])))
    return result


def _capped(tables: Tables, measure: int, most: float) -> Bounds:
    """Return the bounds where no stage has more of a measure."""
    capped = copy(tables)
    capped.stage = np.where(tables.stage[measure] > most, np.inf, tables.stage)
    return Bounds(capped)
