"""First plans: how much slower is a plan from estimates than one from measurements, at first and after some use?

    python benchmarks/bench_first_plans.py [--settings 40] [--json [FILE]] [--tiny]

Labs of sleeping devices (`sleeping_labs.SETTINGS`) are drawn. Each device computes and reads memory faster or slower
than its preset, and each lab's links are faster or slower than stated, by seeded factors of 0.4 to 2.5. The estimator
knows neither. Plans are made as `edge chat` makes them:

| plan     | speeds behind it                                                                         |
| first    | presets, and links as stated: everything is hidden                                       |
| reported | rates that devices report, and links from round trips, as a worker gives them          |
| steps    | the plan after some answers, whose steps correct the estimates of devices that compute   |
| measured | the plan after two minutes: idle devices and links were measured, and it may have moved  |

Times are those of the true devices, by the predictor that `bench_sleeping.py` compares with real labs, divided by those
of the plan that is made from the true speeds. Nothing is run, so the figures are the same on any machine.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.harness import Section, bench, parser_of, table
from benchmarks.sleeping_labs import SETTINGS, TINY, Setting, memory_of, names_of
from devices.catalog import CATALOG
from edge.llm.options import EngineOptions
from edge.planning.arrange import can_share, work_of
from edge.profiling.llm_survey import with_sums
from partition.model.file import ModelFile
from partition.plan.plan import LOCAL, Plan
from partition.predict.cost import Work
from partition.predict.hysteresis import NEW_PLAN, PLAN, clearly_better, clearly_off
from partition.predict.predict import compute_s, predict
from partition.predict.presets import PartSizes, rated_speed
from partition.predict.speeds import DeviceSpeed, Links, LinkSpeed
from partition.search.explain import best
from partition.search.planner import Planner

MODEL = "tinyllama-1.1b"
LEAST, MOST = 0.4, 2.5  # hidden factors
_MOST_DEVICES = 7  # of a setting; larger ones take minutes to plan
_LOOPBACK = {"delay_ms": 0.05, "bandwidth_mbps": 1000}
_ANSWERS = 3  # answers whose steps correct estimates, before devices are measured
_COPY_OFF = 1.25  # reported rates are off by up to this factor, since they are of other work than a model
PLANS = ("first", "reported", "steps", "measured")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--settings", type=int, default=40, help="labs that are drawn (default: 40)")
    bench(parser, Section(measure, text))


def measure(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Draw all settings, and compare their plans."""
    from edge.models.synth import SHAPES, outline

    model = folder / f"{MODEL}.gguf"
    outline(model, SHAPES["qwen2.5-0.5b" if args.tiny else MODEL])
    file = ModelFile.open(model)
    small = [TINY] if args.tiny else [setting for setting in SETTINGS if len(setting.devices) <= _MOST_DEVICES]
    rows = []
    for number in range(2 if args.tiny else args.settings):
        began = time.monotonic()
        # In half of the settings, every device has room for the whole model.
        turn, i = divmod(number, len(small))
        rows.append(compared(small[i], number, file, model, scarce=(turn + i) % 2 == 0))
        ratios = " ".join(f"{name} {ratio:.2f}" for name, ratio in rows[-1]["ratios"].items())
        print(f"{rows[-1]['name']}: {ratios}; {time.monotonic() - began:.1f} s", file=sys.stderr)
    return {"settings": rows, "summary": summary(rows)}


def compared(setting: Setting, seed: int, file: ModelFile, model: Path, *, scarce: bool) -> dict[str, Any]:
    """Return the seconds a token of each plan of a setting, in parts of those of the plan by the true speeds."""
    draw, sizes = random.Random(f"{setting.name} {seed}"), PartSizes.from_file(file)
    names = [LOCAL, *names_of(setting)[1:]]
    room = memory_of(setting, model) if scarce else 4 * model.stat().st_size

    def speeds(factors: Sequence[tuple[float, float]], *, estimate: bool) -> list[DeviceSpeed]:
        results = []
        for name, kind, (memory, flops) in zip(names, setting.devices, factors, strict=True):
            preset, slower = (CATALOG[kind], 1.0) if isinstance(kind, str) else (CATALOG["pi5"], kind)
            rates = memory * preset.memory_bytes_per_s / slower, flops * preset.flops / slower
            speed = rated_speed(*rates, sizes, name, name, room)
            results.append(replace(speed, estimate=estimate, disk_bytes_per_s=preset.disk_bytes_per_s))
        return with_sums(results)

    def hidden() -> float:
        return float(LEAST * (MOST / LEAST) ** draw.random())

    def off() -> float:
        return float(_COPY_OFF ** draw.uniform(-1, 1))

    factors = [(hidden(), hidden()) for _ in names]
    link_factor = hidden()
    true, true_links = speeds(factors, estimate=False), links_of(setting, names, link_factor)
    work = work_of(file, EngineOptions(context=512))
    truth = World(work, true, true_links, can_share(file))
    least_s = truth.seconds(truth.plan(true, true_links))
    stated = speeds([(1.0, 1.0)] * len(names), estimate=True)
    reported = speeds([(memory * off(), flops * off()) for memory, flops in factors], estimate=True)
    first = truth.plan(stated, links_of(setting, names, 1.0))
    times = {
        "first": first,
        "reported": truth.plan(reported, links_of(setting, names, link_factor * off())),
        "steps": truth.after_steps(first, stated, links_of(setting, names, 1.0)),
    }
    times["measured"] = truth.moved(times["steps"], true, true_links, PLAN)
    ratios = {name: truth.seconds(plan) / least_s for name, plan in times.items()}
    devices = {name: len(set(plan.devices)) for name, plan in times.items()}
    return {"name": f"{setting.name}{', scarce memory' if scarce else ''}", "ratios": ratios, "devices": devices}


