"""LoRA adapters of requests: passes of one set, turns, keys and values apart, drafts, budgets, other engines."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge.cluster.llm_ranks import DEFAULT_EXCHANGE
from edge.deployment.deploy import LlmBuilding
from edge.errors import EngineError, NotEnoughMemory
from edge.llama.llama import ContextSizes
from edge.llm.continuation import Request
from edge.llm.engine import Engine
from edge.llm.interface import TextEngine
from edge.llm.model import Model
from edge.llm.options import EngineOptions, PrefixOptions
from edge.llm.sampler import SamplingParams
from edge.llm.scheduler import Scheduler
from edge.llm.slot import Slot
from edge.parallel import moving
from edge.parallel.prefiller import PrefillPlacement
from edge.speculate.ngrams import NgramDrafts
from edge.speculate.speculation import Speculation
from edge.tasks import SILENT
from edge.weights import memory
from edge.weights.adapter import Adapter, Scales, adapters_from
from edge.weights.adapter_file import AdapterFile, adapter_sizes
from edge.weights.gpu_layers import layer_sizes
from edge.weights.memory import MemoryNeed
from partition.model.file import ModelFile
from partition.plan.arrange import make_plan
from partition.plan.plan import LOCAL
from partition.slices.gguf_slice import limits
from quant.gguf.file import GgufFile
from quant.types import cache_type
from tests.support import paging
from tests.support.adapters import write_adapter
from tests.support.deployments import EXACT, pipeline, tensor
from tests.support.drafting import always
from tests.support.ranks_here import ranks_here
from tests.support.replaceable import Mortal, replaceable
from tests.support.slices import synthetic

SETS: tuple[Scales, ...] = ((), (1.0, 0.0), (0.0, 1.0), (0.5, -0.5))
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14]
GREEDY = SamplingParams(temperature=0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthetic(tmp_path_factory.mktemp("m") / "model.gguf", "llama")


@pytest.fixture(scope="module")
def lora(model: Path) -> tuple[str, ...]:
    """Two adapters of the model, without effect on requests that do not say."""
    pair = ((name, write_adapter(model.with_name(f"{name}.gguf"), model, seed=i)) for i, name in enumerate("ab"))
    return tuple(f"{path}:0" for _, path in pair)


@pytest.fixture(scope="module")
def options(lora: tuple[str, ...]) -> EngineOptions:
    return replace(EXACT, sequences=8, lora=lora)


@pytest.fixture(scope="module")
def alone(model: Path, options: EngineOptions) -> dict[Scales, list[int]]:
    """The answer that each set gives to the prompt, as the only request."""
    with Engine(model, options) as engine:
        answers = {scales: Scheduler(engine).run([request(scales)])[0] for scales in SETS}
    assert len({tuple(answer) for answer in answers.values()}) == len(SETS)
    return answers


def request(scales: Scales | None, n_tokens: int = 8, prompt: Sequence[int] = PROMPT, **how: Any) -> Request:
    return Request(prompt, n_tokens, ends=False, adapters=scales, **how)


class Passes:
    """The adapters of each pass of an engine, in order."""

    def __init__(self, engine: TextEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sets: list[Scales] = []
        submit = engine.submit

        def noted(*args: Any, **how: Any) -> None:
            self.sets.append(how["adapters"])
            submit(*args, **how)

        monkeypatch.setattr(engine, "submit", noted)


@contextmanager
def engine_of(place: str, model: Path, options: EngineOptions, folder: Path) -> Iterator[TextEngine]:
    if place == "one":
        with Engine(model, options) as engine:
            yield engine
        return
    how = {"ranks": tensor(1, 1), "stages": pipeline(1, 1), "thin": pipeline(0, 1, 1)}[place]
    with ranks_here(model, how, options, folder) as engine:
        yield engine


@pytest.mark.parametrize("place", ["one", "ranks", "stages", "thin"])
def test_requests_of_all_sets_at_once(
    place: str, model: Path, options: EngineOptions, alone: dict[Scales, list[int]], tmp_path: Path
) -> None:
    """Each gets what it gets alone, whatever runs beside it."""
    with engine_of(place, model, options, tmp_path) as engine:
        answers = Scheduler(engine).run([request(scales) for scales in (*SETS, *SETS)])
    assert answers == [alone[scales] for scales in (*SETS, *SETS)]


def test_sets_take_turns_beside_a_long_prompt(
    model: Path, options: EngineOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt of several passes, and other answers, wait for one pass of each other set at most."""
    with Engine(model, replace(options, batch=8, outputs=8)) as engine:
        passes = Passes(engine, monkeypatch)
        Scheduler(engine).run([request(SETS[1], 4, range(5, 69)), request(SETS[2], 6), request(SETS[1], 6)])
    both = passes.sets[: len(passes.sets) - passes.sets[::-1].index(SETS[2])]
    assert max(len(list(group)) for _, group in groupby(both)) == 1
    assert set(both) == {SETS[1], SETS[2]}


