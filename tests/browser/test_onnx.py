"""Stages of ONNX networks at a page in node give what ONNX Runtime gives for the whole, and errors are one line."""

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from edge.browser import onnx_engine
from edge.errors import EngineError, NotEnoughMemory
from edge.onnx.file import load
from edge.onnx.samples import SamplesError
from tests.browser.conftest import Open
from tests.support.bridge_process import Bridge
from tests.support.bridged_page import at_page, bridged_page
from tests.support.commands import main
from tests.support.helpers import until
from tests.support.onnx_files import saved
from tests.support.onnx_pipelines import Feeds, images, mixed, mixed_feeds, owned, residual, running, whole
from tests.support.onnx_tiny import counting
from tests.support.page_bridge import PageError
from transport.link import Deadlines

CLOSE = 1e-4
PATIENT = Deadlines(step_timeout_s=60.0, send_timeout_s=60.0)


@pytest.fixture(scope="module")
def bridge(node: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bridge]:
    with bridged_page(node, tmp_path_factory.mktemp("page")) as bridge:
        yield bridge


def assert_close(outputs: Feeds, expected: Feeds) -> None:
    assert outputs.keys() == expected.keys()
    for name, array in expected.items():
        assert (outputs[name].dtype, outputs[name].shape) == (array.dtype, array.shape), name
        if array.dtype == np.float16:
            np.testing.assert_allclose(outputs[name], array, rtol=2.0**-10)
        else:
            np.testing.assert_allclose(outputs[name], array, atol=CLOSE, rtol=CLOSE)


def test_stages_of_owner_and_page_give_what_the_whole_gives(bridge: Bridge, tmp_path: Path) -> None:
    """Also for values of every type at a cut, and for another size of the open dimension."""
    for model, position, make in ((mixed(), 6, mixed_feeds), (residual(), 6, images)):
        source = owned(model, tmp_path / f"{position}.onnx")
        opener = partial(at_page, bridge)
        with running(source, tmp_path, position, own=True, deadlines=PATIENT, opener=opener) as pipeline:
            for batch in (1, 3):
                feeds = make(batch, batch)
                assert_close(pipeline.pipeline.run(feeds).outputs, whole(model, feeds))


@pytest.mark.parametrize("threads", [1, 2])
def test_whole_network_at_a_page(bridge: Bridge, tmp_path: Path, threads: int) -> None:
    model = residual(blocks=2, channels=16, size=16)
    engine = at_page(bridge, saved(model, tmp_path / "model.onnx"), threads)
    try:
        feeds = images(2, 0, 16, 16)
        assert_close(engine.run(feeds), whole(model, feeds))
        assert (engine.provider, engine.fell_back_from, engine.threads) == ("wasm", (), threads)
        with pytest.raises(SamplesError, match="takes the shape"):
            engine.run({"image": feeds["image"][:, :4]})
    finally:
        engine.close()


