"""Test a thin owner's engine: it has no layer, tracks the positions that other ranks hold, and needs little memory."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edge.errors import EngineError, NotEnoughMemory
from edge.llama.llama import Model
from edge.llm.options import EngineOptions
from edge.models.demo import MODEL_PATH
from edge.parallel.shard import Shard
from edge.parallel.thin import PositionStates, ThinEngine
from edge.parallel.topology import place
from edge.weights.memory import MIB
from partition.architectures.table import RULES
from partition.errors import StateError
from partition.model.file import ModelFile
from partition.plan.plan import Range
from partition.slices.rules import has_windows
from partition.state.sequence import KVBlock
from tests.support.slices import synthetic

OPTIONS = EngineOptions(threads=1, context=128, batch=32, outputs=32, sequences=2)


@pytest.fixture
def thin() -> Iterator[ThinEngine]:
    with opened(MODEL_PATH) as engine:
        yield engine


@contextmanager
def opened(path: Path) -> Iterator[ThinEngine]:
    with vocabulary(path) as model, closing(ThinEngine(ModelFile.open(path), OPTIONS, model)) as engine:
        yield engine


def vocabulary(path: Path = MODEL_PATH) -> closing[Model]:
    return closing(Model(path, vocabulary_only=True))


def decode(engine: ThinEngine, n: int, start: int = 0, sequence: int = 0) -> None:
    for at in range(start, start + n, engine.batch):
        rows = min(engine.batch, start + n - at)
        batch = engine.rows
        batch.sequences[:rows], batch.positions[:rows], batch.outputs[:rows] = sequence, range(at, at + rows), 0
        engine.decode_rows(batch, rows)


def test_it_accounts_for_the_process_and_what_crosses(thin: ThinEngine) -> None:
    parts = thin.memory.parts
    assert (parts["weights"], parts["KV cache"], parts["output buffer"]) == (0, 0, 0)
    assert parts["compute buffers"] == 4 * 32 * thin.shape.n_embd
    assert 0 < parts["runtime"] == thin.memory.total - parts["compute buffers"]
    assert (thin.gpu_layers, thin.paging) == (None, None)


def test_a_budget_below_the_process_is_refused() -> None:
    words = "holds no layer, and needs .* MiB .* 1 MiB are available: .* --memory"
    with vocabulary() as model, pytest.raises(NotEnoughMemory, match=words):
        ThinEngine(ModelFile.open(MODEL_PATH), EngineOptions(memory=MIB), model)


def test_a_worker_is_no_thin_owner() -> None:
    with pytest.raises(EngineError, match="nothing to load on another device"):
        Shard(ModelFile.open(MODEL_PATH), OPTIONS, place(0, [0, 1]))


def test_nothing_counts_as_computing() -> None:
    """Else noise would be taken for a device that became slow."""
    with (
        vocabulary() as model,
        closing(Shard(ModelFile.open(MODEL_PATH), OPTIONS, place(0, [0, 1]), vocabulary=model)) as it,
    ):
        it.rows.positions[:3], it.rows.sequences[:3], it.rows.outputs[:3] = range(3), 0, 0
        it.begin()
        it.compute(3)
        assert it.end(it.time_of(3)).compute_s == 0
        assert it.engine.kv_last(0) == 2


def test_it_reads_what_all_ranks_hold(thin: ThinEngine) -> None:
    decode(thin, 20)
    assert thin.states.read(0, Range(4, 20)) == KVBlock(Range(4, 20), ())
    for positions, sequence in ((Range(4, 21), 0), (Range(0, 1), 1)):
        with pytest.raises(StateError, match="but the ranks hold"):
            thin.states.read(sequence, positions)
    thin.kv_remove(0, 0, 8)
    thin.kv_shift(0, 8, -1, -8)
    with pytest.raises(EngineError, match="decode a token before they are read"):
        thin.states.read(0, Range(0, 8))
    decode(thin, 1, start=12)
    assert thin.kv_last(0) == 12
    thin.states.read(0, Range(0, 13))
    thin.kv_remove(0, 5)
    with pytest.raises(StateError):
        thin.states.read(0, Range(0, 6))


def test_what_is_written_is_held(thin: ThinEngine) -> None:
    thin.states.write(1, KVBlock(Range(0, 16), ()))
    assert thin.kv_last(1) == 15
    with pytest.raises(EngineError, match="no room in the KV cache of 128 tokens"):
        thin.states.write(1, KVBlock(Range(120, 129), ()))


def test_blocks_are_kept_by_others_once_it_can_name_them(thin: ThinEngine) -> None:
    states = thin.states
    assert isinstance(states, PositionStates)
    names = [bytes(32)] * 3
    assert (states.keeps, states.n_cached(names), states.restore(0, 0, names)) == (False, 0, 0)
    assert thin.kv_last(0) == -1
    states.history_key = bytes(range(32))
    assert (states.keeps, states.n_cached(names), states.restore(0, 0, names)) == (True, 3, 3)
    assert thin.kv_last(0) == 3 * states.block - 1
    assert states.describe() == "on the disks of the other devices"


@pytest.mark.parametrize(
    ("arch", "shifts", "knows"),
    [("llama", True, True), ("gemma2", False, False), ("mamba2", False, False), ("gpt2", False, True)],
)
def test_what_it_knows_of_other_caches(arch: str, shifts: bool, knows: bool, tmp_path: Path) -> None:
    path = synthetic(tmp_path / f"{arch}.gguf", arch, vocab=320, embd=64, ff=64)
    with opened(path) as engine:
        assert (engine.can_shift, engine.knows_removals) == (shifts, knows)


def test_architectures_with_windows_by_default_have_them_without_a_key() -> None:
    for arch, rules in RULES.items():
        for window in (None, 0, 64):
            metadata = {} if window is None else {f"{arch}.attention.sliding_window": window}
            file: Any = SimpleNamespace(architecture=arch, metadata=metadata)
            assert has_windows(file) == (bool(window) or rules.window is not None), (arch, window)


def test_what_a_window_may_have_dropped_is_not_read(tmp_path: Path) -> None:
    path = synthetic(tmp_path / "gemma2.gguf", "gemma2")
    with opened(path) as engine:
        window = engine.file.metadata["gemma2.attention.sliding_window"]
        assert isinstance(window, int)
        decode(engine, window + 8)
        block = engine.states.most_read
        engine.states.read(0, Range(window + 8 - block, window + 8))
        engine.states.read(0, Range(8, 9))
        with pytest.raises(StateError, match="but the ranks hold 8 to"):
            engine.states.read(0, Range(7, 8))
