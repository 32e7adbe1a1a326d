"""This machine, with what llama.cpp says of it."""

from __future__ import annotations

import socket
from importlib.metadata import version
from pathlib import Path

from devices.machine import Machine, describe_machine
from devices.names import name_from
from devices.profile import describe
from edge.llama import llama
from edge.llama.ggml import gpu_names


def this_machine(folder: Path | None = None, fresh: bool = False) -> Machine:
    """This machine, with what llama.cpp says of it; what is measured is of the disk of `folder`."""
    profile = describe(
        name_from(socket.gethostname()),
        gpu=gpu_backends(),
        runtime=version("edge-runtime"),
        llama_cpp=version("llama-cpp-python"),
    )
    return describe_machine(profile, folder=folder, fresh=fresh)


def gpu_backends() -> str | None:
    """The GPUs that llama.cpp reaches, with their backends, as "Vulkan0 (llvmpipe)"; None without one."""
    return ", ".join(gpu_names()) if llama.has_gpu() else None
