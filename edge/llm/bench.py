"""Benchmark of an engine: repeated prefill and decode after a warm-up, compared with the machine's memory bandwidth."""

from __future__ import annotations

import secrets
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from devices.busy import OthersLoad
from devices.energy import EnergyMeter
from devices.probe import memory_bandwidth_gbps, own_rss, peak_rss
from edge.llm.continuation import Request
from edge.llm.interface import TextEngine
from edge.llm.scheduler import Scheduler
from partition.model.model import decode_bytes
from quant.text import bytes_text, counted

_SCATTERED = 1.5  # ratio of slow to fast tokens (p90 to p10) above which figures scatter
_BANDWIDTH_BYTES = 128_000_000  # minimum bytes read to measure memory bandwidth
_BUDGET_SHARE = 2  # the measurement may use 1/2 of the budget that a closed engine leaves


@dataclass(frozen=True)
class Rate:
    """Tokens per second over the repeats."""

    mean: float
    deviation: float  # standard deviation; 0 for one repeat
    median: float


@dataclass(frozen=True)
class BenchResult:
    """Result of a benchmark."""

    prompt_tokens: int
    gen_tokens: int
    repeats: int
    threads: int
    prefill: Rate
    decode: Rate
    decode_ms_median: float  # over every token of every repeat; the same for p10 and p90
    decode_ms_p10: float
    decode_ms_p90: float
    others_cores: float  # mean number of cores that other programs, or the host of a virtual machine, used
    # Tokens generated with several requests in flight, including prefill time; None for one request.
    throughput: Rate | None
    decode_bytes: int  # bytes of weights that one token reads
    bandwidth_gbps: float | None  # decode_bytes / decode_ms_median
    memory_bandwidth_gbps: float | None  # bandwidth of plain reads with as many threads; None: not measured
    peak_rss_bytes: int  # peak of the process so far
    # Joules of this machine for a decoded token; None if the machine does not report them.
    joules_per_token: float | None = None
    energy_source: str | None = None  # measured parts of the machine

    @property
    def scattered(self) -> bool:
        """True if token times vary too much for their mean to be meaningful."""
        return self.decode_ms_p90 > _SCATTERED * self.decode_ms_p10

    def scatter_text(self) -> str:
        """Return a warning for people about figures that scatter."""
        line = f"these figures scatter: of ten tokens one took less than {self.decode_ms_p10:.2f} ms and one more than"
        line += f" {self.decode_ms_p90:.2f}"
        if self.others_cores >= 0.1:
            line += f"; something else kept {counted(round(self.others_cores, 1), 'core')} busy meanwhile"
        return f"{line}. Measure again when nothing else runs; medians say the most until then"

    def bandwidth_text(self) -> str:
        """Return the memory bandwidth of decoding, for people."""
        limit = ""
        if self.memory_bandwidth_gbps is not None:
            threads = counted(self.threads, "thread")
            limit = f" of the {self.memory_bandwidth_gbps:.1f} GB/s this machine's memory gives {threads}"
        return (
            f"decode: {self.decode_ms_median:.2f} ms a token (median), {self.bandwidth_gbps:.1f} GB/s{limit};"
            f" peak memory {bytes_text(self.peak_rss_bytes)}{self._energy_text()}"
        )

    def _energy_text(self) -> str:
        if self.joules_per_token is None:
            return ""
        return f"; {self.joules_per_token:.3g} J per token, measured at {self.energy_source}"

    def to_json(self) -> dict[str, Any]:
        """Return plain values for JSON, as described in docs/cli/bench.md."""
        throughput = self.throughput
        return {
            "threads": self.threads,
            "prompt_tokens": self.prompt_tokens,
            "gen_tokens": self.gen_tokens,
            "repeats": self.repeats,
            "prefill_tokens_per_s": self.prefill.mean,
            "prefill_tokens_per_s_deviation": self.prefill.deviation,
            "prefill_tokens_per_s_median": self.prefill.median,
            "decode_tokens_per_s": self.decode.mean,
            "decode_tokens_per_s_deviation": self.decode.deviation,
            "decode_tokens_per_s_median": self.decode.median,
            "decode_ms_median": self.decode_ms_median,
            "decode_ms_p10": self.decode_ms_p10,
            "decode_ms_p90": self.decode_ms_p90,
            "others_cores": self.others_cores,
            "throughput_tokens_per_s": throughput.mean if throughput else None,
            "throughput_tokens_per_s_deviation": throughput.deviation if throughput else None,
            "decode_bytes": self.decode_bytes,
            "bandwidth_gbps": self.bandwidth_gbps,
            "memory_bandwidth_gbps": self.memory_bandwidth_gbps,
            "peak_rss_bytes": self.peak_rss_bytes,
            "joules_per_token": self.joules_per_token,
            "energy_source": self.energy_source,
        }


