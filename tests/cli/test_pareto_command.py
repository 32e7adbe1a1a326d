"""`edge pareto` on a real worker: what is found, measured, remembered and written, and bad input."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from devices.paths import cache_folder
from edge.models.demo import MODEL_PATH
from edge.planning import front, measuring, over_networks, type_files
from edge.planning.llm_space import LlmSpace
from edge.profiling import links
from edge.quantization.evaluate import evaluate
from partition.model.file import ModelFile
from partition.plan.formats import plan_in
from partition.predict.objectives import AXES, OBJECTIVES
from quant.text import number_text
from tests.support.commands import Run, assert_refused, runner
from tests.support.deployments import shared_workers
from tests.support.thorough import thorough
from tests.support.workers import Worker

pytestmark = pytest.mark.usefixtures("measured_briefly")

NOBODY = "127.0.0.1:1"
FEW = ("--context", "512", "--prompt-tokens", "16", "--concurrency", "2")  # what is measured is soon done
# Two devices that are nowhere, the first in place of this one. It has no room for the whole model.
WHAT_IF = """
[[device]]
name = "me"
address = "local"
preset = "pi4"
memory = "206MiB"
watts = 6

[[device]]
name = "other"
preset = "pi4"
watts = 5

[[link]]
delay_ms = 0.001
bandwidth_mbps = 100000
"""


@pytest.fixture(autouse=True, scope="module", name="one")
def a_worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    with shared_workers(tmp_path_factory, "one") as [first]:
        yield first


@pytest.fixture(name="edge")
def in_this_process(capsys: pytest.CaptureFixture[str]) -> Run:
    return runner(capsys, "pareto")


@pytest.fixture(scope="module", name="what_if")
def a_cluster(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cluster") / "cluster.toml"
    path.write_text(WHAT_IF)
    return path


def pareto_json(run: Run, *options: str | Path) -> dict[str, Any]:
    """Return what it prints with --json; it must succeed."""
    code, out, error = run(*options, "--json")
    assert code == 0, error
    result: dict[str, Any] = json.loads(out)
    return result


def test_measured_once_a_day(edge: Run, one_worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "_NOISE_S", 1e9)  # and a link is as it was, however busy
    file = tmp_path / "front.json"
    request = (*FEW, "--measure", "1", "--json", file)
    there = ("--workers", one_worker.address, "--insecure")

    def measured(*options: str) -> tuple[str, dict[str, Any], dict[str, Any]]:
        code, out, error = edge(*request, *options)
        assert code == 0, error
        result = json.loads(file.read_text())
        [point] = [point for point in result["points"] if point["measured"]]
        return out, result, point["measured"]

    out, result, first = measured(*there)
    assert result["format"] == front.FORMAT
    assert result["model"] == "edge demo"
    assert {device["name"] for device in result["devices"]} == {"local", "one"}
    assert first["age_s"] == 0
    assert min(first["latency_s"], first["throughput_per_s"], first["ttft_s"]) > 0
    assert "%)" in out  # the error of the prediction
    assert_refused(edge(*request), 2, "--force")
    [label] = [point["label"] for point in result["points"] if point["measured"]]
    # What a command measures now may make another plan the most promising.
    monkeypatch.setattr(measuring, "promising", lambda points, _: [i for i, p in enumerate(points) if p.label == label])
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 10)
    _, _, second = measured(*there, "--force")
    assert second["age_s"] >= 10
    assert {**second, "age_s": 0} == {**first, "age_s": 0}  # nothing was measured
    assert [path.name for path in tmp_path.iterdir()] == ["front.json"]


def test_an_interrupted_one_writes_what_it_knows(
    edge: Run, one_worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while the second plan is measured: the first is in all files, and the same command goes on from there."""
    measured: list[str] = []
    stops = True
    measure = LlmSpace.measure

    def until_stopped(space: LlmSpace, point: Any, fleet: Any) -> Any:
        if measured and stops:
            raise KeyboardInterrupt
        measured.append(point.key)
        return measure(space, point, fleet)

    monkeypatch.setattr(LlmSpace, "measure", until_stopped)
    monkeypatch.setattr(measuring, "promising", lambda points, _: range(len(points)))  # whatever is predicted now
    data, html, png = (tmp_path / f"front.{ending}" for ending in ("json", "html", "png"))
    # Another context than elsewhere, so that no plan was measured before. By memory two devices are always on the
    # front, however slow the worker was when it was measured.
    request = (
        "--context",
        "496",
        "--axes",
        "latency,memory",
        "--prompt-tokens",
        "16",
        "--concurrency",
        "2",
        "--measure",
        "2",
        "--json",
        data,
    )
    command = (*request, "--html", html, "--png", png, "--workers", one_worker.address, "--insecure")
    code, _, error = edge(*command, "--save", tmp_path / "plan.json", "--pick", "latency")
    assert code == 130, error
    assert "edge pareto: interrupted after 1 of 2 plans" in error
    points = json.loads(data.read_text())["points"]
    [saved] = [point for point in points if point["measured"]]
    assert [point["measured"] for point in points if point["error"]] == [None]
    assert {point["error"] for point in points} == {None, measuring.INTERRUPTED}
    assert html.read_text().rstrip().endswith("</html>")
    assert png.read_bytes().endswith(b"IEND\xaeB`\x82")
    assert not (tmp_path / "plan.json").exists()  # nothing is picked from a part
    stops = False
    monkeypatch.setattr(links, "_NOISE_S", 1e9)  # a link is as it was, however busy
    code, _, error = edge(*command, "--force")
    assert code == 0, error
    points = json.loads(data.read_text())["points"]
    assert sum(point["measured"] is not None for point in points) == 2
    assert len(measured) == len(set(measured)) == 2
    assert saved["plan"] in [point["plan"] for point in points if point["measured"]]


