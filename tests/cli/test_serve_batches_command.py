"""Batches of `edge serve`, with its real engine: whoever asks goes first, and nothing is lost with the server."""

import json
import signal
import socket
from typing import Any

import httpx

from tests.cli.test_serve_command import WAIT_S, Served, served
from tests.support.helpers import until

LONG = {"temperature": 0, "max_tokens": 120, "allow_repetition": True}


def batch_of(server: Served, prompts: list[str], **body: Any) -> str:
    """The id of a new batch."""
    lines = [
        {"custom_id": prompt, "method": "POST", "url": "/v1/completions", "body": {"prompt": prompt, **body}}
        for prompt in prompts
    ]
    content = "\n".join(map(json.dumps, lines))
    file = httpx.post(
        f"{server.url}/v1/files", data={"purpose": "batch"}, files={"file": ("x.jsonl", content)}, timeout=WAIT_S
    ).json()
    batch = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    return str(server.post("/v1/batches", batch)["id"])


def texts(server: Served, batch_id: str) -> dict[str, str]:
    """The answers of a batch, once it has ended."""
    until(lambda: server.get(f"/v1/batches/{batch_id}")["status"] == "completed", "the end of the batch")
    file = server.get(f"/v1/batches/{batch_id}")["output_file_id"]
    lines = httpx.get(f"{server.url}/v1/files/{file}/content", timeout=WAIT_S).text.splitlines()
    return {each["custom_id"]: each["response"]["body"]["choices"][0]["text"] for each in map(json.loads, lines)}


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return str(listener.getsockname()[1])


def test_who_asks_goes_first_and_changes_nothing() -> None:
    prompts = ["One kilobyte", "Two kilobytes"]
    with served("--prefix-cache", "0", "--draft", "off", "--requests", "2") as server:
        alone = {prompt: server.post("/completion", {"prompt": prompt, **LONG})["content"] for prompt in prompts}
        steps = server.status()["counters"]["steps"]
        batch_id = batch_of(server, prompts, **LONG)
        until(lambda: server.status()["counters"]["steps"] > steps + 5, "the beginning of the batch")
        assert server.answer() == "3 plus 4 is 7."
        assert server.get(f"/v1/batches/{batch_id}")["request_counts"]["completed"] < 2  # it was in the midst of it
        counters = server.status()["counters"]
        assert counters["background_preemptions"] > 0
        assert counters["preemptions"] == 0  # nobody waits for it
        assert texts(server, batch_id) == alone


def test_a_batch_goes_on_after_the_server_was_killed() -> None:
    port, prompts = free_port(), [f"{n} kilobytes" for n in range(4)]
    options = ("--prefix-cache", "0", "--draft", "off", "--requests", "1", "--port", port)
    with served(*options) as server:
        alone = {prompt: server.post("/completion", {"prompt": prompt, **LONG})["content"] for prompt in prompts[:2]}
        batch_id = batch_of(server, prompts, **LONG)
        until(lambda: server.get(f"/v1/batches/{batch_id}")["request_counts"]["completed"], "the first answer")
        server.process.send_signal(signal.SIGKILL)
        server.process.wait(WAIT_S)
    with served(*options) as server:
        assert server.get(f"/v1/batches/{batch_id}")["request_counts"]["completed"] > 0
        answers = texts(server, batch_id)
        assert sorted(answers) == sorted(prompts)
        assert {prompt: answers[prompt] for prompt in alone} == alone
    with served(*options) as server:  # results stay
        assert texts(server, batch_id) == answers
