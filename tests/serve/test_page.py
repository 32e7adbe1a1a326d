"""Test the page of `edge serve` in a real browser, with a model that returns the answers of a test."""

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edge.errors import EngineGone
from edge.serve.app import create_app
from edge.serve.options import ServeOptions
from tests.serve.page_actions import answered, ask, choose_file, click, press, shown
from tests.serve.planning_data import advised, front_of_plans
from tests.serve.scripted import ScriptedModels
from tests.serve.serving import serving
from tests.support.browser import Page, browser
from tests.support.multimodal import png

pytestmark = pytest.mark.thorough
KEY = "a key of this test"
SHIFT = 8

# Markdown, and the HTML of the elements that are to come of it.
MARKDOWN = [
    ("one *two* **three** ***four***", "<p>one <em>two</em> <strong>three</strong> <em><strong>four</strong></em></p>"),
    ("a_b_c and _d_ ~~e~~ 2 * 3 * 4", "<p>a_b_c and <em>d</em> <del>e</del> 2 * 3 * 4</p>"),
    (r"\*not\* `a*b*` ``c`d``", "<p>*not* <code>a*b*</code> <code>c`d</code></p>"),
    ("# Title #1\n## Next", "<h3>Title #1</h3><h4>Next</h4>"),
    ("- a\n  - b\n- c", "<ul><li>a<ul><li>b</li></ul></li><li>c</li></ul>"),
    ("3. a\n4. b", '<ol start="3"><li>a</li><li>b</li></ol>'),
    ("> a\n> - b", "<blockquote><p>a</p><ul><li>b</li></ul></blockquote>"),
    ("a\n***\nb", "<p>a</p><hr><p>b</p>"),
    ("a  \nb", "<p>a<br>b</p>"),
    ("<b>x</b> &lt;", "<p>&lt;b&gt;x&lt;/b&gt; &lt;</p>"),
    ("<div>\n<script>alert(1)</script>", "<p>&lt;div&gt;</p><p>&lt;script&gt;alert(1)&lt;/script&gt;</p>"),
    ("- [x] a", "<ul><li>[x] a</li></ul>"),
    ("<img src=x onerror=alert(1)>", "<p>&lt;img src=x onerror=alert(1)&gt;</p>"),
    ("[x](javascript:alert(1))", "<p>[x](javascript:alert(1))</p>"),
    ("[x](data:text/html,1) [y](/v1/models)", "<p>[x](data:text/html,1) [y](/v1/models)</p>"),
    ("[**x**](https://a.org/b_c)", '<p><a href="https://a.org/b_c"><strong>x</strong></a></p>'),
    ("see https://a.org/b_(c).", '<p>see <a href="https://a.org/b_(c)">https://a.org/b_(c)</a>.</p>'),
    ("![x](https://a.org/p.png)", '<p><a href="https://a.org/p.png">x</a></p>'),
    ("**open and *never closed", "<p>**open and *never closed</p>"),
]  # fmt: skip
# What a careless parser takes ages for, or too much stack.
HARD = ["*a " * 30000, "[" * 50000, "`" * 7 + "``a`" * 20000, "> " * 20000 + "x", "- " * 20000, "](" * 30000]
HARD += ["# " + " " * 50000 + "x", "|" * 30000 + "\n" + "|-" * 30000, "h" * 100000, "a_" * 40000, "\n" * 200000]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, ScriptedModels]]:
    models, front = ScriptedModels(), tmp_path_factory.mktemp("front") / "front.json"
    front.write_text(json.dumps(front_of_plans()))
    with advised(), serving(create_app(models, ServeOptions(front=front))) as address:
        yield address, models


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser(tmp_path_factory.mktemp("browser")) as page:
        yield page


@pytest.fixture
def models(served: tuple[str, ScriptedModels]) -> ScriptedModels:
    """The models that the server serves, as if it had just begun."""
    served[1].__init__()  # type: ignore[misc]
    return served[1]


