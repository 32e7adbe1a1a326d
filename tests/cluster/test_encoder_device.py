"""Test a picture encoder on a worker: the embeddings are those of this device, and its loss costs only time."""

import json
import os
import re
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edge.api.config import EngineConfig, media_encoder
from edge.cluster import helper_worker as helper
from edge.cluster.encoder_worker import EncoderDevice, EncoderFiles, LoadedEncoder
from edge.cluster.fleet import Fleet, device
from edge.deployment import deploy
from edge.deployment.replanning import Replanner
from edge.errors import MediaError, NotEnoughMemory, WorkerError
from edge.llm.options import EngineOptions
from edge.media.encoder import Media, MediaEncoder
from edge.media.sample import sample_for
from edge.planning import encoder_place
from edge.planning.choice import PlanChoice
from edge.profiling.encoder_times import EncoderTime, EncoderTimes, encoder_times
from edge.tasks import SILENT
from partition.plan.plan import LOCAL
from tests.support import projectors
from tests.support.commands import main
from tests.support.deployments import ONE_THREAD, Heard
from tests.support.forked_modules import runs
from tests.support.helpers import until
from tests.support.multimodal import png, wav
from tests.support.workers import Worker
from transport.frame import Frame

pytestmark = pytest.mark.usefixtures("measured_briefly")


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
def test_embeddings_are_those_of_this_device(
    kind: str, one_worker: Worker, files: dict[str, tuple[Path, Path]]
) -> None:
    data = wav() if kind == "audio" else png()
    with MediaEncoder(*files[kind]) as here:
        expected = here.encode(data)
    with (
        EncoderDevice(one_worker.address, EncoderFiles.open(*files[kind])) as device,
        MediaEncoder(*files[kind], device=device) as there,
    ):
        media = there.encode(data)
        assert same(media, expected)
        assert there.pid is None  # nothing is loaded here
        assert device._loaded is not None
        received = device._loaded.link.received_bytes
        assert there.encode(data) is media
        assert device._loaded.link.received_bytes == received
    until(lambda: not one_worker.children(), "the end of the engine process")


def kill(item: Worker) -> None:
    for child in item.children():
        os.kill(child.pid, signal.SIGKILL)


