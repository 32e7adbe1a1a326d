"""The encoder of pictures on a worker: embeddings are those of this device, and its loss costs no more than time."""

from pathlib import Path

import numpy as np
import pytest

from edge.errors import MediaError, NotEnoughMemory, WorkerError
from edge.helpers import device as helper
from edge.helpers.encoding import EncoderDevice, EncoderFiles
from edge.multimodal.encoder import Media, MediaEncoder
from tests.support import projectors
from tests.support.deployments import ONE_THREAD, Heard
from tests.support.helpers import until
from tests.support.multimodal import png, wav
from tests.support.workers import Worker
from transport.frame import Frame


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


def kill(one: Worker) -> None:
    for child in one.children():
        os.kill(child.pid, signal.SIGKILL)


@pytest.mark.parametrize("where", ["before", "within"])
def test_its_loss_leaves_the_picture_as_it_was(
    where: str, one: Worker, files: dict[str, tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two pictures, or after one was sent and before it is answered: this device encodes it, one line says
    so, and the next picture is not sent there."""
    steps = Heard()
    with MediaEncoder(*files["mrope"]) as here:
        expected = [here.encode(png(seed)) for seed in (1, 2, 3)]
    with (
        EncoderDevice(one.address, EncoderFiles.open(*files["mrope"]), steps=steps) as device,
        MediaEncoder(*files["mrope"], device=device) as there,
    ):
        assert same(there.encode(png(1)), expected[0])
        assert device._loaded is not None
        link = device._loaded.link
        if where == "before":
            kill(one)
        else:
            receive = link.receive

            def kill_first(*how: float) -> Frame:
                kill(one)
                return receive(*how)

            monkeypatch.setattr(link, "receive", kill_first)
            for child in one.children():
                os.kill(child.pid, signal.SIGSTOP)  # so that it has not answered before it is killed
        assert same(there.encode(png(2)), expected[1])
        assert device.is_lost
        assert there.pid is not None
        sent = link.sent_bytes
        assert same(there.encode(png(3)), expected[2])
        assert link.sent_bytes == sent
        [line] = steps.lines
        assert re.match("one encodes no more, and this device does: .*(went away|killed by SIGKILL)", line)


def test_it_is_taken_back(tmp_path: Path, files: dict[str, tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(helper, "AGAIN_S", 0.01)
    steps = Heard()
    begun = [Worker(tmp_path, ONE_THREAD, "127.0.0.1:0")]
    try:
        begun[0].port = int(begun[0].says(r"INFO listening .*address=\S+:(\d+)\b")[1])
        with EncoderDevice(begun[0].address, EncoderFiles.open(*files["plain"]), steps=steps) as device:
            begun[0].kill()
            assert device.encode(png()) is None
            begun.append(Worker(tmp_path, ONE_THREAD, begun[0].address))
            until(lambda: not device.is_lost, "the worker to encode again")
            assert device.encode(png()) is not None
            assert steps.lines[-1] == f"{device.name} encodes again"
    finally:
        for one in begun:
            one.kill()


def test_a_damaged_picture_is_an_error_and_the_worker_stays(one: Worker, files: dict[str, tuple[Path, Path]]) -> None:
    with (
        EncoderDevice(one.address, EncoderFiles.open(*files["plain"])) as device,
        MediaEncoder(*files["plain"], device=device) as there,
    ):
        with pytest.raises(MediaError, match="damaged"):
            there.encode(png()[:200])
        assert not device.is_lost
        assert there.encode(png()).rows
        assert there.pid is None


def test_a_projector_of_another_model_is_refused(
    one: Worker, files: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    other = projectors.projector("plain", n_embd=32).write(tmp_path / "mmproj.gguf")
    with pytest.raises(WorkerError, match="mismatch between text model"):
        EncoderDevice(one.address, EncoderFiles.open(files["plain"][0], other))
    until(lambda: not one.children(), "the end of the engine process")


def test_a_worker_without_memory_says_so(
    one: Worker, files: dict[str, tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edge.cluster.fleet.Fleet.memory_of", lambda self, address: 1 << 20)
    with pytest.raises(NotEnoughMemory, match=r"one needs .*encode on another device"):
        EncoderDevice(one.address, EncoderFiles.open(*files["plain"]))
