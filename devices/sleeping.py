"""Sleeping devices of a lab: they wait for as long as a profile says instead of computing.

The lab names the profile's file in the environment of a device's processes, and of commands that run on that device.
Nothing else sets it.
"""

from __future__ import annotations

import os
from contextlib import suppress

_LEAST_PRIORITY = 1  # of those that come before all others
VARIABLE = "EDGE_LAB_PROFILE"


def run_first(*, children: bool = False) -> None:
    """Let this thread run before all that is not a lab's, where this user may: devices that sleep take little of the
    processor, and other load must not make them late. children: also threads and processes that it starts later, and
    this stays so."""
    with suppress(AttributeError, OSError):  # not Linux, or not allowed
        if os.sched_getscheduler(0) == os.SCHED_FIFO:
            return
        policy = os.SCHED_FIFO if children else os.SCHED_FIFO | os.SCHED_RESET_ON_FORK
        os.sched_setscheduler(0, policy, os.sched_param(_LEAST_PRIORITY))