def test_command_over_the_worker_of_a_page(bridge: Bridge, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, feeds = residual(), images()
    path, provided, output = saved(model, tmp_path / "model.onnx"), tmp_path / "input.npz", tmp_path / "output.npz"
    np.savez(provided, **feeds)
    command = ("run", path, "--input", provided, "--output", output, "--cut", "6", "--repeats", "1", "--json")
    code = main(*command, "--workers", f"127.0.0.1:{bridge.port('phone')}", "--force")
    out, error = capsys.readouterr()
    assert code == 0, error
    until(lambda: not bridge.is_held("phone"), "the end of the session")
    assert [stage["provider"] for stage in json.loads(out)["stages"]] == ["cpu", "wasm"]
    with np.load(output) as current:
        assert_close({name: current[name] for name in current.files}, whole(model, feeds))


def test_page_computes_for_longer_than_its_silence_may_last(node: str, tmp_path: Path) -> None:
    lost_s = 4.0
    path = tmp_path / "counting.onnx"
    path.write_bytes(counting())
    with bridged_page(node, tmp_path / "page", lost_s=lost_s) as bridge:
        engine = at_page(bridge, path)
        took_s, n = 0.0, 50_000
        while took_s < 1.5 * lost_s:
            begin, n = time.monotonic(), 2 * n
            assert engine.run({"n": np.array(n)})["y"] == n
            took_s = time.monotonic() - begin
        engine.close()


def test_a_run_that_never_ends_is_an_error_and_one_that_nobody_waits_for_is_ended(
    bridge: Bridge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page has its usual time to answer, because a busy machine may delay it."""
    path = tmp_path / "counting.onnx"
    path.write_bytes(counting())
    end = {"n": np.array(2**60)}
    engine = at_page(bridge, path)
    monkeypatch.setattr(onnx_engine, "_SILENT_S", 3.0)
    with pytest.raises(EngineError, match=r"worker was restarted: it gave no sign for 3 s"):
        engine.run(end)
    engine.close()
    monkeypatch.setattr(onnx_engine, "_SILENT_S", 1e6)
    engine = at_page(bridge, path)
    with ThreadPoolExecutor() as pool:
        running = pool.submit(engine.run, end)
        until(running.running, "the run to begin")
        engine.stop()
        with pytest.raises(EngineError, match=r"page was (lost|closed)"):
            running.result()
    engine = at_page(bridge, path)
    assert engine.run({"n": np.array(3)})["y"] == 3
    engine.close()


def test_refusals_are_one_line(bridge: Bridge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(residual(), tmp_path / "model.onnx")
    with pytest.raises(EngineError, match="no provider 'cuda' in a browser; there is wasm"):
        at_page(bridge, path, provider="cuda")
    engine = at_page(bridge, path, provider="cpu")
    with monkeypatch.context() as patch:
        patch.setattr("edge.bridge.engines.TURN_S", 0.2)
        with pytest.raises(EngineError, match="another session"):
            at_page(bridge, path)
    with monkeypatch.context() as patch:
        patch.setattr(onnx_engine, "MAX_FRAME", 1024)
        with pytest.raises(EngineError, match=r"MiB, at most .* cut the model elsewhere"):
            engine.run(images())
    engine.close()
    with pytest.raises(EngineError, match=r"page was (lost|closed)"):
        engine.run(images())
    monkeypatch.setattr("tests.support.bridged_page.MEMORY", 1 << 20)
    with pytest.raises(NotEnoughMemory, match=r"needs \d+ MiB in the browser, which has 1; give it fewer nodes"):
        at_page(bridge, path)


def test_operations_that_are_wrong_are_answered_with_one_line(bridge: Bridge, tmp_path: Path) -> None:
    engine = at_page(bridge, saved(residual(), tmp_path / "model.onnx"))
    values = images()["image"].tobytes()
    image = {"name": "image", "type": "float32", "dims": [1, 8, 8, 8]}
    try:
        for payload, inputs in (
            (values, [{**image, "type": "float"}]),
            (values, [{**image, "dims": [1, -8, 8, 8]}]),
            (values, [{**image, "dims": "8"}]),
            (values[:-1], [image]),
            (values + b"x", [image]),
            (values, [{**image, "name": "other"}]),
            (values, [{**image, "dims": [1, 8, 64]}]),
            (b"", []),
            (b"", None),
        ):
            with pytest.raises(EngineError, match=r"\Athe browser's page: \S.*\Z"):
                engine._page.call("onnx_run", payload, inputs=inputs)
        with pytest.raises(EngineError, match="no slice is loaded"):
            engine._page.call("clear")
        assert_close(engine.run(images()), whole(residual(), images()))
    finally:
        engine.close()


def test_page_says_why_it_cannot_load(open_page: Open, tmp_path: Path) -> None:
    page = open_page(tmp_path / "store")  # its bridge does not serve onnxruntime-web
    path = tmp_path / "model.onnx"
    path.write_bytes(b"no network")
    name, _ = page.send_file(path)
    for fields, reason in (
        ({"file": "0" * 64, "threads": 1}, "is not complete here"),
        ({"file": name, "threads": "x"}, "must be a whole number"),
        ({"file": name, "threads": 1}, "the bridge answered 404"),
    ):
        with pytest.raises(PageError, match=reason):
            page.call("onnx_load", **fields)
    with pytest.raises(PageError, match="no stage of an ONNX model is loaded"):
        page.call("onnx_run", inputs=[])


def test_damaged_file_is_refused_by_the_page(bridge: Bridge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(residual(), tmp_path / "model.onnx")
    file = load(path)
    damaged = tmp_path / "damaged.onnx"
    damaged.write_bytes(path.read_bytes()[:-40])
    monkeypatch.setattr(onnx_engine, "load", lambda _: file)
    with pytest.raises(EngineError, match=r"\Athe browser's page: \S.*\Z"):
        at_page(bridge, damaged)
    at_page(bridge, path).close()
