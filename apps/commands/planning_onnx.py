"""The plans of an ONNX model."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from apps.commands.options import check_dimensions, check_onnx

if TYPE_CHECKING:
    from devices.cluster_file import Cluster
    from edge.cluster.fleet import Fleet
    from edge.planning.onnx_space import OnnxSpace


def onnx_space(
    args: argparse.Namespace, path: Path, cluster: Cluster, fleet: Fleet | None, notes: Sequence[str]
) -> OnnxSpace:
    """Measured. The errors of reading the model and of `edge.planning.onnx_space`."""
    check_onnx()
    from apps.show.progress import progress
    from edge.onnx.file import load
    from edge.onnx.model import OnnxModel
    from edge.planning.onnx_profile import onnx_speeds
    from edge.planning.onnx_space import OnnxSpace

    dims = args.dim or []
    check_dimensions(dims)
    model = OnnxModel.of(load(path), dict(dims))
    with progress("Measuring devices", unit="steps") as bar:
        known = onnx_speeds(
            model,
            cluster,
            fleet,
            notes,
            threads=args.threads,
            transport=args.transport or "auto",
            fresh=args.fresh,
            on_step=bar.update,
        )
    return OnnxSpace(
        model,
        known,
        threads=args.threads,
        transport=args.transport or "auto",
        wire=args.wire or "f32",
        in_flight=args.concurrency,
    )
