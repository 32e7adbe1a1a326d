"""An engine that fails at any moment is taken over by another, and whoever asks gets what one engine would give."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge.demo import MODEL_PATH
from edge.errors import EngineError, Interrupted
from edge.llm.engine import Engine
from edge.llm.interface import TextEngine
from edge.llm.options import EngineOptions
from edge.parallel import catching_up
from edge.parallel import surviving as surviving_engine
from edge.parallel.history import UNKNOWN, History
from edge.parallel.surviving import MOST_IN_A_ROW, SurvivingEngine
from partition.plan.plan import Range
from tests.conftest import Synthetic
from tests.support.deployments import pipeline
from tests.support.ranks_here import ranks_here
from tests.support.thorough import some

# All in F32: what is computed in other portions, or with cells in another order, is then nearly the same.
OPTIONS = EngineOptions(threads=1, context=256, batch=3, sequences=3, kv_type="f32", flash_attention="off")


class Mortal(Engine):
    """An engine that is lost after so many calls, and then for good."""

    def __init__(self, lives: int, path: Path = MODEL_PATH) -> None:
        super().__init__(path, OPTIONS)
        self.lives, self._lost = lives, False

    @property
    def failed(self) -> Exception | None:
        return EngineError("lost") if self._lost else None

    def _live(self) -> None:
        self.lives -= 1
        self._lost = self._lost or self.lives < 0
        if self._lost:
            raise EngineError("lost")


def mortal(name: str) -> Callable[..., Any]:
    def call(self: Mortal, *args: Any, **how: Any) -> Any:
        self._live()
        return getattr(Engine, name)(self, *args, **how)

    return call


for _name in ("submit", "collect", "kv_remove", "kv_copy", "kv_shift", "kv_clear"):
    setattr(Mortal, _name, mortal(_name))


def surviving(rng: random.Random, engines: list[Mortal], path: Path = MODEL_PATH) -> SurvivingEngine:
    """Engines that are lost one after the other, at random calls."""

    def another(_: Exception | None = None) -> Mortal:
        engines.append(Mortal(rng.randrange(3, 60) + 40 * bool(engines), path))  # enough to catch up
        return engines[-1]

    first = another()
    return SurvivingEngine(first, first.model, another)


def schedule(rng: random.Random, steps: int) -> list[Callable[[TextEngine], Any]]:
    """Random things to ask, of which each is possible then."""
    asked: list[Callable[[TextEngine], Any]] = []
    held, waiting = [0, 0, 0], 0

    def submit(engine: TextEngine, token: int, sequence: int, position: int) -> None:
        row = np.array([position]), np.array([sequence]), np.ones(1, np.int8)
        engine.submit([token], *row)

    for _ in range(steps):
        sequence, other = rng.sample(range(3), 2)
        kind = rng.choice(("submit", "submit", "submit", "collect", "remove", "copy", "shift"))
        if kind == "submit" and held[sequence] < 40 and waiting < 6:
            token, position = rng.randrange(5, 400), held[sequence]
            asked.append(lambda e, t=token, s=sequence, p=position: submit(e, t, s, p))  # type: ignore[misc]
            held[sequence] += 1
            waiting += 1
        elif kind == "collect" and waiting:
            asked.append(lambda e: e.collect().copy())
            waiting -= 1
        elif kind == "remove":
            end = rng.randrange(held[sequence] + 1)
            asked.append(lambda e, s=sequence, end=end: e.kv_remove(s, end))  # type: ignore[misc]
            held[sequence] = end
        elif kind == "copy":
            n = rng.randrange(held[sequence] + 1)
            asked.append(lambda e, o=other: e.kv_remove(o, 0))  # type: ignore[misc]
            asked.append(lambda e, s=sequence, o=other, n=n: e.kv_copy(s, o, 0, n))  # type: ignore[misc]
            held[other] = n
    return asked + [lambda e: e.collect().copy()] * waiting


def same(found: Any, wanted: Any) -> None:
    """What two engines gave is equal; logits but for the last bits."""
    if isinstance(wanted, np.ndarray):
        np.testing.assert_allclose(found, wanted, atol=1e-4)
    else:
        assert found == wanted


@pytest.mark.parametrize("seed", range(some(6, 200)))
def test_whoever_asks_notices_nothing(seed: int, synthetic: Synthetic) -> None:
    path = synthetic("llama", "f32")
    asked = schedule(random.Random(seed), 200)
    engines: list[Mortal] = []
    survivor = surviving(random.Random(seed + 1), engines, path)
    with Engine(path, OPTIONS) as whole:
        for ask in asked:
            same(ask(survivor), ask(whole))
        assert survivor.uncollected == 0
    assert survivor.recoveries == len(engines) - 1 > 0
    for engine in engines:
        engine.close()


def test_an_error_of_what_was_asked_is_raised() -> None:
    engines: list[Mortal] = []
    survivor = surviving(random.Random(0), engines)
    with pytest.raises(EngineError, match="takes 1 to 3 tokens"):
        survivor.decode([1, 2, 3, 4], 0)
    assert survivor.recoveries == 0
    engines[0].close()


def test_who_takes_over_is_asked_for_the_same_logits() -> None:
    asked: list[dict[str, Any]] = []

    class Told(Mortal):
        def submit(self, *args: Any, **how: Any) -> None:
            asked.append(how)
            super().submit(*args, **how)

    first, second = Told(99), Told(99)
    survivor = SurvivingEngine(first, first.model, lambda error: second)
    wanted = {"top": 3, "masks": [np.arange(first.model.n_vocab) < 9]}
    survivor.submit([5], np.zeros(1, int), np.zeros(1, int), np.ones(1, np.int8), **wanted)
    first.lives = 0
    assert survivor.collect().shape == (1, first.model.n_vocab)
    assert survivor.recoveries == 1
    assert asked == [wanted, wanted]
    for engine in (first, second):
        engine.close()


def test_who_is_lost_again_and_again_is_given_up() -> None:
    engines: list[Mortal] = []

    def doomed(_: Exception | None = None) -> Mortal:
        engines.append(Mortal(0))
        return engines[-1]

    survivor = SurvivingEngine(doomed(), engines[0].model, doomed)
    with pytest.raises(EngineError, match="lost"):
        survivor.kv_clear()
    assert survivor.recoveries == MOST_IN_A_ROW
    for engine in engines:
        engine.close()


def test_who_is_stopped_waits_for_no_other_engine() -> None:
    engines: list[Mortal] = []
    survivor = surviving(random.Random(0), engines)
    engines[0].lives = 0
    survivor.stop()
    with pytest.raises(Interrupted):
        survivor.kv_clear()
    survivor.resume()
    survivor.kv_clear()
    assert survivor.recoveries == 1
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("stopped", [False, True])
def test_who_asks_after_a_loss_gets_no_logits_of_steps_before_it(synthetic: Synthetic, stopped: bool) -> None:
    """A step was under way when nobody was left, or nobody waited: whoever asked for it was told so."""
    path = synthetic("llama", "f32")
    engines = [Mortal(100, path)]
    left = [False]  # whether another engine can take over

    def another(_: Exception) -> Mortal:
        if not left[0]:
            raise EngineError("nobody is left")
        engines.append(Mortal(100, path))
        return engines[-1]

    survivor = SurvivingEngine(engines[0], engines[0].model, another)
    row = np.array([0]), np.array([0]), np.ones(1, np.int8)
    with Engine(path, OPTIONS) as whole:
        survivor.submit([5], *row)
        assert survivor.uncollected == 1
        engines[0].lives = 0
        if stopped:
            survivor.stop()
        with pytest.raises((EngineError, Interrupted)):
            survivor.collect()
        survivor.resume()
        assert survivor.uncollected == 0
        left[0] = True
        for engine in (survivor, whole):
            engine.kv_clear()
            engine.submit([9], *row)
        np.testing.assert_allclose(survivor.collect(), whole.collect(), atol=1e-4)
        assert survivor.uncollected == 0
    for engine in engines:
        engine.close()


def test_who_was_stopped_while_an_engine_caught_up_gets_no_logits_of_steps_before_it(synthetic: Synthetic) -> None:
    """The engine that took over is sound, and lacks what the history has."""
    path = synthetic("llama", "f32")
    engines = [Mortal(100, path)]

    def another(_: Exception) -> Mortal:
        survivor.stop()
        engines.append(Mortal(100, path))
        return engines[-1]

    survivor = SurvivingEngine(engines[0], engines[0].model, another)
    row = np.array([0]), np.array([0]), np.ones(1, np.int8)
    with Engine(path, OPTIONS) as whole:
        survivor.decode([5, 6], 0)
        survivor.submit([7], np.array([2]), np.array([0]), np.ones(1, np.int8))
        engines[0].lives = 0
        with pytest.raises(Interrupted):
            survivor.collect()
        survivor.resume()
        assert survivor.uncollected == 0
        for engine in (survivor, whole):
            engine.kv_clear()
            engine.submit([9], *row)
        np.testing.assert_allclose(survivor.collect(), whole.collect(), atol=1e-4)
    for engine in engines:
        engine.close()


def test_what_came_from_elsewhere_cannot_be_computed_again() -> None:
    engines: list[Mortal] = []
    survivor = surviving(random.Random(0), engines)
    with Engine(MODEL_PATH, OPTIONS) as other:
        other.decode([5], 0)
        survivor.states.write(0, other.states.read(0, Range(0, 1)))
    engines[0].lives = 0
    with pytest.raises(EngineError, match="not known token by token"):
        survivor.kv_remove(0, 1)
    engines[0].close()


def test_a_history_is_what_the_cache_holds() -> None:
    history = History()
    history.add(0, 0, [5, 6, 7, 8, 9])
    history.copy(0, 1, 0, 3)
    history.remove(0, 1, 3)
    with pytest.raises(EngineError, match="not known token by token"):
        history.sequences()
    history.shift(0, 3, -1, -2)
    assert history.sequences() == {0: [5, 8, 9], 1: [5, 6, 7]}
    history.remove(1, 2)
    history.add(0, 1, [UNKNOWN])
    with pytest.raises(EngineError, match="not known token by token"):
        history.sequences()
    history.clear()
    assert history.sequences() == {}


@pytest.mark.parametrize("seed", range(some(4, 100)))
def test_an_engine_is_left_between_any_two_steps(
    seed: int, synthetic: Synthetic, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, rng = synthetic("llama", "f32"), random.Random(seed)
    asked, engines = schedule(random.Random(seed), 120), [Engine(path, OPTIONS)]
    survivor = SurvivingEngine(engines[0], engines[0].model, lambda error: engines[0])
    if seed % 2:  # as where this device has no memory for keys and values on their way
        monkeypatch.setattr(catching_up, "available_memory", lambda: 0)

    def another() -> Engine:
        engines[-1].close()  # as where both have no room beside each other
        engines.append(Engine(path, OPTIONS))
        return engines[-1]

    vocabulary = Engine(path, OPTIONS)
    survivor._model = vocabulary.model  # type: ignore[attr-defined]
    with Engine(path, OPTIONS) as whole:
        for ask in asked:
            if rng.random() < 0.05:
                survivor.go_on_with(another)
                assert survivor.is_moving
                if rng.random() < 0.5:
                    survivor.settle()
                    assert not survivor.is_moving
            same(ask(survivor), ask(whole))
        assert survivor.uncollected == 0
    assert survivor.moves == len(engines) - 1 > 0
    assert survivor.recoveries == 0
    engines[-1].close()
    vocabulary.close()


def test_where_the_next_engine_cannot_be_another_takes_over() -> None:
    with Engine(MODEL_PATH, OPTIONS) as first, Engine(MODEL_PATH, OPTIONS) as other:
        errors: list[str] = []

        def recovered(error: Exception) -> Engine:
            errors.append(str(error))
            return other

        def fails() -> Engine:
            raise EngineError("no room")

        survivor = SurvivingEngine(first, first.model, recovered)
        survivor.decode([5, 6], 0)
        survivor.go_on_with(lambda: None)  # it came too late
        survivor.settle()
        assert (survivor.current, survivor.moves, survivor.recoveries) == (first, 0, 0)
        survivor.go_on_with(fails)
        logits = survivor.decode([7], 2).copy()
        assert (survivor.current, survivor.moves, survivor.recoveries, errors) == (other, 0, 1, ["no room"])
        first.kv_clear()
        np.testing.assert_allclose(logits, first.decode([5, 6, 7], 0), atol=1e-3)


def test_what_a_sequence_holds_and_nobody_knows_keeps_an_engine() -> None:
    with Engine(MODEL_PATH, OPTIONS) as first, Engine(MODEL_PATH, OPTIONS) as other:
        other.decode([5], 0)
        survivor = SurvivingEngine(first, first.model, lambda error: other)
        survivor.states.write(0, other.states.read(0, Range(0, 1)))
        survivor.go_on_with(lambda: other)
        assert survivor.kv_remove(0, 1)
        assert (survivor.current, survivor.moves) == (first, 0)


def test_logits_hold_while_somebody_looks_between_two_steps(tmp_path: Path) -> None:
    """As the watch for slow devices does in a thread of its own, while tokens are chosen by what was collected."""

    def nobody(error: Exception) -> TextEngine:
        raise error

    with ranks_here(MODEL_PATH, pipeline(1, 1), OPTIONS, tmp_path) as ranks:
        engine = SurvivingEngine(ranks, ranks.model, nobody)
        for sequence in (0, 1):
            engine.submit([5 + sequence], np.array([0]), np.array([sequence]), np.ones(1, np.int8))
        first = engine.collect()
        held = first.copy()
        engine.between_steps(lambda engine: None)
        assert (first == held).all()
        assert (engine.collect() != held).any()


def test_a_model_is_not_quiet_while_logits_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine(MODEL_PATH, OPTIONS) as engine:
        survivor = SurvivingEngine(engine, engine.model, lambda error: engine)
        survivor.submit([5], np.array([0]), np.array([0]), np.ones(1, np.int8))
        now_s = surviving_engine.time.monotonic() + 60.0  # type: ignore[attr-defined]
        monkeypatch.setattr(surviving_engine.time, "monotonic", lambda: now_s)  # type: ignore[attr-defined]
        assert survivor.quiet_s == 0.0
        survivor.collect()
        asked_s = now_s
        monkeypatch.setattr(surviving_engine.time, "monotonic", lambda: asked_s + 30.0)  # type: ignore[attr-defined]
        assert survivor.quiet_s == pytest.approx(30.0)


class WrittenTo:
    """An engine that is given keys and values: it takes so many blocks, and then none."""

    def __init__(self, factors: str, takes: int, failed: Exception | None = None) -> None:
        self.factors, self.takes, self.failed = factors, takes, failed
        self.blocks: list[Any] = []
        self.states = self

    def write(self, sequence: int, block: Any) -> None:
        if len(self.blocks) == self.takes:
            raise EngineError("no room")
        self.blocks.append((sequence, block))

    def kv_copy(self, *_: int) -> None:
        pass

    def kv_clear(self) -> None:
        self.blocks.clear()


def test_keys_that_were_turned_by_other_factors_are_not_taken() -> None:
    held: Any = catching_up.HeldStates("yarn 2", [(catching_up.Beginning(0, [1, 2], 0, 0), ["a", "b"])])  # type: ignore[list-item]
    engine: Any = WrittenTo("yarn 2", 9)
    assert catching_up.write_states(engine, held)
    assert engine.blocks == [(0, "a"), (0, "b")]
    other: Any = WrittenTo("yarn 4", 9)
    assert not catching_up.write_states(other, held)
    assert other.blocks == []


def test_an_engine_that_refused_a_block_is_left_empty() -> None:
    """Half of a cache would be computed on."""
    held: Any = catching_up.HeldStates("", [(catching_up.Beginning(0, [1, 2], 0, 0), ["a", "b"])])  # type: ignore[list-item]
    engine: Any = WrittenTo("", 1)
    assert not catching_up.write_states(engine, held)
    assert engine.blocks == []
    lost: Any = WrittenTo("", 1, EngineError("lost"))
    with pytest.raises(EngineError, match="no room"):
        catching_up.write_states(lost, held)
