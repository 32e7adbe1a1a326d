"""Accuracy of predictions: plans of a language model and of two networks, predicted and then run in a lab.

    python benchmarks/bench_plans.py [--only NAME] [--rounds N] [--json [FILE]] [--tiny]

Each setting is a lab: devices with a share of a core each, and links with a latency and a bandwidth. The owner surveys
the devices and predicts plans. The benchmark runs the best plan of each kind by latency and by throughput, the plan
that --parallel auto chooses, and each device alone. Needs root, for shares of cores. --tiny: one setting on this
machine without a lab.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import ROOT, Section, bench, parser_of, table

SIDE = ROOT / "benchmarks" / "plans_side.py"
RUN_S = 1200.0  # for one setting


@dataclass(frozen=True)
class Setting:
    """A lab, and what runs there."""

    name: str
    model: str  # llm, mobilenet_v2 or resnet18
    cores: tuple[float, ...]  # the owner's first
    link: Mapping[str, Any] | None = None  # between all; None: loopback
    near: tuple[tuple[str, str], ...] = ()  # pairs with a link of PAIR instead; the owner is "own", others d1, d2 ...


FAR = {"delay_ms": 10}
NEAR = {"delay_ms": 2}
THIN = {"delay_ms": 1, "bandwidth_mbps": 20}
BOTH = {"delay_ms": 10, "bandwidth_mbps": 20}
APART = {"delay_ms": 4, "bandwidth_mbps": 100}
PAIR = {"delay_ms": 0.05}
SETTINGS = (
    Setting("two alike", "llm", (0.6, 0.6)),
    Setting("a slow second", "llm", (0.8, 0.4)),
    Setting("a slow owner", "llm", (0.4, 0.8)),
    Setting("three", "llm", (0.5, 0.3, 0.3)),
    Setting("four", "llm", (0.4, 0.25, 0.25, 0.2)),
    Setting("2 ms", "llm", (0.6, 0.6), NEAR),
    Setting("10 ms", "llm", (0.4, 0.8), FAR),
    Setting("20 Mbit/s", "llm", (0.6, 0.6), THIN),
    Setting("three, 10 ms, 20 Mbit/s", "llm", (0.5, 0.5, 0.4), BOTH),
    Setting("pairs, 4 ms apart", "llm", (0.4, 0.4, 0.4, 0.4), APART, (("own", "d1"), ("d2", "d3"))),
    Setting("two alike", "mobilenet_v2", (0.5, 0.5)),
    Setting("three, 10 ms, 20 Mbit/s", "mobilenet_v2", (0.5, 0.4, 0.4), BOTH),
    Setting("a slow second", "resnet18", (0.6, 0.3)),
    Setting("three, 10 ms", "resnet18", (0.4, 0.5, 0.3), FAR),
)
BATCHES = {"mobilenet_v2": 16, "resnet18": 8}  # so that a stage takes many periods of a quota


def main() -> None:
    parser = parser_of(__doc__, rounds=2)
    parser.add_argument("--only", metavar="TEXT", help="settings whose name or model has it")
    bench(parser, Section(measure, text))


def measure(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """All settings."""
    if not args.tiny and os.geteuid() != 0:
        raise SystemExit("shares of cores need root; --tiny goes without")
    if args.tiny:
        args.rounds = 1
    settings = [Setting("as it is", "llm", (0, 0))] if args.tiny else SETTINGS
    if args.only:
        settings = [item for item in settings if args.only in f"{item.model} {item.name}"]
    models, rows = Models(folder, args.tiny), []
    for setting in settings:
        print(f"{setting.model}: {setting.name}", file=sys.stderr)
        rows.append(measured(setting, models, args))
    return {"settings": rows, "summary": summary(rows)}


class Models:
    """The files, made when they are needed."""

    def __init__(self, folder: Path, tiny: bool) -> None:
        self.folder, self._tiny = folder, tiny

    def path(self, name: str) -> Path:
        from edge.models import synth
        from edge.models.demo import MODEL_PATH
        from edge.models.synth import SHAPES

        if name == "llm":
            if self._tiny:
                return MODEL_PATH
            path = self.folder / "llm.gguf"
            if not path.exists():
                synth.synthesize(path, SHAPES["tinyllama-1.1b"])
            return path
        import onnx

        from tests.support import onnx_networks

        path = self.folder / f"{name}.onnx"
        if not path.exists():
            onnx.save(getattr(onnx_networks, name)(BATCHES[name], 224), str(path))
        return path


def measured(setting: Setting, models: Models, args: argparse.Namespace) -> dict[str, Any]:
    """One setting: every plan that was run, and each device alone."""
    from devices.lab.config import parse_lab
    from devices.lab.control_group import remove_groups
    from tests.support.lab import Lab

    path = models.path(setting.model)
    workers: list[dict[str, Any]] = [
        {"name": f"d{i}", "threads": 1, "models": str(path.parent), **({"cpu": share} if share else {})}
        for i, share in enumerate(setting.cores[1:], 1)
    ]
    lab: dict[str, Any] = {"device": [{"name": "own"}, *workers]}
    if setting.link is not None:
        lab["link"] = [dict(setting.link), *({**PAIR, "between": list(pair)} for pair in setting.near)]
    target = {"model": str(path), "rounds": args.rounds, "tiny": args.tiny}
    with tempfile.TemporaryDirectory() as folder, Lab(parse_lab(lab), Path(folder) / "lab") as up:
        kind = "llm" if setting.model == "llm" else "onnx"
        addresses = [up.addresses[worker["name"]] for worker in workers]
        result = _side(up, target | {"kind": kind, "workers": addresses, "cores": setting.cores[0]}, folder)
        shares = sorted(set(setting.cores))
        alone = {share: _side(up, target | {"kind": "alone", "cores": share}, folder)["latency_s"] for share in shares}
    remove_groups("edge-plans-")
    return {
        "name": setting.name,
        "model": setting.model,
        "cores": setting.cores,
        "link": dict(setting.link or {}),
        **result,
        "alone_s": {str(share): statistics.median(values) for share, values in alone.items()},
    }


def _side(up: Any, target: dict[str, Any], folder: str) -> dict[str, Any]:
    state = {**os.environ, "XDG_STATE_HOME": folder}  # nothing is remembered from another setting
    command = up.command("own", [sys.executable, str(SIDE), json.dumps(target)])
    done = subprocess.run(command, cwd=ROOT, env=state, stdout=subprocess.PIPE, timeout=RUN_S, check=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def _ratio(plan: dict[str, Any], name: str) -> float | None:
    """Predicted over the median of what was measured."""
    values = [item.get(name) for item in plan["measured"]]
    predicted = plan["predicted"].get(name)
    return None if predicted is None or None in values else predicted / statistics.median(values)


def _latency_s(plan: dict[str, Any]) -> float:
    return statistics.median(item["latency_s"] for item in plan["measured"])


def _best_single_s(row: dict[str, Any]) -> float:
    """Return the owner's seconds from the best device alone: from another one with the way there and back."""
    own, *others = row["cores"]
    ways_s = 2e-3 * row["link"].get("delay_ms", 0)
    here = [_latency_s(plan) for plan in row["plans"] if plan["parallel"] == "single"] or [row["alone_s"][str(own)]]
    return min(*here, *(row["alone_s"][str(share)] + ways_s for share in others))


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Errors of all predictions; how far what was chosen is from the best measured; and from the best single device."""
    errors: dict[str, list[float]] = {}
    behind, baseline = [], []
    for row in rows:
        for plan in row["plans"]:
            for name in ("latency_s", "throughput_per_s", "ttft_s"):
                if (ratio := _ratio(plan, name)) is not None:
                    errors.setdefault(name, []).append(abs(ratio - 1))
        latency = {plan["plan"]: _latency_s(plan) for plan in row["plans"]}
        chosen = next(latency[plan["plan"]] for plan in row["plans"] if plan["chosen"])
        behind.append(chosen / min(latency.values()))
        baseline.append(chosen / _best_single_s(row))
    return {
        "settings": len(rows),
        "errors": {
            name: {"median": statistics.median(error), "worst": max(error), "n": len(error)}
            for name, error in errors.items()
        },
        "chosen_over_best_measured": {"median": statistics.median(behind), "worst": max(behind)},
        "chosen_over_best_single": {"median": statistics.median(baseline), "worst": max(baseline)},
    }


def text(r: dict[str, Any]) -> str:
    """The result as Markdown."""
    result = r["summary"]
    lines = [f"{result['settings']} settings."]
    for name, error in result["errors"].items():
        lines.append(
            f"{name}: off by {error['median']:.1%} in the median, {error['worst']:.1%} at worst, of {error['n']}."
        )
    for name in ("chosen_over_best_measured", "chosen_over_best_single"):
        lines.append(f"{name}: {result[name]['median']:.3f} in the median, {result[name]['worst']:.3f} at worst.")
    return "\n\n".join([*map(_setting_text, r["settings"]), "\n".join(lines)])


def _setting_text(row: dict[str, Any]) -> str:
    link = ", ".join(f"{value:g} {name}" for name, value in row["link"].items()) or "loopback"
    lines = []
    for plan in row["plans"]:
        rate = statistics.median(item["throughput_per_s"] for item in plan["measured"])
        lines.append(
            [
                f"{plan['plan'].replace('|', '/')}{' (auto)' if plan['chosen'] else ''}",
                f"{1e3 * _latency_s(plan):.1f}",
                f"{_ratio(plan, 'latency_s'):.2f}",
                f"{rate:.2f}",
                f"{_ratio(plan, 'throughput_per_s'):.2f}",
            ]
        )
    alone = ", ".join(f"{share} cores {1e3 * value:.1f} ms" for share, value in row["alone_s"].items())
    return "\n\n".join(
        [
            f"### {row['model']}: {row['name']}",
            f"Cores {', '.join(map(str, row['cores']))}; {link}. {row['why']}",
            table(["plan", "latency, ms", "predicted", "throughput/s", "predicted"], lines),
            f"Alone: {alone}.",
        ]
    )


if __name__ == "__main__":
    main()
