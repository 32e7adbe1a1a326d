"""Keys and values that are copied while an engine computes, and given to the one that takes over."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from edge.demo import MODEL_PATH
from edge.errors import EngineError
from edge.llama.llama import Batch
from edge.llm.continuation import Request
from edge.llm.engine import Engine
from edge.llm.interface import Outputs
from edge.llm.options import EngineOptions
from edge.llm.scheduler import Scheduler
from edge.llm.states import READ_TOKENS
from edge.parallel.mirror import SHARE, Mirror, mirror_of
from quant.gguf.file import GgufFile
from tests.support.replaceable import replaceable

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

    def decode_rows(self, rows: Batch, n: int) -> None:
        if self.lost:
            raise EngineError("lost")
        self.computed += n
        super().decode_rows(rows, n)

    def chunk(self, n: int) -> int:
        return 1  # rows of a batch are computed by other kernels, and so to other last bits


class Mirrored:
    """An engine with another one in reserve, and the scheduler that uses it."""

    def __init__(self, max_bytes: int = 1 << 20, copies: bool = True) -> None:
        self.clock = Clock()
        self.mirror = Mirror(TOKEN_BYTES, max_bytes, self.clock)
        self.first, self.second = Mortal(MODEL_PATH, OPTIONS), Mortal(MODEL_PATH, OPTIONS)
        self.engine = replaceable(self.first, lambda _: self.second, self.mirror if copies else None)
        self.scheduler = Scheduler(self.engine, keep=True)
        self.scheduler.step()  # the cache is its own from now on
        self.slots = self.scheduler.slots.all

    def hold(self, tokens: Sequence[int], start: int = 0, sequence: int = 0, outputs: Outputs = "last") -> None:
        slot = self.slots[sequence]
        assert len(slot.tokens) == start
        for token in tokens:
            slot.decode([token], outputs)

    def ask(self, token: int, sequence: int = 0) -> float:
        """Ask what follows what a slot holds and one more token: the logarithm of its probability."""
        return answer_s(self.scheduler, [*self.slots[sequence].tokens, token])

    @property
    def computed_again(self) -> int:
        return self.engine.replacements.computed_again

    @property
    def blocks(self) -> int:
        return self.mirror.held_bytes // (READ_TOKENS * TOKEN_BYTES)

    def close(self) -> None:
        self.first.close()
        self.second.close()


def answer_s(scheduler: Scheduler, prompt: list[int]) -> float:
    scheduler.add(Request(prompt, 1, logprobs=0, ends=False))
    results: list[float] = []
    while scheduler.busy:
        results += [event.logprobs.chosen for event in scheduler.step() if event.logprobs is not None]
    [logprob] = results
    return logprob


def undisturbed(prompt: list[int]) -> float:
    with Mortal(MODEL_PATH, OPTIONS) as engine:
        return answer_s(Scheduler(engine), prompt)


@pytest.fixture
def mirrored() -> Iterator[Mirrored]:
    pair = Mirrored()
    yield pair
    pair.close()


def test_who_takes_over_computes_less_than_a_block(mirrored: Mirrored) -> None:
    mirrored.hold(TOKENS[:70])
    mirrored.engine.answered()
    assert mirrored.mirror.held_bytes == mirrored.mirror.copied_bytes == 64 * TOKEN_BYTES
    mirrored.first.lost = True
    result = mirrored.ask(TOKENS[70])
    assert mirrored.computed_again == 6
    assert mirrored.second.computed == 7
    assert mirrored.mirror.restored_tokens == 64
    assert result == undisturbed(TOKENS[:71])  # to the last bit


def test_without_a_copy_all_is_computed() -> None:
    mirrored = Mirrored(copies=False)
    mirrored.hold(TOKENS[:70])
    mirrored.engine.answered()
    mirrored.first.lost = True
    mirrored.ask(5)
    assert mirrored.computed_again == 70
    mirrored.close()


def computed(mirrored: Mirrored, seconds: float) -> None:
    """A step that takes so long."""
    with mirrored.mirror.step():
        mirrored.clock.now += seconds - LOOK_S


def held_all_at_once(mirrored: Mirrored) -> None:
    """As if the tokens had been decoded in no time."""
    mirrored.slots[0].tokens.extend(TOKENS)
    for at, token in enumerate(TOKENS):
        mirrored.first.decode([token], at)


def test_a_copy_takes_a_small_share_of_the_time(mirrored: Mirrored) -> None:
    held_all_at_once(mirrored)
    mirrored.mirror.follow(mirrored.first, mirrored.slots, lambda: None)
    assert mirrored.blocks == 0
    computed(mirrored, 1.5 * LOOK_S / SHARE)  # pays for one block, and begins a second one
    mirrored.mirror.follow(mirrored.first, mirrored.slots, lambda: None)
    assert mirrored.blocks == 2
    assert mirrored.mirror.copied_s == pytest.approx(2 * LOOK_S)
    mirrored.clock.now += 1e6  # however long nobody asked for anything
    mirrored.mirror.follow(mirrored.first, mirrored.slots, lambda: None)
    assert mirrored.blocks == 2
    computed(mirrored, 1.6 * LOOK_S / SHARE)  # half a block was copied before its time
    mirrored.mirror.follow(mirrored.first, mirrored.slots, lambda: None)
    assert mirrored.blocks == 2 + 2


def test_a_long_prompt_pays_for_its_own_copy_and_answers_save_up_little(mirrored: Mirrored) -> None:
    computed(mirrored, 1e6)
    mirrored.mirror.follow(mirrored.first, mirrored.slots, lambda: None)  # nothing to copy: 0.1 s are kept
    held_all_at_once(mirrored)
    computed(mirrored, 2.2 * LOOK_S / SHARE)
    mirrored.mirror.follow(mirrored.first, mirrored.slots, lambda: None)
    assert mirrored.blocks == 5  # 0.188 s


def test_few_copies_are_not_worth_a_wait_for_steps_under_way(mirrored: Mirrored) -> None:
    held_all_at_once(mirrored)
    waits: list[int] = []
    computed(mirrored, 2 * LOOK_S / SHARE)
    mirrored.mirror.follow(mirrored.first, mirrored.slots, lambda: waits.append(mirrored.blocks), 1)
    assert (mirrored.blocks, waits) == (0, [])
    computed(mirrored, LOOK_S / SHARE)
    mirrored.mirror.follow(mirrored.first, mirrored.slots, lambda: waits.append(mirrored.blocks), 1)
    assert (mirrored.blocks, waits) == (3, [0])


def test_a_prompt_is_copied_once_it_is_computed(mirrored: Mirrored) -> None:
    seen = []
    for at, token in enumerate(TOKENS[:48]):
        mirrored.clock.now += 1e3
        with mirrored.mirror.step():  # time enough for all
            mirrored.clock.now += 1e3
        mirrored.hold([token], at, outputs="last" if at == 47 else "none")
        seen.append(mirrored.blocks)
    assert set(seen) == {0}
    mirrored.hold(TOKENS[48:49], 48)
    assert mirrored.blocks == 3


def test_the_rest_is_copied_while_nobody_asks(mirrored: Mirrored) -> None:
    mirrored.hold(TOKENS[:64], outputs="none")
    mirrored.engine.replacements.copy_while_quiet(lambda: mirrored.blocks < 2)  # then somebody asks
    assert mirrored.blocks == 2
    mirrored.engine.replacements.copy_while_quiet(lambda: True)
    assert mirrored.blocks == 4
    mirrored.first.lost = True
    mirrored.ask(5)
    assert mirrored.computed_again == 0


def test_what_begins_alike_is_copied_once(mirrored: Mirrored) -> None:
    mirrored.hold(TOKENS[:32])
    mirrored.slots[1].copy_from(mirrored.slots[0])
    mirrored.hold(TOKENS[40:56], 32, sequence=1)
    mirrored.engine.answered()
    assert mirrored.blocks == 3
    mirrored.first.lost = True
    mirrored.ask(TOKENS[32])
    assert mirrored.computed_again == 0


def test_no_more_is_held_than_may_be_and_what_is_in_use_comes_first() -> None:
    mirrored = Mirrored(3 * READ_TOKENS * TOKEN_BYTES)
    mirrored.hold(TOKENS[:64])
    mirrored.engine.answered()
    assert mirrored.blocks == 3
    mirrored.slots[0].cut(16)
    mirrored.hold(TOKENS[:48], 16)
    mirrored.engine.answered()
    assert mirrored.blocks == 3
    mirrored.first.lost = True
    mirrored.ask(5)
    assert mirrored.mirror.restored_tokens == 48
    assert mirrored.computed_again == 16
    mirrored.close()


def test_what_was_shifted_is_computed(mirrored: Mirrored) -> None:
    mirrored.hold(TOKENS[:64])
    mirrored.slots[0].drop(20, 20)
    mirrored.hold(TOKENS[64:84], 44)
    mirrored.engine.answered()
    mirrored.first.lost = True
    mirrored.ask(5)
    assert mirrored.mirror.restored_tokens == 16
    assert mirrored.computed_again == 48


def test_a_copy_of_what_was_shifted_is_computed(mirrored: Mirrored) -> None:
    mirrored.hold(TOKENS[:64])
    mirrored.slots[0].drop(20, 20)
    mirrored.slots[1].copy_from(mirrored.slots[0])
    mirrored.hold(TOKENS[64:68], 44, sequence=1)
    mirrored.engine.answered()
    mirrored.first.lost = True
    mirrored.ask(5, sequence=1)
    assert mirrored.mirror.restored_tokens == 16
    assert mirrored.computed_again == 28 + 4


@pytest.mark.parametrize(("start", "restored"), [(30, 16), (20, 48)])
def test_what_was_shifted_is_so_until_it_is_removed(mirrored: Mirrored, start: int, restored: int) -> None:
    mirrored.hold(TOKENS[:64])
    mirrored.slots[0].drop(20, 20)
    mirrored.slots[0].cut(start)
    mirrored.hold(TOKENS[start:50], start)
    mirrored.engine.answered()
    mirrored.first.lost = True
    mirrored.ask(5)
    assert mirrored.mirror.restored_tokens == restored
    assert mirrored.computed_again == 50 - restored


def test_nothing_is_shifted_where_all_was_forgotten(mirrored: Mirrored) -> None:
    mirrored.hold(TOKENS[:4])
    mirrored.slots[0].drop(1, 1)
    mirrored.slots[0].cut(0)
    mirrored.hold(TOKENS[40:88])
    mirrored.engine.answered()
    mirrored.first.lost = True
    mirrored.ask(5)
    assert mirrored.mirror.restored_tokens == 48


def test_who_parts_from_another_within_a_block_gets_whole_blocks(mirrored: Mirrored) -> None:
    mirrored.hold(TOKENS[:48])
    mirrored.slots[1].copy_from(mirrored.slots[0])
    mirrored.slots[1].cut(20)
    mirrored.hold(TOKENS[50:78], 20, sequence=1)
    mirrored.engine.answered()
    assert mirrored.blocks == 5
    mirrored.first.lost = True
    other = [*mirrored.slots[1].tokens, 5]
    mirrored.ask(5)
    result = answer_s(mirrored.scheduler, other)
    assert mirrored.mirror.restored_tokens == 48 + 28
    assert mirrored.computed_again == 0
    assert result == pytest.approx(undisturbed(other), abs=1e-3)  # no position is held twice


def test_what_was_removed_is_not_given(mirrored: Mirrored) -> None:
    mirrored.hold(TOKENS[:32])
    mirrored.engine.answered()
    mirrored.slots[0].cut(10)
    mirrored.hold(TOKENS[50:80], 10)
    mirrored.first.lost = True
    mirrored.ask(5)
    assert mirrored.mirror.restored_tokens + mirrored.computed_again == 40
    assert mirrored.computed_again >= 8


def test_nothing_is_held_where_nobody_can_be_lost(mirrored: Mirrored) -> None:
    mirrored.hold(TOKENS[:32])
    mirrored.engine.answered()
    mirrored.mirror.active = False
    mirrored.engine.answered()
    assert mirrored.mirror.held_bytes == 0
    mirrored.mirror.active = True
    mirrored.engine.answered()
    assert mirrored.blocks == 2


def test_room_is_that_of_a_context_or_a_quarter_of_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    file = GgufFile.open(MODEL_PATH)
    with Engine(MODEL_PATH, OPTIONS) as engine:
        wide = replace(OPTIONS, kv_type="f32")
        cases = ((OPTIONS, None), (OPTIONS, 1 << 20), (wide, None))
        free, budgeted, wider = (mirror_of(file, options, engine.model, budget) for options, budget in cases)
        assert isinstance(free, Mirror)
        assert isinstance(budgeted, Mirror)
        assert isinstance(wider, Mirror)
        assert (free.max_bytes, budgeted.max_bytes) == (256 * TOKEN_BYTES, 1 << 18)
        assert wider.token_bytes == 2 * TOKEN_BYTES
        monkeypatch.setattr(engine.model, "is_recurrent", True)
        assert "recurrent" in str(mirror_of(file, OPTIONS, engine.model, None))
