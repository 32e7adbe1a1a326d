"""Test claims of other processes while weights are loaded or changed: they are answered at once, and no memory is
counted twice.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from edge.errors import NotEnoughMemory
from edge.llm.engine import Engine
from edge.weights.arena import ElasticArena
from edge.weights.elastic.governor import GROW_AFTER_S
from edge.weights.elastic.share import MemoryShare, MemoryUse
from edge.weights.elastic.shares import Member, MemoryShares
from edge.weights.elastic.sizes import Preference
from edge.weights.elastic.weights import ElasticWeights
from tests.engine.elastic.conftest import Elastic, Memory, followed
from tests.engine.elastic.test_changes import budgets
from tests.support.paging import MIB, OPTIONS, PROMPT
from tests.support.thorough import some

BUDGET = 100 * MIB  # the largest size is in memory whole, and as much again is for others
LEAST = 42 * MIB


@dataclass
class Others:
    """A budget that one model divides with members whose claims a test makes. Each report of the model is looked at."""

    memory: Memory = field(default_factory=lambda: Memory(1 << 30))
    members: list[Member] = field(default_factory=list)
    arenas: list[ElasticArena] = field(default_factory=list)  # of the model
    n_bytes: list[int] = field(default_factory=list)  # that the model reported

    def __post_init__(self) -> None:
        self.shares = MemoryShares(lambda: BUDGET, lambda: self.memory.now_s)
        share = MemoryShare(lambda: self.memory.now_s)
        self.model = self.shares.join("model", share.follow)
        share.join(lambda least, most: self.shares.claim(self.model, least, most, "model"), self._report)
        self.memory.room = replace(self.memory.room, share=share)

    def claim(self, n_bytes: int) -> Member:
        """Let one more come that needs so much."""
        member = self.shares.join("other", lambda *limit: None)
        self.members.append(member)
        self.shares.claim(member, n_bytes, n_bytes, "other")
        return member

    def leave(self) -> None:
        for member in self.members:
            self.shares.leave(member)
        self.members.clear()

    def _report(self, use: MemoryUse) -> None:
        self.n_bytes.append(use.resident)
        places = {space for arena in self.arenas for space, _ in arena._places.values()}
        assert sum(space.n_bytes for space in places) <= use.resident - self.rest
        self.shares.report(self.model, use)
        assert self.model.reserved + sum(member.limit for member in self.members) <= BUDGET

    rest = 8 * MIB  # the model takes at least so much beside the weights that stay


@contextmanager
def loaded(
    others: Others, elastic: Elastic, shown: Callable[[float], None], prefer: Preference = "speed"
) -> Iterator[tuple[Engine, ElasticWeights]]:
    """Load the model, while `shown` is called at each tensor, a second after the one before."""

    class Arena(ElasticArena):
        def __init__(self) -> None:
            super().__init__()
            others.arenas.append(self)

    def show(fraction: float) -> None:
        others.memory.now_s += 1.0
        shown(fraction)

    options = replace(OPTIONS, least_memory=LEAST, memory=BUDGET, prefer=prefer)
    with pytest.MonkeyPatch.context() as patch, followed(others.memory):
        patch.setattr("edge.weights.elastic.weights.ElasticArena", Arena)
        with Engine(elastic.path, options, progress=show) as engine:
            assert isinstance(engine.paging, ElasticWeights)
            yield engine, engine.paging


def ignore(fraction: float) -> None:
    pass


@dataclass
class Claims:
    """Claims that come at some of the tensors, each of so much."""

    others: Others
    n_bytes: int
    at: tuple[int, ...]
    n_shown: int = 0
    members: dict[int, Member] = field(default_factory=dict)  # by tensor
    n_granted: int = 0  # before the next tensor but one

    def __call__(self, fraction: float) -> None:
        self.others.memory.now_s += 1.0
        self.n_shown += 1
        if self.n_shown in self.at:
            self.members[self.n_shown] = member = self.others.claim(self.n_bytes)
            assert member.limit < self.n_bytes  # the model has to give some back
        before = self.members.get(self.n_shown - 2)
        self.n_granted += before is not None and before.limit == self.n_bytes


@pytest.fixture(scope="module")
def model(elastic: Callable[[str], Elastic]) -> Elastic:
    return elastic("llama")


@pytest.fixture(scope="module")
def at(model: Elastic) -> dict[int, int]:
    """Budgets of the sizes."""
    with loaded(Others(), model, ignore) as (_, weights):
        return {**budgets(weights.sizes), 0: weights.sizes.most}


def check(model: Elastic, engine: Engine, weights: ElasticWeights, others: Others) -> None:
    """See that what is loaded is right, and within the limit."""
    assert weights._intact
    assert weights.choice.n_bytes <= others.n_bytes[-1] <= others.model.limit
    assert all(member.limit == member.least for member in others.members)
    with Engine(model.static[weights.choice.number], OPTIONS) as static:
        assert np.array_equal(engine.decode(PROMPT, 0), static.decode(PROMPT, 0))


@pytest.mark.parametrize("tensor", some(range(1, 30, 12), range(1, 30)))
def test_a_claim_while_a_model_is_loaded_waits_for_one_tensor(model: Elastic, at: dict[int, int], tensor: int) -> None:
    for number in (1, 2):
        others = Others()
        claims = Claims(others, BUDGET - at[number], (tensor,))
        with loaded(others, model, claims) as (engine, weights):
            assert claims.n_granted == 1
            check(model, engine, weights, others)


@pytest.mark.parametrize("tensor", some(range(1, 30, 12), range(1, 30)))
@pytest.mark.parametrize(("before", "after"), [(2, 0), (0, 1)])
def test_a_claim_while_weights_change_waits_for_one_tensor(
    model: Elastic, at: dict[int, int], before: int, after: int, tensor: int
) -> None:
    """Up and down, in a pass or between two."""
    for is_in_pass in (False, True):
        others = Others()
        with loaded(others, model, ignore) as (engine, weights):
            for number in (before, after):
                others.leave()
                others.claim(BUDGET - at[number])
                others.memory.is_now(weights, 1 << 30, GROW_AFTER_S)
                if number == before:
                    weights.follow()
            assert weights.choice.number == before
            weights._shown = claims = Claims(others, at[after] - at[2], (tensor,))
            if is_in_pass:
                engine.decode([7], 0)
                engine.kv_clear()
            else:
                weights.follow()
            assert claims.n_granted == 1
            weights._shown = None
            check(model, engine, weights, others)


def test_a_load_outlives_any_number_of_claims(model: Elastic, at: dict[int, int]) -> None:
    """Sessions that start meanwhile take a little each, and it reads less and less of what it pages."""
    others = Others()
    others.claim(BUDGET - at[0])
    claims = Claims(others, MIB // 8, tuple(range(1, 12)))
    with loaded(others, model, claims, "quality") as (engine, weights):
        assert claims.n_granted == len(claims.at)
        assert weights._governor.budget == others.model.limit
        assert weights.choice.is_like(weights.sizes.choose(others.model.limit))
        assert engine.memory.total >= weights.choice.n_bytes - MIB
        check(model, engine, weights, others)


def test_who_loads_counts_as_in_use(model: Elastic) -> None:
    others = Others()
    with loaded(others, model, ignore):
        assert others.model.busy > 0.9
        assert others.memory.now_s > 10


def test_a_load_that_has_no_room_any_more_says_so(model: Elastic) -> None:
    others = Others()

    def goes(fraction: float) -> None:
        others.memory.free = MIB

    with pytest.raises(NotEnoughMemory, match="in its smallest size"), loaded(others, model, goes):
        pass


def test_what_a_disk_that_is_gone_leaves_is_for_others(model: Elastic, at: dict[int, int]) -> None:
    others = Others()
    with loaded(others, model, ignore) as (_, weights), ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        others.claim(BUDGET - at[1])

        def fails(*_: object) -> int:
            raise OSError("the disk is gone")

        patch.setattr("edge.weights.direct_file.DirectFile.read", fails)
        weights.follow()
        assert not weights._intact
        assert others.members[-1].limit == BUDGET - at[1]
