"""Search problem: groups of devices, costs of stages on them, and objectives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from partition.errors import PlanError
from partition.predict.objectives import OBJECTIVES
from partition.predict.onnx_predict import OnnxDevice
from partition.predict.speeds import DeviceSpeed

Array = NDArray[np.float64]
Objectives = Callable[[Array], Array]  # maps finite measures [D, N] to objectives [K, N]
# Maps objectives [K, N] to [N]: True if solutions with these or larger objectives are not wanted.
Outdone = Callable[[Array], NDArray[np.bool_]]


@dataclass(frozen=True)
class Group:
    """Devices that can hold a stage together, with their costs. Costs are at least 0; inf means impossible."""

    members: tuple[int, ...]  # device indices, from 0
    stage: Array  # [D, n+1, n+1]: measures of stage [i, j): first sums, then peaks
    enter: Array  # [D]: measures from the source to this group as the first stage
    leave: Array  # [D]: measures from this group as the last stage to the destination


@dataclass(frozen=True)
class Problem:
    """Candidate groups, their costs, and the objectives."""

    n: int  # number of layers or segments
    adding: int  # number of measures that are sums; the others are peaks
    groups: tuple[Group, ...]
    # Maps groups a and b to the measures of the hop from a to b at every cut, [D, n+1].
    hop: Callable[[int, int], Array]
    objectives: Objectives  # at least 0, smaller is better; they never decrease if a measure grows
    caps: Array | None = None  # [K]: largest allowed costs


def with_peaks(problem: Problem, peaks: Sequence[Array], enter: Sequence[Array]) -> Problem:
    """Return the problem with additional peaks; each peak is also an additional objective.

    peaks: finite measures of each group, [E, n+1, n+1].
    enter: finite measures of each group as the first one, [E].
    """
    count, n = peaks[0].shape[0], problem.n
    groups = [
        replace(
            group,
            stage=np.concatenate([group.stage, more]),
            enter=np.concatenate([group.enter, entering]),
            leave=np.concatenate([group.leave, np.zeros(count)]),
        )
        for group, more, entering in zip(problem.groups, peaks, enter, strict=True)
    ]
    no_hop = np.zeros((count, n + 1))

    def hop(a: int, b: int) -> Array:
        return np.concatenate([problem.hop(a, b), no_hop])

    def objectives(values: Array) -> Array:
        own = len(values) - count
        return np.concatenate([problem.objectives(values[:own]), values[own:]])

    return replace(problem, groups=tuple(groups), hop=hop, objectives=objectives)


def one_stage(problem: Problem) -> Problem:
    """Return the problem restricted to solutions with one group."""
    return replace(problem, hop=lambda a, b: np.full_like(problem.hop(a, b), np.inf))


def several_stages(problem: Problem) -> Problem:
    """Return the problem restricted to solutions with several groups."""
    groups = []
    for group in problem.groups:
        stage = group.stage.copy()
        stage[: problem.adding, 0, -1] = np.inf
        groups.append(replace(group, stage=stage))
    return replace(problem, groups=tuple(groups))


def check_watts(objectives: Iterable[str], speeds: Sequence[DeviceSpeed | OnnxDevice]) -> None:
    """Raise PlanError if an objective needs the power of a device whose power is unknown."""
    needing = [name for name in objectives if OBJECTIVES[name].power]
    lacking = [speed.name for speed in speeds if speed.watts is None]
    if needing and lacking:
        raise PlanError(
            f"{needing[0]} needs the power of each device; give watts of {', '.join(lacking)} in the cluster file"
        )
