"""`edge plan` on a real worker: what is printed, what each option does, and bad input."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from apps import cli
from apps.options import MOST_WORKERS
from devices.paths import state_folder
from edge.models.demo import MODEL_PATH
from edge.planning.choice import read_plan
from partition.plan.formats import PLANNED, plan_in
from partition.plan.plan import Plan
from partition.predict.objectives import SEARCHED
from quant.text import number_text
from tests.support.commands import Run, assert_refused, runner, said
from tests.support.deployments import shared_workers
from tests.support.workers import Worker

pytestmark = pytest.mark.usefixtures("measured_briefly")

NOBODY = "127.0.0.1:1"
# Two devices that are nowhere, the first in place of this one: what is best does not depend on where tests run.
WHAT_IF = """
[[device]]
name = "me"
address = "local"
preset = "pi4"
watts = 6

[[device]]
name = "other"
preset = "pi4"
watts = 5

[[link]]
delay_ms = 0.001
bandwidth_mbps = 100000
"""
CHANGED: list[tuple[list[str], str]] = [  # options, and what in "predicted" they change
    (["--context", "512"], "memory_bytes"),
    (["--kv-type", "q8_0"], "memory_bytes"),
    (["--concurrency", "9"], "in_flight"),
    (["--depth", "2000"], "latency_s"),
    (["--prompt-tokens", "33"], "prompt"),
    (["--prompt-tokens", "65"], "ttft_s"),
]


@pytest.fixture(autouse=True, scope="module", name="one")
def a_worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    with shared_workers(tmp_path_factory, "one") as [first]:
        yield first


@pytest.fixture(name="edge")
def in_this_process(capsys: pytest.CaptureFixture[str]) -> Run:
    return runner(capsys, "plan")


@pytest.fixture(scope="module", name="what_if")
def a_cluster(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("cluster"), WHAT_IF)


def written(folder: Path, text: str) -> Path:
    path = folder / "cluster.toml"
    path.write_text(text)
    return path


def test_json_has_what_is_documented(edge: Run, one_worker: Worker) -> None:
    result = said(edge, "--workers", one_worker.address, "--insecure")
    assert {*result} == {
        "format", "kind", "model", "type", "objective", "plan", "parallel", "predicted", "why", "changes",
        "encoder", "devices", "links", "notes",
    }  # fmt: skip
    assert (result["format"], result["kind"], result["model"]) == (PLANNED, "llm", str(MODEL_PATH))
    assert [(device["name"], device["address"]) for device in result["devices"]] == [
        ("local", "local"),
        ("one", one_worker.address),
    ]
    for device in result["devices"]:
        assert not device["estimate"]
        assert device["measured_age_s"] >= 0
        speeds = device["speeds"]
        numbers = {"token_s", "prompt_token_s", "disk_bytes_per_s"}
        assert {*speeds} == {"layer_s", "half_layer_s", "head_s", "step_s", *numbers}
        assert all(rows >= 1 and seconds > 0 for rows, seconds in speeds["layer_s"])
    assert {(way["from"], way["to"]) for way in result["links"]} == {("local", "one"), ("one", "local")}
    assert all(way["latency_s"] > 0 and way["age_s"] >= 0 and not way["estimate"] for way in result["links"])
    assert result["predicted"]["latency_s"] == pytest.approx(
        sum(stage["compute_s"] + stage["transfer_s"] for stage in result["predicted"]["stages"])
        + result["predicted"]["enter_s"],
        rel=0.05,
    )
    assert result["changes"]


def test_for_people(edge: Run, what_if: Path) -> None:
    code, out, error = edge("--cluster", what_if)
    assert code == 0, error
    assert out.startswith(("use one device: ", "tensor on 2 devices: ", "pipeline on 2 devices: "))
    assert re.search(r"^0 +me", out, re.MULTILINE)
    for what in ("latency", "throughput", "TTFT", "energy", "bound"):
        assert f"\n{what}: " in out
    assert "other is a preset (pi4): its figures are estimates" in out


def test_a_plan_with_presets_ends_with_commands_that_join_devices(edge: Run, tmp_path: Path) -> None:
    cluster, file = written(tmp_path, PHASES), tmp_path / "plan.json"
    code, out, error = edge("--cluster", cluster, "--prompt-tokens", "400", "--save", file)
    assert code == 0, error
    words = "Next: edge cluster invite laptop, then edge plan --workers laptop"
    assert out.splitlines()[-1] == f"saved: {file}. {words}"
    assert "laptop is a preset (apple-m4): its figures are estimates, and edge cluster invite laptop joins such" in out


PHASES = """
[[device]]
name = "phone"
address = "local"
preset = "pi4"

[[device]]
name = "laptop"
preset = "apple-m4"

