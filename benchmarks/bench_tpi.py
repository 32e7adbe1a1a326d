"""Tensor parallelism with paged shards, as in TPI-LLM (arXiv:2410.00531), and two libraries of its paper's comparison.

    python benchmarks/bench_tpi.py [--only lab|ranks|libraries] [--work DIR] [--python PYTHON] [--json [FILE]]

| section   | question                                                                                                |
| lab       | how long do a first token and a token of a 70B shape take on 8 and on 4 devices of 3.1 GB?              |
| ranks     | how much faster are two ranks that page an 8B shape than one device that pages it?                      |
| libraries | within one limit of memory, how long do Transformers, Accelerate with disk offload, and edge take?      |

`lab` runs sleeping devices: each waits as long as its preset computes and reads, and its slice takes no disk space.
Processes, links and all-reduces are real. `ranks` and `libraries` use this machine's disk and drop caches before each
side; their sides are in memory groups (Linux and root). Model files with random weights are written to DIR.
`libraries` needs --python, the interpreter of an environment with torch, transformers, accelerate and gguf. --gguf adds
a model with trained weights. All sides of a model compute with the same weights, dequantized for the libraries.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from benchmarks.harness import GIB, MIB, ROOT, LeftOut, Section, bench, parser_of, progress, table
from benchmarks.lent_device import Worker
from benchmarks.paging_runs import Models, half_of
from benchmarks.processes import Grouped, RankFailed, memory_group
from benchmarks.raw_disk import forget
from benchmarks.sleeping_labs import LAN, Setting, equal, lab_of, names_of
from devices.catalog import CATALOG
from devices.lab.control_group import NoGroups
from edge.models import synth
from edge.models.synth import SHAPES
from partition.model.file import ModelFile
from partition.predict.part_times import profile_json
from partition.predict.presets import PartSizes, preset_speed

SIDE = Path(__file__).with_name("tpi_side.py")
LIBRARY_SIDE = Path(__file__).with_name("library_side.py")
PRESET = "laptop"
DEVICE_BYTES = 3_100_000_000  # memory of a device, from the paper's abstract
STRETCH = 4  # times as slow as its devices and links a lab is; its figures are divided by that
CONTEXT, PROMPT, TOKENS = 128, 32, 6  # tokens; the last are those after the first one
RANK_BYTES = 3 * GIB // 2  # budget of each rank of 8B
DAEMON_BYTES = 128 * MIB  # added for the worker's daemon
RUN_S = 600.0  # time limit of a side


@dataclass(frozen=True)
class Case:
    """A model on which libraries are compared."""

    name: str
    limit: int  # bytes of the memory group of each side
    types: tuple[str, ...]  # types of edge's weights; the libraries have those of the first, dequantized
    small: int  # bytes of a smaller budget, for edge with weights of the last type


SMALL = Case("SmolLM2-135M", 448 * MIB, ("q4_1",), 170 * MIB)
LARGE = Case("1.1B", 1536 * MIB, ("f16", "q4_0"), 450 * MIB)
LIBRARIES, LIBRARY_TYPE = ("transformers", "accelerate"), "bfloat16"


def main() -> None:
    parser = parser_of(__doc__, SECTIONS)
    parser.add_argument("--work", type=Path, metavar="DIR", help="for model files (default: a folder that is deleted)")
    parser.add_argument("--python", type=Path, help="an interpreter that has torch, transformers and accelerate")
    parser.add_argument("--gguf", type=Path, help="trained weights of SmolLM2-135M")
    bench(parser, SECTIONS, prepare)


def prepare(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Choose the folder of model files. Return the load average, because other programs slow all sides down."""
    args.work = args.work or folder / "models"
    args.work.mkdir(parents=True, exist_ok=True)
    args.models = Models(args.work, keep=True)
    return {"load_average": os.getloadavg()[0]}


# --- lab ---


