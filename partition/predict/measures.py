"""What the search adds up and compares for a language model, and the objectives made of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from partition.predict import cost
from partition.predict.cost import Work
from partition.predict.objectives import check_objectives

Array = NDArray[np.float64]
Hop = Callable[[float], tuple[float, float]]  # rows -> (latency, busy), seconds
Seconds = Callable[[float, float], Any]  # (rows, of which so many give logits) -> of all stages, in an array

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
    """Of these objectives, with so many microbatches in flight.

    | sums   | alone: seconds of a request; pass: of a microbatch; prompt: a chunk of a prompt; joules: a token  |
    | peaks  | busy: seconds a microbatch; prompt_busy: a prompt; bytes: on one device                         |

    Where one request may have windows of guesses at several stages, also alone_busy, a peak: seconds of one, with its
    guesses; and joined, a sum: layers less stages, as more stages allow more windows. And of each host that stages may
    crowd, as sums: alone HOST, busy HOST, prompt HOST: seconds that they keep all its cores busy.
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
        self._work, self._objectives = work, objectives
        self.rows = work.concurrency / microbatches
        self._one = work.concurrency == 1
        wanted = {name for one in objectives for name in self._needed(one)}
        if self.rows == 1 and "alone" in wanted and work.draft is None:
            wanted.discard("pass")  # it is the same
        if "alone" in wanted and work.draft is not None and stages:
            wanted.update(_OF_WINDOWS)
        self.sums = [name for name in _SUMS if name in wanted]
        self.peaks = [name for name in _PEAKS if name in wanted]
        self._alone = [f"alone {host}" for host in hosts if "alone_busy" in wanted]
        self._busy = [f"busy {host}" for host in hosts if "busy" in wanted and microbatches > 1]
        self._prompt = [f"prompt {host}" for host in hosts if "prompt" in wanted]
        self.sums += [*self._alone, *self._busy, *self._prompt]

    def _needed(self, objective: str) -> tuple[str, ...]:
        """One request has the throughput of its own latency."""
        return _NEEDED["latency" if objective == "throughput" and self._one else objective]

    def __call__(self, sums: Array, peaks: Array) -> Array:
        """sums [S, N], peaks [P, N] -> objectives [K, N]: seconds, seconds a token, seconds, bytes, joules."""
        of = dict(zip(self.sums, sums, strict=True)) | dict(zip(self.peaks, peaks, strict=True))
        found = []
        for name in self._objectives:
            if name == "latency" or (name == "throughput" and self._one):
                found.append(self._alone_s(of))
            elif name == "throughput":
                busy_s = np.maximum.reduce([of["busy"], *(of[host] for host in self._busy)])
                pass_s = of["pass"] if "pass" in of else of["alone"]
                found.append(cost.per_token_s(pass_s, busy_s, self.rows, self._work.concurrency))
            elif name == "ttft":  # cost.ttft_s, with the sum divided by the chunks already
                busy_s = np.maximum.reduce([of["prompt_busy"], *(of[host] for host in self._prompt)])
                found.append(of["prompt"] + busy_s * (1 - 1 / cost.chunks(self._work.prompt)))
            else:
                found.append(of[{"memory": "bytes", "energy": "joules"}[name]])
        return np.array(found)

    def _alone_s(self, of: Mapping[str, Array]) -> Array:
        """A token of one request."""
        if "joined" not in of:
            return np.asarray(self._work.alone_s(of["alone"], 0.0, 1)[0])
        busy_s = np.maximum.reduce([of["alone_busy"], *(of[host] for host in self._alone)])
        stages = self._work.limits.sizes.layers - of["joined"]
        return np.asarray(self._work.alone_s(of["alone"], busy_s, stages)[0])

    def of_hop(self, hop: Hop, answer: bool = False) -> tuple[Array, Array]:
        """What a way to the next stage adds [S], and how long it is taken up [P]. answer: it is the one to the owner,
        with the logits of one row of a prompt."""
        n = cost.chunks(self._work.prompt)
        values = dict.fromkeys((*self.sums, *_SUMS, *_PEAKS), 0.0)
        alone = hop(self._work.alone_rows)
        values["alone"], values["alone_busy"] = sum(alone), alone[1]
        values["pass"] = sum(hop(self.rows))
        values["busy"] = hop(self.rows)[1]
        if "prompt" in self.sums:
            latency_s, busy_s = hop(self._work.prompt / n)
            values["prompt"] = sum(hop(1)) if answer else latency_s + n * busy_s
        return np.array([values[name] for name in self.sums]), np.array([values[name] for name in self.peaks])

    def of_stages(
        self, seconds: Seconds, watts: float, held: Array, parts: Mapping[str, float], guess_s: float = 0.0
    ) -> tuple[Array, Array]:
        """Of all stages [i, j): [S, n+1, n+1], [P, n+1, n+1]. watts: of all ranks; held: bytes on the fullest device;
        parts: of each host's cores, that all ranks use; guess_s: for which they guess, for each window."""
        values: dict[str, Any] = {"bytes": held}
        if "alone" in self.sums:
            values["alone"] = seconds(self._work.alone_rows, self._work.alone_rows)
            values["alone_busy"] = values["alone"] + guess_s
            cuts = np.arange(len(held))
            values["joined"] = np.maximum(0.0, cuts[None, :] - cuts[:, None] - 1)
        if "busy" in self.peaks or "joules" in self.sums:
            values["pass"] = values["busy"] = seconds(self.rows, self.rows)
            values["joules"] = values["busy"] * watts / self.rows
        if "prompt" in self.sums:
            values["prompt_busy"] = seconds(self._work.prompt, 1)
            values["prompt"] = values["prompt_busy"] / cost.chunks(self._work.prompt)
        for names, of in ((self._alone, "alone_busy"), (self._busy, "busy"), (self._prompt, "prompt_busy")):
            for name in names:
                part = parts.get(name.partition(" ")[2], 0.0)
                values[name] = part * values[of] if part else 0.0
        sums, peaks = np.empty((len(self.sums), *held.shape)), np.empty((len(self.peaks), *held.shape))
        for found, names in ((sums, self.sums), (peaks, self.peaks)):
            for i, name in enumerate(names):
                found[i] = values[name]
        return sums, peaks
