"""First plans: how much slower is a plan from estimates than one from measurements, at first and after some use?

    python benchmarks/bench_first_plans.py [--only computed|run] [--settings 40] [--runs 4] [--use 120] [--json [FILE]]
        [--tiny]

Labs of sleeping devices (`sleeping_labs.SETTINGS`) are drawn. Each device computes, reads memory and sends faster or
slower than its preset, by seeded factors of 0.4 to 2.5 each. A link is as fast as the slower one of its devices. The
estimator does not know the factors. Plans are made as `edge chat` makes them:

| plan     | speeds behind it                                                                         |
| hidden   | presets, and links as stated: everything is hidden                                       |
| calls    | presets, and links from calls to the workers, for devices that report no rates           |
| reported | rates that devices report, and links from calls, both off by a factor: the product       |
| steps    | the plan `hidden` after some answers, whose steps correct the estimates of its devices   |
| measured | the plan after two minutes: idle devices and links were measured, and it may have moved  |

| section  | times of a token                                                                         |
| computed | by the predictor that `bench_sleeping.py` compares with real labs, of the true devices   |
| run      | of a few settings in a lab of sleeping devices whose workers report the rates of presets |

All times are divided by the time of the best plan, which is made from the true speeds. The section `computed` runs
nothing, so its figures are the same on any machine. The section `run` has a first plan, uses it for two minutes with a
pause after each answer, and then runs the best plan. Its links need root; with --tiny they are on loopback.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

from benchmarks.harness import ROOT, LeftOut, Section, bench, parser_of, progress, table
from benchmarks.sleeping_labs import SETTINGS, TINY, Setting, memory_of, names_of
from devices.catalog import CATALOG
from devices.processes.rates import Rates
from edge.llm.options import EngineOptions
from edge.planning.arrange import can_share, work_of
from edge.profiling.estimate import READ
from edge.profiling.llm_survey import with_sums
from partition.model.file import ModelFile
from partition.plan.plan import LOCAL, Plan
from partition.predict.cost import Work
from partition.predict.hysteresis import NEW_PLAN, PLAN, clearly_better, clearly_off
from partition.predict.part_times import profile_json
from partition.predict.predict import compute_s, predict
from partition.predict.presets import PartSizes, rated_speed
from partition.predict.speeds import DeviceSpeed, Links, LinkSpeed
from partition.search.explain import best
from partition.search.planner import Planner

MODEL = "tinyllama-1.1b"
LEAST, MOST = 0.4, 2.5  # hidden factors
CONTEXT = 512
_MOST_DEVICES = 7  # larger settings take minutes to plan
_LOOPBACK = {"delay_ms": 0.05, "bandwidth_mbps": 1000}
_ANSWERS = 3  # answers whose steps correct estimates, before devices are measured
_REPORT_OFF = 1.4  # reported rates and calls are off by up to this factor, because they are of other work than a model
_STRETCH = 2.0  # factor of all times in labs that run, because this machine's own work takes time
_PROFILE_ROOM = 8 << 30  # bytes of each device of such a lab; the planner knows less
_OVER_S = 200.0  # time limit for starting a lab and measuring its plans, in addition to its use
_RUN = (8, 21, 25, 33)  # numbers of the computed settings that are run; their memory is scarce
SIDE = ROOT / "benchmarks" / "first_plans_side.py"
PLANS = ("hidden", "calls", "reported", "steps", "measured")


def main() -> None:
    parser = parser_of(__doc__, SECTIONS)
    parser.add_argument("--settings", type=int, default=40, help="labs that are drawn (default: 40)")
    parser.add_argument("--runs", type=int, default=4, help="settings that are run (default: 4)")
    parser.add_argument("--use", type=float, default=120.0, metavar="S", help="seconds of use (default: 120)")
    bench(parser, SECTIONS, prepare)


def prepare(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Write the outline of the model."""
    from edge.models.synth import SHAPES, outline

    args.model = folder / f"{MODEL}.gguf"
    outline(args.model, SHAPES["qwen2.5-0.5b" if args.tiny else MODEL])
    args.file = ModelFile.open(args.model)
    return {}


