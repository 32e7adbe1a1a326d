"""Test the speed figures of text generation with a simulated clock: known steps give known figures."""

import io
import json
import re
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from apps.commands import bench as bench_command
from apps.show import terminal
from apps.show.answer import LoadedChat
from edge import microbenchmark
from edge.llm import bench, generate, in_flight
from edge.llm.bench import BenchResult, Rate
from edge.llm.chat import Chat
from edge.llm.continuation import Request
from edge.llm.engine import Engine
from edge.llm.options import EngineOptions
from edge.llm.sampler import SamplingParams
from edge.planning import measure
from edge.quantization import comparison
from edge.quantization.comparison import COLUMNS, Evaluation
from edge.quantization.divergence import Scores, Summary, summarize
from edge.quantization.evaluate import Quality
from edge.worker import timing as profiler
from partition.model.model import decode_bytes
from tests.conftest import Synthetic
from tests.support.clock import Clock
from tests.support.drafting import one_slot

ROW_S, TOKEN_S = 0.01, 0.05  # of a row of a prompt, and of a step of decode
GREEDY = SamplingParams(temperature=0)


@pytest.fixture
def engine(synthetic: Synthetic) -> Iterator[Engine]:
    options = EngineOptions(threads=1, context=256, batch=8, sequences=2)
    with Engine(synthetic("llama", "q8_0"), options) as engine:
        yield engine


@pytest.fixture
def timed(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Clock]:
    """`timed(modules)`: their clock, by which the engine takes ROW_S and TOKEN_S times `clock.slow`, the list of what
    it is after each time everything was forgotten."""

    def start(*modules: Any, slow: list[float] | None = None) -> Clock:
        clock = Clock().install(monkeypatch, *modules)
        factors = iter(slow or ())
        factor = [1.0]

        def submit_s(tokens: Any, positions: Any, sequences: Any, *_: Any, **__: Any) -> float:
            decodes = len(set(sequences.tolist())) == len(tokens)
            return factor[0] * (TOKEN_S if decodes else ROW_S * len(tokens))

        def clear(forget: Callable[[], None] = engine.kv_clear) -> None:
            factor[0] = next(factors, factor[0])
            forget()

        monkeypatch.setattr(engine, "submit", clock.while_it_runs(engine.submit, submit_s))
        monkeypatch.setattr(engine, "kv_clear", clear)
        return clock

    return start


def test_ttft_tpot_and_rates_of_an_answer(engine: Engine, timed: Callable[..., Clock]) -> None:
    clock = timed(generate, in_flight)
    session = one_slot(engine)
    prompt = list(range(10, 26))  # two chunks of 8 rows
    responses = generate.generate(session, Request(prompt, 5, GREEDY))
    clock.now += 0.5  # before anybody asks: an answer is accepted when its first piece is asked for
    result = list(responses)
    first, last = result[0].timing, result[-1].timing
    prompt_s = 16 * ROW_S
    assert [item.usage.completion_tokens for item in result] == [1, 2, 3, 4, 5, 5]
    assert first.ttft_s == last.ttft_s == pytest.approx(prompt_s)
    assert (first.tpot_s, first.decode_tokens_per_s) == (0, 0)  # nothing to measure yet
    assert [item.timing.tpot_s for item in result[1:]] == pytest.approx([TOKEN_S] * 5)
    assert last.decode_tokens_per_s == pytest.approx(20)
    assert last.prefill_tokens_per_s == pytest.approx(100)
    # Half of the next prompt is held already: what was not computed counts for no rate.
    again = [*prompt[:8], *range(40, 48)]
    (_, answer) = generate.generate(session, Request(again, 1, GREEDY))
    assert (answer.usage.prompt_tokens, answer.usage.cached_tokens) == (16, 8)
    assert answer.timing.prefill_tokens_per_s == pytest.approx(100)
    assert answer.timing.ttft_s == pytest.approx(8 * ROW_S)


