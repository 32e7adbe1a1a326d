"""Our decode and prefill beside a bare llama_decode loop, alternating in one process on one loaded file.

    python benchmarks/bench_engine.py [--rounds 9] [--json]

The bare loop is llama.cpp's C interface with nothing around it: the limit for anything built on it. Both sides have a
context of their own over the same weights, greedy sampling included (the likeliest of the logits). Ratios are of the
medians over all rounds; ours should reach 0.98. By default on a random file of TinyLlama-1.1B's shape at Q4_0.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import llama_cpp as L
import numpy as np

from devices.probe import default_threads, memory_bandwidth_gbps
from edge.llama import llama
from edge.llm.engine import Engine
from edge.llm.generate import generate
from edge.llm.options import EngineOptions
from edge.llm.sampler import SamplingParams
from edge.llm.sequence import Session
from edge.models import synth
from edge.models.presets import SHAPES
from partition.model.model import decode_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="GGUF file (default: a random one of TinyLlama-1.1B's shape)")
    parser.add_argument("--threads", type=int, default=default_threads())
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--gen-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = args.model
        if path is None:
            path = Path(folder) / "tinyllama-1.1b-q4_0.gguf"
            synth.synthesize(path, SHAPES["tinyllama-1.1b"], "q4_0", "q8_0")
        result = compare(path, args)
    print(json.dumps(result) if args.json else table(result))


def compare(path: Path, args: argparse.Namespace) -> dict[str, object]:
    """Medians of both sides, and their ratios."""
    n, m = args.prompt_tokens, args.gen_tokens
    options = EngineOptions(context=n + m, batch=n, threads=args.threads)
    with Engine(path, options) as engine:
        engine.model.is_end = lambda token: False  # both sides generate the full length
        prompt = np.random.default_rng(0).integers(0, engine.model.n_vocab, n).tolist()
        sides: dict[str, Callable[[], tuple[float, list[float]]]] = {
            "bare": Bare(engine, n + m, n, args.threads, prompt, m).run,
            "ours": lambda: ours(engine, prompt, m),
        }
        prefill: dict[str, list[float]] = {name: [] for name in sides}
        decode: dict[str, list[float]] = {name: [] for name in sides}
        for turn in range(args.rounds + 1):
            for name in sorted(sides, reverse=bool(turn % 2)):  # who goes first alternates
                seconds, steps = sides[name]()
                if turn:  # the first round is the warm-up
                    prefill[name].append(seconds)
                    decode[name] += steps
        bytes_read = decode_bytes(engine.file, engine.shape)
    prefill_rate = {name: n / statistics.median(s) for name, s in prefill.items()}
    decode_ms = {name: statistics.median(s) * 1e3 for name, s in decode.items()}
    return {
        "model": path.name,
        "machine": f"{platform.processor() or platform.machine()}, {args.threads} threads",
        "versions": f"Python {platform.python_version()}, llama-cpp-python {L.__version__}",
        "system_info": llama.system_info(),
        "prefill_tokens_per_s": prefill_rate,
        "decode_ms": decode_ms,
        "prefill_ratio": prefill_rate["ours"] / prefill_rate["bare"],
        "decode_ratio": decode_ms["bare"] / decode_ms["ours"],
        "decode_gbps": bytes_read / decode_ms["ours"] / 1e6,
        "memory_gbps": memory_bandwidth_gbps(args.threads),
        "rounds": args.rounds,
    }


def ours(engine: Engine, prompt: list[int], gen_tokens: int) -> tuple[float, list[float]]:
    """Seconds of a prefill and of each following token, through the whole of `generate`, text included."""
    engine.kv_clear()
    stamps = [time.perf_counter()]
    for _ in generate(
        Session(engine), prompt, SamplingParams(temperature=0, allow_repetition=True), max_tokens=gen_tokens
    ):
        stamps.append(time.perf_counter())
    stamps.pop()  # the last response carries no token
    return stamps[1] - stamps[0], [b - a for a, b in itertools.pairwise(stamps[1:])]


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

    def run(self) -> tuple[float, list[float]]:
        """Seconds of a prefill with its first token, and of each following token."""
        L.llama_memory_clear(self.memory, True)
        tokens = (L.llama_token * len(self.prompt))(*self.prompt)
        began = time.perf_counter()
        L.llama_decode(self.context, L.llama_batch_get_one(tokens, len(self.prompt)))
        token = self._likeliest()
        seconds, steps = time.perf_counter() - began, []
        one = (L.llama_token * 1)()
        for _ in range(self.gen_tokens - 1):
            began = time.perf_counter()
            one[0] = token
            L.llama_decode(self.context, L.llama_batch_get_one(one, 1))
            token = self._likeliest()
            steps.append(time.perf_counter() - began)
        return seconds, steps

    def _likeliest(self) -> int:
        logits = L.llama_get_logits_ith(self.context, -1)
        return int(np.ctypeslib.as_array(logits, shape=(self.n_vocab,)).argmax())


def table(r: dict[str, object]) -> str:
    """The result as Markdown."""
    prefill, decode = r["prefill_tokens_per_s"], r["decode_ms"]
    assert isinstance(prefill, dict)
    assert isinstance(decode, dict)
    return "\n".join(
        (
            f"{r['model']}, {r['machine']}, {r['versions']}, {r['rounds']} rounds",
            "",
            "| | bare llama_decode | ours | ratio |",
            "| --- | ---: | ---: | ---: |",
            f"| prefill, tokens/s | {prefill['bare']:.1f} | {prefill['ours']:.1f} | {r['prefill_ratio']:.3f} |",
            f"| decode, ms/token | {decode['bare']:.2f} | {decode['ours']:.2f} | {r['decode_ratio']:.3f} |",
            "",
            f"Decode reads {r['decode_gbps']:.1f} GB/s; memory alone gives {r['memory_gbps']:.1f} GB/s.",
        )
    )


if __name__ == "__main__":
    main()
