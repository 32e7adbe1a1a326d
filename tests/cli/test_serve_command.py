"""Test `edge serve` as a process: every option, its first line of output, and its end."""

import argparse
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

import psutil
import pytest

from apps.cli import main
from apps.commands.serve import DRAFTS
from apps.engine_options import ENGINE_OPTIONS, add_engine_arguments
from devices.processes.forking import ForkedProcess
from edge.api.config import EngineConfig
from edge.models.demo import MODEL_PATH
from partition.plan.arrange import make_plan
from partition.plan.plan import LOCAL, Plan
from partition.slices.gguf_slice import limits
from quant.gguf.file import GgufFile
from tests.support import ROOT, fim
from tests.support.helpers import begin, run_edge
from tests.support.workers import worker

WAIT_S = 120
ASK = {"messages": [{"role": "user", "content": "What is 3 plus 4?"}], "temperature": 0}


class Served:
    """A running server."""

    def __init__(self, process: "ForkedProcess | subprocess.Popen[bytes]", url: str, errors: IO[str]) -> None:
        """errors: what it says there."""
        self.process, self.url, self.errors = process, url, errors

    def get(self, path: str, **headers: str) -> Any:
        return self._read(urllib.request.Request(self.url + path, headers=headers))

    def post(self, path: str, body: dict[str, Any], **headers: str) -> Any:
        headers = {"Content-Type": "application/json", **headers}
        return self._read(urllib.request.Request(self.url + path, json.dumps(body).encode(), headers))

    def answer(self, **options: Any) -> str:
        result = self.post("/v1/chat/completions", {**ASK, **options})
        return str(result["choices"][0]["message"]["content"])

    def status(self) -> dict[str, Any]:
        result: dict[str, Any] = self.get("/v1/cluster")["models"][0]
        return result

    def _read(self, request: urllib.request.Request) -> Any:
        try:
            with urllib.request.urlopen(request, timeout=WAIT_S) as response:
                return json.loads(response.read())
        except urllib.error.HTTPError as error:
            error.close()  # it holds the connection
            raise


@contextmanager
def served(*arguments: str, **environment: str) -> Iterator[Served]:
    read, write = os.pipe()
    with os.fdopen(read) as said, TemporaryFile("w+") as errors:
        with os.fdopen(write, "wb") as out, open(os.devnull) as nothing:
            command = ("serve", "--port", "0", "--threads", "1", *arguments)
            process = begin(command, {**os.environ, **environment}, (nothing, out, errors))
        try:
            line = said.readline()
            result = re.fullmatch(r"listening on (http://\S+)\n", line)
            errors.seek(0)
            assert result, line + errors.read()
            yield Served(process, result[1], errors)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(WAIT_S)
            finally:
                process.kill()


def refused(*arguments: str, **environment: str) -> tuple[int, str]:
    done = run_edge("serve", *arguments, "--port", "0", "--threads", "1", env=environment, timeout=WAIT_S)
    return done.returncode, done.stderr


def test_a_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        done = run_edge("serve", "--port", port, timeout=WAIT_S)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (3, "", 1)
    assert f"127.0.0.1:{port}: Address already in use; give another port" in done.stderr


def test_ignored_fields_of_a_client_are_logged_once() -> None:
    with served("--prefix-cache", "0") as server:
        for hints in ({"store": True}, {"store": True}, {"store": False, "verbosity": "low"}):
            assert server.answer(**hints) == "3 plus 4 is 7."
        server.errors.seek(0)
        lines = [line for line in server.errors if "fields ignored" in line]
    assert [line.partition("fields=")[2].strip() for line in lines] == ["store", "verbosity"]