def measure(
    engine: TextEngine,
    *,
    prompt_tokens: int = 512,
    gen_tokens: int = 128,
    repeats: int = 5,
    requests: int = 1,
    alone: bool = True,
    on_step: Callable[[int, int], None] = lambda done, total: None,
) -> BenchResult:
    """Run prefill and decode `repeats` times after one warm-up. Tokens are random, because they do not influence speed.

    requests: if above 1, also measure throughput with this many requests in flight.
    alone: the engine runs on this machine only, so its rate can be compared with the machine's memory bandwidth.
    on_step: called as on_step(done, total) after each warm-up and repeat.

    Raises ValueError if the tokens do not fit into the context.
    """
    if prompt_tokens + gen_tokens > engine.context:
        raise ValueError(
            f"{prompt_tokens} prompt and {gen_tokens} generated tokens do not fit in a context of {engine.context}"
        )
    tokens = np.random.default_rng(0).integers(0, engine.model.n_vocab, prompt_tokens + gen_tokens, np.int32)
    steps_in_all = (repeats + 1) * (2 if requests > 1 else 1)
    others, energy = OthersLoad(), EnergyMeter()
    prefill_s: list[float] = []
    decode_s: list[list[float]] = []
    joules: list[float | None] = []
    for repeat in range(repeats + 1):
        prefill, steps = _once(engine, tokens, prompt_tokens, energy)
        if repeat:  # the first pass is the warm-up
            prefill_s.append(prefill)
            decode_s.append(steps)
            joules.append(energy.joules())
        on_step(repeat + 1, steps_in_all)
    together = None
    if requests > 1:
        together = throughput(
            engine,
            requests=requests,
            prompt_tokens=prompt_tokens,
            gen_tokens=gen_tokens,
            repeats=repeats,
            on_step=lambda done, _: on_step(repeats + 1 + done, steps_in_all),
        )
    all_s = [s for steps in decode_s for s in steps]
    median_s = statistics.median(all_s)
    p10_s, p90_s = np.quantile(all_s, (0.1, 0.9))
    bytes_read = decode_bytes(engine.file, engine.shape)
    return BenchResult(
        prompt_tokens=prompt_tokens,
        gen_tokens=gen_tokens,
        repeats=repeats,
        threads=engine.threads,
        prefill=_rate([prompt_tokens / s for s in prefill_s]),
        decode=_rate([gen_tokens / sum(steps) for steps in decode_s]),
        decode_ms_median=median_s * 1e3,
        decode_ms_p10=float(p10_s) * 1e3,
        decode_ms_p90=float(p90_s) * 1e3,
        others_cores=others.cores(),
        throughput=together,
        decode_bytes=bytes_read,
        bandwidth_gbps=bytes_read / median_s / 1e9 if alone else None,
        memory_bandwidth_gbps=None,
        peak_rss_bytes=peak_rss(),
        joules_per_token=(per_token := _joules_per_token(joules, gen_tokens) if alone else None),
        energy_source=None if per_token is None else energy.source,
    )


