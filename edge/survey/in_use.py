"""Plans that were in use: if tokens took far longer than predicted, the next choice counts the time they took.

Predictions add up what each device takes alone. Ranks that are held up wait for each other, which no measurement of
one device shows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from devices.remembered import Remembered
from edge.cluster.fleet import device
from edge.parallel.step_times import Summary
from partition.plan.plan import Plan
from partition.predict.hysteresis import FAR, clearly_better

AGE_S = 3600.0  # after that, the cause of the delay may be over
_LEAST_STEPS = 16


class UsedPlans:
    """Seconds per token of plans that took far longer than predicted, by model, devices and widths of stages."""

    def __init__(self, folder: Path | None = None) -> None:
        self._remembered = Remembered("plans-in-use", folder)

    def learn(self, plan: Plan, predicted_s: float, took_s: float) -> bool:
        """Remember the seconds of a token, if they are FAR from the prediction; return whether they are."""
        is_far = clearly_better(predicted_s, took_s, by=FAR)
        if is_far:
            self._remembered.put(_key(plan), took_s)
        return is_far

    def took_s(self, plan: Plan) -> float | None:
        """Return the seconds of a token under such a plan in the last hour; None if it was as predicted, or not in
        use."""
        remembered = self._remembered.get(_key(plan), AGE_S)
        seconds = remembered[0] if remembered else None
        return seconds if isinstance(seconds, float) and seconds > 0 else None


def token_s(times: Sequence[Mapping[str, Summary]]) -> float | None:
    """Return the seconds of a token of one request, waits included, by the fastest tenth of this device's steps; None
    if there were too few. times: of each rank, this device's first."""
    decode = times[0].get("decode") if times else None
    if decode is None or decode.steps < _LEAST_STEPS:
        return None
    return (decode.compute_ms.p10 + decode.communication_ms.p10) / 1e3


def _key(plan: Plan) -> str:
    widths = [len(stage.shards) for stage in plan.stages]
    return json.dumps([plan.model_digest, widths, sorted(set(map(device, plan.devices)))])