def test_a_benchmark_of_known_steps(engine: Engine, timed: Callable[..., Clock]) -> None:
    timed(bench, slow=[10, 1, 2])  # the warm-up, then two repeats
    result = bench.measure(engine, prompt_tokens=16, gen_tokens=5, repeats=2)
    assert result.prefill.mean == pytest.approx((100 + 50) / 2)
    assert result.prefill.deviation == pytest.approx(50 / 2**0.5)
    assert result.decode.mean == pytest.approx((20 + 10) / 2)
    assert result.decode.deviation == pytest.approx(10 / 2**0.5)
    assert result.decode_ms_median == pytest.approx(75)  # of five steps of 50 and five of 100
    assert (result.decode_ms_p10, result.decode_ms_p90) == pytest.approx((50, 100))
    assert result.scattered
    assert (result.prefill.median, result.decode.median) == pytest.approx((75, 15))
    shape, tensors = engine.shape, engine.file.tensors
    assert shape.head_is_tied is False
    table = tensors["token_embd.weight"]
    read = sum(tensor.n_bytes for tensor in tensors.values()) - table.n_bytes * (shape.n_vocab - 1) // shape.n_vocab
    assert result.decode_bytes == read
    assert result.bandwidth_gbps == pytest.approx(read / 0.075 / 1e9)
    assert (result.prompt_tokens, result.gen_tokens, result.repeats, result.threads) == (16, 5, 2, 1)
    assert result.throughput is None


def test_a_mixture_reads_the_experts_it_uses(synthetic: Synthetic) -> None:
    with Engine(synthetic("qwen3moe"), EngineOptions(threads=1, context=32)) as engine:
        tensors = engine.file.tensors
        assert "output.weight" in tensors
        experts = sum(tensor.n_bytes for name, tensor in tensors.items() if "_exps." in name)
        table = tensors["token_embd.weight"].n_bytes
        rest = sum(tensor.n_bytes for tensor in tensors.values()) - experts - table
        assert decode_bytes(engine.file, engine.shape) == rest + experts * 2 // 4 + table // engine.shape.n_vocab


def test_throughput_counts_what_all_requests_generate(engine: Engine, timed: Callable[..., Clock]) -> None:
    timed(bench, slow=[3, 1, 2])
    result = bench.throughput(engine, requests=2, prompt_tokens=8, gen_tokens=4, repeats=2)
    # The second prompt has 7 rows beside the first one's second token, and its last beside the third.
    once_s = 2 * 8 * ROW_S + 4 * TOKEN_S
    assert result.mean == pytest.approx((8 / once_s + 4 / once_s) / 2)


def test_bandwidth_is_measured_with_as_many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "memory_bandwidth_gbps", lambda threads, most_bytes: 7.0 * threads + most_bytes / 1e9)
    monkeypatch.setattr(bench, "own_rss", lambda: 1 << 30)
    assert bench.beside_memory(RESULT, 3 << 30).memory_bandwidth_gbps == pytest.approx(14 + (1 << 30) / 1e9)
    assert bench.beside_memory(RESULT, None).memory_bandwidth_gbps == pytest.approx(14 + (2 << 30) / 1e9)


RESULT = BenchResult(
    prompt_tokens=512,
    gen_tokens=128,
    repeats=5,
    threads=2,
    prefill=Rate(321.0, 3.0, 320.0),
    decode=Rate(45.0, 2.0, 44.0),
    decode_ms_median=22.5,
    decode_ms_p10=21.5,
    decode_ms_p90=23.5,
    others_cores=0.5,
    throughput=Rate(67.0, 4.0, 66.0),
    decode_bytes=10**9,
    bandwidth_gbps=44.4,
    memory_bandwidth_gbps=55.5,
    peak_rss_bytes=3 << 30,
    joules_per_token=1.25,
    energy_source="the processors and their memory",
)


