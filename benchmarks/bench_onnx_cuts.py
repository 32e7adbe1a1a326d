"""Every cut of a network between two emulated devices: what stages and links take alone, what that lets expect, and
what the pipeline gives. Beside it the cost of the wire: an activation as an item, and as a bare TCP copy.

    python benchmarks/bench_onnx_cuts.py [--only cuts|gain|delay|thin|wire] [--rounds 3] [--json]

cuts    MobileNetV2 and ResNet18 on two devices of half a core each, loopback between them
gain    their balanced cuts with twice the batch, where resting in between matters half as much
delay   the same with 200 ms on every way and no limit of bandwidth, beside loopback
thin    the same with 5 Mbit/s between the two devices, beside loopback
wire    1 MiB of floats from one process to another

Sequential is one input after the other through the same two stages; both are measured for each cut in turn, in every
round. The batch is large enough that a stage takes several periods of its CPU quota (10 ms): what takes less is not
slowed down by one where it can rest in between. Control groups and, for delay and thin, network namespaces need root.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from onnx_cuts_tables import table
from onnx_wire import wire

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # for the test suite's networks

SIDE = Path(__file__).with_name("onnx_cuts_side.py")
SECTIONS = ("cuts", "gain", "delay", "thin", "wire")
RUN_S = 1800.0
BATCHES = {"mobilenet_v2": 8, "resnet18": 4}
BALANCED = {"mobilenet_v2": "features.6", "resnet18": "layer2.1"}  # half of the time is before it
TINY = "features.6,features.14"
_DELAY_S, _THIN_BYTES_PER_S = 0.2, 5e6 / 8
_MOST_THIN_S = 1.3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=SECTIONS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=8, help="inputs that each measurement counts")
    parser.add_argument("--tiny", action="store_true", help="for CI: small pictures, few cuts")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.tiny:
        args.rounds, args.repeats = 1, 2
    result: dict[str, Any] = {"cpu_count": os.cpu_count(), "python": platform.python_version(), "versions": _versions()}
    wanted = SECTIONS if args.only is None else (args.only,)
    if set(wanted) & {"cuts", "thin"}:
        result["cuts"] = cuts(args, ("mobilenet_v2",) if args.tiny or args.only == "thin" else tuple(BATCHES))
    if "gain" in wanted and not args.tiny:
        twice = {name: 2 * batch for name, batch in BATCHES.items()}
        result["gain"] = {
            name: {"batch": batch, **_judged(_sweep(args, name, BALANCED[name], batch=batch))}
            for name, batch in twice.items()
        }
    if "delay" in wanted:
        near = result["cuts"]["mobilenet_v2"]["rows"][0] if "cuts" in result and args.tiny else _balanced(args, None)
        result["delay"] = delay(args, near)
    if "thin" in wanted:
        result["thin"] = thin(args)
    if "wire" in wanted:
        result["wire"] = wire(1 << 20, 5 if args.tiny else 50, 1 if args.tiny else 8)
    print(json.dumps(result) if args.json else table(result))


def cuts(args: argparse.Namespace, networks: Sequence[str]) -> dict[str, Any]:
    """Networks on two devices of half a core, without shaped links."""
    which = TINY if args.tiny else "blocks"
    return {name: {"batch": BATCHES[name], **_judged(_sweep(args, name, which))} for name in networks}


def delay(args: argparse.Namespace, plain: dict[str, Any]) -> dict[str, Any]:
    """A balanced cut with a delay on every way, beside what it gives without."""
    delay_s = 0.01 if args.tiny else _DELAY_S
    far = _balanced(args, {"delay_ms": 1e3 * delay_s})
    return {
        "delay_s": delay_s,
        "crossings": 3,
        "plain": plain,
        "far": far,
        "latency_grew_by_delays": (far["latency_s"] - plain["latency_s"]) / delay_s,
        "throughput_ratio": far["measured_per_s"] / plain["measured_per_s"],
    }


def _balanced(args: argparse.Namespace, link: Mapping[str, Any] | None) -> dict[str, Any]:
    return _medians(_sweep(args, "mobilenet_v2", BALANCED["mobilenet_v2"], link))[0]


def thin(args: argparse.Namespace) -> dict[str, Any]:
    """All cuts with a thin link between the devices, but those that take longer than _MOST_THIN_S to cross it: others
    are over by then."""
    bytes_per_s = _THIN_BYTES_PER_S * (20 if args.tiny else 1)
    link = {"between": ["a", "b"], "bandwidth_mbps": 8e-6 * bytes_per_s}
    most_bytes = int(bytes_per_s * _MOST_THIN_S)
    rounds = _sweep(args, "mobilenet_v2", TINY if args.tiny else "blocks", link, most_bytes, rounds=1)
    return {"bytes_per_s": bytes_per_s, "left_out_above_bytes": most_bytes, **_judged(rounds)}


def _sweep(
    args: argparse.Namespace,
    network: str,
    which: str,
    link: Mapping[str, Any] | None = None,
    most_bytes: int = 1 << 40,
    rounds: int | None = None,
    batch: int | None = None,
) -> list[list[dict[str, Any]]]:
    """Rounds of what every cut gave, in a lab of two workers of half a core."""
    import onnx

    from devices.lab.config import parse_lab
    from tests.support import onnx_networks
    from tests.support.lab import Lab

    device = {"threads": 1} | ({"cpu": 0.5} if os.geteuid() == 0 else {})
    lab: dict[str, Any] = {"device": [{"name": "a", **device}, {"name": "b", **device}, {"name": "owner-side"}]}
    if link is not None:
        lab["link"] = [dict(link)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{network}.onnx"
        onnx.save(getattr(onnx_networks, network)(batch or BATCHES[network], 32 if args.tiny else 224), str(path))
        with Lab(parse_lab(lab), Path(folder) / "lab") as up:
            asked = {
                "model": str(path),
                "workers": [up.addresses["a"], up.addresses["b"]],
                "cuts": which,
                "repeats": args.repeats,
                "rounds": rounds or args.rounds,
                "most_bytes": most_bytes,
            }
            command = up.command("owner-side", [sys.executable, str(SIDE), json.dumps(asked)])
            done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, timeout=RUN_S, check=True)
    found: list[list[dict[str, Any]]] = json.loads(done.stdout)
    return found


def _medians(rounds: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """One row a cut: the median of each figure over the rounds."""

    def median(values: list[Any]) -> Any:
        if isinstance(values[0], list):
            return [statistics.median(each) for each in zip(*values, strict=True)]
        return statistics.median(values)

    words = ("label", "payload_bytes")
    return [
        {key: cut[0][key] if key in words else median([one[key] for one in cut]) for key in cut[0]}
        for cut in zip(*rounds, strict=True)
    ]


def _judged(rounds: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """All cuts, the best one measured and the best one expected, and how near the two are."""
    rows = _medians(rounds)
    places = range(len(rows))
    best = max(places, key=lambda i: rows[i]["measured_per_s"])
    expected = max(places, key=lambda i: rows[i]["expected_per_s"])
    ratios = [row["measured_per_s"] / row["expected_per_s"] for row in rows]
    gains = [row["measured_per_s"] * row["latency_s"] for row in rows]
    return {
        "rows": rows,
        "best": rows[best]["label"],
        "best_payload_bytes": rows[best]["payload_bytes"],
        "best_expected": rows[expected]["label"],
        "apart": abs(best - expected),
        "measured_of_expected": {"best": ratios[best], "least": min(ratios), "most": max(ratios)},
        "pipelined_over_sequential": {"best": gains[best], "most": max(gains)},
    }


def _versions() -> dict[str, str]:
    import onnx
    import onnxruntime

    return {"onnx": onnx.__version__, "onnxruntime": onnxruntime.__version__}


if __name__ == "__main__":
    main()
