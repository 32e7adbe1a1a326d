"""This machine, with what llama.cpp says of it."""

from __future__ import annotations

import re
import socket
from importlib.metadata import version
from pathlib import Path

from devices.machine import Machine, describe_machine
from devices.names import name_from
from devices.profile import describe
from edge.llama import llama


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
    """The backends through which llama.cpp reaches a GPU that is there; None without one."""
    if not llama.has_gpu():
        return None
    backends = re.findall(r"([A-Za-z]\w*) : ", llama.system_info())  # "CPU : AVX2 = 1 | CUDA : ARCHS = 890 | "
    return ", ".join(name for name in dict.fromkeys(backends) if name not in ("CPU", "BLAS", "RPC")) or "yes"
