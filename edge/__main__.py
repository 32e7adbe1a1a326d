"""Entry point of `python -m edge`, which works even if the current folder holds a module named `apps.py`."""

from __future__ import annotations

import importlib
import sys

from edge.siblings import import_siblings


def main() -> int:
    """Run the command line and return its exit code."""
    # The package `apps` is above `edge` in the layers, so it is imported by name.
    try:
        import_siblings("apps")
        run = importlib.import_module("apps.cli").main
    except KeyboardInterrupt:  # the imports of a busy device take seconds
        return 130
    code: int = run()
    return code


if __name__ == "__main__":
    sys.exit(main())
