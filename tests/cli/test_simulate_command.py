"""`edge simulate`: what it reads, what it shows, and what it refuses."""

import copy
import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from apps import cli
from partition.errors import PlanError
from partition.plan.formats import plan_in
from partition.predict.prediction import Prediction
from partition.predict.speeds import LinkSpeed
from tests.support.commands import Answer, assert_refused
from tests.unit.partition.test_simulate import of_images, of_text

Simulate = Callable[..., Answer]
TEXT = of_text((1, 2), link=LinkSpeed(0.002, 1e6), prompt=64, concurrency=4)
IMAGES = of_images((0.02, 0.05), 8, latency_s=0.001, busy_s=0.002, enter_busy_s=0.003)
DEVICES = [{"name": name, "address": address} for name, address in (("desk", "local"), ("pi", "b"), ("laptop", "c"))]


def planned(predicted: Prediction = TEXT) -> dict[str, Any]:
    """As of `edge plan --json`."""
    return {"format": "edge-planned-1", "kind": "llm", "predicted": predicted.to_json(), "devices": DEVICES}


def saved() -> dict[str, Any]:
    """As `edge plan --save` writes it: the plan, and beside it what it is predicted to do."""
    stages = [
        {"layers": [2 * i, 2 * i + 2], "shards": [{"device": device} for device in stage.devices]}
        for i, stage in enumerate(TEXT.stages)
    ]
    predicted = TEXT.to_json()
    for i, stage in enumerate(predicted["stages"]):
        stage["what"] = f"layers {2 * i}-{2 * i + 1}"
    return {"format": "edge-plan-1", "model": "m", "stages": stages, "predicted": predicted, "devices": DEVICES}


def explored() -> dict[str, Any]:
    """As of `edge pareto --json`: devices have their names."""
    points = [
        {"id": f"p{i}", "on_front": i == 2, "knee": i == 3, "predicted": item.to_json()}
        for i, item in enumerate((IMAGES, of_images((0.1,), 1), of_images((0.3,), 1)), 1)
    ]
    return {"format": "edge-pareto-1", "kind": "onnx", "points": points, "devices": []}


def edited(values: dict[str, Any], *path: Any) -> dict[str, Any]:
    """The same with the value at a place replaced by the last of `path`, or without it where that is Ellipsis."""
    built = at = copy.deepcopy(values)
    *way, key, value = path
    for step in way:
        at = at[step]
    if value is ...:
        del at[key]
    else:
        at[key] = value
    return built


@pytest.fixture
def simulate(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Simulate:
    """Runs the command on a file that says `values`."""

    def run(values: Any, *args: str | Path, arrivals: str = "closed:1") -> Answer:
        file = tmp_path / "plan.json"
        file.write_text(values if isinstance(values, str) else json.dumps(values))
        capsys.readouterr()
        code = cli.main(["simulate", str(file), "--arrivals", arrivals, *map(str, args)])
        return code, *capsys.readouterr()

    return run


def said(answer: Answer) -> dict[str, Any]:
    assert answer[0] == 0, answer
    result: dict[str, Any] = json.loads(answer[1])
    return result


@pytest.mark.parametrize("predicted", [TEXT, IMAGES, of_text()])
def test_a_prediction_to_json_and_back(predicted: Prediction) -> None:
    assert Prediction.from_json(json.loads(json.dumps(predicted.to_json()))) == predicted


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (("latency_s", -1), "predicted.latency_s: -1; expected a number"),
        (("latency_s", float("nan")), "predicted.latency_s: nan"),
        (("enter_s", True), "predicted.enter_s: True"),
        (("enter_s", 10**400), "predicted.enter_s: a number of more than 20 digits"),
        (("in_flight", 0), "predicted.in_flight: 0; expected a whole number from 1"),
        (("prompt", 0), "predicted.prompt: 0; expected a whole number from 1"),
        (("microbatches", 1.5), "predicted.microbatches: 1.5"),
        (("prompt", None), "predicted: ttft_s and prompt are for language models"),
        (("stages", []), "predicted: stages is empty"),
        (("stages", ...), "predicted: stages is missing"),
        (("speed", 1), "predicted: unknown field 'speed'"),
        (("stages", 1, "devices", []), "predicted.stages[1]: devices is empty"),
        (("stages", 1, "devices", [3]), "predicted.stages[1].devices[0]: 3"),
        (("stages", 0, "busy_s", "1"), "predicted.stages[0].busy_s: '1'"),
        (("stages", 0, "rows_s", ...), "predicted.stages[0]: rows_s is missing"),
        (("stages", 0, "rows_s", [[2, 1.0], [1, 1.0]]), "a curve at rows [2, 1]"),
        (("stages", 0, "memory_bytes", []), "predicted.stages[0].memory_bytes: a list"),
        (("stages", 0, "memory_bytes", {"b": -1}), "predicted.stages[0].memory_bytes: -1"),
    ],
)
def test_what_is_no_prediction(path: tuple[Any, ...], message: str) -> None:
    with pytest.raises(PlanError) as error:
        Prediction.from_json(edited(TEXT.to_json(), *path))
    assert str(error.value).startswith(message)


