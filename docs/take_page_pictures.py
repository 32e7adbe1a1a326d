"""Take pictures of pages in a real browser: docs/serve.png and docs/serve-chat-phone.png of a conversation, and
docs/browser-phone.png of a page that computes layers.

    python -m docs.take_page_pictures

Needs Chromium. The answers are the bundled model's own, greedy. `tests/serve/test_page_devices.py` takes the pictures
of devices.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import httpx
from starlette.applications import Starlette

from edge.api.config import EngineConfig
from edge.cluster.fleet import Fleet
from edge.cluster.llm_ranks import LlmRanks
from edge.llm.chat import Chat
from edge.llm.options import EngineOptions
from edge.llm.sampler import SamplingParams
from edge.models.demo import MODEL_PATH
from edge.serve.app import create_app
from edge.serve.options import ServeOptions
from edge.serve.router import Router
from partition.model.file import ModelFile
from partition.plan.arrange import make_plan
from partition.plan.plan import LOCAL
from partition.slices.gguf_slice import limits
from tests.serve.page_actions import SIZES, Stage, answered, ask, retry_answer
from tests.serve.serving import serving
from tests.support.bridge_process import running_bridge
from tests.support.browser import Page, browser
from tests.support.helpers import until

HERE = Path(__file__).parent
QUESTIONS = ("Hello! What can you do?", "What is 27 plus 38?", "How do I start a worker?")
SETTINGS = {"temperature": 0}
LOAD_S = 600.0  # devices are measured first


def main() -> None:
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        page = stack.enter_context(browser(folder / "profile"))
        with served() as address:
            stage = Stage(page, address, folder)
            converse(stage, 1280, QUESTIONS)
            retry_answer(stage)
            stage.picture(HERE / "serve.png")
            stage.page.look(390, SIZES[390], zoom=2)
            stage.picture(HERE / "serve-chat-phone.png")
        take_computing_page(page, folder)


def take_computing_page(page: Page, folder: Path) -> None:
    """Take the picture of a page during an answer of this device and the page."""
    with running_bridge(folder, check=True) as bridge:
        page.look(390, 620, zoom=2)
        page.call("Page.navigate", url=f"{bridge.url}/#{bridge.browsers.invite('phone', LOAD_S)}")
        until(lambda: bridge.is_ready("phone"), "the page is ready", LOAD_S)
        until(lambda: bridge.answers("phone"), "its worker answers", LOAD_S)
        address = f"127.0.0.1:{bridge.port('phone')}"
        plan = make_plan(limits(ModelFile.open(MODEL_PATH)), "edge-demo", "", [LOCAL, address],
                         parallel="pipeline", shares=(1, 1))  # fmt: skip
        with Fleet([address]) as fleet, LlmRanks(fleet, plan, ModelFile.open(MODEL_PATH), EngineOptions()) as ranks:
            for _ in Chat(ranks.engine).ask(QUESTIONS[0], SamplingParams(temperature=0), max_tokens=30):
                pass
            page.wait_for("document.getElementById('speed').textContent.includes('tokens')")
            page.picture(HERE / "browser-phone.png")


@contextmanager
def served() -> Iterator[str]:
    """The address of a server of the bundled model, loaded."""
    router = Router({"edge-demo": EngineConfig(str(MODEL_PATH), EngineOptions(), prefix_cache=0)})
    app = create_app(router, ServeOptions())

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        yield
        await router.close()

    app.router.lifespan_context = lifespan
    with serving(app) as address:
        httpx.post(f"{address}/tokenize", json={"content": "Hello"}, timeout=LOAD_S).raise_for_status()
        yield address


def converse(stage: Stage, width: int, questions: tuple[str, ...]) -> None:
    """Ask questions in a window of this width."""
    stage.open(width)
    stage.page.value(f"localStorage.setItem('edge.settings', {json.dumps(json.dumps(SETTINGS))})")
    stage.page.open("about:blank")
    stage.page.open(f"{stage.address}/")
    stage.page.wait_for("document.querySelector('#welcome h2')?.textContent")
    for number, question in enumerate(questions, 1):
        ask(stage.page, question)
        answered(stage.page, number)


if __name__ == "__main__":
    main()
