"""A lab whose devices sleep: a chat's tokens cross four of them, a survey has their profiles, and nobody else gets
zeros."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from devices.cluster_file import Cluster
from devices.lab.config import parse_lab
from devices.sleeping import VARIABLE
from edge.cluster.fleet import Fleet
from edge.cluster.llm_ranks import LlmRanks
from edge.llm.continuation import Request
from edge.llm.options import EngineOptions
from edge.llm.sampler import SamplingParams
from edge.llm.scheduler import Scheduler
from edge.models.demo import MODEL_PATH
from edge.models.local_slices import OwnSlices
from edge.profiling.llm_survey import llm_speeds
from partition.model.file import ModelFile
from partition.plan.arrange import make_plan
from partition.plan.plan import LOCAL, NOTHING, Plan, Stage
from partition.predict.part_times import profile_json
from partition.predict.presets import PartSizes
from partition.predict.speeds import Curve, DeviceSpeed
from partition.slices.gguf_slice import limits
from tests.support.deployments import own_folders
from tests.support.helpers import assert_one_line_error, run_edge
from tests.support.lab import Lab
from tests.support.measuring import measure_briefly

FILE = ModelFile.open(MODEL_PATH)
SPEED = DeviceSpeed(
    "x", "x", Curve(((1, 5e-5),)), Curve(((1, 5e-5), (64, 9e-4))), 1e-8,
    Curve(((1, 3e-5), (64, 5e-4))), Curve(((1, 2e-4),)), 1 << 30, 1 << 20,
)  # fmt: skip
PROFILE = json.dumps(profile_json(SPEED, PartSizes.from_file(FILE)))
NAMES = ("own", "a", "b", "c")
OPTIONS = EngineOptions(threads=1, context=64, batch=16, sequences=2)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    device = {"profile": PROFILE, "compute": "sleep", "threads": 1}
    folder = tmp_path_factory.mktemp("labs")
    with pytest.MonkeyPatch.context() as patch:
        own_folders(patch, folder / "own")
        with Lab(parse_lab({"device": [{"name": name, **device} for name in NAMES]}), folder / "lab") as lab:
            yield lab


@pytest.fixture
def asleep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is a sleeping device, too."""
    path = tmp_path / "profile.json"
    path.write_text(PROFILE)
    monkeypatch.setenv(VARIABLE, str(path))


def addresses(lab: Lab) -> list[str]:
    return [lab.addresses[name] for name in NAMES[1:]]


def hybrid(workers: list[str]) -> Plan:
    """Two stages of two ranks each."""
    digest, can = OwnSlices().model_digest(MODEL_PATH), limits(FILE)
    stages = make_plan(can, "demo", digest, [LOCAL, "x"], "pipeline").stages
    shards = make_plan(can, "demo", digest, [LOCAL, "x"], "tensor").stages[0].shards
    (a, b), (c, d) = (LOCAL, workers[0]), workers[1:]
    first = tuple(replace(shard, device=name, vocab=NOTHING) for shard, name in zip(shards, (a, b), strict=True))
    last = tuple(replace(shard, device=name) for shard, name in zip(shards, (c, d), strict=True))
    return Plan("demo", digest, can.sizes, (Stage(stages[0].layers, first), Stage(stages[1].layers, last)))


@pytest.mark.usefixtures("asleep")
def test_a_chats_tokens_cross_four_sleeping_devices(lab: Lab) -> None:
    plan = hybrid(addresses(lab))
    with Fleet(addresses(lab)) as fleet, LlmRanks(fleet, plan, FILE, OPTIONS) as deployment:
        logits, tokens = deployment.engine.decode([1, 2, 3], 0), []
        deployment.engine.kv_clear()
        with Scheduler(deployment.engine) as scheduler:
            for first in (5, 7):
                scheduler.add(Request([first] * 4, 6, SamplingParams(temperature=0, allow_repetition=True), ends=False))
            while scheduler.busy:
                tokens += [event.token_id for event in scheduler.step() if event.token_id is not None]
    assert logits.shape == (limits(FILE).sizes.vocab,)
    assert not logits.any()
    assert tokens == [0] * 12


@pytest.mark.usefixtures("asleep")
def test_a_survey_has_what_the_profiles_say(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    measure_briefly(monkeypatch)
    cluster = Cluster.of_addresses(addresses(lab)[:1])
    with Fleet(addresses(lab)[:1]) as fleet:
        known = llm_speeds(cluster, fleet, (), FILE, OwnSlices().model_digest(MODEL_PATH))
    for speed in known.speeds:
        assert speed.layer_s.at(1) == pytest.approx(SPEED.layer_s.at(1), rel=0.02)
        assert speed.half_layer_s.at(1) == pytest.approx(SPEED.half_layer_s.at(1), rel=0.02)
        assert speed.head_s.at(1) == pytest.approx(SPEED.head_s.at(1), rel=0.02)
        assert speed.host is None
    assert known.speeds[0].sum_s == known.speeds[1].sum_s > 0


def test_who_computes_gets_no_zeros_for_an_answer(lab: Lab) -> None:
    done = run_edge("chat", MODEL_PATH, "-p", "Hi", "--workers", addresses(lab)[0])
    assert_one_line_error(done, 7, "a is a sleeping device of a lab", "edge lab run")


def test_a_command_sleeps_where_it_runs_on_a_device_that_sleeps(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("l")  # sockets of the lab lie below, and their paths are short
    (folder / "profile.json").write_text(PROFILE)
    devices = [f'[[device]]\nname = "{name}"\ncompute = "sleep"\nprofile = "profile.json"\n' for name in ("own", "a")]
    (folder / "lab.toml").write_text("\n".join(devices))
    env = {f"XDG_{kind}_HOME": str(folder / kind[0]) for kind in ("STATE", "CONFIG", "CACHE")}
    assert_one_line_error(run_edge("lab", "run", "own", "--", "--version", env=env), 7, "no lab is up")
    up = run_edge("lab", "up", folder / "lab.toml", "--json", env=env)
    try:
        _, a = json.loads(up.stdout)["devices"]
        chat = ["chat", MODEL_PATH, "-p", "Hi", "--workers", a["address"], "--parallel", "pipeline", "--json"]
        done = run_edge("lab", "run", "own", "--", *chat, "--max-tokens", "3", env=env)
        wrong = run_edge("lab", "run", "b", "--", "--version", env=env)
    finally:
        run_edge("lab", "down", env=env)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["token_ids"]) == 3  # drawn from equal logits
    assert_one_line_error(wrong, 7, "no device 'b'", "own, a")
