"""Test that the page continues an answer after the connection broke or the server restarted, in a real browser."""

from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from edge.errors import Interrupted
from edge.serve.app import create_app
from edge.serve.options import ServeOptions
from edge.text.templates.template import CONTINUES
from tests.serve.page_actions import Stage, answered, ask, click, shown
from tests.serve.scripted import ScriptedModels
from tests.serve.serving import serving
from tests.support.browser import browser
from tests.support.relay import Relay, relay

pytestmark = pytest.mark.thorough
STATUS = "document.querySelector('.answer .figures')?.textContent"


@pytest.fixture
def models() -> ScriptedModels:
    return ScriptedModels()


@pytest.fixture
def stage(tmp_path_factory: pytest.TempPathFactory, models: ScriptedModels) -> Iterator[tuple[Stage, Relay]]:
    folder = tmp_path_factory.mktemp("page")
    with (
        serving(create_app(models, ServeOptions())) as address,
        browser(folder) as page,
        relay(("127.0.0.1", urlsplit(address).port or 0)) as between,
    ):
        stage = Stage(page, f"http://127.0.0.1:{between.server_address[1]}", folder)
        stage.open(1280)
        yield stage, between
        page.open("about:blank")


def test_answer_continues_where_the_connection_broke(stage: tuple[Stage, Relay], models: ScriptedModels) -> None:
    (page, between), scripted = (stage[0].page, stage[1]), models.scripted
    scripted.says, scripted.waits = "Hello th", True
    ask(page, "Well?")
    page.wait_for("document.querySelector('.answer > .text')?.textContent === 'Hello th'")
    target = between.target
    # Five minutes pass at once, as in a device that sleeps.
    page.value("(real => { performance.now = () => real() + 3e5; })(performance.now.bind(performance))")
    between.cut()
    page.wait_for(f"{STATUS}.includes('Trying again')")
    assert shown(page) == ["Well?", "Hello th"]
    scripted.says, scripted.waits = "ere.", False
    between.target = target
    assert answered(page) == "Hello there."
    assert page.value(f"{STATUS}").startswith("12 tokens")
    messages = scripted.requests[-1].messages
    assert [(message["role"], message["content"]) for message in messages or ()] == [
        ("user", "Well?"),
        ("assistant", "Hello th"),
    ]
    assert (messages or ())[-1][CONTINUES] is True


def test_thought_begins_anew_after_the_connection_broke(stage: tuple[Stage, Relay], models: ScriptedModels) -> None:
    (page, between), scripted = (stage[0].page, stage[1]), models.scripted
    scripted.thinks, scripted.says, scripted.waits, scripted.template = "It may", "", True, "<think></think>"
    ask(page, "Well?")
    page.wait_for("document.querySelector('.thoughts .text')?.textContent === 'It may'")
    target = between.target
    between.cut()
    page.wait_for(f"{STATUS}.includes('Trying again')")
    scripted.thinks, scripted.says, scripted.waits = "It is.", "Yes.", False
    between.target = target
    assert answered(page) == "Yes."
    assert page.value("document.querySelector('.thoughts .text').textContent") == "It is."
    assert len(scripted.requests[-1].messages or ()) == 1


def test_answer_waits_for_a_server_that_is_away_until_it_is_stopped(stage: tuple[Stage, Relay]) -> None:
    page, between = stage[0].page, stage[1]
    between.cut()
    ask(page, "Well?")
    page.wait_for(f"{STATUS}?.includes('cannot be reached. Trying again')")
    page.press("Escape")
    assert answered(page) == ""
    assert "stopped" in page.value(STATUS)
    page.complaints.clear()  # the browser writes each failed request there


def test_stopped_or_reloaded_answer_is_continued_on_demand(stage: tuple[Stage, Relay], models: ScriptedModels) -> None:
    page, scripted = stage[0].page, models.scripted
    scripted.says, scripted.waits = "One, ", True
    ask(page, "Count.")
    page.wait_for("document.querySelector('.answer > .text')?.textContent === 'One, '")
    page.value("location.reload()")
    page.wait_for("document.querySelector('.answer .figures')?.textContent.includes('interrupted')")
    scripted.says, scripted.waits, scripted.fails = "two, ", False, Interrupted("the server is restarted")
    click(page, "Continue")
    page.wait_for("document.querySelector('.answer > .text').textContent.startsWith('One, two, ')")
    scripted.fails = None
    page.wait_for("!document.getElementById('send').hidden")
    assert shown(page)[1].startswith("One, two, ")
    assert page.value("document.querySelector('.answer .wrong').textContent") == ""
