"""Open WebUI: its own server asks edge, by the API of OpenAI and by Ollama's. Speaks to it as its page does."""

import json
import os
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

from common import MODEL, QUESTION, URL, main, said

PORT, START_S, ANSWER_S = 8790, 600, 300
OWN = f"http://127.0.0.1:{PORT}"
FOLDER = Path(os.environ["HOME"]) / "open-webui" / "run"  # it imports from the folder above
FOLDER.mkdir(parents=True)
SETTINGS = {
    "DATA_DIR": str(FOLDER), "WEBUI_AUTH": "False", "WEBUI_SECRET_KEY": "none", "OFFLINE_MODE": "true",
    "USE_SLIM_DOCKER": "true", "HF_HUB_OFFLINE": "1", "RAG_EMBEDDING_ENGINE": "openai",
    "ENABLE_OPENAI_API": "true", "OPENAI_API_BASE_URL": f"{URL}/v1", "OPENAI_API_KEY": "none",
    "ENABLE_OLLAMA_API": "true", "OLLAMA_BASE_URL": URL, "CORS_ALLOW_ORIGIN": OWN,
}  # fmt: skip
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def ask(path: str, body: object = None) -> str:
    """Return the answer of Open WebUI's own server."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        OWN + path, data, {"Content-Type": "application/json", "Authorization": f"Bearer {TOKEN}"}
    )
    with urllib.request.urlopen(request, timeout=ANSWER_S) as response:
        return response.read().decode()


@contextmanager
def running():
    """Run it until the end of the block."""
    command = [str(Path(sys.executable).with_name("open-webui")), "serve", "--host", "127.0.0.1", "--port", str(PORT)]
    with (
        (FOLDER / "log").open("w") as log,
        subprocess.Popen(command, cwd=FOLDER, env={**os.environ, **SETTINGS}, stdout=log, stderr=log) as server,
    ):
        try:
            until = time.monotonic() + START_S
            while True:
                try:
                    ask("/health")
                    break
                except OSError:
                    assert server.poll() is None, (FOLDER / "log").read_text()[-300:]
                    assert time.monotonic() < until, "it did not start: " + (FOLDER / "log").read_text()[-200:]
                    time.sleep(1)
            yield
        finally:
            server.kill()


def chat(stream: bool, **more: object) -> str:
    messages = [{"role": "user", "content": QUESTION}]
    return ask("/api/chat/completions", {"model": MODEL, "messages": messages, "stream": stream, **more})


def hello() -> str:
    models = [entry["id"] for entry in json.loads(ask("/api/models"))["data"]]
    assert any(MODEL in name for name in models), models
    return said(json.loads(chat(False))["choices"][0]["message"]["content"])


def stream() -> str:
    lines = [line for line in chat(True).splitlines() if line.startswith("data: {")]
    assert len(lines) > 1, lines
    return f"{len(lines)} events"


def tools() -> str:
    """A session with a call and its result, which the page makes for models that call natively."""
    call = {"id": "call_0", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    messages = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_0", "content": "sunny"},
        {"role": "user", "content": "And tomorrow?"},
    ]
    chat(False, tools=[TOOL])
    body = {"model": MODEL, "messages": messages, "tools": [TOOL], "stream": False}
    ollama = {"model": f"{MODEL}:latest", "messages": messages[:1], "tools": [TOOL], "stream": False}
    ask("/ollama/api/chat", ollama)
    return said(json.loads(ask("/api/chat/completions", body))["choices"][0]["message"]["content"])


TOKEN = ""
with running():
    TOKEN = json.loads(ask("/api/v1/auths/signin", {"email": "", "password": ""}))["token"]
    main({"hello": hello, "stream": stream, "tools": tools})
