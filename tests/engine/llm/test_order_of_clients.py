"""The order in which requests of several clients begin, and which requests make room. Tokens never depend on it."""

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edge.llm.continuation import Request
from edge.llm.engine import Engine
from edge.llm.options import EngineOptions
from edge.llm.queues import RESERVED_S
from edge.llm.scheduler import Scheduler
from edge.models.demo import MODEL_PATH

N_TOKENS = 6


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    # Sums whose order does not change the tokens: where a sequence lies in the cache depends on the others.
    with Engine(MODEL_PATH, EngineOptions(threads=1, context=512, sequences=3, kv_type="f32")) as engine:
        yield engine


@pytest.fixture
def scheduler(engine: Engine) -> Iterator[Scheduler]:
    with Scheduler(engine) as scheduler:
        yield scheduler


def request(client: str, tag: float, priority: int = 0, n_tokens: int = N_TOKENS, start: int = 5) -> Request:
    return Request([start, 7, 9], n_tokens, ends=False, client=client, order=(priority, tag))


def running(scheduler: Scheduler) -> list[int]:
    return sorted(state.number for state in scheduler.queues.running)


def begun(scheduler: Scheduler) -> list[int]:
    """Run all requests, and return their numbers in the order of their first tokens."""
    numbers = list[int]()
    while scheduler.busy:
        numbers += [event.request for event in scheduler.step() if event.request not in numbers]
    return numbers


def test_urgent_requests_begin_first_and_then_the_fair_order(engine: Engine) -> None:
    with Scheduler(engine, slots=1) as scheduler:
        orders = [("a", 0, 0), ("a", 900, 0), ("b", 100, 0), ("b", 200, 2), ("a", 900, -1), ("b", 300, 0)]
        numbers = [scheduler.add(request(client, tag, priority)) for client, tag, priority in orders]
        assert begun(scheduler) == [numbers[i] for i in (4, 0, 2, 5, 1, 3)]


def test_a_client_without_answers_gets_the_newest_slot_of_the_busiest(scheduler: Scheduler) -> None:
    heavy = [scheduler.add(request("heavy", 10 * n, n_tokens=40)) for n in range(5)]
    scheduler.step()
    assert running(scheduler) == heavy[:3]
    light = [scheduler.add(request("light", 20 + n, n_tokens=40)) for n in range(2)]
    scheduler.step()
    assert running(scheduler) == [*heavy[:2], light[0]]
    assert scheduler.queues.preemptions["foreground"] == 1
    for _ in range(3):  # its second request waits for its turn
        scheduler.step()
        assert running(scheduler) == [*heavy[:2], light[0]]
    other = scheduler.add(request("other", 20))
    scheduler.step()
    assert running(scheduler) == [heavy[0], light[0], other]
    third = scheduler.add(request("third", 20))
    scheduler.step()  # all clients have one answer
    assert running(scheduler) == [heavy[0], light[0], other]
    assert third in [state.number for state in scheduler.queues.waiting]


def test_an_unnamed_client_displaces_nobody_and_is_not_displaced(scheduler: Scheduler) -> None:
    own = [scheduler.add(request("", 0, n_tokens=40)) for _ in range(3)]
    scheduler.step()
    scheduler.add(request("named", 0))
    scheduler.step()
    assert running(scheduler) == own


@pytest.mark.parametrize(("first", "second", "displaces"), [(1, 0, True), (0, 0, False), (0, 1, False), (0, -1, True)])
def test_a_request_displaces_only_less_urgent_ones_of_its_client(
    scheduler: Scheduler, first: int, second: int, displaces: bool
) -> None:
    own = [scheduler.add(request("a", 0, first, n_tokens=40)) for _ in range(3)]
    scheduler.step()
    new = scheduler.add(request("a", 0, second))
    scheduler.step()
    assert running(scheduler) == ([*own[:2], new] if displaces else own)


