"""Groups of devices that hold a stage together: their shares, and the costs of every possible stage."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from partition.plan.apportion import parts
from partition.plan.plan import NOTHING, Shard
from partition.plan.tensor import shards
from partition.predict import cost
from partition.predict.cost import DiskSeconds, GroupCost, Work
from partition.predict.hosts import used
from partition.predict.measures import Measures
from partition.predict.speeds import DeviceSpeed, Links, LinkSpeed, together
from partition.predict.tiers import TieredSpeed, bytes_before, on_gpu
from partition.search.problem import Group

Array = NDArray[np.float64]
ThinCosts = Callable[[Measures], Array]  # returns measures [D]
_LENGTHS = 4  # number of stage lengths with shares of their own, if memory does not allow shares by speed
_BUDGET_STEP = 64 << 20  # bytes
_TIGHT = 0.98  # usable part of the memory, because heads and columns are dealt in whole units


class StageGroup:
    """A group of devices. The first member receives the input from other stages."""

    def __init__(
        self,
        work: Work,
        speeds: Sequence[DeviceSpeed],
        links: Links,
        members: tuple[int, ...],
        *,
        for_prompts: bool = False,
    ) -> None:
        """speeds: speeds of all devices.
        members: indices of the group's devices.
        for_prompts: share by prefill speed regardless of memory, so that more memory never makes a stage slower.

        Raises PlanError if the model has too few units to share.
        """
        self.work, self.links, self.members = work, links, members
        # Rows of the steps that shares are made for, and earlier tokens that these rows attend to.
        self._rows, behind = (cost.chunk_rows(work.prompt), work.prompt / 2) if for_prompts else (1, 0.0)
        self.speeds = together([speeds[i] for i in members])
        self._attention_s = [self._rows * behind * speed.row_token_s(prompt=for_prompts) for speed in self.speeds]
        self.devices = tuple(speed.device for speed in self.speeds)
        n = work.limits.sizes.layers
        edges = np.isin(np.arange(n + 1), (*work.limits.begins, n))
        lengths = np.arange(n + 1)[None, :] - np.arange(n + 1)[:, None]
        never = np.isin(lengths, work.limits.no_stage_of)
        self._is_stage = (_spans(work.before) > 0) & edges[:, None] & edges[None, :] & ~never
        self._by_measures: dict[Hashable, Array] = {}  # measures of every stage
        self._ends: dict[Hashable, tuple[Array, Array, Array]] = {}  # by measures and costs of the thin owner
        self._choices = [self._cost([1.0] * len(members))]
        self._choice = np.zeros((n + 1, n + 1), np.int64)  # index in `_choices` for each stage
        self._stages = [_Stages(self._choices[0], *np.nonzero(self._is_stage))]
        short = self._chosen(lambda stages: stages.most_paged) > 0
        if len(members) > 1 and not for_prompts and bool(short.any()):
            self._share_by_memory(short, lengths)
            chosen = [np.nonzero(self._is_stage & (self._choice == i)) for i in range(len(self._choices))]
            self._stages = [_Stages(group, *cells) for group, cells in zip(self._choices, chosen, strict=True)]

    def shards(self, start: int, stop: int) -> tuple[Shard, ...]:
        """Return the shards of the stage [start, stop). A rank that has to page gets a memory budget."""
        stage = self._stage(start, stop)
        return tuple(
            replace(
                shard,
                threads=speed.threads,
                vocab=shard.vocab if stage.last else NOTHING,
                memory=_budget(speed.memory_bytes) if float(n) > 0 else None,
            )
            for shard, speed, n in zip(stage.group.shards, self.speeds, stage.paged, strict=True)
        )

    def costs(self, measures: Measures, owner: str, thin: ThinCosts | None = None) -> Group:
        """Return the costs for the search. Every group can be last. A group without the owner can be first behind a
        thin owner.

        thin: returns the costs of the thin owner; None: the owner must have layers.
        """
        if measures.key not in self._by_measures:
            self._by_measures[measures.key] = self._stage_costs(measures, owner)
        stage = self._by_measures[measures.key]
        key = measures.key, None if thin is None or owner in self.devices else thin(measures).tobytes()
        if key not in self._ends:
            self._ends[key] = self._end_costs(measures, stage[:, 0, -1], owner, thin)
        enter, leave, whole = self._ends[key]
        if not np.array_equal(whole, stage[:, 0, -1]):
            stage = stage.copy()
            stage[:, 0, -1] = whole
        return Group(self.members, stage, enter, leave)

    def _end_costs(
        self, measures: Measures, whole: Array, owner: str, thin: ThinCosts | None
    ) -> tuple[Array, Array, Array]:
        """Return the measures [D] to enter the first stage, those to leave the last one, and those of a single stage.

        whole: measures of the stage with all layers.
        """
        enter = np.full(len(whole), 0.0 if owner in self.devices else np.inf)
        if thin is not None and owner not in self.devices:

            def entering(measures: Measures) -> Array:
                hop = measures.for_hop(lambda rows: cost.hop_s(self.work, (owner,), self.devices, self.links, rows))
                return measures.join(thin(measures), hop)

            enter = entering(measures)
            whole = measures.only_stage(whole, enter, entering(measures.of_one_stage))
        leave = measures.for_hop(lambda rows: cost.answer_s(self.devices, owner, self.links, rows), answer=True)
        return enter, leave, whole

    def _stage_costs(self, measures: Measures, owner: str) -> Array:
        """Return the measures of every stage [i, j); inf if it is impossible."""
        memory = self._chosen(lambda stages: np.maximum.reduce(stages.bytes_held()))
        drafting_s = self.work.drafting_s(self.devices, owner)
        hosts, watts = used(speed.host for speed in self.speeds), self._choices[0].watts
        stage = measures.for_stages(self._seconds, self._prompt_s, watts, memory, hosts, drafting_s)
        possible = self._is_stage & np.isfinite(self._chosen(lambda stages: stages.most_paged))
        if measures.microbatches > 1:  # a single computing stage runs one step at a time, also behind a thin owner
            possible[0, -1] = False
        stage[:, ~possible] = np.inf
        return stage

    def thin_costs(self, measures: Measures) -> Array:
        """Return the measures of a stage without layers on the owner's device."""
        [speed], group = self.speeds, self._choices[0]
        room = 0.0 if speed.runtime_bytes <= speed.memory_bytes else np.inf
        stage = measures.for_stages(
            lambda rows: np.full((1, 1), group.seconds(0.0, rows, False)),
            lambda: np.full(
                (1, 1), group.prompt_s(0.0, False, cost.chunk_rows(self.work.prompt, measures.prompt_stages))
            ),
            self._choices[0].watts,
            np.full((1, 1), float(speed.runtime_bytes)),
            used([speed.host]),
            self.work.drafting_s(self.devices, speed.device),
        )
        costs: Array = stage[:, 0, 0] + room
        return costs

    def moved_s(self, owner: str, *, to_owner: bool) -> Array:
        """Return the seconds to transfer the prompt's KV cache of every stage to the owner, or from it."""
        ways = [self.links.get(*((device, owner) if to_owner else (owner, device))) for device in self.devices]
        return self._chosen(lambda stages: stages.moved_s(ways))

    def bytes_of(self, member: int) -> Array:
        """Return the bytes that a member holds of every stage; 0 if the device is not a member.

        member: index of the device.
        """
        if member not in self.members:
            return np.zeros(self._is_stage.shape)
        rank = self.members.index(member)
        return self._chosen(lambda stages: stages.bytes_held()[rank])

    def whole_bytes(self) -> list[float]:
        """Return the bytes that each member needs if these devices share all layers, and no memory is short."""
        needs = self._choices[0].bytes_needed(self.work.weights_before[-1], self.work.kv_before[-1], True)
        return [float(need) for need in needs]

    def whole_s(self, rows: float) -> float:
        """Return the seconds of a decode step of the stage with all layers; inf if it is impossible."""
        stage = self._stage(0, self.work.limits.sizes.layers)
        if not self._is_stage[0, -1] or not np.isfinite(stage.most_paged):
            return np.inf
        return float(stage.seconds(rows))

    def _stage(self, start: int, stop: int) -> _Stages:
        """Return a single stage."""
        return _Stages(self._choices[self._choice[start, stop]], np.array(start), np.array(stop))

    def _seconds(self, rows: float) -> Array:
        """Return the seconds of a decode step of every stage [i, j): [n+1, n+1]."""
        return self._chosen(lambda stages: stages.seconds(rows))

    def _prompt_s(self) -> Array:
        """Return the seconds of the whole prompt in every stage [i, j): [n+1, n+1]. The stage with all layers has
        longer chunks.
        """
        seconds = self._chosen(lambda stages: stages.prompt_s(cost.chunk_rows(self.work.prompt)))
        longer = cost.chunk_rows(self.work.prompt, 1)
        seconds[0, -1] = self._stage(0, self.work.limits.sizes.layers).prompt_s(longer)
        return seconds

    def _chosen(self, evaluate: Callable[[_Stages], Array]) -> Array:
        """Return the values of every stage [i, j), each with its chosen shares: [n+1, n+1]. Other values are 0."""
        values = np.zeros(self._is_stage.shape)
        for stages in self._stages:
            values[stages.starts, stages.stops] = evaluate(stages)
        return values

    def _share_by_memory(self, short: NDArray[np.bool_], lengths: NDArray[np.int64]) -> None:
        """Compute other shares for stages whose memory does not allow shares by speed.

        short, lengths: of each stage, [n+1, n+1].

        This is done for a few lengths. A stage uses the shares of the next larger length, which also fit.
        """
        weights, kv = _spans(self.work.weights_before), _spans(self.work.kv_before)
        for last in (False, True):
            cells = short.copy()
            cells[:, slice(-1) if last else -1] = False
            several = np.unique(lengths[cells])
            before = 0
            for length in sorted(
                {int(several[i * (len(several) - 1) // _LENGTHS]) for i in range(_LENGTHS + 1)} if len(several) else ()
            ):
                own = cells & (lengths > before) & (lengths <= length)
                largest = float(weights[own].max()) + float(kv[own].max())
                self._choices.append(self._cost(self._room(largest + last * self.work.shape.head_bytes)))
                self._choice[own] = len(self._choices) - 1
                before = length

    def _room(self, n_bytes: float) -> list[float]:
        """Return the fraction of a stage of `n_bytes` that fits into each rank's memory."""
        return [_TIGHT * speed.room_bytes / n_bytes for speed in self.speeds]

    def _cost(self, most: Sequence[float]) -> GroupCost:
        """Return the cost with shares by speed. most: largest share of each rank."""
        limits = self.work.limits
        parts = self.parts(most)
        return GroupCost(self.work, self.speeds, shards(limits, self.devices, parts), self.links)

    def parts(self, most: Sequence[float] | None = None) -> list[float]:
        """Return the share of a layer on each member. most: largest share of each; None: memory is not limited."""
        if len(self.members) == 1:
            return [1.0]
        # A rank's work outside of layers is spread over its layers, so the owner gets a smaller share.
        layers, rows = self.work.limits.sizes.layers, self._rows
        times = [_even_share(speed, self.work, len(self.members)) for speed in self.speeds]
        lines = [each.part_line_s(rows) for each in times]
        own = [
            float(each.step_s.at(rows) / layers + self.work.limits.sums_a_layer * each.sum_s + constant)
            for each, (constant, _) in zip(times, lines, strict=True)
        ]
        slopes = [slope + attention_s for (_, slope), attention_s in zip(lines, self._attention_s, strict=True)]
        return parts(own, slopes, most or [1.0] * len(self.members))


class _Stages:
    """Stages with the same shares, one for each element of two arrays."""

    def __init__(self, group: GroupCost, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> None:
        """starts, stops: ranges of layers."""
        self.group, self.starts, self.stops = group, starts, stops
        work = group.work
        self.last = stops == work.limits.sizes.layers
        self._k, self._weights, self._kv = map(self._span, (work.before, work.weights_before, work.kv_before))
        self._on_gpu = group.on_gpu(starts, stops)
        self.paged = group.paged(self._k, self._weights, self._kv, self.last, self._on_gpu)

    def _span(self, before: Sequence[float]) -> Array:
        """Return the sum of each stage from running sums."""
        sums = np.asarray(before, float)
        span: Array = sums[self.stops] - sums[self.starts]
        return span

    @property
    def most_paged(self) -> Array:
        """Bytes that the rank with the most paging reads again in every pass; inf if it cannot page."""
        most: Array = np.maximum.reduce(self.paged)
        return most

    def bytes_held(self) -> list[Array]:
        """Return the bytes that each rank holds."""
        return self.group.bytes_held(self._weights, self._kv, self.last, self._on_gpu)

    def moved_s(self, ways: Sequence[LinkSpeed]) -> Array:
        """Return the seconds to transfer the prompt's KV cache over the link of each rank."""
        seconds: Array = self.group.moved_s(self._span(self.group.work.prompt_kv_before), ways)
        return seconds

    def seconds(self, rows: float) -> Array:
        """Return the seconds of a decode step."""
        seconds = self.group.seconds(self._k, rows, self.last, self._on_gpu)
        return np.asarray(self._disk(rows).added_to(seconds))

    def prompt_s(self, rows: int) -> Array:
        """Return the seconds of the whole prompt in chunks of `rows` tokens."""
        seconds: Array = self.group.prompt_s(self._k, self.last, rows, self._disk(rows), self._on_gpu)
        return seconds

    def _disk(self, rows: float) -> DiskSeconds:
        """Return the time for reading the paged weights of `rows` rows."""
        return self.group.disk(self.paged, self._k, self._weights, rows, self._on_gpu)


def _even_share(speed: DeviceSpeed, work: Work, members: int) -> DeviceSpeed | TieredSpeed:
    """Return the times of a member that has as much of all layers as each other member."""
    if speed.gpu is None:
        return speed
    even = bytes_before(work.layer_parts, 1 / members, 1 / members)
    room, head = speed.gpu.memory_bytes - speed.gpu.runtime_bytes, round(work.shape.head_bytes / members)
    return TieredSpeed(speed, speed.gpu, on_gpu(even, work.expert_share, room, head, 0, len(work.layer_parts)))


def _budget(n_bytes: int) -> int:
    """Round the budget of a rank that pages to whole steps, so that small changes of memory do not change the plan."""
    return max(_BUDGET_STEP, n_bytes // _BUDGET_STEP * _BUDGET_STEP)


def _spans(before: Sequence[float]) -> Array:
    """Return the sum of every span [i, j) from running sums: [n+1, n+1]; 0 if j <= i."""
    sums = np.asarray(before, float)
    spans: Array = np.maximum(0.0, sums[None, :] - sums[:, None])
    return spans
