"""Replicas on labs of sleeping devices: seeded settings of 3 to 8 devices, and the figures of their plans."""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from benchmarks.harness import ROOT, STDOUT, LeftOut, table, write_json
from benchmarks.sleeping_labs import FAR, LAN, THIN, WIFI, Setting, lab_of, link_kinds, names_of, profiles_of

SIDE = ROOT / "benchmarks" / "replicas_lab_side.py"
MODEL = "tinyllama-1.1b"
STREAMS = 8
MOST_WAITED = (
    0.1  # largest part of the time that a rank may wait for a core of this machine; other figures do not count
)
_LIMIT_S = 900.0  # of a setting
_BESIDE_BYTES = 240 << 20  # memory of a process and a KV cache
_ROOMS = (1.3, 1.3, 1.3, 0.6)  # models that a device other than the owner's has room for; one of these
_OWN_ROOM = 0.35  # the owner's device has no copy of its own, because it sleeps only as a rank
_FIGURES = ("latency_s", "throughput_per_s")


@dataclass(frozen=True)
class ReplicasSetting(Setting):
    """A lab, and the memory of its devices."""

    rooms: tuple[float, ...] = ()  # models that each device has room for


def settings(n: int, seed: int) -> list[ReplicasSetting]:
    """Return settings of 3 to 8 devices."""
    choice = random.Random(seed)
    links = {"LAN": LAN, "Wi-Fi": WIFI, "far": FAR, "thin link": THIN}
    result = []
    for i in range(n):
        n_devices = 3 + i % 6
        link = choice.choice(list(links))
        presets = ("pi4", "pi5", "phone", "mini-pc")
        devices: tuple[str | float, ...] = tuple(choice.choice(presets) for _ in range(n_devices))
        if i % 2:  # profiles like those of a survey
            devices = tuple(round(choice.uniform(0.5, 4.0), 1) for _ in range(n_devices))
        rooms = (_OWN_ROOM, *(choice.choice(_ROOMS) for _ in range(n_devices - 1)))
        result.append(ReplicasSetting(f"{i}: {n_devices} devices, {link}", devices, links[link], rooms=rooms))
    return result


def chosen_settings(args: argparse.Namespace) -> list[ReplicasSetting]:
    """Return the settings of the command line."""
    numbers = range(args.settings) if args.numbers is None else args.numbers
    every = settings(max(numbers, default=-1) + 1, args.seed)
    return [every[number] for number in numbers]


TINY = ReplicasSetting("two on loopback", ("pi5", "pi5", "pi5"), {}, rooms=(_OWN_ROOM, 1.3, 1.3))


