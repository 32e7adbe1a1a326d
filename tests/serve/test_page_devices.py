"""Do what a person does in the devices view, with real workers, and check it with axe-core."""

import os
from pathlib import Path

import pytest

from tests.serve.devices_server import serving_devices
from tests.serve.page_actions import SIZES, Stage
from tests.serve.page_devices import scenario
from tests.support.axe import violations
from tests.support.browser import browser

pytestmark = pytest.mark.thorough


def test_each_action_of_the_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pictures = Path(os.environ.get("EDGE_PAGE_PICTURES", str(tmp_path)))
    with serving_devices(tmp_path, monkeypatch) as server, browser(tmp_path / "profile") as page:
        stage = Stage(page, server.url, tmp_path)

        def picture(name: str) -> None:
            assert violations(page) == [], name
            stage.picture(pictures / f"{name}.png")

        scenario(stage, server, tmp_path, picture)
        assert [text for text in page.complaints if "favicon" not in text] == []


@pytest.mark.parametrize("width", SIZES)
def test_hostile_names_of_devices_stay_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    evil = "<img src=x onerror=window.ran=1>\\u202e"
    with serving_devices(tmp_path, monkeypatch) as server, browser(tmp_path / "profile") as page:
        stage = Stage(page, server.url, tmp_path)
        stage.open(width)
        stage.go("devices")
        page.wait_for("document.querySelectorAll('#device-cards > li').length === 1")
        texts = ", ".join(f"{key}: '{evil}'" for key in ("name", "text", "state", "kind", "cpu"))
        device = f"{{{texts}, memory: {{}}, models: [], busy: 0, since: 1}}"
        page.value(
            "window.real = window.fetch; window.fetch = async (...all) => { const answer = await window.real(...all);"
            " if (!String(all[0]).includes('v1/cluster')) return answer; const value = await answer.json();"
            f" value.devices.push({device}); value.links.push({{from: 'this device', to: '{evil}', kind: '{evil}'}});"
            f" value.removed = ['{evil}']; return new Response(JSON.stringify(value)); }}"
        )
        page.wait_for("document.querySelectorAll('#device-cards > li').length === 2")
        page.wait_for("document.getElementById('removed-devices').innerText.includes('<img')")
        assert page.value("document.querySelectorAll('#devices img').length") == 0
        assert page.value("window.ran") is None
        assert page.value("document.documentElement.scrollWidth") <= width
