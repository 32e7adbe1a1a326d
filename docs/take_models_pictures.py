"""Take pictures of the Models view of the page of `edge serve`: docs/serve-models.png and docs/serve-models-phone.png.

    python -m docs.take_models_pictures

Needs Chromium. The bundled model runs on this device and two workers on it, by a plan that the page finds and runs.
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path

from tests.cli.test_serve_command import served
from tests.serve.models_actions import KNEE, find_plans, foreseen, run_plan
from tests.serve.page_actions import Stage
from tests.support.browser import browser
from tests.support.workers import worker

HERE = Path(__file__).parent
SHARES = ("--workers", "{}", "--parallel", "pipeline", "--shares", "2,3,3")  # the first plan has all devices


def main() -> None:
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        page = stack.enter_context(browser(folder / "profile"))
        workers = [stack.enter_context(worker(folder / item, "--name", item)) for item in ("desk", "attic")]
        addresses = ",".join(item.address for item in workers)
        options = [word.format(addresses) for word in SHARES]
        server = stack.enter_context(served(*options, "--prefix-cache", "0"))
        stage = Stage(page, server.url, folder)
        stage.open(1280)
        stage.go("models")
        find_plans(stage)
        foreseen(page)
        page.wait_for("document.querySelectorAll('#advice .card').length > 2")
        page.value("document.activeElement.blur(); document.getElementById('models').scrollTo(0, 0)")
        page.look(1280, 1060)
        stage.picture(HERE / "serve-models.png")
        page.look(390, 844, dark=True, zoom=2)
        run_plan(stage, KNEE)
        page.value("document.activeElement.blur(); document.getElementById('picks').scrollIntoView({block: 'start'})")
        stage.picture(HERE / "serve-models-phone.png")


if __name__ == "__main__":
    main()
