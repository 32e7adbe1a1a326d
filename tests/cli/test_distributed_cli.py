"""`edge chat` and `edge bench` on several devices: what each option does."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

import edge.net.channel
from apps import distributed, options
from edge.cluster.fleet import MAX_WORKERS
from edge.cluster.llm_ranks import DEFAULT_EXCHANGE
from edge.deployment.deployed import DeployedModel
from edge.deployment.kinds import RunningPlan
from edge.models.demo import MODEL_PATH
from edge.net.rendezvous import TRANSPORTS
from edge.parallel.prefiller import PrefillPlacement
from edge.planning.choose import PARALLEL
from partition.plan.arrange import make_plan
from partition.plan.plan import LOCAL, Plan
from partition.slices.gguf_slice import limits
from quant.gguf.file import GgufFile
from quant.wire import WIRES
from tests.support.commands import (  # noqa: F401 (fixtures)
    ASKED,
    CORES,
    Chat,
    Run,
    Two,
    ask,
    assert_refused,
    own_folder,
    run_command,
    shared_two,
    workers,
)
from tests.support.helpers import Terminal, chat_json

pytestmark = pytest.mark.usefixtures("measured_briefly")

QUICK = ("--threads", "1", "--prompt-tokens", "8", "--gen-tokens", "4", "--repeats", "1")


@pytest.fixture(scope="module")
def alone() -> list[int]:
    """The tokens of the answer on one device."""
    tokens: list[int] = chat_json(*ASKED[2:-1])["token_ids"]
    return tokens


def heads(said: dict[str, Any]) -> list[list[int]]:
    return [shard["heads"] for stage in said["plan"]["stages"] for shard in stage["shards"]]


def layers(said: dict[str, Any]) -> list[list[int]]:
    return [stage["layers"] for stage in said["plan"]["stages"]]


def moved(said: dict[str, Any], rank: int, direction: str) -> float:
    """Bytes that a rank has "sent" or "received" for a token."""
    figure: float = said["ranks"][rank]["decode"][f"{direction}_bytes"]["median"]
    return figure


@pytest.mark.parametrize("parallel", ["tensor", "pipeline"])
def test_the_answer_is_that_of_one_device(chat: Chat, two: Two, alone: list[int], parallel: str) -> None:
    spread = ("--workers", workers(*two), "--parallel", parallel, "--shares", "1,1,1")
    drafted = chat(*spread, "--draft", "ngram")
    assert drafted["token_ids"] == alone
    assert drafted["speculation"]["passes"] >= 1  # over stages also some that were cancelled
    assert drafted["speculation"]["accepted"] <= drafted["speculation"]["drafted"]
    said = chat(*spread, "--draft", "off")
    assert said["token_ids"] == alone
    assert [rank["device"] for rank in said["ranks"]] == ["local", two[0].address, two[1].address]
    assert [rank["rank"] for rank in said["ranks"]] == [0, 1, 2]
    assert said["ranks"][0]["link"] is None
    for rank in said["ranks"]:
        assert rank["decode"]["steps"] in (len(alone) - 1, len(alone))  # the last one may be the end of the turn
        for figure in ("compute_ms", "communication_ms", "stall_ms", "sent_bytes", "received_bytes"):
            for kind in ("decode", "prefill"):
                assert 0 <= rank[kind][figure]["median"] <= rank[kind][figure]["p99"]
    assert len(said["plan"]["stages"]) == {"tensor": 1, "pipeline": 3}[parallel]
    assert said["plan"]["stages"][0]["shards"][0]["threads"] == 1
    assert (said["transport"], said["wire"], said["allreduce"]) == ("auto", "f32", "auto")
    assert said["why"] == f"{parallel}, with shares as given"


def test_without_shares_the_planner_says_who_computes(
    run: Run, chat: Chat, two: Two, alone: list[int], own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which may be this device alone. What is remembered of the devices is changed, so that it is one, and another."""
    how = ("--workers", two[0].address)
    remembered = own / "state" / "edge" / "speeds.json"
    estimated = chat(*how)
    assert not remembered.exists()
    assert estimated["token_ids"] == alone
    assert re.match(r"(use one device|(tensor|pipeline) on 2 devices): [\d.]+ ms a token", estimated["why"])
    assert Plan.from_json(estimated["plan"]).world_size == len(estimated["ranks"])

    code, _, error = run("bench", *QUICK, *how)
    assert code == 0, error
    entries = json.loads(remembered.read_text())
    here, there = entries.values()  # this device is the first to be measured

    def take(here_s: float, there_s: float) -> None:
        for entry, seconds in ((here, here_s), (there, there_s)):
            for curve in ("step_s", "layer_s", "half_layer_s", "head_s"):  # half a layer takes as long as a whole one
                entry["value"][curve] = [[1, seconds]]
            entry["value"] |= {"token_s": 0, "busy": False}
        remembered.write_text(json.dumps(entries))

    take(1, 1e-2)  # much beside any link, also one that is measured on a busy machine
    several = chat(*how)
    assert several["token_ids"] == alone
    assert [rank["device"] for rank in several["ranks"]] == ["local", two[0].address]
    assert layers(several) == [[0, 0], [0, 8]]
    [link] = several["links"]
    assert (link["ranks"], link["kind"]) == ([0, 1], several["ranks"][1]["link"])
    assert re.fullmatch(r"tcp \d+ us for 8 KiB there and back", link["why"])
    assert re.fullmatch(
        r"all layers on \S+, tokens on this device: [\d.,]+ ms a token, 10,000 ms a token on this device alone",
        several["why"],
    )

    take(1e-2, 1)
    single = chat(*how)
    assert single["token_ids"] == alone
    assert single["why"].startswith("use one device: 100 ms a token on this device alone; with the others")
    assert [(rank["device"], rank["link"], rank["decode"]) for rank in single["ranks"]] == [("local", None, None)]
    assert single["plan"]["stages"][0]["layers"] == [0, 8]
    assert single["links"] == []
    code, out, error = run("bench", *QUICK, *how)
    assert code == 0, error
    assert f"plan: {single['why']}\n" in out

    provided = chat(*how, "--shares", "1,3")  # all are used, in the quicker of two ways
    assert provided["token_ids"] == alone
    predicted = (
        r"pipeline, shares as given: a token is predicted to take ([\d,]+) ms by tensor, ([\d,]+) ms by pipeline"
    )
    result = re.fullmatch(predicted, provided["why"])
    assert result, provided["why"]
    tensor_ms, pipeline_ms = (int(group.replace(",", "")) for group in result.groups())
    assert tensor_ms > pipeline_ms > 6000  # its 6 layers, and the head
    assert layers(provided) == [[0, 2], [2, 8]]