@pytest.fixture
def page(chromium: Page, served: tuple[str, ScriptedModels], models: ScriptedModels) -> Iterator[Page]:
    """The page, opened for the first time. At the end nothing went wrong in it."""
    chromium.look(1200, 800)
    opened(chromium, served[0])
    chromium.value("localStorage.clear(); sessionStorage.clear()")
    chromium.complaints.clear()
    opened(chromium, served[0])
    yield chromium
    assert chromium.complaints == []


def opened(page: Page, address: str) -> None:
    page.open(f"{address}/")
    page.wait_for("document.querySelector('#welcome h2')?.textContent === 'scripted'")


def requests(models: ScriptedModels) -> Any:
    return models.scripted.requests[-1].messages


def test_an_answer_comes_as_markdown_with_its_figures(page: Page, models: ScriptedModels) -> None:
    models.scripted.says = "# Hi\n\n- **a**\n\n```python\nx = '<b>'\n```\n\n| a | b |\n|---|--:|\n| 1 | 2 |\n"
    ask(page, "What?")
    answered(page)
    tags = page.value("[...document.querySelectorAll('.answer .text *')].map(one => one.tagName).join(' ')")
    for tag in ("H3", "UL LI STRONG", "PRE CODE", "TABLE THEAD TR TH TH TBODY TR TD TD"):
        assert tag in tags
    assert page.value("document.querySelector('.answer pre').textContent") == "x = '<b>'"
    figures = page.value("document.querySelector('.figures').textContent")
    assert f"{len(models.scripted.says)} tokens" in figures
    assert "tokens/s" in figures
    assert "prompt 7 tokens, 3 of them cached" in figures
    assert models.scripted.requests[-1].sampling["temperature"] == 0.7


def test_a_thought_is_folded_and_goes_back_to_the_model(page: Page, models: ScriptedModels) -> None:
    models.scripted.thinks, models.scripted.template = "It is *7*.", "<think></think>"
    page.value("document.getElementById('open-settings').click()")
    page.value("document.getElementById('thought').focus()")
    page.type("50")
    ask(page, "3 plus 4?")
    assert answered(page) == "Hello there."
    assert models.scripted.requests[-1].think == 50
    folded = "document.querySelector('.answer details.thoughts')"
    assert page.value(f"[{folded}.hidden, {folded}.open, {folded}.firstChild.textContent]") == [
        False,
        False,
        "Thoughts",
    ]
    assert page.value(f"{folded}.lastChild.innerHTML") == "<p>It is <em>7</em>.</p>"
    ask(page, "Sure?")
    assert answered(page, 2) == "Hello there."
    assert requests(models)[1] == {"role": "assistant", "content": "Hello there.", "reasoning_content": "It is *7*."}


def test_code_in_an_answer_stays_text(page: Page, models: ScriptedModels) -> None:
    models.scripted.says = (
        "<script>window.ran = 1</script><img src=x onerror='window.ran = 1'> [a](javascript:window.ran=1)"
    )
    ask(page, "<script>window.ran = 1</script>")
    assert answered(page) == models.scripted.says
    assert page.value("document.querySelectorAll('#messages script, #messages img, #messages a').length") == 0
    assert page.value("window.ran") is None


def test_escape_stops_an_answer_at_the_server_too(page: Page, models: ScriptedModels) -> None:
    models.scripted.says, models.scripted.waits = "So far", True
    ask(page, "Count.")
    page.wait_for("document.querySelector('.answer > .text')?.textContent === 'So far'")
    assert page.value("document.getElementById('send').hidden") is True
    page.press("Escape")
    assert answered(page) == "So far"
    assert "stopped" in page.value("document.querySelector('.figures').textContent")
    for _ in range(1000):
        if models.scripted.answers[-1].cancelled.is_set():
            break
        page.value("new Promise(resolve => setTimeout(resolve, 50))")
    assert models.scripted.answers[-1].cancelled.is_set()


