"""Test the memory budget: the error names the smallest one, which works; memory never exceeds it; and each option has
its effect.
"""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from edge.errors import EngineError, NotEnoughMemory
from edge.llama.buffers import CallerBuffer
from edge.llama.llama import Model
from edge.llm.engine import Engine
from edge.llm.options import EngineOptions, PrefixOptions
from edge.llm.states import held_bytes
from edge.speculate.choice import MOST_ROWS
from edge.speculate.factory import with_room
from edge.weights import budget, measure
from edge.weights.direct_file import DirectFile
from edge.weights.load import load_stub
from edge.weights.plan import ReadOptions, least_parts, plan
from edge.weights.reader import Reader
from edge.weights.roles import Roles, sort_weights
from partition.model.file import ModelFile
from partition.model.model import ModelShape
from partition.predict.paging import Speed
from quant.gguf.file import GgufFile
from tests.engine.paging.conftest import MakeModel
from tests.support import paging
from tests.support.paging import ALL_FITS, FIGURES, MIB, OPTIONS, PROMPT, answer, least, paged, weight_threads
from tests.support.thorough import each_once, thorough

# The least budget.


@pytest.fixture
def sorted_weights() -> Iterator[Callable[[Path, bool], Roles]]:
    """`sorted_weights(path, repack)`: the roles of a model's weights, none of which is in memory."""
    loaded: list[tuple[Model, CallerBuffer, DirectFile]] = []

    def load(path: Path, repack: bool) -> Roles:
        file = GgufFile.open(path)
        model, own = load_stub(file)
        opened = DirectFile(path, path.stat().st_size)
        loaded.append((model, own, opened))
        sources = {name: (opened, tensor.offset) for name, tensor in file.tensors.items()}
        return sort_weights(own.weights, sources, repack=repack, tokens=True)

    yield load
    for model, own, opened in loaded:
        model.close()
        own.close()
        opened.close()


@pytest.mark.parametrize(("type_name", "repack"), each_once(["q4_0", "f16"], [True, False]))
@pytest.mark.parametrize(
    "arch", ["llama", "gpt-oss", *thorough(*(arch for arch in FIGURES if arch not in ("llama", "gpt-oss")))]
)
def test_the_least_parts_are_enough_to_the_byte(
    make_model: MakeModel, sorted_weights: Callable[[Path, bool], Roles], arch: str, type_name: str, repack: bool
) -> None:
    roles = sorted_weights(make_model(arch, type_name), repack)
    for window in (None, 3 * MIB):
        read = ReadOptions(2, 64 << 10, window)
        need = sum(least_parts(roles, read, 16, 4).values())
        for more in (0, 4096, 100_000, 1 * MIB, 3 * MIB, 10 * MIB, 100 * MIB):
            share = plan(roles, need + more, read, Speed(1e9, 4e9), 16, 4)
            assert sum(share.parts.values()) <= need + more
            assert len({piece.name for piece in share.resident}) == len(share.resident)
            assert window is None or share.window == (window if share.streamed else 0)
            stays, goes = set(share.resident), set(share.streamed)
            everything = {*roles.factors, *roles.rest} - stays - goes
            assert not everything
            assert not stays & goes
            if roles.experts and not share.expert_room:
                assert {piece for pieces in roles.experts.values() for piece in pieces} <= stays


def test_too_small_a_budget_is_refused_with_the_least_and_its_parts(make_model: MakeModel) -> None:
    path = make_model("qwen3moe")
    error = paging.refusal(path, replace(OPTIONS, memory=20 * MIB))
    message = str(error)
    assert ModelShape.from_gguf(GgufFile.open(path)).name in message
    assert "20 MiB were given" in message
    assert "Use a larger --memory" in message
    parts = {name: int(n) for name, n in re.findall(r"([a-zA-Z ]+) ([\d,]+)(?=[,)])", message.split("(", 1)[1])}
    assert {name.strip() for name in parts} == {
        *("runtime", "KV cache", "compute buffers", "output buffer", "resident weights"),
        *("window", "read buffers", "token rows", "experts"),
    }
    assert abs(sum(parts.values()) - paging.named_least(error) / MIB) <= len(parts) / 2 + 1  # each is rounded


