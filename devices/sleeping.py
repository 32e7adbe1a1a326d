"""Sleeping devices of a lab: they wait for the time that a profile states instead of computing.

The lab puts the path of the profile into the environment of the processes and commands of a device.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress

_LEAST_PRIORITY = 1  # lowest real-time priority
VARIABLE = "EDGE_LAB_PROFILE"


def run_first(*, children: bool = False) -> None:
    """Run this thread before all threads outside of labs, if this user may.

    Sleeping devices use little of the processor, and other load must not delay them.

    children: also apply this, permanently, to threads and processes that the thread starts later.
    """
    if sys.platform == "linux":
        with suppress(OSError):  # not allowed
            if os.sched_getscheduler(0) == os.SCHED_FIFO:
                return
            policy = os.SCHED_FIFO if children else os.SCHED_FIFO | os.SCHED_RESET_ON_FORK
            os.sched_setscheduler(0, policy, os.sched_param(_LEAST_PRIORITY))