def test_shares_say_how_much_each_does(chat: Chat, two: Two) -> None:
    said = chat("--workers", workers(*two), "--parallel", "tensor", "--shares", "2,1,1")
    assert heads(said) == [[0, 4], [4, 6], [6, 8]]
    said = chat("--workers", two[0].address, "--parallel", "pipeline", "--shares", "1,3")
    (_, first), (_, last) = layers(said)
    assert (first, last) == (2, 8)


def test_a_first_share_of_0_leaves_this_device_without_layers(
    run: Run, chat: Chat, two: Two, alone: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    how = ("--workers", workers(*two), "--parallel", "pipeline", "--shares")
    said = chat(*how, "0,1,1", "--draft", "off")
    assert said["token_ids"] == alone
    own, first, last = layers(said)
    assert (own, first[0], last[1]) == ([0, 0], 0, 8)
    assert said["ranks"][0]["decode"]["compute_ms"]["median"] == 0 < said["ranks"][1]["decode"]["compute_ms"]["median"]
    for shares in ("1,0,1", "0,0,1"):
        with pytest.raises(SystemExit):
            run("chat", *ASKED, *how, shares)
        assert "needs a number above 0 for each device (or 0 for the first)" in capsys.readouterr().err


@pytest.mark.parametrize("option", [("--insecure",), ("--shares", "1,1")])
def test_workers_that_are_found_are_of_the_cluster(run: Run, option: tuple[str, ...]) -> None:
    words = f"{option[0]} needs workers named one by one"
    assert_refused(run("chat", *ASKED, "--workers", "auto", *option), 2, words, "leave one of them out")


def test_one_worker_can_be_two_ranks(chat: Chat, two: Two, alone: list[int]) -> None:
    said = chat("--workers", workers(two[0], two[0]), "--parallel", "pipeline", "--shares", "1,1,1")
    assert said["token_ids"] == alone


def test_wire_is_the_type_that_crosses(chat: Chat, two: Two) -> None:
    how = ("--workers", two[0].address, "--parallel", "tensor", "--shares", "1,1", "--wire")
    f32, f16, q8 = (moved(chat(*how, wire), 1, "sent") for wire in ("f32", "f16", "q8"))
    assert f16 == pytest.approx(f32 / 2, rel=0.1)
    assert q8 == pytest.approx(f32 / 4, rel=0.2)


@pytest.mark.parametrize("transport", ["tcp", "grpc"])
def test_transport_is_that_of_the_links(chat: Chat, two: Two, transport: str) -> None:
    said = chat("--workers", two[0].address, "--parallel", "tensor", "--shares", "1,1", "--transport", transport)
    assert [rank["link"] for rank in said["ranks"]] == [None, transport]
    assert said["transport"] == transport


def test_allreduce_is_the_algorithm(chat: Chat, two: Two) -> None:
    how = ("--workers", workers(*two), "--parallel", "tensor", "--shares", "1,1,1", "--allreduce")
    star, mesh, split = (chat(*how, algorithm) for algorithm in ("star", "mesh", "split"))
    assert [said["allreduce"] for said in (star, mesh, split)] == ["star", "mesh", "split"]
    first = moved(star, 1, "sent")  # its part to rank 0, which sends the sum to both
    assert moved(star, 0, "received") == pytest.approx(2 * first, rel=0.1)
    assert moved(mesh, 1, "sent") == pytest.approx(2 * first, rel=0.1)  # its part to both
    assert moved(split, 0, "sent") == pytest.approx(4 / 3 * first, rel=0.1)  # thirds: of its part, and of the sum


def test_a_saved_plan_is_used_as_it_is_or_edited(chat: Chat, two: Two, tmp_path: Path, alone: list[int]) -> None:
    file = tmp_path / "plan.json"
    how = ("--parallel", "tensor", "--shares", "1,3")
    first = chat("--workers", two[0].address, *how, "--save-plan", file)
    saved = json.loads(file.read_text())
    assert saved == first["plan"]
    again = chat("--plan", file)
    assert (again["plan"], again["token_ids"]) == (saved, alone)
    assert str(file) in again["why"]
    for values, edge_at in zip(saved["stages"][0]["shards"], ([0, 6], [6, 8]), strict=True):
        values["heads"] = edge_at
    saved["model_digest"] = ""  # of any file of this shape
    file.write_text(json.dumps(saved))
    edited = chat("--plan", file, "--save-plan", tmp_path / "other")
    assert (heads(edited), edited["token_ids"]) == ([[0, 6], [6, 8]], alone)
    assert json.loads((tmp_path / "other").read_text()) == edited["plan"]


def test_a_plan_file_may_have_a_placement_for_prompts(
    run: Run, chat: Chat, two: Two, tmp_path: Path, alone: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its workers need not be among those that generate."""
    computed: list[int] = []
    begin = PrefillPlacement.begin

    def noted(placement: PrefillPlacement, tokens: list[int], *arguments: Any, **how: Any) -> Any:
        prompt = begin(placement, tokens, *arguments, **how)
        computed.append(len(tokens) if prompt else 0)
        return prompt

    monkeypatch.setattr(PrefillPlacement, "begin", noted)
    cut = limits(GgufFile.open(MODEL_PATH))
    single = make_plan(cut, "bundled", "", [LOCAL])
    plan = replace(single, prefill=make_plan(cut, "bundled", "", [LOCAL, two[1].address]), prefill_from=5)
    file, saved = tmp_path / "plan.json", tmp_path / "saved.json"
    file.write_text(json.dumps(plan.to_json()))
    said = chat("--plan", file, "--save-plan", saved)
    assert said["token_ids"] == alone
    assert computed[0] >= 5
    again = Plan.from_json(json.loads(saved.read_text()))
    assert again.prefill is not None
    assert (again.prefill.devices, again.prefill_from) == ((LOCAL, two[1].address), 5)
    computed.clear()
    code, out, error = run("bench", *QUICK, "--plan", file)
    assert code == 0, error
    assert computed == [8, 8]
    assert "prompts of 5 new tokens and more are computed on 2 devices" in out
    file.write_text(json.dumps({**plan.to_json(), "prefill_from": -1}))
    assert_refused(run("chat", *ASKED, "--plan", file), 2, "prefill_from: -1")


def test_insecure_allows_another_machine_in_the_clear(run: Run, two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edge.net.channel, "is_loopback", lambda _: False)  # take this machine for another
    how = ("chat", *ASKED, "--workers", two[0].address, "--parallel", "pipeline", "--shares", "1,1")
    assert_refused(run(*how), 7, "is another machine", "no credentials")
    code, _, error = run(*how, "--insecure")
    assert code == 0, error


def test_constants_named_for_a_quick_help_are_those_of_the_engine() -> None:
    assert distributed.PARALLEL == PARALLEL
    assert options.TRANSPORTS == TRANSPORTS
    assert tuple(WIRES) == options.WIRES
    assert options.MOST_WORKERS == MAX_WORKERS


def test_the_bundled_model_is_what_is_spread_by_default(chat: Chat, two: Two) -> None:
    how = ("--workers", two[0].address, "--parallel", "pipeline", "--shares", "1,1")
    assert chat(*how)["plan"] == chat(MODEL_PATH, *how)["plan"]


# --- edge bench ---


def test_bench_prints_a_table_of_ranks(run: Run, two: Two) -> None:
    how = ("--workers", two[0].address, "--parallel", "tensor", "--shares", "1,1")
    code, out, error = run("bench", *QUICK, *how)
    assert code == 0, error
    lines = out.splitlines()
    assert lines[0] == "| model | size | threads | test | tokens/s | median |"
    assert lines[5].startswith("| rank | device | kind | steps |")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[7:11]]
    assert [row[:4] for row in rows] == [
        ["0", "this device", "decode", "4"],  # without the warm-up
        ["0", "this device", "prefill", "1"],
        ["1", "one", "decode", "4"],
        ["1", "one", "prefill", "1"],
    ]
    assert "this device heads 0-3, ff 0-383; one heads 4-7, ff 384-767 (tensor, with shares as given)" in out
    assert re.search(
        r"\ndecode: [\d.]+ ms a token \(median\); rank [01] \((this device|one)\) computes the longest", out
    )


def test_a_line_says_who_holds_what_or_that_one_device_does() -> None:
    can = limits(GgufFile.open(MODEL_PATH))

    def line(*names: str, **how: Any) -> str:
        plan = make_plan(can, "m", "", [LOCAL, *names[1:]], **how)
        running = RunningPlan(None, plan, "why", names)
        return DeployedModel(None, running, DEFAULT_EXCHANGE, lambda: None).line()  # type: ignore[arg-type]

    assert line("this device") == "why"
    assert line("here", "pi", parallel="pipeline") == "here layers 0-3; pi layers 4-7 (why)"
    assert line("here", "pi", "tv", stages_of=(2, 1)) == (
        "here layers 0-5, heads 0-3, ff 0-383; pi layers 0-5, heads 4-7, ff 384-767; tv layers 6-7 (why)"
    )


def test_bench_json_has_the_ranks(run: Run, two: Two) -> None:
    how = ("--workers", two[0].address, "--parallel", "pipeline", "--shares", "1,1")
    code, out, error = run("bench", *QUICK, *how, "--json")
    assert code == 0, error
    said = json.loads(out)
    assert said["bandwidth_gbps"] is said["memory_bandwidth_gbps"] is None
    assert said["decode_tokens_per_s"] > 0
    assert [rank["decode"]["steps"] for rank in said["ranks"]] == [4, 4]
    assert layers(said) == [[0, 4], [4, 8]]


def test_bench_shows_steps_of_one_request(run: Run, two: Two) -> None:
    how = ("--workers", two[0].address, "--parallel", "pipeline", "--shares", "1,1")
    code, out, error = run("bench", *QUICK, "--prompt-tokens", "16", "--requests", "2", *how, "--json")
    assert code == 0, error
    said = json.loads(out)
    assert said["throughput_tokens_per_s"] > 0
    for kind, steps in (("decode", 4), ("prefill", 1)):
        assert [rank[kind]["steps"] for rank in said["ranks"]] == [steps, steps]


# --- cores and the GPU ---


@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores to choose from")
def test_affinity_keeps_engines_to_cores(two: Two, tmp_path: Path) -> None:
    how = ("--workers", workers(*two), "--parallel", "tensor", "--shares", "1,1,1")
    terminal = Terminal(*how, "--affinity", str(CORES[1]), state=tmp_path)
    try:
        terminal.ready()
        assert psutil.Process(terminal.process.pid).cpu_affinity() == [CORES[1]]
        (free,), (saved,) = (item.children() for item in two)
        assert free.cpu_affinity() == CORES
        assert saved.cpu_affinity() == [CORES[0]]
    finally:
        terminal.close()


@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores to choose from")
def test_a_plan_takes_no_core_that_is_not_lent(run: Run, chat: Chat, two: Two, tmp_path: Path) -> None:
    file = tmp_path / "plan"
    how = ("--workers", two[1].address, "--parallel", "pipeline", "--shares", "1,1")
    plan = chat(*how, "--save-plan", file)["plan"]
    shard = plan["stages"][1]["shards"][0]
    for core, refused in ((CORES[1], True), (CORES[0], False)):
        shard["affinity"] = [core]
        file.write_text(json.dumps(plan))
        answer = run("chat", *ASKED, "--plan", file)
        if refused:
            assert_refused(answer, 7, f"core {core} is not available here; choose from {CORES[0]}", "two")
        else:
            assert answer[0] == 0, answer[2]
