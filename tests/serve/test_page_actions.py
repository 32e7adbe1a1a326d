"""Do what a person does on the page of `edge serve` in windows of both widths, and check it with axe-core."""

import json
from collections.abc import Iterator

import pytest

from edge.serve.app import create_app
from edge.serve.options import ServeOptions
from tests.serve.page_actions import CHAT, SIZES, Stage, answered, ask, press
from tests.serve.planning_data import advised, front_of_plans
from tests.serve.scripted import ScriptedModels
from tests.serve.serving import serving
from tests.support.axe import violations
from tests.support.browser import browser

pytestmark = pytest.mark.thorough
ANSWER = "# Title\n\n`code`, [link](https://a.org).\n\n```python\nx = 1\n```\n\n| a | b |\n|---|--:|\n| 1 | 2 |"


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    folder = tmp_path_factory.mktemp("page")
    (folder / "front.json").write_text(json.dumps(front_of_plans()))
    models = ScriptedModels()
    models.scripted.says, models.scripted.thinks, models.scripted.template = ANSWER, "It is *7*.", "<think></think>"
    app = create_app(models, ServeOptions(front=folder / "front.json"))
    with advised(), serving(app) as address, browser(folder / "profile") as page:
        yield Stage(page, address, folder)


@pytest.mark.parametrize("width", SIZES)
def test_each_action_of_the_chat(stage: Stage, width: int) -> None:
    stage.open(width)
    stage.page.complaints.clear()
    for action in CHAT:
        action(stage)
        assert stage.page.value("document.documentElement.scrollWidth") <= width, action.__name__
    assert stage.page.complaints == []


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", SIZES)
def test_axe_finds_nothing_serious_in_any_view(stage: Stage, width: int, dark: bool) -> None:
    stage.open(width, dark=dark)
    page = stage.page
    assert violations(page) == []
    ask(page, "What?")
    answered(page)
    page.value("document.querySelector('.thoughts').open = true")
    assert violations(page) == []
    for panel in ("Chats", "Settings"):
        if panel == "Settings" or stage.is_narrow:
            press(page, panel)
        assert violations(page) == [], panel
        page.press("Escape")
    for view in ("devices", "models"):
        stage.go(view)
        page.wait_for(f"document.getElementById('{view}').innerText.length > 20")
        assert violations(page) == [], view


@pytest.mark.parametrize("width", SIZES)
def test_each_control_is_reached_by_the_keyboard(stage: Stage, width: int) -> None:
    """In each view, Tab reaches every control that is seen, and the focus is visible."""
    stage.open(width)
    page = stage.page
    ask(page, "What?")
    answered(page)
    controls = (
        "[...document.querySelectorAll('a[href], button, input, select, textarea, summary')]"
        ".filter(one => one.checkVisibility() && !one.disabled && !one.closest('[inert]'))"
    )
    for view in ("chat", "devices", "models"):
        stage.go(view)
        page.wait_for(f"document.getElementById('{view}').innerText.length > 20")
        page.value("window.reached = new Set(); window.unmarked = new Set(); document.activeElement.blur()")
        for _ in range(2 * page.value(f"{controls}.length") + 10):
            page.press("Tab")
            page.value(
                "(focused => { reached.add(focused.outerHTML);"
                " const plain = focused === document.body || focused.id === 'question';"
                " if (!plain && getComputedStyle(focused).outlineStyle === 'none') unmarked.add(focused.outerHTML); })"
                "(document.activeElement)"
            )
        missed = page.value(f"{controls}.map(one => one.outerHTML).filter(one => !reached.has(one))")
        assert missed == [], view
        assert page.value("[...unmarked]") == [], view


def test_a_drawer_closes_by_its_button_escape_and_a_click_beside_it(stage: Stage) -> None:
    stage.open(390)
    page = stage.page
    for close in ("press", "escape", "beside"):
        press(page, "Chats")
        assert page.value("talk.inert")
        assert page.value("document.getElementById('history').contains(document.activeElement)")
        if close == "press":
            press(page, "Close the list of chats")
        elif close == "escape":
            page.press("Escape")
        else:
            page.value("document.getElementById('shade').click()")
        page.wait_for("document.getElementById('history').hidden && !talk.inert")
        assert page.value("document.activeElement.id") == "open-history"
