"""Accuracy of `edge advise`: its predicted speeds of six model shapes compared with `edge bench` of their files.

    python benchmarks/bench_advise.py [--only here|lab] [--models A,B] [--files FOLDER] [--json [FILE]] [--tiny]

| section | devices                                                                                             |
| here    | this device, with one thread                                                                        |
| lab     | this device, with one thread, and the two of docs/example-lab.toml; plans may use any of them       |

Each model is predicted and measured right afterwards; no measurement is reused from another model. smollm2-135m has
trained weights, the other files have the published shape and random weights. The lab needs root.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import EDGE, ROOT, LeftOut, Section, bench, parser_of, progress, table

MODELS = {
    "smollm2-135m": "q4_1", "smollm2-360m": "q8_0", "qwen3-0.6b": "q8_0", "gemma-3-1b": "q4_0", "llama-3.2-1b": "q4_0",
    "qwen3-1.7b": "q4_0",
}  # fmt: skip
TRAINED = "smollm2-135m"
PROMPT = 128  # tokens, as `edge advise --task chat` has
_RUN_S = 600.0  # of one command
_RUN = ["--prompt-tokens", f"{PROMPT}", "--gen-tokens", "64", "--context", "4096", "--repeats", "2"]
_TINY = ["--prompt-tokens", "16", "--gen-tokens", "8", "--repeats", "1"]


def main() -> None:
    parser = parser_of(__doc__, SECTIONS)
    parser.add_argument("--models", default=",".join(MODELS), help="of those (default: all six)")
    parser.add_argument("--files", type=Path, metavar="FOLDER", help="keep model files there (default: delete them)")
    bench(parser, SECTIONS, prepare)


def prepare(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Make the files."""
    from tests.real import weights

    args.names = [TRAINED] if args.tiny else args.models.split(",")
    args.files = args.files or folder
    args.files.mkdir(parents=True, exist_ok=True)
    args.edge = [*EDGE[:-1], "tests.support.measuring"] if args.tiny else EDGE
    for name in args.names:
        path = file_of(args, name)
        if name == TRAINED and not args.tiny:
            path.unlink(missing_ok=True)
            path.symlink_to(weights.SMOLLM2.path())
        elif not path.exists():
            edge(args, ["model", "synth", str(path), "--shape", name, "--type", MODELS[name]])
    return {}


def file_of(args: argparse.Namespace, name: str) -> Path:
    """Return the file of a model, made or to be made."""
    return Path(args.files).absolute() / f"{name}-{MODELS[name]}.gguf"


def edge(args: argparse.Namespace, command: Sequence[str]) -> str:
    """Run a command, and return what it printed."""
    return subprocess.run(
        [*args.edge, *command], cwd=ROOT, stdout=subprocess.PIPE, timeout=_RUN_S, check=True, text=True
    ).stdout


def here(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """This device alone."""
    return {"models": [compared(args, name, []) for name in args.names]}


def lab(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """This device and the example lab."""
    from devices.lab.config import read_lab
    from tests.support.lab import Lab

    if os.geteuid() != 0:
        raise LeftOut("the lab's links and shares of cores need root")
    with Lab(read_lab(ROOT / "docs" / "example-lab.toml"), folder / "lab") as up:
        devices = ["--workers", ",".join(up.addresses.values()), *(["--insecure"] if up.shaped else [])]
        return {"models": [compared(args, name, devices) for name in args.names], "not_enforced": up.not_enforced}


def compared(args: argparse.Namespace, name: str, devices: Sequence[str]) -> dict[str, Any]:
    """One model: tokens a second and the first token's time, predicted and measured."""
    own = [*devices, "--threads", "1", "--json"]
    advice = json.loads(edge(args, ["advise", "--models", name, "--types", MODELS[name], *own]))
    [row] = advice["rows"]
    run = json.loads(edge(args, ["bench", str(file_of(args, name)), *(_TINY if args.tiny else _RUN), *own]))
    measured = {
        "tokens_per_s": 1e3 / run["decode_ms_median"],
        "tokens_per_s_p10": 1e3 / run["decode_ms_p10"],
        "ttft_s": run["prompt_tokens"] / run["prefill_tokens_per_s_median"],
    }
    result = {
        "model": name,
        "type": MODELS[name],
        "predicted": {key: row[key] for key in ("tokens_per_s", "ttft_s")},
        "measured": measured,
        "why": row["why"],
        "run_why": run.get("why"),
        "placement": row["placement"],
        "others_cores": run["others_cores"],
        "notes": advice["notes"],
    }
    progress(
        f"{name}: {error(result, 'tokens_per_s'):+.0%} of {measured['tokens_per_s']:.1f} tokens/s,"
        f" {error(result, 'ttft_s'):+.0%} of {measured['ttft_s']:.2f} s; {row['why']}; run: {run.get('why')}"
    )
    return result


def error(row: dict[str, Any], name: str) -> float:
    """Return by what part the prediction is more than what was measured."""
    return float(row["predicted"][name] / row["measured"][name] - 1)


def text(r: dict[str, Any]) -> str:
    """A row for each model, and the medians of the errors' sizes."""
    lines = [
        [
            f"{row['model']}, {row['type']}, {row['placement']}",
            f"{row['predicted']['tokens_per_s']:.1f}",
            f"{row['measured']['tokens_per_s']:.1f}",
            f"{error(row, 'tokens_per_s'):+.0%}",
            f"{row['predicted']['ttft_s']:.2f} s",
            f"{row['measured']['ttft_s']:.2f} s",
            f"{error(row, 'ttft_s'):+.0%}",
        ]
        for row in r["models"]
    ]
    header = ["model", "tokens/s, predicted", "measured", "error", "first token, predicted", "measured", "error"]
    medians = [
        f"{title}: off by {statistics.median(abs(error(row, name)) for row in r['models']):.1%} in the median."
        for title, name in (("Tokens/s", "tokens_per_s"), ("First token", "ttft_s"))
    ]
    return "\n\n".join([table(header, lines), " ".join(medians)])


SECTIONS = {"here": Section(here, text), "lab": Section(lab, text)}

if __name__ == "__main__":
    main()
