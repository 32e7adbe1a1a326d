"""Test the Models view of the page of `edge serve` in Chromium, with a real server, worker, and stand-in hub."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from edge.models import synth
from edge.serve.app import create_app
from edge.serve.options import ServeOptions
from tests.cli.test_serve_command import served
from tests.serve.models_actions import MODELS
from tests.serve.page_actions import SIZES, Stage
from tests.serve.planning_data import advised, front_of_plans, row
from tests.serve.scripted import Scripted, ScriptedModels
from tests.serve.serving import serving
from tests.support.axe import violations
from tests.support.browser import Page, browser
from tests.support.hub_stand_in import Hub
from tests.support.workers import worker

pytestmark = pytest.mark.thorough
HOSTILE = "<img src=x onerror=window.ran=1>\u202e'\"&lt;script>window.ran=1</script>"


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser(tmp_path_factory.mktemp("browser")) as page:
        yield page


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("hub") / "tiny.gguf"
    synth.synthesize(path, synth.shape("llama", layers=1, embd=64, ff=64, heads=2, vocab=300), "q8_0")
    return path.read_bytes()


@pytest.mark.parametrize("width", SIZES)
def test_each_action_of_the_models_view(chromium: Page, model: bytes, tmp_path: Path, width: int) -> None:
    hub = Hub()
    hub.repos["someone/tiny-GGUF"] = {"tiny.gguf": model}
    with hub.serving(), worker(tmp_path / "w", "--threads", "1", "--name", "attic") as attic:
        environment = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_XET": "1"}
        with served("--workers", attic.address, "--prefix-cache", "0", **{**os.environ, **environment}) as server:
            stage = Stage(chromium, server.url, tmp_path)
            stage.open(width, dark=width < 600)
            chromium.complaints.clear()
            for action in MODELS:
                action(stage)
                wide = "document.getElementById('models').scrollWidth"
                assert chromium.value(f"{wide} <= document.getElementById('models').clientWidth"), action.__name__
                assert violations(chromium) == [], action.__name__
            assert [text for text in chromium.complaints if "404" not in text] == []
            chromium.open("about:blank")


@pytest.mark.parametrize("width", SIZES)
def test_hostile_names_of_models_devices_and_plans_inject_nothing(chromium: Page, tmp_path: Path, width: int) -> None:
    front = front_of_plans()
    front["model"] = HOSTILE
    front["devices"] = [{"name": HOSTILE, "address": name} for name in ("local", "laptop", "pi")]
    for point in front["points"]:
        point["label"] = HOSTILE
    advice = {
        "rows": [row(HOSTILE, type=HOSTILE, licence=HOSTILE, memory_bytes={HOSTILE: 7})],
        "devices": [HOSTILE], "memory_bytes": {HOSTILE: 8}, "notes": [],
    }  # fmt: skip
    (tmp_path / "front.json").write_text(json.dumps(front))
    models = ScriptedModels()
    models.scripted = Scripted(HOSTILE)
    models.fetched = []
    app = create_app(models, ServeOptions(front=tmp_path / "front.json"))
    with advised(advice), serving(app) as address:
        stage = Stage(chromium, address, tmp_path)
        stage.open(width)
        stage.go("models")
        chromium.wait_for("document.querySelectorAll('.point').length > 2")
        chromium.wait_for("document.querySelectorAll('#advice .card').length === 1")
        chromium.wait_for("document.querySelectorAll('.changes li').length > 1")
        assert chromium.value("document.querySelector('#here h3').textContent") == HOSTILE.replace("\u202e", "\ufffd")
        assert chromium.value("document.querySelectorAll('#models :is(img, script, iframe)').length") == 0
        assert chromium.value("window.ran") is None
        wide = "document.getElementById('models').scrollWidth <= document.getElementById('models').clientWidth"
        assert chromium.value(wide)
        chromium.open("about:blank")