def beside_memory(result: BenchResult, budget: int | None) -> BenchResult:
    """Return the result with the memory bandwidth of plain reads. Call this after the engine is closed.

    budget: bytes that this process may use; None: the measurement uses at most the engine's memory, if that is enough.
    """
    if budget is None:
        most_bytes = max(_BANDWIDTH_BYTES, result.peak_rss_bytes - own_rss())
    else:
        most_bytes = (budget - own_rss()) // _BUDGET_SHARE
    try:
        gbps = memory_bandwidth_gbps(result.threads, most_bytes)
    except OSError:  # too little memory for a measurement
        gbps = None
    return replace(result, memory_bandwidth_gbps=gbps, peak_rss_bytes=peak_rss())


def throughput(
    engine: TextEngine,
    *,
    requests: int,
    prompt_tokens: int,
    gen_tokens: int,
    repeats: int,
    on_step: Callable[[int, int], None] = lambda done, total: None,
) -> Rate:
    """Return the tokens generated per second with this many requests in flight, after one warm-up.

    The time runs from the first prompt to the last token. Raises ValueError if the requests do not fit into the context
    or the engine's sequences.
    """
    if requests * (prompt_tokens + gen_tokens) > engine.context or requests > engine.sequences:
        raise ValueError(
            f"{requests} requests of {prompt_tokens} and {gen_tokens} tokens do not fit in a context of"
            f" {engine.context} with {engine.sequences} sequences"
        )
    tokens = np.random.default_rng(0).integers(0, engine.model.n_vocab, (requests, prompt_tokens), np.int32)
    requested = [Request(prompt.tolist(), gen_tokens, ends=False) for prompt in tokens]
    rates = []
    for repeat in range(repeats + 1):
        began = time.perf_counter()
        Scheduler(engine).run(requested)
        if repeat:
            rates.append(requests * gen_tokens / (time.perf_counter() - began))
        on_step(repeat + 1, repeats + 1)
    return _rate(rates)


def _joules_per_token(joules: list[float | None], tokens: int) -> float | None:
    """Return the median joules of a token, or None if any run was not measured. tokens: tokens of each run."""
    measured = [n for n in joules if n is not None]
    return statistics.median(measured) / tokens if measured and len(measured) == len(joules) else None


def _once(
    engine: TextEngine, tokens: np.ndarray[tuple[int], np.dtype[np.int32]], n: int, energy: EnergyMeter
) -> tuple[float, list[float]]:
    """Return the seconds of one prefill of the first `n` tokens, and the seconds of each decode step of the other
    tokens.

    energy: counts from the end of prefill.
    """
    engine.kv_clear()
    began = time.perf_counter()
    if engine.states.prefiller is not None:
        _prefill_in_phases(engine, tokens[:n].tolist())
    else:
        chunk = engine.chunk(n)
        for start in range(0, n, chunk):
            stop = min(n, start + chunk)
            engine.decode(tokens[start:stop], start, outputs="last" if stop == n else "none")
    prefill = time.perf_counter() - began
    energy.joules()
    steps = []
    for position in range(n, len(tokens)):
        began = time.perf_counter()
        engine.decode(tokens[position : position + 1], position, top=1)
        steps.append(time.perf_counter() - began)
    return prefill, steps


def _prefill_in_phases(engine: TextEngine, prompt: list[int]) -> None:
    """Prefill a prompt as a request would if there is a prefill placement. Nothing is reused from earlier prompts."""
    scheduler = Scheduler(engine, slots=1, keep=True)
    scheduler.add(Request(prompt, 1, ends=False, namespace=secrets.token_hex(8)))
    while scheduler.busy:
        scheduler.step()
    scheduler.yield_engine()


def _rate(values: list[float]) -> Rate:
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return Rate(statistics.mean(values), deviation, statistics.median(values))
