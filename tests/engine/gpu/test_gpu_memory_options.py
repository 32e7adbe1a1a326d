"""The option --gpu-memory, as people give it: where it arrives, and what is refused."""

from pathlib import Path

import pytest

import edge
from apps.cli import build_parser, main
from apps.engine_options import engine_options
from apps.errors import UsageError
from edge.errors import EngineError
from edge.llm.options import EngineOptions
from edge.worker import daemon
from edge.worker.daemon import DaemonOptions
from edge.worker.limits import WorkerOptions
from tests.support.helpers import assert_one_line_error, run_edge


def parsed(*args: str) -> EngineOptions:
    return engine_options(build_parser().parse_args(["chat", *args]))


def test_it_reaches_the_engine() -> None:
    assert parsed("--gpu-memory", "3GiB").gpu_memory == 3 << 30
    assert parsed().gpu_memory is None


@pytest.mark.parametrize("option", [("--gpu-layers", "0"), ("--lora", "a.gguf"), ("--reproducible",)])
def test_what_does_not_go_with_it(option: tuple[str, ...]) -> None:
    with pytest.raises(UsageError, match=f"{option[0]} does not go with --gpu-memory"):
        parsed("--gpu-memory", "1GiB", *option)


def test_without_a_gpu_it_is_one_line() -> None:
    done = run_edge("chat", "-p", "hi", "--gpu-memory", "1GiB")
    assert_one_line_error(done, 5, "finds no GPU; leave --gpu-memory out")
    with pytest.raises(EngineError, match="finds no GPU"):
        edge.load(gpu_memory="1GiB")


def test_a_worker_lends_it_to_sessions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started: list[WorkerOptions] = []

    def serve(options: DaemonOptions) -> None:
        started.append(options.worker)

    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr(daemon, "serve", serve)
    assert main(["worker", "--listen", "127.0.0.1:0", "--insecure", "--gpu-memory", "2GiB"]) == 0
    assert [options.gpu_memory for options in started] == [2 << 30]
