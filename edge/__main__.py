"""`python -m edge`: the `edge` command, also where a person's folder holds an `apps.py` of its own."""

from __future__ import annotations

import importlib
import sys

from edge.siblings import import_siblings


def main() -> int:
    """Run the command line of this process and return its exit code."""
    import_siblings("apps")  # no module of `edge` imports the commands, which are above it: they are found by name
    code: int = importlib.import_module("apps.cli").main()
    return code


if __name__ == "__main__":
    sys.exit(main())
