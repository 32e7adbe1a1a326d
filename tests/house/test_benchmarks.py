"""Every benchmark runs, on tiny sizes, and with EDGE_THOROUGH=1 all of its sections.

`make smoke` runs this file; the suite leaves it out, because it takes a minute.
"""

import importlib.util
import itertools
import json
import subprocess
import sys
from typing import Any

import pytest

from edge.demo import MODEL_PATH
from tests.support import ROOT
from tests.support.thorough import THOROUGH

pytestmark = pytest.mark.smoke
HANG_S = 300
TINY = {
    "bench_bursts.py": "--tiny",
    "bench_busy_plans.py": "--tiny",
    "bench_context_shift.py": "--tiny --threads 1",
    "bench_distributed.py": "--tiny",
    "bench_drafts.py": "--tiny",
    "bench_engine.py": f"--model {MODEL_PATH} --prompt-tokens 16 --gen-tokens 3 --rounds 1 --threads 1",
    "bench_onnx_cuts.py": "--tiny",
    "bench_paging.py": "--tiny",
    "bench_planner.py": "--tiny",
    "bench_plans.py": "--tiny --rounds 1",
    "bench_prefixes.py": "--tiny",
    "bench_quantize.py": "--tiny",
    "bench_sameness.py": "--tiny",
    "bench_serve.py": "--tiny",
    "bench_slices.py": "--megabytes 8 --rounds 1 --seconds 0.2 --wires loopback",
    "bench_speculate.py": "--tiny",
    "bench_startup.py": "--repeats 1",
    "bench_survive.py": "--tiny",
    "bench_transport.py": "--tiny",
}
# Of benchmarks whose sections take long together: one that uses most of what the others do.
SECTION = {
    "bench_bursts.py": "chat",
    "bench_distributed.py": "speed",
    "bench_drafts.py": "resident",
    "bench_onnx_cuts.py": "cuts",
    "bench_paging.py": "limit",
    "bench_prefixes.py": "memory",
    "bench_quantize.py": "types",
    "bench_serve.py": "throughput",
    "bench_speculate.py": "disk",
    "bench_survive.py": "pause",
    "bench_transport.py": "matrix",
}


def run(name: str, *sections: str) -> dict[str, Any]:
    """What a benchmark prints, which has these sections: SECTION alone, unless all are asked for."""
    only = [] if THOROUGH or name not in SECTION else ["--only", SECTION[name]]
    command = [sys.executable, str(ROOT / "benchmarks" / name), *TINY[name].split(), *only, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    assert set(only[1:] or sections) <= result.keys()
    return result


def test_every_benchmark_is_run_here() -> None:
    assert {path.name for path in (ROOT / "benchmarks").glob("bench_*.py")} == set(TINY)


def test_bursts() -> None:
    result = run("bench_bursts.py", "links", "chat")
    assert result["chat"]["ratio"] == pytest.approx(result["chat"]["bursts_ms"] / result["chat"]["quiet_ms"])
    if not THOROUGH:
        return
    rows, compared = (result["links"][key] for key in ("rows", "compared"))
    assert {row["side"] for row in rows} == {"as it is", "equal shares", "tcp, equal shares"}
    assert [row["links"] for row in rows if row["side"] == "tcp, equal shares"] == [["tcp"]]
    assert all(of["least"] <= of["ratio"] <= of["most"] and of["best_ratio"] > 0 for of in compared)


def test_context_shift() -> None:
    result = run("bench_context_shift.py", "speed", "perplexity", "steal_s")
    for name, row in result["speed"]["tokens"].items():
        assert 0 < row["best_ms"] <= row["median_ms"], name
    quality = result["perplexity"]
    assert quality["predictions"] > quality["drops"] >= 2
    assert all(1 < figure < 2048 for row in quality["rows"].values() for figure in row.values())
    assert quality["rows"]["shift"] != quality["rows"]["recompute"]


def test_survive() -> None:
    result = run("bench_survive.py", "stress", "pause")
    for name in ("without", "with a spare"):
        row = result["pause"][name]
        assert 0 < row["noticed_s"]["best"] <= row["next_token_s"]["best"], name
    if THOROUGH:
        assert (result["stress"]["answers"], result["stress"]["wrong"]) == (4, [])


def test_bursts_are_the_same_for_a_seed() -> None:
    spec = importlib.util.spec_from_file_location("bursts", ROOT / "benchmarks" / "bursts.py")
    assert spec is not None
    assert spec.loader is not None
    bursts = importlib.util.module_from_spec(spec)
    sys.modules["bursts"] = bursts  # where dataclasses look for it
    spec.loader.exec_module(bursts)
    neighbour = bursts.Neighbour(0.01, 0.5, 0.02, 0.3)
    first, again, other = (list(itertools.islice(neighbour.schedule(seed), 200)) for seed in (1, 1, 2))
    assert first == again != other
    assert all(0.02 <= rest_s <= 0.3 and 0.01 <= burst_s <= 0.5 for rest_s, burst_s in first)


def test_busy_plans() -> None:
    found = run("bench_busy_plans.py")
    assert found["plans_without_bursts"] > 0
    [rows] = found["worse_by"]
    assert rows[0] == 0  # the one plan that was measured is the best of those that were


def test_choices_of_made_up_figures() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "bench_busy_plans.py"), "--made-up", "20", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["surveys"] == 20
    assert found["edge"]["wrong"] == 0
    assert found["margin"]["faster"] >= found["edge"]["faster"] > 0