def test_plans_with_drafts_are_points(edge: Run, what_if: Path, tmp_path: Path) -> None:
    """Those that are faster are on the front before the plain ones, and what is saved can be simulated."""
    plan = tmp_path / "plan.json"
    result = pareto_json(
        edge, "--cluster", what_if, "--draft", "ngram", "--acceptance", "0.9", "--pick", "latency", "--save", plan
    )
    drafted = [point for point in result["points"] if point["predicted"]["draft"]]
    plain = [point for point in result["points"] if not point["predicted"]["draft"]]
    assert drafted
    assert plain
    assert all("drafted by ngram, 0.9 of the drafts right" in point["label"] for point in drafted)
    assert drafted[0]["on_front"]
    stages = [point for point in drafted if len(point["plan"]["stages"]) > 1]
    windows = {point["predicted"]["draft"]["windows"]: point["label"] for point in stages}
    assert max(windows) > 1
    assert f", {max(windows)} windows at once" in windows[max(windows)]
    least = [min(point["predicted"]["latency_s"] for point in some) for some in (drafted, plain)]
    assert 0.1 * least[1] < least[0] < least[1]
    assert json.loads(plan.read_text())["predicted"]["draft"] == drafted[0]["predicted"]["draft"]


@pytest.mark.thorough
def test_passes_with_drafts_are_measured(edge: Run) -> None:
    result = pareto_json(edge, *FEW, "--draft", "ngram", "--acceptance", "1", "--measure", "9")
    measured = [point for point in result["points"] if point["predicted"]["draft"] and point["measured"]]
    assert measured
    assert all(point["measured"]["latency_s"] > 0 for point in measured)


def test_presets_are_planned_and_not_measured(edge: Run, what_if: Path) -> None:
    result = pareto_json(edge, "--cluster", what_if, "--measure", "3")
    assert {device["name"]: device["estimate"] for device in result["devices"]} == {"me": True, "other": True}
    assert {point["parallel"] for point in result["points"]} & {"pipeline", "tensor", "hybrid"}
    assert not any(point["measured"] or point["error"] for point in result["points"])


