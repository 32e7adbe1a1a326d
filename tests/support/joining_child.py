"""An engine process of a server whose devices have made-up speeds. Workers that a file names can join.

The variables WORKERS and SECONDS name the file, and have the seconds of a layer by device.
"""

import json
import os
import sys
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest

from edge.api.config import EngineConfig
from edge.cluster import roster
from edge.cluster.session import EngineSession
from edge.deployment import watch
from edge.profiling import llm_survey
from edge.profiling.layer_times import LayerTimes
from edge.serve.engine import child
from partition.predict.speeds import Curve
from tests.support.measuring import measure_briefly

MODULE = "tests.support.joining_child"
WORKERS, SECONDS = "EDGE_TEST_WORKERS", "EDGE_TEST_SECONDS"
_OWN_S = 0.01  # seconds of a layer on this device
# Layers that each slice takes as long as. The head takes longer than all layers, and half a layer as long as a layer.
# So replicas are better than stages and tensor groups.
_SLICES = (("layers", 1), ("more", 2), ("head", 21), ("half", 1))


def timed(session: EngineSession, *_: Any, **__: Any) -> LayerTimes:
    seconds = json.loads(os.environ[SECONDS]).get(session.device, _OWN_S)
    curves = {name: Curve(((1, n * seconds), (64, 64 * n * seconds))) for name, n in _SLICES}
    return LayerTimes(1, curves, 0.0, 1, None)


def main() -> int:
    """Do the same as the process of the server, with plans from measurements at the start."""
    with pytest.MonkeyPatch.context() as patch:
        measure_briefly(patch)
        patch.setattr(llm_survey, "timed", timed)
        patch.setattr(llm_survey, "host_of", lambda *_: None)  # each device has a machine of its own
        patch.setattr(roster, "announced", lambda: Path(os.environ[WORKERS]).read_text().split())
        patch.setattr(EngineConfig, "loaded", partialmethod(EngineConfig.loaded, survey_seconds=None))
        for name, value in (("OFFER_S", 0.2), ("QUIET_S", 0.4), ("REST_S", 0.1), ("LOOK_S", 0.05)):
            patch.setattr(watch, name, value)
        return child.main()


if __name__ == "__main__":
    sys.stdout.flush()
    os._exit(main())
