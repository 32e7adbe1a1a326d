"""Processes of this project's own modules."""

from __future__ import annotations

import sys
from pathlib import Path

_ROOT = str(Path(__file__).parents[2])  # where this project's packages lie
# `python -m` would import from the working folder first, and a person's folder may well hold a json.py. Python 3.11 has
# -P against that; this does the same in 3.10. A folder of PYTHONPATH may hold a devices.py: our packages come first.
# The root stays, as the last place to look in, where no other entry of the path leads to it.
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
    """The command line that runs a module of this project like `python -m`, but imports nothing from the working
    folder."""
    return [sys.executable, "-c", _START.strip().replace("\n", "; "), module, *arguments]
