"""Accuracy of predictions for 4 to 16 devices: plans predicted, and run on a lab of sleeping devices.

    python benchmarks/bench_sleeping.py [--only TEXT] [--minutes 20] [--json [FILE]] [--tiny]

A sleeping device waits for as long as its profile says instead of computing, so that sixteen devices do not compete for
two cores; processes, links, frames and collectives are real. Half of the settings use presets as profiles, the other
half use profiles like those of a survey. The benchmark runs the best plans by latency and by throughput and their
strongest rivals; in settings with a prompt it also runs placements for prompts.

If two cores are too slow for all processes of a lab, the delay counts as time of the devices. Therefore labs are
stretched: devices and links take at least twice as long as they should, and the figures are divided by that factor. If
a process waited for a core for too large a fraction of the time, the setting is measured again with a larger factor,
after all other settings and while time is left; figures that still waited too long do not count. Each setting has a
share of the time: first it runs the chosen plans, then their rivals, the nearest first. If a setting fails, the output
names it, and the next one runs. --json FILE is written after each setting, and SIGTERM prints the results so far. Links
need root. --tiny: two devices on loopback, which tests no prediction.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.harness import ROOT, STDOUT, Section, bench, parser_of, table, write_json
from benchmarks.sleeping_labs import (
    FAR,
    SETTINGS,
    TINY,
    Setting,
    lab_of,
    link_kinds,
    memory_of,
    names_of,
    profiles_of,
)  # fmt: skip

SIDE = ROOT / "benchmarks" / "sleeping_side.py"
LEAST_S = 20.0  # for one setting, once
OVER_S = 60.0  # that the plan in progress may take longer than its setting may
MODEL = "tinyllama-1.1b"
_TIMES = {"first token": "ttft_s", "token": "tpot_s"}
FIGURES = {"latency": "latency_s", "throughput": "throughput_per_s", "ttft": "ttft_s"}  # of each objective
LEAST_DEVICES = 4  # of a setting that counts
MOST_WAITED = 0.1  # of the time, by any process of the lab for a core; figures of which more waited do not count
_FEW = 4  # devices: labs of more begin with the second of these, but over far links, which little crosses in a second
STRETCHES = (2, 4, 8, 16)  # times as slow as its devices and links a lab is, one after the other, until less waited


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--only", metavar="TEXT", help="settings whose name has it")
    parser.add_argument(
        "--requests", type=int, default=0, metavar="N", help="that come at random, for percentiles (default: none)"
    )
    parser.add_argument(
        "--minutes", type=float, default=20.0, help="after which no setting is begun or measured again (default: 20)"
    )
    bench(parser, Section(measure, text))


def measure(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """All settings once, and then again those whose processes waited for cores, while there is time. Figures are
    written after each setting, and those that there are, are shown where a signal ends the run."""
    from edge.models.synth import SHAPES, outline

    if not args.tiny and os.geteuid() != 0:
        raise SystemExit("links between devices need root; --tiny goes without")
    model, n_requests = folder / f"{MODEL}.gguf", 4 if args.tiny else args.requests
    outline(model, SHAPES["qwen2.5-0.5b" if args.tiny else MODEL])
    until = time.monotonic() + 60 * args.minutes
    rows: dict[str, dict[str, Any]] = {}
    failed: dict[str, str] = {}

    def run(setting: Setting, stretch: float, seconds: float) -> None:
        print(f"{setting.name}, stretched {stretch} times, at most {seconds:.0f} s", file=sys.stderr)
        try:
            if time.monotonic() > until:
                raise TimeoutError(f"not begun within {args.minutes:g} minutes")
            row = measured(setting, model, args.tiny, n_requests, stretch, seconds)
            rows[setting.name] = row if setting.name not in rows else better(rows[setting.name], row)
        except (subprocess.SubprocessError, OSError, ValueError, RuntimeError) as error:
            if setting.name in rows:  # what was measured before counts
                rows[setting.name]["tried"] = stretch
            else:
                failed[setting.name] = f"{error}"[-200:]
            print(f"{setting.name}: {error}", file=sys.stderr)
        if args.json != STDOUT:
            write_json(result_of(rows, failed), args.json)

    settings = [TINY] if args.tiny else [item for item in SETTINGS if (args.only or "") in item.name]
    # Those that do not count last, and before them small ones first: what they leave of the time is for large ones.
    settings.sort(key=lambda setting: (len(setting.devices) < LEAST_DEVICES, len(setting.devices)))
    try:
        for i, setting in enumerate(settings):
            run(setting, first_stretch(setting), share_s(until, len(settings) - i))
        while again := [item for item in settings if item.name in rows and is_late(rows[item.name])]:
            for i, setting in enumerate(again):
                if args.tiny or time.monotonic() > until:
                    break
                run(setting, 2 * rows[setting.name]["tried"], share_s(until, len(again) - i))
            else:
                continue
            break
    except (KeyboardInterrupt, SystemExit):
        failed |= {item.name: "not begun before the end" for item in settings if item.name not in {*rows, *failed}}
    return result_of(rows, failed)


def share_s(until: float, n: int) -> float:
    """Return the seconds that the next of `n` settings may take: an equal part of what is left, but what one needs."""
    return max(LEAST_S, (until - time.monotonic()) / n)


def first_stretch(setting: Setting) -> int:
    """Return how many times as slow as its devices and links a lab is at first."""
    return setting.stretch or STRETCHES[len(setting.devices) > _FEW and setting.link != FAR]


def result_of(rows: dict[str, dict[str, Any]], failed: dict[str, str]) -> dict[str, Any]:
    """Return all figures that there are."""
    settings = list(rows.values())
    return {"settings": settings, "summary": summary(settings) if rows else None, "failed": dict(failed)}


def waited_of(row: dict[str, Any]) -> float:
    """Return the largest part of the time that a process of the lab waited for this machine's cores."""
    return max(
        part
        for plan in row["plans"]
        for name, part in plan["waited"].items()
        if name != "ttft_s"  # whose ranks are at work at once: what one waits for cores the others do not wait for
    )


