"""Time to first token of a long prompt if other devices compute the prompt than the answer.

    python benchmarks/bench_phases.py [--only strong|equal] [--model FILE] [--rounds N] [--json [FILE]] [--tiny]

| section | devices of the lab                                                                                |
| strong  | this device with 0.3 cores generates; one with 1.5 cores, 1 Gbit/s away, computes prompts         |
| equal   | two devices with 0.9 cores each, 5 ms and 100 Mbit/s apart: one generates, both compute prompts   |

The worker is a real worker in the lab, behind the lab's links; the owner is a process in a control group. Plans are
loaded one after the other. The planner places prompts where it predicts the first token soonest. A request is a prompt
of 1,000 random tokens and 16 more tokens. Times are medians of all rounds; the table also shows the times that are
predicted from measurements of these devices. Needs root. The default model is a file with Qwen2.5-0.5B's shape and
random weights in Q4_0.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.beside_worker import beside_worker
from benchmarks.harness import Section, bench, parser_of, table
from edge.models import synth
from edge.models.demo import MODEL_PATH
from edge.models.synth import SHAPES

SHAPE = "qwen2.5-0.5b"
SETTINGS: dict[str, dict[str, Any]] = {
    # least: how many times as soon the first token is to come; shares: of the prompt's layers, the owner's first, where
    # the planner would compute them on one device
    "strong": {
        "own": 0.3, "other": 1.5, "link": {"delay_ms": 0.2, "bandwidth_mbps": 1000}, "shares": [0, 1], "least": 3.0,
    },
    "equal": {
        "own": 0.9, "other": 0.9, "link": {"delay_ms": 5, "bandwidth_mbps": 100}, "shares": [1, 1], "least": 1.6,
    },
}  # fmt: skip


def main() -> None:
    parser = parser_of(__doc__, SETTINGS, rounds=3)
    parser.add_argument("--model", type=Path, help=f"GGUF file (default: a random one of the shape {SHAPE})")
    bench(parser, {name: Section(partial(measured, name), text) for name in SETTINGS}, prepare)


def prepare(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Make the model."""
    if args.tiny:
        args.model = MODEL_PATH
    elif args.model is None:
        args.model = folder / "model.gguf"
        synth.synthesize(args.model, SHAPES[SHAPE], "q4_0")
    return {"model": args.model.name}


def measured(name: str, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """One setting."""
    setting = SETTINGS[name]
    work = {
        "model": str(args.model.resolve()),
        "shares": setting["shares"],
        "prompt": 64 if args.tiny else 1000,
        "rounds": 1 if args.tiny else args.rounds,
    }
    cores = {key: setting[key] for key in ("own", "other")}
    plans: dict[str, dict[str, Any]] = beside_worker(
        "phases_side", work, folder, link=setting["link"], tiny=args.tiny, **cores
    )
    return {"plans": plans, "least": setting["least"], "ratio": plans["one"]["ttft_s"] / plans["phases"]["ttft_s"]}


def text(r: dict[str, Any]) -> str:
    """The result as Markdown."""
    lines = [
        [
            name,
            " + ".join(map(str, plan["layers"])),
            *(f"{plan[key]:.2f}" for key in ("ttft_s", "predicted_ttft_s")),
            f"{1e3 * plan['token_s']:.0f}",
        ]
        for name, plan in r["plans"].items()
    ]
    planned = "chooses" if r["plans"]["phases"]["is_planned"] else "does not choose"
    header = ["plan", "layers for prompts", "first token, s", "predicted, s", "ms a token"]
    ratio = f"The first token comes {r['ratio']:.2f} times as soon; asked is {r['least']}."
    return f"{table(header, lines)}\n\n{ratio} The planner {planned} another placement for prompts here."


if __name__ == "__main__":
    main()
