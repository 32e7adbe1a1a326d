"""Trained networks over two and three devices, cut where they can be cut: what ONNX Runtime gives for the whole."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from edge.onnx.file import load
from edge.onnx.model import OnnxSource
from partition.plan.onnx_cuts import cuts
from tests.real import weights
from tests.real.inputs import Feeds, feeds
from tests.real.weights import Weights
from tests.support.commands import Run, Two, runs, two_workers
from tests.support.onnx_graphs import runs as runs_whole
from tests.support.onnx_pipelines import running, same
from tests.support.thorough import THOROUGH

_PIPELINES = 4  # of each network and number of stages; a thorough run takes all cuts

# How many cuts each has: between all of its nodes, but between convolutions and their normalization.
CUTS = {
    "ch_PP-OCRv4_det_infer": 327,
    "ch_PP-OCRv4_rec_infer": 418,
    "ch_ppocr_mobile_v2.0_cls_infer": 203,
    "silero_vad": 3,
    "silero_vad_16k_op15": 47,
    "silero_vad_16k_sequence": 26,
    "silero_vad_half": 44,
    "silero_vad_op18_ifless": 3,
    "silero_vad_openvino_16k": 41,
    "model": 94,
}
each = pytest.mark.parametrize("network", weights.NETWORKS, ids=lambda item: item.name)


@cache
def expected(network: Weights, seed: int) -> Feeds:
    """Return what ONNX Runtime gives for an input, by name."""
    source, provided = opened(network), feeds(network, seed)
    [outputs] = runs_whole(network.path(), tuple(provided[item.name] for item in source.inputs))
    return dict(zip([value.name for value in source.file.model.graph.output], outputs, strict=True))


@cache
def opened(network: Weights) -> OnnxSource:
    return OnnxSource.from_file(load(network.path()), {}, feeds(network))


@each
def test_it_can_be_cut_nearly_everywhere(network: Weights) -> None:
    assert len(cuts(opened(network).graph)) == CUTS[network.name]


@each
@pytest.mark.parametrize("stages", [2, 3])
def test_stages_give_what_the_whole_gives(network: Weights, stages: int, tmp_path: Path) -> None:
    """Also for an input of other sizes than the one that the network was cut for."""
    source = opened(network)
    places = [cut.position for cut in cuts(source.graph)]
    half = len(places) // 2 if stages == 3 else 0
    positions = [(at, *places[i + half : i + half + 1 if half else 0]) for i, at in enumerate(places)]
    positions = [several for several in positions if len(several) == stages - 1]
    step = 1 if THOROUGH else max(1, len(positions) // _PIPELINES)
    for several in positions[::step]:
        with running(source, tmp_path, *several) as first:
            for seed in (0, 1):
                same(first.pipeline.run(feeds(network, seed)).outputs, expected(network, seed))


@pytest.fixture(scope="module", name="two")
def two_of_them(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Two]:
    with two_workers(tmp_path_factory.mktemp("w")) as both:
        yield both


@pytest.fixture(name="edge")
def in_this_process(two: Two, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    with runs(capsys, two) as run:
        yield run


@each
def test_workers_give_what_the_whole_gives(network: Weights, two: Two, edge: Run, tmp_path: Path) -> None:
    """On three devices cut where the command cuts, and on the two workers cut in the middle."""
    provided, output = tmp_path / "input.npz", tmp_path / "output.npz"
    np.savez(provided, **feeds(network))
    places = cuts(opened(network).graph)
    middle = str(places[len(places) // 2].position)
    for devices in ((), ("--no-local", "--cut", middle)):
        command = (
            "run",
            network.path(),
            "--input",
            provided,
            "--output",
            output,
            "--force",
            "--repeats",
            "1",
            "--json",
        )
        code, out, error = edge(*command, "--workers", f"{two[0].address},{two[1].address}", *devices)
        assert code == 0, error
        said = json.loads(out)
        assert len(said["stages"]) == (2 if devices else 3)
        if not devices:
            assert said["why"] == "equal parts of the work as this device does it"
        with np.load(output) as current:
            same({name: current[name] for name in current.files}, expected(network, 0))


def test_a_page_has_its_own_size(two: Two, edge: Run, tmp_path: Path) -> None:
    """A picture fills open dimensions, also those without a name; where one side is given, it keeps its proportions."""
    page = (feeds(weights.OCR_DETECTION)["x"][0].transpose(1, 2, 0) * 127.5 + 127.5).astype(np.uint8)
    Image.fromarray(page).save(tmp_path / "page.png")
    height, width, _ = page.shape
    scaled = ("--input", tmp_path / "page.png", "--mean", "0.5", "--std", "0.5", "--repeats", "0", "--json")
    for several in ((), ("--workers", two[0].address)):
        for network, dims, shape in (
            (weights.OCR_DETECTION, (), [1, 3, height, width]),
            (weights.OCR_RECOGNITION, ("--dim", "x[2]=48"), [1, 3, 48, round(width * 48 / height)]),
        ):
            code, out, error = edge("run", network.path(), *scaled, *dims, *several)
            assert code == 0, error
            assert json.loads(out)["inputs"] == [{"name": "x", "type": "float32", "shape": shape}]