[[link]]
delay_ms = 2
bandwidth_mbps = 1000
"""


def test_prompts_have_a_placement_of_their_own_where_that_is_clearly_sooner(edge: Run, tmp_path: Path) -> None:
    cluster, file = written(tmp_path, PHASES), tmp_path / "plan.json"
    prompt = ("--cluster", cluster, "--prompt-tokens", "400")
    result = said(edge, *prompt, "--save", file)
    plan, predicted = result["plan"], result["predicted"]
    assert [devices_of(stage) for stage in plan["stages"]] == [["local"]]
    assert [devices_of(stage) for stage in plan["prefill"]["stages"]] == [["local"], ["laptop"]]
    assert plan["prefill"]["stages"][0]["layers"] == [0, 0]
    assert 1 < plan["prefill_from"] < 400
    prefill = predicted["prefill"]
    assert [stage["what"] for stage in prefill["stages"]] == ["tokens only", "layers 0-7"]
    assert predicted["ttft_s"] == pytest.approx(
        prefill["ttft_s"] + predicted["hand_over_s"] + predicted["stages"][0]["compute_s"], rel=1e-3
    )
    assert {*predicted["memory_bytes"]} == {"local", "laptop"}
    assert Plan.from_json(plan) == read_plan(file, Plan)
    code, out, error = edge(*prompt)
    assert code == 0, error
    sooner = rf"; prompts of {plan['prefill_from']} tokens or more on laptop: [\d.]+ s to the first token instead of"
    assert re.search(sooner, out), out
    assert re.search(r"^prompts 1 +laptop +layers 0-7 +[\d.]+ ms for 400 tokens ", out, re.MULTILINE), out
    # Short prompts stay; and where a limit leaves nothing else, so does none that has to be sooner than it can be.
    short = said(edge, "--cluster", cluster, "--prompt-tokens", "4")
    assert "prefill" not in short["plan"]
    assert "prefill" not in short["predicted"]
    limited = said(edge, *prompt, "--objective", "ttft", "--max-latency", str(1010 * predicted["latency_s"]))
    assert limited["plan"]["prefill"]
    assert limited["predicted"]["ttft_s"] <= predicted["ttft_s"]
    assert_refused(edge(*prompt, "--max-ttft", "0.0001"), 2, "no plan has ttft of at most")


def devices_of(stage: dict[str, Any]) -> list[str]:
    return [shard["device"] for shard in stage["shards"]]


def test_objectives(edge: Run, what_if: Path) -> None:
    """Each has the best plan by what it is called, of all the plans found."""
    best = {name: said(edge, "--cluster", what_if, "--objective", name)["predicted"] for name in SEARCHED}

    def value(objective: str, predicted: dict[str, Any]) -> float:
        if objective == "throughput":
            return -float(predicted["throughput_per_s"])
        if objective == "memory":
            return float(max(predicted["memory_bytes"].values()))
        return float(predicted[{"latency": "latency_s", "ttft": "ttft_s", "energy": "energy_j"}[objective]])

    for objective in SEARCHED:
        chosen = value(objective, best[objective])
        slack = 0.06 * abs(chosen)  # one device is preferred to a gain of less than 5 %
        assert all(chosen <= value(objective, other) + slack for other in best.values()), objective


def test_the_best_of_types(edge: Run, what_if: Path, tmp_path: Path) -> None:
    """The smallest is the fastest; a limit of divergence takes a larger one, and limits that contradict each other are
    told with the least divergence that there is."""
    types = ("--cluster", what_if, "--types", "q8_0,q4_0", "--max-divergence")
    small, large = said(edge, *types, "9"), said(edge, *types, "1e-6")
    assert [small["type"], large["type"]] == ["q4_0", "q8_0"]
    assert small["predicted"]["latency_s"] < large["predicted"]["latency_s"]
    assert small["predicted"]["divergence"] > large["predicted"]["divergence"] == 0
    assert small["model"] != large["model"] == str(MODEL_PATH)
    assert small["why"].startswith("q4_0: ")
    between_ms = 1e3 * (small["predicted"]["latency_s"] + large["predicted"]["latency_s"]) / 2
    answer = edge(*types, "1e-6", "--max-latency", f"{between_ms:.9f}")
    least = f"{number_text(small['predicted']['divergence'])} nats a token, of q4_0"
    assert_refused(answer, 2, "q8_0: no plan has latency", f"within the other limits is {least}")
    file = tmp_path / "plan.json"
    code, out, error = edge(*types, "9", "--save", file)
    assert code == 0, error
    assert f"divergence: {number_text(small['predicted']['divergence'])} nats a token from the model" in out
    steps = "edge cluster invite other, then edge plan --workers other"
    assert out.splitlines()[-1] == f"saved: {file}. Next: {steps}"
    assert said(edge, "--cluster", what_if)["type"] is None


def test_options_change_what_is_predicted(edge: Run, what_if: Path) -> None:
    plain = said(edge, "--cluster", what_if)["predicted"]
    for options, what in CHANGED:
        assert said(edge, "--cluster", what_if, *options)["predicted"][what] != plain[what], (options, what)


def test_a_plan_says_which_drafts_it_counts_on(edge: Run, what_if: Path) -> None:
    """A Pi reads its weights as fast for several rows as for one, so drafts are worth it; where none is right, not."""
    plain = said(edge, "--cluster", what_if)
    assert plain["predicted"]["draft"] is None
    for acceptance, options in ((0.9, ("--acceptance", "0.9")), (0.4, ())):
        result = said(edge, "--cluster", what_if, "--draft", "ngram", *options)
        predicted = result["predicted"]
        draft = predicted["draft"]
        assert (draft["name"], draft["acceptance"], draft["guess_s"]) == ("ngram", acceptance, 0)
        assert draft["tokens_per_pass"] == pytest.approx(sum(acceptance**i for i in range(draft["rows"])))
        assert (1 - acceptance) * 0.99 < predicted["latency_s"] / plain["predicted"]["latency_s"] < 1
        assert f"{draft['rows']} rows a pass, drafted by ngram, {acceptance} of the drafts right" in result["why"]
        assert any(f"{acceptance} are assumed to be right" in note for note in result["notes"])
    none = said(edge, "--cluster", what_if, "--draft", "ngram", "--acceptance", "0")
    assert none["predicted"] == plain["predicted"]
    code, out, _ = edge("--cluster", what_if, "--draft", "auto", "--acceptance", "0.9")
    assert code == 0
    assert re.search(r"^drafts: \d rows a pass, drafted by ngram.* ms a token without$", out, re.MULTILINE)


def test_a_model_that_drafts_is_measured(edge: Run) -> None:
    """The model itself is no smaller, and takes about as long for a draft as for a token: what is measured decides
    whether that pays. Drafts that took no time would pay for sure, all being right."""
    result = said(edge, "--draft", str(MODEL_PATH), "--acceptance", "1")
    draft = result["predicted"]["draft"]
    assert draft is None or draft["guess_s"] > 0
    code, out, _ = edge("--draft", str(MODEL_PATH), "--acceptance", "1")
    assert code == 0
    assert MODEL_PATH.name in out


def test_a_worker_that_drafts_is_measured(edge: Run, one_worker: Worker, tmp_path: Path) -> None:
    """It is a thousand times as fast as it was measured to be, says the file, so that its drafts cost next to nothing:
    the ways to it and back. The model needs memory there, and none here."""
    fast = written(tmp_path, f'{WHAT_IF}[[device]]\nname = "fast"\naddress = "{one_worker.address}"\nspeed = 1000\n')
    request = ("--cluster", fast, "--insecure", "--draft", str(MODEL_PATH), "--draft-worker", one_worker.address)
    result = said(edge, *request, "--acceptance", "0.9")
    draft = result["predicted"]["draft"]
    assert (draft["name"], draft["worker"]) == (MODEL_PATH.name, one_worker.address)
    assert draft["ask_s"] == pytest.approx(2e-6)
    assert 0 < draft["guess_s"] < 1e-3
    assert draft["held_bytes"] > MODEL_PATH.stat().st_size
    assert f"drafted by {MODEL_PATH.name} on fast, 0.9 of the drafts right" in result["why"]
    plain_s = sum(stage["compute_s"] + stage["transfer_s"] for stage in result["predicted"]["stages"])
    assert 0.1 * plain_s < result["predicted"]["latency_s"] < plain_s


def test_memory_is_what_this_device_may_use(edge: Run) -> None:
    assert said(edge, "--memory", "300MiB")["devices"][0]["memory_bytes"] == 300 << 20


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--max-latency", "0.0001"], ["latency of at most 0.000100 ms", "the best latency there is is"]),
        (["--min-throughput", "1e9"], ["throughput of at least 1,000,000,000 tokens/s"]),
        (["--max-ttft", "1e-6"], ["ttft of at most"]),
        (["--max-memory", "1MiB"], ["memory of at most 1.00 MiB"]),
        (["--max-energy", "1e-9"], ["energy of at most"]),
    ],
)
def test_out_of_reach(edge: Run, what_if: Path, options: list[str], words: list[str]) -> None:
    assert_refused(edge("--cluster", what_if, *options), 2, *words)


def test_no_one_answers(edge: Run) -> None:
    """It is planned without, and said so."""
    result = said(edge, "--workers", NOBODY)
    assert [device["name"] for device in result["devices"]] == ["local"]
    assert any(note.startswith(f"planned without {NOBODY}: ") for note in result["notes"])
    code, out, _ = edge("--workers", NOBODY)
    assert code == 0
    assert f"planned without {NOBODY}" in out


def test_old_figures_are_said_to_be(edge: Run) -> None:
    said(edge)
    file = state_folder() / "speeds.json"
    entries = json.loads(file.read_text())
    old = {
        key: {"measured_at": entry["measured_at"] - 3 * 3600, "value": entry["value"] | {"busy": False}}
        for key, entry in entries.items()
    }
    file.write_text(json.dumps(old))
    code, out, _ = edge()
    file.write_text(json.dumps(entries))
    assert code == 0
    assert "measured 3 h ago; --fresh measures again" in out


def test_a_saved_plan_runs(edge: Run, one_worker: Worker, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.json"
    # The least memory: with it, prompts have no placement of their own, which `edge simulate` would refuse.
    plan = said(edge, "--workers", one_worker.address, "--insecure", "--objective", "memory", "--save", file)
    written = json.loads(file.read_text())
    assert plan_in(written) == plan["plan"]
    assert written["predicted"].keys() >= {"latency_s", "throughput_per_s", "stages"}
    assert cli.main(["simulate", str(file), "--arrivals", "closed:1", "--requests", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["planned"]["plan"] == plan["plan"]
    assert_refused(edge("--save", file), 2, str(file), "--force")
    assert edge("--workers", one_worker.address, "--insecure", "--save", file, "--force")[0] == 0
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]
    with_it = ("--plan", file, *(("--insecure",) if plan["parallel"] != "single" else ()))
    result = said(runner(capsys, "bench"), "--prompt-tokens", "8", "--gen-tokens", "4", "--context", "64", *with_it)
    assert result


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[[device]]\nname = 'a'\naddres = 'local'\n", ["addres"]),
        ("[[device]]\nname = 'a'\naddress = 'local'\nmemory = '3 cows'\n", ["memory", "3 cows"]),
        ("[[device]]\nname = 'a'\npreset = 'pi4'\n" * 2, ["a"]),
        ("[[device]]\nname = 'a'\npreset = 'pi400'\n", ["preset", "pi4"]),
        ("[[device]]\nname = 'a'\npreset = 'pi4'\nspeed = -1\n", ["speed"]),
        ("", ["0"]),
        ("[[device]\n", ["cluster.toml"]),
    ],
)
def test_bad_cluster_files(edge: Run, tmp_path: Path, text: str, words: list[str]) -> None:
    assert_refused(edge("--cluster", written(tmp_path, text)), 3, *words)


def test_refused(edge: Run, what_if: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = what_if.read_bytes()
    many = ",".join(f"10.0.0.1:{port}" for port in range(1, MOST_WORKERS + 2))
    text = "".join(f"[[device]]\nname = 'd{i}'\npreset = 'pi4'\n" for i in range(MOST_WORKERS + 1))
    for options, words in (
        (["--cluster", what_if, "--workers", NOBODY], ["--cluster", "--workers"]),
        (["--cluster", what_if, "--save", what_if, "--force"], ["is read"]),
        (["--cluster", written(tmp_path, text)], [str(MOST_WORKERS)]),
        (["--save", tmp_path], ["folder"]),
        (["--dim", "batch=2"], ["--dim", "ONNX"]),
        (["x.onnx", "--context", "100"], ["--context", "language"]),
        (["x.onnx", "--draft", "ngram"], ["--draft", "language"]),
        (["x.onnx", "--draft-worker", NOBODY], ["--draft-worker", "language"]),
        (["--draft-worker", NOBODY], ["--draft-worker needs a model to draft with", "--draft FILE"]),
        (["--draft", "ngram", "--draft-worker", NOBODY], ["--draft is ngram"]),
        (["--acceptance", "0.5"], ["--acceptance", "--draft"]),
        (["--context", "150"], ["150 tokens", "192", "--context", "--prompt-tokens"]),
        (["--context", "200", "--concurrency", "40"], ["200 tokens", "640", "--context", "--concurrency"]),
    ):
        assert_refused(edge(*options), 2, *words)
    assert what_if.read_bytes() == before
    for options, words in (
        (["--kv-type", "f16/f17"], ["--kv-type", "f16"]),
        (["--workers", many], [str(MOST_WORKERS)]),
        (["--objective", "beauty"], ["latency"]),
        (["--max-latency", "0"], ["above 0"]),
        (["--draft", "ngram", "--acceptance", "1.5"], ["--acceptance", "from 0 to 1"]),
        (["--max-memory", "much"], ["2GiB"]),
    ):
        with pytest.raises(SystemExit, match="2"):
            edge(*options)
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert all(word in error for word in words), error
