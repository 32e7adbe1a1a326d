"""Corrections of measured speeds by use: when a rank's steps clearly take longer or less than predicted, the next plan
uses the corrected speed.

    factor = exp(mean over answers of log(factor then x what steps took / what they were predicted to take))

The first answer corrects the whole of its error, and each further one counts as much as those before it. So a device
that was measured wrong is right at once, and plans that contradict each other lead to a mean.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from devices.remembered import Remembered
from edge.cluster.fleet import device
from edge.parallel.step_times import Summary
from partition.plan.plan import LOCAL, Plan
from partition.predict.cost import Work
from partition.predict.hysteresis import CORRECTION, FAR, clearly_better, clearly_off
from partition.predict.predict import compute_s
from partition.predict.speeds import DeviceSpeed, Links
from quant.text import number_text

LEAST_STEPS = 16  # of a rank, whose times tell anything
AGE_S = 3600.0  # of plans that were in use: after that, the cause of the delay may be over
_MOST = 1000.0  # largest factor that counts as a correction


class CorrectionFactors:
    """Correction factors by key. Each holds for one measurement: a new one starts without a correction."""

    name: str  # of the file that remembers them

    def __init__(self, folder: Path | None = None) -> None:
        self._remembered = Remembered(self.name, folder)

    def factor(self, key: str, measured_s: float) -> float | None:
        """Return the factor of what was measured to take so long; None if there is none."""
        known = self._known(key, measured_s)
        return None if known is None else math.exp(known[0] / known[1])

    def put(self, key: str, measured_s: float, factor: float) -> bool:
        """Remember a factor that an answer would have needed. Return False if it cannot be."""
        if not key or not 1 / _MOST < factor < _MOST:
            return False
        logs, answers = self._known(key, measured_s) or (0.0, 0)
        self._remembered.put(key, {"of": measured_s, "logs": logs + math.log(factor), "answers": answers + 1})
        return True

    def _known(self, key: str, measured_s: float) -> tuple[float, int] | None:
        """Return (sum of logarithms, answers) of this measurement; None if there are none."""
        remembered = self._remembered.get(key)
        try:
            value = remembered[0] if remembered else {}
            of_s, logs, answers = float(value["of"]), float(value["logs"]), int(value["answers"])
        except (TypeError, KeyError, ValueError, OverflowError):
            return None
        same = math.isclose(of_s, measured_s, rel_tol=1e-6)
        return (logs, answers) if same and answers > 0 and abs(logs / answers) < math.log(_MOST) else None


class Corrections(CorrectionFactors):
    """Correction factors of devices, by the key of their measurement."""

    name = "corrections"

    def applied(self, measured: DeviceSpeed) -> DeviceSpeed:
        """Return the measured speed, corrected."""
        factor = self.factor(measured.key, measured.seconds)
        if factor is None:
            return measured
        return replace(measured.times(factor), corrected=factor, quiet_s=measured.quiet_s)

    def learn(self, speed: DeviceSpeed, ratio: float) -> bool:
        """Remember that steps took `ratio` times as long as `speed` predicted. Return False if that is no clear
        difference."""
        measured_s = speed.times(1 / speed.corrected).seconds
        is_clear = clearly_off(ratio, 1.0, by=CORRECTION)
        return is_clear and self.put(speed.key, measured_s, ratio * speed.corrected)

    def correct(
        self,
        plan: Plan,
        work: Work,
        speeds: Sequence[DeviceSpeed],
        links: Links,
        times: Sequence[Mapping[str, Summary]],
        *,
        disturbed: bool = False,
    ) -> list[str]:
        """Correct the speeds that the plan was made from, for the next plan; return a sentence for each device that was
        clearly off. times: of each rank, its steps of one row. disturbed: other programs had this device's cores
        meanwhile, so it is not called slower."""
        by_device = {speed.device: speed for speed in speeds}
        sentences = []
        predicted = compute_s(plan, work, by_device, links)
        for address, predicted_s, summaries in zip(plan.devices, predicted, times, strict=True):
            ratio = measured_ratio(summaries.get("decode"), predicted_s)
            if disturbed and address == LOCAL and ratio > 1:
                continue
            if plan.devices.count(address) == 1 and self.learn(by_device[address], ratio):
                more = f"{100 * (ratio - 1):.0f} % longer" if ratio > 1 else f"{100 * (1 - ratio):.0f} % less"
                sentences.append(
                    f"{by_device[address].name} computed {more} than it was measured to take"
                    f" ({number_text(1e3 * (predicted_s or 0))} ms a token); the next plan goes by that"
                )
        return sentences


def measured_ratio(summary: Summary | None, predicted_s: float | None) -> float:
    """Return how many times as long as predicted a rank's steps take; 1 if that is unknown.

    A rank is slower if even the fastest tenth of its steps is, so that a busy moment does not count; it is faster if
    half of them are.
    """
    if summary is None or summary.steps < LEAST_STEPS or not predicted_s:
        return 1.0
    fast, middle = summary.compute_ms.p10 / 1e3 / predicted_s, summary.compute_ms.median / 1e3 / predicted_s
    return fast if fast > 1 else min(1.0, middle)


class UsedPlans:
    """Seconds per token of plans that took far longer than predicted, by model, devices and widths of stages: the next
    choice counts the time they took.

    Predictions add up what each device takes alone. Ranks that are held up wait for each other, which no measurement
    of one device shows.
    """

    def __init__(self) -> None:
        self._remembered = Remembered("plans-in-use")

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
    if decode is None or decode.steps < LEAST_STEPS:
        return None
    return (decode.compute_ms.p10 + decode.communication_ms.p10) / 1e3


def _key(plan: Plan) -> str:
    return json.dumps([plan.model_digest, plan.widths, sorted(set(map(device, plan.devices)))])
