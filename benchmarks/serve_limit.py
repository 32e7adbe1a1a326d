"""Speed of llama.cpp with several sequences in one batch, without server and sampler: the limit of any server."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

import numpy as np

from edge.llm.engine import Engine
from edge.llm.options import EngineOptions

BENCH_S = 300.0  # that llama-batched-bench may take
TRIES = 5


def limit(program: Path | None, model: Path, n: int, prompt: int, tokens: int, threads: int) -> dict[str, float]:
    """`n` sequences with so many tokens each, by llama-batched-bench or, without one, by our engine."""
    if program is None:
        prefill_s, decode_s = by_engine(model, n, prompt, tokens, threads)
    else:
        prefill_s, decode_s = by_program(program, model, n, prompt, tokens, threads)
    built = n * tokens
    return {"tokens_per_s": built / (prefill_s + decode_s), "decode_per_s": built / decode_s, "first_s": prefill_s}


def by_program(program: Path, model: Path, n: int, prompt: int, tokens: int, threads: int) -> tuple[float, float]:
    """Seconds of the prompts, and of the tokens after them. CalledProcessError where the program fails."""
    sizes = {"-npp": prompt, "-ntg": tokens, "-npl": n, "-c": _context(n, prompt, tokens), "-t": threads}
    command = [str(program), "-m", str(model), "--output-format", "jsonl"]
    command += [str(word) for pair in sizes.items() for word in pair]
    for _ in range(TRIES):  # it may end before the thread that writes its lines has written them
        done = subprocess.run(command, capture_output=True, text=True, timeout=BENCH_S, check=True)
        for line in done.stdout.splitlines():
            if line.startswith("{"):
                row = json.loads(line)
                return row["t_pp"], row["t_tg"]
    raise SystemExit(f"{program} printed no figures; it said: {done.stderr[-500:]}")


def by_engine(path: Path, n: int, prompt: int, tokens: int, threads: int) -> tuple[float, float]:
    """The same figures."""
    options = EngineOptions(context=_context(n, prompt, tokens), batch=512, sequences=n, threads=threads)
    with Engine(path, options) as engine:
        rng, rows = np.random.default_rng(0), engine.rows
        began = time.perf_counter()
        for sequence in range(n):
            engine.decode(rng.integers(0, engine.model.n_vocab, prompt), 0, sequence=sequence)
        prefilled = time.perf_counter()
        for step in range(tokens):
            rows.tokens[:n] = rng.integers(0, engine.model.n_vocab, n)
            rows.positions[:n], rows.sequences[:n], rows.outputs[:n] = prompt + step, range(n), 1
            engine.decode_rows(rows, n)
        return prefilled - began, time.perf_counter() - prefilled


def _context(n: int, prompt: int, tokens: int) -> int:
    return max(256, n * (prompt + tokens))
