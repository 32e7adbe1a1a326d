"""One side of bench_prefixes.py: a process that answers prompts with an engine that restarts each time.

    python benchmarks/prefixes_side.py SIDE SIDES    (started by bench_prefixes.py)

Methods are commands; they take and return JSON.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, redirect_stderr, suppress
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from llama_cpp.llama_cache import LlamaDiskCache

from benchmarks.distributed_side import Side
from benchmarks.processes import serve
from benchmarks.raw_disk import forget
from edge.llama import llama
from edge.llm.continuation import Request
from edge.llm.engine import Engine
from edge.llm.generate import generate
from edge.llm.options import PrefixOptions
from edge.llm.sampler import SamplingParams
from edge.llm.scheduler import Scheduler
from partition.plan.plan import Range
from partition.state.sequence import KVBlock, LayerRows

GREEDY = SamplingParams(temperature=0)
WARM = list(range(10, 42))  # tokens that make an engine touch its weights and buffers
FLUSH_S = 60.0


class PrefixSide(Side):
    """An engine of ours, alone or spread, or stock llama-cpp-python, beside a folder of what is kept."""

    def begin(self, kind: str, model: str, folder: str, options: dict[str, Any], **spread: Any) -> None:
        """Start what `answers` uses. kind: ours, spread (over `worker`, which runs on `core`), or stock."""
        self._kind, self._model, self._folder, self._spread = kind, model, Path(folder), spread
        self._options = options

    def answers(self, prompts: dict[str, list[int]], folders: list[str]) -> dict[str, float]:
        """Answer each prompt by an engine that begins anew, in order: `<name>_s` to the first token, `<name>_computed`
        tokens, and `<name>_keep_s` until the model was free again. What is in the folders comes from the disk."""
        answer: Callable[[list[int], Sequence[str]], dict[str, float]]
        answer = self._stock if self._kind == "stock" else self._ours
        return {
            f"{name}{key}": value
            for name, prompt in prompts.items()
            for key, value in answer(prompt, [*folders, str(self._folder)]).items()
        }

    # --- one answer ---

    def _start(self) -> Any:
        saved = PrefixOptions(folder=self._folder / "kept", key_folder=self._folder / "own")
        options = {**self._options, "prefixes": saved}
        if self._kind == "spread":
            self.deploy("engine", self._model, options=options, **self._spread)
        else:
            self.load("engine", self._model, options)
        engine = self._engines["engine"]
        engine.model.is_end = lambda token: False  # random weights may end an answer before it begins
        return engine

    def conversation(self, prompts: dict[str, list[int]], folders: list[str]) -> dict[str, float]:
        """As `answers`, by one engine that begins anew before the first."""
        scheduler = Scheduler(self._warm(folders), slots=1, keep=True)
        results = {
            f"{name}{key}": value
            for name, prompt in prompts.items()
            for key, value in _answer(scheduler, prompt).items()
        }
        self.drop("engine")
        return results

    def _warm(self, folders: Sequence[str]) -> Any:
        engine = self._start()
        engine.decode(WARM, 0)
        engine.kv_clear()
        cold([*folders, str(self._folder)])
        return engine

    def _ours(self, prompt: list[int], folders: Sequence[str]) -> dict[str, float]:
        result = _answer(Scheduler(self._warm(folders), slots=1, keep=True), prompt)
        self.drop("engine")
        return result

    def _stock(self, prompt: list[int], folders: Sequence[str]) -> dict[str, float]:
        """As `Llama.create_completion` does with a cache, up to the first token."""
        llama.initialise()  # without kernels for AMX, which some compilers get wrong
        threads, context = self._options["threads"], self._options["context"]
        batch = self._options["batch"]
        stock = llama_cpp.Llama(
            self._model, n_ctx=context, n_batch=batch, n_ubatch=batch, n_threads=threads, n_threads_batch=threads,
            verbose=False,
        )  # fmt: skip
        cache = LlamaDiskCache(str(self._folder / "stock"))
        with closing(stock), closing(cache.cache):
            stock.eval(WARM)
            stock.reset()
            cold(folders)
            began = time.perf_counter()
            with suppress(KeyError):  # nothing is kept yet
                stock.load_state(cache[prompt])
            current = llama_cpp.Llama.longest_token_prefix(stock._input_ids.tolist(), prompt[:-1])
            token = next(stock.generate(prompt, temp=0.0))
            answered = time.perf_counter()
            with redirect_stderr(io.StringIO()):  # what it does, in print
                cache[[*prompt, token]] = stock.save_state()
            saved = time.perf_counter()
        return {"_s": answered - began, "_computed": len(prompt) - current, "_keep_s": saved - answered}

    # --- reading ---

    def fill(self, tokens: int) -> dict[str, float]:
        """Keep random keys and values of so many tokens, as if a prompt had been computed."""
        engine: Engine = self._start()
        states, rng = engine.states, np.random.default_rng(0)
        assert states.sealed is not None
        self._hashes = states.block_hashes(range(tokens))
        for start in range(0, len(self._hashes) * states.block, states.block):
            rows = tuple(
                LayerRows(
                    rng.integers(0, 60, (states.block, layer.key_bytes), np.uint8),
                    rng.integers(0, 60, (states.block, layer.value_bytes), np.uint8),
                )
                for layer in states.shape.layers
            )
            states.write(0, KVBlock(Range(start, start + states.block), rows))
        states.keep(0, 0, self._hashes)
        states.sealed.flush(FLUSH_S)
        n_bytes = len(self._hashes) * states.block * states.shape.token_bytes
        return {"state_bytes": n_bytes, "dropped": states.sealed.dropped_blocks}

    def read(self, is_cold: bool) -> dict[str, float]:
        """Read all of that into the empty cache, from the disk or from the page cache: bytes a second."""
        engine: Engine = self._engines["engine"]
        states = engine.states
        engine.kv_clear()
        if is_cold:
            cold([str(self._folder)])
        began = time.perf_counter()
        blocks = states.restore(0, 0, self._hashes)
        took_s = time.perf_counter() - began
        if blocks < len(self._hashes):
            raise RuntimeError(f"{blocks} of {len(self._hashes)} blocks were read")
        return {"bytes_per_s": blocks * states.block * states.shape.token_bytes / took_s}

    def files(self, is_cold: bool, threads: int) -> dict[str, float]:
        """Read the files alone, as `cat` would: what no reader of these files can pass."""
        paths = sorted((self._folder / "kept").glob("*.kv"))
        if is_cold:
            cold([str(self._folder)])
        began = time.perf_counter()
        with ThreadPoolExecutor(threads) as pool:
            n_bytes = sum(pool.map(lambda path: len(path.read_bytes()), paths))
        return {"bytes_per_s": n_bytes / (time.perf_counter() - began)}


def _answer(scheduler: Scheduler, prompt: list[int]) -> dict[str, float]:
    responses = generate(scheduler, Request(prompt, 1, GREEDY))
    first = next(responses)
    answered = time.perf_counter()
    for _ in responses:
        pass
    return {
        "_s": first.timing.ttft_s,
        "_computed": first.usage.prompt_tokens - first.usage.cached_tokens,
        "_keep_s": time.perf_counter() - answered,
    }


def cold(folders: Sequence[str]) -> None:
    """Have what is in these folders come from the disk."""
    forget(*(path for folder in folders for path in Path(folder).rglob("*") if path.is_file()))


if __name__ == "__main__":
    serve(PrefixSide())
