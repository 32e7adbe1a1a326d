"""`--reproducible`, and `edge evaluate` over workers, as commands."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from edge.api.config import EngineConfig
from edge.llm.options import EngineOptions
from edge.models.demo import MODEL_PATH
from tests.support.commands import Run, Two, main, runs, two_workers
from tests.support.deployments import own_folders
from tests.support.helpers import assert_one_line_error, edge_here

ASKED = ("chat", "-p", "What is 27 plus 38?", "--reproducible", "--threads", "1", "--context", "256")


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Two]:
    folder = tmp_path_factory.mktemp("w")
    with pytest.MonkeyPatch.context() as patch:
        own_folders(patch, folder / "own")
        with two_workers(folder) as both:
            yield both


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], two: Two) -> Iterator[Run]:
    with runs(capsys, two) as run:
        yield run


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--draft", "ngram"], "--draft ngram depends on how long steps take"),
        (["--prefix-cache", "1GiB"], "--prefix-cache"),
        (["--workers", "auto"], "--workers auto"),
        (["--flash-attention", "on"], "flash attention"),
        (["--kv-type", "q8_0"], "q8_0"),
    ],
)
def test_what_would_follow_time_is_refused(options: list[str], words: str) -> None:
    done = edge_here(*ASKED, *options)
    assert done.returncode != 0
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_a_server_decides_for_itself() -> None:
    done = edge_here("chat", "-p", "x", "--reproducible", "--url", "http://127.0.0.1:1")
    assert_one_line_error(done, 2, "--reproducible is about a model that is loaded here")


def test_several_requests_at_once_are_refused() -> None:
    done = edge_here("serve", "--reproducible", "--requests", "2")
    assert_one_line_error(done, 2, "--requests 2", "one request at a time")


def test_without_a_seed_the_answer_is_that_of_seed_0() -> None:
    answers = [json.loads(edge_here(*ASKED, "--temperature", "2", "--json", *more).stdout) for more in ((), ())]
    assert answers[0]["seed"] == answers[1]["seed"] == 0
    assert answers[0]["token_ids"] == answers[1]["token_ids"]
    other = json.loads(edge_here(*ASKED, "--temperature", "2", "--json", "--seed", "5").stdout)
    assert other["seed"] == 5


def test_shares_that_would_be_measured_are_refused(run: Run, two: Two) -> None:
    code, _, said = run(*ASKED, "--workers", two[0].address, "--parallel", "tensor")
    assert code != 0
    assert "--shares" in said
    code, _, said = run(*ASKED, "--workers", two[0].address, "--parallel", "tensor", "--shares", "1,1")
    assert code == 0, said


def test_a_server_has_options_of_its_own() -> None:
    options = EngineConfig(str(MODEL_PATH), EngineOptions(sequences=1), 0, reproducible=True).engine_options()
    assert options.flash_attention == "off"
    assert EngineConfig(str(MODEL_PATH), EngineOptions(sequences=1), 0).engine_options().flash_attention == "auto"


def test_routes_over_workers(run: Run, two: Two) -> None:
    total = ("evaluate", MODEL_PATH, "--tokens", "64", "--chunk-tokens", "32", "--threads", "1", "--json")
    code, out, said = run(*total, "--workers", two[0].address, "--parallel", "pipeline", "--shares", "1,1")
    assert code == 0, said
    result = json.loads(out)
    routes = {route["route"]: route for route in result["routes"]}
    assert result["scored_tokens"] == 30
    assert routes["the devices"]["one_device"]["mean_divergence"] == 0  # stages: the same bits
    assert routes["kept prompt, the devices"]["one_device"]["mean_divergence"] < 1e-3
    code, out, said = run(
        *total, "--workers", two[0].address, "--parallel", "tensor", "--shares", "1,1", "--wire", "q8"
    )
    assert code == 0, said
    lossy = {route["route"]: route for route in json.loads(out)["routes"]}["the devices"]
    assert lossy["one_device"]["mean_divergence"] > 0


def test_routes_on_this_device_are_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main("evaluate", MODEL_PATH, "--routes", "--tokens", "64", "--chunk-tokens", "32", "--threads", "1") == 0
    out = capsys.readouterr().out
    assert "flash attention off" in out
    assert "8 streams" in out


def test_routes_are_of_one_model(tmp_path: Path) -> None:
    done = edge_here("evaluate", MODEL_PATH, MODEL_PATH, MODEL_PATH, "--routes")
    assert_one_line_error(done, 2, "need one MODEL", "got 2")
    done = edge_here("evaluate", MODEL_PATH, "--routes", "--png", tmp_path / "x.png")
    assert_one_line_error(done, 2, "--png")
