"""Stages of trained networks at a browser's page in node give what ONNX Runtime gives for the whole."""

from functools import partial
from pathlib import Path

import pytest

from edge.onnx.file import load
from edge.onnx.model import OnnxSource
from partition.plan.onnx_cuts import cuts
from tests.browser.conftest import node  # noqa: F401
from tests.browser.test_onnx import PATIENT, assert_close, bridge  # noqa: F401
from tests.real import weights
from tests.real.inputs import feeds
from tests.real.weights import Weights
from tests.support.bridge_process import Bridge
from tests.support.bridged_page import at_page
from tests.support.onnx_graphs import runs
from tests.support.onnx_pipelines import running


@pytest.mark.parametrize("network", [weights.SILERO[1], weights.OCR_ORIENTATION], ids=lambda network: network.name)
def test_owner_and_page_give_what_the_whole_gives(bridge: Bridge, network: Weights, tmp_path: Path) -> None:  # noqa: F811
    """Also for an input of other sizes than the one that the network was cut for."""
    source = OnnxSource.from_file(load(network.path()), {}, feeds(network))
    places = cuts(source.graph)
    middle = places[len(places) // 2].position
    with running(source, tmp_path, middle, own=True, deadlines=PATIENT, opener=partial(at_page, bridge)) as pipeline:
        for seed in (0, 1):
            inputs = feeds(network, seed)
            [outputs] = runs(network.path(), tuple(inputs[item.name] for item in source.inputs))
            names = [value.name for value in source.file.model.graph.output]
            assert_close(pipeline.pipeline.run(inputs).outputs, dict(zip(names, outputs, strict=True)))