def test_the_bundled_model_is_served_and_ctrl_c_ends_all_processes() -> None:
    with served("--requests", "3", "--prefix-cache", "0") as server:
        assert server.answer() == "3 plus 4 is 7."
        assert server.get("/v1/models")["data"][0]["id"] == MODEL_PATH.stem
        status = server.status()
        assert status["model"]["sequences"] == 3
        assert status["model"]["context"] == 3 * 1024
        assert status["speculation"]["draft"] == "ngram"
        assert status["speculation"]["passes"] > 0
        with urllib.request.urlopen(server.url + "/", timeout=WAIT_S) as page:
            assert "text/html" in page.headers["Content-Type"]
        processes = [psutil.Process(server.process.pid), *psutil.Process(server.process.pid).children(recursive=True)]
        assert len(processes) >= 3  # the engine, and what renders templates
        server.process.send_signal(signal.SIGINT)
        assert psutil.wait_procs(processes[1:], WAIT_S)[1] == []
        assert server.process.wait(WAIT_S) == 130
        server.errors.seek(0)
        assert "Traceback" not in server.errors.read()


def begin_stream(server: Served, n_tokens: int) -> Iterator[str]:
    """Begin an answer, and return an iterator over its lines. Its first line has come."""
    body = {"prompt": "Tell me", "max_tokens": n_tokens, "stream": True, "ignore_eos": True, "temperature": 0}
    request = urllib.request.Request(
        server.url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    response = urllib.request.urlopen(request, timeout=WAIT_S)
    first = next(line for line in response if line.strip()).decode()

    def lines() -> Iterator[str]:
        with response:
            yield first
            yield from (line.decode() for line in response)

    return lines()


def test_running_answers_end_after_sigterm_and_new_requests_are_refused() -> None:
    with served("--requests", "2", "--prefix-cache", "0") as server:
        running = begin_stream(server, 700)
        server.process.send_signal(signal.SIGTERM)
        codes = [200]
        while codes[-1] == 200:  # until the signal has arrived
            try:
                server.get("/health")
            except urllib.error.HTTPError as error:
                codes.append(error.code)
        assert codes[-1] == 503
        answers = iter(server.answer, "")  # a proxy may not have noticed yet
        with pytest.raises(urllib.error.HTTPError, match="503"):
            assert set(answers) == {"3 plus 4 is 7."}
        lines = [line for line in running if line.strip()]
        assert lines[-1].strip() == "data: [DONE]"
        assert len(lines) >= 700 * 0.9  # characters may need several tokens
        assert server.process.wait(WAIT_S) == 143
        server.errors.seek(0)
        assert "Traceback" not in server.errors.read()


@pytest.mark.parametrize(("options", "number", "again", "code"), [
    (("--drain", "0"), signal.SIGTERM, (), 143),
    ((), signal.SIGTERM, (signal.SIGTERM,), 143),
    ((), signal.SIGINT, (), 130),
])  # fmt: skip
def test_an_endless_answer_does_not_keep_the_server(
    options: tuple[str, ...], number: int, again: tuple[int, ...], code: int
) -> None:
    with served("--prefix-cache", "0", *options) as server:
        running = begin_stream(server, 4000)
        for each in (number, *again):
            server.process.send_signal(each)
        assert "data: [DONE]" not in list(running)[-1]
        assert server.process.wait(WAIT_S) == code


def test_every_engine_option_reaches_the_engine_process() -> None:
    parser = argparse.ArgumentParser()
    add_engine_arguments(parser)
    assert set(vars(parser.parse_args([]))) - {"affinity"} <= set(ENGINE_OPTIONS)  # affinity is of all processes


def test_every_kind_of_draft_is_known() -> None:
    assert DRAFTS[0] == "auto"


def test_the_server_loads_nothing_that_computes() -> None:
    code = "import sys, apps.commands.serve, edge.serve.server; print({'llama_cpp', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_an_attention_window_keeps_the_ends_of_a_long_prompt() -> None:
    with served("--attention-window", "64", "--requests", "2", "--prefix-cache", "0") as server:
        assert server.status()["model"]["context"] == 2 * 68
        messages = [{"role": "user", "content": f"{'I like tea. ' * 60}What is 3 plus 4?"}]
        answered = server.post("/v1/chat/completions", {**ASK, "messages": messages, "max_tokens": 100})
        assert answered["usage"]["prompt_tokens"] == 4 + 56
        assert server.answer() == "3 plus 4 is 7."


def test_models_of_a_folder_are_loaded_when_they_are_asked_for(tmp_path: Path) -> None:
    for name in ("first", "second"):
        shutil.copy(MODEL_PATH, tmp_path / f"{name}.gguf")
    with served(str(tmp_path), "--context", "300", "--prefix-cache", "0") as server:
        assert [model["id"] for model in server.get("/v1/models")["data"]] == ["first", "second"]
        assert [model["model"]["path"] for model in server.get("/v1/cluster")["models"]] == ["first.gguf"]
        assert server.answer(model="second") == "3 plus 4 is 7."
        assert len(server.get("/v1/cluster")["models"]) == 2
        with pytest.raises(urllib.error.HTTPError) as refusal:
            server.answer(model="third")
        assert refusal.value.code == 404
        assert server.status()["model"]["context"] == 300


def test_models_of_the_hub_s_cache_are_served_by_their_names(tmp_path: Path) -> None:
    def fetched(repo: str, *files: str) -> None:
        folder = tmp_path / f"models--{repo.replace('/', '--')}"
        (folder / "refs").mkdir(parents=True)
        (folder / "refs" / "main").write_text("v1")
        for file in files:
            path = folder / "snapshots" / "v1" / file
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(MODEL_PATH, path)

    fetched("acme/tiny", "tiny-q8_0.gguf", "sub/tiny-q4_0.gguf", "config.json")
    fetched("acme/half", "half-00001-of-00002.gguf")  # not all of it is there
    fetched("acme/none")
    bad = tmp_path / "models--acme--tiny/snapshots/v1/sub/tiny-q4_0.gguf"
    bad.write_bytes(b"GGUF" + bytes(100))
    with served("--prefix-cache", "0", HF_HUB_CACHE=str(tmp_path), XDG_CACHE_HOME=str(tmp_path / "own")) as server:
        names = [model["id"] for model in server.get("/v1/models")["data"]]
        assert names == [MODEL_PATH.stem, "acme/tiny:sub/tiny-q4_0.gguf", "acme/tiny:tiny-q8_0.gguf"]
        assert server.get(f"/v1/models/{names[2]}")["id"] == names[2]
        assert len(server.get("/v1/cluster")["models"]) == 1  # loaded when it is asked for
        assert server.answer(model=names[2]) == "3 plus 4 is 7."
        with pytest.raises(urllib.error.HTTPError) as refusal:
            server.answer(model=names[1])
        assert refusal.value.code == 400
        assert server.answer() == "3 plus 4 is 7."


@pytest.mark.parametrize("shared", [False, True])
def test_keys_of_a_file_share_what_was_computed_where_they_are_told_to(tmp_path: Path, shared: bool) -> None:
    file = tmp_path / "keys"
    file.write_text("sk-first\n\n  sk-second  \n")
    with served(
        "--api-key-file", str(file), *(["--shared-prefixes"] if shared else []), "--prefix-cache", "0"
    ) as server:
        cached = []
        for key in ("sk-first", "sk-second", "sk-first"):
            reported = server.post("/v1/chat/completions", ASK, Authorization=f"Bearer {key}")
            cached.append(reported["usage"]["prompt_tokens_details"]["cached_tokens"] > 0)
        assert cached == [False, shared, True]
        with pytest.raises(urllib.error.HTTPError) as refusal:
            server.get("/v1/models")
        assert refusal.value.code == 401


def test_gaps_have_the_suffix_first_where_the_server_is_told_so(tmp_path: Path) -> None:
    path = fim.fim_model(tmp_path / "tiny.gguf", 3)
    laid_out = [fim.BOS, fim.SUF, *fim.text("yz"), fim.PRE, *fim.text("ab"), fim.MID]
    with served(str(path), "--spm-infill", "--prefix-cache", "0") as server:
        plain = server.post("/v1/completions", {"prompt": laid_out, "temperature": 0})
        filled = server.post("/v1/completions", {"prompt": "ab", "suffix": "yz", "temperature": 0})
        assert filled["choices"][0]["text"] == plain["choices"][0]["text"]
        assert filled["usage"]["prompt_tokens_details"]["cached_tokens"] == len(laid_out) - 1


@pytest.mark.parametrize("content", [b"", b" \n\n", b"\xff\xfe"])
def test_a_file_without_keys_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "keys"
    file.write_bytes(content)
    for option in ("--api-key-file", "--admin-key-file"):
        code, said = refused(option, str(file))
        assert code == 2
        assert f"{option} {file} has no keys" in said


@pytest.mark.parametrize("weight", ["0", "nan", "two", "1000", ""])
def test_a_weight_of_a_key_out_of_range_is_refused(tmp_path: Path, weight: str) -> None:
    file = tmp_path / "keys"
    file.write_text(f"sesame\nash weight={weight}\n")
    code, said = refused("--api-key-file", str(file))
    assert code == 2
    assert f"the weight of a key must be a number from 0.01 to 100, got {weight!r}" in said


def test_administrators_are_named_by_option_environment_and_file(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("ash weight=2.5\n")
    options = ("--api-key", "sesame", "--admin-key", "oak", "--admin-key-file", str(tmp_path / "keys"))
    with served(*options, "--prefix-cache", "0", EDGE_ADMIN_KEY="elm") as server:
        for key, status in (("sesame", 403), ("oak", 400), ("elm", 400), ("ash", 400), ("other", 401)):
            with pytest.raises(urllib.error.HTTPError) as refusal:
                server.post("/v1/plan", {"plan": {}}, Authorization=f"Bearer {key}")
            assert refusal.value.code == status, key


def test_who_is_answered_is_chosen_by_options() -> None:
    options = ("--api-key", "sesame", "--allow-host", "edge.example", "--allow-origin", "https://pages.example")
    with served(*options, "--queue", "1", EDGE_API_KEY="barley") as server:
        key = {"Authorization": "Bearer sesame"}
        with pytest.raises(urllib.error.HTTPError) as refusal:
            server.get("/v1/models")
        assert refusal.value.code == 401
        assert server.get("/v1/models", **key)
        assert server.get("/v1/models", **{"x-api-key": "barley"})
        assert server.get("/v1/models", Host="edge.example", **key)
        assert server.get("/v1/models", Origin="https://pages.example", **key)
        for headers in ({"Host": "other.example"}, {"Origin": "https://other.example"}):
            with pytest.raises(urllib.error.HTTPError) as refusal:
                server.get("/v1/models", **headers, **key)
            assert refusal.value.code in (403, 421)


def test_other_machines_are_not_answered_without_a_key() -> None:
    code, error = refused("--host", "0.0.0.0")
    assert (code, error.count("\n")) == (3, 1)
    assert "there is no key" in error
    with served("--host", "0.0.0.0", "--insecure") as server:
        assert server.url.startswith("http://0.0.0.0:")
        assert server.answer() == "3 plus 4 is 7."


def test_prompts_are_kept_for_the_next_server(tmp_path: Path) -> None:
    question = {"messages": [{"role": "user", "content": "What is 3 plus 4? " * 10}], "max_tokens": 2}
    results = []
    folders = {f"XDG_{name}_HOME": str(tmp_path / name.lower()) for name in ("CACHE", "STATE")}
    for saved in ("64MiB", "64MiB", "0"):
        with served("--prefix-cache", saved, **folders) as server:
            usage = server.post("/v1/chat/completions", question)["usage"]
            results.append(usage["prompt_tokens_details"]["cached_tokens"])
    assert results[0] == results[2] == 0
    assert results[1] >= 48


def test_two_devices_serve_what_one_would_and_the_page_can_switch_plans(tmp_path: Path) -> None:
    with worker(tmp_path / "w", "--threads", "1") as other:
        options = ("--workers", other.address, "--parallel", "tensor", "--shares", "1,1", "--prefix-cache", "0")
        with served(*options) as server:
            assert server.answer() == "3 plus 4 is 7."
            status = server.status()
            assert [device["heads"] for device in status["devices"]] == [[0, 4], [4, 8]]
            plan = status["plan"]
            first, second = plan["stages"][0]["shards"]
            whole = {"heads": [0, 8], "ff": [0, 768]}
            stages = [
                {"layers": [0, 3], "shards": [{**first, **whole, "vocab": [0, 0]}]},
                {"layers": [3, 8], "shards": [{**second, **whole, "vocab": [0, 2048]}]},
            ]
            server.post("/v1/plan", {"plan": {**plan, "stages": stages}})
            assert server.answer() == "3 plus 4 is 7."
            assert [device["layers"] for device in server.status()["devices"]] == [[0, 3], [3, 8]]
            saved = tmp_path / "plan.json"
            saved.write_text(json.dumps(plan))
        with served("--plan", str(saved), "--prefix-cache", "0") as server:
            assert len(server.status()["devices"]) == 2


def test_prompts_of_several_slots_are_computed_elsewhere(tmp_path: Path) -> None:
    cut, saved = limits(GgufFile.open(MODEL_PATH)), tmp_path / "plan.json"
    with worker(tmp_path / "w", "--threads", "1") as other:
        elsewhere = make_plan(cut, "m", "", [LOCAL, other.address], "pipeline")
        plan = replace(make_plan(cut, "m", "", [LOCAL]), prefill=elsewhere)
        saved.write_text(json.dumps(plan.to_json()))
        options = ("--plan", str(saved), "--prefix-cache", "0", "--requests", "3")
        with served(*options) as server, ThreadPoolExecutor(6) as pool:
            results = [pool.submit(server.answer) for _ in range(6)]
            assert {answer.result() for answer in results} == {"3 plus 4 is 7."}
            prefill = Plan.from_json(server.status()["plan"]["prefill"])
            assert (prefill.devices, prefill.shard(0).threads) == (elsewhere.devices, 1)


@pytest.mark.parametrize(
    ("options", "targets"),
    [
        ((), None),
        (("--target-itl", "150"), (0.15, None)),
        (("--target-itl", "150", "--target-ttft", "2e3"), (0.15, 2.0)),
    ],
)
def test_latency_targets_reach_the_engine_process(
    monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], targets: tuple[float | None, float | None] | None
) -> None:
    configs: dict[str, EngineConfig] = {}
    monkeypatch.setattr("edge.serve.server.serve", lambda served, *rest, **more: configs.update(served))
    assert main(["serve", str(MODEL_PATH), "--port", "0", *options]) == 0
    [config] = configs.values()
    from edge.serve.engine.loop import latency_targets  # loads llama.cpp

    built = latency_targets(EngineConfig.from_json(config.to_json()))
    assert (None if built is None else (built.itl_s, built.ttft_s)) == targets


def test_what_was_within_a_target_is_told() -> None:
    with served("--target-itl", "600000", "--prefix-cache", "0", "--draft", "off") as server:
        assert server.answer() == "3 plus 4 is 7."
        latency = server.status()["latency"]
        assert latency["gaps_within"] == latency["gaps"] > 0
        assert (latency["target_itl_ms"], latency["target_ttft_ms"], latency["first_tokens"]) == (600000.0, None, 1)


def test_a_front_is_shown(tmp_path: Path) -> None:
    front = tmp_path / "front.json"
    assert refused("--front", str(front))[0] == 3
    for text in ("no JSON", "[]", '{"points": 1}'):
        front.write_text(text)
        code, error = refused("--front", str(front))
        assert (code, error.count("\n")) == (2, 1)
    front.write_text('{"format": "edge-pareto-1", "points": []}')
    with served("--front", str(front)) as server:
        assert server.get("/v1/front")["points"] == []


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--workers", "127.0.0.1:9", "--save-plan", "x.json"), "--save-plan"),
        (("missing.gguf",), "no such file"),
        (("--requests", "0"), "--requests"),
        (("--port", "70000"), "--port"),
        (("--window", "1MiB"), "--window needs a memory limit"),
        (("--host", "192.0.2.1", "--api-key", "k"), "cannot listen on 192.0.2.1: it is not an address of this machine"),
        (("--host", "192.0.2.1"), "cannot listen on 192.0.2.1: it is not an address of this machine"),
        (("--memory", "20MiB"), "needs a budget of at least"),
        (("--tls-cert", "cert.pem"), "--tls-key"),
        (("--target-itl", "0"), "needs a number from 1 to 600000"),
        (("--target-itl", "100", "--requests", "1"), "--target-itl is about prompts next to other answers"),
        (("--target-ttft", "100", "--reproducible"), "--target-ttft is about prompts next to other answers"),
    ],
)
def test_what_cannot_be_served_is_said_in_one_line(arguments: tuple[str, ...], why: str) -> None:
    code, error = refused(*arguments)
    last = error.splitlines()[-1]
    assert code in (2, 3, 4)
    assert why in last
    assert "Traceback" not in error


