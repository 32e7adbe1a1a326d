"""`edge devices probe`: what this machine is and can do."""

from __future__ import annotations

import argparse
import json
import re
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

from apps.commands import devices_model
from apps.commands.distributed import first_given
from apps.errors import UsageError
from apps.show.format import age_text, bytes_text
from apps.show.table import print_note, print_table

if TYPE_CHECKING:
    from devices.machine import Machine, Rate

HELP = "Show what this machine is and can do; with a model, what devices take for its parts."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to measure, and how to print it."""
    devices_model.add_arguments(parser)
    parser.add_argument("--fresh", action="store_true", help="measure now, also what was measured within a day")
    parser.add_argument(
        "--folder", type=Path, metavar="DIR", help="measure the disk of this folder (default: where slices are kept)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Measure what is not known, and print all of it. UsageError for options that are not for what is asked."""
    if args.model is not None:
        if args.folder is not None:
            raise UsageError("--folder is of this machine alone; leave MODEL out")
        return devices_model.run(args)
    if given := first_given(args, ("cluster", "workers", "insecure", "dim")):
        raise UsageError(f"{given} is for a MODEL: name one")
    if args.folder is not None and not args.folder.is_dir():
        raise UsageError(f"--folder needs a folder that exists; {args.folder} is none")
    machine = this_machine(args.folder, args.fresh)
    if args.json:
        print(json.dumps(_with_ages(machine)))
        return 0
    print_table(machine.profile.name, machine_rows(machine))
    for what, why in machine.not_measured.items():
        print_note(f"{what} not measured: {why}")
    return 0


def this_machine(folder: Path | None = None, fresh: bool = False) -> Machine:
    """This machine, with what llama.cpp says of it; what is measured is of the disk of `folder`."""
    from importlib.metadata import version

    from devices.machine import describe_machine
    from devices.names import name_from
    from devices.profile import describe

    profile = describe(
        name_from(socket.gethostname()),
        gpu=_gpu(),
        runtime=version("edge-runtime"),
        llama_cpp=version("llama-cpp-python"),
    )
    return describe_machine(profile, folder=folder, fresh=fresh)


def machine_rows(machine: Machine) -> list[tuple[str, str]]:
    """(name, value) of all that is known, for a table."""
    profile = machine.profile
    cores = f"{machine.cores_performance} performance, {machine.cores_efficiency} efficiency"
    if not machine.cores_efficiency:
        cores = str(machine.cores_performance)
    if profile.cores_logical != machine.cores_performance + machine.cores_efficiency:
        cores += f"; {profile.cores_logical} logical"
    if machine.cpu_quota is not None:
        cores += f"; may keep {machine.cpu_quota:g} busy"
    rows = [
        ("processor", f"{profile.cpu}, {profile.machine}, {profile.system}"),
        ("cores", cores),
        ("threads", f"{profile.threads}, if not told otherwise"),
        ("instruction sets", ", ".join(machine.instruction_sets) or "none that ggml has kernels for"),
        ("memory", f"{bytes_text(profile.memory_available_bytes)} free of {bytes_text(profile.memory_total_bytes)}"),
        ("memory bandwidth", _rate_text(machine.memory)),
        ("disk reads", f"{_rate_text(machine.disk)} ({machine.disk_folder})"),
        ("GPU", profile.gpu or "none that llama.cpp finds"),
    ]
    if profile.battery_percent is not None:
        plugged = {True: ", plugged in", False: ", not plugged in", None: ""}[profile.plugged]
        rows.append(("battery", f"{profile.battery_percent:g} %{plugged}"))
    if profile.temperature_c is not None or machine.thermal is not None:
        known = [f"{profile.temperature_c:g} C"] if profile.temperature_c is not None else []
        rows.append(("temperature", ", ".join([*known, *([machine.thermal] if machine.thermal else [])])))
    return rows


def _rate_text(rate: Rate | None) -> str:
    return "not measured" if rate is None else f"{rate.bytes_per_s / 1e9:.3g} GB/s, {rate.how}, {age_text(rate.age_s)}"


def _with_ages(machine: Machine) -> dict[str, Any]:
    values = machine.to_json()
    for what, rate in (("memory", machine.memory), ("disk", machine.disk)):
        if rate is not None:
            values[what]["age_s"] = round(rate.age_s, 3)
    return values


def _gpu() -> str | None:
    """The backends through which llama.cpp reaches a GPU that is there; None without one."""
    from edge.llama import llama

    if not llama.has_gpu():
        return None
    backends = re.findall(r"([A-Za-z]\w*) : ", llama.system_info())  # "CPU : AVX2 = 1 | CUDA : ARCHS = 890 | "
    return ", ".join(name for name in dict.fromkeys(backends) if name not in ("CPU", "BLAS", "RPC")) or "yes"
