"""Search problem: groups of devices, the cost of each stage on them, and the objectives."""

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
Objectives = Callable[[Array], Array]  # measures [D, N], all finite -> [K, N]
# Objectives [K, N] -> [N]: which solutions with such are of no interest, nor any with larger ones.
Outdone = Callable[[Array], NDArray[np.bool_]]


@dataclass(frozen=True)
class Group:
    """Devices that can hold a stage together, and what it costs them. Costs are 0 or more; inf: impossible."""

    members: tuple[int, ...]  # numbers of devices, from 0
    stage: Array  # [D, n+1, n+1]: of stage [i, j), by measure: those that add up, then those whose largest counts
    enter: Array  # [D]: from the source to here as the first stage
    leave: Array  # [D]: from here as the last stage to where the result is wanted


@dataclass(frozen=True)
class Problem:
    """Candidate groups, their costs, and the objectives."""

    n: int  # layers or blocks
    adding: int  # measures that add up, S of D
    groups: tuple[Group, ...]
    hop: Callable[[int, int], Array]  # the groups a and b -> [D, n+1] of handing over from a to b, for every cut
    objectives: Objectives  # 0 or more and to be small. They grow with each argument or stay.
    caps: Array | None = None  # [K]: solutions above any of these are of no interest


def with_peaks(problem: Problem, peaks: Sequence[Array], enter: Sequence[Array]) -> Problem:
    """The same problem with more measures that peak over stages, each of them an objective, behind the others.

    peaks: of each group, [E, n+1, n+1]; enter: [E], where it is the first. Finite.
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
    """The same problem, of which only solutions with one group are possible."""
    return replace(problem, hop=lambda a, b: np.full_like(problem.hop(a, b), np.inf))


def several_stages(problem: Problem) -> Problem:
    """The same problem, of which only solutions with several groups are possible."""
    groups = []
    for group in problem.groups:
        stage = group.stage.copy()
        stage[: problem.adding, 0, -1] = np.inf
        groups.append(replace(group, stage=stage))
    return replace(problem, groups=tuple(groups))


def check_watts(objectives: Iterable[str], speeds: Sequence[DeviceSpeed | OnnxDevice]) -> None:
    """PlanError where an objective needs the power of a device that is not known."""
    needing = [name for name in objectives if OBJECTIVES[name].power]
    lacking = [speed.name for speed in speeds if speed.watts is None]
    if needing and lacking:
        raise PlanError(
            f"{needing[0]} needs the power of each device; give watts of {', '.join(lacking)} in the cluster file"
        )
