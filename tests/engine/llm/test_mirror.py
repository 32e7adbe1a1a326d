"""Keys and values that are copied while an engine computes, and given to the one that takes over."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from edge.demo import MODEL_PATH
from edge.errors import EngineError
from edge.llm.engine import Engine
from edge.llm.options import EngineOptions
from edge.llm.states import READ_TOKENS
from edge.parallel.mirror import SHARE, MirroredHistory
from edge.parallel.surviving import SurvivingEngine
from partition.errors import CannotSlice
from quant.gguf.file import GgufFile

OPTIONS = EngineOptions(threads=1, context=256, batch=2, sequences=2)
TOKEN_BYTES = 4096
TOKENS = [10 + (7 * i * i + 3 * i) % 400 for i in range(100)]
LOOK_S = 0.04


class Clock:
    """Each look at it takes so long, and so a block does, too."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += LOOK_S
        return self.now


class Mortal(Engine):
    """An engine that can be lost, and counts what it computes."""

    lost = False
    computed = 0

    @property
    def failed(self) -> Exception | None:
        return EngineError("lost") if self.lost else None

    def decode(self, tokens: Sequence[int] | NDArray[np.int32], *args: object, **how: object) -> NDArray[np.float32]:
        if self.lost:
            raise EngineError("lost")
        self.computed += len(tokens)
        return super().decode(tokens, *args, **how)  # type: ignore[arg-type]

    def chunk(self, n: int) -> int:
        return 1  # rows of a batch are computed by other kernels, and so to other last bits


class Mirrored:
    """An engine with another one in reserve."""

    def __init__(self, max_bytes: int = 1 << 20) -> None:
        self.clock = Clock()
        self.history = MirroredHistory(TOKEN_BYTES, max_bytes, self.clock)
        self.first, self.second = Mortal(MODEL_PATH, OPTIONS), Mortal(MODEL_PATH, OPTIONS)
        self.engine = SurvivingEngine(self.first, self.first.model, lambda _: self.second, self.history)

    def hold(self, tokens: Sequence[int], start: int = 0, sequence: int = 0) -> None:
        for at, token in enumerate(tokens, start):
            self.engine.decode([token], at, sequence=sequence)

    @property
    def blocks(self) -> int:
        return self.history.held_bytes // (READ_TOKENS * TOKEN_BYTES)

    def close(self) -> None:
        self.first.close()
        self.second.close()


@pytest.fixture
def mirrored() -> Iterator[Mirrored]:
    pair = Mirrored()
    yield pair
    pair.close()


def test_who_takes_over_computes_less_than_a_block(mirrored: Mirrored) -> None:
    mirrored.hold(TOKENS[:70])
    mirrored.engine.answered([])
    assert mirrored.history.held_bytes == mirrored.history.copied_bytes == 64 * TOKEN_BYTES
    mirrored.first.lost = True
    found = mirrored.engine.decode([TOKENS[70]], 70)
    assert mirrored.engine.computed_again == 6
    assert mirrored.second.computed == 7
    assert mirrored.history.restored_tokens == 64
    with Engine(MODEL_PATH, OPTIONS) as undisturbed:
        for at, token in enumerate(TOKENS[:71]):
            wanted = undisturbed.decode([token], at).copy()
    np.testing.assert_array_equal(found, wanted)  # to the last bit


def test_without_a_copy_all_is_computed() -> None:
    first, second = Mortal(MODEL_PATH, OPTIONS), Mortal(MODEL_PATH, OPTIONS)
    with first, second:
        engine = SurvivingEngine(first, first.model, lambda _: second)
        for at, token in enumerate(TOKENS[:70]):
            engine.decode([token], at)
        engine.answered([])
        first.lost = True
        engine.decode([5], 70)
        assert engine.computed_again == 70


def computed(mirrored: Mirrored, seconds: float) -> None:
    """A step that takes so long."""
    with mirrored.history.step():
        mirrored.clock.now += seconds - LOOK_S


def held_all_at_once(mirrored: Mirrored) -> None:
    """As if the tokens had been decoded in no time."""
    mirrored.history.add(0, 0, TOKENS)
    for at, token in enumerate(TOKENS):
        mirrored.first.decode([token], at)


def test_a_copy_takes_a_small_share_of_the_time(mirrored: Mirrored) -> None:
    held_all_at_once(mirrored)
    mirrored.history.follow(mirrored.first, lambda: None)
    assert mirrored.blocks == 0
    computed(mirrored, 1.5 * LOOK_S / SHARE)  # pays for one block, and begins a second one
    mirrored.history.follow(mirrored.first, lambda: None)
    assert mirrored.blocks == 2
    assert mirrored.history.copied_s == pytest.approx(2 * LOOK_S)
    mirrored.clock.now += 1e6  # however long nobody asked for anything
    mirrored.history.follow(mirrored.first, lambda: None)
    assert mirrored.blocks == 2
    computed(mirrored, 1.6 * LOOK_S / SHARE)  # half a block was copied before its time
    mirrored.history.follow(mirrored.first, lambda: None)
    assert mirrored.blocks == 2 + 2


