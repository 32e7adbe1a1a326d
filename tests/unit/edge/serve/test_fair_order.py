"""Property tests of the fair order of clients: no client waits for the many requests of another one."""

from hypothesis import given
from hypothesis import strategies as st

from edge.serve.fair_order import FairOrder

REQUESTS = st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 1000)), min_size=1, max_size=60)


def served(requests: list[tuple[str, int]], n_running: int = 1) -> list[tuple[str, int]]:
    """Return the requests in the order in which they begin if all of them come at once."""
    order = FairOrder()
    waiting = [(order.tag(client, cost), number) for number, (client, cost) in enumerate(requests)]
    done = []
    for tag, number in sorted(waiting):
        order.begun(tag)
        done.append(requests[number])
    return done


@given(REQUESTS)
def test_a_clients_requests_keep_their_order(requests: list[tuple[str, int]]) -> None:
    for client in "abc":
        assert [own for own in served(requests) if own[0] == client] == [own for own in requests if own[0] == client]


@given(REQUESTS)
def test_waiting_clients_get_equal_work(requests: list[tuple[str, int]]) -> None:
    """While two clients wait, their work differs by at most the largest request of each (Goyal et al., theorem 1)."""
    most = {client: max((cost for c, cost in requests if c == client), default=0) for client in "abc"}
    done = dict.fromkeys("abc", 0)
    left = {client: sum(c == client for c, _ in requests) for client in "abc"}
    for client, cost in served(requests):
        waiting = [c for c in "abc" if left[c]]
        for a in waiting:
            for b in waiting:
                assert done[a] - done[b] <= most[a] + most[b]
        done[client] += cost
        left[client] -= 1


@given(REQUESTS, st.integers(1, 1000))
def test_a_new_client_is_before_all_that_wait_of_others(requests: list[tuple[str, int]], cost: int) -> None:
    order = FairOrder()
    tags = sorted(order.tag("heavy", own) for _, own in requests)
    order.begun(tags[0])
    assert order.tag("new", cost) == tags[0]
    assert all(tag > tags[0] for tag in tags[1:])


@given(st.integers(1, 20), st.integers(1, 20), st.integers(1, 1000))
def test_work_of_waiting_clients_is_in_the_ratio_of_their_weights(a: int, b: int, cost: int) -> None:
    order = FairOrder()
    tags = sorted(
        (order.tag(client, cost, weight), client) for client, weight in {"a": a, "b": b}.items() for _ in range(100)
    )
    begun = [client for _, client in tags[: 2 * (a + b)]]
    assert abs(begun.count("a") / a - begun.count("b") / b) <= 1 / a + 1 / b


def test_a_client_that_was_away_saves_up_nothing() -> None:
    order = FairOrder()
    for _ in range(5):
        order.begun(order.tag("a", 100))
    first, second = order.tag("b", 100), order.tag("a", 100)
    assert (first, second) == (400, 500)
    order.begun(second)
    assert order.tag("b", 100) == 500


def test_clients_whose_requests_have_begun_are_forgotten() -> None:
    order = FairOrder()
    for number in range(100):
        order.begun(order.tag(str(number), 1))
        order.begun(order.tag("always", 10))
    assert len(order._ends) <= 2
