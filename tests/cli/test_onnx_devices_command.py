"""`edge run` and `edge bench` of ONNX models on two real workers: every option, what is printed, and bad input."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

import edge as api
from apps import distributed, options
from apps.options import worker_addresses
from edge.models.demo import MODEL_PATH
from edge.onnx.pipeline import MOST_WINDOW
from partition.plan.plan import LOCAL
from tests.support.commands import Answer, Run, Two, assert_refused, runs, two_workers
from tests.support.onnx_graphs import light
from tests.support.onnx_networks import mobilenet_v2, model_of
from tests.support.onnx_pipelines import whole
from transport.tcp_link import TcpLink

pytestmark = pytest.mark.usefixtures("measured_briefly")

CUTS = ("features.3", "features.9")
SMALL = 32  # sides of pictures
NARROWER = 4  # weights are copied, hashed and sent again and again


@pytest.fixture(scope="module", name="two")
def two_of_them(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Two]:
    with two_workers(tmp_path_factory.mktemp("w")) as both:
        yield both


@pytest.fixture(name="edge")
def in_this_process(
    two: Two, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Run]:
    for kind in ("CACHE", "CONFIG", "STATE"):
        monkeypatch.setenv(f"XDG_{kind}_HOME", str(tmp_path / kind))
    with runs(capsys, two) as run:
        yield run


@pytest.fixture(scope="module", name="net")
def network(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("net") / "net.onnx"
    onnx.save(mobilenet_v2("batch", SMALL, classes=100, narrower=NARROWER), str(path))
    return path


@pytest.fixture(scope="module", name="image")
def one_input(net: Path) -> Path:
    path = net.with_name("image.npz")
    np.savez(path, image=np.random.default_rng(0).standard_normal((2, 3, SMALL, SMALL)).astype(np.float32))
    return path


def said(answer: Answer) -> dict[str, Any]:
    """Return the object that `--json` printed."""
    code, out, error = answer
    assert code == 0, error
    result: dict[str, Any] = json.loads(out)
    return result


def run_json(edge: Run, net: Path, image: Path, *args: str | Path) -> dict[str, Any]:
    """Return the object that `edge run --json` prints."""
    return said(edge("run", net, "--input", image, "--repeats", "1", "--json", *args))


def both(two: Two) -> str:
    return f"{two[0].address},{two[1].address}"


def test_a_pipeline_gives_what_one_device_gives(edge: Run, two: Two, net: Path, image: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.npz"
    result = run_json(edge, net, image, "--workers", both(two), "--no-local", "--output", out)
    [expected] = whole(onnx.load(net), {"image": np.load(image)["image"]}).values()
    with np.load(out) as current:
        assert np.abs(current["logits"] - expected).max() < 1e-5 * np.abs(expected).max()
    first, second = result["stages"]
    assert (first["name"], second["name"]) == ("one", "two")
    assert (first["nodes"][0], first["nodes"][1], second["nodes"][1]) == (0, second["nodes"][0], 100)
    assert first["until"].startswith("features.")
    assert second["until"] is None
    assert first["payload_bytes"] > 0
    assert second["tensors"] == ["logits"]
    assert all(stage["memory_bytes"] > stage["weight_bytes"] > 0 for stage in result["stages"])
    assert all(stage["compute_ms_median"] > 0 for stage in result["stages"])
    assert result["latency_ms_median"] > sum(stage["compute_ms_median"] for stage in result["stages"]) / 2
    assert result["throughput_per_s"] > 0
    assert result["in_flight"] >= 3
    assert (result["why"], result["wire"], result["wire_errors"]) == (
        "equal parts of the work as this device does it",
        "f32",
        None,
    )
    assert (result["provider"], result["threads"]) == (None, None)
    assert [(s["provider"], s["fell_back_from"], s["threads"]) for s in result["stages"]] == [("cpu", [], 1)] * 2
    assert run_json(edge, net, image)["stages"] is None


def test_replicas_give_what_one_device_gives(edge: Run, two: Two, net: Path, image: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.npz"
    how = ("--workers", both(two), "--parallel", "replicas")
    result = run_json(edge, net, image, *how, "--output", out)
    [expected] = whole(onnx.load(net), {"image": np.load(image)["image"]}).values()
    with np.load(out) as current:
        assert np.abs(current["logits"] - expected).max() < 1e-5 * np.abs(expected).max()
    assert [row["name"] for row in result["stages"]] == ["this device", "one", "two"]
    assert {tuple(row["nodes"]) for row in result["stages"]} == {(0, 100)}
    assert len({row["weight_bytes"] for row in result["stages"]}) == 1
    assert result["throughput_per_s"] > 0
    assert result["why"] == "a copy of the network on each of 3 devices"
    code, text, _ = edge("run", net, "--input", image, "--repeats", "0", *how, "--no-local")
    assert code == 0
    assert "copy 1" in text
    refused = edge("run", net, "--input", image, *how, "--cut", ",".join(CUTS))
    assert_refused(refused, 2, "--cut is for stages, but --parallel replicas has none")


def test_what_is_named_twice_is_the_same() -> None:
    assert (options.MAX_IN_FLIGHT, distributed.LOCAL) == (MOST_WINDOW, LOCAL)


def test_this_device_takes_part_named_or_not() -> None:
    assert worker_addresses("local,a") == worker_addresses("a") == ("a:7070",)


def test_where_it_is_cut(edge: Run, two: Two, net: Path, image: Path) -> None:
    def cut(*args: str) -> str:
        result = run_json(edge, net, image, "--workers", both(two), "--no-local", *args, "--repeats", "0")
        assert result["latency_ms_median"] is None
        return str(result["stages"][0]["until"])

    assert cut("--cut", CUTS[0]) == CUTS[0]
    few, many = (int(cut("--shares", shares).split(".")[1]) for shares in ("1,9", "9,1"))
    assert few < many
    outcome = run_json(edge, net, image, "--workers", f"local,{both(two)}", "--cut", ",".join(CUTS), "--repeats", "0")
    assert [stage["device"] for stage in outcome["stages"]] == ["local", *both(two).split(",")]
    assert [stage["until"] for stage in outcome["stages"]] == [*CUTS, None]


def test_plans_are_saved_and_used(edge: Run, two: Two, net: Path, image: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    saved = run_json(edge, net, image, "--workers", both(two), "--no-local", "--cut", CUTS[1], "--save-plan", plan)
    values = json.loads(plan.read_text())
    assert values == saved["plan"]
    again = run_json(edge, net, image, "--plan", plan)
    assert again["plan"] == values
    assert again["why"] == f"as {plan} says"
    for change, words in (
        ({"n_nodes": 7}, "expected 7"),
        ({"model_digest": "0" * 64}, "the plan is for 000000000000"),
        ({"format": "edge-plan-1"}, "known is 'edge-onnx-plan-1'"),
        ({"stages": values["stages"][:1]}, "the parts end at"),
        ({"stages": [values["stages"][0] | {"until": "x.2"}, values["stages"][1]]}, "the plan says 'x.2'"),
    ):
        plan.write_text(json.dumps(values | change))
        assert_refused(edge("run", net, "--input", image, "--plan", plan), 2, words)
    plan.write_text("{")
    assert_refused(edge("run", net, "--input", image, "--plan", plan), 2, "cannot be used as a plan")
    assert_refused(edge("run", net, "--input", image, "--plan", tmp_path / "none.json"), 3, "none.json")


@pytest.mark.parametrize(("wire", "least", "most"), [("f16", 1e-6, 1e-2), ("q8", 1e-4, 0.2)])
def test_what_floats_become_on_the_way(
    edge: Run, two: Two, net: Path, image: Path, wire: str, least: float, most: float
) -> None:
    result = run_json(edge, net, image, "--workers", both(two), "--no-local", "--wire", wire, "--repeats", "0")
    assert result["wire"] == wire
    [error] = result["wire_errors"]
    assert error["name"] == "logits"
    assert least < error["relative_l2"] < most
    if wire == "q8":
        return
    code, text, _ = edge(
        "run",
        net,
        "--input",
        image,
        "--workers",
        both(two),
        "--no-local",
        "--wire",
        wire,
        "--cut",
        CUTS[0],
        "--repeats",
        "1",
    )
    assert code == 0
    assert f"{wire}: logits differs by" in text
    assert "one: 16 nodes up to features.3" in text
    assert "as --cut says" in text


def test_links_and_inputs_in_flight(
    edge: Run, two: Two, net: Path, image: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = []
    true = TcpLink.__init__

    def counted(self: TcpLink, sock: Any, peer: str, *rest: Any, **named: Any) -> None:
        kinds.append(peer)
        true(self, sock, peer, *rest, **named)

    monkeypatch.setattr(TcpLink, "__init__", counted)
    result = run_json(edge, net, image, "--workers", both(two), "--no-local", "--transport", "grpc", "--in-flight", "2")
    assert (result["transport"], result["in_flight"], kinds) == ("grpc", 2, [])
    assert [stage["link"] for stage in result["stages"]] == ["grpc", "grpc"]
    result = run_json(edge, net, image, "--workers", both(two), "--no-local", "--transport", "tcp")
    assert [stage["link"] for stage in result["stages"]] == ["tcp", "tcp"]
    assert kinds


def test_what_is_for_this_device(edge: Run, two: Two, net: Path, image: Path) -> None:
    local = ("run", net, "--input", image, "--workers", two[0].address, "--repeats", "0")
    assert_refused(edge(*local, "--provider", "abacus"), 5, "no provider 'abacus'")
    result = said(edge(*local, "--threads", "2", "--provider", "cpu", "--json"))
    assert [(stage["threads"], stage["link"]) for stage in result["stages"]] == [(2, None), (1, "tcp")]
    for option in ("--threads", "--provider"):
        answer = edge("run", net, "--input", image, "--workers", both(two), "--no-local", option, "1")
        assert_refused(answer, 2, f"{option} is for a stage on this device")


def test_a_plan_is_not_written_over_what_is_read(edge: Run, two: Two, net: Path, image: Path) -> None:
    for read in (net, image):
        before = read.read_bytes()
        answer = edge("run", net, "--input", image, "--workers", both(two), "--no-local", "--save-plan", read)
        assert_refused(answer, 2, "is read by this command and cannot be overwritten")
        assert read.read_bytes() == before
    plan = net.with_name("bad.json")
    answer = edge("run", net, "--input", image, "--workers", "127.0.0.1:1", "--save-plan", plan)
    assert_refused(answer, 7)
    assert not plan.exists()


def test_a_shape_may_cross(edge: Run, two: Two, tmp_path: Path) -> None:
    """Inputs of a stage may be no noise: the target of a Reshape, made in the stage before."""
    nodes = [
        helper.make_node("Shape", ["x"], ["s"]),
        helper.make_node("Concat", ["s", "one"], ["t"], axis=0),
        helper.make_node("Relu", ["x"], ["h"]),
        helper.make_node("Reshape", ["h", "t"], ["y"]),
    ]
    model = model_of(nodes, {"x": [3, 4]}, ["y"], {"one": np.array([1])})
    path = tmp_path / "reshape.onnx"
    onnx.save(onnx.shape_inference.infer_shapes(model), str(path))
    bench = ("bench", path, "--repeats", "1", "--cuts", "all", "--json")
    there = said(edge(*bench, "--workers", both(two), "--no-local"))
    assert len(there["cuts"]) == len(said(edge(*bench))["cuts"]) > 1


def test_every_cut_is_measured(edge: Run, two: Two, net: Path) -> None:
    args = ("bench", net, "--repeats", "1", "--json")
    here = said(edge(*args, "--threads", "1"))
    assert [cut["label"] for cut in here["cuts"]] == [f"features.{i}" for i in range(19)]
    assert here["cuts"][0]["payload_bytes"] == 32 // NARROWER * 16 * 16 * 4
    assert here["devices"] == ["local"]
    assert here["whole"]["throughput_per_s"] > 0
    assert all(cut["throughput_per_s"] is None and cut["transfer_ms"] == [] for cut in here["cuts"])
    two_of = ("--cuts", ",".join(CUTS), "--dim", "batch=3")
    there = said(edge(*args, *two_of, "--workers", both(two), "--no-local", "--wire", "f16", "--in-flight", "2"))
    assert [cut["label"] for cut in there["cuts"]] == list(CUTS)
    assert there["devices"] == both(two).split(",")
    for cut in there["cuts"]:
        assert min(cut["stage_ms"]) > 0
        assert len(cut["transfer_ms"]) == 3
        assert cut["in_flight"] == 2
        assert cut["throughput_per_s"] > 0
        assert cut["expected_throughput_per_s"] == pytest.approx(1e3 / max(*cut["stage_ms"], *cut["transfer_ms"]))
    assert there["cuts"][0]["payload_bytes"] == 3 * 24 // NARROWER * 8 * 8 * 4  # at F32, whatever the wire has
    assert said(edge(*args, "--cuts", CUTS[0], "--workers", two[0].address))["devices"] == ["local", two[0].address]
    code, text, _ = edge("bench", net, "--repeats", "1", "--cuts", CUTS[0], "--workers", both(two), "--no-local")
    assert code == 0
    assert re.search(r"Best for throughput: (--parallel replicas. The best cut is )?after features\.3\.", text)
    assert there["replicas"]["throughput_per_s"] > 0
    assert here["replicas"]["throughput_per_s"] is None
    assert "a whole copy on each device" in text


def test_which_cuts_are_measured_is_said_by_a_word(edge: Run, tmp_path: Path) -> None:
    nodes = [  # after the first Relu the second one is still to come, so a cut after it does as well
        helper.make_node("MatMul", ["x", "w"], ["a"]),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("Neg", ["b"], ["c"]),
        helper.make_node("MatMul", ["c", "w"], ["y"]),
    ]
    model = model_of(nodes, {"x": [1, 8]}, ["y"], {"w": np.eye(8, dtype=np.float32)})
    path = tmp_path / "chain.onnx"
    onnx.save(onnx.shape_inference.infer_shapes(model), str(path))
    bench = ("bench", path, "--repeats", "1", "--threads", "1", "--json")
    every, distinct = (said(edge(*bench, "--cuts", word))["cuts"] for word in ("all", "distinct"))
    assert len(every) == 3
    assert [cut["label"] for cut in distinct] == [every[-1]["label"]]


def test_a_network_that_cannot_be_cut_says_so_everywhere(edge: Run, two: Two, tmp_path: Path) -> None:
    path, provided = tmp_path / "one.onnx", tmp_path / "x.npz"
    onnx.save(
        onnx.shape_inference.infer_shapes(model_of([helper.make_node("Relu", ["x"], ["y"])], {"x": [4]}, ["y"])),
        str(path),
    )
    np.savez(provided, x=np.ones(4, np.float32))
    words = "the network can be cut in no place, so it runs on at most 1 device: it has 1 node"
    workers = ("--workers", both(two))
    for cut in ((), ("--cut", "here,there"), ("--shares", "1,1,1")):
        assert_refused(edge("run", path, "--input", provided, *workers, *cut), 2, words)
    assert_refused(edge("bench", path, "--workers", two[0].address), 2, words)
    assert_refused(edge("bench", path), 2, words)
    for command in ("plan", "pareto"):
        code, out, error = edge(command, path, *workers)
        assert code == 0, error
        assert words in out + error
    with api.Cluster([item.address for item in two]) as cluster:
        choice = api.plan(path, cluster, objective="throughput")
        assert words in choice.why
        with api.deploy_onnx(choice, cluster) as network:
            assert network.run({"x": np.ones(4, np.float32)})["y"].tolist() == [1.0] * 4


def test_inputs_say_what_made_up_ones_cannot(edge: Run, two: Two, tmp_path: Path) -> None:
    """Made-up input is no shape to reshape to, so no shape behind it is known."""
    nodes = [
        helper.make_node("Reshape", ["x", "shape"], ["a"]),
        helper.make_node("MatMul", ["a", "w"], ["b"]),
        helper.make_node("Relu", ["b"], ["y"]),
    ]
    model = model_of(nodes, {"x": ["n", 6]}, ["y"], {"w": np.ones((3, 5), np.float32)})
    model.graph.input.append(helper.make_tensor_value_info("shape", onnx.TensorProto.INT64, [2]))
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None))
    path, provided = tmp_path / "reshape.onnx", tmp_path / "given.npz"
    onnx.save(model, str(path))
    np.savez(provided, x=np.arange(12, dtype=np.float32).reshape(2, 6), shape=np.array([4, 3]))
    workers = ("--workers", both(two))
    bench = ("bench", path, "--repeats", "1", "--cuts", "all", "--json")
    assert_refused(edge(*bench), 2, "an input that it takes would tell more, as ONNX Runtime cannot run reshape.onnx")
    for devices in ((), ("--workers", two[0].address)):
        result = said(edge(*bench, "--input", provided, *devices))
        assert [cut["payload_bytes"] for cut in result["cuts"]] == [4 * 3 * 4, 4 * 5 * 4]
    probed = said(edge("devices", "probe", path, *workers, "--input", provided, "--json"))
    assert {len(device["speeds"]["segments_s"]) for device in probed["devices"]} <= {2, 3}
    planned = said(edge("plan", path, *workers, "--input", provided, "--json"))
    assert planned["kind"] == "onnx"
    assert_refused(edge("bench", path, "--input", provided, "--dim", "n=3"), 3, "takes the shape (3, 6), got (2, 6)")
    assert_refused(edge("plan", MODEL_PATH, "--input", provided), 2, "--input is for ONNX models")
    ran = said(edge("run", path, "--input", provided, *workers, "--repeats", "0", "--json"))
    assert [stage["nodes"] for stage in ran["stages"]] == [[0, 1], [1, 2], [2, 3]]


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (("--cut", "features.3"), 2, "--cut is for several devices"),
        (("--wire", "f16"), 2, "--wire is for several devices"),
        (("--in-flight", "3"), 2, "--in-flight is for several devices"),
        (("--workers", "TWO", "--cut", "features.99"), 2, "there is no cut after 'features.99'; near ones: features.9"),
        (("--workers", "TWO", "--cut", "features.9,features.3"), 2, "2 devices need 1 cuts, but --cut names 2"),
        (("--workers", "TWO,TWO", "--cut", "features.9,features.3,features.4"), 2, "range"),
        (("--workers", "TWO", "--shares", "1,2,3"), 2, "2 devices need 2 shares, but --shares has 3"),
        (("--workers", "TWO", "--shares", "1,2", "--cut", "features.3"), 2, "leave one of them out"),
        (("--workers", "TWO", "--plan", "x.json"), 2, "leave one of them out"),
        (("--workers", "127.0.0.1:1"), 7, "127.0.0.1:1"),
        (("--workers", "TWO", "--dim", "batch=5"), 3, "takes the shape (5, 3, 32, 32)"),
        (("--workers", "TWO", "--dim", "n=5"), 3, "a size is given for 'n', which no input has; open are batch"),
    ],
)
def test_what_cannot_be(
    edge: Run, two: Two, net: Path, image: Path, args: tuple[str, ...], code: int, words: str
) -> None:
    provided = [arg.replace("TWO", both(two)) for arg in args]
    assert_refused(edge("run", net, "--input", image, *provided, "--no-local"), code, words)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--workers", "local"), "`local` alone needs no --workers"),
        (("--workers", "a,local"), "`local` is this device and must be the first"),
        (("--workers", "a", "--in-flight", "65"), "64"),
        (("--workers", "a", "--cut", "x,,y"), "needs labels of cuts with commas between them"),
    ],
)
def test_options_that_are_none(
    edge: Run, net: Path, capsys: pytest.CaptureFixture[str], args: tuple[str, ...], words: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        edge("run", net, "--input", "x.npz", *args)
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("net", "--requests", "2"), "--requests is for language models"),
        (("net", "--memory", "1GiB"), "--memory is for language models"),
        (("net", "--wire", "f16"), "--wire is for several devices"),
        (("net", "--dim", "batch=1", "--dim", "batch=2"), "--dim names the same dimension twice"),
        (("net", "--workers", "a,b", "--no-local", "--threads", "2"), "--threads is for a stage on this device"),
        (("squeezenet", "--cuts", "blocks"), "has no cuts of the kind"),
        (("net", "--cuts", "nothing"), "there is no cut after 'nothing'"),
        (("net", "--workers", "a,b"), "a cut needs 2 devices, got 3"),
        (("net", "--no-local"), "--no-local is for several devices"),
        (("gguf", "--no-local"), "--no-local is for ONNX models"),
        (("gguf", "--cuts", "all"), "--cuts is for ONNX models"),
        (("gguf", "--in-flight", "2"), "--in-flight is for ONNX models"),
        (("gguf", "--input", "x.npz"), "--input is for ONNX models"),
    ],
)
def test_what_cannot_be_measured(edge: Run, net: Path, args: tuple[str, ...], words: str) -> None:
    model, *rest = args
    assert_refused(
        edge("bench", {"net": net, "gguf": MODEL_PATH, "squeezenet": light("squeezenet")}[model], *rest), 2, words
    )