class World:
    """Devices and links as they are."""

    def __init__(self, work: Work, speeds: Sequence[DeviceSpeed], links: Links, share: bool) -> None:
        self._work, self._links, self._share = work, links, share
        self._by_device = {speed.device: speed for speed in speeds}

    def plan(self, speeds: Sequence[DeviceSpeed], links: Links) -> Plan:
        """Return the plan that `edge chat` makes with these speeds."""
        return best(Planner(self._work, speeds, links, "m", "", tensor=self._share), "latency").plan

    def seconds(self, plan: Plan, speeds: Mapping[str, DeviceSpeed] | None = None, links: Links | None = None) -> float:
        """Return the seconds a token of a plan, by default on the devices as they are."""
        return predict(plan, self._work, speeds or self._by_device, links or self._links).latency_s

    def moved(self, plan: Plan, speeds: Sequence[DeviceSpeed], links: Links, by: float) -> Plan:
        """Return the plan that runs after planning again with these speeds."""
        by_device = {speed.device: speed for speed in speeds}
        new = self.plan(speeds, links)
        old_s = self.seconds(plan, by_device, links)
        return new if clearly_better(self.seconds(new, by_device, links), old_s, by=by) else plan

    def after_steps(self, plan: Plan, speeds: Sequence[DeviceSpeed], links: Links) -> Plan:
        """Return the plan that runs after some answers, whose steps corrected the estimates."""
        for _ in range(_ANSWERS):
            by_device = {speed.device: speed for speed in speeds}
            factors = {}
            expected = compute_s(plan, self._work, by_device, links)
            took = compute_s(plan, self._work, self._by_device, self._links)
            for device, expected_s, took_s in zip(plan.devices, expected, took, strict=True):
                if expected_s and took_s and clearly_off(took_s, expected_s, by=NEW_PLAN):
                    factors[device] = took_s / expected_s
            if not factors or len(plan.devices) == 1:  # one device alone reports no steps
                break
            speeds = [speed.times(factors.get(speed.device, 1.0)) for speed in speeds]
            plan = self.moved(plan, speeds, links, NEW_PLAN)
        return plan


def links_of(setting: Setting, names: Sequence[str], factor: float) -> Links:
    """Return the links of a setting. factor: how much faster they are than stated."""
    between = {}
    for i, a in enumerate(names):
        for j, b in enumerate(names):
            near = setting.groups > 0 and i // setting.groups == j // setting.groups
            stated = (setting.near if near else setting.link) or _LOOPBACK
            if i != j:
                between[a, b] = LinkSpeed(
                    stated["delay_ms"] / 1e3 / factor, stated["bandwidth_mbps"] * 1e6 / 8 * factor
                )
    return Links(between)


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the median and the worst ratio of each plan."""
    ratios = {name: [row["ratios"][name] for row in rows] for name in PLANS}
    return {name: {"median": statistics.median(values), "worst": max(values)} for name, values in ratios.items()}


def text(r: dict[str, Any]) -> str:
    """The result as Markdown."""
    lines = [
        [row["name"], *(f"{row['ratios'][name]:.2f} ({row['devices'][name]})" for name in PLANS)]
        for row in r["settings"]
    ]
    totals = [[name, f"{row['median']:.2f}", f"{row['worst']:.2f}"] for name, row in r["summary"].items()]
    return "\n\n".join(
        [
            table(["setting", *(f"{name} (devices)" for name in PLANS)], lines),
            table(["plan", "median", "worst"], totals),
        ]
    )


if __name__ == "__main__":
    main()
