"""The option of a budget, which may be a range."""

from __future__ import annotations

import argparse
from typing import Any


class MemoryAction(argparse.Action):
    """Sets `memory`, and `least_memory` where a range was given, from what `edge.units.memory_options` returned."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> None:
        vars(namespace).update(values)
