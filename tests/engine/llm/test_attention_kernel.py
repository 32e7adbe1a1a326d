"""The attention kernel follows what was measured of both, by the tokens in the cache; what is held moves along."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from devices.remembered import Remembered
from edge.llama import attention_kernel
from edge.llama.attention_kernel import AttentionTimes
from edge.llm.engine import Engine
from edge.llm.info import memory_json
from edge.llm.options import EngineOptions
from edge.microbenchmark import BestTime, TimedTask
from edge.paging.gpu_layers import measured_key
from partition.plan.plan import Range
from tests.conftest import Synthetic

OPTIONS = EngineOptions(context=512, batch=64, threads=1, kv_type="f32", follows_load=True)
PLAIN = replace(OPTIONS, follows_load=False, flash_attention="off")
TOKENS = [270 + 7 * i % 40 for i in range(40)]
EARLIER = ((256, 1.0, 0.5),)  # flash attention takes twice as long from the first token on


@pytest.fixture(autouse=True)
def _any_cache_is_worth_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(attention_kernel, "_LEAST_CACHE", 0)


def remember(path: Path, points: Sequence[tuple[int, float, float]], options: EngineOptions = OPTIONS) -> None:
    """Let this device have measured these times before."""
    with Engine(path, replace(options, follows_load=False)) as engine:
        key = measured_key(
            engine.shape, engine.states.attention._sizes, engine.threads, [tokens for tokens, *_ in points]
        )
    Remembered("attention-kernels").put(key, points)


@pytest.mark.parametrize(
    ("tokens", "current", "flash"),
    [
        (1, True, True),
        (256, True, True),
        (256, False, True),
        (4096, True, False),
        (9999, False, False),
        (1024, True, True),  # faster by 1 %: whichever there is, stays
        (1024, False, False),
        (640, False, True),  # between two lengths
    ],
)
def test_a_kernel_stays_unless_the_other_is_faster_at_its_length(tokens: int, current: bool, flash: bool) -> None:
    times = AttentionTimes(((256, 0.036, 0.041), (1024, 0.0500, 0.0495), (4096, 0.094, 0.077)))
    assert times.is_flash_faster(tokens, current) == flash


def test_another_kernel_takes_over_with_all_that_is_held(synthetic: Synthetic) -> None:
    path = synthetic("llama")
    remember(path, EARLIER)
    with Engine(path, OPTIONS) as engine, Engine(path, PLAIN) as plain:
        stays, engine.states.attention.times = engine.states.attention.times, None
        engine.decode(TOKENS, 0)
        before = engine.states.read(0, Range(0, 40))
        plain.states.write(0, before)
        engine.states.attention.times = stays
        after = engine.decode([5], 40).copy()
        assert not engine.states.attention.flash
        np.testing.assert_array_equal(after, plain.decode([5], 40))
        for new, old in zip(engine.states.read(0, Range(0, 40)).layers, before.layers, strict=True):
            np.testing.assert_array_equal(new.keys, old.keys)
            np.testing.assert_array_equal(new.values, old.values)
        engine.stop()
        engine.states.attention.times = AttentionTimes(((256, 0.5, 1.0),))
        with pytest.raises(Exception, match="stopped"):
            engine.decode([6], 41)
        engine.resume()
        engine.decode([6], 41)
        assert engine.states.attention.flash
        assert engine.kv_last(0) == 41


def test_what_was_measured_is_remembered_and_shown(synthetic: Synthetic) -> None:
    path = synthetic("llama")
    remember(path, EARLIER)
    with Engine(path, OPTIONS) as engine:
        engine.decode(TOKENS, 0)
        shown = memory_json(engine)["attention"]
        assert (shown["flash"], shown["measured"]) == (False, [{"tokens": 256, "flash_ms": 1e3, "plain_ms": 500.0}])
        assert "256 tokens 1000.0 ms with it and 500.0 without" in engine.states.attention.describe()


@pytest.mark.parametrize("busy", [False, True])
def test_figures_of_a_busy_device_choose_nothing(
    busy: bool, synthetic: Synthetic, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[int] = []

    def timed(tasks: Sequence[TimedTask], least_s: float) -> list[BestTime]:
        for task in tasks:
            task.prepare()
            task.step()
            steps.append(1)
        return [BestTime(1.0, busy), BestTime(0.5, False)]

    monkeypatch.setattr(attention_kernel, "best_of", timed)
    for runs in (1, 2):
        with Engine(synthetic("llama"), OPTIONS) as engine:
            assert len(steps) == (2 * runs if busy else 2)  # only what is quiet is remembered
            assert (engine.states.attention.times is None) == busy
            assert ("this device is busy" in engine.states.attention.why) == busy


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"flash_attention": "on"}, "as set"),
        ({"kv_type": "q8_0"}, "a cache of q8_0 needs it"),
        ({"follows_load": False}, "the default"),
        ({"sequences": 2}, "several sequences"),
        ({"memory": 2 << 30}, "under a budget"),
        ({"context": 128}, "small"),
    ],
)
def test_reasons_not_to_measure(changes: dict[str, object], why: str, synthetic: Synthetic) -> None:
    with Engine(synthetic("llama"), replace(OPTIONS, **changes)) as engine:  # type: ignore[arg-type]
        assert engine.states.attention.times is None
        assert why in engine.states.attention.describe()
        assert engine.states.attention.flash


def test_windows_recurrent_layers_and_no_room_keep_the_default(
    synthetic: Synthetic, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine(synthetic("gemma2"), OPTIONS) as engine:
        assert "attention windows" in engine.states.attention.why
    monkeypatch.setattr(attention_kernel, "available_memory", lambda: 1 << 20)
    with Engine(synthetic("llama"), OPTIONS) as engine:
        assert "no room for both" in engine.states.attention.why
