"""Truth of predictions for 4 to 16 devices: plans predicted, and run on sleeping devices of a lab.

    python benchmarks/bench_sleeping.py [--only TEXT] [--json [FILE]] [--tiny]

Devices wait for as long as their profiles say instead of computing, so that sixteen do not compete for two cores;
processes, links, frames and collectives are real. Half of the settings sleep by presets, half by profiles as a survey
measures them. Run are the best plans by latency and by throughput, and the best of stages of one device each. Then two
devices that share every layer compute requests in one group, and in two. Links need root; --tiny: two devices on
loopback, which says nothing about predictions.
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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness import ROOT, Section, bench, parser_of, table

SIDE = ROOT / "benchmarks" / "sleeping_side.py"
RUN_S = 600.0  # for one setting
MODEL = "tinyllama-1.1b"
_TIMES = {"first token": "ttft_s", "token": "tpot_s"}
# Each device has room for so many times its equal share of the model, beside its process and KV cache: so most of the
# devices are needed.
_SHARE, _BESIDE_BYTES = 1.6, 240 << 20


@dataclass(frozen=True)
class Setting:
    """A lab of sleeping devices."""

    name: str
    devices: tuple[str | float, ...]  # a preset, or times as slow as a Pi 5 with a measured profile; the owner's first
    link: Mapping[str, float]  # between all
    groups: int = 0  # above 0: so many devices each are near each other, with links of NEAR
    near: Mapping[str, float] = field(default_factory=dict)


LAN = {"delay_ms": 0.5, "bandwidth_mbps": 1000}
WIFI = {"delay_ms": 2, "bandwidth_mbps": 200}
FAR = {"delay_ms": 10, "bandwidth_mbps": 100}
THIN = {"delay_ms": 3, "bandwidth_mbps": 30}
CABLE = {"delay_ms": 1, "bandwidth_mbps": 1000}


def equal(n: int, device: str | float) -> tuple[str | float, ...]:
    """Return n devices alike."""
    return (device,) * n


SETTINGS = (
    Setting("4 Pi 4, LAN", equal(4, "pi4"), LAN),
    Setting("4 Pi 4, Wi-Fi", equal(4, "pi4"), WIFI),
    Setting("4 Pi 5, LAN", equal(4, "pi5"), LAN),
    Setting("4 Pi 5, far", equal(4, "pi5"), FAR),
    Setting("4 unequal presets, LAN", ("pi5", "pi4", "mini-pc", "pi4"), LAN),
    Setting("4 unequal presets, thin", ("phone", "pi4", "pi5", "mini-pc"), THIN),
    Setting("4 measured, LAN", equal(4, 3.0), LAN),
    Setting("4 measured, unequal, Wi-Fi", (2.0, 5.0, 3.0, 1.5), WIFI),
    Setting("4 measured, pairs", equal(4, 4.0), FAR, 2, CABLE),
    Setting("5 unequal, Wi-Fi", ("pi4", "pi5", "pi4", "phone", "pi4"), WIFI),
    Setting("5 measured, LAN", (4.0, 2.0, 6.0, 3.0, 5.0), LAN),
    Setting("6 Pi 4, Wi-Fi", equal(6, "pi4"), WIFI),
    Setting("6 Pi 4, pairs", equal(6, "pi4"), FAR, 2, CABLE),
    Setting("6 Pi 4, threes", equal(6, "pi4"), WIFI, 3, CABLE),
    Setting("6 measured, thin", (5.0, 4.0, 3.0, 6.0, 4.0, 5.0), THIN),
    Setting("6 measured, far", equal(6, 5.0), FAR),
    Setting("7 unequal, Wi-Fi", ("pi5", *equal(3, "pi4"), *equal(3, "pi5")), WIFI),
    Setting("8 Pi 4, LAN", equal(8, "pi4"), LAN),
    Setting("8 Pi 4, Wi-Fi", equal(8, "pi4"), WIFI),
    Setting("8 Pi 4, pairs", equal(8, "pi4"), FAR, 2, CABLE),
    Setting("8 Pi 4, fours", equal(8, "pi4"), FAR, 4, CABLE),
    Setting("8 measured, unequal, Wi-Fi", (4.0, 8.0, 6.0, 5.0, 7.0, 4.0, 9.0, 6.0), WIFI),
    Setting("8 measured, thin", equal(8, 6.0), THIN),
    Setting("10 Pi 4, pairs", equal(10, "pi4"), FAR, 2, CABLE),
    Setting("12 Pi 4, Wi-Fi", equal(12, "pi4"), WIFI),
    Setting("12 measured, threes", equal(12, 8.0), FAR, 3, CABLE),
    Setting("12 measured, unequal, far", tuple(5.0 + i % 4 for i in range(12)), FAR),
    Setting("14 unequal, Wi-Fi", (*equal(7, "pi4"), *equal(7, "pi5")), WIFI),
    Setting("16 Pi 4, fours", equal(16, "pi4"), FAR, 4, CABLE),
    Setting("16 measured, Wi-Fi", equal(16, 8.0), WIFI),
)
# Pairs, for groups of requests.
PAIRS = (
    Setting("2 Pi 5, 5 ms, 1 Gbit/s", equal(2, "pi5"), {"delay_ms": 5, "bandwidth_mbps": 1000}),
    Setting("2 Pi 5, 5 ms, 100 Mbit/s", equal(2, "pi5"), {"delay_ms": 5, "bandwidth_mbps": 100}),
    Setting("2 mini PCs, 5 ms, 1 Gbit/s", equal(2, "mini-pc"), {"delay_ms": 5, "bandwidth_mbps": 1000}),
    Setting("2 mini PCs, 5 ms, 100 Mbit/s", equal(2, "mini-pc"), {"delay_ms": 5, "bandwidth_mbps": 100}),
    Setting("2 Pi 5, LAN", equal(2, "pi5"), LAN),
)
TINY = Setting("two on loopback", ("pi5", 1.0), {})


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--only", metavar="TEXT", help="settings whose name has it")
    parser.add_argument(
        "--requests", type=int, default=0, metavar="N", help="that come at random, for percentiles (default: none)"
    )
    bench(parser, Section(measure, text))


def measure(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """All settings."""
    from edge.models.presets import SHAPES
    from edge.models.synth import outline

    if not args.tiny and os.geteuid() != 0:
        raise SystemExit("links between devices need root; --tiny goes without")
    settings, with_groups = (
        [TINY] if args.tiny else [one for one in some if (args.only or "") in one.name] for some in (SETTINGS, PAIRS)
    )
    model, rows, n_requests = folder / f"{MODEL}.gguf", [], 4 if args.tiny else args.requests
    outline(model, SHAPES["qwen2.5-0.5b" if args.tiny else MODEL])
    for setting in settings:
        print(setting.name, file=sys.stderr)
        rows.append(measured(setting, model, args.tiny, n_requests))
    groups = []
    for setting in with_groups:
        print(setting.name, file=sys.stderr)
        groups.append(measured(setting, model, args.tiny, n_requests, in_groups=True))
    return {"settings": rows, "summary": summary(rows) if rows else None, "groups": groups}


def profiles_of(setting: Setting, model: Path) -> list[dict[str, Any]]:
    """Return the profile of each device: a preset, or one with the uneven figures that a survey measures."""
    from dataclasses import replace

    from devices.catalog import CATALOG
    from partition.predict.part_times import profile_json
    from partition.predict.presets import PartSizes, preset_speed
    from partition.predict.speeds import Curve
    from quant.gguf.file import GgufFile

    sizes, noise, found = PartSizes.from_file(GgufFile.open(model)), random.Random(setting.name), []
    for device in setting.devices:
        if isinstance(device, str):
            found.append({"preset": device})
            continue
        speed = preset_speed(CATALOG["pi5"], sizes, "profile", "profile").times(device)
        rows = [(n, seconds * noise.uniform(1.0, 1.1)) for n, seconds in speed.layer_s.points]
        layer = Curve(tuple(rows))
        half = Curve(tuple((n, seconds * noise.uniform(0.52, 0.58)) for n, seconds in rows))
        speed = replace(speed, layer_s=layer, half_layer_s=half, step_s=Curve(((1, noise.uniform(1e-3, 3e-3)),)))
        found.append(profile_json(speed, sizes))
    return found


def measured(setting: Setting, model: Path, tiny: bool, requests: int, *, in_groups: bool = False) -> dict[str, Any]:
    """One setting: every plan that was run, or one plan with its requests in one group and in two. requests: that come
    at random to each plan."""
    from devices.lab.config import parse_lab
    from tests.support.lab import Lab

    names = ["own", *(f"d{i}" for i in range(1, len(setting.devices)))]
    profiles = profiles_of(setting, model)
    devices = [
        {"name": name, "compute": "sleep", "profile": json.dumps(profile), "threads": 1}
        for name, profile in zip(names, profiles, strict=True)
    ]
    lab: dict[str, Any] = {"device": devices}
    if setting.link:
        lab["link"] = [dict(setting.link), *pairs(names, setting)]
    with tempfile.TemporaryDirectory() as folder, Lab(parse_lab(lab), Path(folder) / "lab") as up:
        asked = {
            "model": str(model),
            "tiny": tiny,
            "requests": requests,
            "in_groups": in_groups,
            "profiles": profiles,
            "names": names,
            "workers": [up.addresses[name] for name in names[1:]],
            "memory": _BESIDE_BYTES + int(_SHARE * model.stat().st_size / len(names)),
            **link_kinds(setting),
        }
        state = {**os.environ, "XDG_STATE_HOME": f"{folder}/state"}  # links of another setting are forgotten
        command = up.command("own", [sys.executable, str(SIDE), json.dumps(asked)])
        done = subprocess.run(command, cwd=ROOT, env=state, stdout=subprocess.PIPE, timeout=RUN_S, check=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return {"name": setting.name, "devices": setting.devices, "link": dict(setting.link), **result}


def pairs(names: Sequence[str], setting: Setting) -> list[dict[str, Any]]:
    """Return the links of devices that are near each other."""
    near = []
    for i, a in enumerate(names):
        for j in range(i + 1, len(names)):
            if setting.groups and i // setting.groups == j // setting.groups:
                near.append({**setting.near, "between": [a, names[j]]})
    return near


def link_kinds(setting: Setting) -> dict[str, Any]:
    """Return the kind of the link between any two devices, and a link of each kind: not all need to be measured."""
    n = len(setting.devices)
    near = [[bool(setting.groups) and i // setting.groups == j // setting.groups for j in range(n)] for i in range(n)]
    kinds = [[int(bool(setting.groups) and not near[i][j]) for j in range(n)] for i in range(n)]
    return {"kinds": kinds, "pairs": [[0, 1], [0, setting.groups]] if setting.groups else [[0, 1]]}


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Errors of all predictions, and how far the plan that was chosen is from the best measured."""
    errors: dict[str, list[float]] = {"latency_s": [], "throughput_per_s": []}
    behind: dict[str, list[float]] = {"latency": [], "throughput": []}
    for row in rows:
        for plan in row["plans"]:
            for name, values in errors.items():
                values.append(abs(plan["measured"][name] / plan["predicted"][name] - 1))
        for axis, name, sign in (("latency", "latency_s", 1), ("throughput", "throughput_per_s", -1)):
            figures = {plan["key"]: plan["measured"][name] ** sign for plan in row["plans"]}
            behind[axis].append(figures[row["best"][axis]] / min(figures.values()))
    return {
        "settings": len(rows),
        "plans": sum(len(row["plans"]) for row in rows),
        "errors": {name: {"median": statistics.median(of), "worst": max(of)} for name, of in errors.items()},
        "chosen_over_best": {axis: {"median": statistics.median(of), "worst": max(of)} for axis, of in behind.items()},
    }