def test_distributed() -> None:
    result = run("bench_distributed.py", "speed", "pipeline", "load")
    assert set(result["speed"]["median"]) == {"two threads", "one thread", "tcp", "grpc"}
    assert all(len(ranks) == 2 for ranks in result["speed"]["ranks"].values())
    assert all(row["least"] <= row["ratio"] <= row["most"] for row in result["speed"]["compared"])
    if not THOROUGH:
        return
    if "unequal" in result:
        assert all(case["throttled_periods"] for case in result["unequal"]["cases"])
    else:  # CPU groups are for root, where there are any
        assert result["left_out"]["unequal"]
    assert all(one["tokens_per_s"] > 0 for one in result["pipeline"]["median"].values())
    assert 0 < result["load"]["median_s"]["deploy"] < result["load"]["median_s"]["in all"]
    assert all(row["least"] <= row["ratio"] <= row["most"] for row in result["pipeline"]["compared"])


def test_drafts() -> None:
    result = run("bench_drafts.py", "resident", "far", "paged")
    for section in ("resident", "far", "paged") if THOROUGH else ("resident",):
        rows = result[section]["rows"]
        assert {(row["draft"], row["text"]) for row in rows} == {
            (draft, text) for draft in ("ngram", "self") for text in ("code", "quotes", "story")
        }
        assert all(0 < row["least"] <= row["ratio"] <= row["most"] for row in rows)


def test_engine() -> None:
    result = run("bench_engine.py")
    assert result["decode_ratio"] > 0
    assert result["prefill_ratio"] > 0


def test_onnx_cuts() -> None:
    result = run("bench_onnx_cuts.py", "cuts", "delay", "thin", "wire")
    for found in (result["cuts"]["mobilenet_v2"], *([result["thin"]] if THOROUGH else [])):
        assert all(row["measured_per_s"] > 0 for row in found["rows"])
        assert found["apart"] < len(found["rows"])
    if not THOROUGH:
        return
    assert result["delay"]["latency_grew_by_delays"] > 0
    for placed in result["wire"]["placed"].values():
        assert set(placed["of_bare_copy"]) == {"item f32", "item f16", "item q8"}


def test_paging() -> None:
    result = run("bench_paging.py", "limit", "mmap", "keeps-up", "experts", "repack")
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
    assert all(one["compared"]["ratio"] > 0 for one in result["keeps-up"]["cases"])
    [experts] = result["experts"]["cases"]
    assert 0 <= experts["median"]["hit_rate"] <= 1
    assert {row["type"] for row in result["repack"]["rows"]} == {"q4_0", "q4_k"}


def test_planner() -> None:
    rows = run("bench_planner.py")["rows"]
    assert all(row["seconds"] > 0 and row["points"] for row in rows)
    assert [row["exact"] for row in rows[:-1]] == [True] * 4


def test_prefixes() -> None:
    result = run("bench_prefixes.py", "restart", "reading", "memory")
    assert result["memory"]["state_bytes"] > 0
    assert result["memory"]["grown_bytes"] >= 0
    if not THOROUGH:
        return
    for side, (measured,) in result["restart"]["measured"].items():
        assert measured["first_computed"] == 100, side
        assert measured["again_computed"] < 10, side
        assert measured["shared_computed"] < 40, side
    assert result["reading"]["state_bytes"] == result["memory"]["state_bytes"]
    assert all(rate > 0 for rate in result["reading"]["median"].values())


