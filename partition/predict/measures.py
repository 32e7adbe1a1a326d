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
        self._alone = [f"alone {host}" for host in hosts if "alone_busy" in needed]
        self._busy = [f"busy {host}" for host in hosts if "busy" in needed and microbatches > 1]
        self._prompt = [f"prompt {host}" for host in hosts if "prompt" in needed]
        self.sums += [*self._alone, *self._busy, *self._prompt]
        self.names = [*self.sums, *(name for name in _PEAKS if name in needed)]

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

    def __call__(self, values: Array) -> Array:
        """Measures [D, N] -> objectives [K, N]: seconds, seconds a token, seconds, bytes, joules."""
        measures, costs = dict(zip(self.names, values, strict=True)), []
        for name in self._objectives:
            if name == "latency" or (name == "throughput" and self._is_single):
                costs.append(self._alone_s(measures))
            elif name == "throughput":
                busy_s = np.maximum.reduce([measures["busy"], *(measures[host] for host in self._busy)])
                pass_s = measures["pass"] if "pass" in measures else measures["alone"]
                costs.append(cost.per_token_s(pass_s, busy_s, self.rows, self._work.concurrency))
            elif name == "ttft":  # cost.ttft_s, with the sum divided by the chunks already
                costs.append(self._ttft_s(measures))
            else:
                costs.append(measures[{"memory": "bytes", "energy": "joules"}[name]])
        return np.array(costs)

    def _ttft_s(self, measures: Mapping[str, Array]) -> Array:
        if self._chunks == 1:
            return np.asarray(measures["prompt"])  # also where a stage is busy for ever
        busy_s = np.maximum.reduce([measures["prompt_busy"], *(measures[host] for host in self._prompt)])
        return np.asarray(measures["prompt"] + busy_s * (1 - 1 / self._chunks))

    def join(self, a: Array, b: Array) -> Array:
        """Join measures [D] of two parts: sums are added, of peaks the larger is taken."""
        k = len(self.sums)
        return np.concatenate([a[:k] + b[:k], np.maximum(a[k:], b[k:])])

    def only_stage(self, stage: Array, enter: Array, enter_alone: Array) -> Array:
        """Return the measures [D] of the stage that has all layers, behind a thin owner, from these.

        enter, enter_alone: the thin owner's and the way's, as these measures have them and as `of_one_stage` has them.
        The search adds `enter`, so the stage's own sum of a prompt makes up for the difference.
        """
        if "prompt" not in self.sums:
            return stage
        if not all(np.isfinite(values).all() for values in (stage, enter, enter_alone)):
            return stage  # there is no room for the stage, or none for the owner
        at = self.sums.index("prompt")
        ttft_s = []
        for measures, entering in ((self, enter), (self.of_one_stage, enter_alone)):
            own = self.join(stage, entering)
            own[at] += stage[at] * (self._chunks / measures._chunks - 1)  # its part of the prompt is that of a chunk
            ttft_s.append(float(measures._ttft_s(dict(zip(self.names, own, strict=True)))))
        changed: Array = stage.copy()
        changed[at] = max(0.0, changed[at] + ttft_s[1] - ttft_s[0])
        return changed

    def _alone_s(self, measures: Mapping[str, Array]) -> Array:
        """A token of one request."""
        if "joined" not in measures:
            return np.asarray(self._work.alone_s(measures["alone"], 0.0, 1)[0])
        busy_s = np.maximum.reduce([measures["alone_busy"], *(measures[host] for host in self._alone)])
        stages = self._work.limits.sizes.layers - measures["joined"]
        return np.asarray(self._work.alone_s(measures["alone"], busy_s, stages)[0])

    def for_hop(self, hop: Hop, answer: bool = False) -> Array:
        """Return the measures of a hop to the next stage: [D]. answer: it goes to the owner, with
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
        return np.array([values[name] for name in self.names])

    def for_stages(
        self,
        seconds: Seconds,
        prompt_s: Callable[[], Any],
        watts: float,
        memory: Array,
        parts: Mapping[str, float],
        drafting_s: float = 0.0,
    ) -> Array:
        """Return the measures of all stages [i, j): [D, n+1, n+1]. prompt_s: the whole prompt in all
        stages; watts: of all ranks; memory: bytes on the fullest device; parts: the part of each host's cores that all
        ranks use; drafting_s: seconds of drafting for each window."""
        values: dict[str, Any] = {"bytes": memory}
        if "alone" in self.sums:
            values["alone"] = seconds(self._work.alone_rows)
            values["alone_busy"] = values["alone"] + drafting_s
            cuts = np.arange(len(memory))
            values["joined"] = np.maximum(0.0, cuts[None, :] - cuts[:, None] - 1)
        if "busy" in self.names or "joules" in self.names:
            values["pass"] = values["busy"] = seconds(self.rows)
            values["joules"] = values["busy"] * watts / self.rows
        if "prompt" in self.sums:
            values["prompt_busy"] = prompt_s()
            values["prompt"] = values["prompt_busy"] / self._chunks
        for names, peak in ((self._alone, "alone_busy"), (self._busy, "busy"), (self._prompt, "prompt_busy")):
            for name in names:
                part = parts.get(name.partition(" ")[2], 0.0)
                values[name] = part * values[peak] if part else 0.0
        stages = np.empty((len(self.names), *memory.shape))
        for i, name in enumerate(self.names):
            stages[i] = values[name]
        return stages
