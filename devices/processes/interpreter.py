"""Command lines that run modules of this project."""

from __future__ import annotations

import sys
from pathlib import Path

_ROOT = str(Path(__file__).parents[2])  # folder of this project's packages
# `python -m` imports from the working folder first, and a user's folder may contain a json.py. Python 3.11 has -P
# against that; this code does the same in 3.10. A folder of PYTHONPATH may contain a devices.py, so our packages are
# imported first. The root remains the last entry of the path, unless another entry leads to it.
_START = f"""
import sys
sys.path[: sys.path[0] == ""] = [{_ROOT!r}]
import apps, devices, edge, partition, quant, transport
sys.path += {{sys.path.pop(0)}}.difference(sys.path)
del sys.argv[0]
from devices.streams import protect_streams
protect_streams(is_command=False)
import runpy
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


def module_command(module: str, *arguments: str) -> list[str]:
    """Return the command line that runs a module of this project.

    It works like `python -m`, but imports nothing from the working folder.
    """
    return [sys.executable, "-c", _START.strip().replace("\n", "; "), module, *arguments]
