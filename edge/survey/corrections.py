"""Corrections of profiles by use: where a rank's steps clearly take longer or less than predicted, the next plan goes
by that.

    factor = exp(mean over answers of log(factor then x what steps took / what they were predicted to take))

The first answer corrects the whole of its error, each further one counts as much as those before it. So a device that
is measured wrong is right at once, and plans that contradict each other end between what they say.
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
_MOST = 1000.0  # times; more is no correction


class Corrections:
    """Factors by a device's key. They hold for the measurement that they correct: a new one begins anew."""

    def __init__(self, folder: Path | None = None) -> None:
        self._remembered = Remembered("corrections", folder)

    def applied(self, measured: DeviceSpeed) -> DeviceSpeed:
        """Return a profile, corrected."""
        found = self._known(measured)
        if found is None:
            return measured
        factor = math.exp(found[0] / found[1])
        return replace(measured.times(factor), corrected=factor, quiet_s=measured.quiet_s)

    def learn(self, speed: DeviceSpeed, ratio: float) -> bool:
        """Remember that steps took `ratio` times what `speed` had predicted; False where that is not clear."""
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
        """(sum of logarithms, answers) of this measurement; None where there is nothing."""
        found = self._remembered.get(measured.key)
        try:
            value = found[0] if found else {}
            of, logs, answers = float(value["of"]), float(value["logs"]), int(value["answers"])
        except (TypeError, KeyError, ValueError, OverflowError):
            return None
        same = math.isclose(of, measured.seconds, rel_tol=1e-6)
        return (logs, answers) if same and answers > 0 and abs(logs / answers) < math.log(_MOST) else None


def took_times(summary: Summary | None, predicted_s: float | None) -> float:
    """How many times as long as predicted a rank's steps take; 1 where nobody can say.

    Slower is what even the fast tenth of them is, so that a busy moment is none; faster is what half of them are.
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
    """Correct what the plan went by, for the next one. times: of each rank, as its steps of one row took. disturbed:
    other programs had this device's cores meanwhile, so it is not taken to be slower. A sentence for each device that
    was clearly off."""
    corrections = corrections or Corrections()
    of = {speed.device: speed for speed in speeds}
    said = []
    predicted = compute_s(plan, work, of, links)
    for device, predicted_s, took in zip(plan.devices, predicted, times, strict=True):
        ratio = took_times(took.get("decode"), predicted_s)
        if disturbed and device == LOCAL and ratio > 1:
            continue
        if plan.devices.count(device) == 1 and corrections.learn(of[device], ratio):
            more = f"{100 * (ratio - 1):.0f} % longer" if ratio > 1 else f"{100 * (1 - ratio):.0f} % less"
            said.append(
                f"{of[device].name} computed {more} than it was measured to take"
                f" ({number_text(1e3 * (predicted_s or 0))} ms a token); the next plan goes by that"
            )
    return said
