"""Test cuts of the graphs with which the onnx package tests runtimes: stages give the results of the whole."""

from __future__ import annotations

import warnings
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import onnx
import pytest
from onnx import ModelProto, numpy_helper
from onnx.backend.test.case import base
from onnx.backend.test.case.node import collect_testcases
from onnx.backend.test.loader import load_model_tests
from onnx.reference.ops import op_pool_common

from edge.onnx.file import load
from edge.onnx.model import OnnxSource
from partition.plan.onnx_cuts import cuts
from tests.support.onnx_graphs import TOLERANCES, difference
from tests.support.onnx_graphs import runs as runs_whole
from tests.support.onnx_pipelines import running
from tests.support.thorough import THOROUGH

_KINDS = ("simple", "pytorch-operator", "pytorch-converted")  # of models that come with inputs
_PARTS = 8
_EACH = 1 if THOROUGH else 16  # of the graphs, which are some 400
_MOST = 4  # pipelines of each graph
# Each place in them is crossed by a sequence of tensors.
_OF_SEQUENCES = {f"test_sequence_model{i}" for i in range(1, 9)}

Feeds = dict[str, np.typing.NDArray[Any]]


@cache
def graphs() -> list[tuple[str, ModelProto, Feeds]]:
    """Those of two nodes or more, with tensors for all inputs."""
    results = []
    for kind in _KINDS:
        for case in load_model_tests(kind=kind):
            model = onnx.load(Path(case.model_dir) / "model.onnx")
            current = {tensor.name for tensor in model.graph.initializer}
            names = [value.name for value in model.graph.input if value.name not in current]
            files = [Path(case.model_dir) / "test_data_set_0" / f"input_{i}.pb" for i in range(len(names))]
            results.append((case.name, model, dict(zip(names, map(_tensor, files), strict=True))))
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # it makes values that are infinite
        # Sources for its pages, and outputs of graphs of one node, which take most of the time and are not used.
        stack.enter_context(mock.patch.object(base, "process_snippet"))
        stack.enter_context(mock.patch.object(op_pool_common, "pool", return_value=np.zeros(1, np.float32)))
        cases = collect_testcases(None)
    for case in cases:
        values = case.data_sets[0][0]
        if all(isinstance(value, (np.ndarray, np.generic)) for value in values):
            names = [value.name for value in case.model.graph.input]
            results.append((case.name, case.model, dict(zip(names, map(np.asarray, values), strict=False))))
    return [item for item in results if len(item[1].graph.node) > 1 or item[1].functions]


def _tensor(path: Path) -> np.typing.NDArray[Any]:
    tensor = onnx.TensorProto()
    tensor.ParseFromString(path.read_bytes())
    return np.asarray(numpy_helper.to_array(tensor))


@pytest.mark.parametrize("part", range(_PARTS))
def test_stages_give_what_the_whole_gives(part: int, tmp_path: Path) -> None:
    seen = 0
    for name, model, feeds in graphs()[part :: _PARTS * _EACH]:
        path = tmp_path / f"{name}.onnx"
        path.write_bytes(model.SerializeToString())
        try:
            [outputs] = runs_whole(path, tuple(feeds.values()))
        except Exception:  # ONNX Runtime has not all of ONNX, and no class for that
            continue
        source = OnnxSource.from_file(load(path), {}, feeds)
        places = [cut.position for cut in cuts(source.graph)]
        assert places or len(source.graph.nodes) < 2 or name in _OF_SEQUENCES, source.places_text(2)
        pipelines = [(at,) for at in places] + ([(places[0], places[-1])] if len(places) > 1 else [])
        for several in pipelines if THOROUGH else pipelines[:: max(1, len(pipelines) // _MOST)]:
            with running(source, tmp_path, *several) as first:
                provided = first.pipeline.run(feeds).outputs
            for value, array in zip(model.graph.output, outputs, strict=True):
                assert (provided[value.name].dtype, provided[value.name].shape) == (array.dtype, array.shape), (
                    name,
                    several,
                )
                if np.array_equal(array, provided[value.name], equal_nan=array.dtype.kind == "f"):
                    continue  # also where it is infinite
                apart = difference(array, provided[value.name])
                assert apart <= TOLERANCES.get(array.dtype.name, 0), (name, several, value.name)
        seen += 1
    assert seen
