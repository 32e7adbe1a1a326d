"""Description of this machine and its GPUs, as values and as text."""

from __future__ import annotations

from pathlib import Path

from devices.machine import Machine, Rate, describe_machine
from devices.names import host_name
from edge.llama import llama
from edge.llama.ggml import gpu_names
from edge.parallel.engine_kinds import own_kind
from quant.text import age_text, bytes_text, number_text


def this_machine(folder: Path | None = None, fresh: bool = False) -> Machine:
    """Describe this machine with the GPUs that llama.cpp finds. The disk of `folder` is measured."""
    return describe_machine(own_kind().describe(host_name(), gpu=gpu_backends()), folder=folder, fresh=fresh)


def gpu_backends() -> str | None:
    """Return the GPUs and backends of llama.cpp, such as "Vulkan0 (llvmpipe)", or None without a GPU."""
    return ", ".join(gpu_names()) if llama.has_gpu() else None


def machine_rows(machine: Machine) -> list[tuple[str, str]]:
    """Return a table of all known properties as (name, value)."""
    profile = machine.profile
    cores = f"{machine.cores_performance} performance, {machine.cores_efficiency} efficiency"
    if not machine.cores_efficiency:
        cores = str(machine.cores_performance)
    if profile.cores_logical != machine.cores_performance + machine.cores_efficiency:
        cores += f"; {profile.cores_logical} logical"
    if machine.cpu_quota is not None:
        cores += f"; limited to {machine.cpu_quota:g}"
    rows = [
        ("processor", f"{profile.cpu}, {profile.machine}, {profile.system}"),
        ("cores", cores),
        ("threads", f"{profile.threads} by default"),
        ("instruction sets", ", ".join(machine.instruction_sets) or "none that ggml has kernels for"),
        ("memory", f"{bytes_text(profile.memory_available_bytes)} free of {bytes_text(profile.memory_total_bytes)}"),
        ("memory bandwidth", rate_text(machine.memory)),
        ("disk reads", f"{rate_text(machine.disk)} ({machine.disk_folder})"),
        ("GPU", profile.gpu or "none that llama.cpp finds"),
    ]
    if profile.battery_percent is not None:
        plugged = {True: ", plugged in", False: ", not plugged in", None: ""}[profile.plugged]
        rows.append(("battery", f"{profile.battery_percent:g} %{plugged}"))
    if profile.temperature_c is not None or machine.thermal is not None:
        known = [f"{profile.temperature_c:g} C"] if profile.temperature_c is not None else []
        rows.append(("temperature", ", ".join([*known, *([machine.thermal] if machine.thermal else [])])))
    return rows


def rate_text(rate: Rate | None) -> str:
    """Return the read rate of memory or disk, with its origin and age."""
    return (
        "not measured"
        if rate is None
        else f"{number_text(rate.bytes_per_s / 1e9)} GB/s, {rate.how}, {age_text(rate.age_s)}"
    )