def test_too_small_a_budget_names_the_options_that_save_enough_and_their_bytes(
    make_model: MakeModel, tmp_path: Path
) -> None:
    path = make_model()
    prefixes = PrefixOptions(folder=tmp_path / "prefixes", key_folder=tmp_path / "keys")
    plain = replace(OPTIONS, sequences=1, outputs=None)
    greedy = replace(with_room(plain, "auto"), prefixes=prefixes)
    n_vocab = ModelShape.from_gguf(GgufFile.open(path)).n_vocab
    drafts = 2 * 4 * n_vocab * (min(MOST_ROWS, plain.rows) - 1)
    current = held_bytes(ModelShape.from_gguf(GgufFile.open(path)))
    assert greedy.draft_rows == MOST_ROWS - 1
    with_all, without = least(path, greedy), least(path, plain)
    assert abs(with_all - without - drafts - current) <= MIB  # each least is rounded up to a MiB
    message = str(paging.refusal(path, replace(greedy, memory=with_all - MIB)))
    assert f"It fits with --prefix-cache 0 (saves {current / MIB:.1f} MiB); or use a larger --memory" in message
    assert "draft off" not in message  # that is not needed
    paged(path, with_all - MIB, greedy, prefixes=None).close()  # it does fit with that
    message = str(paging.refusal(path, replace(greedy, memory=2 * paging.RUNTIME)))
    assert f"and --draft off (saves {drafts / MIB:.1f} MiB) would not be enough" in message
    assert "--prefix-cache" not in str(paging.refusal(path, replace(plain, memory=without - MIB)))


def test_without_a_draft_model_its_bytes_are_saved_too(make_model: MakeModel) -> None:
    path = make_model()
    plain = replace(OPTIONS, sequences=1, outputs=None)
    drafting = with_room(replace(plain, memory=MIB), ModelFile.open(path))  # the model drafts for itself
    with_all, without = least(path, drafting), least(path, plain)
    message = str(paging.refusal(path, replace(drafting, memory=with_all - MIB)))
    saved = re.search(r"It fits with --draft off \(saves ([\d.]+) MiB\)", message)
    assert saved is not None, message
    assert abs(float(saved[1]) - (with_all - without) / MIB) <= 1
    assert drafting.draft_bytes > path.stat().st_size
    assert re.search(rf"draft model {drafting.draft_bytes / MIB:,.0f}\b", message)
    paged(path, with_all - MIB, plain).close()


def test_advice_names_no_more_options_than_are_needed() -> None:
    savings = {"--prefix-cache 0": 10 * MIB, "--draft off": 5 * MIB, "--context 512": 40 * MIB}
    first, second = "--prefix-cache 0 (saves 10.0 MiB)", "--draft off (saves 5.0 MiB)"
    assert budget._advice(10 * MIB, savings).startswith(f"It fits with {first}; or use")
    assert budget._advice(10 * MIB + 1, savings).startswith(f"It fits with {first} and {second}; or use")
    third = "--context 512 (saves 40.0 MiB)"
    assert budget._advice(55 * MIB, savings).startswith(f"It fits with {first}, {second} and {third}; or use")
    assert budget._advice(56 * MIB, savings).startswith(f"{first}, {second} and {third} would not be enough: use")
    assert budget._advice(MIB, {}) == "Use a larger --memory, a smaller --batch or --kv-type"


@pytest.mark.parametrize("given_mib", [9, 12, 24])
def test_the_least_that_is_named_does_not_depend_on_what_was_given(make_model: MakeModel, given_mib: int) -> None:
    path = make_model()
    error = paging.refusal(path, replace(OPTIONS, memory=given_mib * MIB))
    assert paging.named_least(error) == least(path)


def test_a_byte_less_than_the_least_by_a_mebibyte_is_refused(make_model: MakeModel) -> None:
    path = make_model()
    paged(path, least(path)).close()
    error = paging.refusal(path, replace(OPTIONS, memory=least(path) - MIB))
    assert paging.named_least(error) == least(path)


@pytest.mark.parametrize("batch", [1, 3, 32])
def test_the_least_has_room_for_the_experts_of_a_batch_that_is_an_option(make_model: MakeModel, batch: int) -> None:
    path, options = make_model("qwen3moe"), replace(OPTIONS, batch=batch)
    with paged(path, least(path, options), options) as engine:
        assert engine.batch == batch
        answer(engine)
    paging.refusal(path, replace(options, memory=least(path, options) - MIB))


def test_the_least_that_is_named_works_and_less_does_not(make_model: MakeModel) -> None:
    """Whatever the process holds already, to a part of a mebibyte."""
    path = make_model()
    for number in range(paging.RUNTIME, paging.RUNTIME + MIB, 90_001):
        with paging.steady_runtime(number):
            with pytest.raises(NotEnoughMemory) as caught:
                Engine(path, replace(OPTIONS, memory=16 * MIB))
            named = paging.named_least(caught.value)
            Engine(path, replace(OPTIONS, memory=named)).close()
            with pytest.raises(NotEnoughMemory):
                Engine(path, replace(OPTIONS, memory=named - MIB))