def lab(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Plans of 8 and of 4 sleeping devices, predicted and run."""
    if not args.tiny and os.geteuid() != 0:
        raise LeftOut("links between devices need root")
    model = folder / "model.gguf"
    synth.outline(model, SHAPES["qwen2.5-0.5b" if args.tiny else "llama-3.1-70b"])
    rows = []
    for n in (2,) if args.tiny else (8, 4):
        setting = Setting(f"{n} devices", equal(n, PRESET), {} if args.tiny else LAN)
        rows.append(in_lab(setting, model, model.stat().st_size // 3 + 300 * MIB if args.tiny else DEVICE_BYTES))
        progress(f"{setting.name}: {rows[-1]}")
    return {"preset": PRESET, "stretch": STRETCH, "model_bytes": model.stat().st_size, "labs": rows}


def in_lab(setting: Setting, model: Path, memory: int) -> dict[str, Any]:
    """Return the figures of the fastest plan in which all devices share every layer."""
    from devices.lab.config import parse_lab
    from tests.support.lab import Lab

    sizes, n = PartSizes.from_file(ModelFile.open(model)), len(setting.devices)
    speed = preset_speed(CATALOG[PRESET], sizes, "profile", "profile")
    assert speed.disk_bytes_per_s is not None
    slow = replace(
        speed.times(STRETCH), disk_bytes_per_s=speed.disk_bytes_per_s / STRETCH, memory_bytes=memory, watts=None
    )
    data = lab_of(setting, [profile_json(slow, sizes)] * n, STRETCH)
    for device in data["device"]:
        device["memory"] = f"{memory}B"
    with tempfile.TemporaryDirectory() as name, Lab(parse_lab(data), Path(name) / "lab") as up:
        names = names_of(setting)
        target = {
            "model": str(model), "profile": profile_json(slow, sizes), "names": names, "memory": memory,
            "workers": [up.addresses[device] for device in names[1:]], "context": CONTEXT, "prompt": PROMPT,
            "tokens": TOKENS, "supervisor": psutil.Process(up.pid("own")).ppid(),
        }  # fmt: skip
        own_folders = {f"XDG_{kind}_HOME": f"{name}/{kind.lower()}" for kind in ("STATE", "CONFIG", "CACHE")}
        done = subprocess.run(
            up.command("own", [sys.executable, str(SIDE), json.dumps(target)]), cwd=ROOT,
            env={**os.environ, **own_folders}, stdout=subprocess.PIPE, timeout=RUN_S, check=True,
        )  # fmt: skip
    figures: dict[str, Any] = json.loads(done.stdout)
    for times in (figures["predicted"], figures["measured"]):
        times |= {key: value / STRETCH for key, value in times.items() if key.endswith("_s")}
    return {"name": setting.name, **figures}


def lab_text(r: dict[str, Any]) -> str:
    lines = []
    for row in r["labs"]:
        predicted, measured = row["predicted"], row["measured"]
        lines.append(
            [
                f"{row['name']}, {row['plan']}",
                f"{predicted['ttft_s']:.2f}, {measured['ttft_s']:.2f}",
                f"{predicted['latency_s']:.2f}, {measured['latency_s']:.2f}",
                f"{row['paged_bytes'] / 1e9:.2f}",
                f"{predicted['memory_bytes'] / 1e9:.2f}, {measured['memory_bytes'] / 1e9:.2f}",
                f"{max(row['waited'].values()):.0%}",
            ]
        )
    header = ["plan", "first token, s: predicted, run", "token, s", "GB a rank reads a token", "GB a rank holds"]
    return table([*header, "waited for cores"], lines)


# --- ranks ---


def ranks(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """One device that pages, and two ranks that page, each with one thread and the same budget."""
    model = args.models("tiny" if args.tiny else "8b")
    budget = half_of(model) if args.tiny else RANK_BYTES
    options = {"context": CONTEXT, "threads": 1, "memory": budget}
    rows = {}
    for round_ in range(1 if args.tiny else args.rounds or 2):
        for name, n in (("one device", 1), ("two ranks", 2)):
            forget(model)
            with ExitStack() as stack:
                there: list[str] = []
                if n > 1:
                    worker = Worker(folder / f"worker-{round_}", more=("--memory", f"{budget + DAEMON_BYTES}B"))
                    worker.start()
                    stack.callback(worker.end)
                    there.append(worker.wait())
                side = stack.enter_context(Grouped(SIDE, grouped(stack, budget, args)))
                [loaded] = side.tell("load", RUN_S, model=str(model), options=options, workers=there)
                [figures] = side.tell("run", RUN_S, prompt=PROMPT, tokens=TOKENS)
                if n > 1:
                    figures["peak_rss_bytes"] = max(figures["peak_rss_bytes"], peak_of(worker))
                side.tell("close")
            progress(f"{name}: {loaded} {figures}")
            rows.setdefault(name, []).append({**loaded, **figures})
    return {"model_bytes": model.stat().st_size, "budget_bytes": budget, "sides": rows}


def grouped(stack: ExitStack, limit: int, args: argparse.Namespace) -> Any:
    """Return a memory group for the time of `stack`; None if a tiny run cannot have one."""
    try:
        return stack.enter_context(memory_group(limit))
    except NoGroups as error:
        if args.tiny:
            return None
        raise LeftOut(str(error)) from error


def peak_of(worker: Worker) -> int:
    """Return the largest peak of resident memory of the worker's processes, in bytes."""
    assert worker.process is not None
    own = psutil.Process(worker.process.pid)
    return max(_peak_rss(process.pid) for process in (own, *own.children(recursive=True)))


def _peak_rss(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def ranks_text(r: dict[str, Any]) -> str:
    def cells(name: str) -> list[str]:
        rounds = r["sides"][name]
        ttft_s, token_s = (statistics.median(item[key] for item in rounds) for key in ("ttft_s", "token_s"))
        peak = max(item["peak_rss_bytes"] for item in rounds)
        return [name, f"{ttft_s:.2f}", f"{token_s:.2f}", f"{peak / MIB:,.0f}"]

    header = ["side", "first token, s", "token, s", "peak of a process, MiB"]
    return f"Budget of each: {r['budget_bytes'] / MIB:,.0f} MiB.\n\n" + table(header, map(cells, r["sides"]))


# --- libraries ---


def libraries(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Run all sides of each case without a limit of memory and within one, and edge within a smaller one."""
    if args.python is None:
        raise LeftOut("needs --python, an interpreter that has torch, transformers and accelerate")
    rows = []
    for case in [LARGE] if args.gguf is None else [SMALL, LARGE]:
        weights = args.work / f"{case.name}-{LIBRARY_TYPE}"
        models = {type_name: edge_file(args, case, type_name) for type_name in case.types}
        if not weights.exists():
            target = {"do": "make", "folder": str(weights), "type": LIBRARY_TYPE, "gguf": str(models[case.types[0]])}
            subprocess.run([str(args.python), str(LIBRARY_SIDE), json.dumps(target)], timeout=RUN_S, check=True)
        sides: dict[tuple[str, int | None], Callable[[], dict[str, Any]]] = {}
        for limit in (None, case.limit):
            for library in LIBRARIES:
                sides[f"{library}, {LIBRARY_TYPE}", limit] = partial(library_run, args, library, weights, limit)
            for type_name, model in models.items():
                sides[f"edge, {type_name}", limit] = partial(edge_run, model, limit)
        sides[f"edge, {case.types[-1]}", case.small] = partial(edge_run, models[case.types[-1]], case.small)
        rounds: dict[tuple[str, int | None], list[dict[str, Any]]] = {key: [] for key in sides}
        for _ in range(args.rounds or 2):
            for key, side in sides.items():
                forget(*weights.glob("*.safetensors"), *models.values())
                rounds[key].append(side())
                progress(f"{case.name}, {key}: {rounds[key][-1]}")
        rows += [
            {"model": case.name, "side": side, "limit": limit, "rounds": runs} for (side, limit), runs in rounds.items()
        ]
    return {"rows": rows}


def library_run(args: argparse.Namespace, library: str, weights: Path, limit: int | None) -> dict[str, Any]:
    """Run a library in a process of its own. Return its figures, or how it ended."""
    target = {"do": library, "folder": str(weights), "prompt": PROMPT, "tokens": TOKENS, "limit": limit}
    with ExitStack() as stack:
        group = stack.enter_context(memory_group(limit)) if limit else None
        offload = stack.enter_context(tempfile.TemporaryDirectory(dir=args.work))
        try:
            done = subprocess.run(
                [str(args.python), str(LIBRARY_SIDE), json.dumps({**target, "offload": offload})],
                stdout=subprocess.PIPE, timeout=RUN_S, check=False, preexec_fn=group.add if group else None,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return {"failed": f"not done after {RUN_S:.0f} s"}
    if done.returncode:
        return {"failed": "killed for memory" if done.returncode == -9 else f"ended with {done.returncode}"}
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def edge_file(args: argparse.Namespace, case: Case, type_name: str) -> Path:
    """Return the GGUF file of a case in one type."""
    if case is SMALL:
        return Path(args.gguf)
    path = Path(args.work) / f"{case.name}-{type_name}.gguf"
    if not path.exists():
        synth.synthesize(path, SHAPES["tinyllama-1.1b"], type_name)
    return path


def edge_run(model: Path, memory: int | None) -> dict[str, Any]:
    """Run edge in a process of its own, with a budget and in a memory group of that size."""
    with ExitStack() as stack:
        group = stack.enter_context(memory_group(memory)) if memory else None
        side = stack.enter_context(Grouped(SIDE, group))
        options = {"context": CONTEXT, "threads": 1, "memory": memory}
        try:
            [loaded] = side.tell("load", RUN_S, model=str(model), options=options, workers=[])
            [figures] = side.tell("run", RUN_S, prompt=PROMPT, tokens=TOKENS)
            side.tell("close")
        except RankFailed as failed:
            return {"failed": str(failed)}
    return {**loaded, **figures}


def libraries_text(r: dict[str, Any]) -> str:
    def cell(runs: list[dict[str, Any]], key: str, digits: int) -> str:
        values = [run[key] for run in runs]
        spread = f" ({min(values):.{digits}f} to {max(values):.{digits}f})" if len(values) > 1 else ""
        return f"{statistics.median(values):.{digits}f}{spread}"

    lines = []
    for row in r["rows"]:
        limit = f"{row['limit'] / MIB:,.0f}" if row["limit"] else "none"
        runs = [run for run in row["rounds"] if "failed" not in run]
        figures = [cell(runs, key, digits) for key, digits in (("load_s", 1), ("ttft_s", 2), ("token_s", 3)) if runs]
        figures += [f"{max(run['peak_rss_bytes'] for run in runs) / MIB:,.0f}"] if runs else ["", "", "", ""]
        failed = "; ".join(run["failed"] for run in row["rounds"] if "failed" in run)
        lines.append([f"{row['model']}, {row['side']}", limit, *figures, failed])
    return table(["side", "limit, MiB", "load, s", "first token, s", "token, s", "peak RSS, MiB", "failed"], lines)


SECTIONS = {
    "lab": Section(lab, lab_text),
    "ranks": Section(ranks, ranks_text),
    "libraries": Section(libraries, libraries_text),
}

if __name__ == "__main__":
    main()
