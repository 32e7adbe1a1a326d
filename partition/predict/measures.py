"""Measures that the search adds up and compares for a language model, and the objectives computed from them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from partition.predict import cost
from partition.predict.cost import Work
from partition.predict.objectives import check_objectives

Array = NDArray[np.float64]
Hop = Callable[[float], tuple[float, float]]  # rows -> (latency, busy), seconds
Seconds = Callable[[float], Any]  # rows of a decoding step -> of all stages, in an array

_NEEDED = {
    "latency": ("alone",),
    "throughput": ("pass", "busy"),
    "ttft": ("prompt", "prompt_busy"),
    "memory": ("bytes",),
    "energy": ("joules",),
}
_OF_WINDOWS = ("joined", "alone_busy")
_SUMS = ("alone", "joined", "pass", "prompt", "joules")
_PEAKS = ("alone_busy", "busy", "prompt_busy", "bytes")


class Measures:
    """Measures needed for `objectives` with `microbatches` in flight.

    | sums   | alone: seconds of a request; pass: of a microbatch; prompt: a chunk of a prompt; joules: a token  |
    | peaks  | busy: seconds a microbatch; prompt_busy: a prompt; bytes: on one device                         |

    If one request may have draft windows at several stages, also alone_busy, a peak: seconds of one, with its
    drafts; and joined, a sum: layers less stages, as more stages allow more windows. For each host that stages may
    share, as sums: alone HOST, busy HOST, prompt HOST: seconds that they keep all its cores busy.
    """

    def __init__(
        self,
        work: Work,
        objectives: tuple[str, ...],
        microbatches: int,
        hosts: Sequence[str] = (),
        *,
        stages: bool = True,
    ) -> None:
        """hosts: that may be crowded. stages: whether there may be several. PlanError for an objective that is none."""
        check_objectives(objectives)
        self._work, self._objectives, self.microbatches = work, objectives, microbatches
        self.key = (objectives, microbatches)  # by which what stages cost may be remembered
        self.rows = work.concurrency / microbatches
        self.prompt_stages = 2  # stages by which a prompt is cut into chunks; more have those of two
        self._is_single = work.concurrency == 1
        needed = {name for objective in objectives for name in self._needed(objective)}
        if self.rows == 1 and "alone" in needed and work.draft is None:
            needed.discard("pass")  # it is the same
        if "alone" in needed and work.draft is not None and stages:
            needed.update(_OF_WINDOWS)
        self.sums = [name for name in _SUMS if name in needed]
        self.peaks = [name for name in _PEAKS if name in needed]
        self._alone = [f"alone {host}" for host in hosts if "alone_busy" in needed]
        self._busy = [f"busy {host}" for host in hosts if "busy" in needed and microbatches > 1]
        self._prompt = [f"prompt {host}" for host in hosts if "prompt" in needed]
        self.sums += [*self._alone, *self._busy, *self._prompt]

    @cached_property
    def of_one_stage(self) -> Measures:
        """The same where one stage computes, which has longer chunks of a prompt."""
        measures = copy.copy(self)
        measures.prompt_stages = 1
        return measures

    @property
    def _chunks(self) -> int:
        return cost.chunks(self._work.prompt, self.prompt_stages)

    def _needed(self, objective: str) -> tuple[str, ...]:
        """Return the measures an objective needs. With one request, throughput follows from latency."""
        return _NEEDED["latency" if objective == "throughput" and self._is_single else objective]

    def __call__(self, sums: Array, peaks: Array) -> Array:
        """sums [S, N], peaks [P, N] -> objectives [K, N]: seconds, seconds a token, seconds, bytes, joules."""
        measures = dict(zip(self.sums, sums, strict=True)) | dict(zip(self.peaks, peaks, strict=True))
        values = []
        for name in self._objectives:
            if name == "latency" or (name == "throughput" and self._is_single):
                values.append(self._alone_s(measures))
            elif name == "throughput":
                busy_s = np.maximum.reduce([measures["busy"], *(measures[host] for host in self._busy)])
                pass_s = measures["pass"] if "pass" in measures else measures["alone"]
                values.append(cost.per_token_s(pass_s, busy_s, self.rows, self._work.concurrency))
            elif name == "ttft":  # cost.ttft_s, with the sum divided by the chunks already
                values.append(self._ttft_s(measures))
            else:
                values.append(measures[{"memory": "bytes", "energy": "joules"}[name]])
        return np.array(values)

    def _ttft_s(self, measures: Mapping[str, Array]) -> Array:
        if self._chunks == 1:
            return np.asarray(measures["prompt"])  # also where a stage is busy for ever
        busy_s = np.maximum.reduce([measures["prompt_busy"], *(measures[host] for host in self._prompt)])
        return np.asarray(measures["prompt"] + busy_s * (1 - 1 / self._chunks))

    def only_stage(
        self, sums: Array, peaks: Array, enter: tuple[Array, Array], enter_alone: tuple[Array, Array]
    ) -> Array:
        """Return the sums [S] of the stage that has all layers, behind a thin owner, from these and its peaks [P].

        enter, enter_alone: the thin owner's and the way's, as these measures have them and as `of_one_stage` has them.
        The search adds `enter`, so the stage's own sum of a prompt makes up for the difference.
        """
        if "prompt" not in self.sums:
            return sums
        if not all(np.isfinite(values).all() for values in (sums, peaks, *enter, *enter_alone)):
            return sums  # there is no room for the stage, or none for the owner
        at = self.sums.index("prompt")
        ttft_s = []
        for measures, entering in ((self, enter), (self.of_one_stage, enter_alone)):
            own = sums + entering[0]
            own[at] += sums[at] * (self._chunks / measures._chunks - 1)  # its part of the prompt is that of a chunk
            values = dict(zip(self.sums, own, strict=True))
            values |= dict(zip(self.peaks, np.maximum(peaks, entering[1]), strict=True))
            ttft_s.append(float(measures._ttft_s(values)))
        changed: Array = sums.copy()
        changed[at] = max(0.0, changed[at] + ttft_s[1] - ttft_s[0])
        return changed

    def _alone_s(self, measures: Mapping[str, Array]) -> Array:
        """A token of one request."""
        if "joined" not in measures:
            return np.asarray(self._work.alone_s(measures["alone"], 0.0, 1)[0])
        busy_s = np.maximum.reduce([measures["alone_busy"], *(measures[host] for host in self._alone)])
        stages = self._work.limits.sizes.layers - measures["joined"]
        return np.asarray(self._work.alone_s(measures["alone"], busy_s, stages)[0])

    def for_hop(self, hop: Hop, answer: bool = False) -> tuple[Array, Array]:
        """Return what a hop to the next stage adds [S], and how long it is busy [P]. answer: it goes to the owner, with
        the logits of one row of a prompt."""
        n = self._chunks
        values = dict.fromkeys((*self.sums, *_SUMS, *_PEAKS), 0.0)
        alone = hop(self._work.alone_rows)
        values["alone"], values["alone_busy"] = sum(alone), alone[1]
        values["pass"] = sum(hop(self.rows))
        values["busy"] = hop(self.rows)[1]
        if "prompt" in self.sums:
            latency_s, busy_s = hop(self._work.prompt / n)
            # As a stage that all chunks go through; of the answer there is one row.
            values["prompt"] = sum(hop(1)) if answer else latency_s + busy_s
            values["prompt_busy"] = 0.0 if answer else n * busy_s
        return np.array([values[name] for name in self.sums]), np.array([values[name] for name in self.peaks])

    def for_stages(
        self,
        seconds: Seconds,
        prompt_s: Callable[[], Any],
        watts: float,
        memory: Array,
        parts: Mapping[str, float],
        drafting_s: float = 0.0,
    ) -> tuple[Array, Array]:
        """Return the measures of all stages [i, j): [S, n+1, n+1], [P, n+1, n+1]. prompt_s: the whole prompt in all
        stages; watts: of all ranks; memory: bytes on the fullest device; parts: the part of each host's cores that all
        ranks use; drafting_s: seconds of drafting for each window."""
        values: dict[str, Any] = {"bytes": memory}
        if "alone" in self.sums:
            values["alone"] = seconds(self._work.alone_rows)
            values["alone_busy"] = values["alone"] + drafting_s
            cuts = np.arange(len(memory))
            values["joined"] = np.maximum(0.0, cuts[None, :] - cuts[:, None] - 1)
        if "busy" in self.peaks or "joules" in self.sums:
            values["pass"] = values["busy"] = seconds(self.rows)
            values["joules"] = values["busy"] * watts / self.rows
        if "prompt" in self.sums:
            values["prompt_busy"] = prompt_s()
            values["prompt"] = values["prompt_busy"] / self._chunks
        for names, peak in ((self._alone, "alone_busy"), (self._busy, "busy"), (self._prompt, "prompt_busy")):
            for name in names:
                part = parts.get(name.partition(" ")[2], 0.0)
                values[name] = part * values[peak] if part else 0.0
        sums, peaks = np.empty((len(self.sums), *memory.shape)), np.empty((len(self.peaks), *memory.shape))
        for target, names in ((sums, self.sums), (peaks, self.peaks)):
            for i, name in enumerate(names):
                target[i] = values[name]
        return sums, peaks
