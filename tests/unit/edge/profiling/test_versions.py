"""Test that figures depend on versions, also if a package has another name than usual."""

import importlib.metadata
from types import SimpleNamespace
from typing import Any, cast

import pytest

from edge.profiling import onnx_survey
from edge.profiling.survey import Devices
from edge.tasks import CancelScope


def test_an_onnx_runtime_of_another_name_is_surveyed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as onnxruntime-gpu."""
    installed = importlib.metadata.distribution

    def distribution(name: str) -> importlib.metadata.Distribution:
        if name == "onnxruntime":
            raise importlib.metadata.PackageNotFoundError(name)
        return installed(name)

    monkeypatch.setattr(importlib.metadata, "distribution", distribution)
    monkeypatch.setattr(onnx_survey, "probes", lambda *_: SimpleNamespace(parts=(), steps=0, segments_s=()))
    with CancelScope() as scope:
        profiler = onnx_survey._SegmentProfiler(Devices(None, 1), cast(Any, None), (), None, scope)
    assert len(profiler.keys) == 1
