"""Our decode and prefill beside a bare llama_decode loop, alternating in one process on one loaded file.

    python benchmarks/bench_engine.py [--only loop] [--rounds 9] [--json]

The bare loop is llama.cpp's C interface with nothing around it: the limit for anything built on it. Both sides have a
context of their own over the same weights, greedy sampling included (the likeliest of the logits). Ratios are of the
medians over all rounds; ours should reach 0.98. By default on a random file of TinyLlama-1.1B's shape at Q4_0.

attention: tokens, and 32 rows of a prompt, after so many: with flash attention, without, and as an engine chooses
(`edge/llama/attention_kernel.py`). The cache is filled with random numbers.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import llama_cpp as L
import numpy as np

from benchmarks.harness import Section, alternate, bench, bests, compared, medians, parser_of, ratio_text, table
from devices.probe import default_threads, memory_bandwidth_gbps
from edge.demo import MODEL_PATH
from edge.llama import llama
from edge.llama.attention_kernel import LENGTHS, random_block
from edge.llm.continuation import Request
from edge.llm.engine import Engine
from edge.llm.generate import generate
from edge.llm.options import EngineOptions
from edge.llm.sampler import SamplingParams
from edge.llm.scheduler import Scheduler
from edge.models import synth
from edge.models.synth import SHAPES
from partition.model.model import decode_bytes

ROWS = 32  # of a prompt


def main() -> None:
    sections = {"loop": Section(measure, text), "attention": Section(measure_attention, attention_text)}
    parser = parser_of(__doc__, sections, rounds=9)
    parser.add_argument("--model", type=Path, help="GGUF file (default: a random one of TinyLlama-1.1B's shape)")
    parser.add_argument("--threads", type=int, default=default_threads())
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--gen-tokens", type=int, default=32)
    bench(parser, sections, prepare)


def prepare(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    if args.tiny:
        args.model, args.prompt_tokens, args.gen_tokens, args.rounds = args.model or MODEL_PATH, 16, 3, 1
    if args.model is None:
        args.model = folder / "tinyllama-1.1b-q4_0.gguf"
        synth.synthesize(args.model, SHAPES["tinyllama-1.1b"], "q4_0", "q8_0")
    return {"model": args.model.name, "threads": args.threads, "rounds": args.rounds}


def measure(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Medians of both sides, and their ratios."""
    n, m = args.prompt_tokens, args.gen_tokens
    options = EngineOptions(context=n + m, batch=n, threads=args.threads)
    with Engine(args.model, options) as engine:
        engine.model.is_end = lambda token: False  # type: ignore[method-assign]  # both sides generate the full length
        prompt = np.random.default_rng(0).integers(0, engine.model.n_vocab, n).tolist()
        bare = Bare(engine, n + m, n, args.threads, prompt, m)
        result = alternate({"bare": bare.run, "ours": lambda: ours(engine, prompt, m)}, args.rounds)
        bytes_read = decode_bytes(engine.file, engine.shape)
    median, rows = medians(result), {row["figure"]: row for row in compared(result, "ours", "bare")}
    return {
        "system_info": llama.system_info(),
        "median": median,
        "best": bests(result),
        "compared": list(rows.values()),
        "prefill_ratio": rows["prefill_s"]["ratio"],
        "decode_ratio": rows["decode_s"]["ratio"],
        "decode_gbps": bytes_read / median["ours"]["decode_s"] / 1e9,
        "memory_gbps": memory_bandwidth_gbps(args.threads),
        "prompt_tokens": n,
    }


def ours(engine: Engine, prompt: list[int], gen_tokens: int) -> dict[str, float]:
    """Seconds of a prefill, and of the median following token, through the whole of `generate`, text included."""
    engine.kv_clear()
    stamps = [time.perf_counter()]
    for _ in generate(
        Scheduler(engine, slots=1, keep=True),
        Request(prompt, gen_tokens, SamplingParams(temperature=0, allow_repetition=True)),
    ):
        stamps.append(time.perf_counter())
    stamps.pop()  # the last response carries no token
    steps = [b - a for a, b in itertools.pairwise(stamps[1:])]
    return {"prefill_s": stamps[1] - stamps[0], "decode_s": statistics.median(steps)}


