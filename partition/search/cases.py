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
    device: np.uint64  # as a bit
    least: float  # of the measure, where it is not 0


def cases_of(tables: Tables, devices: Sequence[int]) -> list[Cases]:
    """Return the cases of the last measures, peaks that only groups of these devices have: one for each, by number."""
    result = []
    for measure, device in enumerate(devices, len(tables.stage) - len(devices)):
        values = np.where(np.isfinite(tables.stage).all(axis=0), tables.stage[measure], 0.0)
        if (values > 0).any():
            result.append(Cases(measure, np.uint64(1 << device), float(values[values > 0].min())))
    return result