def text(r: dict[str, Any]) -> str:
    """The result as Markdown."""
    texts = ([text_of_plans(r)] if r["settings"] else []) + ([text_of_groups(r["groups"])] if r["groups"] else [])
    return "\n\n".join(texts)


def text_of_groups(rows: list[dict[str, Any]]) -> str:
    """Tokens a second of each setting with one group and with two."""
    lines = []
    for row in rows:
        few, many, two = row["cases"]
        rates = [f"{case['measured_per_s']:.2f} ({case['predicted_per_s']:.2f})" for case in (few, many, two)]
        gains = [two["measured_per_s"] / case["measured_per_s"] for case in (few, many)]
        lines.append([row["name"], str(few["requests"]), *rates, *(f"{gain:.2f}" for gain in gains)])
    columns = ["tokens/s (predicted) of n requests", "of 2 n in one group", "in two", "of n", "of 2 n in one"]
    return table(["setting", "n", *columns], lines)


def text_of_plans(r: dict[str, Any]) -> str:
    """Plans, predicted and measured."""
    found = r["summary"]
    lines = [
        [
            f"{row['name']}: {shape_text(plan)}{mark(row, plan)}",
            f"{1e3 * plan['measured']['latency_s']:.0f}",
            f"{plan['measured']['latency_s'] / plan['predicted']['latency_s'] - 1:+.0%}",
            f"{plan['measured']['throughput_per_s']:.2f}",
            f"{plan['measured']['throughput_per_s'] / plan['predicted']['throughput_per_s'] - 1:+.0%}",
        ]
        for row in r["settings"]
        for plan in row["plans"]
    ]
    words = [f"{found['settings']} settings, {found['plans']} plans."]
    for name, of in found["errors"].items():
        words.append(f"{name}: off by {of['median']:.1%} in the median, {of['worst']:.1%} at worst.")
    for axis, of in found["chosen_over_best"].items():
        words.append(
            f"Chosen by {axis} over the best measured: {of['median']:.3f} in the median, {of['worst']:.3f} at worst."
        )
    header = ["setting: ranks of each stage", "token, ms", "off by", "tokens/s of 4", "off by"]
    return f"{table(header, lines)}\n\n" + "\n".join(words) + percentiles_text(r)


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
                        taken = served[key]["measured"][p]
                        cells.append(f"{1e3 * taken:.0f} ms ({taken / served[key]['simulated'][p] - 1:+.0%})")
                lines.append([f"{row['name']}: {shape_text(plan)}", f"{served['rate_per_s']:.3f}", *cells])
    return f"\n\n{table(header, lines)}" if lines else ""


def shape_text(plan: dict[str, Any]) -> str:
    """Return the ranks of each stage, such as 2+1+1."""
    return "+".join(map(str, plan["widths"]))


def mark(row: dict[str, Any], plan: dict[str, Any]) -> str:
    """Return for which objectives a plan was chosen."""
    axes = [axis for axis, key in row["best"].items() if key == plan["key"]]
    return f" ({', '.join(axes)})" if axes else ""


if __name__ == "__main__":
    main()