@pytest.mark.parametrize("read", [1e5, 1e12])
@pytest.mark.parametrize("arch", ["llama", "qwen3moe"])
def test_what_is_measured_never_makes_the_least_budget_too_small(
    make_model: MakeModel, monkeypatch: pytest.MonkeyPatch, arch: str, read: float
) -> None:
    """A slow disk asks for long batches, a parallel one for many buffers: as far as there is room."""
    path = make_model(arch)
    options = replace(OPTIONS, io_threads=None, io_chunk=None, batch=None)
    lowest = least(path, options)
    monkeypatch.setitem(paging.speeds, "read", read)
    with paging.steady_runtime(), mock.patch.object(budget, "measure_reads", return_value=(4, 4 * MIB, read)):
        engine = Engine(path, replace(options, memory=lowest))
    with engine:
        assert engine.memory.total <= lowest
        answer(engine, n=2)


def test_a_slow_disk_makes_longer_batches(make_model: MakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_model("llama", "f16", ff=4096)
    options = replace(OPTIONS, batch=None, context=512)
    memory = paging.halfway(path, options)
    batches = []
    for read in (1e12, 1e6):
        monkeypatch.setitem(paging.speeds, "read", read)
        with paged(path, memory, options) as engine:
            assert paging.streams(engine)
            batches.append(engine.batch)
    assert batches == [128, 512]


def test_disk_and_processor_are_measured(make_model: MakeModel, sorted_weights: Callable[[Path, bool], Roles]) -> None:
    piece = sorted_weights(make_model(), True).factors[0]
    for threads, chunk in ((1, 4096), (3, None), (None, 128 << 10)):
        n, size, rate = measure.measure_reads(piece, threads, chunk, 1 << 30)
        assert n == threads or (threads is None and n in {threads for threads, _ in measure._SETTINGS})
        assert size == chunk or (chunk is None and size in {chunk for _, chunk in measure._SETTINGS})
        assert 1e5 < rate < 1e12
    decode, prompt = measure.measure_products(piece, 1)
    assert 1e6 < decode < prompt < 1e13


# Contexts.


def test_a_cache_larger_than_the_budget_is_refused_with_both(make_model: MakeModel) -> None:
    path = make_model(context=1 << 18)
    with pytest.raises(NotEnoughMemory, match=r"at least \d+ MiB \(.*KV cache 512, .*; 64 MiB were given.* --context"):
        paged(path, 64 * MIB, context=1 << 18)


def test_a_context_that_is_not_asked_for_fits_the_budget(make_model: MakeModel) -> None:
    path = make_model(context=1 << 18)  # 2 KiB a token
    contexts = {mib: context(path, mib) for mib in (44, 48, 1024)}
    assert contexts[1024] == 4096
    assert 512 <= contexts[44] <= contexts[48] < 4096
    assert contexts[44] * 2048 * 8 <= 44 * MIB
    assert context(path, 48, kv_type="q8_0") > contexts[48] // 2


def context(path: Path, mib: int, **more: Any) -> int:
    with paged(path, mib * MIB, context=None, batch=16, **more) as engine:
        assert engine.memory.total <= mib * MIB
        return engine.context


# Options.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory": 0}, "memory must be from 1 to"),
        ({"memory": 1 << 61}, "memory must be from 1 to"),
        ({"memory": MIB, "window": 0}, "window must be from 1 to"),
        ({"memory": MIB, "io_threads": 0}, "io_threads must be from 1 to 64, got 0"),
        ({"memory": MIB, "io_threads": 65}, "io_threads must be from 1 to 64, got 65"),
        ({"memory": MIB, "io_chunk": 0}, "io_chunk must be from 1 to"),
        ({"memory": MIB, "io_chunk": 1 << 30}, "io_chunk must be from 1 to"),
        ({"memory": MIB, "gpu_layers": 2, "lora": ["a.gguf"]}, "leave lora or gpu_layers out"),
        ({"window": MIB}, "need a memory budget; set memory"),
        ({"io_threads": 1}, "need a memory budget; set memory"),
        ({"io_chunk": 4096}, "need a memory budget; set memory"),
        ({"verify": True}, "need a memory budget; set memory"),
    ],
    ids=str,
)
def test_options_out_of_their_range_or_without_a_budget(options: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        EngineOptions(**options)


def test_options_within_their_range() -> None:
    EngineOptions(memory=1, window=1, io_threads=64, io_chunk=256 * MIB, verify=True, gpu_layers=0)


def test_a_window_that_is_given_is_kept(make_model: MakeModel) -> None:
    path = make_model()
    for window in (600 << 10, 900 << 10):
        with paged(path, paging.halfway(path), window=window) as engine:
            assert engine.paging is not None
            assert engine.paging.plan.window == engine.memory.parts["window"] == window
            answer(engine, n=2)


def test_a_window_that_cannot_be_is_refused(make_model: MakeModel) -> None:
    path = make_model()
    with pytest.raises(NotEnoughMemory, match=r"cannot hold the largest matrix, .*; use a larger --window"):
        paged(path, paging.halfway(path), window=1000)
    error = paging.refusal(path, replace(OPTIONS, memory=least(path), window=64 * MIB))
    assert paging.named_least(error) > 64 * MIB


def test_as_many_threads_read_as_are_asked_for(make_model: MakeModel) -> None:
    path = make_model()
    for n in (1, 5):
        with paged(path, ALL_FITS, io_threads=n):
            assert len(weight_threads()) == n


def test_chunks_are_as_long_as_asked_for(make_model: MakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_model()
    lengths: list[int] = []
    preadv = os.preadv

    def noted(descriptor: int, into: Sequence[memoryview], offset: int) -> int:
        lengths.append(sum(map(len, into)))
        return preadv(descriptor, into, offset)

    monkeypatch.setattr(os, "preadv", noted)
    for chunk in (16 << 10, 128 << 10):
        lengths.clear()
        with paged(path, ALL_FITS, io_chunk=chunk):
            pass
        assert chunk // 2 < max(lengths) <= chunk + 2 * 4096


def test_all_parts_are_said_and_add_up(make_model: MakeModel) -> None:
    path = make_model("qwen3moe")
    with paged(path, paging.halfway(path)) as engine:
        memory = engine.memory
        assert memory.budget == paging.halfway(path)
        assert memory.total == sum(memory.parts.values()) <= memory.budget
        assert engine.paging is not None
        assert memory.parts["experts"] == engine.paging.plan.expert_room > 0
        with paging.small_pages():
            assert memory.parts["read buffers"] == Reader.memory(0, 2, 64 << 10)
    with paging.resident(path) as engine:
        assert engine.paging is None
        assert engine.memory.budget is None


def test_without_a_budget_nothing_is_paged_and_with_room_nothing_is_read_again(make_model: MakeModel) -> None:
    path = make_model()
    with paged(path, ALL_FITS) as engine:
        assert engine.paging is not None
        engine.paging.clear_stats()
        answer(engine)
        stats = engine.paging.stats()
    assert stats.decode.bytes_per_token < 2 * 4096  # rows of the token table
    assert stats.decode.stall_ms < 50
    assert stats.decode.hit_rate is None


def test_a_pass_reads_what_is_streamed_once(make_model: MakeModel) -> None:
    path = make_model()
    with paged(path, paging.halfway(path)) as engine:
        assert engine.paging is not None
        plan_ = engine.paging.plan
        answer(engine)
        engine.paging.clear_stats()
        engine.kv_clear()
        answer(engine, n=25)
        stats = engine.paging.stats()
    assert stats.decode.tokens == stats.prefill.tokens == len(PROMPT) == 24
    more = plan_.window / 24 + 4096
    assert plan_.streamed_bytes - more <= stats.decode.bytes_per_token <= plan_.streamed_bytes + more
    passes = 2  # of 16 and 8 rows
    assert abs(stats.prefill.bytes_per_token - plan_.streamed_bytes * passes / 24) <= more
    assert stats.decode.disk_gbps > 0
    assert stats.decode.stall_ms >= 0
    assert stats.decode.hidden_ms >= 0
    assert stats.decode.compute_ms > 0
    assert set(stats.decode.to_json()) == {
        *("bytes_per_token", "disk_gbps", "stall_ms", "hidden_ms", "compute_ms", "hit_rate")
    }


def test_no_engine_is_left_behind_by_a_refusal(make_model: MakeModel) -> None:
    path = make_model()
    for _ in range(3):
        paging.refusal(path, replace(OPTIONS, memory=20 * MIB))
    assert not weight_threads()
    with Engine(path, paging.unpaged()) as engine:
        answer(engine, n=1)