@pytest.mark.parametrize("where", ["before", "within"])
def test_its_loss_leaves_the_picture_as_it_was(
    where: str, one_worker: Worker, files: dict[str, tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two pictures, or after one was sent and before it is answered: this device encodes it, one line says
    so, and the next picture is not sent there."""
    steps = Heard()
    with MediaEncoder(*files["mrope"]) as here:
        expected = [here.encode(png(seed)) for seed in (1, 2, 3)]
    with (
        EncoderDevice(one_worker.address, EncoderFiles.open(*files["mrope"]), steps=steps) as device,
        MediaEncoder(*files["mrope"], device=device) as there,
    ):
        assert same(there.encode(png(1)), expected[0])
        assert device._loaded is not None
        link = device._loaded.link
        if where == "before":
            kill(one_worker)
        else:
            receive = link.receive

            def kill_first(*how: float) -> Frame:
                kill(one_worker)
                return receive(*how)

            monkeypatch.setattr(link, "receive", kill_first)
            for child in one_worker.children():
                os.kill(child.pid, signal.SIGSTOP)  # so that it has not answered before it is killed
        assert same(there.encode(png(2)), expected[1])
        assert device.is_lost
        assert there.pid is not None
        sent = link.sent_bytes
        assert same(there.encode(png(3)), expected[2])
        assert link.sent_bytes == sent
        [line] = steps.lines
        assert re.match("one encodes no more, and this device does: .*(went away|killed by SIGKILL)", line)


def test_a_process_that_ends_there_leaves_the_picture_as_it_was(
    one_worker: Worker, files: dict[str, tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that encodes, and not the worker's engine process: the next picture is sent there again."""
    steps = Heard()
    with (
        EncoderDevice(one_worker.address, EncoderFiles.open(*files["mrope"]), steps=steps) as device,
        MediaEncoder(*files["mrope"], device=device) as there,
        MediaEncoder(*files["mrope"]) as here,
    ):
        assert device._loaded is not None
        link = device._loaded.link
        receive = link.receive
        for seed in range(1, 20):  # one that ends before the worker has passed a picture on is started again for it
            [child] = [child for child in one_worker.children() if runs(child, "edge.media.child")]
            child.suspend()  # so that it has not answered before it is killed
            with monkeypatch.context() as changed:
                changed.setattr(link, "receive", lambda *how, child=child: (child.kill(), receive(*how))[1])
                assert same(there.encode(png(seed)), here.encode(png(seed)))
            if there.pid is not None:
                break
        assert there.pid is not None
        received = link.received_bytes
        assert same(there.encode(png(0)), here.encode(png(0)))
        assert link.received_bytes > received
        assert there.pid is None  # it is unloaded here
        [line] = steps.lines
        assert line.startswith("one could not encode a picture or sound, and this device does: ")


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
        for item in begun:
            item.kill()


def test_a_damaged_picture_is_an_error_and_the_worker_stays(
    one_worker: Worker, files: dict[str, tuple[Path, Path]]
) -> None:
    with (
        EncoderDevice(one_worker.address, EncoderFiles.open(*files["plain"])) as device,
        MediaEncoder(*files["plain"], device=device) as there,
    ):
        with pytest.raises(MediaError, match="damaged"):
            there.encode(png()[:200])
        assert not device.is_lost
        assert there.encode(png()).rows
        assert there.pid is None


def test_a_projector_of_another_model_is_refused(
    one_worker: Worker, files: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    other = projectors.projector("plain", n_embd=32).write(tmp_path / "mmproj.gguf")
    with pytest.raises(WorkerError, match="mismatch between text model"):
        EncoderDevice(one_worker.address, EncoderFiles.open(files["plain"][0], other))
    until(lambda: not one_worker.children(), "the end of the engine process")


def test_a_worker_without_memory_says_so(
    one_worker: Worker, files: dict[str, tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edge.cluster.fleet.Fleet.memory_of", lambda self, address: 1 << 20)
    with pytest.raises(NotEnoughMemory, match=r"one needs .*encode on another device"):
        EncoderDevice(one_worker.address, EncoderFiles.open(*files["plain"]))


def place(config: EngineConfig, steps: Heard) -> str | None:
    """The name of the worker that encodes for a model of this configuration; None: this device. It must encode."""
    with config.loaded(SILENT) as model, media_encoder(config, model.engine, steps) as encoder:
        assert encoder is not None
        assert encoder.encode(png()).rows
        device = encoder._device
        assert (encoder.pid is None) == (device is not None)
        return device.name if isinstance(device, EncoderDevice) else None


def test_a_person_chooses_the_place_or_the_fastest_is_taken(
    one_worker: Worker, files: dict[str, tuple[Path, Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The times of devices are given here: only those of the second run are of a faster worker."""
    text, projector = files["plain"]
    here = EngineConfig(
        str(text), EngineOptions(threads=1, context=128), prefix_cache=0, mmproj=str(projector), encoder="here"
    )
    auto = replace(here, encoder="auto", workers=(one_worker.address,), shares=(1.0, 1.0))
    there_s = [10.0]

    def measured(files: EncoderFiles, addresses: list[str], **_: object) -> EncoderTimes:
        assert addresses in ([one_worker.address], [])  # none for `here`
        times = (
            EncoderTime(LOCAL, "this device", 1.0, 0.0, 9),
            EncoderTime(one_worker.address, "one", there_s[0], 0.0, 9),
        )
        return EncoderTimes(times[: 1 + len(addresses)], "a picture of 32 x 32")

    monkeypatch.setattr(encoder_place, "encoder_times", measured)
    steps = Heard()
    assert place(here, steps) is None
    assert place(replace(here, encoder=one_worker.address), steps) == "one"
    assert place(replace(here, encoder="auto"), steps) is None  # there are no workers, and nothing is measured
    assert place(auto, steps) is None
    assert not steps.lines
    there_s[0] = 0.1
    assert place(auto, steps) == "one"
    assert steps.lines[-1].startswith("one encodes pictures and sounds: a picture of 32 x 32 takes 100 ms")
    assert place(replace(auto, encoder="here"), steps) is None

    def refused(*_: object, **how: object) -> EncoderDevice:
        raise NotEnoughMemory("too little")

    monkeypatch.setattr(encoder_place, "EncoderDevice", refused)
    assert place(auto, steps) is None
    assert steps.lines[-1] == "pictures are not encoded on one: too little"
    until(lambda: not one_worker.children(), "the end of the engine processes")


@pytest.mark.parametrize("where", ["here", "there"])
def test_a_place_that_a_person_named_is_planned_with_and_not_timed(
    where: str, one_worker: Worker, files: dict[str, tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    text, projector = files["plain"]
    choices: list[PlanChoice] = []
    monkeypatch.setattr(encoder_place, "encoder_times", lambda *_, **__: pytest.fail("it was timed"))
    monkeypatch.setattr(deploy, "Replanner", lambda choice, *how: (choices.append(choice), Replanner(choice, *how))[1])
    address = LOCAL if where == "here" else one_worker.address
    place = "here" if where == "here" else address
    config = EngineConfig(
        str(text), EngineOptions(threads=1, context=128), prefix_cache=0, mmproj=str(projector), encoder=place,
        workers=(one_worker.address,), parallel="pipeline",
    )  # fmt: skip
    with config.loaded(SILENT):
        [choice] = choices
        assert choice.encoder is not None
        assert choice.encoder.device == address
        assert choice.planner is not None
        runtime = {device(speed.device): speed.runtime_bytes for speed in choice.planner.speeds}
        assert [name for name, n_bytes in runtime.items() if n_bytes >= choice.encoder.held_bytes] == [address]


def test_devices_are_timed_once_a_day(one_worker: Worker, files: dict[str, tuple[Path, Path]]) -> None:
    """With a projector of zeros, of which only the header is sent; a worker that is not there is named."""
    opened = EncoderFiles.open(*files["mrope"])
    steps, loads = Heard(), one_worker.log().count("session-loaded")

    def times(**how: bool) -> EncoderTimes:
        return encoder_times(opened, [one_worker.address, "127.0.0.1:9"], threads=1, steps=steps, **how)

    first = times()
    assert [time.device for time in first.devices] == [LOCAL, one_worker.address]
    assert [time.rows for time in first.devices] == [9, 9]
    assert all(time.encode_s > 0 for time in first.devices)
    assert first.sample == "a picture of 32 x 32"
    [note] = first.notes
    assert note.startswith("pictures are not encoded on 127.0.0.1:9: ")
    assert times().devices == first.devices
    assert one_worker.log().count("session-loaded") - loads == 1
    assert times(fresh=True).devices != first.devices
    assert one_worker.log().count("session-loaded") - loads == 2
    until(lambda: not one_worker.children(), "the end of the engine process")


@pytest.mark.parametrize("kind", projectors.KINDS)
def test_a_projector_of_zeros_encodes(kind: str, one_worker: Worker, files: dict[str, tuple[Path, Path]]) -> None:
    """So that every kind can be timed without its weights."""
    opened = EncoderFiles.open(*files[kind])
    with LoadedEncoder(Fleet([one_worker.address]), print) as loaded:
        loaded.load(opened, SILENT, blank=True)
        answer, _ = loaded.encode(sample_for(opened.projector)[0])
        assert answer["encode_s"] > 0


def test_the_plan_says_where(
    one_worker: Worker, files: dict[str, tuple[Path, Path]], capsys: pytest.CaptureFixture[str]
) -> None:
    model, projector = map(str, files["mrope"])
    here = ("plan", model, "--workers", one_worker.address, "--threads", "1", "--context", "256")
    assert main(*here, "--mmproj", projector, "--encoder", one_worker.address, "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert said["encoder"]["device"] == "one"
    assert said["encoder"]["first_token_s"] == said["predicted"]["ttft_s"] + said["encoder"]["total_s"]
    assert main(*here, "--mmproj", projector, "--encoder", "here") == 0
    out = capsys.readouterr().out
    assert "this device encodes pictures and sounds: a picture of 32 x 32 takes " in out
    assert "first token of a prompt with one: " in out


def test_a_place_needs_a_projector(one_worker: Worker, capsys: pytest.CaptureFixture[str]) -> None:
    assert main("chat", "-p", "Hi", "--encoder", one_worker.address) == 2
    assert "add --mmproj FILE" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main("chat", "-p", "Hi", "--encoder", "a:b:c")
    assert "--encoder" in capsys.readouterr().err
