"""Actions of a person in the devices view, with a real server and real workers on loopback.

Each action happens in one window or in the other; `SIZES` has both.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from edge.models.demo import MODEL_PATH
from edge.models.local_slices import OwnSlices
from edge.planning.arrange import shared
from partition.model.file import ModelFile
from tests.serve.devices_server import Server, Stream, here, joining
from tests.serve.page_actions import SIZES, Stage, click, press
from tests.support.workers import Worker, worker

WIDE, NARROW = SIZES


def card(name: str) -> str:
    """Return the expression for the text of a device's card, "" if there is none."""
    cards = "[...document.querySelectorAll('#device-cards > li')]"
    return f"({cards}.find(one => one.querySelector('h3').textContent === '{name}')?.innerText || '')"


def is_in(stage: Stage, name: str, state: str) -> None:
    """Wait until the card of a device has a state."""
    stage.page.wait_for(f"{card(name)}.split('\\n')[1] === '{state}'")


def look(stage: Stage, width: int, *, dark: bool = False) -> None:
    """Change the window. Nothing is wider than the window, before and after it."""
    stage.page.look(width, SIZES[width], dark=dark)
    stage.page.wait_for("document.documentElement.scrollWidth <= innerWidth")


def add_device(stage: Stage, name: str, folder: Path, stack: ExitStack) -> Worker:
    """Invite a device in the dialog, run the shown command, and tell the server its address."""
    page = stage.page
    click(page, "Add a device")
    page.type(name)
    page.press("Enter", "\r")
    command = str(
        page.wait_for(
            "document.getElementById('add-command').innerText.startsWith('edge worker --join ') &&"
            " document.getElementById('add-command').innerText"
        )
    )
    device = stack.enter_context(joining(folder / name, command.split()[-1]))
    page.value(
        "document.querySelector('#address-row summary').click(); document.getElementById('device-address').focus()"
    )
    page.type(here(device))
    page.press("Enter", "\r")
    page.wait_for(f"document.getElementById('add-result-title').textContent === '{name} has joined'")
    return device


def scenario(stage: Stage, server: Server, folder: Path, picture: Callable[[str], None]) -> None:
    """Add, use, pause, resume, lose, rejoin, remove and revoke devices. picture: keeps what the window shows."""
    with ExitStack() as stack:
        _scenario(stage, server, folder, picture, stack)


def _scenario(stage: Stage, server: Server, folder: Path, picture: Callable[[str], None], stack: ExitStack) -> None:
    page = stage.page
    stage.open(WIDE)
    stage.go("devices")
    is_in(stage, "this device", "ready")
    devices = {}
    for width, name in ((WIDE, "pi"), (NARROW, "nas")):
        look(stage, width)
        devices[name] = add_device(stage, name, folder, stack)
        picture(f"add-{width}")
        click(page, "Done")
    pi, nas = devices["pi"], devices["nas"]
    digest = OwnSlices().model_digest(MODEL_PATH)
    file = ModelFile.open(MODEL_PATH)
    plan = shared({"local": 5.0, here(pi): 2.0, here(nas): 1.0}, "pipeline", file, digest)
    server.post("/v1/plan", plan=plan.to_json())
    stream = Stream(server, again=True)
    is_in(stage, "nas", "computing")
    assert page.value(f"{card('nas')}.includes('Layer 7 of') && {card('nas')}.includes('free of')")
    page.wait_for(f"/Computing\\n+[1-9]/.test({card('pi')})")  # its share of the time
    picture(f"devices-{NARROW}")
    assert page.value("document.getElementById('devices-picture').hasAttribute('hidden')")
    look(stage, WIDE)
    page.wait_for("document.querySelectorAll('#devices-picture .node').length === 3")
    page.wait_for("document.querySelectorAll('#devices-picture .wire.flows').length > 1")
    picture(f"devices-{WIDE}")
    look(stage, WIDE, dark=True)
    picture(f"devices-{WIDE}-dark")
    for width, name in ((WIDE, "pi"), (NARROW, "nas")):
        look(stage, width)
        press(page, f"Pause {name}")
        is_in(stage, name, "paused")
        page.wait_for(f"{card(name)}.includes('Paused: no plan uses it.')")  # the model has moved
        picture(f"paused-{width}")
        press(page, f"Resume {name}")
        is_in(stage, name, "computing")
    nas.kill()
    for width in SIZES:
        look(stage, width)
        is_in(stage, "nas", "lost")
        page.wait_for(f"{card('nas')}.includes('nas was lost') && {card('nas')}.includes('1 answer goes on')")
        picture(f"lost-{width}")
    n_pieces = len(stream.pieces)
    with worker(nas.folder, "--threads", "1", "--no-announce", listen=f"0.0.0.0:{nas.port}"):
        page.wait_for(f"!['lost', ''].includes({card('nas')}.split('\\n')[1] || '')")
        assert len(stream.pieces) > n_pieces
        stream.stop()
        for width, name in ((NARROW, "nas"), (WIDE, "pi")):
            look(stage, width)
            press(page, f"Remove {name}")
            if name == "pi":
                page.value("document.getElementById('revoke').click()")
            picture(f"remove-{width}")
            page.value("document.getElementById('remove-now').click()")
            page.wait_for(f"document.getElementById('removed-devices').innerText.includes('{name}')")
            page.wait_for(f"!{card(name)}")
        page.value("[...document.querySelectorAll('#removed-devices button')][0].click()")
        page.wait_for(f"{card('nas')} !== ''")
