"""`edge chat --think` and `edge serve --think`, with a model that thinks."""

from pathlib import Path

import pytest

from apps.show.remote import answer_once
from edge.api.config import EngineConfig
from edge.llm.options import EngineOptions
from edge.net.chat_client import ServerChat
from edge.serve.app import create_app
from edge.serve.options import ServeOptions
from edge.serve.router import Router
from tests.serve.serving import serving
from tests.support.helpers import assert_one_line_error, chat_json, run_chat, run_edge
from tests.support.thinking import thinker

ASKED = ("-p", "What is 27 plus 38?", "--temperature", "0", "--context", "256")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return thinker(tmp_path_factory.mktemp("thinker") / "thinker.gguf")


def test_how_much_is_thought(model: Path) -> None:
    bounded = chat_json(model, *ASKED, "--think", "8")
    assert bounded["usage"]["thought_tokens"] == 8
    assert bounded["thought"]
    assert bounded["text"]
    off = chat_json(model, *ASKED, "--think", "off")
    assert (off["thought"], off["usage"]["thought_tokens"]) == ("", 0)
    assert off["text"]
    free, auto = chat_json(model, *ASKED), chat_json(model, *ASKED, "--think", "auto")
    assert free["thought"] == auto["thought"]
    assert free["thought"].startswith(bounded["thought"])
    assert free["usage"]["thought_tokens"] > 8


def test_a_thought_is_not_printed_with_the_answer(model: Path) -> None:
    done = run_chat(model, *ASKED, "--think", "8")
    assert done.stdout == chat_json(model, *ASKED, "--think", "8")["text"] + "\n"
    assert done.stderr == ""


def test_an_answer_that_is_a_thought_alone_says_so(model: Path) -> None:
    assert "gave no answer" in run_chat(model, *ASKED, "--max-tokens", "5").stderr


@pytest.mark.parametrize("words", [("chat", "-p", "x"), ("serve",)], ids=["chat", "serve"])
@pytest.mark.parametrize("think", ["some", "-1", "1.5"])
def test_what_is_no_number_of_tokens_is_refused(words: tuple[str, ...], think: str) -> None:
    assert_one_line_error(run_edge(*words, f"--think={think}"), 2, "off, auto")


def test_a_server_bounds_thoughts_and_its_client_tells_them_apart(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = EngineConfig(str(model), EngineOptions(threads=1, sequences=1), prefix_cache=0)
    router = Router({"thinker": config})
    with serving(create_app(router, ServeOptions()), at_end=router.close) as url:
        chat = ServerChat(url)
        pieces = list(chat.ask("What is 27 plus 38?", {"temperature": 0, "reasoning_budget": 8}))
        text, thought = ("".join(parts) for parts in zip(*pieces, strict=True))
        assert (bool(text), bool(thought)) == (True, True)
        assert chat.messages[-1] == {"role": "assistant", "content": text}
        assert answer_once(ServerChat(url), "Hello", {"temperature": 0, "reasoning_budget": 0}, as_json=False) == 0
    assert capsys.readouterr().out.strip()