@pytest.mark.parametrize("axes", [("latency", "throughput"), ("latency", "memory"), ("latency", "ttft"), AXES[:5]])
def test_axes(edge: Run, what_if: Path, axes: tuple[str, ...]) -> None:
    """No plan of the front is dominated by another of them, and all others are by one."""
    result = pareto_json(edge, "--cluster", what_if, "--axes", ",".join(axes))
    assert result["objectives"] == [OBJECTIVES[axis].key for axis in axes]

    def values(point: dict[str, Any]) -> list[float]:
        total = point["predicted"]
        known = {
            "latency": total["latency_s"],
            "throughput": -total["throughput_per_s"],
            "ttft": total["ttft_s"],
            "memory": max(total["memory_bytes"].values()),
            "energy": total["energy_j"],
        }
        return [known[axis] for axis in axes]

    def dominates(a: dict[str, Any], b: dict[str, Any]) -> bool:
        return values(a) != values(b) and all(x <= y for x, y in zip(values(a), values(b), strict=True))

    front = [point for point in result["points"] if point["on_front"]]
    assert front
    for point in result["points"]:
        assert point["on_front"] != any(dominates(other, point) for other in front)
    assert [point["id"] for point in result["points"]] == [f"p{n}" for n in range(1, len(result["points"]) + 1)]


def test_fronts_over_networks(edge: Run, what_if: Path, tmp_path: Path) -> None:
    png = tmp_path / "front.png"
    result = pareto_json(edge, "--cluster", what_if, *FEW, "--networks", "lan,100Mbit/20ms", "--png", png)
    assert result["format"] == over_networks.FORMAT
    assert [network["name"] for network in result["networks"]] == ["lan", "100mbit/20ms"]
    assert png.read_bytes().endswith(b"IEND\xaeB`\x82")
    for network in result["networks"]:
        link = network["bytes_per_s"], network["latency_s"]
        assert {(way["bytes_per_s"], way["latency_s"]) for way in network["front"]["links"]} == {link}
        for axis, best in network["best"].items():
            key = OBJECTIVES[axis].key
            assert best[key] == pytest.approx(front.pick(network["front"], axis)["predicted"][key])
        assert network["moves_complete"]
        assert all(move["below"]["label"] != move["above"]["label"] for move in network["moves"])
    fast, slow = (network["best"]["latency"]["latency_s"] for network in result["networks"])
    assert fast < slow
    code, out, _ = edge("--cluster", what_if, *FEW, "--networks", "lan,3g")
    assert code == 0
    assert "3g: 1.00 Mbit/s, 50.0 ms" in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("--networks", "lan,dsl"),
            "the network 'dsl' is unknown; choose from lan, wifi, 5g, 4g, 3g, or give RATE/DELAY",
        ),
        (("--networks", "0mbit/1ms"), "needs a rate above 0"),
        (("--networks", "1mbit/61s"), "a delay up to 60s"),
        (("--networks", "lan,LAN"), "each network needs to be different"),
        (("--networks", ",".join(f"{n}mbit/1ms" for n in range(1, 10))), "1 to 8 networks can be compared, got 9"),
        (("--networks", "lan", "--measure", "1"), "--measure runs plans over the links that are there"),
        (("--networks", "lan", "--pick", "knee"), "--pick is for one network: leave out --networks"),
        (("--networks", "lan", "--html", "front.html"), "--html is for one network"),
    ],
)
def test_networks_that_cannot_be_compared(edge: Run, options: tuple[str, ...], message: str) -> None:
    assert_refused(edge(*options), 2, message)


def test_work_changes_what_is_predicted(edge: Run, what_if: Path) -> None:
    plain = pareto_json(edge, "--cluster", what_if)
    assert plain["concurrency"] == 4
    assert pareto_json(edge, "--cluster", what_if, "--concurrency", "3")["concurrency"] == 3

    def first(*options: str) -> dict[str, Any]:
        predicted: dict[str, Any] = pareto_json(edge, "--cluster", what_if, *options)["points"][0]["predicted"]
        return predicted

    before = plain["points"][0]["predicted"]
    assert first("--prompt-tokens", "33")["prompt"] == 33
    assert sum(first("--context", "512")["memory_bytes"].values()) < sum(before["memory_bytes"].values())