def lab(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Return the predicted and measured figures of the plans of each setting. A file of figures is written after each
    setting.
    """
    from edge.models.synth import SHAPES, outline

    if not args.tiny and os.geteuid() != 0:
        raise LeftOut("links between devices need root")
    model = folder / f"{MODEL}.gguf"
    outline(model, SHAPES["qwen2.5-0.5b" if args.tiny else MODEL])
    rows: list[dict[str, Any]] = []
    failed: dict[str, str] = {}
    figures: dict[str, Any] = {}
    for setting in [TINY] if args.tiny else chosen_settings(args):
        try:
            rows.append(_measured(setting, model, args))
        except (subprocess.SubprocessError, OSError, ValueError, RuntimeError) as error:
            failed[setting.name] = f"{error}"[-300:]
        print(f"{setting.name}: {_progress(rows, failed, setting.name)}", file=sys.stderr, flush=True)
        figures = {"settings": rows, "summary": summary(rows), "failed": failed}
        if args.json != STDOUT:
            write_json({"lab": figures}, args.json)
    return figures


def _measured(setting: ReplicasSetting, model: Path, args: argparse.Namespace) -> dict[str, Any]:
    from devices.lab.config import parse_lab
    from tests.support.lab import Lab

    stretch = 1 if args.tiny else args.stretch
    profiles, names = profiles_of(setting, model, stretch), names_of(setting)
    n_bytes = model.stat().st_size
    config = parse_lab(lab_of(setting, profiles, stretch))
    with tempfile.TemporaryDirectory() as name, Lab(config, Path(name) / "lab") as up:
        target = {
            "model": str(model),
            "tiny": args.tiny,
            "streams": STREAMS,
            "folder": name,
            "profiles": profiles,
            "names": names,
            "workers": [up.addresses[name] for name in names[1:]],
            "memory": [_BESIDE_BYTES + int(room * n_bytes) for room in setting.rooms],
            "supervisor": psutil.Process(up.pid("own")).ppid(),
            **link_kinds(setting),
        }
        env = {**os.environ, **{f"XDG_{kind}_HOME": f"{name}/{kind.lower()}" for kind in ("STATE", "CONFIG")}}
        command = up.command("own", [sys.executable, str(SIDE), json.dumps(target)])
        done = subprocess.run(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, timeout=_LIMIT_S, check=True)
    best, *plans = (json.loads(line) for line in done.stdout.splitlines())
    for plan in plans:
        for figures in (plan["predicted"], plan["measured"]):
            figures["latency_s"] /= stretch
            figures["throughput_per_s"] *= stretch
    return {
        "name": setting.name, "devices": setting.devices, "rooms": setting.rooms, "link": dict(setting.link),
        "stretch": stretch, "best": best["best"], "best_over_chosen": best_over_chosen(best["best"], plans),
        "plans": plans,
    }  # fmt: skip


def best_over_chosen(chosen: str, plans: Sequence[dict[str, Any]]) -> float | None:
    """Return the throughput of the best measured plan over that of the chosen one; None if it does not count.

    chosen: key of the plan.
    """
    rates = {plan["key"]: plan["measured"]["throughput_per_s"] for plan in plans if plan["waited"] <= MOST_WAITED}
    return float(max(rates.values()) / rates[chosen]) if chosen in rates and len(rates) > 1 else None


def _progress(rows: Sequence[dict[str, Any]], failed: dict[str, str], setting: str) -> str:
    if setting in failed:
        return failed[setting]
    plans = "; ".join(
        f"{plan['plan']}: {', '.join(f'{_error(plan, name):+.1%}' for name in _FIGURES)} (waited {plan['waited']:.0%})"
        for plan in rows[-1]["plans"]
    )
    behind = rows[-1]["best_over_chosen"]
    return plans if behind is None else f"{plans}; best over chosen: {behind:.3f}"


def _error(plan: dict[str, Any], figure: str) -> float:
    return float(plan["measured"][figure] / plan["predicted"][figure] - 1)


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the errors of predictions, and the throughput of the best measured plan over that of the chosen one."""
    plans = [plan for row in rows for plan in row["plans"]]
    counted = [plan for plan in plans if plan["waited"] <= MOST_WAITED]
    kinds = {kind: [plan for plan in counted if plan["kind"] == kind] for kind in sorted({p["kind"] for p in counted})}
    behind = [row["best_over_chosen"] for row in rows if row["best_over_chosen"] is not None]
    return {
        "settings": len(rows),
        "plans": len(plans),
        "rejected": len(plans) - len(counted),
        "errors": _errors(counted),
        "kinds": {kind: _errors(of_kind) for kind, of_kind in kinds.items()},
        "best_over_chosen": _median_and_worst(behind) if behind else None,
    }


def _errors(plans: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    return {name: _median_and_worst([abs(_error(plan, name)) for plan in plans]) for name in _FIGURES if plans}


def _median_and_worst(values: Sequence[float]) -> dict[str, float]:
    return {"median": median(values), "worst": max(values), "n": len(values)}


def lab_text(figures: dict[str, Any]) -> str:
    rows = [
        [
            f"{row['name']}: {plan['plan']}{' (chosen)' if plan['key'] == row['best'] else ''}",
            f"{plan['measured']['latency_s'] * 1e3:.0f}",
            f"{_error(plan, 'latency_s'):+.1%}",
            f"{plan['measured']['throughput_per_s']:.2f}",
            f"{_error(plan, 'throughput_per_s'):+.1%}",
            f"{plan['waited']:.0%}",
        ]
        for row in figures["settings"]
        for plan in row["plans"]
    ]
    header = ["setting: copies", "token, ms", "off by", f"tokens/s of {STREAMS}", "off by", "waited"]
    total = figures["summary"]
    lines = [
        f"{kind}, {name}: off by {errors['median']:.1%} in the median, {errors['worst']:.1%} at worst of {errors['n']}"
        for kind, of_kind in {"all": total["errors"], **total["kinds"]}.items()
        for name, errors in of_kind.items()
    ]
    if behind := total["best_over_chosen"]:
        lines.append(
            f"best measured plan over the chosen one: {behind['median']:.3f} in the median, {behind['worst']:.3f} at"
            f" worst of {behind['n']} settings"
        )
    lines.append(f"{total['settings']} settings, {total['plans']} plans, {total['rejected']} of them rejected")
    lines += [f"{name} failed: {error}" for name, error in figures["failed"].items()]
    return table(header, rows) + "\n\n" + "\n".join(lines)