def test_retry_and_edit_keep_the_former_versions(page: Page, models: ScriptedModels) -> None:
    ask(page, "First")
    answered(page)
    models.scripted.says = "Another."
    click(page, "Retry")
    page.wait_for("document.querySelector('.answer > .text')?.textContent === 'Another.'")
    assert [item["content"] for item in requests(models)] == ["First"]
    answered(page)
    click(page, "Edit")
    assert page.value("document.getElementById('question').value") == "First"
    page.type(" of all")
    page.press("Enter", "\r")
    page.wait_for("document.querySelector('.question p').textContent === 'First of all'")
    answered(page)
    assert [item["content"] for item in requests(models)] == ["First of all"]
    ask(page, "Second")
    answered(page, 2)
    assert [item["content"] for item in requests(models)] == ["First of all", "Another.", "Second"]
    assert shown(page) == ["First of all", "Another.", "Second", "Another."]
    press(page, "Earlier version")  # the first question is a branch of its own, with two answers
    assert shown(page) == ["First", "Another."]
    press(page, "Earlier version")
    assert shown(page) == ["First", "Hello there."]
    assert page.value("document.activeElement.ariaLabel") == "Later version"  # the earlier one is the first
    page.value("location.reload()")
    page.wait_for("document.querySelectorAll('.answer').length === 1")
    assert shown(page) == ["First", "Hello there."]
    ask(page, "Third")
    answered(page, 2)
    assert [item["content"] for item in requests(models)] == ["First", "Hello there.", "Third"]


def test_lines_system_prompt_and_limits_reach_the_model(page: Page, models: ScriptedModels) -> None:
    click(page, "Settings")
    fields = {"system": "Be brief.", "temperature": "0", "top-p": "0.9", "top-k": "40", "min-p": "0.1",
              "repeat-penalty": "1.1", "seed": "7", "max-tokens": "5", "stop-texts": "END\\n"}  # fmt: skip
    for field, value in fields.items():
        page.value(f"document.getElementById('{field}').select()")
        page.value(f"document.getElementById('{field}').focus()")
        page.type(value)
    page.press("Escape")
    page.wait_for("document.getElementById('settings').hidden")
    page.value("document.getElementById('question').focus()")
    page.type("one")
    page.press("Enter", "\r", modifiers=SHIFT)
    page.type("two")
    page.press("Enter", "\r")
    assert answered(page) == "Hello"
    assert [(item["role"], item["content"]) for item in requests(models)] == [
        ("system", "Be brief."),
        ("user", "one\ntwo"),
    ]
    assert models.scripted.requests[-1].max_tokens == 5
    assert models.scripted.requests[-1].sampling == {
        "temperature": 0, "top_p": 0.9, "top_k": 40, "min_p": 0.1, "repeat_penalty": 1.1, "seed": 7, "stop": ["END\n"],
    }  # fmt: skip
    assert "token limit" in page.value("document.querySelector('.figures').textContent")