class Bare:
    """llama_decode in a loop, on a context of its own over the engine's weights."""

    def __init__(self, engine: Engine, n_ctx: int, n_batch: int, threads: int, prompt: list[int], gen_tokens: int):
        params = L.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = n_ctx, n_batch, n_batch
        params.n_threads = params.n_threads_batch = threads
        self.model = engine.model._handle
        self.context = L.llama_init_from_model(self.model, params)
        self.memory = L.llama_get_memory(self.context)
        self.n_vocab = engine.model.n_vocab
        self.prompt, self.gen_tokens = prompt, gen_tokens

    def run(self) -> dict[str, float]:
        """Seconds of a prefill with its first token, and of the median following token."""
        L.llama_memory_clear(self.memory, True)
        tokens = (L.llama_token * len(self.prompt))(*self.prompt)
        began = time.perf_counter()
        L.llama_decode(self.context, L.llama_batch_get_one(tokens, len(self.prompt)))
        token = self._likeliest()
        seconds, steps = time.perf_counter() - began, []
        first = (L.llama_token * 1)()
        for _ in range(self.gen_tokens - 1):
            began = time.perf_counter()
            first[0] = token
            L.llama_decode(self.context, L.llama_batch_get_one(first, 1))
            token = self._likeliest()
            steps.append(time.perf_counter() - began)
        return {"prefill_s": seconds, "decode_s": statistics.median(steps)}

    def _likeliest(self) -> int:
        logits = L.llama_get_logits_ith(self.context, -1)
        return int(np.ctypeslib.as_array(logits, shape=(self.n_vocab,)).argmax())


def text(r: dict[str, Any]) -> str:
    """The result as Markdown."""
    prefill, decode = r["compared"]
    rates = [f"{r['prompt_tokens'] / r['median'][side]['prefill_s']:.1f}" for side in ("bare", "ours")]
    times = [f"{1e3 * r['median'][side]['decode_s']:.2f}" for side in ("bare", "ours")]
    lines = [["prefill, tokens/s", *rates, ratio_text(prefill)], ["decode, ms/token", *times, ratio_text(decode)]]
    return (
        table(["", "bare llama_decode", "ours", "ratio"], lines)
        + f"\n\nDecode reads {r['decode_gbps']:.1f} GB/s; memory alone gives {r['memory_gbps']:.1f} GB/s."
    )


KERNELS = {"with": "on", "without": "off", "chosen": "auto"}


def measure_attention(_: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Medians by length and kernel, and how far the chosen one is behind the better of the two."""
    lengths = (16, 64) if args.tiny else LENGTHS
    options = EngineOptions(context=lengths[-1] + ROWS, batch=ROWS, threads=args.threads, follows_load=True)
    cases = []
    with ExitStack() as closing:
        sides = {
            side: closing.enter_context(Engine(args.model, replace(options, flash_attention=how)))
            for side, how in KERNELS.items()
        }
        for engine in sides.values():  # threads that followed the load would differ
            engine._context.use_threads(args.threads)
        for tokens in lengths:
            for engine in sides.values():
                engine.kv_clear()
                engine.states.write(0, random_block(engine.states, tokens))
            runs = {side: partial(after, engine, tokens) for side, engine in sides.items()}
            median = medians(alternate(runs, args.rounds))
            better = {figure: min(median[side][figure] for side in ("with", "without")) for figure in median["chosen"]}
            cases.append(
                {
                    "tokens": tokens,
                    "median": median,
                    "flash": sides["chosen"].states.attention.flash,
                    "behind": {figure: median["chosen"][figure] / seconds for figure, seconds in better.items()},
                }
            )
        return {"cases": cases, "chosen": sides["chosen"].states.attention.describe()}


def after(engine: Engine, tokens: int) -> dict[str, float]:
    """Seconds of the fastest of some tokens, and of some rows of a prompt, after so many tokens."""
    figures = {}
    for figure, n, times in (("token_s", 1, 4), ("rows_s", ROWS, 1)):
        steps = []
        for _ in range(times):
            engine.kv_remove(0, tokens)
            began = time.perf_counter()
            engine.decode([5] * n, tokens)
            steps.append(time.perf_counter() - began)
        figures[figure] = min(steps)
    return figures


def attention_text(r: dict[str, Any]) -> str:
    """The result as Markdown."""
    lines = [
        [f"{case['tokens']:,}, {words}"]
        + [f"{1e3 * case['median'][side][figure]:.1f}" for side in KERNELS]
        + ["with" if case["flash"] else "without", f"{case['behind'][figure]:.3f}"]
        for case in r["cases"]
        for figure, words in (("token_s", "a token"), ("rows_s", f"{ROWS} rows"))
    ]
    header = ["tokens in the cache; ms", *KERNELS, "choice", "chosen / better"]
    return table(header, lines) + f"\n\nChosen: {r['chosen']}."


if __name__ == "__main__":
    main()