def test_a_long_prompt_pays_for_its_own_copy_and_answers_save_up_little(mirrored: Mirrored) -> None:
    computed(mirrored, 1e6)
    mirrored.history.follow(mirrored.first, lambda: None)  # nothing to copy: 0.1 s are kept
    held_all_at_once(mirrored)
    computed(mirrored, 2.2 * LOOK_S / SHARE)
    mirrored.history.follow(mirrored.first, lambda: None)
    assert mirrored.blocks == 5  # 0.188 s


def test_few_copies_are_not_worth_a_wait_for_steps_under_way(mirrored: Mirrored) -> None:
    held_all_at_once(mirrored)
    waits: list[int] = []
    computed(mirrored, 2 * LOOK_S / SHARE)
    mirrored.history.follow(mirrored.first, lambda: waits.append(mirrored.blocks), 1)
    assert (mirrored.blocks, waits) == (0, [])
    computed(mirrored, LOOK_S / SHARE)
    mirrored.history.follow(mirrored.first, lambda: waits.append(mirrored.blocks), 1)
    assert (mirrored.blocks, waits) == (3, [0])


def test_a_prompt_is_copied_once_it_is_computed(mirrored: Mirrored) -> None:
    seen = []
    for at, token in enumerate(TOKENS[:48]):
        mirrored.clock.now += 1e3
        with mirrored.history.step():  # time enough for all
            mirrored.clock.now += 1e3
        mirrored.engine.decode([token], at, outputs="last" if at == 47 else "none")
        seen.append(mirrored.blocks)
    assert set(seen) == {0}
    mirrored.hold(TOKENS[48:49], 48)
    assert mirrored.blocks == 3


def test_the_rest_is_copied_while_nobody_asks(mirrored: Mirrored) -> None:
    for at, token in enumerate(TOKENS[:64]):
        mirrored.engine.decode([token], at, outputs="none")
    mirrored.engine.copy_while_quiet(lambda: mirrored.blocks < 2)  # then somebody asks
    assert mirrored.blocks == 2
    mirrored.engine.copy_while_quiet(lambda: True)
    assert mirrored.blocks == 4
    mirrored.first.lost = True
    mirrored.hold([5], 64)
    assert mirrored.engine.computed_again == 0


def test_what_begins_alike_is_copied_once(mirrored: Mirrored) -> None:
    mirrored.hold(TOKENS[:32])
    mirrored.engine.kv_copy(0, 1, 0, 32)
    mirrored.hold(TOKENS[40:56], 32, sequence=1)
    mirrored.engine.answered([])
    assert mirrored.blocks == 3
    mirrored.first.lost = True
    mirrored.hold(TOKENS[32:33], 32)
    assert mirrored.engine.computed_again == 0


def test_no_more_is_held_than_may_be_and_what_is_in_use_comes_first() -> None:
    mirrored = Mirrored(3 * READ_TOKENS * TOKEN_BYTES)
    mirrored.hold(TOKENS[:64])
    mirrored.engine.answered([])
    assert mirrored.blocks == 3
    mirrored.engine.kv_remove(0, 16)
    mirrored.hold(TOKENS[:48], 16)
    mirrored.engine.answered([])
    assert mirrored.blocks == 3
    mirrored.first.lost = True
    mirrored.hold([5], 64)
    assert mirrored.history.restored_tokens == 48
    assert mirrored.engine.computed_again == 16
    mirrored.close()


def test_what_was_shifted_is_computed(mirrored: Mirrored) -> None:
    mirrored.hold(TOKENS[:64])
    mirrored.engine.kv_remove(0, 20, 40)
    mirrored.engine.kv_shift(0, 40, -1, -20)
    mirrored.hold(TOKENS[64:84], 44)
    mirrored.engine.answered([])
    mirrored.first.lost = True
    mirrored.hold([5], 64)
    assert mirrored.history.restored_tokens == 16
    assert mirrored.engine.computed_again == 48


def test_a_copy_of_what_was_shifted_is_computed(mirrored: Mirrored) -> None:
    mirrored.hold(TOKENS[:64])
    mirrored.engine.kv_remove(0, 20, 40)
    mirrored.engine.kv_shift(0, 40, -1, -20)
    mirrored.engine.kv_copy(0, 1, 0, 44)
    mirrored.hold(TOKENS[64:68], 44, sequence=1)
    mirrored.engine.answered([])
    mirrored.first.lost = True
    mirrored.hold([5], 44)
    assert mirrored.history.restored_tokens == 16
    assert mirrored.engine.computed_again == 28 + 4