def test_files_are_put_before_the_question(page: Page, models: ScriptedModels, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("a ``` fence\n")
    (tmp_path / "picture.bin").write_bytes(b"\xff\xd8\x00")
    for name in ("notes.txt", "picture.bin"):
        choose_file(page, tmp_path / name)
    page.wait_for("document.querySelectorAll('#files li').length === 1")
    assert "picture.bin" in page.wait_for("document.getElementById('notice').textContent")
    ask(page, "What is in it?")
    answered(page)
    assert requests(models)[0]["content"] == "File notes.txt:\n````\na ``` fence\n````\n\nWhat is in it?"


def test_a_picture_goes_to_the_model_and_is_not_kept(page: Page, models: ScriptedModels, tmp_path: Path) -> None:
    (tmp_path / "cat.png").write_bytes(png())
    choose_file(page, tmp_path / "cat.png")
    page.wait_for("document.querySelectorAll('#files li').length === 1")
    ask(page, "What is it?")
    answered(page)
    media = models.scripted.requests[-1].media
    assert [base64.b64decode(data) for data in media.values()] == [png()]
    assert requests(models)[0]["content"] == f"{next(iter(media))}What is it?"
    saved = page.value("JSON.stringify(localStorage)")
    assert "cat.png" in saved
    assert "base64" not in saved


def test_chats_are_kept_and_can_be_deleted(page: Page, served: tuple[str, ScriptedModels]) -> None:
    ask(page, "Remember me")
    answered(page)
    page.open(f"{served[0]}/")
    page.wait_for("document.querySelector('.question p')?.textContent === 'Remember me'")
    click(page, "New chat")
    assert page.value("document.querySelectorAll('.question').length") == 0
    press(page, "Rename Remember me")
    page.type("A name")
    page.press("Enter", "\r")
    click(page, "A name")
    page.wait_for("document.querySelector('.question p')?.textContent === 'Remember me'")
    page.value("window.confirm = () => true")
    press(page, "Delete A name")
    assert page.value("[document.querySelectorAll('.question').length, localStorage.length]") == [0, 0]
    ask(page, "Again")
    answered(page)
    click(page, "Delete all chats")
    assert page.value("document.querySelectorAll('.question').length") == 0
    assert page.value("Object.keys(localStorage).filter(name => name.startsWith('edge.chat.')).length") == 0


def test_an_answer_that_fails_says_so_and_can_be_asked_again(page: Page, models: ScriptedModels) -> None:
    models.scripted.says, models.scripted.fails = "Half", EngineGone("the engine ended; ask again")
    ask(page, "Well?")
    assert answered(page) == "Half"
    assert "the engine ended" in page.value("document.querySelector('.answer .wrong').textContent")
    models.scripted.fails = None
    click(page, "Retry")
    page.wait_for("document.querySelector('.answer .wrong').textContent === ''")
    assert answered(page) == "Half"


def test_the_key_is_asked_for_once_and_kept_for_the_tab_alone(chromium: Page) -> None:
    models = ScriptedModels()
    with serving(create_app(models, ServeOptions(api_keys=(KEY,)))) as address:
        chromium.open(f"{address}/")
        chromium.wait_for("document.getElementById('key-dialog').open")
        chromium.type("wrong")
        chromium.press("Enter", "\r")
        chromium.wait_for("document.getElementById('key-why').textContent.includes('refused this key')")
        chromium.wait_for("document.getElementById('key-dialog').open")
        chromium.type(KEY)
        chromium.press("Enter", "\r")
        chromium.wait_for("document.querySelector('#welcome h2')?.textContent === 'scripted'")
        ask(chromium, "Open?")
        assert answered(chromium) == "Hello there."
        assert KEY not in chromium.value("JSON.stringify({...localStorage})")
        assert chromium.value("document.getElementById('key-dialog').open") is False
        chromium.open("about:blank")


def test_a_change_that_needs_an_administrator_asks_for_another_key(chromium: Page) -> None:
    models = ScriptedModels()
    options = ServeOptions(api_keys=(KEY,), admin_keys=("administrator",))
    with serving(create_app(models, options)) as address:
        chromium.open(f"{address}/health")
        chromium.value(f"sessionStorage.setItem('edge.key', {json.dumps(KEY)})")
        chromium.open(f"{address}/")
        chromium.wait_for("document.querySelector('#welcome h2')?.textContent === 'scripted'")
        chromium.value("void import('/api.js').then(({post}) => post('v1/plan', {plan: {}})).then(() => { done = 1 })")
        chromium.wait_for("document.getElementById('key-why').textContent.includes('administrator')")
        chromium.wait_for("document.getElementById('key-dialog').open")
        chromium.type("administrator")
        chromium.press("Enter", "\r")
        chromium.wait_for("window.done === 1")
        assert models.plans == [{}]
        chromium.open("about:blank")


def test_former_address_of_the_cluster_shows_the_devices(page: Page) -> None:
    page.value("location.hash = '#cluster'")
    page.wait_for("document.querySelector('.model h2')?.textContent === 'scripted'")
    assert page.value("document.getElementById('to-devices').ariaCurrent") == "page"
    assert "tokens generated" in page.value("document.querySelector('.counters').textContent")


def test_plan_of_the_front_is_changed_with_keys(page: Page, models: ScriptedModels) -> None:
    page.value("location.hash = '#models'")
    page.wait_for("document.querySelectorAll('.point').length > 2")
    first = page.value("document.querySelector('#plan h3').textContent")
    page.value("document.getElementById('plot').focus()")
    page.press("End")
    assert page.wait_for("document.querySelector('#plan h3').textContent") != first
    page.wait_for("document.querySelectorAll('.changes li').length > 1")
    click(page, "Run this plan")
    page.wait_for("document.getElementById('switched')?.textContent === 'scripted runs this plan now.'")
    last = max(front_of_plans()["points"], key=lambda point: float(point["predicted"]["latency_s"]))
    assert models.plans == [last["plan"]]


def test_without_a_front_there_are_no_plans_to_choose_from(chromium: Page) -> None:
    with advised(), serving(create_app(ScriptedModels(), ServeOptions())) as address:
        chromium.open(f"{address}/")
        chromium.complaints.clear()
        chromium.open(f"{address}/#models")
        request = "performance.getEntriesByType('resource').some(one => one.name.endsWith('/v1/front?model=scripted'))"
        chromium.wait_for(request)
        assert chromium.value("[document.getElementById('plans').hidden, document.getElementById('front').hidden]") == [
            True,
            False,
        ]
        assert chromium.complaints == []
        chromium.open("about:blank")


@pytest.mark.parametrize("view", ["chat", "devices", "models"])
@pytest.mark.parametrize("dark", [False, True])
def test_nothing_is_wider_than_a_phone(page: Page, models: ScriptedModels, view: str, dark: bool) -> None:
    models.scripted.says = f"{'x' * 300}\n\n```\n{'y' * 300}\n```\n\n|{'a|' * 30}\n|{'-|' * 30}\n"
    ask(page, "z" * 300)
    answered(page)
    page.look(360, 740, dark=dark)
    page.value(f"location.hash = '#{view}'")
    page.wait_for(f"!document.getElementById('{view}').hidden")
    wide = "[document.documentElement, document.getElementById('scroll'), ...document.querySelectorAll('.view')]"
    assert page.value(f"{wide}.every(one => one.scrollWidth <= one.clientWidth)")
    ground, text = page.value(
        "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"
    )
    assert (_light(ground) < _light(text)) == dark


def _light(color: str) -> int:
    return sum(int(part) for part in color.removeprefix("rgb(").removesuffix(")").split(","))


def test_markdown_becomes_the_elements_it_means(page: Page) -> None:
    for text, expected in MARKDOWN:
        assert rendered(page, text) == expected, text


def test_a_growing_answer_keeps_the_elements_that_are_done(page: Page) -> None:
    saved = page.value(
        "import('/markdown.js').then(({show}) => { const e = document.createElement('div'); show(e, 'a\\n\\nb');"
        " const first = e.firstChild; show(e, 'a\\n\\nb c');"
        " return first === e.firstChild && e.lastChild.textContent; })"
    )
    assert saved == "b c"


@pytest.mark.parametrize("number", range(len(HARD)))
def test_no_text_takes_ages_to_show(page: Page, number: int) -> None:
    assert rendered(page, f"{HARD[number]}\n\nend").endswith("<p>end</p>")


def rendered(page: Page, text: str) -> str:
    """The HTML that a text becomes, without the attributes that every link has and without line breaks."""
    html = page.value(
        "import('/markdown.js').then(({show}) => { const e = document.createElement('div');"
        f" show(e, {json.dumps(text)}); return e.innerHTML; }})"
    )
    return str(html).replace(' target="_blank" rel="noopener noreferrer nofollow"', "").replace("\n", "")
