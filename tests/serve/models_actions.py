"""Actions of a person in the Models view of the page of `edge serve`, in Chromium. See `page_actions`.

`MODEL` is a small model of the stand-in hub. The server has a worker named `attic`.
"""

from __future__ import annotations

import json

from tests.serve.page_actions import Action, Stage, click, press
from tests.support.browser import Page

MODEL = "someone/tiny-GGUF:tiny.gguf"
BUNDLED = "edge-demo-q8_0"

KNEE = "document.querySelector('#picks button')"
ALONE = "[...document.querySelectorAll('#picks button')].find(one => one.textContent === 'This device alone')"


def card(name: str) -> str:
    """The JavaScript expression of a model's card, or undefined."""
    return (
        f"[...document.querySelectorAll('#here .card')].find(one => one.querySelector('h3').textContent === '{name}')"
    )


def state(stage: Stage, name: str, expected: str) -> None:
    """Wait until the card of a model shows a state."""
    stage.page.wait_for(f"{card(name)}?.querySelector('.state').textContent === '{expected}'")


def pull_model(stage: Stage) -> None:
    stage.go("models")
    stage.page.value("document.getElementById('pull-name').focus()")
    stage.page.type(MODEL)
    stage.page.press("Enter", "\r")
    stage.page.wait_for("document.querySelectorAll('#pulls .card').length === 1")
    state(stage, MODEL, "Not loaded")
    stage.page.wait_for("document.querySelectorAll('#pulls .card').length === 0")


def pull_what_is_missing(stage: Stage) -> None:
    stage.page.value("document.getElementById('pull-name').focus()")
    stage.page.type("someone/<img src=x onerror=window.ran=1>:x.gguf")
    click(stage.page, "Download")
    stage.page.wait_for("document.querySelector('#pulls .wrong')?.textContent")
    assert stage.page.value("[window.ran, document.querySelectorAll('#models img').length]") == [None, 0]
    click(stage.page, "Close")
    stage.page.wait_for("document.querySelectorAll('#pulls .card').length === 0")


def load_model(stage: Stage) -> None:
    press(stage.page, f"Load {MODEL}")
    state(stage, MODEL, "Loaded")


def unload_model(stage: Stage) -> None:
    press(stage.page, f"Unload {MODEL}")
    state(stage, MODEL, "Not loaded")


def find_plans(stage: Stage) -> None:
    stage.page.wait_for(f"{card(BUNDLED)} !== undefined")
    press(stage.page, f"Plans for {BUNDLED}")
    stage.page.wait_for(f"document.getElementById('front-model').value === '{BUNDLED}'")
    stage.page.value("document.getElementById('find-plans').click()")
    stage.page.wait_for("!document.getElementById('finding').hidden")
    for _ in range(10):  # the devices are measured
        if stage.page.value(
            "new Promise(done => { const end = Date.now() + 30000; const look = () => {"
            " const ready = document.getElementById('finding').hidden;"
            " if (ready || Date.now() > end) done(ready); else setTimeout(look, 50); }; look(); })"
        ):
            break
    assert stage.page.value("document.getElementById('front-notice').textContent") == ""
    stage.page.wait_for("document.querySelector('#plan h3') !== null")


def foreseen(page: Page) -> None:
    """Wait until the page shows what the chosen plan would change."""
    page.wait_for(
        "document.querySelector('#plan h3') && !document.querySelector('#plan [aria-busy=true], #plan .wrong')"
    )


def run_plan(stage: Stage, button: str) -> None:
    """Choose a plan, wait for what would change, and run it unless it runs already. button: a JavaScript expression."""
    stage.page.value(f"{button}.click()")
    foreseen(stage.page)
    if not stage.page.value("document.querySelector('#plan h3').textContent.endsWith('in use')"):
        click(stage.page, "Run this plan")
        stage.page.wait_for("document.getElementById('switched')?.textContent.endsWith('runs this plan now.')")
    stage.page.wait_for("document.querySelector('#plan h3').textContent.endsWith('in use')")


def pictures(stage: Stage) -> list[str | None]:
    """The texts of the pictures of the chosen plan, and of the plan that runs: None for this device alone."""
    result: list[str | None] = stage.page.value(
        "['#plan-drawn svg', '#here svg'].map(name => document.querySelector(name)?.getAttribute('aria-label') ?? null)"
    )
    return result


def run_knee_plan(stage: Stage) -> None:
    """The knee may be the plan for this device alone, if other work slows the worker down while it is measured."""
    run_plan(stage, KNEE)
    chosen, _ = pictures(stage)
    expected = "null" if chosen == "this device has all layers." else json.dumps(chosen)
    running = "document.querySelector('#here svg')?.getAttribute('aria-label') ?? null"
    stage.page.wait_for(f"({running}) === {expected}")


def run_on_this_device_alone(stage: Stage) -> None:
    run_plan(stage, ALONE)
    stage.page.wait_for("document.querySelector('#here svg') === null")


def stop_finding_plans(stage: Stage) -> None:
    stage.page.value("document.getElementById('find-plans').click()")
    click(stage.page, "Cancel")
    stage.page.wait_for("document.getElementById('finding').hidden")
    stage.page.wait_for("document.querySelector('#plan h3') !== null")  # the plans that were found before


MODELS: tuple[Action, ...] = (
    pull_model, pull_what_is_missing, load_model, unload_model, find_plans, run_knee_plan, run_on_this_device_alone,
    stop_finding_plans,
)  # fmt: skip
