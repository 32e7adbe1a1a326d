"""Corrections of measured speeds by use: when a rank's steps clearly take longer or less than predicted, the next plan
uses the corrected speed.

    factor = exp(mean over answers of log(factor then x what steps took / what they were predicted to take))

The first answer corrects the whole of its error, and each further one counts as much as those before it. So a device
that was measured wrong is right at once, and plans that contradict each other lead to a mean.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from devices.remembered import Remembered
from edge.parallel.step_times import Summary
from partition.plan.plan import LOCAL, Plan
from partition.predict.cost import Work
from partition.predict.hysteresis import CORRECTION, clearly_off
from partition.predict.predict import compute_s
from partition.predict.speeds import DeviceSpeed, Links
from quant.text import number_text

_LEAST_STEPS = 16
_MOST = 1000.0  # largest factor that counts as a correction


class Corrections:
    """Correction factors by a device's key. They hold for one measurement: a new one starts without a correction."""

    def __init__(self, folder: Path | None = None) -> None:
        self._remembered = Remembered("corrections", folder)

    def applied(self, measured: DeviceSpeed) -> DeviceSpeed:
        """Return the measured speed, corrected."""
        known = self._known(measured)
        if known is None:
            return measured
        factor = math.exp(known[0] / known[1])
        return replace(measured.times(factor), corrected=factor, quiet_s=measured.quiet_s)

    def learn(self, speed: DeviceSpeed, ratio: float) -> bool:
        """Remember that steps took `ratio` times as long as `speed` predicted. Return False if that is no clear
        difference."""
        if (
            not clearly_off(ratio, 1.0, by=CORRECTION)
            or not 1 / _MOST < ratio * speed.corrected < _MOST
            or not speed.key
        ):
            return False
        measured = replace(speed.times(1 / speed.corrected), corrected=1.0)
        logs, answers = self._known(measured) or (0.0, 0)
        value = {
            "of": measured.seconds,
            "logs": logs + math.log(speed.corrected * ratio),
            "answers": answers + 1,
        }
        self._remembered.put(speed.key, value)
        return True

    def _known(self, measured: DeviceSpeed) -> tuple[float, int] | None:
        """Return (sum of logarithms, answers) of this measurement; None if there are none."""
        remembered = self._remembered.get(measured.key)
        try:
            value = remembered[0] if remembered else {}
            measured_s, logs, answers = float(value["of"]), float(value["logs"]), int(value["answers"])
        except (TypeError, KeyError, ValueError, OverflowError):
            return None
        same = math.isclose(measured_s, measured.seconds, rel_tol=1e-6)
        return (logs, answers) if same and answers > 0 and abs(logs / answers) < math.log(_MOST) else None


def measured_ratio(summary: Summary | None, predicted_s: float | None) -> float:
    """Return how many times as long as predicted a rank's steps take; 1 if that is unknown.

        A rank is slower if even the fastest tenth of its steps is, so that a busy moment does not count; it is faster
        if half
    of them are.
    """
    if summary is None or summary.steps < _LEAST_STEPS or not predicted_s:
        return 1.0
    fast, middle = summary.compute_ms.p10 / 1e3 / predicted_s, summary.compute_ms.median / 1e3 / predicted_s
    return fast if fast > 1 else min(1.0, middle)


def correct(
    plan: Plan,
    work: Work,
    speeds: Sequence[DeviceSpeed],
    links: Links,
    times: Sequence[Mapping[str, Summary]],
    corrections: Corrections | None = None,
    *,
    disturbed: bool = False,
) -> list[str]:
    """Correct the speeds that the plan was made from, for the next plan. times: of each rank, its steps of one row.
    disturbed: other programs had this device's cores meanwhile, so it is not called slower. Return a sentence for each
    device that was clearly off."""
    corrections = corrections or Corrections()
    by_device = {speed.device: speed for speed in speeds}
    sentences = []
    predicted = compute_s(plan, work, by_device, links)
    for device, predicted_s, summaries in zip(plan.devices, predicted, times, strict=True):
        ratio = measured_ratio(summaries.get("decode"), predicted_s)
        if disturbed and device == LOCAL and ratio > 1:
            continue
        if plan.devices.count(device) == 1 and corrections.learn(by_device[device], ratio):
            more = f"{100 * (ratio - 1):.0f} % longer" if ratio > 1 else f"{100 * (1 - ratio):.0f} % less"
            sentences.append(
                f"{by_device[device].name} computed {more} than it was measured to take"
                f" ({number_text(1e3 * (predicted_s or 0))} ms a token); the next plan goes by that"
            )
    return sentences
