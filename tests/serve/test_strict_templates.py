"""Test chat templates that refuse or drop messages: every API answers, and each message reaches the prompt."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from edge.api.config import EngineConfig
from edge.llm.chat import Chat
from edge.llm.engine import Engine
from edge.llm.options import EngineOptions
from edge.serve.app import create_app
from edge.serve.options import ServeOptions
from edge.serve.router import Router
from tests.serve.conftest import OPTIONS
from tests.serve.serving import serving
from tests.support.templates import GEMMA_2, MISTRAL, PARTS
from tests.support.thinking import thinker

TEMPLATES = {"gemma": GEMMA_2, "mistral": MISTRAL, "parts": PARTS}
FUNCTION = {"name": "weather", "description": "Tells.", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": FUNCTION}]
CALL = {"id": "call-1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
SYSTEM, LATE = {"role": "system", "content": "Be kind."}, {"role": "system", "content": "Be brief."}
HI, MORE = {"role": "user", "content": "Hi."}, {"role": "user", "content": "More."}
SAID = {"role": "assistant", "content": "Hello."}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "system": [SYSTEM, HI],
    "two systems": [SYSTEM, LATE, HI],
    "late system": [SYSTEM, HI, SAID, LATE, MORE],
    "developer": [{"role": "developer", "content": "Be kind."}, HI],
    "system alone": [SYSTEM],
    "two questions": [HI, MORE],
    "two answers": [HI, SAID, SAID, MORE],
    "answer first": [SAID, HI],
    "result": [HI, {"role": "assistant", "content": "", "tool_calls": [CALL]},
               {"role": "tool", "content": "Rain.", "tool_call_id": "call-1"}, MORE],
}  # fmt: skip


@pytest.fixture(scope="module", params=TEMPLATES)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    path = thinker(tmp_path_factory.mktemp("strict") / f"{request.param}.gguf", TEMPLATES[request.param])
    router = Router({request.param: EngineConfig(str(path), OPTIONS, prefix_cache=0)})
    with serving(create_app(router, ServeOptions()), at_end=router.close) as address:
        yield address


def ok(server: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = httpx.post(f"{server}{path}", json=body, timeout=300)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


@pytest.mark.parametrize("tools", [[], TOOLS], ids=["", "tools"])
@pytest.mark.parametrize("messages", CONVERSATIONS.values(), ids=CONVERSATIONS)
def test_chats_are_answered_and_their_prompts_have_all_of_them(
    server: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]]
) -> None:
    body = {"messages": messages, "max_tokens": 1, **({"tools": tools} if tools else {})}
    prompt = ok(server, "/apply-template", body)["prompt"]
    assert [message["content"] for message in messages if message["content"] not in prompt] == []
    assert ("Tells." in prompt) is bool(tools)
    assert ok(server, "/v1/chat/completions", body)["choices"]


def test_the_other_apis_are_as_lenient(server: str) -> None:
    model = httpx.get(f"{server}/v1/models", timeout=300).json()["data"][0]["id"]
    late = [HI, SAID, LATE, MORE]
    functions = [{"type": "function", **FUNCTION}]
    ok(server, "/v1/responses", {"instructions": "Be kind.", "input": late, "tools": functions, "max_output_tokens": 1})
    plain = {"model": model, "messages": [HI, MORE]}
    tool = {"name": "weather", "description": "Tells.", "input_schema": {"type": "object"}}
    whole = {**plain, "system": "Be kind.", "tools": [tool]}
    ok(server, "/v1/messages", {**whole, "max_tokens": 1})
    counts = [ok(server, "/v1/messages/count_tokens", body)["input_tokens"] for body in (whole, plain)]
    assert counts[0] > counts[1] + 20  # the system text and the tools are counted
    ollama = {"model": model, "stream": False, "options": {"num_predict": 1}}
    ok(server, "/api/chat", {**ollama, "messages": [SYSTEM, *late], "tools": TOOLS})
    ok(server, "/api/generate", {**ollama, "system": "Be kind.", "prompt": "Hi."})


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_a_chat_in_python_has_a_system_message_whatever_the_template(tmp_path: Path, template: str) -> None:
    with Engine(thinker(tmp_path / "strict.gguf", template), EngineOptions(threads=1, context=256)) as engine:
        chat = Chat(engine, system="Be kind.")
        for question in ("Hi.", "More."):
            assert list(chat.ask(question, max_tokens=2))
        assert b"Be kind." in b"".join(map(engine.model.piece, chat.prompt_tokens()))