def test_quantize() -> None:
    result = run("bench_quantize.py", "types", "fit", "memory", "kernels")
    q8_0, q2_k = result["types"]["with"]
    assert q8_0["size_bytes"] > q2_k["size_bytes"]
    assert q8_0["mean_divergence"] < q2_k["mean_divergence"]
    if not THOROUGH:
        return
    [fitted] = result["fit"]["rows"]
    assert 0.995 <= fitted["of_budget"] <= 1
    assert fitted["with"]["size_bytes"] <= fitted["size_bytes"]
    for row in result["memory"]["rows"]:
        assert row["seconds"] > 0
        if "without_group" not in row:  # memory groups are for root, where there are any
            assert 0 < row["group"]["anonymous_bytes"] <= row["group"]["max_usage_bytes"] <= 2 << 30
    assert all(row["decode_s"] > 0 and row["kernels_s"] > 0 for row in result["kernels"]["rows"])


def test_sameness() -> None:
    [figures] = [part for part in run("bench_sameness.py").values() if isinstance(part, dict)]
    routes = {one["route"]: one["one_device"]["mean_divergence"] for one in figures["routes"]}
    assert routes["3 stages"] == 0  # the same bits
    assert 0 < routes["2 ranks"] < 0.01
    assert 0 <= routes["2 ranks, a loss in each chunk"] < 0.01


def test_serve() -> None:
    result = run("bench_serve.py", "throughput", "stall", "prefix", "survive", "soak")
    assert "llama-server" in result["throughput"]["left_out"]
    assert [case["streams"] for case in result["throughput"]["cases"]] == [1, 2]
    for case in result["throughput"]["cases"]:
        assert set(case["median"]) >= {"edge serve", "llama.cpp's batched decode"}
        for side, median in case["median"].items():
            assert 0 < median["tokens_per_s"] <= case["best"][side]["tokens_per_s"]
    if not THOROUGH:
        return
    assert result["stall"]["median"]["edge serve"]["gap_s"] > 0
    again = result["prefix"]["median"]["edge serve"]
    assert again["first_cached"] < 50 < again["second_cached"]
    survived = result["survive"]
    assert survived["kills"] > 0
    assert (survived["disturbed"]["lost"], survived["disturbed"]["wrong"]) == (0, 0)
    assert (result["soak"]["wrong_are"], result["soak"]["wrong"]) == ([], 0)


def test_speculate() -> None:
    result = run("bench_speculate.py", "disk", "resident", "far", "stages")
    for section in ("disk", "resident", "far", "stages") if THOROUGH else ("disk",):
        for case in result[section]:
            assert list(case["pass_ms"]) == ["1", "2", "4", "8", "16"]
            assert {row["right"] for row in case["rows"]} == {0.0, 0.75}
            assert all(0 < row["least"] <= row["ratio"] <= row["most"] for row in case["rows"])
            assert all(row["predicted_ratio"] >= 1 for row in case["rows"])
            assert bool(case["busy_ms"]) == bool(case["shapes"]) == (section == "stages")
            assert all(min(one["ratio"], one["predicted_ratio"]) > 0 for one in case["shapes"])


def test_startup() -> None:
    result = run("bench_startup.py")
    assert 0 < result["python_s"] < result["first_token_s"]


def test_transport() -> None:
    result = run("bench_transport.py", "roundtrip", "delay", "crossover", "matrix")
    links = [part["link"] for part in result["matrix"]["parts"] if part["what"] == "allreduce"]
    assert links == ["tcp", "tls", "grpc", "shaped", "memory"]
    if not THOROUGH:
        return
    assert all(seconds > 0 for seconds in result["roundtrip"]["median_s"].values())
    assert {row["algorithm"] for row in result["delay"]["rows"]} == {"star", "mesh", "ring", "split"}
    assert result["crossover"]["rows"][0]["picked"] in result["crossover"]["rows"][0]["median_s"]


def test_slices() -> None:
    found = run("bench_slices.py")["wires"]["loopback"]
    assert all(rate > 0 for rate in found["bytes_per_s"].values())
    assert found["second_load_bytes"] == 0
    assert 0 < found["sent_after_cut_bytes"] <= 8_000_000  # of so little all may have been on its way at the cut


def test_plans() -> None:
    result = run("bench_plans.py")
    (setting,) = result["settings"]
    assert any(plan["chosen"] for plan in setting["plans"])
    for plan in setting["plans"]:
        assert plan["predicted"]["latency_s"] > 0
        assert all(one["throughput_per_s"] > 0 for one in plan["measured"])
    assert set(result["summary"]["errors"]) == {"latency_s", "throughput_per_s", "ttft_s"}
    assert result["summary"]["chosen_over_best_measured"]["worst"] >= 1
