"""The owner's process of bench_onnx_cuts.py: sweeps the cuts of a model over two workers, and prints what it measured.

It is a process of its own so that it can run in the network of a lab's device.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))


def main() -> None:
    from edge.cluster.fleet import Fleet
    from edge.cluster.onnx_deployment import OnnxDeployment
    from edge.onnx.file import load
    from edge.onnx.model import OnnxSource
    from edge.planning.onnx_sweep import sweep
    from partition.plan.onnx_cuts import choose

    asked = json.loads(sys.argv[1])
    model = OnnxSource.from_file(load(Path(asked["model"])), {})
    devices = asked["workers"]
    cuts = [cut for cut in choose(model.graph, asked["cuts"]) if cut.payload_bytes <= asked["most_bytes"]]
    with (
        Fleet(devices, insecure=True) as fleet,
        OnnxDeployment(fleet, model, model.plan(devices, cuts[:1])) as deployment,
    ):
        measured = partial(sweep, deployment, model, cuts, model.sample, repeats=asked["repeats"])
        rounds = [[_values(one) for one in measured()] for _ in range(asked["rounds"])]
    print(json.dumps(rounds))


def _values(one: Any) -> dict[str, Any]:
    return {
        "label": one.cut.label,
        "payload_bytes": one.cut.payload_bytes,
        "stage_s": one.stage_s,
        "transfer_s": one.transfer_s,
        "delay_s": one.delay_s,
        "expected_per_s": one.expected_throughput_per_s,
        "measured_per_s": one.speed.throughput_per_s,
        "latency_s": one.speed.latency_ms_median / 1e3,
        "in_flight": one.speed.window,
    }


if __name__ == "__main__":
    main()