@given(
    st.sampled_from([(key,) for key in TEXT.to_json()] + [("stages", 0, key) for key in TEXT.to_json()["stages"][0]]),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
        max_leaves=5,
    ),
)
def test_any_value_anywhere_is_taken_or_refused(path: tuple[Any, ...], value: Any) -> None:
    with suppress(PlanError):
        Prediction.from_json(edited(TEXT.to_json(), *path, value))


def test_a_plan_for_a_language_model(simulate: Simulate) -> None:
    result = said(simulate(planned(), "--gen-tokens", 20, "--requests", 5, "--json"))
    assert (result["kind"], result["point"], result["completed"], result["failed"]) == ("llm", None, 5, 0)
    assert result["tpot_s"]["p50"] == pytest.approx(TEXT.latency_s)
    assert list(result["devices"]) == ["desk", "pi", "laptop"]
    assert [(link["from"], link["to"]) for link in result["links"]] == [("desk", "pi"), ("pi", "desk")]
    assert [stage["devices"] for stage in result["stages"]] == [["desk"], ["pi", "laptop"]]
    code, out, error = simulate(planned(), "--gen-tokens", 20, "--requests", 5, arrivals="poisson:0.5")
    assert (code, error) == (0, "")
    for words in ("5 requests, 0.5 a second at random: 5 completed", "first token", "each further token"):
        assert words in out
    for words in ("desk", "pi + laptop", "desk to pi", "tokens/s", "at its limit: nothing"):
        assert words in out


def test_a_point_of_a_front(simulate: Simulate) -> None:
    assert said(simulate(explored(), "--json"))["point"] == "p3"
    without = edited(explored(), "points", 2, "knee", False)
    assert said(simulate(without, "--json"))["point"] == "p2"
    result = said(simulate(explored(), "--point", "p1", "--json", arrivals="closed:8"))
    assert (result["point"], result["kind"], result["requests"]) == ("p1", "onnx", 200)
    assert result["throughput_per_s"] == pytest.approx(IMAGES.throughput_per_s, rel=0.02)
    assert (result["ttft_s"], result["tpot_s"]) == (None, None)
    code, out, _ = simulate(explored(), "--point", "knee")
    assert code == 0
    assert "one input" in out
    assert "inputs/s" in out


def test_a_device_that_leaves_is_told(simulate: Simulate) -> None:
    options = ("--leave", "pi@2.5", "--slow", "c:3@0-1", "--jitter", "20", "--requests", "50")
    code, out, _ = simulate(planned(), *options, arrivals="closed:2")
    assert code == 0
    assert "pi left at 2.5 s, which ends the deployment; failed requests: 2 in flight or waiting, " in out
    result = said(simulate(planned(), *options, "--json", arrivals="closed:2"))
    assert (result["failed_in_flight"], result["left"], result["stalled_s"]) == (2, "pi", 2.5)
    assert result == said(simulate(planned(), *options, "--json", "--seed", 0, arrivals="closed:2"))
    assert result != said(simulate(planned(), *options, "--json", "--seed", 1, arrivals="closed:2"))