def computed(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Draw all settings, and compare their plans."""
    rows = []
    for number in range(2 if args.tiny else args.settings):
        began = time.monotonic()
        setting, scarce = setting_of(number, tiny=args.tiny)
        rows.append(compared(setting, number, args.file, args.model, scarce=scarce))
        ratios = " ".join(f"{name} {ratio:.2f}" for name, ratio in rows[-1]["ratios"].items())
        progress(f"{rows[-1]['name']}: {ratios}; {time.monotonic() - began:.1f} s")
    return {"settings": rows, "summary": summary(rows)}


def setting_of(number: int, *, tiny: bool) -> tuple[Setting, bool]:
    """Return a setting, and whether its memory is scarce. In half of the settings, every device has room for the whole
    model.
    """
    small = [TINY] if tiny else [setting for setting in SETTINGS if len(setting.devices) <= _MOST_DEVICES]
    turn, i = divmod(number, len(small))
    return small[i], (turn + i) % 2 == 0


def run(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Run some settings."""
    if not args.tiny and os.geteuid() != 0:
        raise LeftOut("the lab's links need root")
    rows = []
    for number in _RUN[: 1 if args.tiny else args.runs]:
        setting, _ = setting_of(number, tiny=args.tiny)
        room = memory_of(setting, args.model)
        rows.append(ran(setting, number, args.file, room, 1.0 if args.tiny else args.use))
        progress(f"{setting.name}: {_ratios_text(rows[-1])}")
    return {"settings": rows}


def compared(setting: Setting, seed: int, file: ModelFile, model: Path, *, scarce: bool) -> dict[str, Any]:
    """Return the time of a token of each plan of a setting, relative to the best plan."""
    lab, share = DrawnLab.draw(setting, seed, [LOCAL, *names_of(setting)[1:]]), can_share(file)
    room = memory_of(setting, model) if scarce else 4 * model.stat().st_size
    sizes = PartSizes.from_file(file)
    true, true_links = lab.speeds(lab.rates, sizes, room, estimate=False), lab.links
    truth = World(work_of(file, EngineOptions(context=CONTEXT)), true, true_links, share)
    least_s = truth.seconds(truth.plan(true, true_links))
    stated = lab.speeds(lab.stated_rates, sizes, room, estimate=True)
    reported = lab.speeds(lab.reported_rates, sizes, room, estimate=True)
    hidden = truth.plan(stated, lab.stated_links)
    plans = {
        "hidden": hidden,
        "calls": truth.plan(stated, lab.called_links),
        "reported": truth.plan(reported, lab.called_links),
        "steps": truth.after_steps(hidden, stated, lab.stated_links),
    }
    plans["measured"] = truth.moved(plans["steps"], true, true_links, PLAN)
    ratios = {name: truth.seconds(plan) / least_s for name, plan in plans.items()}
    devices = {name: len(set(plan.devices)) for name, plan in plans.items()}
    return {"name": f"{setting.name}{', scarce memory' if scarce else ''}", "ratios": ratios, "devices": devices}


def ran(setting: Setting, seed: int, file: ModelFile, room: int, use_s: float) -> dict[str, Any]:
    """Run the plans of a setting in a lab of sleeping devices.

    The devices report the rates of their presets. The lab's links are real, so calls show them. The planner may use
    `room` bytes of each device, and no device pages, because sleeping devices do not.
    """
    from devices.lab.config import parse_lab
    from tests.support.lab import Lab

    names, sizes = names_of(setting), PartSizes.from_file(file)
    drawn = DrawnLab.draw(setting, seed, names, _STRETCH)
    profiles = [
        {**profile_json(speed, sizes), "rates": [stated.memory_bytes_per_s / READ, stated.flops]}
        for speed, stated in zip(
            drawn.speeds(drawn.rates, sizes, _PROFILE_ROOM, estimate=False), drawn.stated_rates, strict=True
        )
    ]
    config: dict[str, Any] = {
        "device": [
            {"name": name, "compute": "sleep", "profile": json.dumps(profile), "threads": 1}
            for name, profile in zip(names, profiles, strict=True)
        ]
    }
    if setting.link:
        config["link"] = [
            {"between": [a, b], "delay_ms": 1e3 * link.latency_s, "bandwidth_mbps": 8e-6 * link.bytes_per_s}
            for a, b in combinations(names, 2)
            for link in [drawn.links.get(a, b)]
        ]
    with tempfile.TemporaryDirectory() as folder, Lab(parse_lab(config), Path(folder) / "lab") as up:
        lab = DrawnLab.draw(setting, seed, [LOCAL, *(up.addresses[name] for name in names[1:])], _STRETCH)
        lab = replace(lab, disks=[None] * len(names))
        true = lab.speeds(lab.rates, sizes, room, estimate=False)
        truth = World(work_of(file, EngineOptions(context=CONTEXT)), true, lab.links, can_share(file))
        best_plan = truth.plan(true, lab.links)
        stated = lab.speeds(lab.stated_rates, sizes, room, estimate=True)
        cluster = Path(folder) / "cluster.toml"
        cluster.write_text(
            "".join(
                f'[[device]]\nname = "{name}"\naddress = "{address}"\nmemory = "{room >> 20}MiB"\n'
                for name, address in zip(names, lab.names, strict=True)
            )
        )
        target = {
            "model": str(file.path),
            "context": CONTEXT,
            "cluster": str(cluster),
            "best": best_plan.to_json(),
            "use_s": use_s,
        }
        folders = {f"XDG_{kind}_HOME": f"{folder}/{kind.lower()}" for kind in ("STATE", "CONFIG")}
        command = up.command("own", [sys.executable, str(SIDE), json.dumps(target)])
        shown = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, **folders},
            stdout=subprocess.PIPE,
            timeout=use_s + _OVER_S,
            check=True,
        ).stdout
        result = json.loads(shown)
        plans = {
            "first": Plan.from_json(result["first"]),
            "used": Plan.from_json(result["used"]),
            "best": best_plan,
        }
        # A measured process takes less memory than an estimated one, so a plan may need a little more room than stated.
        ample = {speed.device: replace(speed, memory_bytes=_PROFILE_ROOM) for speed in true}
        predicted = {name: truth.seconds(plan, ample) for name, plan in plans.items()}
        expected_s = truth.seconds(truth.plan(stated, called(lab.names, lab.links, lambda: 1.0)))
    return {
        "name": setting.name,
        "measured_s": {name: result[f"{name}_s"] for name in plans},
        "predicted_s": predicted,
        "expected_first_s": expected_s,
        "devices": {name: len(set(plan.devices)) for name, plan in plans.items()},
    }