def test_types(edge: Run, what_if: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is made once and measured once; the front is of divergence, too, and a limit leaves types out."""
    measured: list[list[str]] = []

    def counted(reference: Path, models: list[ModelFile], *args: Any, **how: Any) -> Any:
        measured.append([file.path.name for file in models])
        return evaluate(reference, models, *args, **how)

    monkeypatch.setattr(type_files, "evaluate", counted)

    def types(*options: str | Path) -> dict[str, dict[str, Any]]:
        result = pareto_json(edge, "--cluster", what_if, *options)
        assert {point["type"] for point in result["points"]} == {
            kind["type"] for kind in result["types"] if not kind["left_out"]
        }
        return {kind["type"]: kind for kind in result["types"]}

    once = types("--types", "Q8_0,q5_0,q4_0")
    assert once["q8_0"]["model"] == str(MODEL_PATH)  # it is that type already
    assert [Path(once[name]["model"]).parent for name in ("q5_0", "q4_0")] == [cache_folder() / "types"] * 2
    assert 0 == once["q8_0"]["divergence"] < once["q5_0"]["divergence"] < once["q4_0"]["divergence"]
    assert once["q8_0"]["size_bytes"] > once["q5_0"]["size_bytes"] > once["q4_0"]["size_bytes"]
    assert [len(names) for names in measured] == [2]
    built = Path(once["q4_0"]["model"])
    before = built.stat().st_mtime_ns
    mine = tmp_path / "mine.gguf"
    mine.write_bytes(built.read_bytes())
    result = pareto_json(edge, "--cluster", what_if, "--types", f"q8_0,{mine}")
    assert result["objectives"] == ["latency_s", "throughput_per_s", "divergence"]
    assert result["types"][1]["divergence"] == once["q4_0"]["divergence"]
    assert {point["type"] for point in result["points"] if point["on_front"]} == {"q8_0", "mine"}
    assert built.stat().st_mtime_ns == before
    assert len(measured) == 1
    limit = ("--max-divergence", str((once["q5_0"]["divergence"] + once["q4_0"]["divergence"]) / 2))
    assert [kind["left_out"] for kind in types("--types", "q8_0,q5_0,q4_0", *limit).values()] == [False, False, True]
    code, out, error = edge("--cluster", what_if, "--types", "q5_0,q4_0", *limit, "--pick", "latency")
    assert code == 0, error
    assert "divergence nats" in out
    assert "Left out by the limit of divergence: q4_0 (" in out
    least = number_text(once["q5_0"]["divergence"])
    nothing = edge("--cluster", what_if, "--types", "q4_0,q5_0", "--max-divergence", "1e-9")
    assert_refused(nothing, 2, f"the lowest is {least} nats a token, of q5_0")
    plain = pareto_json(edge, "--cluster", what_if, "--types", "q8_0,q5_1", "--axes", "latency,throughput")
    assert {kind["divergence"] for kind in plain["types"]} == {None}
    assert len(measured) == 1
    divergences = [once["q5_0"]["divergence"]]
    text = tmp_path / "text.txt"
    for sentence in ("The device that is nearest answers first. ", "What is 27 plus 38? It is 65. "):
        text.write_text(sentence * 70)
        divergences.append(types("--types", "q5_0", "--text", text)["q5_0"]["divergence"])
    assert len(set(divergences)) == len(measured) == 3  # each text is one that was not measured


def test_a_picked_plan_with_presets_ends_with_commands_that_join_devices(
    edge: Run, what_if: Path, tmp_path: Path
) -> None:
    points = pareto_json(edge, "--cluster", what_if)["points"]
    for devices in (["me"], ["me", "other"]):
        picked = next(point for point in points if point["devices"] == devices)
        file = tmp_path / f"{picked['id']}.json"
        code, out, error = edge("--cluster", what_if, "--pick", picked["id"], "--save", file)
        assert code == 0, error
        steps = out.splitlines()[-1].partition("Next: ")[2].split(", then ")
        if "other" in devices:
            assert steps == ["edge cluster invite other", "edge plan --workers other"]
        else:
            assert steps == [f"edge chat --plan {file}"]


def test_a_picked_type_runs(edge: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.json"
    code, out, error = edge(*FEW, "--types", "q8_0,q4_0", "--pick", "latency", "--save", file)
    assert code == 0, error
    _, chat, model, *_ = shlex.split(out.splitlines()[-1].partition("Next: ")[2])
    assert chat == "chat"
    code, out, error = runner(capsys, "chat")(model, "--plan", file, "-p", "What is 2 plus 3?", "--context", "128")
    assert code == 0, error
    assert out


@pytest.mark.parametrize("which", ["knee", "p1", "latency", *thorough("throughput", "memory", "ttft", "energy")])
def test_picked_and_saved(edge: Run, what_if: Path, tmp_path: Path, which: str) -> None:
    file = tmp_path / "plan.json"
    points = pareto_json(edge, "--cluster", what_if)["points"]
    code, out, error = edge("--cluster", what_if, "--pick", which, "--save", file)
    assert code == 0, error
    last = out.splitlines()[-1]
    id_ = last.removeprefix("picked ").partition(":")[0]
    [chosen] = [point for point in points if point["id"] == id_]
    assert str(file) in last
    assert plan_in(json.loads(file.read_text())) == chosen["plan"]
    assert chosen["knee"] or which != "knee"
    if which == "throughput":
        assert chosen["predicted"]["throughput_per_s"] == max(p["predicted"]["throughput_per_s"] for p in points)


def test_a_picked_plan_runs(edge: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.json"
    assert edge("--pick", "latency", "--save", file)[0] == 0
    code, out, error = runner(capsys, "chat")("--plan", file, "-p", "What is 2 plus 3?", "--context", "128")
    assert code == 0, error
    assert out


def test_pictures_and_pages(edge: Run, what_if: Path, tmp_path: Path) -> None:
    png, html, data = (tmp_path / f"front.{end}" for end in ("png", "html", "json"))
    code, out, error = edge("--cluster", what_if, "--png", png, "--html", html, "--json", data)
    assert code == 0, error
    assert png.read_bytes().startswith(b"\x89PNG")
    assert png.read_bytes().endswith(b"IEND\xaeB`\x82")
    assert html.read_text().rstrip().endswith("</html>")
    assert json.loads(data.read_text())["points"]
    assert "other is a preset (pi4): its figures are estimates" in out
    assert {path.name for path in tmp_path.iterdir()} == {"front.png", "front.html", "front.json"}


def test_no_one_answers(edge: Run) -> None:
    code, out, error = edge("--workers", NOBODY)
    assert code == 0, error
    assert f"planned without {NOBODY}: " in out


def test_refused(edge: Run, what_if: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    same = tmp_path / "same"
    for options, words in (
        (["--pick", "p9999"], ["p9999", "knee"]),
        (["--save", same], ["--pick"]),
        (["--json", same, "--html", same], ["different"]),
        (["--json", tmp_path / "no" / "x.json"], ["folder"]),
        (["--cluster", what_if, "--json", what_if, "--force"], ["is read"]),
        (["--json", MODEL_PATH, "--force"], ["is read"]),
        (["--types", "q8_0,q99"], ["q99"]),
        (["x.onnx", "--types", "q8_0"], ["--types"]),
        (["--types", "q4_k,q4_k_m"], ["2 entries called q4_k_m"]),
        (["--types", "iq2_xs"], ["importance matrix", "edge quantize"]),
        (["--types", "mxfp4_moe"], ["cannot have the type mxfp4_moe"]),
        (["--max-divergence", "0.1"], ["divergence", "types", "none are named"]),
        (["--axes", "latency,divergence"], ["divergence compares types", "none are named"]),
        (["--text", MODEL_PATH], ["divergence compares types", "none are named"]),
    ):
        code, _, error = edge("--cluster", what_if, *options) if "--cluster" not in options else edge(*options)
        assert (code, error.count("\n")) == (2, 1), error
        assert all(word in error for word in words), error
    assert not same.exists()
    short = tmp_path / "short.txt"
    short.write_text("too short")
    assert_refused(edge("--cluster", what_if, "--types", "q5_0", "--text", short), 3, "512 tokens")
    assert_refused(edge("--cluster", what_if, "--types", "q8_0,none.gguf"), 3, "none.gguf")
    for options, words in (
        (["--axes", "latency"], ["two or more"]),
        (["--axes", "latency,beauty"], ["beauty"]),
        (["--max-divergence", "-1"], ["-1"]),
        (["--types", "q8_0,q8_0"], ["different"]),
        (["--kv-type", "f17"], ["f16"]),
        (["--measure", "-1"], ["-1"]),
    ):
        with pytest.raises(SystemExit, match="2"):
            edge(*options)
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert all(word in error for word in words), error
