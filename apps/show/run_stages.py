"""Stages of an ONNX model on several devices, for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from apps.show.format import bytes_text, ms_text

if TYPE_CHECKING:
    from edge.planning.onnx_deployed import Deployed
    from edge.quantization.onnx_compare import OutputError


def stage_rows(
    stages: Sequence[Mapping[str, Any]], deployed: Deployed, wire_errors: Sequence[OutputError]
) -> list[tuple[str, str]]:
    """Rows of (name, value): each stage, the reason for the cuts, and what the wire type does to the outputs."""
    rows = [(f"stage {i}", _stage(stage)) for i, stage in enumerate(stages)]
    rows.append(("cut", deployed.why))
    if deployed.wire != "f32":
        rows.append(("wire", f"{deployed.wire}: {'; '.join(map(_error, wire_errors))}"))
    return rows


def _stage(stage: Mapping[str, Any]) -> str:
    start, stop = stage["nodes"]
    parts = [f"{stop - start} nodes" + (f" up to {stage['until']}" if stage["until"] else "")]
    parts.append(f"{bytes_text(stage['weight_bytes'])} of weights")
    if stage["compute_ms_median"] is not None:
        parts.append(f"{ms_text(stage['compute_ms_median'])} ms")
    many = f" in {len(stage['tensors'])} tensors" if len(stage["tensors"]) > 1 else ""
    parts.append(f"gives {bytes_text(stage['payload_bytes'])}{many}")
    return f"{stage['name']}: {', '.join(parts)}"


def _error(error: OutputError) -> str:
    """How far an output is from what it is with F32 on the wire."""
    if error.max_abs is None or error.relative_l2 is None:
        return f"{error.name} cannot be compared"
    return f"{error.name} differs by {error.max_abs:.3g} at most, {100 * error.relative_l2:.2g} % of its norm"
