"""Measure very briefly, for tests of how measurements are used, not of their accuracy.

`python -m tests.support.measuring` is `edge` that measures so.
"""

import sys

import pytest

from apps import cli
from tests.support import BRIEF_MEASUREMENTS


def measure_briefly(patch: pytest.MonkeyPatch) -> None:
    """Let this process measure so, and the workers that it asks to."""
    for name, value in BRIEF_MEASUREMENTS.items():
        patch.setattr(name, value)


if __name__ == "__main__":
    measure_briefly(pytest.MonkeyPatch())
    sys.exit(cli.main())