@dataclass(frozen=True)
class DrawnLab:
    """A lab whose devices and links differ from their presets by drawn factors.

    Rates are pairs of bytes of memory a second and operations a second, by device.
    """

    names: Sequence[str]
    rates: Sequence[Rates]
    stated_rates: Sequence[Rates]
    reported_rates: Sequence[Rates]
    disks: Sequence[float | None]
    links: Links
    stated_links: Links
    called_links: Links  # estimates from calls to the workers

    @classmethod
    def draw(cls, setting: Setting, seed: int, names: Sequence[str], stretch: float = 1.0) -> DrawnLab:
        """Draw the factors of a setting.

        names: addresses of the devices, this device first.
        stretch: factor of the times of devices and links.
        """
        draw = random.Random(f"{setting.name} {seed}")

        def hidden() -> float:
            return float(LEAST * (MOST / LEAST) ** draw.random())

        def off() -> float:
            return float(_REPORT_OFF ** draw.uniform(-1, 1))

        stated, disks = [], []
        for kind in setting.devices:
            preset, slower = (CATALOG[kind], stretch) if isinstance(kind, str) else (CATALOG["pi5"], kind * stretch)
            stated.append(Rates(preset.memory_bytes_per_s / slower, preset.flops / slower))
            disks.append(preset.disk_bytes_per_s)
        rates = [Rates(rate.memory_bytes_per_s * hidden(), rate.flops * hidden()) for rate in stated]
        by_device = dict(zip(names, (hidden() for _ in names), strict=True))
        stated_links = links_of(setting, names, stretch)
        links = {
            (a, b): _faster(link, min(by_device[a], by_device[b])) for (a, b), link in stated_links.between.items()
        }
        return cls(
            names, rates, stated,
            [Rates(rate.memory_bytes_per_s * off(), rate.flops * off()) for rate in rates],
            disks, Links(links), stated_links, called(names, Links(links), off),
        )  # fmt: skip

    def speeds(self, rates: Sequence[Rates], sizes: PartSizes, room: int, *, estimate: bool) -> list[DeviceSpeed]:
        """Return the speeds of devices with these rates and with `room` bytes of memory."""
        speeds = []
        for name, rate, disk in zip(self.names, rates, self.disks, strict=True):
            speed = rated_speed(rate.memory_bytes_per_s, rate.flops, sizes, name, name, room)
            speeds.append(replace(speed, estimate=estimate, disk_bytes_per_s=disk))
        return with_sums(speeds)


