"""A tighter bound of what follows where a device is not used yet: that it will be, or not.

Bounds take each measure on its own. What a device holds is a measure that only its own groups have. A bound on its own
has all of the device's speed, and none of its bytes. So there are two cases: without the device, or with some bytes.
Where neither is hopeful, nothing is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from partition.search.tables import Tables


@dataclass(frozen=True)
class Cases:
    """Cases of one measure."""

    measure: int
    device: np.uint64  # the bits that all groups have which have some of the measure
    least: float  # of the measure, where it is not 0


def cases_of(tables: Tables, measures: Sequence[int]) -> list[Cases]:
    """Return the cases of each of these measures, peaks that only the groups of one device have."""
    result = []
    for measure in measures:
        values = np.where(np.isfinite(tables.stage).all(axis=0), tables.stage[measure], 0.0)
        having = values.max(axis=(1, 2), initial=0.0) > 0
        if having.any():
            device = np.bitwise_and.reduce(tables.masks[having])
            result.append(Cases(measure, device, float(values[values > 0].min())))
    return result