def test_edge_bench_prints_each_figure_where_it_belongs(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    args = Namespace(requests=4, model=None)
    bench_command._print_speeds(args, engine, RESULT)
    print(RESULT.bandwidth_text())
    said = capsys.readouterr().out
    assert re.search(r"\| 2 \| prefill 512 \| 321\.00 ± 3\.00 \| 320\.00 \|", said)
    assert re.search(r"\| 2 \| decode 128 \| 45\.00 ± 2\.00 \| 44\.00 \|", said)
    assert re.search(r"\| 2 \| 4 requests \| 67\.00 ± 4\.00 \| 66\.00 \|", said)
    assert re.search(r"decode: 22\.50? ms a token.* 44\.4 GB/s of the 55\.5 GB/s .*2 threads.*3\.00 GiB", said)
    assert "; 1.25 J per token, measured" in said
    values = json.loads(json.dumps(RESULT.to_json()))
    known = {
        "prefill_tokens_per_s": 321.0,
        "prefill_tokens_per_s_deviation": 3.0,
        "decode_tokens_per_s": 45.0,
        "decode_tokens_per_s_deviation": 2.0,
        "prefill_tokens_per_s_median": 320.0,
        "decode_tokens_per_s_median": 44.0,
        "decode_ms_median": 22.5,
        "decode_ms_p10": 21.5,
        "decode_ms_p90": 23.5,
        "others_cores": 0.5,
        "throughput_tokens_per_s": 67.0,
        "throughput_tokens_per_s_deviation": 4.0,
        "decode_bytes": 10**9,
        "bandwidth_gbps": 44.4,
        "memory_bandwidth_gbps": 55.5,
        "peak_rss_bytes": 3 << 30,
        "joules_per_token": 1.25,
        "energy_source": "the processors and their memory",
        "threads": 2,
    }
    assert {name: values[name] for name in known} == known


def test_a_summary_of_known_predictions() -> None:
    """-log p of 0 and 2, in turns: the mean is 1, the deviation 1; divergences are 0, 1, ... 100."""
    n = 101
    nll = np.array([0.0, 2.0] * 50 + [1.0])
    result = summarize(nll, np.arange(n, dtype=np.float64), np.arange(n) < 99)
    deviation = (100 / 101) ** 0.5
    assert (result.tokens, result.perplexity) == (n, pytest.approx(np.e))
    assert result.perplexity_error == pytest.approx(np.e * deviation / 10)
    assert (result.mean_divergence, result.median_divergence) == (50, 50)
    assert (result.divergence_99, result.max_divergence) == pytest.approx((99, 100))
    assert result.top_1_agreement == pytest.approx(99 / 101)


def test_divergence_is_from_the_reference() -> None:
    """KL(p || q) of two known rows, and that it is not the same the other way."""
    p, q = np.log(np.array([[0.5, 0.5], [0.9, 0.1]], np.float32)), np.log(np.array([[0.9, 0.1]] * 2, np.float32))
    expected = 0.5 * np.log(0.5 / 0.9) + 0.5 * np.log(0.5 / 0.1)
    scores = Scores(2)
    scores.add(0, np.array([0, 1], np.int32), q, p)
    (result,) = scores.summaries()
    assert result.max_divergence == pytest.approx(expected, rel=1e-5)
    assert result.perplexity == pytest.approx((0.9 * 0.1) ** -0.5, rel=1e-5)
    assert result.top_1_agreement == 1  # of two equal ones the first is the likeliest


def test_edge_evaluate_shows_each_figure_where_it_belongs() -> None:
    summary = Summary(1000, 12.5, 0.25, 0.01234, 0.005, 0.25, 0.75, 0.975)
    result = Quality(Path("small.gguf"), 3 << 20, 4.5, summary)
    speed = comparison.ModelSpeed((321.0,), (45.0,))
    outcome = Evaluation(["small"], [result], [speed], [])
    (row,) = outcome.rows()
    assert dict(zip(COLUMNS, row, strict=True)) == {
        "model": "small",
        "size": "3.00 MiB",
        "bits/weight": "4.50",
        "perplexity": "12.500 ± 0.250",
        "mean KL": "0.01234",
        "99 % KL": "0.2500",
        "top-1": "97.50 %",
        "decode tok/s": "45.0",
        "prefill tok/s": "321.0",
    }
    assert outcome.to_json()["models"][0] == {
        "model": "small",
        "size_bytes": 3 << 20,
        "bits_per_weight": 4.5,
        "perplexity": 12.5,
        "perplexity_error": 0.25,
        "mean_divergence": 0.01234,
        "median_divergence": 0.005,
        "divergence_99": 0.25,
        "max_divergence": 0.75,
        "top_1_agreement": 0.975,
        "decode_tokens_per_s": 45.0,
        "prefill_tokens_per_s": 321.0,
    }


def test_stats_on_a_terminal_are_in_their_units(demo: Engine) -> None:
    talk = terminal._Talk(LoadedChat(Chat(demo), 1.25, None), GREEDY, None, ())
    shown = io.StringIO()
    talk._console = Console(file=shown, width=100)
    timing = generate.Timing(ttft_s=0.25, tpot_s=0.02, prefill_tokens_per_s=320.0, decode_tokens_per_s=50.0)
    talk._last = generate.Response("", None, "stop", generate.Usage(100, 60, 7, restored_tokens=32), timing)
    line = talk._stats_line(False)
    for words in ("7 tokens", "TTFT 0.25 s", "TPOT 20.0 ms", "50.0 tokens/s", f"context 0/{demo.context}"):
        assert words in line
    talk._stats("")
    rows = dict(line.split(maxsplit=1) for line in shown.getvalue().splitlines())
    assert rows["load"] == "1.25 s"
    assert rows["prompt"] == "100 tokens, 60 of them from the prefix cache, 32 of these read from disk"
    assert (rows["prefill"], rows["decode"]) == ("320.0 tokens/s", "50.0 tokens/s")
    assert (rows["TTFT"], rows["TPOT"]) == ("0.250 s to the first token", "20.00 ms for each token after the first")
    assert rows["answer"] == "7 tokens"


def test_speeds_belong_to_their_models(monkeypatch: pytest.MonkeyPatch, synthetic: Synthetic) -> None:
    """In every other round models are measured in reverse: the second file's figures stay the second's."""
    paths = [synthetic("llama", "q8_0"), synthetic("llama", "f16")]

    def measured(engine: Engine, **_: Any) -> Any:
        at = 1 + paths.index(engine.path)
        return SimpleNamespace(prefill=Rate(100.0 * at, 0, 0), decode=Rate(10.0 * at, 0, 0))

    monkeypatch.setattr(comparison, "measure", measured)
    speeds = comparison.measure_speeds(paths, EngineOptions(threads=1), rounds=3, prompt_tokens=8, gen_tokens=2)
    assert [(speed.prefill_rounds, speed.decode_rounds) for speed in speeds] == [
        ((100.0,) * 3, (10.0,) * 3),
        ((200.0,) * 3, (20.0,) * 3),
    ]
    assert speeds[0].slower_than(speeds[1]) == 2
    assert speeds[1].slower_than(speeds[0]) is None
    sizes = [100, 200]
    assert comparison.speed_notes(["small", "large"], sizes, speeds) == [
        "small is smaller than large and decodes slower: 2.00x"
    ]
    assert comparison.speed_notes(["small", "large"], sizes[::-1], speeds) == []


def test_what_a_plan_does_by_known_steps(engine: Engine, timed: Callable[..., Clock]) -> None:
    """Each figure is the best of three rounds; how long it takes changes whenever everything is forgotten: by the warm-
    up, and then by the prompt, the one token and the two requests of each round."""
    timed(measure, microbenchmark, slow=[0.1, 2, 1, 4, 1.5, 3, 1, 3, 4, 2])
    work: Any = SimpleNamespace(prompt=16, depth=40, concurrency=2)
    result = measure.measured(engine, work, 1, {"pi": 7})
    assert result.ttft_s == pytest.approx(16 * ROW_S * 1.5)
    assert result.latency_s == pytest.approx(TOKEN_S)
    # Two requests in one step: two tokens every TOKEN_S.
    assert result.throughput_per_s == pytest.approx(2 / TOKEN_S)
    assert result.spread == pytest.approx(3)
    assert result.memory_bytes["pi"] == 7


def test_a_step_takes_what_its_best_piece_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock().install(monkeypatch, microbenchmark)
    monkeypatch.setattr(microbenchmark, "LostTimeMeter", lambda: SimpleNamespace(lost_s=lambda: 0.0))
    computed: list[tuple[int, int, bool]] = []
    rows = SimpleNamespace(
        capacity=64,
        embeddings=np.ones((64, 4), np.float32),
        outputs=np.zeros(64, np.int8),
        sequences=np.zeros(64, np.int32),
        positions=np.zeros(64, np.int32),
    )

    def compute(n: int) -> None:
        clock.now += 0.1 * n + (len(computed) % 3 == 0)  # each third is slow
        decodes = len(set(rows.sequences[:n].tolist())) == n
        computed.append((n, int(rows.positions[0]), decodes))

    engine = SimpleNamespace(
        kv_clear=lambda: None, kv_remove=lambda *_: None, use_top=lambda _: None, threads=1, sequences=8
    )
    shard: Any = SimpleNamespace(rows=rows, engine=engine, compute=compute)
    result = profiler.time_shard(shard, (1, 4, 64), samples=4, depth=32)
    assert [item.seconds for item in result] == pytest.approx([0.1, 0.4, 6.4, 0.1])
    assert {(n, decodes) for n, at, decodes in computed if at == 0} == {(1, True), (4, True), (64, False), (32, False)}
    assert {n for n, at, _ in computed if at == 32} == {1}
    computed.clear()
    profiler.time_shard(shard, (16,), samples=2, depth=32)  # the first of the steps is what is timed behind others
    assert {(n, decodes) for n, at, decodes in computed if at == 32} == {(16, False)}


def test_stop_holds_on_a_terminal(demo: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def said(stop: tuple[str, ...], most: int | None = None) -> str:
        chat = Chat(demo)
        talk = terminal._Talk(LoadedChat(chat, 0.0, None), GREEDY, most, stop)
        talk._console = Console(file=io.StringIO(), width=100)
        talk._answer("How many minutes are in 3 hours?")
        return chat.messages[-1]["content"]

    assert said(()) == "3 hours are 180 minutes."
    assert said((" minutes",)) == "3 hours are 180"
    assert len(said((), 2)) < len("3 hours are 180")