def test_requests_of_one_set_share_a_pass(model: Path, options: EngineOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine(model, options) as engine:
        passes = Passes(engine, monkeypatch)
        Scheduler(engine).run([request(SETS[1]), request((1.0, 0.0)), request(SETS[1])])
    assert passes.sets == [SETS[1]] * 8


def test_keys_and_values_of_another_set_are_not_used(
    model: Path, lora: tuple[str, ...], alone: dict[Scales, list[int]], tmp_path: Path
) -> None:
    """In the cache, and on disk, also of a file of the same name with other values."""
    prefixes = PrefixOptions(1 << 24, tmp_path / "prefixes", tmp_path / "key")
    own = replace(EXACT, sequences=2, lora=lora, prefixes=prefixes)

    def cached(options: EngineOptions, *sets: Scales) -> list[int]:
        results = []
        with Engine(model, options) as engine:
            scheduler = Scheduler(engine, keep=True)
            for scales in sets:
                scheduler.add(request(scales, 1))
                while scheduler.busy:
                    results += [event.cached_tokens for event in scheduler.step() if event.token_id is not None]
        return results

    assert cached(own, (1.0, 0.0), (0.0, 1.0), (0.5, 0.0), (), (1.0, 0.0), (0.0, 1.0)) == [0, 0, 0, 0, 8, 8]
    assert cached(own, (0.0, 1.0), (1.0, 1.0), ()) == [8, 0, 8]
    turned = replace(own, lora=tuple(reversed(lora)))
    assert cached(turned, (1.0, 0.0), (0.25, 0.0)) == [8, 0]  # the same adapter, under another number
    other = write_adapter(tmp_path / "a.gguf", model, seed=7)
    assert cached(replace(own, lora=(f"{other}:0", lora[1])), (1.0, 0.0), (0.0, 1.0)) == [0, 8]


@pytest.mark.parametrize("place", ["one", "stages"])
def test_drafts_change_no_answer(
    place: str, model: Path, options: EngineOptions, alone: dict[Scales, list[int]], tmp_path: Path
) -> None:
    """They are of the text alone; the model verifies them with the request's adapters."""
    sets = (SETS[1], SETS[2], SETS[1])
    with engine_of(place, model, options, tmp_path) as engine:
        drafter = Speculation(NgramDrafts, "ngram", choice=always())
        for group in ([request(scales)] for scales in sets):
            [answer] = Scheduler(engine, slots=1, drafter=drafter).run(group)
            assert answer == alone[group[0].adapters or ()]
        assert Scheduler(engine, drafter=drafter).run(list(map(request, sets))) == [alone[item] for item in sets]


def test_weights_that_are_paged(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Adapters stay in memory, and count as a part of the budget."""
    path = paging.model(tmp_path_factory)
    adapter = write_adapter(tmp_path / "adapter.gguf", path, rank=8, size=0.05)
    options = replace(paging.OPTIONS, lora=(f"{adapter}:0.5",), kv_type="f32", flash_attention="off")
    n_bytes = sum(tensor.n_bytes for tensor in GgufFile.open(adapter).tensors.values())
    provided = []
    with paging.paged(path, paging.halfway(path, options), options) as engine:
        assert paging.streams(engine)
        assert engine.memory.parts["adapters"] == n_bytes
        for scales in (None, (), (1.0,)):
            engine.kv_clear()
            provided.append(engine.decode(paging.PROMPT, 0, outputs="last", adapters=scales).copy())
    with paging.resident(path, options) as engine:
        for logits, scales in zip(provided, (None, (), (1.0,)), strict=True):
            engine.kv_clear()
            assert np.array_equal(logits, engine.decode(paging.PROMPT, 0, outputs="last", adapters=scales))
    assert np.abs(provided[0] - provided[1]).max() > 0.01


def test_a_budget_has_room_for_adapters(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = paging.model(tmp_path_factory)
    large = write_adapter(tmp_path / "large.gguf", path, rank=256)
    options = replace(paging.OPTIONS, lora=(str(large),))
    with pytest.raises(NotEnoughMemory, match=r"adapters \d+"):
        paging.paged(path, paging.least(path), options)


def test_adapters_need_room(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Adapters count as memory that must be allocated, also without a budget."""
    large = AdapterFile(
        write_adapter(tmp_path / "large.gguf", model, rank=256),
        file := ModelFile.open(model),
    )
    with Engine(model, EXACT) as engine:
        sizes = engine._loaded.sizes
    baseline = memory.need(model, sizes).allocated
    monkeypatch.setattr(memory, "available_memory", lambda: baseline + sum(large.weights.values()) // 2)
    Engine(model, EXACT).close()
    with pytest.raises(NotEnoughMemory, match=r"adapters \d+"):
        Engine(model, replace(EXACT, lora=(str(large.path),)))
    with_adapter = replace(sizes, **adapter_sizes([large], file.shape.n_layers))
    need = memory.need(model, with_adapter)
    assert need.parts["adapters"] == sum(large.weights.values()) + sizes.batch * large.row_bytes


def test_layers_on_a_gpu_are_counted_with_their_adapters(model: Path, tmp_path: Path) -> None:
    weights = ["attn_q.weight", "output.weight"]
    file, path = ModelFile.open(model), write_adapter(tmp_path / "adapter.gguf", model, weights)
    adapter, shape, plain = (
        AdapterFile(path, file),
        file.shape,
        ContextSizes(64, cache_type("f16")),
    )
    more = replace(plain, **adapter_sizes([adapter], shape.n_layers))
    added = [n - m for n, m in zip(layer_sizes(shape, more), layer_sizes(shape, plain), strict=True)]
    of_layers = [adapter.weights[f"blk.{layer}.attn_q.weight"] for layer in reversed(range(shape.n_layers))]
    assert added == [adapter.weights["output.weight"], *of_layers]


def test_a_file_that_changes_after_its_check_is_not_loaded(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter, check = write_adapter(tmp_path / "a.gguf", model), memory.check

    def replaced(*args: Any) -> MemoryNeed:
        write_adapter(adapter, model, rank=8)
        return check(*args)

    monkeypatch.setattr(memory, "check", replaced)
    with pytest.raises(EngineError, match=r"a\.gguf has changed since it was checked; start again"):
        Engine(model, replace(EXACT, lora=(str(adapter),)))


def test_requests_go_on_when_a_file_is_gone(
    model: Path, options: EngineOptions, alone: dict[Scales, list[int]], tmp_path: Path
) -> None:
    """Keys and values have the name of what was loaded, whatever is there now."""
    own = [tmp_path / f"{name}.gguf" for name in "ab"]
    for i, path in enumerate(own):
        write_adapter(path, model, seed=i)
    with Engine(model, replace(options, lora=tuple(f"{path}:0" for path in own))) as engine:
        scheduler = Scheduler(engine)
        namespace = scheduler.prepare(request(SETS[1])).namespace
        write_adapter(own[0], model, seed=7)
        assert scheduler.prepare(request(SETS[1])).namespace == namespace
        own[0].unlink()
        assert scheduler.run([request(SETS[1])]) == [alone[SETS[1]]]


def test_what_is_loaded_later_has_the_same_adapters(model: Path, tmp_path: Path) -> None:
    """As after the loss of a device."""
    adapter, file = write_adapter(tmp_path / "a.gguf", model), ModelFile.open(model)
    options, plan = replace(EXACT, lora=(str(adapter),)), make_plan(limits(file), "", "", [LOCAL], "pipeline")
    with closing(LlmBuilding(file, 64 * "0", options, DEFAULT_EXCHANGE, lambda line: None)) as building:
        with ExitStack() as life:
            building.load(None, plan, life, SILENT)
        write_adapter(adapter, model, seed=1)
        with ExitStack() as life, pytest.raises(EngineError, match="has changed since it was checked; start again"):
            building.load(None, plan, life, SILENT)


def test_scales_are_set_again_after_an_interrupt(
    model: Path, options: EngineOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody knows then with which ones the next pass would compute."""
    with Engine(model, options) as engine:
        plain = engine.decode(PROMPT, 0).copy()
        engine.kv_clear()
        use = engine.adapters.context.use_adapters

        def interrupted(scales: Sequence[float]) -> None:
            use(scales)
            raise KeyboardInterrupt

        monkeypatch.setattr(engine.adapters.context, "use_adapters", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.decode(PROMPT, 0, adapters=(1.0, 0.0))
        monkeypatch.undo()
        assert np.array_equal(engine.decode(PROMPT, 0, adapters=()), plain)


def test_another_engine_takes_over(model: Path, options: EngineOptions, alone: dict[Scales, list[int]]) -> None:
    """It is told the adapters of the next pass, whatever the one before had in use."""
    with Mortal(model, options) as first, Engine(model, options) as second:
        first.lives = 9
        scheduler = Scheduler(replaceable(first, lambda _: second), keep=True)
        assert scheduler.run([request(scales) for scales in SETS]) == [alone[scales] for scales in SETS]
    assert first.lives <= 0


def test_slots_of_different_sets_move_apart(model: Path, options: EngineOptions) -> None:
    """The same tokens have other keys and values."""
    with Engine(model, options) as first:
        slots, tokens = [], list(range(5, 69))
        for sequence, scales in enumerate(SETS[:2]):
            slot = Slot(first, sequence)
            slot.namespace, slot.adapters = f"set {sequence}", scales
            slot.decode(tokens[:32])
            slot.decode(tokens[32:])
            slots.append(slot)
        assert [beginning.start for beginning in moving.beginnings(slots)] == [0, 0]


def test_by_name(model: Path, options: EngineOptions, alone: dict[Scales, list[int]]) -> None:
    with Engine(model, options) as engine:
        program = Model(engine, lambda: None)
        for scales, named in ((SETS[1], {"a": 1.0}), (SETS[3], {"b": -0.5, "a": 0.5}), ((), {}), ((), None)):
            answer = program.generate(PROMPT, GREEDY, max_tokens=8, adapters=named)
            tokens = [response.token_id for response in answer if response.token_id is not None]
            assert tokens == alone[scales][: len(tokens)]
            assert tokens
        with program.stream() as stream:
            stream.add(PROMPT, GREEDY, max_tokens=1, adapters={"b": 1.0})
            assert next(iter(stream)).token_id == alone[SETS[2]][0]
        with pytest.raises(EngineError, match="there is no adapter 'c'; there are a, b"):
            program.generate(PROMPT, adapters={"c": 1.0})


@pytest.mark.parametrize("scales", [(1.0,), (1.0, 1.0, 1.0), (float("nan"), 0.0), (1e9, 0.0)])
def test_scales_that_cannot_be(scales: Scales, model: Path, options: EngineOptions) -> None:
    with Engine(model, options) as engine:
        with pytest.raises(EngineError, match=r"scales? of"):
            Scheduler(engine).add(request(scales))
        with pytest.raises(EngineError, match=r"scales? of"):
            engine.decode(PROMPT, 0, adapters=scales)
        assert len(Scheduler(engine).run([request((1.0, 0.0))])[0]) == 8


def test_names_and_scales_of_files(tmp_path: Path) -> None:
    assert Adapter.from_text("/a/b.gguf:-0.25") == Adapter(Path("/a/b.gguf"), -0.25)
    assert Adapter.from_text("C:\\b.gguf") == Adapter(Path("C:\\b.gguf"), 1.0)
    assert [item.name for item in adapters_from(["x/one.gguf", "y/two.gguf:3"])] == ["one", "two"]
    with pytest.raises(EngineError, match="'one' is the name of two adapters or models"):
        adapters_from(["x/one.gguf", "y/one.gguf:3"])
    with pytest.raises(EngineError, match="'base' is the name of two"):
        adapters_from(["x/base.gguf"], ["base"])
    for text in ("x.gguf:1_0", "x.gguf: 1", "x.gguf:\u0661"):  # which float() takes
        assert Adapter.from_text(text) == Adapter(Path(text), 1.0)
    assert [Adapter.from_text(f"x.gguf:{scale}").scale for scale in (".5", "+1", "1e-1", "2.")] == [0.5, 1.0, 0.1, 2.0]
    (tmp_path / "x:2").touch()
    assert Adapter.from_text(f"{tmp_path / 'x:2'}") == Adapter(tmp_path / "x:2", 1.0)
    assert Adapter.from_text(f"{tmp_path / 'x:2'}:3") == Adapter(tmp_path / "x:2", 3.0)
    with pytest.raises(EngineError, match=r"the scale of 'x.gguf:inf' is inf"):
        adapters_from(["x.gguf:inf"])
    with pytest.raises(EngineError, match=r"lora is a list of files, not the text 'x.gguf'"):
        EngineOptions(lora="x.gguf")
    with pytest.raises(EngineError, match="lora has 65 adapters; the maximum is 64"):
        EngineOptions(lora=["x"] * 65)


def test_a_placement_of_prompts_has_them(model: Path, options: EngineOptions, alone: dict[Scales, list[int]]) -> None:
    """It computes a prompt with the adapters of its request."""
    with Engine(model, options) as engine, Engine(model, options) as other:
        with PrefillPlacement(other, 2) as placement:
            engine.states.prefiller = placement
            scheduler = Scheduler(engine, keep=True)
            assert scheduler.run([request(scales) for scales in SETS]) == [alone[scales] for scales in SETS]
            assert placement.failed is None
        assert other.adapters.scales in SETS[1:]
