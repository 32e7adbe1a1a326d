"""Small models under a memory budget: their matrices have a few pages; also the budgets and their reports."""

import functools
import gc
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from numpy.typing import NDArray

from edge.errors import NotEnoughMemory, WeightsError
from edge.llama import address_space
from edge.llama.address_space import PAGE
from edge.llm.engine import Engine, ModelRunner
from edge.llm.options import EngineOptions
from edge.models import shapes, synth
from edge.weights import budget, reader
from tests.support.helpers import until

# Bytes a second, as `steady_runtime` has them. A disk that keeps up would have weights laid out in files.
speeds = {"read": 1e7, "decode": 4e9, "prompt": 4e10}
Floats = NDArray[np.float32]

MIB = 1 << 20
ALL_FITS = 1 << 30
RUNTIME = 8 * MIB  # what the process holds before it loads anything, as `steady_runtime` has it
OPTIONS = EngineOptions(threads=1, context=64, memory=ALL_FITS, io_threads=2, io_chunk=64 << 10)

_SIZES = {"layers": 4, "embd": 512, "ff": 512, "heads": 8, "kv": 2, "vocab": 2048, "context": 512}
_EXPERTS = {"head_size": 64, "experts": 16, "experts_used": 2, "expert_ff": 256}
FIGURES: dict[str, dict[str, int]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_size": 32},
    "gemma": {"kv": 1, "head_size": 32},
    "gemma2": {"head_size": 32},
    "gemma3": {"kv": 1, "head_size": 32},
    "phi3": {},
    "qwen3moe": _EXPERTS,
    "gpt-oss": _EXPERTS,
}
EXPERTS = [arch for arch, figures in FIGURES.items() if "experts" in figures]
PROMPT = [int(token) for token in np.random.default_rng(5).integers(4, 2048, 24)]


def model(
    factory: pytest.TempPathFactory,
    arch: str = "llama",
    type_name: str = "q4_0",
    head_type: str | None = None,
    *,
    pool_bytes: int | None = None,
    **figures: Any,
) -> Path:
    """Return the path of a small random model. It is written once a session, and tests only read it."""
    sizes = [f"{name}{value}" for name, value in figures.items()]
    words = "-".join((arch, type_name, head_type or "", str(pool_bytes or ""), *sizes))
    folder = factory.getbasetemp() / "paged-models"
    folder.mkdir(exist_ok=True)
    path = folder / f"{words}.gguf"
    if not path.exists():
        shape = shapes.shape(arch, **(_SIZES | FIGURES[arch] | figures))
        synth.synthesize(path, shape, type_name, head_type, pool_bytes=pool_bytes)
    return path


@contextmanager
def steady_runtime(n_bytes: int = RUNTIME) -> Iterator[None]:
    """Let budgets begin with this much: what this process really holds grows from test to test. Let disk and processor
    have known speeds, and memory come in small pages: one huge one has room for all weights of a layer."""
    with (
        mock.patch.object(budget, "own_rss", return_value=n_bytes),
        mock.patch.object(
            budget, "measure_reads", lambda _, threads, chunk, most: (threads or 2, chunk or 64 << 10, speeds["read"])
        ),
        mock.patch.object(budget, "read_rate", return_value=speeds["read"]),
        mock.patch.object(budget, "measure_products", return_value=(speeds["decode"], speeds["prompt"])),
        small_pages(),
    ):
        yield


@contextmanager
def small_pages() -> Iterator[None]:
    """Let no memory come in huge pages."""
    with mock.patch.object(address_space, "HUGE_PAGE", PAGE), mock.patch.object(reader, "HUGE_PAGE", PAGE):
        yield


def refusal(path: Path, options: EngineOptions) -> NotEnoughMemory:
    """Return the error of a load that must not be possible."""
    with steady_runtime(), pytest.raises(NotEnoughMemory) as caught:
        Engine(path, options)
    return caught.value


def named_least(error: NotEnoughMemory) -> int:
    """Bytes of the least budget that the message names."""
    result = re.search(r"needs a budget of at least ([\d,]+) MiB", str(error))
    assert result, error
    return int(result[1].replace(",", "")) * MIB


@functools.cache
def least(path: Path, options: EngineOptions = OPTIONS) -> int:
    """Bytes of the least budget, as a load says that has too little."""
    return named_least(refusal(path, replace(options, memory=2 * RUNTIME)))


