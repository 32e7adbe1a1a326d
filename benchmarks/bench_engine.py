"""Our decode and prefill compared with a bare llama_decode loop, alternating in one process on one loaded file.

    python benchmarks/bench_engine.py [--only loop] [--rounds 9] [--json]

The bare loop calls only llama.cpp's C interface: it is the upper limit for anything built on it. Each side has a
context of its own over the same weights, and samples greedily (the token with the largest logit). Ratios are ratios of
the medians over all rounds; ours should reach 0.98. The default model is a file with TinyLlama-1.1B's shape and random
weights in Q4_0.

prompts: prefill of long prompts compared with llama_decode with the sizes of llama-bench (batches of 2,048 tokens in
parts of 512), with and without flash attention. Ours should reach 0.97 of each.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import llama_cpp as L
import numpy as np

from benchmarks.harness import Section, alternate, bench, bests, compared, medians, parser_of, ratio_text, table
from devices.probe import default_threads, memory_bandwidth_gbps
from edge.llama import llama
from edge.llm.continuation import Request
from edge.llm.engine import Engine
from edge.llm.generate import generate
from edge.llm.options import EngineOptions
from edge.llm.sampler import SamplingParams
from edge.llm.scheduler import Scheduler
from edge.models import synth
from edge.models.demo import MODEL_PATH
from edge.models.synth import SHAPES
from partition.model.model import decode_bytes

LENGTHS = (256, 2048, 8192)  # tokens of a prompt
LLAMA_BENCH_BATCH, LLAMA_BENCH_PART = 2048, 512  # n_batch and n_ubatch of llama-bench, in tokens


def main() -> None:
    sections = {"loop": Section(measure, text), "prompts": Section(measure_prompts, prompts_text)}
    parser = parser_of(__doc__, sections, rounds=9)
    parser.add_argument("--model", type=Path, help="GGUF file (default: a random one of TinyLlama-1.1B's shape)")
    parser.add_argument("--threads", type=int, default=default_threads())
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--gen-tokens", type=int, default=32)
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=LENGTHS, help="tokens of prompts (default: 256 to 8192)"
    )
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
        with closing(Bare(engine, n + m, n, n, args.threads, prompt, m)) as bare:
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
    return {"prefill_s": stamps[1] - stamps[0]} | ({"decode_s": statistics.median(steps)} if steps else {})


class Bare:
    """llama_decode in a loop, on a context of its own over the engine's weights."""

    def __init__(
        self,
        engine: Engine,
        n_ctx: int,
        n_batch: int,
        n_ubatch: int,
        threads: int,
        prompt: list[int],
        gen_tokens: int,
        flash_attention: str = "auto",
    ):
        params = L.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = n_ctx, n_batch, n_ubatch
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn_type = llama.FLASH_ATTENTION[flash_attention]
        self.model = engine.model._handle
        self.context = L.llama_init_from_model(self.model, params)
        self.memory = L.llama_get_memory(self.context)
        self.n_vocab = engine.model.n_vocab
        self.prompt, self.n_batch, self.gen_tokens = prompt, n_batch, gen_tokens

    def close(self) -> None:
        """Free the context."""
        L.llama_free(self.context)

    def run(self) -> dict[str, float]:
        """Return the seconds of a prefill with its first token, and of the median following token if there are any."""
        L.llama_memory_clear(self.memory, True)
        began = time.perf_counter()
        for start in range(0, len(self.prompt), self.n_batch):
            part = self.prompt[start : start + self.n_batch]
            tokens = (L.llama_token * len(part))(*part)
            L.llama_decode(self.context, L.llama_batch_get_one(tokens, len(part)))
        token = self._likeliest()
        seconds, steps = time.perf_counter() - began, []
        first = (L.llama_token * 1)()
        for _ in range(self.gen_tokens - 1):
            began = time.perf_counter()
            first[0] = token
            L.llama_decode(self.context, L.llama_batch_get_one(first, 1))
            token = self._likeliest()
            steps.append(time.perf_counter() - began)
        return {"prefill_s": seconds} | ({"decode_s": statistics.median(steps)} if steps else {})

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


KERNELS = {"with": "on", "without": "off"}


def measure_prompts(_: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Return the seconds of a prefill by length and attention kernel, ours and those of bare llama_decode."""
    cases: list[dict[str, Any]] = []
    for n in (16, 64) if args.tiny else args.lengths:
        for words, kernel in KERNELS.items():
            options = EngineOptions(context=n + 1, threads=args.threads, flash_attention=kernel)
            with Engine(args.model, options) as engine:
                prompt = np.random.default_rng(0).integers(0, engine.model.n_vocab, n).tolist()
                sizes = n + 1, min(n, LLAMA_BENCH_BATCH), min(n, LLAMA_BENCH_PART)
                with closing(Bare(engine, *sizes, args.threads, prompt, 1, kernel)) as bare:
                    sides = {"bare": bare.run, "ours": lambda: ours(engine, prompt, 1)}  # noqa: B023
                    result = alternate(sides, args.rounds)
            [row] = compared(result, "ours", "bare")
            cases.append({"tokens": n, "flash_attention": words, "median": medians(result), "compared": row})
    for case in cases:  # the better kernel of llama.cpp, whichever that is at this length
        best = min(other["median"]["bare"]["prefill_s"] for other in cases if other["tokens"] == case["tokens"])
        case["of_better_kernel"] = best / case["median"]["ours"]["prefill_s"]
    return {"cases": cases, "load": os.getloadavg()[0]}


def prompts_text(r: dict[str, Any]) -> str:
    """The result as Markdown."""
    lines = []
    for case in r["cases"]:
        rates = [f"{case['tokens'] / case['median'][side]['prefill_s']:.1f}" for side in ("bare", "ours")]
        words = f"{case['tokens']:,}, {case['flash_attention']}"
        lines.append([words, *rates, ratio_text(case["compared"]), f"{case['of_better_kernel']:.3f}"])
    header = ["tokens, flash attention; tokens/s", "as llama-bench", "ours", "ratio", "ours / better kernel"]
    return table(header, lines) + f"\n\nThe load average was {r['load']:.1f}."


if __name__ == "__main__":
    main()
