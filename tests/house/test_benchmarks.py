"""Every benchmark runs, on tiny sizes, and with EDGE_THOROUGH=1 all of its sections.

`make smoke` runs this file; the suite leaves it out, because it takes a minute.
"""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from partition.predict.hysteresis import PLAN
from tests.support import ROOT
from tests.support.browser import NAMES
from tests.support.thorough import THOROUGH

pytestmark = pytest.mark.smoke
HANG_S = 300
HAS_PAGES = shutil.which("node") is not None and any(map(shutil.which, NAMES))
# The sections of each. Where they take long together, the first runs alone: it uses most of what the others do.
SECTIONS = {
    "bench_advise": ("here", "lab"),
    "bench_browser": ("speed", "predicted", "same", "closed") if HAS_PAGES else (),
    "bench_busy_plans": ("made-up", "load"),
    "bench_distributed": ("speed", "pipeline", "load"),
    "bench_drafts": ("resident", "far", "paged"),
    "bench_elastic": ("change", "follow", "chat"),
    "bench_engine": ("loop", "prompts"),
    "bench_first_plans": ("computed", "run"),
    "bench_gpu": (),  # needs a llama.cpp that was built for a GPU
    "bench_lora": (),
    "bench_mtp": ("one", "tensor", "stages", "paged"),
    "bench_networks": (),
    "bench_new_user": (),
    "bench_paging": ("limit", "mmap", "keeps-up", "experts", "path", "predicted"),
    "bench_phases": ("strong", "equal"),
    "bench_pictures": (),
    "bench_planner": (),
    "bench_plans": (),
    "bench_prefixes": ("reading", "restart", "hybrid"),
    "bench_quantize": ("fit", "memory"),
    "bench_replicas": ("throughput", "kills", "fair", "lab"),
    "bench_sameness": (),
    "bench_serve": ("throughput", "stall", "targets", "prefix", "survive", "soak"),
    "bench_slices": (),
    "bench_sleeping": (),
    "bench_speculate": (),
    "bench_startup": (),
    "bench_survive": ("pause", "stress"),
    "bench_tpi": ("lab", "ranks"),
    "bench_transport": ("matrix", "roundtrip"),
    "bench_warming": ("home", "agent", "foreground"),
    "bench_wheels": (),
}


