"""Measures of language model plans that the search adds and compares, and the objectives computed from them."""

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
Hop = Callable[[float], tuple[float, float]]  # maps rows to (latency, busy time), in seconds
Seconds = Callable[[float], Any]  # maps rows of a decode step to seconds of all stages, in an array

_NEEDED = {
    "latency": ("alone",),
    "throughput": ("pass", "busy"),
    "ttft": ("prompt", "prompt_busy"),
    "memory": ("bytes",),
    "energy": ("joules",),
}
_OF_WINDOWS = ("joined", "alone_busy")
_SUMS = ("alone", "joined", "pass", "prompt", "joules", "idle")
_PEAKS = ("alone_busy", "busy", "prompt_busy", "bytes")


class Measures:
    """Measures that `objectives` need, with `microbatches` in flight.

    Sums: alone: seconds of a token of a lone request. pass: seconds of the largest microbatch. prompt: seconds of a
        chunk of a prompt. joules: energy that computing a token takes. idle: watts of all devices while they wait.
    Peaks: busy: seconds of a mean microbatch. prompt_busy: seconds of a prompt. bytes: memory of one device.

    If a lone request may have draft windows at several stages, there are two more measures. alone_busy is a peak:
    seconds of one window, with its drafts. joined is a sum: layers minus stages, because more stages allow more
    windows.

    For each host that stages may share, there are also the sums "alone HOST", "busy HOST" and "prompt HOST": seconds in
    which the stages keep all its cores busy.
    """

    def __init__(
        self,
        work: Work,
        objectives: tuple[str, ...],
        microbatches: int,
        hosts: Sequence[str] = (),
        *,
        stages: bool = True,
        idles: bool = False,
    ) -> None:
        """hosts: hosts that may be overloaded.
        stages: True if a plan may have several stages.
        idles: True if the power of waiting devices is known. The energy then depends on the time of a token, too.

        Raises PlanError for an unknown objective.
        """
        check_objectives(objectives)
        self._work, self._objectives, self.microbatches = work, objectives, microbatches
        self.rows = work.concurrency / microbatches
        self._most_rows = cost.most_rows(work.concurrency, microbatches)
        self.prompt_stages = 2  # stages assumed for the chunks of a prompt; more than two count as two
        self._is_single, self._idles = work.concurrency == 1, idles
        needed = {name for objective in objectives for name in self._needed(objective)}
        if self.rows == 1 and "alone" in needed and work.draft is None:
            needed.discard("pass")  # both measures are equal
        if "alone" in needed and work.draft is not None and stages:
            needed.update(_OF_WINDOWS)
        self.sums = [name for name in _SUMS if name in needed]
        self._alone = [f"alone {host}" for host in hosts if "alone_busy" in needed]
        self._busy = [f"busy {host}" for host in hosts if "busy" in needed and microbatches > 1]
        self._prompt = [f"prompt {host}" for host in hosts if "prompt" in needed]
        self.sums += [*self._alone, *self._busy, *self._prompt]
        self.names = [*self.sums, *(name for name in _PEAKS if name in needed)]
        # Cache key of stage costs, equal for numbers of requests that form microbatches of the same size.
        self.key = (tuple(self.names), self.rows, microbatches > 1)

    @cached_property
    def of_one_stage(self) -> Measures:
        """The same measures for plans in which one stage computes, with longer prompt chunks."""
        measures = copy.copy(self)
        measures.prompt_stages = 1
        return measures

    @property
    def _chunks(self) -> int:
        return cost.chunks(self._work.prompt, self.prompt_stages)

    def _needed(self, objective: str) -> tuple[str, ...]:
        """Return the measures that an objective needs. With one request, throughput follows from latency."""
        if objective == "energy" and self._idles:
            return (*_NEEDED["energy"], "idle", *self._needed("throughput"))
        return _NEEDED["latency" if objective == "throughput" and self._is_single else objective]

    def __call__(self, values: Array) -> Array:
        """Convert measures [D, N] to objectives [K, N]: seconds, seconds per token, seconds, bytes, joules."""
        measures, costs = dict(zip(self.names, values, strict=True)), []
        for name in self._objectives:
            if name == "latency":
                costs.append(self._alone_s(measures))
            elif name == "throughput":
                costs.append(self._token_s(measures))
            elif name == "energy" and self._idles:
                costs.append(measures["joules"] + measures["idle"] * self._token_s(measures))
            elif name == "ttft":  # the same formula as cost.ttft_s; the sum is already divided by the number of chunks
                costs.append(self._ttft_s(measures))
            else:
                costs.append(measures[{"memory": "bytes", "energy": "joules"}[name]])
        return np.array(costs)

    def _token_s(self, measures: Mapping[str, Array]) -> Array:
        """Return the seconds per token with all requests in flight."""
        if self._is_single:
            return self._alone_s(measures)
        busy_s = np.maximum.reduce([measures["busy"], *(measures[host] for host in self._busy)])
        pass_s = measures["pass"] if "pass" in measures else measures["alone"]
        return np.asarray(cost.per_token_s(pass_s, busy_s, self.rows, self._work.concurrency))

    def _ttft_s(self, measures: Mapping[str, Array]) -> Array:
        if self._chunks == 1:
            return np.asarray(measures["prompt"])  # correct also if a stage's time is infinite
        busy_s = np.maximum.reduce([measures["prompt_busy"], *(measures[host] for host in self._prompt)])
        return np.asarray(measures["prompt"] + busy_s * (1 - 1 / self._chunks))

    def join(self, a: Array, b: Array) -> Array:
        """Join the measures [D] of two parts of a plan: sums are added, and of peaks the larger one counts."""
        k = len(self.sums)
        return np.concatenate([a[:k] + b[:k], np.maximum(a[k:], b[k:])])

    def only_stage(self, stage: Array, enter: Array, enter_alone: Array) -> Array:
        """Return adjusted measures [D] of a stage that has all layers behind a thin owner.

        enter: measures of the thin owner and its hop.
        enter_alone: the same by the measures of `of_one_stage`.

        The search will add `enter`, so the stage's own prompt time is corrected for the difference.
        """
        if "prompt" not in self.sums:
            return stage
        if not all(np.isfinite(values).all() for values in (stage, enter, enter_alone)):
            return stage  # the stage or the owner does not fit into memory
        at = self.sums.index("prompt")
        ttft_s = []
        for measures, entering in ((self, enter), (self.of_one_stage, enter_alone)):
            own = self.join(stage, entering)
            own[at] += stage[at] * (self._chunks / measures._chunks - 1)  # the prompt measure is the time of one chunk
            ttft_s.append(float(measures._ttft_s(dict(zip(self.names, own, strict=True)))))
        changed: Array = stage.copy()
        changed[at] = max(0.0, changed[at] + ttft_s[1] - ttft_s[0])
        return changed

    def _alone_s(self, measures: Mapping[str, Array]) -> Array:
        """Return the seconds of a token of a lone request."""
        if "joined" not in measures:
            return np.asarray(self._work.alone_s(measures["alone"], 0.0, 1)[0])
        busy_s = np.maximum.reduce([measures["alone_busy"], *(measures[host] for host in self._alone)])
        stages = self._work.limits.sizes.layers - measures["joined"]
        return np.asarray(self._work.alone_s(measures["alone"], busy_s, stages)[0])

    def for_hop(self, hop: Hop, answer: bool = False) -> Array:
        """Return the measures [D] of a hop to the next stage.

        answer: the hop goes to the owner, with one row of logits for a prompt.
        """
        n = self._chunks
        values = dict.fromkeys((*self.sums, *_SUMS, *_PEAKS), 0.0)
        alone = hop(self._work.alone_rows)
        values["alone"], values["alone_busy"] = sum(alone), alone[1]
        values["pass"] = sum(hop(self._most_rows))
        values["busy"] = hop(self.rows)[1]
        if "prompt" in self.sums:
            latency_s, busy_s = hop(self._work.prompt / n)
            # A hop counts like a stage that all chunks pass. The answer to a prompt is a single row.
            values["prompt"] = sum(hop(1)) if answer else latency_s + busy_s
            values["prompt_busy"] = 0.0 if answer else n * busy_s
        return np.array([values[name] for name in self.names])

    def for_stages(
        self,
        seconds: Seconds,
        prompt_s: Callable[[], Any],
        watts: tuple[float, float],
        memory: Array,
        parts: Mapping[str, float],
        drafting_s: float = 0.0,
    ) -> Array:
        """Return the measures of all stages [i, j): [D, n+1, n+1].

        seconds: returns the seconds of a decode step by its rows.
        prompt_s: returns the seconds of the whole prompt.
        watts: power of all ranks that computing takes, and while they wait.
        memory: bytes on the fullest device.
        parts: fraction of each host's cores that all ranks use.
        drafting_s: seconds of drafting for each window.
        """
        values: dict[str, Any] = {"bytes": memory}
        if "alone" in self.sums:
            values["alone"] = seconds(self._work.alone_rows)
            values["alone_busy"] = values["alone"] + drafting_s
            cuts = np.arange(len(memory))
            values["joined"] = np.maximum(0.0, cuts[None, :] - cuts[:, None] - 1)
        if "busy" in self.names or "joules" in self.names:
            values["pass"] = values["busy"] = seconds(self.rows)
            if "pass" in self.sums and self._most_rows != self.rows:
                values["pass"] = seconds(self._most_rows)
            values["joules"], values["idle"] = values["busy"] * watts[0] / self.rows, watts[1]
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