def chat(url: str, *arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    return run_edge("chat", "--url", url, *arguments, env=environment, timeout=WAIT_S)


def test_chat_talks_to_a_server(tmp_path: Path) -> None:
    question = ("-p", "What is 3 plus 4?", "--temperature", "0")
    with served("--api-key", "sesame", "--prefix-cache", "0") as server:
        assert chat(server.url, *question, "--api-key", "sesame").stdout == "3 plus 4 is 7.\n"
        result = json.loads(chat(server.url + "/v1", *question, "--json", EDGE_API_KEY="sesame").stdout)
        assert (result["text"], result["finish_reason"]) == ("3 plus 4 is 7.", "stop")
        assert result["usage"]["prompt_tokens"] == 12
        key = ("--api-key", "sesame")
        assert chat(server.url, *question, *key, "--max-tokens", "2").stdout == "3 plus\n"
        assert chat(server.url, *question, *key, "--stop", " 4").stdout == "3 plus\n"
        longer = chat(server.url, *question, *key, "--system", "Say it twice.", "--json").stdout
        assert json.loads(longer)["usage"]["prompt_tokens"] > 12
        (tmp_path / "notes").write_text("Three and four.")
        longer = chat(server.url, *question, *key, "--file", str(tmp_path / "notes"), "--json").stdout
        assert json.loads(longer)["usage"]["prompt_tokens"] > 12
        (tmp_path / "schema").write_text('{"type": "integer", "minimum": 50, "maximum": 52}')
        assert int(chat(server.url, *question, *key, "--json-schema", str(tmp_path / "schema")).stdout) in (50, 51, 52)
        assert chat(server.url, *question, *key, "gpt-4o").stdout == "3 plus 4 is 7.\n"  # there is one model
        done = chat(server.url, *question)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (7, "", 1)
        assert "401" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "why"),
    [
        (("ftp://somewhere", "-p", "x"), 2, "is not an address"),
        (("127.0.0.1:9", "-p", "x"), 7, "127.0.0.1:9 cannot be reached: Connection refused; is edge serve"),
        (("127.0.0.1:9", "-p", "x", "--memory", "1GiB"), 2, "--memory is about a model that is loaded here"),
        (("127.0.0.1:9", "-p", "x", "--workers", "a"), 2, "--workers"),
        (("127.0.0.1:9", "-p", "x", "--prefix-cache", "0"), 2, "--prefix-cache is about a model"),
    ],
)
def test_a_server_that_cannot_be_asked(arguments: tuple[str, ...], code: int, why: str) -> None:
    done = chat(*arguments)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (code, "", 1)
    assert why in done.stderr
