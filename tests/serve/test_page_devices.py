"""Do what a person does in the devices view, with real workers, and check it with axe-core."""

import os
from pathlib import Path

import pytest

from tests.serve.devices_server import serving_devices
from tests.serve.page_actions import SIZES, Stage, click
from tests.serve.page_devices import is_in, scenario
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


def test_a_phone_joins_by_its_link_and_comes_back_after_its_tab_was_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving_devices(tmp_path, monkeypatch) as server, browser(tmp_path / "profile") as page:
        stage = Stage(page, server.url, tmp_path)
        stage.open(390)
        stage.go("devices")
        click(page, "Add a device")
        page.value("document.getElementById('add-phone').click(); document.getElementById('add-name').focus()")
        name = "phone" + 51 * "x"
        page.type(name)
        page.press("Enter", "\r")
        shown = "document.getElementById('add-link')"
        link = page.wait_for(f"{shown}.checkVisibility() && {shown}.href")
        assert str(link).startswith("https://")  # though the server listens on this machine only
        assert page.value("(dialog => dialog.scrollWidth <= dialog.clientWidth)(document.getElementById('add-dialog'))")
        is_in(stage, name, "joining")
        for _ in range(2):
            with browser(tmp_path / "phone") as phone:
                phone.call("Security.setIgnoreCertificateErrors", ignore=True)  # as a person chooses to continue
                phone.call("Page.navigate", url=link)
                is_in(stage, name, "ready")
                page.wait_for(f"document.getElementById('add-result-title').textContent === '{name} has joined'")
                phone.wait_for("document.getElementById('state').textContent === 'Ready, waiting for work.'")
            is_in(stage, name, "lost")
            page.wait_for("document.getElementById('device-cards').innerText.includes('open its page there')")
        page.value("history.back()")
        page.wait_for("!document.getElementById('add-dialog').open")


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
