"""Test that command-line options reach the engine, on this device or on a server."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from apps import distributed
from apps.cli import build_parser
from edge.api.config import EngineConfig
from edge.models.demo import MODEL_PATH
from edge.planning.choice import save_plan
from partition.plan.onnx_plan import OnnxPlan, OnnxStage
from partition.plan.plan import LOCAL, Range

SEVERAL = ("--workers", "10.0.0.1:7070,10.0.0.2:7071", "--parallel", "tensor", "--shares", "1,2,3", "--insecure")


def config(*args: str, sequences: int = 1, draft: str = "off") -> EngineConfig:
    parsed = build_parser().parse_args(args)
    devices = distributed.prepare(parsed)
    return distributed.engine_config(parsed, MODEL_PATH, devices, sequences, draft=draft)


@pytest.mark.parametrize("command", ["chat", "serve"])
def test_every_option_of_several_devices_is_in_it(command: str) -> None:
    plain, request = config(command, *SEVERAL[:2]), config(command, *SEVERAL)
    assert plain.workers == request.workers == ("10.0.0.1:7070", "10.0.0.2:7071")
    assert (plain.parallel, plain.shares, plain.insecure) == ("auto", None, False)
    assert (request.parallel, request.shares, request.insecure) == ("tensor", (1.0, 2.0, 3.0), True)
    travel = config(command, *SEVERAL[:2], "--transport", "grpc", "--allreduce", "star", "--wire", "q8")
    assert (travel.transport, travel.allreduce, travel.wire) == ("grpc", "star", "q8")


@pytest.mark.parametrize("command", ["chat", "serve"])
def test_every_option_of_the_engine_is_in_it(command: str) -> None:
    options = config(
        command, "--threads", "3", "--context", "512", "--batch", "64", "--kv-type", "q8_0", "--memory", "3GiB",
        "--prefix-cache", "1GiB", "--draft", "ngram", "--attention-window", "99", sequences=4,
    )  # fmt: skip
    assert options.prefix_cache == 1 << 30
    assert options.draft == "ngram"
    engine = options.engine_options()
    assert (engine.threads, engine.context, engine.batch, engine.sequences) == (3, 512, 64, 4)
    assert (engine.kv_type, engine.memory, engine.attention_window) == ("q8_0", 3 << 30, 99)


@pytest.mark.parametrize(
    ("options", "threads", "provider"),
    [
        ((), 3, "cpu"),
        (("--threads", "2"), 2, "cpu"),
        (("--provider", "other"), 3, "other"),
        (("--threads", "2", "--provider", "other"), 2, "other"),
    ],
)
def test_options_of_the_own_stage_are_those_of_a_saved_plan_unless_they_are_set(
    options: Sequence[str], threads: int, provider: str, tmp_path: Path
) -> None:
    own = OnnxStage(LOCAL, Range(0, 2), "a", threads=3, provider="cpu")
    other = OnnxStage("10.0.0.1:7070", Range(2, 4), threads=7, provider="theirs")
    save_plan(tmp_path / "plan.json", OnnxPlan("net", "0" * 64, 4, (own, other)))
    parsed = build_parser().parse_args(["run", "net.onnx", "--plan", str(tmp_path / "plan.json"), *options])
    devices = distributed.prepare_onnx(parsed)
    assert devices is not None
    assert devices.workers == ("10.0.0.1:7070",)
    assert (parsed.threads, parsed.provider) == (threads, provider)


def test_defaults_are_those_of_the_command() -> None:
    assert config("chat", draft="auto").draft == "auto"


def test_it_crosses_to_an_engine_process_unchanged() -> None:
    request = replace(config("serve", *SEVERAL), affinity=(0, 2))
    assert EngineConfig.from_json(json.loads(json.dumps(request.to_json()))) == request