@functools.cache
def halfway(path: Path, options: EngineOptions = OPTIONS) -> int:
    """Bytes of a budget between the least and the one in which all fits."""
    with paged(path, ALL_FITS, options) as engine:
        parts = dict(engine.memory.parts)
    parts["runtime"] = RUNTIME + budget._MARGIN
    return (least(path, options) + sum(parts.values())) // 2


def paged(path: Path, memory: int, options: EngineOptions = OPTIONS, **more: Any) -> Engine:
    """The model under a budget, of which `RUNTIME` is gone."""
    with steady_runtime():
        return Engine(path, replace(options, memory=memory, **more))


def resident(path: Path, options: EngineOptions = OPTIONS, *, repack: bool = True) -> Engine:
    """The same model as llama.cpp holds it."""
    return Engine(path, unpaged(options, repack=repack))


def unpaged(options: EngineOptions = OPTIONS, *, repack: bool = True) -> EngineOptions:
    """The same without a budget."""
    return replace(options, repack=repack, memory=None, window=None, io_threads=None, io_chunk=None, verify=False)


def streams(engine: ModelRunner) -> bool:
    """Return whether some weights are read again and again."""
    assert engine.paging is not None
    plan = engine.paging.plan
    return bool(plan.streamed or plan.expert_room)


def answer(
    engine: Engine, prompt: list[int] = PROMPT, n: int = 12, *, start: int = 0, sequence: int = 0, chunk: int = 16
) -> Floats:
    """Logits [n, n_vocab] of the most likely tokens after a prompt; rounding apart, nobody else could say the same."""
    step = min(chunk, engine.batch)
    for first in range(0, len(prompt), step):
        logits = engine.decode(prompt[first : first + step], start + first, sequence=sequence)
    rows = [logits.copy()]
    for position in range(start + len(prompt), start + len(prompt) + n - 1):
        rows.append(engine.decode([int(rows[-1].argmax())], position, sequence=sequence).copy())
    return np.stack(rows)


@functools.cache
def resident_answer(path: Path, repack: bool = True, chunk: int = 16) -> Floats:
    """`answer` of the model as llama.cpp holds it."""
    with resident(path, repack=repack) as engine:
        return answer(engine, chunk=chunk)


# A model that is running while its file is damaged.

Read = Callable[[int, list[memoryview], int], int]


def weight_threads() -> list[threading.Thread]:
    """Those that read weights now."""
    return [thread for thread in threading.enumerate() if thread.name == "weights"]


def descriptors(*paths: Path) -> list[str]:
    """Those of files that this process still has."""
    gc.collect()
    target = {(stat.st_dev, stat.st_ino) for stat in map(os.stat, paths)}
    return [item for item in os.listdir("/proc/self/fd") if _file_of(int(item)) in target]


def _file_of(descriptor: int) -> tuple[int, int]:
    try:
        stat = os.fstat(descriptor)
    except OSError:  # the one that listed them
        return 0, 0
    return stat.st_dev, stat.st_ino


def expected(original: Path, engine: Engine) -> Floats:
    """Return what it would answer if nothing were wrong."""
    return resident_answer(original, True, min(16, engine.batch))


def goes_on(engine: Engine, original: Path, n: int = 6) -> None:
    """Compute the second to the last token again, and see that they are right."""
    right = expected(original, engine)
    assert engine.kv_remove(0, len(PROMPT))
    for i in range(1, n):
        logits = engine.decode([int(right[i - 1].argmax())], len(PROMPT) + i - 1)
        np.testing.assert_array_equal(logits, right[i])


def fails(engine: Engine, *words: str) -> None:
    """The next token cannot be computed, and the error has these words."""
    engine.kv_remove(0, len(PROMPT))

    def decode_some() -> None:
        for i in range(4):  # what was read ahead may still be right
            engine.decode([7], len(PROMPT) + i)

    with pytest.raises(WeightsError) as caught:
        decode_some()
    for word in words:
        assert word in str(caught.value)


@contextmanager
def reads(read: Read) -> Iterator[None]:
    """Let `read` be what the system does for `os.preadv`."""
    with mock.patch.object(os, "preadv", read):
        yield


def idle(engine: Engine) -> None:
    """Wait until the window is full, and nothing is read for now."""
    assert engine.paging is not None
    its = engine.paging.reader
    until(lambda: not (its._at_work or its._urgent or its._ahead), "reading ahead ends")
