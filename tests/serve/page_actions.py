"""Actions of a person on the page of `edge serve`, in Chromium.

An action is a function of a `Stage`. It does what a person does, with the pointer or the keyboard, and waits until the
page shows the result; it asserts what matters. `CHAT` lists the actions of the chat view in their order. Another view
adds a list of its own here or in a module of its own, for example `DEVICES = (add_device, pause_device)`.

`tests/serve/test_page_actions.py` performs the lists at each of `WIDTHS`. `docs/take_page_pictures.py` performs some of
them with a real model and calls `Stage.picture` for the documentation.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.browser import Page
from tests.support.multimodal import png

SIZES = {1280: 800, 390: 780}  # heights of windows by their widths


@dataclass
class Stage:
    """A page that shows a server."""

    page: Page
    address: str
    folder: Path  # for files of the actions

    def open(self, width: int, *, dark: bool = False, view: str = "chat") -> None:
        """Open a view as for the first time, in a window of this width."""
        self.page.look(width, SIZES[width], dark=dark)
        self.page.open(f"{self.address}/")
        self.page.value("localStorage.clear(); sessionStorage.clear()")
        self.page.open("about:blank")
        self.page.open(f"{self.address}/#{view}")
        self.page.wait_for("document.querySelector('#welcome h2')?.textContent !== ''")

    def go(self, view: str) -> None:
        """Go to a view by the navigation."""
        self.page.value(f"document.getElementById('to-{view}').click()")
        self.page.wait_for(f"!document.getElementById('{view}').hidden")

    def picture(self, path: Path) -> None:
        """Write a picture of the window."""
        self.page.value("new Promise(done => requestAnimationFrame(() => setTimeout(done, 300)))")
        self.page.picture(path)

    @property
    def is_narrow(self) -> bool:
        return bool(self.page.value("innerWidth < 600"))


Action = Callable[[Stage], None]


def ask(page: Page, question: str) -> None:
    page.value("document.getElementById('question').focus()")
    page.type(question)
    page.press("Enter", "\r")


def answered(page: Page, answers: int = 1) -> str:
    """Return the text of the last answer once it is whole. answers: number of answers on the page."""
    page.wait_for(
        f"document.querySelectorAll('.answer').length === {answers} && !document.getElementById('send').hidden"
    )
    text = page.value("[...document.querySelectorAll('.answer > .text')].at(-1).textContent")
    return str(text)


def click(page: Page, text: str) -> None:
    """Press the last button with this text that is seen."""
    result = (
        f"[...document.querySelectorAll('button')].filter(one => one.textContent === '{text}' && one.checkVisibility())"
    )
    page.wait_for(f"{result}.length > 0")
    page.value(f"{result}.at(-1).click()")


def press(page: Page, label: str) -> None:
    """Press the last button with this name."""
    page.value(f"[...document.querySelectorAll('button[aria-label={json.dumps(label)}]')].at(-1).focus()")
    page.value("document.activeElement.click()")


def shown(page: Page) -> Any:
    """The texts of the messages that are seen."""
    return page.value("[...document.querySelectorAll('.question > p, .answer > .text')].map(one => one.textContent)")


def choose_file(page: Page, path: Path) -> None:
    """Add a file to the question."""
    root = page.call("DOM.getDocument")["root"]["nodeId"]
    node = page.call("DOM.querySelector", nodeId=root, selector="#file-input")["nodeId"]
    page.call("DOM.setFileInputFiles", nodeId=node, files=[str(path)])


def send_question(stage: Stage) -> None:
    stage.page.value(
        "window.texts = []; new MutationObserver(() => texts.push("
        "document.querySelector('.answer .figures')?.textContent || ''))"
        ".observe(document.getElementById('messages'), {childList: true, subtree: true})"
    )
    ask(stage.page, "What is 27 plus 38?")
    assert answered(stage.page)
    figures = stage.page.value("document.querySelector('.answer .figures').textContent")
    assert "tokens/s" in figures
    assert not [text for text in stage.page.value("texts") if "interrupted" in text]  # while it runs
    assert " in " in figures


def retry_answer(stage: Stage) -> None:
    click(stage.page, "Retry")
    stage.page.wait_for("document.querySelector('.versions span')?.textContent === '2 of 2'")
    stage.page.wait_for("!document.getElementById('send').hidden")


def show_earlier_version(stage: Stage) -> None:
    press(stage.page, "Earlier version")
    stage.page.wait_for("document.querySelector('.versions span').textContent === '1 of 2'")


def edit_question(stage: Stage) -> None:
    click(stage.page, "Edit")
    stage.page.type(" Explain.")
    stage.page.press("Enter", "\r")
    stage.page.wait_for("document.querySelector('.question > p').textContent.endsWith('Explain.')")
    answered(stage.page)


def ask_about_picture(stage: Stage) -> None:
    path = stage.folder / "cat.png"
    path.write_bytes(png())
    choose_file(stage.page, path)
    stage.page.wait_for("document.querySelector('#files canvas')?.height > 0")
    ask(stage.page, "What is in it?")
    assert answered(stage.page, 2)
    assert stage.page.value("document.querySelector('.question .file').textContent.includes('cat.png')")


def open_history(stage: Stage) -> None:
    """The list of chats is always in sight in a wide window."""
    if stage.is_narrow:
        press(stage.page, "Chats")
    stage.page.wait_for("document.getElementById('chats').checkVisibility()")


def rename_chat(stage: Stage) -> None:
    open_history(stage)
    stage.page.value("document.querySelector('#chats [aria-label^=Rename]').click()")
    stage.page.type("Sums")
    stage.page.press("Enter", "\r")
    stage.page.wait_for("document.querySelector('#chats .title')?.textContent === 'Sums'")


def begin_chat(stage: Stage) -> None:
    click(stage.page, "New chat")
    stage.page.wait_for("document.querySelectorAll('.question').length === 0")
    assert not stage.is_narrow or not stage.page.value("document.getElementById('chats').checkVisibility()")


def delete_chat(stage: Stage) -> None:
    open_history(stage)
    stage.page.value("window.confirm = () => true")
    press(stage.page, "Delete Sums")
    stage.page.wait_for("document.querySelectorAll('#chats li').length === 0")
    stage.page.press("Escape")


def change_settings(stage: Stage) -> None:
    press(stage.page, "Settings")
    stage.page.wait_for("document.getElementById('settings').checkVisibility()")
    stage.page.value("document.getElementById('temperature').select()")
    stage.page.type("3")
    assert "Temperature" in stage.page.wait_for("document.getElementById('settings-notice').textContent")
    click(stage.page, "Use the defaults")
    assert stage.page.value("document.getElementById('temperature').value") == ""
    stage.page.press("Escape")
    stage.page.wait_for("document.getElementById('settings').hidden")
    assert stage.page.value("document.activeElement.id") == "open-settings"


CHAT: tuple[Action, ...] = (
    send_question, retry_answer, show_earlier_version, edit_question, ask_about_picture, rename_chat, begin_chat,
    delete_chat, change_settings,
)  # fmt: skip