def run(name: str, *how: str) -> dict[str, Any]:
    """Return what a benchmark prints, started in one of the two ways that people have."""
    sections = SECTIONS[name] if THOROUGH else SECTIONS[name][:1]
    only = [] if THOROUGH or not sections else ["--only", *sections]
    command = [sys.executable, *(how or ("-m", f"benchmarks.{name}")), "--tiny", *only, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    assert set(sections) <= result.keys()
    return result


def test_every_benchmark_is_run_here_and_listed() -> None:
    assert {path.stem for path in (ROOT / "benchmarks").glob("bench_*.py")} == set(SECTIONS)
    listed = subprocess.run(
        [sys.executable, "-m", "benchmarks"], capture_output=True, text=True, cwd=ROOT, check=True, timeout=HANG_S
    )
    assert [line.split()[0] for line in listed.stdout.splitlines()] == sorted(SECTIONS)
    assert set(re.findall(r'run\("(bench_\w+)"', Path(__file__).read_text())) == set(SECTIONS)


def test_figures_are_shown_as_tables_and_written_to_a_file(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/bench_planner.py", "--tiny", "--json", str(tmp_path / "figures.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, cwd=ROOT, check=True)
    result = json.loads((tmp_path / "figures.json").read_text())
    assert f"| graph of 24 blocks, 2 devices | {result['rows'][3]['groups']} |" in done.stdout
    assert result["machine"] in done.stdout
    assert "; the host took " in done.stdout


def test_advise() -> None:
    (row,) = run("bench_advise")["here"]["models"]
    assert all(row[which][name] > 0 for which in ("predicted", "measured") for name in ("tokens_per_s", "ttft_s"))


def test_browser() -> None:
    result = run("bench_browser")
    if not HAS_PAGES:
        assert all("not installed" in why for why in result["left_out"].values())
        return
    kinds, keys = {"native", "chromium", "node"}, {"token_s", "prefill_tokens_per_s"}
    assert set(result["speed"]["median"]) == {f"{kind}, {n}" for kind in kinds for n in (1, 2)}
    assert all(set(gains) == keys and min(gains.values()) > 0 for gains in result["speed"]["gains"].values())
    if not THOROUGH:
        return
    for name in ("measured", "estimated", "surveyed"):
        figures = result["predicted"][name]
        assert set(figures) == keys | {"memory_bytes"}
        assert min(figures.values()) > 0
    assert 0 <= result["same"]["deviation"] < 0.2
    for row in result["closed"]["by_way"].values():
        assert row["closings"] == row["same_answers"] == row["with_a_line"] == row["nothing_sent"] == 1


def test_busy_plans() -> None:
    result = run("bench_busy_plans")
    choices = result["made-up"]
    assert choices["surveys"] == 20
    assert choices["edge"]["wrong"] == 0
    assert choices["margin"]["faster"] >= choices["edge"]["faster"] > 0
    if THOROUGH:
        assert all(row["auto_ms"] > 0 and row["alone_ms"] > 0 for row in result["load"]["rows"])


def test_networks() -> None:
    best = run("bench_networks")["best"]
    assert set(best) == {"loop", "http", "grpc"}
    assert all(row["throughput_per_s"] > 0 and row["latency_s"] > 0 for row in best.values())


def test_survive() -> None:
    result = run("bench_survive")
    row = result["pause"]
    assert 0 < row["noticed_s"]["best"] <= row["next_token_s"]["best"]
    if THOROUGH:
        assert (result["stress"]["answers"], result["stress"]["wrong"]) == (4, [])


def test_distributed() -> None:
    result = run("bench_distributed")
    assert set(result["speed"]["median"]) == {"two threads", "one thread", "tcp", "grpc"}
    assert all(len(ranks) == 2 for ranks in result["speed"]["ranks"].values())
    assert all(row["least"] <= row["ratio"] <= row["most"] for row in result["speed"]["compared"])
    if not THOROUGH:
        return
    if "unequal" in result:
        # How many periods were used up depends on who else wants the cores.
        assert [case["device"] for case in result["unequal"]["cases"]] == ["half a core", "a third of a core"]
        assert all(set(case["median"]) >= {"alone", "measured", "equal"} for case in result["unequal"]["cases"])
    else:  # CPU groups are for root, where there are any
        assert result["left_out"]["unequal"]
    assert all(item["tokens_per_s"] > 0 for item in result["pipeline"]["median"].values())
    assert 0 < result["load"]["median_s"]["deploy"] < result["load"]["median_s"]["in all"]
    assert all(row["least"] <= row["ratio"] <= row["most"] for row in result["pipeline"]["compared"])


def test_drafts() -> None:
    result = run("bench_drafts")
    for section in ("resident", "far", "paged") if THOROUGH else ("resident",):
        rows = result[section]["rows"]
        assert {(row["draft"], row["text"]) for row in rows} == {
            (draft, text) for draft in ("ngram", "self") for text in ("code", "quotes", "story")
        }
        assert all(0 < row["least"] <= row["ratio"] <= row["most"] for row in rows)


def test_mtp() -> None:
    result = run("bench_mtp")
    for section in SECTIONS["bench_mtp"] if THOROUGH else ("one",):
        rows = result[section]["rows"]
        assert [row["right"] for row in rows] == [0.0, 0.5, 0.75, 0.9]
        assert all(row["others"] == 0 and row["predicted_ratio"] >= 1 for row in rows)
        assert result[section]["draft_ms"] > 0


def test_phases() -> None:
    result = run("bench_phases")
    for section in ("strong", "equal") if THOROUGH else ("strong",):
        plans = result[section]["plans"]
        assert set(plans) == {"one", "phases", "pipeline"}
        assert all(plan["ttft_s"] > 0 and plan["predicted_ttft_s"] > 0 for plan in plans.values())


def test_pictures() -> None:
    result = run("bench_pictures")
    assert sum(result["layers"]) == 8
    assert all(figure["predicted"] > 0 and figure["measured"] > 0 for figure in result["seconds"].values())


def test_warming() -> None:
    result = run("bench_warming")
    for section in ("home", "agent") if THOROUGH else ("home",):
        turns = result[section]["turns"]
        assert len(turns) > 1
        assert all(turn["same"] for turn in turns)


def test_elastic() -> None:
    result = run("bench_elastic")
    assert {case["size"] for case in result["change"]["cases"]} == {"q8_0", "q4_0", "q2_k"}
    assert all(case["ratio"] > 0 for case in result["change"]["cases"])
    for case in result.get("follow", {}).get("cases", ()):
        assert not case["killed"]
        assert case["rss_bytes"][1] < case["rss_bytes"][0]
    for case in result.get("chat", {}).get("cases", ()):
        assert (case["exit"], case["kills"]) == (0, 0)
        assert case["rss_bytes"][1] < case["rss_bytes"][0]


def test_engine() -> None:
    result = run("bench_engine", "benchmarks/bench_engine.py")
    assert result["loop"]["decode_ratio"] > 0
    assert result["loop"]["prefill_ratio"] > 0
    if THOROUGH:
        assert [case["tokens"] for case in result["prompts"]["cases"]] == [16, 16, 64, 64]
        assert all(case["of_better_kernel"] > 0 for case in result["prompts"]["cases"])


def test_paging() -> None:
    result = run("bench_paging")
    [case] = result["limit"]["cases"]
    assert case["median"]["decode_s"] > 0
    assert case["streamed_bytes"] > 0
    assert not case["killed"]
    if "without_groups" not in result:  # memory groups are for root, where there are any
        assert 0 < case["group"]["max_usage_bytes"] <= case["limit_bytes"]
    if not THOROUGH:
        return
    [row] = result["mmap"]["cases"]
    assert row["least"] <= row["ratio"] <= row["most"]
    assert all(case["compared"]["ratio"] > 0 for case in result["keeps-up"]["cases"])
    assert [case["skew"] for case in result["experts"]["cases"]] == ["none", "mild", "strong"]
    assert all(case["resident"]["decode_s"] > 0 for case in result["experts"]["cases"])
    assert [case["beside"] for case in result["path"]["cases"]] == [
        "nothing", "1 in the cache", "1 copying memory", "a model on 1"
    ]  # fmt: skip
    assert all(case["gbps"] > 0 for case in result["path"]["cases"])


def test_planner() -> None:
    rows = run("bench_planner")["rows"]
    assert all(row["seconds"] > 0 and row["points"] for row in rows)
    assert all(row["exact"] for row in rows if "beam" not in row["case"])


def test_gpu() -> None:
    """Where llama.cpp finds no GPU, each section says so."""
    result = run("bench_gpu")
    left_out = result.get("left_out", {})
    assert {*left_out, *result} >= {"budget", "prompts", "experts", "stages"}
    assert all("finds no GPU" in why for why in left_out.values())


def test_lora() -> None:
    rows = run("bench_lora")["rows"]
    assert [row["side"] for row in rows] == ["one", "tensor", "stages"]
    assert all(min(row["none_ms"], row["adapter_ms"], row["changed_ms"]) > 0 for row in rows)


def test_prefixes() -> None:
    result = run("bench_prefixes")
    assert result["reading"]["state_bytes"] > 0
    assert all(rate > 0 for rate in result["reading"]["median"].values())
    if not THOROUGH:
        return
    [measured] = result["hybrid"]["measured"]
    assert [measured[f"{name}_computed"] for name in ("first", "second", "restarted")] == [88, 24, 24]
    for side, (measured,) in result["restart"]["measured"].items():
        assert measured["first_computed"] == 100, side
        assert measured["again_computed"] < 10, side
        assert measured["shared_computed"] < 40, side


def test_quantize() -> None:
    result = run("bench_quantize")
    fitted = result["fit"]["models"]["as it is"]
    [row] = fitted["rows"]
    by_name = {(item["type"], item["how"]): item for item in fitted["types"]}
    assert row["size_bytes"] <= by_name[row["size_of"], "with"]["size_bytes"]
    if not THOROUGH:
        return
    for row in result["memory"]["rows"]:
        assert row["seconds"] > 0
        if "without_group" not in row:  # memory groups are for root, where there are any
            assert 0 < row["group"]["anonymous_bytes"] <= row["group"]["max_usage_bytes"] <= 2 << 30


def test_sameness() -> None:
    [figures] = [part for part in run("bench_sameness").values() if isinstance(part, dict)]
    routes = {route["route"]: route["one_device"]["mean_divergence"] for route in figures["routes"]}
    assert routes["3 stages"] == 0  # the same bits
    assert 0 <= routes["2 ranks"] < 0.01  # sums of two equal halves often have the same bits
    assert 0 < routes["2 ranks, 3 to 1"] < 0.01


def test_replicas() -> None:
    result = run("bench_replicas")
    assert set(result["throughput"]["median"]) == {"one device", "the worker", "stages", "replicas"}
    assert result["throughput"]["of_sum"] > 0
    if THOROUGH:
        assert (result["kills"]["kills"], result["kills"]["lost"]) == (2, 0)
        assert result["fair"]["alone"]["p50_s"] > 0


def test_serve() -> None:
    result = run("bench_serve")
    assert "llama-server" in result["throughput"]["left_out"]
    assert [case["streams"] for case in result["throughput"]["cases"]] == [1, 2]
    for case in result["throughput"]["cases"]:
        assert set(case["median"]) >= {"edge serve", "llama.cpp's batched decode"}
        for side, median in case["median"].items():
            assert 0 < median["tokens_per_s"] <= case["best"][side]["tokens_per_s"]
    if not THOROUGH:
        return
    assert result["stall"]["median"]["edge serve"]["gap_s"] > 0
    for median in result["targets"]["median"].values():
        assert 0 <= median["within"] <= 1
        assert 0 < median["gap_p50_s"] <= median["gap_p99_s"]
    again = result["prefix"]["median"]["edge serve"]
    assert again["first_cached"] < 50 < again["second_cached"]
    survived = result["survive"]
    assert survived["kills"] > 0
    assert (survived["disturbed"]["lost"], survived["disturbed"]["wrong"]) == (0, 0)
    assert (result["soak"]["wrong_are"], result["soak"]["wrong"]) == ([], 0)


def test_speculate() -> None:
    [case] = run("bench_speculate")["cases"]
    assert list(case["pass_ms"]) == list(case["busy_ms"]) == ["1", "2", "4", "8", "16"]
    assert {row["right"] for row in case["rows"]} == {0.0, 0.75}
    assert all(0 < row["least"] <= row["ratio"] <= row["most"] for row in case["rows"])
    assert all(row["predicted_ratio"] >= 1 for row in case["rows"])
    assert case["shapes"]
    assert all(min(shape["ratio"], shape["predicted_ratio"]) > 0 for shape in case["shapes"])


def test_startup() -> None:
    result = run("bench_startup")
    assert 0 < result["python_s"] < result["first_token_s"]


def test_new_user() -> None:
    [measured] = run("bench_new_user")["runs"]
    assert set(measured["seconds"]) == {"token", "lab", "lab_token", "distributed", "picture"}
    assert all(seconds > 0 for seconds in measured["seconds"].values())


def test_transport() -> None:
    result = run("bench_transport")
    links = [part["link"] for part in result["matrix"]["parts"] if part["what"] == "allreduce"]
    assert links == ["tcp", "tls", "grpc", "shaped", "memory"]
    if not THOROUGH:
        return
    assert all(seconds > 0 for seconds in result["roundtrip"]["median_s"].values())


def test_slices() -> None:
    result = run("bench_slices")["wires"]["loopback"]
    assert all(rate > 0 for rate in result["bytes_per_s"].values())
    assert result["second_load_bytes"] == 0
    assert 0 < result["sent_after_cut_bytes"] <= 8_000_000  # of so little all may have been on its way at the cut


def test_first_plans() -> None:
    result = run("bench_first_plans")
    rows = result["computed"]["settings"]
    assert len(rows) == 2
    for row in rows:
        # The planner prefers few devices, so other plans can be faster than its own by less than this share.
        assert all(ratio >= 1 / PLAN for ratio in row["ratios"].values())
        assert row["ratios"]["measured"] <= 1.05
    if not THOROUGH:
        return
    (row,) = result["run"]["settings"]
    assert all(seconds > 0 for seconds in row["measured_s"].values())


def test_sleeping() -> None:
    result = run("bench_sleeping")
    (setting,) = result["settings"]
    (plan,) = setting["plans"]
    assert plan["measured"]["latency_s"] > 0
    assert plan["measured"]["throughput_per_s"] > 0
    assert plan["key"] in setting["best"].values()
    assert plan["requests"]["ttft_s"]["measured"]["p50"] > 0
    assert plan["requests"]["tpot_s"]["simulated"]["p90"] > 0
    assert result["summary"]["plans"] == 1


def test_tpi() -> None:
    result = run("bench_tpi")
    (row,) = result["lab"]["labs"]
    assert all(row[which][name] > 0 for which in ("predicted", "measured") for name in ("ttft_s", "latency_s"))
    if THOROUGH:
        assert set(result["ranks"]["sides"]) == {"one device", "two ranks"}
        assert all(item["token_s"] > 0 for rounds in result["ranks"]["sides"].values() for item in rounds)
        assert result["left_out"]["libraries"]


def test_plans() -> None:
    result = run("bench_plans")
    (setting,) = result["settings"]
    assert any(plan["chosen"] for plan in setting["plans"])
    for plan in setting["plans"]:
        assert plan["predicted"]["latency_s"] > 0
        assert all(item["throughput_per_s"] > 0 for item in plan["measured"])
    assert set(result["summary"]["errors"]) == {"latency_s", "throughput_per_s", "ttft_s"}
    assert result["summary"]["chosen_over_best_measured"]["worst"] >= 1


def test_wheels() -> None:
    result = run("bench_wheels")
    assert [row["figure"] for row in result["compared"]] == ["prefill_tokens_per_s", "decode_tokens_per_s"]
    assert all(row["ratio"] > 0 for row in result["compared"])