def links_of(setting: Setting, names: Sequence[str], stretch: float) -> Links:
    """Return the links of a setting as stated. stretch: factor of their times."""
    between = {}
    for i, a in enumerate(names):
        for j, b in enumerate(names):
            near = setting.groups > 0 and i // setting.groups == j // setting.groups
            stated = (setting.near if near else setting.link) or _LOOPBACK
            if i != j:
                link = LinkSpeed(stated["delay_ms"] / 1e3, stated["bandwidth_mbps"] * 1e6 / 8)
                between[a, b] = _faster(link, 1 / stretch)
    return Links(between)


def called(names: Sequence[str], links: Links, off: Callable[[], float]) -> Links:
    """Return links as `edge.profiling.links.estimated_links` does: the slower link of two
    workers to this device counts for the link between them. off: returns the error of a call as a factor.
    """
    own = {name: _faster(links.get(names[0], name), off()) for name in names[1:]}
    between = {}
    for a, b in combinations(names, 2):
        ways = [own[name] for name in (a, b) if name in own]
        link = LinkSpeed(max(way.latency_s for way in ways), min(way.bytes_per_s for way in ways), estimate=True)
        between[a, b] = between[b, a] = link
    return Links(between)


def _faster(link: LinkSpeed, factor: float) -> LinkSpeed:
    return LinkSpeed(link.latency_s / factor, link.bytes_per_s * factor)


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


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the median and the worst ratio of each plan."""
    ratios = {name: [row["ratios"][name] for row in rows] for name in PLANS}
    return {name: {"median": statistics.median(values), "worst": max(values)} for name, values in ratios.items()}


def text(r: dict[str, Any]) -> str:
    """Return the computed plans as Markdown."""
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


def run_text(r: dict[str, Any]) -> str:
    """Return the plans that were run as Markdown."""
    lines = []
    for row in r["settings"]:
        cells = []
        for name in ("first", "used", "best"):
            measured_s, predicted_s = row["measured_s"][name], row["predicted_s"][name]
            ratio = measured_s / row["measured_s"]["best"]
            cells.append(f"{ratio:.2f}; {1e3 * measured_s:.0f} ({predicted_s / measured_s - 1:+.0%})")
        lines.append([row["name"], *cells, f"{row['expected_first_s'] / row['predicted_s']['best']:.2f}"])
    header = [
        "setting",
        *(f"{name}: of best; ms (prediction)" for name in ("first", "after use", "best")),
        "first, computed: of best",
    ]
    return table(header, lines)


def _ratios_text(row: dict[str, Any]) -> str:
    return ", ".join(f"{name} {seconds / row['measured_s']['best']:.2f}" for name, seconds in row["measured_s"].items())


SECTIONS = {"computed": Section(computed, text), "run": Section(run, run_text)}

if __name__ == "__main__":
    main()