def is_late(row: dict[str, Any]) -> bool:
    """Return whether a setting is to be measured again in a lab that is stretched further."""
    return waited_of(row) > MOST_WAITED and row["tried"] < STRETCHES[-1]


def better(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Return a setting's figures after it was measured again: those whose processes waited less."""
    saved, other = (new, old) if waited_of(new) < waited_of(old) else (old, new)
    again = [*old["again"], {**other, "waited": waited_of(other), "again": []}]
    return {**saved, "again": again, "tried": new["tried"]}


def measured(
    setting: Setting, model: Path, tiny: bool, requests: int, stretch: float, seconds: float
) -> dict[str, Any]:
    """Measure the plans of one setting in a lab in which devices and links take `stretch` times as long, so that the
    processes compete less for the processor. Return the figures of a lab that is not stretched. requests: number of
    requests that come at random to each plan. seconds: time after which no further plan begins."""
    from devices.lab.config import parse_lab
    from tests.support.lab import Lab

    profiles, names = profiles_of(setting, model, stretch), names_of(setting)
    lab = parse_lab(lab_of(setting, profiles, stretch))
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, Lab(lab, Path(folder) / "lab") as up:
        target = {
            "model": str(model),
            "tiny": tiny,
            "requests": requests,
            "prompt": setting.prompt,
            "profiles": profiles,
            "names": names,
            "workers": [up.addresses[name] for name in names[1:]],
            "memory": memory_of(setting, model),
            "supervisor": psutil.Process(up.pid("own")).ppid(),
            "seconds": seconds - (time.monotonic() - began),
            **link_kinds(setting),
        }
        folders = {
            f"XDG_{kind}_HOME": f"{folder}/{kind.lower()}" for kind in ("STATE", "CONFIG")
        }  # nothing is remembered
        command = up.command("own", [sys.executable, str(SIDE), json.dumps(target)])
        with Path(folder, "figures").open("w+b") as figures:
            try:
                subprocess.run(
                    command,
                    cwd=ROOT,
                    env={**os.environ, **folders},
                    stdout=figures,
                    timeout=seconds + OVER_S,
                    check=True,
                )
            except subprocess.SubprocessError as error:
                print(f"{setting.name}: {error}"[-200:], file=sys.stderr)  # what was measured before counts
            figures.seek(0)
            lines = [json.loads(line) for line in figures]
    if len(lines) < 2:
        raise RuntimeError("no plan was measured")
    row = unstretched({**lines[0], "plans": lines[1:]}, stretch)
    of_setting = {"name": setting.name, "devices": setting.devices, "link": dict(setting.link)}
    return {**of_setting, "again": [], "tried": stretch, **row}


def unstretched(result: dict[str, Any], stretch: float) -> dict[str, Any]:
    """Return figures as of a lab where nothing takes longer: seconds are fewer, rates are higher."""
    for plan in result.get("plans", []):
        for figures in (plan["predicted"], plan["measured"]):
            for name in figures:
                figures[name] *= stretch if name.endswith("_per_s") else 1 / stretch
        if served := plan["requests"]:
            served["rate_per_s"] *= stretch
            for name in _TIMES.values():
                for spread in served[name].values():
                    spread.update({part: seconds / stretch for part, seconds in spread.items()})
    return {**result, "stretch": stretch}


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Errors of all predictions, and how far the plan that was chosen is from the best measured of its setting."""
    errors: dict[str, list[float]] = {}
    behind: dict[str, list[float]] = {}
    rejected = 0
    for row in rows:
        for plan in row["plans"]:
            for name, value in plan["measured"].items():
                if counts(plan, name):
                    errors.setdefault(name, []).append(abs(value / plan["predicted"][name] - 1))
                else:
                    rejected += 1
        for axis, key in row["best"].items():
            name = FIGURES[axis]
            sign = -1 if axis == "throughput" else 1
            costs = {plan["key"]: plan["measured"][name] ** sign for plan in row["plans"] if counts(plan, name)}
            if key in costs and len(costs) > 1:
                behind.setdefault(axis, []).append(costs[key] / min(costs.values()))
    return {
        "settings": len(rows),
        "again": sum(len(row["again"]) for row in rows),
        "rejected": rejected,
        "plans": sum(len(row["plans"]) for row in rows),
        "errors": {name: median_and_worst(values) for name, values in errors.items()},
        "chosen_over_best": {axis: median_and_worst(values) for axis, values in behind.items()},
    }


def counts(plan: dict[str, Any], name: str) -> bool:
    """Return whether a figure is that of the devices: no process waited for this machine's cores for too long."""
    return name == "ttft_s" or bool(plan["waited"][name] <= MOST_WAITED)


def median_and_worst(values: list[float]) -> dict[str, float]:
    """Return both, where less is better, and how many there are."""
    return {"median": statistics.median(values), "worst": max(values), "n": len(values)}


def text(r: dict[str, Any]) -> str:
    """The result as Markdown."""
    texts = [text_of_plans(r)] if r["settings"] else []
    if r["failed"]:
        texts.append("Without figures: " + "; ".join(f"{name} ({error})" for name, error in r["failed"].items()))
    return "\n\n".join([*texts, last_line(r["summary"])])


def last_line(totals: dict[str, Any] | None) -> str:
    """Return the errors of latency and throughput, and what choices lose, in one line."""
    if totals is None:
        return "Summary: nothing was measured."
    names = {"latency": "latency_s", "throughput": "throughput_per_s"}
    parts = [
        f"{title} off by {errors['median']:.1%} (median), {errors['worst']:.1%} (worst of {errors['n']})"
        for title, errors in ((title, totals["errors"].get(name)) for title, name in names.items())
        if errors
    ]
    parts += [
        f"chosen by {axis} {ratios['median']:.3f} (median), {ratios['worst']:.3f} (worst) of the best measured"
        f" (settings with several plans: {ratios['n']})"
        for axis, ratios in totals["chosen_over_best"].items()
    ]
    return f"Summary: {totals['settings']} settings; " + "; ".join([*parts, f"{totals['rejected']} figures rejected."])


def text_of_plans(r: dict[str, Any]) -> str:
    """Plans, predicted and measured."""
    totals = r["summary"]
    lines = [
        [f"{row['name']}: {shape_text(plan)}{mark(row, plan)}", *cells(plan), f"{max(plan['waited'].values()):.0%}"]
        for row in r["settings"]
        for plan in row["plans"]
    ]
    words = [
        f"{totals['settings']} settings, {totals['plans']} plans; {totals['again']} settings were measured again as"
        f" processes waited for cores for more than {MOST_WAITED:.0%} of the time."
    ]
    for name, errors in totals["errors"].items():
        words.append(f"{name}: off by {errors['median']:.1%} in the median, {errors['worst']:.1%} at worst.")
    for axis, ratios in totals["chosen_over_best"].items():
        words.append(
            f"Chosen by {axis} over the best measured: {ratios['median']:.3f} in the median, {ratios['worst']:.3f} at"
            f" worst, of {ratios['n']} settings with several plans."
        )
    figures = ("token, ms", "tokens/s of 4", "first token, s")
    header = ["setting: ranks of each stage", *(column for name in figures for column in (name, "off by")), "waited"]
    return f"{table(header, lines)}\n\n" + "\n".join(words) + percentiles_text(r)


def cells(plan: dict[str, Any]) -> list[str]:
    """Return each figure of a plan as measured, and how far off its prediction was; empty where it has none."""
    shown = []
    for name, factor, digits in (("latency_s", 1e3, 0), ("throughput_per_s", 1.0, 2), ("ttft_s", 1.0, 2)):
        value = plan["measured"].get(name)
        shown += ["", ""] if value is None else [
            f"{factor * value:.{digits}f}", f"{value / plan['predicted'][name] - 1:+.0%}"
        ]  # fmt: skip
    return shown


def percentiles_text(r: dict[str, Any]) -> str:
    """Requests that came at random: percentiles as measured, and how far off the simulator was; "" without any."""
    header = ["setting: ranks of each stage", "requests/s", *(f"{name} {p}" for name in _TIMES for p in ("p50", "p90"))]
    lines = []
    for row in r["settings"]:
        for plan in row["plans"]:
            if (served := plan["requests"]) is not None:
                cells = []
                for key in _TIMES.values():
                    for p in ("p50", "p90"):
                        used = served[key]["measured"][p]
                        cells.append(f"{1e3 * used:.0f} ms ({used / served[key]['simulated'][p] - 1:+.0%})")
                lines.append([f"{row['name']}: {shape_text(plan)}", f"{served['rate_per_s']:.3f}", *cells])
    return f"\n\n{table(header, lines)}" if lines else ""


def shape_text(plan: dict[str, Any]) -> str:
    """Return the ranks of each stage, such as 2+1+1, a thin owner as 0; behind them those of prompts."""
    prompts = f", prompts {'+'.join(map(str, plan['prompts']))}" if plan["prompts"] else ""
    return "+".join(map(str, plan["widths"])) + prompts


def mark(row: dict[str, Any], plan: dict[str, Any]) -> str:
    """Return for which objectives a plan was chosen."""
    axes = [axis for axis, key in row["best"].items() if key == plan["key"]]
    return f" ({', '.join(axes)})" if axes else ""


if __name__ == "__main__":
    main()