def test_a_less_urgent_client_without_answers_waits(scheduler: Scheduler) -> None:
    own = [scheduler.add(request("a", 0, n_tokens=40)) for _ in range(3)]
    scheduler.step()
    scheduler.add(request("b", 0, 1))
    scheduler.step()
    assert running(scheduler) == own


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(0, 50), st.integers(-1, 1), st.integers(3, 8), st.integers(0, 6)),
        min_size=1,
        max_size=12,
    )
)
def test_tokens_are_those_of_each_request_alone(engine: Engine, arrivals: list[tuple[str, int, int, int, int]]) -> None:
    """Requests come between steps, in any order and urgency; each ends with the tokens that it has alone."""
    with Scheduler(engine) as scheduler:
        tokens: dict[int, list[int]] = {}
        starts: dict[int, int] = {}

        def step() -> None:
            for event in scheduler.step():
                if event.token_id is not None:
                    tokens[event.request].append(event.token_id)

        for client, tag, priority, start, n_steps in arrivals:
            number = scheduler.add(request(client, tag, priority, start=start))
            tokens[number], starts[number] = [], start
            for _ in range(n_steps):
                step()
        while scheduler.busy:
            step()
        assert not scheduler.queues.all
    with Scheduler(engine, slots=1) as alone:
        by_start = {start: alone.run([request("", 0, start=start)])[0] for start in set(starts.values())}
    assert tokens == {number: by_start[start] for number, start in starts.items()}


class Clock:
    """A clock that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_slot_of_a_client_waits_shortly_for_its_next_request(engine: Engine) -> None:
    clock = Clock()
    with Scheduler(engine, clock=clock) as scheduler:
        heavy = [scheduler.add(request("heavy", n, n_tokens=60)) for n in range(4)]
        scheduler.step()
        light = scheduler.add(request("light", 5, n_tokens=3))
        while light in [state.number for state in scheduler.queues.all]:
            scheduler.step()
        scheduler.step()
        assert running(scheduler) == heavy[:2]
        light = scheduler.add(request("light", 6, n_tokens=3))
        scheduler.step()
        assert running(scheduler) == [*heavy[:2], light]
        assert scheduler.queues.preemptions["foreground"] == 1
        while light in [state.number for state in scheduler.queues.all]:
            scheduler.step()
        clock.now += RESERVED_S
        scheduler.step()
        assert running(scheduler) == heavy[:3]


@pytest.mark.parametrize(("heavy", "light"), [("a", "a"), ("", "b"), ("a", "")])
def test_no_slot_waits_for_the_same_or_an_unnamed_client(engine: Engine, heavy: str, light: str) -> None:
    with Scheduler(engine, clock=Clock()) as scheduler:
        short = scheduler.add(request(light, 0, n_tokens=3))
        numbers = [scheduler.add(request(heavy, n, n_tokens=60)) for n in range(3)]
        while short in [state.number for state in scheduler.queues.all]:
            scheduler.step()
        scheduler.step()
        assert running(scheduler) == numbers


def rows_of_steps(engine: Engine, scheduler: Scheduler, n: int) -> list[int]:
    """Return the number of rows of each of the next steps."""
    rows = list[int]()
    submit = engine.submit

    def submit_counted(tokens: list[int], *more: Any, **others: Any) -> None:
        rows.append(len(tokens))
        submit(tokens, *more, **others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "submit", submit_counted)
        for _ in range(n):
            scheduler.step()
    return rows


def test_the_short_prompt_of_a_light_client_has_a_step_of_its_own(engine: Engine, scheduler: Scheduler) -> None:
    for n in range(2):
        scheduler.add(request("heavy", n, n_tokens=40))
    scheduler.step()
    scheduler.add(request("light", 5))
    assert rows_of_steps(engine, scheduler, 2) == [3, 3]  # its prompt, and then one row of each request


@pytest.mark.parametrize("clients", [("a", "b", "c"), ("a", "a", "a"), ("", "", "b"), ("", "", "")])
def test_prompts_share_steps_if_no_other_client_has_several_requests(
    engine: Engine, scheduler: Scheduler, clients: tuple[str, str, str]
) -> None:
    for n, client in enumerate(clients[:2]):
        scheduler.add(request(client, n, n_tokens=40))
    scheduler.step()
    scheduler.add(request(clients[2], 5))
    assert rows_of_steps(engine, scheduler, 1) == [5]


def test_answers_go_on_after_each_step_of_a_prompt_alone(engine: Engine, scheduler: Scheduler) -> None:
    for n in range(2):
        scheduler.add(request("heavy", n, n_tokens=60))
    scheduler.step()
    rows = list[int]()
    for n in range(4):  # each request of the light client comes when the previous one has begun
        scheduler.add(request(f"light {n}", 5, n_tokens=1))
        rows += rows_of_steps(engine, scheduler, 1)
    assert rows == [3, 5, 3, 5]
