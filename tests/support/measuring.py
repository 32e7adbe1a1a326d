"""Measuring as briefly as can be, for tests of what is done with figures, and not of how true they are.

Times of a device that was busy count as long as any, and are not taken again: beside other tests it is always busy.

`python -m tests.support.measuring` is `edge` that measures so.
"""

import math
import sys

import pytest

from apps import cli

_BRIEF = {
    "edge.survey.survey.OWN_TRIES": 0,
    "edge.survey.survey.BUSY_AGE_S": math.inf,
    "edge.survey.layer_times._SAMPLES": 1,
    "edge.survey.onnx_times._LEAST_S": 0.01,
    "edge.survey.onnx_times._LONG_S": 0.01,
    "edge.survey.links._PAIR_S": 0.02,
    "edge.survey.links._APART_S": 0.0,
    "edge.survey.links._ROUNDS": 1,
    "edge.planning.measure._SAMPLE_S": 0.01,
    "edge.planning.measure._SAMPLES": 1,
    "edge.planning.onnx_space._ABOUT_S": 0.1,
}


def measure_briefly(patch: pytest.MonkeyPatch) -> None:
    """Let this process measure so, and the workers that it asks to."""
    for name, value in _BRIEF.items():
        patch.setattr(name, value)


if __name__ == "__main__":
    measure_briefly(pytest.MonkeyPatch())
    sys.exit(cli.main())