@pytest.mark.parametrize(("start", "restored"), [(30, 16), (20, 48)])
def test_what_was_shifted_is_so_until_it_is_removed(mirrored: Mirrored, start: int, restored: int) -> None:
    mirrored.hold(TOKENS[:64])
    mirrored.engine.kv_remove(0, 20, 40)
    mirrored.engine.kv_shift(0, 40, -1, -20)
    mirrored.engine.kv_remove(0, start)
    mirrored.hold(TOKENS[start:50], start)
    mirrored.engine.answered([])
    mirrored.first.lost = True
    mirrored.hold([5], 50)
    assert mirrored.history.restored_tokens == restored
    assert mirrored.engine.computed_again == 50 - restored


def test_what_two_sequences_shifted_stays_shifted_in_the_copy() -> None:
    """From the first position on that either of them had shifted."""
    history = MirroredHistory(TOKEN_BYTES, 1 << 20)
    for sequence, first in ((0, 10), (1, 5)):
        history.add(sequence, 0, TOKENS[:30])
        history.remove(sequence, first - 2, first)
        history.shift(sequence, first, -1, -2)
    assert [len(history._exact(sequence)) for sequence in (0, 1)] == [8, 3]
    history.copy(0, 1, 20)
    assert len(history._exact(1)) == 3
    history.copy(1, 0, 20)
    assert len(history._exact(0)) == 3


def test_nothing_is_shifted_where_all_was_forgotten(mirrored: Mirrored) -> None:
    mirrored.hold(TOKENS[:4])
    mirrored.engine.kv_shift(0, 2, -1, 1)
    mirrored.engine.kv_clear()
    mirrored.hold(TOKENS[40:88])
    mirrored.engine.answered([])
    mirrored.first.lost = True
    mirrored.hold([5], 48)
    assert mirrored.history.restored_tokens == 48


def test_who_parts_from_another_within_a_block_gets_whole_blocks(mirrored: Mirrored) -> None:
    mirrored.hold(TOKENS[:48])
    mirrored.engine.kv_copy(0, 1, 0, 20)
    mirrored.hold(TOKENS[50:78], 20, sequence=1)
    mirrored.engine.answered([])
    assert mirrored.blocks == 5
    mirrored.first.lost = True
    mirrored.hold([5], 48)
    assert mirrored.history.restored_tokens == 48 + 28
    assert mirrored.engine.computed_again == 0
    found = mirrored.engine.decode([5], 48, sequence=1)
    with Engine(MODEL_PATH, OPTIONS) as undisturbed:
        for at, token in enumerate([*TOKENS[:20], *TOKENS[50:78], 5]):
            wanted = undisturbed.decode([token], at).copy()
    np.testing.assert_allclose(found, wanted, atol=1e-3)  # no position is held twice


def test_what_was_removed_is_not_given(mirrored: Mirrored) -> None:
    mirrored.hold(TOKENS[:32])
    mirrored.engine.answered([])
    mirrored.engine.kv_remove(0, 10)
    mirrored.hold(TOKENS[50:80], 10)
    mirrored.first.lost = True
    mirrored.hold([5], 40)
    assert mirrored.history.restored_tokens + mirrored.engine.computed_again == 40
    assert mirrored.engine.computed_again >= 8


def test_nothing_is_held_where_nobody_can_be_lost(mirrored: Mirrored) -> None:
    mirrored.hold(TOKENS[:32])
    mirrored.engine.answered([])
    mirrored.history.active = False
    mirrored.engine.answered([])
    assert mirrored.history.held_bytes == 0
    mirrored.history.active = True
    mirrored.engine.answered([])
    assert mirrored.blocks == 2


def test_room_is_that_of_a_context_or_a_quarter_of_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    file = GgufFile.open(MODEL_PATH)
    with Engine(MODEL_PATH, OPTIONS) as engine:
        assert MirroredHistory.of(file, OPTIONS, engine.model, None).max_bytes == 256 * TOKEN_BYTES
        assert MirroredHistory.of(file, OPTIONS, engine.model, 1 << 20).max_bytes == 1 << 18
        wide = replace(OPTIONS, kv_type="f32")
        assert MirroredHistory.of(file, wide, engine.model, None).token_bytes == 2 * TOKEN_BYTES
        monkeypatch.setattr(engine.model, "is_recurrent", True)
        with pytest.raises(CannotSlice, match="recurrent"):
            MirroredHistory.of(file, OPTIONS, engine.model, None)
