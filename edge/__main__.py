"""Entry point of `python -m edge`, which works even if the current folder holds a module named `apps.py`."""

from __future__ import annotations

import importlib
import sys

from edge.siblings import import_siblings


def main() -> int:
    """Run the command line and return its exit code."""
    # The package `apps` is above `edge` in the layers, so it is imported by name.
    import_siblings("apps")
    code: int = importlib.import_module("apps.cli").main()
    return code


if __name__ == "__main__":
    sys.exit(main())