def test_arrivals_above_what_can_be_done_are_told(simulate: Simulate) -> None:
    code, out, _ = simulate(explored(), "--point", "p2", arrivals="poisson:20")
    assert code == 0
    assert "arrivals of 20.0/s are above what the plan can do, 10.0/s: the queue grows" in out


def test_a_trace(simulate: Simulate, tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text("arrival_s,prompt_tokens,gen_tokens\n0,8,2\n1.5,64,1\n")
    result = said(simulate(planned(), "--json", arrivals=f"trace:{file}"))
    assert (result["requests"], result["arrivals"]) == (2, "2 of a trace")
    assert_refused(simulate(explored(), arrivals=f"trace:{file}"), 3, "trace.csv", "tokens are for language models")
    file.write_text("0\n2\n1\n")
    assert_refused(simulate(planned(), arrivals=f"trace:{file}"), 3, "trace.csv", "line 3", "before 2 s")
    file.write_bytes(b"\xff\xfe")
    assert_refused(simulate(planned(), arrivals=f"trace:{file}"), 3, "trace.csv", "utf-8")
    assert_refused(simulate(planned(), arrivals=f"trace:{tmp_path}/none"), 3, "none", "No such file")


def test_every_file_with_a_plan_is_taken(simulate: Simulate) -> None:
    """A plan, a saved one, and what a simulation printed give the same; a front that of its knee."""
    first = said(simulate(planned(), "--json"))
    total = ("requests", "latency_s", "throughput_per_s")
    assert {name: said(simulate(saved(), "--json"))[name] for name in total} == {name: first[name] for name in total}
    again = said(simulate(first, "--json"))
    assert {name: again[name] for name in total} == {name: first[name] for name in total}
    front = explored()
    for point in front["points"]:
        point["plan"] = {"format": "edge-onnx-plan-1", "of": point["id"]}
    known = said(simulate(front, "--json"))
    assert (known["format"], known["point"], known["planned"]["plan"]["of"]) == ("edge-simulated-1", "p3", "p3")
    for file, plan in (
        (front, front["points"][2]["plan"]),
        (known, front["points"][2]["plan"]),
        ({**planned(), "plan": {"of": 1}}, {"of": 1}),
        (saved(), {name: value for name, value in saved().items() if name not in ("predicted", "devices")}),
        ({"anything": "else"}, {"anything": "else"}),
        ([], []),
        ({"format": "edge-pareto-1", "points": []}, None),
    ):
        assert plan_in(file) == plan
    front["points"][2]["knee"] = False
    assert plan_in(front)["of"] == "p2"  # the first on the front


@pytest.mark.parametrize(
    ("values", "options", "words"),
    [
        ("{", (), ["plan.json cannot be simulated"]),
        ("[" * 100_000, (), ["plan.json cannot be simulated"]),
        ({"format": "edge-lab-1"}, (), ["it is not a plan", "edge plan, edge pareto or edge simulate"]),
        ({"format": "edge-plan-1"}, (), ["it has no predictions", "edge plan --save"]),
        (edited(saved(), "stages", 0, "layers", [0, 3]), (), ["was edited after it was predicted"]),
        (edited(saved(), "stages", 0, "shards", 5), (), ["was edited after it was predicted"]),
        (edited(saved(), "stages", 0, "shards", 0, "device", "x:1"), (), ["was edited"]),
        (edited(saved(), "stages", 0, ...), (), ["was edited"]),
        (edited(saved(), "stages", 0, 3), (), ["was edited"]),
        (saved(), ("--point", "p1"), ["--point is for files of edge pareto"]),
        (edited(planned(), "predicted", ...), (), ["predicted", "None"]),
        (edited(planned(), "predicted", "stages", 0, "busy_s", None), (), ["predicted.stages[0].busy_s"]),
        (edited(planned(), "predicted", "stages", 0, "rows_s", [[1, 10**400]]), (), ["cannot be simulated"]),
        (edited(planned(), "devices", [3]), (), ["devices[0].address"]),
        (edited(explored(), "points", []), (), ["points is empty"]),
        (edited(explored(), "points", 0, "id", ...), (), ["points[0].id"]),
        (explored(), ("--point", "p9"), ["'p9'", "p1 to p3"]),
        (planned(), ("--point", "p1"), ["--point is for files of edge pareto"]),
        (planned(), ("--leave", "phone@1"), ["phone is not in the plan", "desk, pi, laptop"]),
        (planned(), ("--requests", "1000001"), ["1,000,000"]),
        (planned(IMAGES), ("--gen-tokens", "2"), ["--gen-tokens is for language models"]),
    ],
)
def test_what_cannot_be_simulated(simulate: Simulate, values: Any, options: tuple[str, ...], words: list[str]) -> None:
    assert_refused(simulate(values, *options), 2, *words)


@pytest.mark.parametrize(
    "options",
    [
        ("--arrivals", "poisson:0"),
        ("--arrivals", "poisson:inf"),
        ("--arrivals", "closed:0"),
        ("--arrivals", "closed"),
        ("--arrivals", "trace:"),
        ("--arrivals", "always"),
        ("--jitter", "-1"),
        ("--slow", "pi:2"),
        ("--slow", "pi:0@1"),
        ("--slow", "pi:2@5-3"),
        ("--slow", "pi:2@1.2.3"),
        ("--leave", "pi"),
        ("--seed", "-1"),
    ],
)
def test_options_that_cannot_be(options: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["simulate", "plan.json", "--arrivals", "closed:1", *options])
    assert ended.value.code == 2
    assert f"argument {options[0]}: needs " in capsys.readouterr().err


def test_goodput_under_both_targets(simulate: Simulate) -> None:
    """All of 20 requests, one after the other, or none, by each target. A line says what the JSON has."""
    answer = said(simulate(planned(), "--requests", 20, "--json"))
    assert answer["goodput"] is None
    ttft_ms, itl_ms = 1e3 * answer["ttft_s"]["p99"], 1e3 * answer["tpot_s"]["p99"]
    for ttft, itl, within in (
        (1.01 * ttft_ms, None, 1.0),
        (0.5 * ttft_ms, None, 0.0),
        (None, 1.01 * itl_ms, 1.0),
        (None, 0.5 * itl_ms, 0.0),
        (1.01 * ttft_ms, 0.5 * itl_ms, 0.0),
    ):
        targets = [f"{name}={ms}" for name, ms in (("--target-ttft", ttft), ("--target-itl", itl)) if ms is not None]
        goodput = said(simulate(planned(), "--requests", 20, *targets, "--json"))["goodput"]
        assert goodput["within"] == within
        assert (goodput["most_arrivals_per_s"] > 0) == bool(within)
        expected = {"ttft_s": None if ttft is None else ttft / 1e3, "itl_s": None if itl is None else itl / 1e3}
        assert goodput["targets"] == pytest.approx(expected)
    _, out, error = simulate(planned(), "--requests", 20, "--target-itl", 0.5 * itl_ms)
    line = "goodput: 0.0 % of the requests within the targets, 0 per second; 90 % are within them up to 0 arrivals a"
    assert f"{line} second" in " ".join((out + error).split())
    _, out, error = simulate(planned(), "--requests", 20, "--target-itl", 0.5 * itl_ms, "--slow", "pi:2@0")
    assert "90 % are within them at an unknown rate" in " ".join((out + error).split())


@pytest.mark.parametrize("bad", ["0", "-1", "nan", "inf", "soon"])
def test_targets_that_are_none(simulate: Simulate, bad: str) -> None:
    with pytest.raises(SystemExit):
        simulate(planned(), f"--target-itl={bad}")


def test_networks_have_no_targets_of_tokens(simulate: Simulate) -> None:
    answer = simulate(explored(), "--target-ttft", "100", arrivals="poisson:1")
    assert_refused(
        answer, 2, "--target-ttft and --target-itl are for language models, but this plan is of an ONNX model"
    )
