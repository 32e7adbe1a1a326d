"""The encoder of pictures on a worker: embeddings are those of this device, and its loss costs no more than time."""

from pathlib import Path

import numpy as np
import pytest

from edge.helpers import device as helper
from edge.helpers.encoding import EncoderDevice, EncoderFiles
from edge.multimodal.encoder import Media, MediaEncoder
from tests.support import projectors
from tests.support.helpers import until
from tests.support.multimodal import png, wav
from tests.support.workers import Worker


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    folder = tmp_path_factory.mktemp("projectors")
    return {kind: projectors.write(kind, folder) for kind in projectors.KINDS}


@pytest.fixture(autouse=True)
def taken_back_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep a lost worker lost for a test, where it says nothing else."""
    monkeypatch.setattr(helper, "AGAIN_S", 1e6)


def same(a: Media, b: Media) -> bool:
    """True for the same embeddings, bit for bit, at the same positions."""
    return a.tokens == b.tokens and all(
        np.array_equal(x.embeddings, y.embeddings)
        and (x.offsets is y.offsets is None or np.array_equal(x.offsets, y.offsets))
        and (x.n_positions, x.causal) == (y.n_positions, y.causal)
        for x, y in zip(a.rows, b.rows, strict=True)
    )


@pytest.mark.parametrize("kind", projectors.KINDS)
def test_embeddings_are_those_of_this_device(kind: str, one: Worker, files: dict[str, tuple[Path, Path]]) -> None:
    data = wav() if kind == "audio" else png()
    with MediaEncoder(*files[kind]) as here:
        expected = here.encode(data)
    with (
        EncoderDevice(one.address, EncoderFiles.open(*files[kind])) as device,
        MediaEncoder(*files[kind], device=device) as there,
    ):
        media = there.encode(data)
        assert same(media, expected)
        assert there.pid is None  # nothing is loaded here
        assert device._loaded is not None
        received = device._loaded.link.received_bytes
        assert there.encode(data) is media
        assert device._loaded.link.received_bytes == received
    until(lambda: not one.children(), "the end of the engine process")
