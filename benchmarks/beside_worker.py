"""A process of the owner with a share of the cores, and one worker of the lab with another share, behind a lab link."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from benchmarks.harness import ROOT, LeftOut
from devices.lab.config import parse_lab
from devices.lab.control_group import ControlGroup
from tests.support.lab import Lab

RUN_S = 900.0


def beside_worker(
    side: str,
    settings: Mapping[str, Any],
    folder: Path,
    *,
    own: float,
    other: float,
    link: Mapping[str, Any],
    tiny: bool,
) -> Any:
    """Run a module of `benchmarks` as the owner's process, and return the JSON that it prints.

    settings: what it gets as JSON, with the worker's address and `tiny`. own, other: cores of the owner and of the
    worker. tiny: without limits of cores and links. LeftOut where this user may set none.
    """
    if not tiny and os.geteuid() != 0:
        raise LeftOut("links and parts of cores need root; --tiny goes without")
    device: dict[str, Any] = {"name": "other", "threads": max(1, round(other))}
    lab = {"device": [device if tiny else {**device, "cpu": other}], **({} if tiny else {"link": [link]})}
    with Lab(parse_lab(lab), folder / "lab") as up, tempfile.TemporaryDirectory() as home:
        words = json.dumps({**settings, "worker": up.addresses["other"], "tiny": tiny})
        folders = {f"XDG_{kind}_HOME": f"{home}/{kind.lower()}" for kind in ("CACHE", "CONFIG", "STATE")}
        command = [sys.executable, str(ROOT / "benchmarks" / f"{side}.py"), words]
        group = nullcontext() if tiny else ControlGroup(f"edge-{side}-{os.getpid()}", cores=own)
        # Closing the group ends what is in it: the process has ended by then.
        with group as part, subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, **folders}, stdout=subprocess.PIPE
        ) as process:  # fmt: skip
            if part is not None:
                part.add(process.pid)
            try:
                printed, _ = process.communicate(timeout=RUN_S)
            finally:
                process.kill()
    if process.returncode:
        raise SystemExit(f"the owner's process ended with {process.returncode}; its last words are above")
    return json.loads(printed)
